"""Loads of tenants. Each runs in a separate process and returns its measurements."""

from __future__ import annotations

import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import numpy as np

from bench.harness import PROCESSES, NotDone, expect
from kvstore import Client, Layout
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames, pack

_READY_WITHIN_S = 60.0
_SWITCH_INTERVAL_S = 1e-4


@dataclass(frozen=True, slots=True)
class Site:
    """The target of a load: socket, token of a tenant, layout of its blocks."""

    url: str
    token: str
    layout: Layout


Load = Callable[..., Any]
"""load(cue, *arguments): runs until the cue is set. Returns its figures."""


@dataclass(frozen=True, slots=True)
class Cue:
    """Tells a load to end, and lets it report that it is working."""

    stop: Any
    begun: Any

    def is_set(self) -> bool:
        """Returns whether the load must end."""
        return bool(self.stop.is_set())

    def begin(self) -> None:
        """Reports that the load is working."""
        if not self.begun.is_set():
            self.begun.set()


@contextmanager
def running(load: Load, *arguments: Any) -> Iterator[Callable[[], Any]]:
    """Runs a load in a process during the block. Yields a function that ends it and returns its figures.

    The block begins once the load is working. Raises NotDone if it is not within 60 s.
    """
    stop, begun, figures = PROCESSES.Event(), PROCESSES.Event(), PROCESSES.Queue()
    process = PROCESSES.Process(target=_run, args=(load, Cue(stop, begun), figures, arguments), daemon=True)
    process.start()
    try:
        if not begun.wait(_READY_WITHIN_S):
            raise NotDone(f"{load.__name__} had no effect within {_READY_WITHIN_S:g} s")

        def end() -> list[float]:
            stop.set()
            result = figures.get(timeout=_READY_WITHIN_S)
            if isinstance(result, Exception):
                raise result
            return result

        yield end
    finally:
        stop.set()
        process.join(5.0)
        process.kill()


def _run(load: Load, cue: Cue, figures: Any, arguments: Sequence[Any]) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        figures.put(load(cue, *arguments))
    except Exception as error:
        figures.put(error)
        cue.begin()


def burn(cue: Cue) -> list[float]:
    """Uses a core, without requests."""
    cue.begin()
    while not cue.is_set():
        sum(range(10_000))
    return []


def paced(cue: Cue, site: Site, chains: list[list[bytes]], interval_s: float, askers: int = 1) -> list[float]:
    """Acquires and releases a chain at a fixed rate, up to `askers` at a time, as an open loop.

    Returns seconds from due time to answer for each; NaN for incomplete chains.
    """
    took: list[float] = []
    turn, lock = cycle(chains), threading.Lock()
    with Client(site.url, site.token, deadline_s=30.0, strict=True) as client:
        space = client.namespace(site.layout)
        space.acquire(chains[-1]).release()  # connects, and maps the memory of the chains
        cue.begin()
        due = [time.perf_counter()]

        def ask() -> None:
            while not (took and cue.is_set()):
                with lock:
                    due[0] += interval_s
                    mine, keys = due[0], next(turn)
                time.sleep(max(0.0, mine - time.perf_counter()))
                with space.acquire(keys) as lease:
                    took.append(time.perf_counter() - mine if len(lease) == len(keys) else math.nan)

        _in_threads(ask, askers)
    return took


def closed(cue: Cue, site: Site, chains: list[list[bytes]], readers: int) -> list[float]:
    """Acquires chain after chain in several threads. Returns the end of each (s, monotonic clock)."""
    ended: list[float] = []
    turn, lock = cycle(chains), threading.Lock()
    with Client(site.url, site.token, deadline_s=30.0) as client:
        space = client.namespace(site.layout)

        def read() -> None:
            while not cue.is_set():
                with lock:
                    keys = next(turn)
                with space.acquire(keys) as lease:
                    if len(lease) == len(keys):
                        ended.append(time.monotonic())
                cue.begin()

        _in_threads(read, readers)
    return ended


def puts(cue: Cue, site: Site, chain: int, writers: int) -> list[float]:
    """Stores new chains in several threads. Returns the end of each (s, monotonic clock)."""
    ended: list[float] = []
    data = np.zeros((chain, site.layout.block_bytes), np.uint8)
    with Client(site.url, site.token, deadline_s=30.0) as client:
        space = client.namespace(site.layout)

        def write() -> None:
            while not cue.is_set():
                if space.put([os.urandom(32) for _ in range(chain)], data).stored == chain:
                    ended.append(time.monotonic())
                cue.begin()

        _in_threads(write, writers)
    return ended


def flood(cue: Cue, site: Site, keys: list[bytes], depth: int) -> list[float]:
    """Pipelines lookups and acquires, `depth` at a time. Returns the number of answers."""
    answers = 0
    joined, size = b"".join(keys), len(keys[0])
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(site.url.removeprefix("unix://"))
        sock.settimeout(_READY_WITHIN_S)
        frames = Frames(1 << 30)
        sock.sendall(pack(m.Hello(m.MAGIC, m.VERSION, site.token)))
        sock.sendall(pack(m.Open(1, asdict(site.layout), "", 0.0)))
        space = 0
        while not cue.is_set():
            out = []
            for message in frames.feed(sock.recv(1 << 18)):
                if isinstance(message, m.Opened):
                    space = message.namespace
                    out = [_question(n, space, size, joined) for n in range(depth)]
                elif not isinstance(message, m.Welcome):
                    assert not isinstance(message, m.Failure), message
                    answers += 1
                    cue.begin()
                    if isinstance(message, m.Granted) and message.lease:
                        out.append(pack(m.Release(message.lease)))
                    out.append(_question(answers, space, size, joined))
            sock.sendall(b"".join(out))
    return [float(answers)]


def _question(n: int, space: int, size: int, keys: bytes) -> bytes:
    if n % 2:
        return pack(m.Lookup(2 + n, space, size, keys, 1.0, 0.0))
    return pack(m.Acquire(2 + n, space, size, keys[: 32 * size], 1.0, 0.0))


def late(cue: Cue, site: Site, chains: list[list[bytes]], calls: int, threads: int) -> list[float]:
    """Sends calls of all kinds with deadlines of 5 to 200 ms. Returns seconds past the deadline for each."""
    over: list[float] = []
    dice = random.Random(1)
    data = np.zeros((4, site.layout.block_bytes), np.uint8)
    left = iter(range(calls))
    lock = threading.Lock()
    with Client(site.url, site.token) as client:
        space = client.namespace(site.layout)
        cue.begin()

        def call() -> None:
            while not cue.is_set():
                with lock:
                    n, deadline_s, keys = next(left, -1), dice.uniform(0.005, 0.2), dice.choice(chains)
                if n < 0:
                    return
                began = time.perf_counter()
                if n % 4 == 0:
                    space.put([os.urandom(32) for _ in range(4)], data, deadline_s=deadline_s)
                elif n % 4 == 1:
                    space.lookup(keys, deadline_s=deadline_s)
                else:
                    space.acquire(keys, deadline_s=deadline_s).release()
                over.append(time.perf_counter() - began - deadline_s)

        _in_threads(call, threads)
    return over


def _in_threads(work: Callable[[], None], threads: int) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


def new_chains(n: int, chain: int) -> list[list[bytes]]:
    """Returns the keys of n new chains."""
    return [[os.urandom(32) for _ in range(chain)] for _ in range(n)]


def fill(site: Site, chains: list[list[bytes]]) -> None:
    """Stores chains."""
    with Client(site.url, site.token, deadline_s=30.0, strict=True) as client:
        space = client.namespace(site.layout)
        data = np.random.default_rng(1).integers(0, 256, (len(chains[0]), site.layout.block_bytes), np.uint8)
        for keys in chains:
            expect(space.put(keys, data).stored, len(keys), "blocks stored")
