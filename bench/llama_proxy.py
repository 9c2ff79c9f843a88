"""llama-proxy: what the proxy of llama-server adds to a request, and the first token of a stored prompt.

`added` is the difference of the medians of a round: completions of one token, of texts that nothing shares a
block with, through the proxy and by llama-server alone. Each begins once the store of the one before has
ended. `ttft-4096`: until the first event of a stream, of a prompt of 4096 tokens whose blocks are stored,
while the slot has another prompt, against llama-server that evaluates it.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bench.harness import GIB, Bench, Result, Target, Unable, expect
from bench.served import serve
from tests.engines.environments import ROOT, environment, interpreter
from tests.engines.llamaserver import build
from tests.engines.llamaserver.serving import GREEDY, Served, alone, proxied, timings

_BLOCK = 64
_REQUESTS = 20
_PROMPT = 4096
_WORDS, _TEXT_WORDS = 250, 20  # some 130 tokens


def run(bench: Bench) -> Iterator[Result]:
    """Yields the added milliseconds, and the time to the first token."""
    bench.doing("environment")
    python = interpreter("llamaserver")
    if why := build.why_not():
        raise Unable(why)
    tokens = bench.pick(_PROMPT, 4 * _BLOCK)
    bench.doing("starting llama-server")
    with bench.scratch() as folder, ExitStack() as stack:
        _, daemon = stack.enter_context(serve(bench.pick(GIB, GIB // 4)))
        with _both(python, folder, daemon.url, layers=2) as (ours, direct):
            yield _added(bench, ours, direct)
        with _both(python, folder, daemon.url, layers=bench.pick(16, 2)) as (ours, direct):
            yield _first_token(bench, ours, direct, tokens)


@contextmanager
def _both(python: Path, folder: Path, url: str, layers: int) -> Iterator[tuple[Served, Served]]:
    """Starts llama-server behind the proxy, and alone."""
    model = _model(python, folder / f"{layers}.gguf", layers)
    sizes = ("-c", str(2 * _PROMPT), "-np", "1")
    options = ("--block-tokens", str(_BLOCK), "--deadline", "30")
    with (
        proxied(model, folder, url, *sizes, options=options) as ours,
        alone(model, folder, *sizes) as direct,
    ):
        yield ours, direct


def _model(python: Path, path: Path, layers: int) -> Path:
    """Writes a random model. Its attention computes as that of a larger one does."""
    words = [f"block_count={layers}", "context_length=16384"]
    command = [python, "-m", "tests.engines.gguf_models", path, *words]
    subprocess.run(command, cwd=ROOT, env=environment("llamaserver"), check=True)
    return path


def _added(bench: Bench, ours: Served, direct: Served) -> Result:
    samples = (partial(_latency_ms, bench, ours, True), partial(_latency_ms, bench, direct, False))
    rounds = bench.interleave("llama-proxy/added", samples, 0.4)
    added = statistics.median(one - other for one, other in rounds.figures)
    return Result(
        "llama-proxy/added", max(added, 0.001), "ms", rounds.median(1), rounds.ratio(1), len(rounds.figures),
        rounds.discarded, rounds.noisy, Target("<=", 3.0, of="value"),
    )  # fmt: skip


def _latency_ms(bench: Bench, served: Served, is_proxy: bool, number: int) -> float:
    """Returns the median of some requests."""
    chance = random.Random(f"{is_proxy} {number}")
    taken = []
    for _ in range(bench.pick(_REQUESTS, 2)):
        text = " ".join(f"t{chance.randrange(_WORDS)}" for _ in range(_TEXT_WORDS))
        started_s = time.monotonic()
        served.complete(text, 1)
        taken.append(1000 * (time.monotonic() - started_s))
        if is_proxy:
            served.settled()
    return statistics.median(taken)


def _first_token(bench: Bench, ours: Served, direct: Served, tokens: int) -> Result:
    prompt = _tokens(tokens, 0)
    ours.complete(prompt, 1)
    ours.settled()
    samples = (partial(_hit_s, ours, prompt), partial(_miss_s, direct, tokens))
    rounds = bench.interleave("llama-proxy/ttft-4096", samples, 0.6)
    return rounds.result("llama-proxy/ttft-4096", "s", Target("<=", 0.5), times_faster=1 / rounds.ratio(1))


def _hit_s(served: Served, prompt: list[int], number: int) -> float:
    served.complete(_tokens(_BLOCK // 2, number + 1), 1)  # the slot has another prompt
    served.settled()
    taken_s, (cached, _) = _stream(served, prompt)
    # A prompt of whole blocks is evaluated from its last token on.
    expect(cached, len(prompt) - 1, "tokens from the store")
    served.settled()
    return taken_s


def _miss_s(served: Served, tokens: int, number: int) -> float:
    # Without this, leading tokens that are those of an earlier prompt by chance would not be evaluated.
    taken_s, (cached, _) = _stream(served, _tokens(tokens, number), cache_prompt=False)
    expect(cached, 0, "tokens that were there")
    return taken_s


def _stream(served: Served, prompt: list[int], **more: bool) -> tuple[float, tuple[int, int]]:
    """Returns the seconds until the first event, and the tokens that were there and evaluated."""
    started_s = time.monotonic()
    events = served.events("/completion", {"prompt": prompt, "n_predict": 2, **GREEDY, **more})
    first = next(events)
    taken_s = time.monotonic() - started_s
    return taken_s, timings([first, *events][-1])


def _tokens(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [1, *(chance.randrange(259, 512) for _ in range(n - 1))]
