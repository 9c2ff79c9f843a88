"""memcpy-get: gets of 2 MiB blocks from DRAM by one and two client processes, compared with memcpy.

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

CHAINS = 8
_EVERY_BYTES = 4096  # the checked bytes of a page


@dataclass(frozen=True, slots=True)
class Sizes:
    """A sample is one call of 256 MiB, the KV of 2,048 tokens of an 8B model."""

    block_bytes: int = 2 * MIB
    batch: int = 128
    dram_bytes: int = 2304 * MIB

    @property
    def layout(self) -> Layout:
        """Returns the layout of the blocks."""
        return Layout(model="bench", block_bytes=self.block_bytes)


SMOKE = Sizes(64 * KIB, 16, 16 * MIB)
VERIFIED = Target(">=", 0.82)
TARGETS = {(1, False): 0.92, (2, False): 0.85, (1, True): 0.78, (2, True): 0.72}

Way = Literal["verified", "unverified", "memcpy"]
_AHEAD: dict[Way, int] = {"verified": 0, "unverified": CHAINS // 4, "memcpy": CHAINS // 2}


def run(bench: Bench) -> Iterator[Result]:
    """Yields six rows: one and two processes; unverified, verified, and the ratio of both."""
    bench.doing("filling")
    z = bench.pick(Sizes(), SMOKE)
    chains = [[os.urandom(32) for _ in range(z.batch)] for _ in range(CHAINS)]
    with serve(z.dram_bytes) as (client, daemon):
        data = np.random.default_rng(1).integers(0, 256, (z.batch, z.block_bytes), np.uint8)
        for chain, keys in enumerate(chains):
            _samples(data)[:] = _stamps(z, chain)
            expect(client.namespace(z.layout).put(keys, data).stored, z.batch, "blocks stored")
        huge = client.status()["huge_pages"]
        for clients in (1, 2):
            with _crew(z, daemon.url, chains, clients) as copy:
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
def _crew(z: Sizes, url: str, chains: list[list[bytes]], size: int) -> Iterator[Callable[[Way, int], float]]:
    """Runs client processes that copy at the same time. Yields a sample of their total in GiB/s."""
    barrier = PROCESSES.Barrier(size)
    pipes, processes = [], []
    try:
        for i in range(size):
            ours, theirs = PROCESSES.Pipe()
            first = i * CHAINS // 4 + i
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
            return size * z.batch * z.block_bytes / seconds / GIB

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
            number, came = (first + n + _AHEAD[way]) % CHAINS, z.batch
            barrier.wait(30.0)
            start = time.monotonic()
            if way == "memcpy":
                _memcpy(out.ctypes.data, sources[number], z.block_bytes)
            else:
                came = space.get(chains[number], out, verify=way == "verified")
            end = time.monotonic()
            right = came == z.batch and np.array_equal(_samples(out), _stamps(z, number))
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
