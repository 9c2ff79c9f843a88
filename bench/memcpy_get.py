"""memcpy-get: gets of blocks of 2 MiB and 64 KiB from DRAM by one and two client processes, against memcpy.

Also compares verified with unverified gets. The reference copies from leased slots of the same daemon to the
same memory of the client. It walks through the same 2 GiB half a round ahead, so that neither side finds
blocks of the other in a cache. All blocks differ, and the client checks them after each sample.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from bench.harness import GIB, KIB, MIB, PROCESSES, Bench, Result, Target, expect
from bench.served import serve
from kvstore import Client, Layout

_EVERY_BYTES = 4096  # the checked bytes of a page


@dataclass(frozen=True, slots=True)
class Sizes:
    """A sample is `calls` calls: one of 256 MiB is the KV of 2,048 tokens of an 8B model."""

    block_bytes: int = 2 * MIB
    batch: int = 128
    dram_bytes: int = 2304 * MIB
    chains: int = 8
    calls: int = 1

    @property
    def layout(self) -> Layout:
        """Returns the layout of the blocks."""
        return Layout(model="bench", block_bytes=self.block_bytes)


SMALL = Sizes(64 * KIB, 64, 1280 * MIB, 256, 16)
"""Shards of many GPUs and small models have such blocks. A sample reads 64 MiB, more than the cache."""
SMOKE = Sizes(64 * KIB, 16, 16 * MIB)
SMALL_SMOKE = Sizes(4 * KIB, 8, 16 * MIB, 16, 2)
VERIFIED = Target(">=", 0.82)
TARGETS = {(1, False): 1.6, (2, False): 1.6, (1, True): 1.25, (2, True): 1.25}
SMALL_TARGET = Target(">=", 1.0)

Way = Literal["verified", "unverified", "memcpy"]
_AHEAD: dict[Way, float] = {"verified": 0, "unverified": 1 / 4, "memcpy": 1 / 2}


def run(bench: Bench) -> Iterator[Result]:
    """Yields six rows of large blocks: one and two processes; unverified, verified, and the ratio of both.

    Two rows of small ones follow.
    """
    with _filled(bench, bench.pick(Sizes(), SMOKE)) as (z, url, chains, huge):
        for clients in (1, 2):
            with _crew(z, url, chains, clients) as copy:
                name = f"{clients}-client{'s' if clients > 1 else ''}"
                for verify in (False, True):
                    target = Target(">=", TARGETS[clients, verify])
                    yield _beside_memcpy(bench, copy, name, verify, target, 1 / 8, huge)
                ways = (partial(copy, "verified"), partial(copy, "unverified"))
                rounds = bench.interleave(f"{clients} clients, verified or not", ways, 1 / 8)
                yield rounds.result(f"memcpy-get/{name}/verification", "GiB/s", VERIFIED, huge_pages=huge)
    with (
        _filled(bench, bench.pick(SMALL, SMALL_SMOKE)) as (z, url, chains, huge),
        _crew(z, url, chains, 1) as copy,
    ):
        for verify in (False, True):
            yield _beside_memcpy(bench, copy, "64-KiB", verify, SMALL_TARGET, 1 / 8, huge)


def _beside_memcpy(
    bench: Bench, copy: Any, name: str, verify: bool, target: Target, share: float, huge: bool
) -> Result:
    way: Way = "verified" if verify else "unverified"
    rounds = bench.interleave(f"{name}, {way}", (partial(copy, way), partial(copy, "memcpy")), share)
    return rounds.result(f"memcpy-get/{name}/{way}", "GiB/s", target, huge_pages=huge)


@contextmanager
def _filled(bench: Bench, z: Sizes) -> Iterator[tuple[Sizes, str, list[list[bytes]], bool]]:
    """Serves chains of blocks. Yields the sizes, the URL, the chains, and whether pages are huge."""
    bench.doing("filling")
    chains = [[os.urandom(32) for _ in range(z.batch)] for _ in range(z.chains)]
    with serve(z.dram_bytes) as (client, daemon):
        data = np.random.default_rng(1).integers(0, 256, (z.batch, z.block_bytes), np.uint8)
        for chain, keys in enumerate(chains):
            _samples(data)[:] = _stamps(z, chain)
            expect(client.namespace(z.layout).put(keys, data).stored, z.batch, "blocks stored")
        yield z, daemon.url, chains, client.status()["huge_pages"]


@contextmanager
def _crew(z: Sizes, url: str, chains: list[list[bytes]], size: int) -> Iterator[Callable[[Way, int], float]]:
    """Runs client processes that copy at the same time. Yields a sample of their total in GiB/s."""
    barrier = PROCESSES.Barrier(size)
    pipes, processes = [], []
    try:
        for i in range(size):
            ours, theirs = PROCESSES.Pipe()
            first = i * z.chains // 4 + i
            arguments = (z, url, chains, first, barrier, theirs)
            process = PROCESSES.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()

        def copy(way: Way, n: int) -> float:
            for pipe in pipes:
                pipe.send((way, n))
            times: list[tuple[float, float, bool]] = [pipe.recv() for pipe in pipes]
            expect([right for _, _, right in times], [True] * size, "clients with the right bytes")
            seconds = max(end for _, end, _ in times) - min(start for start, _, _ in times)
            return size * z.calls * z.batch * z.block_bytes / seconds / GIB

        yield copy
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5.0)
            process.kill()


def _work(z: Sizes, url: str, chains: list[list[bytes]], first: int, barrier: Any, pipe: Connection) -> None:
    """Copies on request until the pipe is closed. Runs in a client process."""
    out = np.ones((z.batch, z.block_bytes), np.uint8)
    with (
        Client(url, deadline_s=30.0, strict=True) as client,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        space = client.namespace(z.layout)
        leases = [space.acquire(keys) for keys in chains]
        blocks = [[np.frombuffer(view, np.uint8) for view in lease.blocks] for lease in leases]
        for chain in blocks:
            for block in chain:
                block[::4096].sum()
        sources = [[block.ctypes.data for block in chain] for chain in blocks]
        pipe.send(None)
        while True:
            way, n = pipe.recv()
            at, came = first + n * z.calls + int(_AHEAD[way] * z.chains), [z.batch] * z.calls
            numbers = [(at + i) % z.chains for i in range(z.calls)]
            barrier.wait(30.0)
            start = time.monotonic()
            if way == "memcpy":
                for number in numbers:
                    _memcpy(out.ctypes.data, sources[number], z.block_bytes)
            else:
                came = [space.get(chains[number], out, verify=way == "verified") for number in numbers]
            end = time.monotonic()
            right = came == [z.batch] * z.calls and np.array_equal(_samples(out), _stamps(z, numbers[-1]))
            pipe.send((start, end, right))


def _memcpy(out: int, sources: Sequence[int], nbytes: int) -> None:
    for i, source in enumerate(sources):
        ctypes.memmove(out + i * nbytes, source, nbytes)


def _samples(blocks: np.ndarray) -> np.ndarray:
    """Returns a view of eight bytes of each page of each block."""
    return blocks.view(np.uint64)[:, :: _EVERY_BYTES // 8]


def _stamps(z: Sizes, chain: int) -> np.ndarray:
    """Returns the expected bytes at these places of a chain."""
    pages = z.block_bytes // _EVERY_BYTES
    return np.arange(z.batch * pages, dtype=np.uint64).reshape(z.batch, pages) + np.uint64(chain << 32)
