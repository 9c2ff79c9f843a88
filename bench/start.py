"""start: time from the exec of `kvstore serve` to its first answer, with records of 1 M blocks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.harness import GIB, MIB, MIN_ROUNDS, Bench, Result, Target, expect
from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.nvme.journal import Journal, Namespace, RecordBatch
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.types import extent_bytes

CHAIN = 250
TENANT = "default"
LAYOUT = Layout(model="bench", block_bytes=16 << 10)
BOUND_S = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Recorded blocks, their slabs, and DRAM."""

    blocks: int = 1_000_000
    nvme_bytes: int = 16 * GIB
    dram_bytes: int = 256 * MIB


SMOKE = Sizes(2000, 64 * MIB, 16 * MIB)


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row: the median of a few starts."""
    z = bench.pick(Sizes(), SMOKE)
    with bench.scratch() as folder:
        keys = _fill(bench, folder, z)
        settings = {
            "dram": {"limit": z.dram_bytes, "huge_pages": False},
            "nvme": {"path": folder, "limit": z.nvme_bytes},
            "scrub": {"rate": 0},  # the blocks have no bytes
        }
        seconds: list[float] = []
        with LocalDaemon(settings) as daemon:
            daemon.stop()
            while sum(seconds) < bench.seconds or len(seconds) < bench.pick(MIN_ROUNDS, 1):
                bench.doing("starting", min(1.0, sum(seconds) / bench.seconds))
                begun = time.monotonic()
                daemon.start()
                seconds.append(time.monotonic() - begun)
                with Client(daemon.url, deadline_s=10.0) as client:
                    expect(client.namespace(LAYOUT).lookup(keys), len(keys), "blocks found")
                    restored = client.status()["counters"]["restored_blocks_nvme"]
                expect(restored, z.blocks, "blocks restored")
                daemon.stop()
    value = statistics.median(seconds)
    yield Result(
        "start/1M-records",
        value,
        "s",
        BOUND_S,
        value / BOUND_S,
        len(seconds),
        target=Target("<=", BOUND_S, "value"),
    )


def _fill(bench: Bench, folder: Path, z: Sizes) -> list[bytes]:
    """Records chains of blocks in slabs without bytes. Returns the keys of the last chain."""
    size = extent_bytes(z.nvme_bytes)
    journal, slabs = Journal.open(folder, size), Slabs(folder, size)
    each = size // LAYOUT.block_bytes
    journal.put_namespace(1, Namespace(TENANT, LAYOUT.to_map(), LAYOUT.fingerprint()))
    for extent in range(z.nvme_bytes // size):
        slabs.allocate(extent)
        journal.put_extent(extent, LAYOUT.block_bytes, TENANT)
    dice = np.random.default_rng(1)
    keys: list[bytes] = []
    for start in range(0, z.blocks, CHAIN):
        bench.doing("recording", start / z.blocks)
        keys = [os.urandom(32) for _ in range(CHAIN)]
        places = [divmod(start + i, each) for i in range(CHAIN)]
        journal.put(
            RecordBatch(
                [1] * CHAIN,
                keys,
                [b"", *keys[:-1]],
                [extent for extent, _ in places],
                [index for _, index in places],
                [1] * CHAIN,
                [LAYOUT.block_bytes] * CHAIN,
                dice.integers(0, 1 << 63, CHAIN).tolist(),
                [1e9 + start - 1e-6 * i for i in range(CHAIN)],
            ),
            int,
            _recorded,
        )
        if start % (40 * CHAIN) == 0:
            journal.drain()
    journal.close()
    slabs.close()
    return keys


def _recorded(error: Exception | None) -> None:
    assert error is None, error
