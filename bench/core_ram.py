"""core-ram: bytes of RAM per block in the core, with 1 M blocks on NVMe and a tenth of them in DRAM too.

The figure is the growth of the resident memory of a fresh process. `counted_bytes` is the size of the core's
arrays.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from bench.harness import Bench, Result, Target, expect
from bench.node import Node
from kvstore.core.blocks.key_batch import Keys

BLOCKS, SMOKE, CHAIN = 1_000_000, 10_000, 250
DRAM_SHARE = 10
BOUND_BYTES = 200.0


def run(bench: Bench) -> Iterator[Result]:
    """Yields two rows: blocks restored at a start, and blocks put chain by chain."""
    context = mp.get_context("spawn")
    n = bench.pick(BLOCKS, SMOKE)
    for way in ("restored", "put"):
        bench.doing(f"{n} blocks, {way}")
        ours, theirs = context.Pipe()
        process = context.Process(target=_fill, args=(way, n, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            measured, counted, blocks = ours.recv()
        finally:
            process.kill()
            process.join()
        expect(blocks, n, "blocks stored")
        yield Result(
            f"core-ram/{way}",
            measured,
            "bytes",
            BOUND_BYTES,
            measured / BOUND_BYTES,
            1,
            target=Target("<=", BOUND_BYTES, "value"),
            extra={"counted_bytes": counted, "blocks": blocks},
        )


def _fill(way: str, n: int, pipe: Connection) -> None:
    """Fills a node and sends the measurements. Runs in a separate process."""
    warm = Node(CHAIN, CHAIN, 1 << 16)  # memory of the first use of numpy does not count
    warm.put(Keys(os.urandom(32 * CHAIN), 32), b"")
    before = _resident_bytes()
    node = Node(n // DRAM_SHARE, n, 4 * n)
    for start in range(0, n, CHAIN):
        chain = Keys(os.urandom(32 * CHAIN), 32)
        if way == "put":
            expect(node.put(chain, b""), CHAIN, "blocks stored")
        else:
            node.restore([chain], start)
            if (start // CHAIN) % DRAM_SHARE == 0:
                lease, found = node.acquire(chain)
                expect(found, CHAIN, "blocks found")
                node.release(lease)
    gc.collect()
    residency = node.placement.residency
    blocks = residency.blocks.used
    pipe.send(((_resident_bytes() - before) / blocks, residency.ram_bytes() / blocks, blocks))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
