"""memcpy-put: puts of new blocks of 2 MiB and of 64 KiB with checksums into a full DRAM tier, against memcpy.

The reference writes the same bytes to reserved slots of the same daemon. Each new block evicts the least
recently used one. The last blocks are read back.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from bench.harness import GIB, KIB, MIB, Bench, Result, Target, expect
from bench.served import serve
from kvstore import Layout


@dataclass(frozen=True, slots=True)
class Sizes:
    """`batches`: source bytes and slots on each side, 1 GiB each, more than the caches."""

    block_bytes: int = 2 * MIB
    batch: int = 128
    batches: int = 4
    dram_bytes: int = 2304 * MIB


SMALL = Sizes(64 * KIB, 64, 128, 1280 * MIB)
SMOKE = Sizes(64 * KIB, 16, 2, 16 * MIB)
SMALL_SMOKE = Sizes(4 * KIB, 16, 2, 16 * MIB)


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row for each size."""
    yield _beside_memcpy(bench, "memcpy-put", bench.pick(Sizes(), SMOKE), Target(">=", 1.1))
    yield _beside_memcpy(bench, "memcpy-put/64-KiB", bench.pick(SMALL, SMALL_SMOKE), Target(">=", 0.8))


def _beside_memcpy(bench: Bench, name: str, z: Sizes, target: Target) -> Result:
    bench.doing("filling")
    batch_bytes = z.block_bytes * z.batch
    source = np.random.default_rng(1).integers(0, 256, (z.batches, z.batch, z.block_bytes), np.uint8)
    with serve(z.dram_bytes) as (client, _), ExitStack() as stack:
        space = client.namespace(Layout(model="bench", block_bytes=z.block_bytes))
        rooms = [
            stack.enter_context(space.reserve([os.urandom(32) for _ in range(z.batch)]))
            for _ in range(z.batches)
        ]
        expect([len(room) for room in rooms], [z.batch] * z.batches, "slots reserved")
        targets = [[np.frombuffer(block, np.uint8).ctypes.data for block in room.blocks] for room in rooms]
        last: list[bytes] = []

        def put(n: int) -> float:
            nonlocal last
            last, blocks = [os.urandom(32) for _ in range(z.batch)], source[n % z.batches]
            start = time.perf_counter()
            result = space.put(last, blocks)
            rate = batch_bytes / (time.perf_counter() - start) / GIB
            expect(result.stored, z.batch, "blocks stored")
            return rate

        def memcpy(n: int) -> float:
            block = source[(n + z.batches // 2) % z.batches].ctypes.data
            start = time.perf_counter()
            for i, slot in enumerate(targets[n % z.batches]):
                ctypes.memmove(slot, block + i * z.block_bytes, z.block_bytes)
            return batch_bytes / (time.perf_counter() - start) / GIB

        for n in range(z.dram_bytes // batch_bytes):  # touches every slot and every source page once
            put(n)
            memcpy(n)
        rounds = bench.interleave(name, (put, memcpy), 1 / 2)
        put(0)
        out = np.zeros_like(source[0])
        expect(space.get(last, out), z.batch, "blocks read back")
        expect(bool((out == source[0]).all()), True, "correct bytes read back")
        huge = client.status()["huge_pages"]
    return rounds.result(name, "GiB/s", target, huge_pages=huge)
