"""nvme-read: 4 MiB blocks from NVMe into DRAM slots, verified, against direct reads of the same size.

The daemon's own path without a client: acquires of whole chains that DRAM has let go of, several at a time,
so that the queue of the device stays full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import cycle, islice

from bench.disks import BLOCK_BYTES, SAMPLE_BYTES, compare, reference_disks
from bench.harness import GIB, Bench, Result, Target
from bench.inprocess import in_process, written_folder
from kvstore import Layout, Tier

NVME_BYTES, DRAM_BYTES = 2 * GIB, 1 * GIB
CHAIN, READERS = 16, 3
LAYOUT = Layout(model="bench", block_bytes=BLOCK_BYTES)
TARGETS = {name: Target(">=", 0.95) for name in ("fio", "same-memory")}


def run(bench: Bench) -> Iterator[Result]:
    """A line for each reference."""
    with bench.scratch() as folder:
        bench.doing("writing the blocks")
        chains = written_folder(folder / "nvme", NVME_BYTES, LAYOUT, CHAIN)
        bench.doing("writing the reference")
        with (
            reference_disks(folder, NVME_BYTES, DRAM_BYTES) as disks,
            in_process(folder / "nvme", DRAM_BYTES, NVME_BYTES, LAYOUT) as (inside, runner),
        ):
            # All chains in turn, which are more than DRAM holds: the next one is never there.
            turn = cycle(chains)

            async def reader(todo: Iterator[list[bytes]]) -> None:
                for keys in todo:
                    lease, tiers = await inside.acquire(keys)
                    assert len(tiers) == CHAIN, f"{len(tiers)} blocks of {CHAIN}"
                    assert (tiers == Tier.NVME).all(), "a block was in DRAM"
                    inside.release(lease)

            async def read(_: int) -> float:
                todo = islice(turn, SAMPLE_BYTES // BLOCK_BYTES // CHAIN)
                start = time.perf_counter()
                await asyncio.gather(*(reader(todo) for _ in range(READERS)))
                return SAMPLE_BYTES / (time.perf_counter() - start) / GIB

            yield from compare(bench, "nvme-read", lambda n: runner.run(read(n)), disks, False, TARGETS)
