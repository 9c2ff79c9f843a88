"""vllm-worth-*: time to the first token of prompts that are stored on something slow, against computing them.

`device`: on an NVMe device that moves 1 MB/s. `network`: on a server behind a proxy that is as slow for each
connection. There the engine should compute the prompts as if there were no store. `device/fast`: once the
device is fast again, they are loaded, and are as fast as in `vllm-ttft`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.engines import engine_of, llama
from bench.harness import GIB, Bench, NotDone, Result, Target, expect
from bench.network import MODES, WELL, proxied, redis, valkey
from bench.served import wait_until
from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from tests.crash.shimmed import ShimmedDaemon
from tests.engines.vllm.engine import Engine, full_blocks, prompt

CASES = {"slow/512": 512, "slow/1024": 1024, "slow/2048": 2048, "fast/2048": 2048}
"""Lengths of prompts in tokens. `fast` is measured with the device alone."""
_LENGTHS = sorted(set(CASES.values()))
_SLOW_SHARE, _FAST_SHARE = 0.7, 0.3
"""The parts of the measuring time of the slow place and of the fast one."""
_PROMPTS = 4
"""Prompts of each length. Computing them shows the engine's speed; the first shows that the place is slow."""
_SLOW_BYTES_A_S = 1e6
_KNOWN_BYTES_A_S = 16e6
"""A place that is believed to be slower than this is known to be slow."""
_MEASURED_S, _TRIES = 10.0, 5
"""How long after a load the daemon knows of it; how often a load is tried."""
_LEAST_COMPUTED = 0.5
"""The least share of samples in which nothing was loaded: a slow place is tried again now and then."""
_AGAIN_S = 300.0
"""The longest time until a place that is fast again is used."""

Status = dict[str, Any]
Throttle = Callable[[bool], None]


def device(bench: Bench) -> Iterator[Result]:
    """Yields one row per length, and one of a device that is fast again."""
    with bench.scratch() as folder:
        slow = folder / "bytes-a-second"
        (folder / "nvme").mkdir()
        # Reads of the scrubber show when the device is fast again.
        settings = _settings(nvme={"path": folder / "nvme", "limit": 4 * GIB}, scrub={})
        with ShimmedDaemon(settings, ["--do", "slow", "--while", str(slow)]) as daemon:
            yield from _rows(bench, "device", daemon, partial(_throttle, slow), _written, _device_speed)


def network(bench: Bench) -> Iterator[Result]:
    """Yields one row per length."""
    with bench.scratch() as folder, valkey(folder) as port, proxied(port) as (proxy, mode):

        def throttle(slowly: bool) -> None:
            mode.value = MODES.index("slow" if slowly else WELL)

        with LocalDaemon(_settings(network={"url": redis(proxy), "timeout": 60})) as daemon:
            yield from _rows(bench, "network", daemon, throttle, _uploaded, _network_speed)


def _settings(**more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"dram": {"limit": 2 * GIB}, "policy": {"eviction": "lru"}, "scrub": {"rate": 0}, **more}


def _throttle(file: Path, slowly: bool) -> None:
    if slowly:
        file.write_text(str(_SLOW_BYTES_A_S))
    else:
        file.unlink(missing_ok=True)


def _rows(
    bench: Bench,
    place: str,
    daemon: LocalDaemon,
    throttle: Throttle,
    stored: Callable[[Status], bool],
    speed: Callable[[Status], float],
) -> Iterator[Result]:
    """Yields the rows of a place that is slow, and for the device one when it is fast again."""
    model = bench.pick(llama(1024, 12, 16), llama(256, 4, 4))
    with engine_of(bench, daemon, model) as made:
        bench.doing("storing prompts")
        for tokens in _LENGTHS:
            for number in range(_PROMPTS):
                made.fresh([_prompt(tokens, number)], max_tokens=1)
        made.generate([prompt(1, 8)], max_tokens=4)
        with Client(daemon.url, token="", deadline_s=30.0, strict=True) as client:
            wait_until(client, stored)
        bench.doing(f"slow {place}")
        tries = (_is_known(made, daemon, throttle, speed) for _ in range(_TRIES))
        expect(any(tries), True, f"the daemon knows that the {place} is slow")
        for tokens in _LENGTHS:
            yield _slow(bench, place, made, tokens)
        throttle(False)
        if place == "device":
            yield _fast(bench, made, _LENGTHS[-1])


def _is_known(
    made: Engine, daemon: LocalDaemon, throttle: Throttle, speed: Callable[[Status], float]
) -> bool:
    """Makes the place slow and loads a prompt from there. Returns whether the daemon then knows that.

    On a busy machine the lookup may end before it is known what is there. Then the prompt is computed.
    """
    throttle(False)
    daemon.restart()  # memory is empty
    _until(lambda: bool(made("connected")), "the engine connects again")
    with Client(daemon.url, token="", deadline_s=30.0, strict=True) as client:
        wait_until(client, _usable)
        throttle(True)
        # Long enough for the daemon to measure it.
        made.fresh([_prompt(_LENGTHS[1], 0)], max_tokens=1)
        try:
            wait_until(client, lambda status: speed(status) < _KNOWN_BYTES_A_S, within_s=_MEASURED_S)
        except TimeoutError:
            return False
    return True


def _slow(bench: Bench, place: str, made: Engine, tokens: int) -> Result:
    loaded: list[int] = []
    samples = (partial(_sample, made, tokens, loaded), partial(_sample, made, tokens, None))
    rounds = bench.interleave(f"slow {place}, {tokens} tokens", samples, _SLOW_SHARE * tokens / sum(_LENGTHS))
    computed = sum(not each for each in loaded) / len(loaded)
    if computed < _LEAST_COMPUTED:
        raise NotDone(f"{place}/{tokens}: only {computed:.0%} of the samples were computed")
    name = f"vllm-worth-{place}/slow/{tokens}"
    return rounds.result(name, "s", Target("<=", 1.02), computed_share=computed)


def _fast(bench: Bench, made: Engine, tokens: int) -> Result:
    bench.doing("fast device")
    made("plug", connected=True)  # the last sample was one without the store
    began = time.monotonic()
    for number in range(1, _PROMPTS):
        asked = [_prompt(tokens, number)]
        _until(
            lambda asked=asked: made.fresh(asked, max_tokens=1)[0]["cached"] == full_blocks(tokens), "loads"
        )
    again_s, loaded = time.monotonic() - began, list[int]()
    samples = (partial(_sample, made, tokens, loaded), partial(_sample, made, tokens, None))
    rounds = bench.interleave(f"fast device, {tokens} tokens", samples, _FAST_SHARE)
    expect(set(loaded), {full_blocks(tokens)}, "tokens loaded")
    return rounds.result(f"vllm-worth-device/fast/{tokens}", "s", Target("<=", 0.1), used_again_s=again_s)


def _sample(made: Engine, tokens: int, loaded: list[int] | None, number: int) -> float:
    """Returns the seconds to the first token; with the store, notes in `loaded` how many tokens it had."""
    made("plug", connected=loaded is not None)
    [answer] = made.fresh([_prompt(tokens, 1 + number % (_PROMPTS - 1))], max_tokens=1)
    if loaded is None:
        expect(answer["cached"], 0, "tokens loaded without the store")
    else:
        loaded.append(answer["cached"])
    return float(answer["answered_s"])


def _prompt(tokens: int, number: int) -> list[int]:
    return prompt(100 * tokens + number, tokens)


def _until(done: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + _AGAIN_S
    while not done():
        if time.monotonic() > ends:
            raise NotDone(f"not within {_AGAIN_S:g} s: {what}")
        time.sleep(0.05)


def _written(status: Status) -> bool:
    counters = status["counters"]
    return bool(counters["stored_blocks"] == counters.get("written_blocks", 0) > 0)


def _uploaded(status: Status) -> bool:
    written = status["network"]["counters"].get("written_ok_blocks", 0)
    return bool(status["counters"]["stored_blocks"] == written > 0)


def _usable(status: Status) -> bool:
    return status["network"] is None or bool(status["network"]["usable"])


def _device_speed(status: Status) -> float:
    return float(next(t for t in status["tiers"] if t["name"] == "nvme")["bandwidth_bytes_per_s"])


def _network_speed(status: Status) -> float:
    return float(status["network"]["bandwidth_bytes_per_s"])
