"""vllm-ttft: time to the first token of a prompt of 2048 tokens, stored in full, against computing it.

vLLM's own prefix cache is empty each time. A stored prompt leaves its last block to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.engines import engine
from bench.harness import GIB, Bench, Result, Target
from tests.engines.vllm.engine import Engine, full_blocks, prompt

TOKENS = 2048


def run(bench: Bench) -> Iterator[Result]:
    """One line."""
    with engine(bench, hidden=1024, layers=12, kv_heads=16, dram_bytes=2 * GIB) as made:
        made.generate([prompt(1, TOKENS)], max_tokens=1)
        rounds = bench.interleave("vllm-ttft", (partial(_sample, made, True), partial(_sample, made, False)))
        yield rounds.result("vllm-ttft", "s", Target("<=", 0.1), times_faster=1 / rounds.ratio(1))


def _sample(made: Engine, stored: bool, _: int) -> float:
    made("plug", connected=stored)
    [answer] = made.fresh([prompt(1, TOKENS)], max_tokens=1)
    assert answer["cached"] == (full_blocks(TOKENS) if stored else 0)
    return float(answer["answered_s"])
