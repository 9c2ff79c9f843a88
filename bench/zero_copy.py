"""zero-copy: a lease on 32 blocks and its end, against an empty round trip."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from bench.harness import MIB, Bench, Result, Target
from bench.latency import Timed, compare
from bench.served import serve
from kvstore import Layout
from kvstore.client.holds import Lease

BLOCKS, CHAINS = 32, 8
BLOCK_BYTES = 1 * MIB


def run(bench: Bench) -> Iterator[Result]:
    """`acquire` alone, with the views it is for, and together with the release in an endless loop."""
    bench.doing("filling")
    with serve(512 * MIB) as (client, _):
        space = client.namespace(Layout(model="bench", block_bytes=BLOCK_BYTES))
        data = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        chains = [[os.urandom(32) for _ in range(BLOCKS)] for _ in range(CHAINS)]
        for keys in chains:
            assert space.put(keys, data).stored == BLOCKS
        held: list[Lease] = []

        def acquire(n: int) -> None:
            lease = space.acquire(chains[n % CHAINS])
            assert len(lease) == BLOCKS
            held.append(lease)

        def views(n: int) -> None:
            acquire(n)
            assert len(held[-1].blocks) == BLOCKS

        def release() -> None:
            # The ping waits until the daemon is through with the release: it is no part of the next call.
            held.pop().release()
            client.ping()

        def acquire_and_release(n: int) -> None:
            with space.acquire(chains[n % CHAINS]) as lease:
                assert len(lease) == BLOCKS

        target = Target("<=", 2.0)
        yield compare(bench, "zero-copy/acquire", client, Timed(acquire, release), 0.4, target)
        yield compare(bench, "zero-copy/acquire-and-views", client, Timed(views, release), 0.3, None)
        yield compare(bench, "zero-copy/acquire-release-loop", client, Timed(acquire_and_release), 0.3, None)
