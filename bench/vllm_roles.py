"""vllm-roles: time to the first token of a decode engine, compared with computing the prompt there.

A prefill engine in another process computes the prompt and promises its blocks, as a proxy for prefill and
decode asks it to. The clock starts with its answer, when its last blocks are still being stored. The prefix
cache of the decode engine is empty each time. The last block of a prompt is still computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

from bench.engines import llama, roles
from bench.harness import GIB, Bench, Result
from tests.engines.vllm.engine import Engine, full_blocks, prompt

CASES = ("256", "512", "1024", "2048")
"""Lengths of prompts in tokens."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per prompt length."""
    model = bench.pick(llama(hidden=1024, layers=12, kv_heads=16), llama(hidden=256, layers=2, kv_heads=4))
    with roles(bench, model, 4 * GIB) as (prefill, decode):
        seeds = count(1)
        for case in CASES:
            tokens = int(case)
            samples = (
                partial(_handed_over, prefill, decode, tokens, seeds),
                partial(_computed, decode, tokens, seeds),
            )
            rounds = bench.interleave(f"{case} tokens", samples, tokens / sum(map(int, CASES)))
            yield rounds.result(f"vllm-roles/{case}", "s", times_faster=1 / rounds.ratio(1))


def _handed_over(prefill: Engine, decode: Engine, tokens: int, seeds: Iterator[int], _: int) -> float:
    """Returns the seconds from the answer of the prefill engine to the first token of the decode engine."""
    decode("plug", connected=True)
    asked = [prompt(next(seeds), tokens)]
    assert decode("reset")
    [answer] = prefill.generate(asked, max_tokens=1, params=[{"do_remote_decode": True}], idle=False)
    params = answer["params"]
    assert params["remote_num_tokens"] == tokens
    # With it, vLLM would report the hits of the prefill engine.
    del params["remote_prefill_cached_tokens"]
    prefill.send("idle")
    [loaded] = decode.generate(asked, max_tokens=1, params=[params])
    prefill.receive()
    assert loaded["cached"] == full_blocks(tokens)
    assert decode("counts").get("lost", 0) == 0
    return float(loaded["answered_s"])


def _computed(decode: Engine, tokens: int, seeds: Iterator[int], _: int) -> float:
    decode("plug", connected=False)
    [answer] = decode.fresh([prompt(next(seeds), tokens)], max_tokens=1)
    assert answer["cached"] == 0
    return float(answer["answered_s"])
