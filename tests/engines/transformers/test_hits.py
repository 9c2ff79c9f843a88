"""The daemon's hit ratio of calls of `generate`, against the prompts' own count."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore import Client
from kvstore.client.connection import REPORT_S
from kvstore_transformers import PrefixCache
from tests.daemon.hits import conversations, counted, figures, since
from tests.daemons import eventually
from tests.engines.transformers.models import BLOCK, generated, llama, tokens

Make = Callable[..., PrefixCache]


def prompts_of(seed: int, count: int = 20) -> list[list[int]]:
    """Prompts with shared prefixes, of whole blocks and some tokens more."""
    return [
        [token for block in blocks for token in tokens(BLOCK, seed=block)] + tokens(n % 5, seed=999)
        for n, blocks in enumerate(conversations(seed, count, longest=6))
    ]


def blocks_of(prompt: list[int]) -> list[tuple[int, ...]]:
    """What names each whole block: all tokens up to its end."""
    return [tuple(prompt[: at + BLOCK]) for at in range(0, len(prompt) - BLOCK + 1, BLOCK)]


def test_each_call_counts_once(cached: Make, client: Client) -> None:
    cache, prompts, delivered = cached(llama()), prompts_of(71), 0
    truth = counted([blocks_of(prompt) for prompt in prompts])
    assert 0.3 < truth["found"] / truth["requested"] < 0.8
    before = figures(client)
    for prompt in prompts:
        generated(cache, prompt, max_new_tokens=1)
        delivered += cache.last.restored_tokens // BLOCK
    assert delivered > 0.5 * truth["found"]
    wanted = {**truth, "delivered": delivered, "missed": truth["requested"] - truth["found"]}
    assert eventually(lambda: since(before, figures(client)) == wanted), since(before, figures(client))


def test_each_row_of_a_batch_is_a_prompt(cached: Make, client: Client) -> None:
    """The first row has nothing stored, so nothing is restored: the others were asked for all the same."""
    cache, known = cached(llama()), tokens(5 * BLOCK, seed=81)
    generated(cache, known, max_new_tokens=1)
    time.sleep(1.5 * REPORT_S)
    before = figures(client)
    generated(cache, tokens(5 * BLOCK, seed=82), known, known[: 3 * BLOCK], max_new_tokens=1)
    wanted = {"requested": 13, "found": 8, "missed": 5}
    assert eventually(lambda: since(before, figures(client)) == wanted), since(before, figures(client))
