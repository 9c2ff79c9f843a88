"""nvme-write-put: the same end to end: a client puts 4 MiB blocks until the daemon has them all on record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np

from bench.disks import BLOCK_BYTES, SAMPLE_BYTES, compare, reference_disks
from bench.harness import GIB, Bench, Result
from bench.inprocess import written_folder
from bench.served import serve, wait_until
from kvstore import Layout

NVME_BYTES, DRAM_BYTES = 2 * GIB, 1 * GIB
CHAIN = 16
LAYOUT = Layout(model="bench", block_bytes=BLOCK_BYTES)


def run(bench: Bench) -> Iterator[Result]:
    """A line for each reference."""
    data = np.random.default_rng(1).integers(0, 256, (CHAIN, BLOCK_BYTES), np.uint8)
    with bench.scratch() as folder:
        bench.doing("writing every slot once")
        written_folder(folder / "nvme", NVME_BYTES, LAYOUT, CHAIN)
        bench.doing("writing the reference")
        with (
            reference_disks(folder, NVME_BYTES, DRAM_BYTES) as disks,
            serve(DRAM_BYTES, (folder / "nvme", NVME_BYTES)) as (client, _),
        ):
            space = client.namespace(LAYOUT)
            written = 0

            def write(_: int) -> float:
                nonlocal written
                blocks = SAMPLE_BYTES // BLOCK_BYTES
                chains = [[os.urandom(32) for _ in range(CHAIN)] for _ in range(blocks // CHAIN)]
                written += blocks
                start = time.perf_counter()
                for keys in chains:
                    stored = space.put(keys, data).stored
                    assert stored == CHAIN, f"{stored} blocks of {CHAIN} were stored"
                wait_until(client, lambda s: s["counters"].get("written_blocks", 0) >= written, 0.002)
                return SAMPLE_BYTES / (time.perf_counter() - start) / GIB

            yield from compare(bench, "nvme-write-put", write, disks, True, {})
