"""vllm-miss: requests that never hit, on vLLM with the connector compared with vLLM without it.

A sample is some new prompts with short answers, or short ones with long answers, until the engine is idle.
With the connector, every block is looked up, missed and stored. Samples take some seconds, because each ends
with the engine waiting for its last saves, which under load it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.engines import engine, latent, llama, recurrent, windows
from bench.harness import GIB, Bench, Result, Target
from tests.engines.vllm.engine import Engine, prompt


@dataclass(frozen=True, slots=True)
class Case:
    """A model; the number of prompts of a sample, their tokens, and those of an answer."""

    model: dict[str, Any]
    prompts: int = 4
    tokens: int = 500
    answer_tokens: int = 16


CASES = {
    "gqa": Case(llama(hidden=1024, layers=8, kv_heads=4)),
    "mha": Case(llama(hidden=512, layers=8, kv_heads=8), prompts=12),
    "windows": Case(windows(hidden=1024, layers=12, kv_heads=4)),
    "latent": Case(latent(hidden=512, layers=2), prompts=24),
    "recurrent": Case(recurrent(hidden=1024, layers=8, kv_heads=4), tokens=1200),
    "answers": Case(llama(hidden=512, layers=8, kv_heads=8), prompts=8, tokens=40, answer_tokens=200),
}
"""`gqa` has four queries per KV head, as Llama 3, 16 KiB of KV and 220 MFLOP
per token: 9 times the KV per FLOP of Llama-3-8B in bf16. `mha` has 32 KiB and 61 MFLOP: 66 times."""

_UNCACHED = "no prompt of this bench is seen twice"
"""Needed where vLLM turns prefix caching off: for latent attention on CPUs."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per case."""
    for name, full in CASES.items():
        case = bench.pick(full, replace(full, model={**full.model, "intermediate_size": 256}, prompts=1))
        with engine(bench, case.model, GIB, without_prefix_caching=_UNCACHED) as made:
            samples = (partial(_sample, made, case, True), partial(_sample, made, case, False))
            rounds = bench.interleave(f"vllm-miss/{name}", samples, 1 / len(CASES))
            made("plug", connected=True)
            saved = made("counts")["saved"]
            assert saved > 0
            yield rounds.result(f"vllm-miss/{name}", "s", Target("<=", 1.01), saved_blocks=saved)


def _sample(made: Engine, case: Case, connected: bool, n: int) -> float:
    made("plug", connected=connected)
    # Every sample has new prompts, so that the prefix cache of the engine does not hit either.
    seed = (2 * n + connected) * case.prompts
    prompts = [prompt(seed + i, case.tokens) for i in range(case.prompts)]
    answers = made.generate(prompts, max_tokens=case.answer_tokens)
    assert not any(answer["cached"] for answer in answers)
    return float(answers[0]["idle_s"])
