"""core-ram: bytes of RAM that the core takes a block, 1 M blocks on NVMe and a tenth of them in DRAM too.

Measured from outside, as growth of a fresh process's resident memory; beside it what the core counts itself.
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
    """Two lines: blocks read back at a start, and blocks put one chain after another."""
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
        expect(blocks, n, "blocks that are there")
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
    """Runs in a process of its own."""
    warm = Node(CHAIN, CHAIN, 1 << 16)  # what the first use of numpy takes is none of the core's
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
