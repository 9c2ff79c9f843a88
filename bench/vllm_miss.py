"""vllm-miss: requests that never hit, on vLLM with the connector compared with vLLM without it.

A sample is four new prompts of 500 tokens, or 1200 where blocks are larger, with answers of 16 tokens, until
the engine is idle. With the connector, every block is looked up, missed and stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.engines import engine, latent, llama, recurrent, windows
from bench.harness import GIB, Bench, Result, Target
from tests.engines.vllm.engine import Engine, prompt

PROMPTS = 4

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "gqa": (llama(hidden=1024, layers=8, kv_heads=4), 500),
    "mha": (llama(hidden=512, layers=8, kv_heads=8), 500),
    "windows": (windows(hidden=1024, layers=12, kv_heads=4), 500),
    "latent": (latent(hidden=512, layers=2), 500),
    "recurrent": (recurrent(hidden=1024, layers=8, kv_heads=4), 1200),
}
"""Models, and tokens of a prompt. `gqa` has four queries per KV head, as Llama 3, 16 KiB of KV and 220 MFLOP
per token: 9 times the KV per FLOP of Llama-3-8B in bf16. `mha` has 32 KiB and 61 MFLOP: 66 times."""

_UNCACHED = "no prompt of this bench is seen twice"
"""Needed where vLLM turns prefix caching off: for latent attention on CPUs."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per case."""
    for name, (model, tokens) in CASES.items():
        used = bench.pick(model, {**model, "intermediate_size": 256})
        with engine(bench, used, GIB, without_prefix_caching=_UNCACHED) as made:
            samples = (partial(_sample, made, tokens, True), partial(_sample, made, tokens, False))
            rounds = bench.interleave(f"vllm-miss/{name}", samples, 1 / len(CASES))
            made("plug", connected=True)
            saved = made("counts")["saved"]
            assert saved > 0
            yield rounds.result(f"vllm-miss/{name}", "s", Target("<=", 1.01), saved_blocks=saved)


def _sample(made: Engine, tokens: int, connected: bool, n: int) -> float:
    made("plug", connected=connected)
    # Every sample has new prompts, so that the prefix cache of the engine does not hit either.
    seed = (2 * n + connected) * PROMPTS
    answers = made.generate([prompt(seed + i, tokens) for i in range(PROMPTS)], max_tokens=16)
    assert not any(answer["cached"] for answer in answers)
    return float(answers[0]["idle_s"])
