"""vllm-ttft: time to the first token of a stored prompt, compared with computing it, by prompt length.

The prefix cache of vLLM is empty each time. The last block of a stored prompt is still computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.engines import engine
from bench.harness import GIB, Bench, Result, Target
from tests.engines.vllm.engine import Engine, full_blocks, prompt

CASES = ("256", "512", "1024", "2048")
"""Lengths of prompts in tokens."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per prompt length."""
    with engine(bench, hidden=1024, layers=12, kv_heads=16, dram_bytes=2 * GIB) as made:
        for case in CASES:
            tokens = int(case)
            made.generate([prompt(tokens, tokens)], max_tokens=1)
            samples = (partial(_sample, made, tokens, True), partial(_sample, made, tokens, False))
            rounds = bench.interleave(f"{case} tokens", samples, tokens / sum(map(int, CASES)))
            target = Target("<=", 0.1) if case == CASES[-1] else None
            name = f"vllm-ttft/{case}"
            yield rounds.result(name, "s", target, times_faster=1 / rounds.ratio(1))


def _sample(made: Engine, tokens: int, stored: bool, _: int) -> float:
    made("plug", connected=stored)
    [answer] = made.fresh([prompt(tokens, tokens)], max_tokens=1)
    assert answer["cached"] == (full_blocks(tokens) if stored else 0)
    return float(answer["answered_s"])
