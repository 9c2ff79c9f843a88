"""sglang-ttft: time to the first token of a stored prompt, compared with computing it, by prompt length.

The caches of SGLang are empty each time, so pages go from the daemon through the host pool to the device. The
last page of a stored prompt is still computed. HiCache is on also where the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.engines import llama
from bench.harness import GIB, Bench, Result, Target, expect
from bench.served import serve
from bench.sglang_engines import engines
from bench.worker import Worker
from tests.engines.sglang.engine import full_pages, prompt

CASES = {"256": 256, "512": 512, "1024": 1024, "2048": 2048}
"""Lengths of prompts in tokens."""

_PAGE_TOKENS = 64


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per prompt length."""
    model = bench.pick(llama(hidden=1024, layers=12, kv_heads=16), llama(hidden=256, layers=2, kv_heads=4))
    options = {"page_size": _PAGE_TOKENS, "max_total_tokens": 4096}
    with serve(3 * GIB) as (_, daemon), engines(bench, model, daemon.url, **options) as made:
        for case, tokens in CASES.items():
            asked = prompt(tokens, tokens)
            made("generate", name="ours", prompts=[asked], tokens=1)
            samples = (
                partial(_sample, made, "ours", asked, full_pages(tokens, _PAGE_TOKENS)),
                partial(_sample, made, "plain", asked, 0),
            )
            rounds = bench.interleave(f"sglang-ttft/{case}", samples, tokens / sum(CASES.values()))
            target = Target("<=", 0.1) if case == "2048" else None
            yield rounds.result(f"sglang-ttft/{case}", "s", target, times_faster=1 / rounds.ratio(1))


def _sample(made: Worker, name: str, asked: list[int], stored: int, _: int) -> float:
    answered = made("generate", name=name, prompts=[asked], tokens=1)
    expect((answered["stored"], answered["cached"]), (stored, stored), "tokens from the store")
    return float(answered["answered_s"])
