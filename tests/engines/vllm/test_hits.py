"""The daemon's hit ratio of requests to vLLM, against the prompts' own count."""

from __future__ import annotations

import time

from kvstore import Client
from kvstore.client.connection import REPORT_S
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemon.hits import conversations, counted, figures, since
from tests.daemons import eventually
from tests.engines.vllm.engine import BLOCK_TOKENS, Engine, full_blocks, prompt


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts with shared prefixes, of whole blocks and some tokens more."""
    made = conversations(seed, prompts=14, longest=6)
    return [
        [token for block in blocks for token in prompt(1000 * seed + block, BLOCK_TOKENS)] + [7] * (n % 3)
        for n, blocks in enumerate(made)
    ]


def blocks_of(tokens: list[int]) -> list[tuple[int, ...]]:
    """What names each whole block: all tokens up to its end."""
    return [
        tuple(tokens[: at + BLOCK_TOKENS]) for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    ]


def test_requests_one_after_another(engine: Engine, daemon: LocalDaemon) -> None:
    prompts = prompts_of(61 if engine.mode == "async" else 62)
    truth = counted([blocks_of(tokens) for tokens in prompts])
    stored: set[tuple[int, ...]] = set()
    delivered = 0
    for tokens in prompts:
        blocks = blocks_of(tokens)
        found = next((i for i, block in enumerate(blocks) if block not in stored), len(blocks))
        # vLLM computes one token at least.
        delivered += min(found, full_blocks(len(tokens)) // BLOCK_TOKENS)
        stored.update(blocks)
    assert 0.3 < truth["found"] / truth["requested"] < 0.8
    with Client(daemon.url, deadline_s=30, strict=True) as client:
        time.sleep(1.5 * REPORT_S)  # of earlier lookups, see `LookedUp`
        before, tokens_before = figures(client), figures(client, "tokens")
        for tokens in prompts:
            engine.fresh([tokens], max_tokens=1)
        wanted = {**truth, "delivered": delivered, "missed": truth["requested"] - truth["found"]}
        assert eventually(lambda: since(before, figures(client)) == wanted), since(before, figures(client))
        in_tokens = since(tokens_before, figures(client, "tokens"))
        assert in_tokens == {what: n * BLOCK_TOKENS for what, n in wanted.items()}


def test_polled_preempted_and_concurrent_requests(engine: Engine, daemon: LocalDaemon) -> None:
    little = {"num_gpu_blocks_override": 33, "max_model_len": 1024, "max_num_seqs": 8}
    prompts = [prompt(640 + i, 250) for i in range(8)] * 2
    blocks = sum(len(blocks_of(tokens)) for tokens in prompts)
    with Client(daemon.url, deadline_s=30, strict=True) as client, engine.instead(**little):
        engine.fresh(prompts, max_tokens=1)
        time.sleep(1.5 * REPORT_S)
        before = figures(client)
        engine.fresh(prompts, max_tokens=96)
        assert engine("preemptions") > 0
        eventually(lambda: not client.status()["leases"])
        time.sleep(1.5 * REPORT_S)
        counts = since(before, figures(client))
        assert (counts["requested"], counts["found"]) == (blocks, blocks)
