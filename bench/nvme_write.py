"""nvme-write: 4 MiB blocks from DRAM slots to NVMe until their records are committed, against direct writes.

The daemon's own path without a client: blocks are reserved and committed (whatever bytes the slots have) and
written through. The slabs are full and every slot has been written before, so each write evicts a block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from bench.disks import BLOCK_BYTES, SAMPLE_BYTES, compare, reference_disks
from bench.harness import GIB, Bench, Result, Target
from bench.inprocess import in_process, written_folder
from kvstore import Layout

NVME_BYTES, DRAM_BYTES = 2 * GIB, 1 * GIB
CHAIN = 16
LAYOUT = Layout(model="bench", block_bytes=BLOCK_BYTES)
TARGETS = {name: Target(">=", 0.90) for name in ("fio", "same-memory")}


def run(bench: Bench) -> Iterator[Result]:
    """A line for each reference."""
    with bench.scratch() as folder:
        bench.doing("writing every slot once")
        old = written_folder(folder / "nvme", NVME_BYTES, LAYOUT, CHAIN)
        bench.doing("writing the reference")
        with (
            reference_disks(folder, NVME_BYTES, DRAM_BYTES) as disks,
            in_process(folder / "nvme", DRAM_BYTES, NVME_BYTES, LAYOUT) as (inside, runner),
        ):

            async def fill() -> None:
                """Leaves real bytes in every slot of DRAM: some devices are quick with zeros."""
                for keys in old:
                    inside.release((await inside.acquire(keys))[0])

            async def write(_: int) -> float:
                blocks = SAMPLE_BYTES // BLOCK_BYTES
                chains = [[os.urandom(32) for _ in range(CHAIN)] for _ in range(blocks // CHAIN)]
                target = inside.counter("written_blocks") + blocks
                start = time.perf_counter()
                for keys in chains:
                    stored = await inside.put(keys)
                    assert stored == CHAIN, f"{stored} blocks of {CHAIN} were stored"
                await inside.counted("written_blocks", target)
                return SAMPLE_BYTES / (time.perf_counter() - start) / GIB

            runner.run(fill())
            yield from compare(bench, "nvme-write", lambda n: runner.run(write(n)), disks, True, TARGETS)
