"""zero-copy: acquire and release of 32 blocks, compared with an empty round trip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.harness import KIB, MIB, Bench, Result, Target, expect
from bench.latency import Timed, compare
from bench.served import serve
from kvstore import Layout
from kvstore.client.leases import Lease

BLOCKS, CHAINS = 32, 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a block and of DRAM."""

    block_bytes: int = 1 * MIB
    dram_bytes: int = 512 * MIB


SMOKE = Sizes(16 * KIB, 16 * MIB)


def run(bench: Bench) -> Iterator[Result]:
    """Yields `acquire` alone, with its views, and in a loop with the release."""
    bench.doing("filling")
    z = bench.pick(Sizes(), SMOKE)
    with serve(z.dram_bytes) as (client, _):
        space = client.namespace(Layout(model="bench", block_bytes=z.block_bytes))
        chains = [[os.urandom(32) for _ in range(BLOCKS)] for _ in range(CHAINS)]
        for keys in chains:
            expect(space.put(keys, _blocks(keys, z.block_bytes)).stored, BLOCKS, "blocks stored")
        held: list[Lease] = []

        def acquire(n: int) -> None:
            lease = space.acquire(chains[n % CHAINS])
            expect(len(lease), BLOCKS, "blocks leased")
            held.append(lease)

        def views(n: int) -> None:
            acquire(n)
            expect(len(held[-1].blocks), BLOCKS, "views")

        for n, keys in enumerate(chains):
            views(n)
            seen = [bytes(block[: len(key)]) for key, block in zip(keys, held[-1].blocks, strict=True)]
            expect(seen, keys, "bytes of the views")
            held.pop().release()

        def release() -> None:
            # The ping waits for the release, so that the next call does not include it.
            held.pop().release()
            client.ping()

        def acquire_and_release(n: int) -> None:
            with space.acquire(chains[n % CHAINS]) as lease:
                expect(len(lease), BLOCKS, "blocks leased")

        target = Target("<=", 2.0)
        yield compare(bench, "zero-copy/acquire", client, Timed(acquire, release), 0.4, target)
        yield compare(bench, "zero-copy/acquire-and-views", client, Timed(views, release), 0.3, None)
        yield compare(bench, "zero-copy/acquire-release-loop", client, Timed(acquire_and_release), 0.3, None)


def _blocks(keys: list[bytes], block_bytes: int) -> np.ndarray:
    """Returns blocks that begin with their keys."""
    data = np.zeros((len(keys), block_bytes), np.uint8)
    for block, key in zip(data, keys, strict=True):
        block[: len(key)] = np.frombuffer(key, np.uint8)
    return data
