"""memcpy-get: 2 MiB blocks out of DRAM by one and two client processes, against memcpy by as many, and
verified ones against unverified ones.

The reference copies out of slots of the same daemon (leased beforehand) into the same memory of the client,
and walks through the same 2 GiB half a round ahead, so that neither side finds the other's blocks in a cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from bench.harness import GIB, MIB, Bench, Result, Target
from bench.served import serve
from kvstore import Client, Layout

BLOCK_BYTES, BATCH, CHAINS = 2 * MIB, 128, 8
BATCH_BYTES = BLOCK_BYTES * BATCH
CALLS = 1
"""Calls a sample, of 256 MiB: the KV of 2,048 tokens of an 8B model."""

LAYOUT = Layout(model="bench", block_bytes=BLOCK_BYTES)
VERIFIED = Target(">=", 0.82)
TARGETS = {(1, False): 0.92, (2, False): 0.85, (1, True): 0.78, (2, True): 0.72}

Way = Literal["verified", "unverified", "memcpy"]
_AHEAD: dict[Way, int] = {"verified": 0, "unverified": CHAINS // 4, "memcpy": CHAINS // 2}


def run(bench: Bench) -> Iterator[Result]:
    """Six lines: one and two processes, unverified, verified, and the one against the other."""
    bench.doing("filling")
    chains = [[os.urandom(32) for _ in range(BATCH)] for _ in range(CHAINS)]
    with serve(2304 * MIB) as (client, daemon):
        data = np.random.default_rng(1).integers(0, 256, (BATCH, BLOCK_BYTES), np.uint8)
        for keys in chains:
            assert client.namespace(LAYOUT).put(keys, data).stored == BATCH
        huge = client.status()["huge_pages"]
        for clients in (1, 2):
            with _crew(daemon.url, chains, clients) as copy:
                for verify in (False, True):
                    way: Way = "verified" if verify else "unverified"
                    rounds = bench.interleave(
                        f"{clients} clients, {way}", (partial(copy, way), partial(copy, "memcpy")), 1 / 6
                    )
                    target = Target(">=", TARGETS[clients, verify])
                    name = f"memcpy-get/{clients}-client{'s' if clients > 1 else ''}"
                    yield rounds.result(f"{name}/{way}", "GiB/s", target, huge_pages=huge)
                ways = (partial(copy, "verified"), partial(copy, "unverified"))
                rounds = bench.interleave(f"{clients} clients, verified or not", ways, 1 / 6)
                yield rounds.result(f"{name}/verification", "GiB/s", VERIFIED, huge_pages=huge)


@contextmanager
def _crew(url: str, chains: list[list[bytes]], size: int) -> Iterator[Callable[[Way, int], float]]:
    """So many client processes that copy at the same time; yields how to make them, in GiB/s of all."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(size)
    pipes, processes = [], []
    try:
        for i in range(size):
            ours, theirs = context.Pipe()
            first = i * CHAINS // 4 + i * CALLS
            process = context.Process(target=_work, args=(url, chains, first, barrier, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()

        def copy(way: Way, n: int) -> float:
            for pipe in pipes:
                pipe.send((way, n))
            times: list[tuple[float, float]] = [pipe.recv() for pipe in pipes]
            seconds = max(end for _, end in times) - min(start for start, _ in times)
            return size * CALLS * BATCH_BYTES / seconds / GIB

        yield copy
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5.0)
            process.kill()


def _work(url: str, chains: list[list[bytes]], first: int, barrier: Any, pipe: Connection) -> None:
    """One client process: copies when told to, until the other end of the pipe is closed."""
    out = np.ones((BATCH, BLOCK_BYTES), np.uint8)
    with (
        Client(url, deadline_s=30.0, strict=True) as client,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        space = client.namespace(LAYOUT)
        leases = [space.acquire(keys) for keys in chains]
        blocks = [[np.frombuffer(view, np.uint8) for view in lease.blocks] for lease in leases]
        for chain in blocks:
            for block in chain:
                block[::4096].sum()
        sources = [[block.ctypes.data for block in chain] for chain in blocks]
        pipe.send(None)
        while True:
            way, n = pipe.recv()
            at = first + n * CALLS + _AHEAD[way]
            numbers = [(at + i) % CHAINS for i in range(CALLS)]
            barrier.wait(30.0)
            start = time.monotonic()
            if way == "memcpy":
                for number in numbers:
                    _memcpy(out.ctypes.data, sources[number])
            else:
                for number in numbers:
                    assert space.get(chains[number], out, verify=way == "verified") == BATCH
            pipe.send((start, time.monotonic()))


def _memcpy(out: int, sources: Sequence[int]) -> None:
    for i, source in enumerate(sources):
        ctypes.memmove(out + i * BLOCK_BYTES, source, BLOCK_BYTES)
