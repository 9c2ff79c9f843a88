"""nvme-read-acquire: the same end to end: a client acquires chains that are on NVMe only, three at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

from bench.disks import BLOCK_BYTES, SAMPLE_BYTES, compare, reference_disks
from bench.harness import GIB, Bench, Result
from bench.inprocess import written_folder
from bench.served import serve
from kvstore import Layout, Tier

NVME_BYTES, DRAM_BYTES = 2 * GIB, 1 * GIB
CHAIN, READERS = 16, 3
LAYOUT = Layout(model="bench", block_bytes=BLOCK_BYTES)


def run(bench: Bench) -> Iterator[Result]:
    """A line for each reference."""
    with bench.scratch() as folder:
        bench.doing("writing the blocks")
        chains = written_folder(folder / "nvme", NVME_BYTES, LAYOUT, CHAIN)
        bench.doing("writing the reference")
        with (
            reference_disks(folder, NVME_BYTES, DRAM_BYTES) as disks,
            serve(DRAM_BYTES, (folder / "nvme", NVME_BYTES)) as (client, _),
            ThreadPoolExecutor(READERS) as readers,
        ):
            space = client.namespace(LAYOUT)
            turn = cycle(chains)
            lock = threading.Lock()

            def reader(todo: Iterator[list[bytes]]) -> None:
                while True:
                    with lock:
                        keys = next(todo, None)
                    if keys is None:
                        return
                    with space.acquire(keys) as lease:
                        assert len(lease) == CHAIN, f"{len(lease)} blocks of {CHAIN}"
                        assert set(lease.tiers) == {Tier.NVME}, "a block was in DRAM"

            def read(_: int) -> float:
                todo = islice(turn, SAMPLE_BYTES // BLOCK_BYTES // CHAIN)
                start = time.perf_counter()
                for done in [readers.submit(reader, todo) for _ in range(READERS)]:
                    done.result()
                return SAMPLE_BYTES / (time.perf_counter() - start) / GIB

            yield from compare(bench, "nvme-read-acquire", read, disks, False, {})
