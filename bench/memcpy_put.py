"""memcpy-put: new 2 MiB blocks into a full DRAM tier, checksums taken, against memcpy of the same bytes.

The reference writes to the same kind of memory: slots of the same daemon that are reserved for it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator

import numpy as np

from bench.harness import GIB, MIB, Bench, Result, Target
from bench.served import serve
from kvstore import Layout

BLOCK_BYTES, BATCH = 2 * MIB, 128
BATCH_BYTES = BLOCK_BYTES * BATCH
SOURCES = ROOMS = 4
"""Batches: 1 GiB of source bytes, and 1 GiB of slots on either side, more than caches hold."""


def run(bench: Bench) -> Iterator[Result]:
    """One line."""
    bench.doing("filling")
    source = np.random.default_rng(1).integers(0, 256, (SOURCES, BATCH, BLOCK_BYTES), np.uint8)
    with serve(2304 * MIB) as (client, _):
        space = client.namespace(Layout(model="bench", block_bytes=BLOCK_BYTES))
        rooms = [space.reserve([os.urandom(32) for _ in range(BATCH)]) for _ in range(ROOMS)]
        assert all(len(room) == BATCH for room in rooms)
        targets = [[np.frombuffer(block, np.uint8).ctypes.data for block in room.blocks] for room in rooms]
        stored = asked = 0

        def put(n: int) -> float:
            nonlocal stored, asked
            keys, blocks = [os.urandom(32) for _ in range(BATCH)], source[n % SOURCES]
            start = time.perf_counter()
            result = space.put(keys, blocks)
            rate = BATCH_BYTES / (time.perf_counter() - start) / GIB
            stored, asked = stored + result.stored, asked + BATCH
            return rate

        def memcpy(n: int) -> float:
            block = source[(n + SOURCES // 2) % SOURCES].ctypes.data
            start = time.perf_counter()
            for i, target in enumerate(targets[n % ROOMS]):
                ctypes.memmove(target, block + i * BLOCK_BYTES, BLOCK_BYTES)
            return BATCH_BYTES / (time.perf_counter() - start) / GIB

        for n in range(SOURCES + 4):  # every slot and every source page has been touched
            put(n)
            memcpy(n)
        rounds = bench.interleave("memcpy-put", (put, memcpy))
        huge = client.status()["huge_pages"]
        for room in rooms:
            room.abort()
    yield rounds.result(
        "memcpy-put", "GiB/s", Target(">=", 0.72), stored_fraction=stored / asked, huge_pages=huge
    )
