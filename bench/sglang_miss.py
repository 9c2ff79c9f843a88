"""sglang-miss: requests that never hit, on SGLang with the connector compared with SGLang without it.

A sample is some new prompts with short answers, or short ones with long answers, until the last answer.
HiCache is on in both. With the connector, every page is asked for, missed and stored while the engine
computes. What is left to store after the last answer does not count: under load, it would go on beside the
next computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.engines import llama
from bench.harness import GIB, Bench, Result, Target, expect
from bench.served import serve
from bench.sglang_engines import engines
from bench.worker import Worker
from tests.engines.sglang.engine import prompt


@dataclass(frozen=True, slots=True)
class Case:
    """A model; the number of prompts of a sample, their tokens, and those of an answer."""

    model: dict[str, Any]
    prompts: int = 6
    tokens: int = 500
    answer_tokens: int = 16


CASES = {
    "gqa": Case(llama(hidden=512, layers=8, kv_heads=2)),
    "mha": Case(llama(hidden=512, layers=8, kv_heads=8)),
    "answers": Case(llama(hidden=512, layers=8, kv_heads=8), prompts=4, tokens=80, answer_tokens=150),
}
"""`gqa` has four queries per KV head, `mha` one. SGLang runs four requests at once here."""

_PAGE_TOKENS = 64


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per case."""
    for name, full in CASES.items():
        case = bench.pick(full, replace(full, model=llama(256, 2, 4), prompts=1, answer_tokens=2))
        with (
            serve(GIB) as (client, daemon),
            engines(bench, case.model, daemon.url, page_size=_PAGE_TOKENS) as made,
        ):
            samples = (partial(_sample, made, case, "ours"), partial(_sample, made, case, "plain"))
            rounds = bench.interleave(f"sglang-miss/{name}", samples, 1 / len(CASES))
            stored = client.status()["counters"].get("stored_blocks", 0)
            expect(stored > 0, True, "blocks are stored")
            yield rounds.result(f"sglang-miss/{name}", "s", Target("<=", 1.01), saved_blocks=stored)


def _sample(made: Worker, case: Case, name: str, n: int) -> float:
    # Every sample has new prompts.
    seed = (2 * n + (name == "ours")) * case.prompts
    prompts = [prompt(seed + i, case.tokens) for i in range(case.prompts)]
    answered = made("generate", name=name, prompts=prompts, tokens=case.answer_tokens)
    expect(answered["cached"], 0, "cached tokens")
    return float(answered["answered_s"])
