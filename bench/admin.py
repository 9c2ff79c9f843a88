"""admin: p99 of acquire while the REST interface answers 100 requests/s, compared with an idle interface.

Measured with the interface in a separate process, as shipped, and in a thread of the daemon.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from bench.harness import KIB, MIB, PROCESSES, Bench, NotDone, Result, Target, expect, quantile
from bench.served import complete, wait_until
from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon, Settings

BLOCKS, CHAINS = 32, 8
PACE_S = 0.0005
REQUESTS_A_S = 100


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a block and of DRAM; acquires per sample; least answers per second of the interface."""

    block_bytes: int = MIB
    dram_bytes: int = 512 * MIB
    calls: int = 2000
    least_answers_a_s: float = REQUESTS_A_S / 2


SMOKE = Sizes(16 * KIB, 16 * MIB, 100, 0.0)
Served = Callable[[Settings], AbstractContextManager[LocalDaemon]]
PATHS = ("/metrics", "/v1/status", "/v1/tiers", "/v1/tenants", "/v1/namespaces")


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per way to run the interface. The bound is for the shipped way."""
    yield from _measured(bench, "process", _with_process, Target("<=", 1.2))
    yield from _measured(bench, "thread", _with_thread, None)


def _measured(bench: Bench, name: str, served: Served, target: Target | None) -> Iterator[Result]:
    bench.doing(f"admin/{name}: filling")
    z = bench.pick(Sizes(), SMOKE)
    settings: Settings = {"dram": {"limit": z.dram_bytes}, "admin": {"requests_per_s": 10 * REQUESTS_A_S}}
    with served(settings) as daemon, Client(daemon.url, deadline_s=30.0, strict=True) as client:
        wait_until(client, complete)
        space = client.namespace(Layout(model="bench", block_bytes=z.block_bytes))
        chains = [[os.urandom(32) for _ in range(BLOCKS)] for _ in range(CHAINS)]
        for keys in chains:
            stored = space.put(keys, np.zeros((BLOCKS, z.block_bytes), np.uint8)).stored
            expect(stored, BLOCKS, "blocks stored")

        def acquire_us(n: int) -> float:
            start = time.perf_counter()
            lease = space.acquire(chains[n % CHAINS])
            took = time.perf_counter() - start
            expect(len(lease), BLOCKS, "blocks leased")
            lease.release()
            return 1e6 * took

        def sample(_: int) -> float:
            took, due = [], time.perf_counter()
            for n in range(z.calls):
                due += PACE_S
                time.sleep(max(0.0, due - time.perf_counter()))
                took.append(acquire_us(n))
            return quantile(took, 0.99)

        with _asking(daemon.folder / "admin.sock") as (asks, answers):
            asked_s, first = 0.0, answers.value

            def busy(number: int) -> float:
                nonlocal asked_s
                before, start = answers.value, time.monotonic()
                asks.set()
                try:
                    return sample(number)
                finally:
                    _wait_until(lambda: answers.value > before, "no answer from the interface")
                    asks.clear()
                    asked_s += time.monotonic() - start

            rounds = bench.interleave(f"admin/{name}", (busy, sample), 0.5)
            rate = (answers.value - first) / asked_s
            if rate < z.least_answers_a_s:
                raise NotDone(f"{rate:.0f} answers a second from the interface, not {REQUESTS_A_S}")
            yield rounds.result(f"admin/{name}", "µs p99", target, requests_a_s=rate)


@contextmanager
def _asking(path: Path) -> Iterator[tuple[Event, multiprocessing.sharedctypes.Synchronized[int]]]:
    """Runs a process that sends requests while the event is set. Yields event and answer count."""
    asks, answers = PROCESSES.Event(), PROCESSES.Value("q", 0)
    process = PROCESSES.Process(target=_ask, args=(path, asks, answers), daemon=True)
    process.start()
    try:
        asks.set()
        _wait_until(lambda: answers.value > 0, "no answer from the interface")
        asks.clear()
        yield asks, answers
    finally:
        process.kill()
        process.join()


def _ask(path: Path, asks: Event, answers: object) -> None:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    number = 0
    os.nice(10)  # it simulates clients on other machines
    while True:
        asks.wait()
        due = time.monotonic()
        while asks.is_set():
            due += 1 / REQUESTS_A_S
            time.sleep(max(0.0, due - time.monotonic()))
            connection.request("GET", PATHS[number % len(PATHS)])
            answer = connection.getresponse()
            assert answer.read(), answer.status
            assert answer.status == 200, answer.status
            number += 1
            answers.value += 1  # type: ignore[attr-defined]


@contextmanager
def _with_process(settings: Settings) -> Iterator[LocalDaemon]:
    with LocalDaemon(settings) as daemon:
        command = [sys.executable, "-P", "-m", "kvstore", "admin", "-c", str(daemon.folder / "kvstore.toml")]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            _wait_for(daemon.folder / "admin.sock")
            yield daemon
        finally:
            process.kill()
            process.wait()


@contextmanager
def _with_thread(settings: Settings) -> Iterator[LocalDaemon]:
    with _InThread(settings) as daemon:
        _wait_for(daemon.folder / "admin.sock")
        yield daemon


def _wait_for(path: Path) -> None:
    def answers() -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(str(path)) == 0

    _wait_until(answers, "the interface did not start")


def _wait_until(done: Callable[[], bool], why: str) -> None:
    ends = time.monotonic() + 30
    while not done():
        if time.monotonic() > ends:
            raise NotDone(why)
        time.sleep(0.02)


class _InThread(LocalDaemon):
    """A daemon that runs the interface in a thread."""

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "bench.admin", str(self.folder / "kvstore.toml")]


def _serve_both(path: Path) -> int:
    import asyncio  # noqa: PLC0415 - only this process needs these modules

    from kvstore.admin import app, main  # noqa: PLC0415
    from kvstore.config import load  # noqa: PLC0415
    from kvstore.daemon.main import run  # noqa: PLC0415
    from kvstore.daemon.server.listener import listen  # noqa: PLC0415

    config = load(path)

    async def serve() -> None:
        made = app.make(config, f"unix://{config.daemon.socket}")
        await main.server_of(made).serve(sockets=[listen(config.admin.socket, 0o600)])

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    return run(path)


if __name__ == "__main__":
    sys.exit(_serve_both(Path(sys.argv[1])))
