"""vllm-miss: requests that never hit, on vLLM with the connector compared with vLLM without it.

A sample is four new prompts of 500 tokens with answers of 16 tokens, until the engine is idle. With the
connector, every block is looked up, missed and stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.engines import engine
from bench.harness import GIB, Bench, Result, Target
from tests.engines.vllm.engine import Engine, prompt

PROMPTS, TOKENS = 4, 500

CASES = {
    "gqa/2-threads": {"hidden": 1024, "layers": 8, "kv_heads": 4, "threads": 2},
    "gqa/1-thread": {"hidden": 1024, "layers": 8, "kv_heads": 4, "threads": 1},
    "mha/2-threads": {"hidden": 512, "layers": 8, "kv_heads": 8, "threads": 2},
}
"""Models with four queries per KV head, as in Llama 3, or one; and the threads of the engine. The first model
has 16 KiB of KV and 220 MFLOP per token: 9 times the KV per FLOP of Llama-3-8B in bf16. The small one has
32 KiB and 61 MFLOP: 66 times."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per case."""
    for name, case in CASES.items():
        with engine(bench, dram_bytes=GIB, **case) as made:
            samples = (partial(_sample, made, True), partial(_sample, made, False))
            rounds = bench.interleave(f"vllm-miss/{name}", samples, 1 / len(CASES))
            made("plug", connected=True)
            saved = made("counts")["saved"]
            yield rounds.result(f"vllm-miss/{name}", "s", Target("<=", 1.02), saved_blocks=saved)


def _sample(made: Engine, connected: bool, n: int) -> float:
    made("plug", connected=connected)
    # Every sample has new prompts, so that the prefix cache of the engine does not hit either.
    seed = (2 * n + connected) * PROMPTS
    answers = made.generate([prompt(seed + i, TOKENS) for i in range(PROMPTS)], max_tokens=16)
    assert not any(answer["cached"] for answer in answers)
    return float(answers[0]["idle_s"])
