"""vllm-ttft: time to the first token of a stored prompt, compared with computing it, by prompt length.

The prefix cache of vLLM is empty each time. The last block of a stored prompt is still computed. Of the
prompts of `half`, only the first half is stored.

`overlap` bounds what loading layer by layer could save: the shorter one of load and computation as a fraction
of the time to the first token, as if it were hidden in the longer one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from itertools import count

from bench.engines import engine, llama
from bench.harness import GIB, Bench, Result, Target
from tests.engines.vllm.engine import Engine, full_blocks, prompt

CASES = {"256": 256, "512": 512, "1024": 1024, "2048": 2048, "1024/half": 1024, "2048/half": 2048}
"""Lengths of prompts in tokens."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per prompt length, and per share of it that is stored."""
    model = bench.pick(llama(hidden=1024, layers=12, kv_heads=16), llama(hidden=256, layers=2, kv_heads=4))
    with engine(bench, model, 3 * GIB) as made:
        seeds = count(1)
        for case, tokens in CASES.items():
            stored = tokens // 2 if case.endswith("/half") else tokens
            head = prompt(tokens, stored)
            made("plug", connected=True)
            made.generate([head], max_tokens=1)
            loads = list[float]()
            samples = (
                partial(_loaded, made, head, tokens, seeds, loads),
                partial(_computed, made, head, tokens, seeds),
            )
            rounds = bench.interleave(f"vllm-ttft/{case}", samples, tokens / sum(CASES.values()))
            target = Target("<=", 0.1) if case == "2048" else None
            load_s, whole_s = statistics.median(loads), rounds.median(0)
            yield rounds.result(
                f"vllm-ttft/{case}",
                "s",
                target,
                times_faster=1 / rounds.ratio(1),
                load_s=load_s,
                overlap=min(load_s, whole_s - load_s) / whole_s,
            )


def _loaded(
    made: Engine, head: list[int], tokens: int, seeds: Iterator[int], loads: list[float], _: int
) -> float:
    made("plug", connected=True)
    before = made("times", metric="load_seconds")
    [answer] = made.fresh([head + prompt(next(seeds), tokens - len(head))], max_tokens=1)
    assert answer["cached"] == (full_blocks(tokens) if len(head) == tokens else len(head))
    loads += made("times", metric="load_seconds")[len(before) :]
    return float(answer["answered_s"])


def _computed(made: Engine, head: list[int], tokens: int, seeds: Iterator[int], _: int) -> float:
    made("plug", connected=False)
    [answer] = made.fresh([head + prompt(next(seeds), tokens - len(head))], max_tokens=1)
    assert answer["cached"] == 0
    return float(answer["answered_s"])
