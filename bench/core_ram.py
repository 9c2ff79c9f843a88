"""core-ram: bytes of RAM per block in the core, with 1 M blocks on NVMe and a tenth of them in DRAM too.

The figure is the growth of the resident memory of a fresh process. `counted_bytes` is the size of the core's
arrays, `put_p99_us` and `lookup_p99_us` the CPU time of calls of 32 and 250 blocks among so many.
`python -m bench.core_ram BLOCKS ...` measures other numbers of blocks.
"""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from bench.harness import Bench, Result, Target, expect, quantile
from bench.node import Node
from kvstore.core.blocks.key_batch import Keys

BLOCKS, SMOKE, CHAIN = 1_000_000, 10_000, 250
DRAM_SHARE = 10
BOUND_BYTES = 150.0
AT_ONCE = 40
"""Chains that one event restores."""
_CALLS = 1000


def run(bench: Bench) -> Iterator[Result]:
    """Yields two rows: blocks restored at a start, and blocks put chain by chain."""
    yield from measured(bench, bench.pick(BLOCKS, SMOKE))


def measured(bench: Bench, n: int) -> Iterator[Result]:
    """Yields the rows for n blocks."""
    context = mp.get_context("spawn")
    for way in ("restored", "put"):
        bench.doing(f"{n} blocks, {way}")
        ours, theirs = context.Pipe()
        process = context.Process(target=_fill, args=(way, n, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            resident, counted, blocks, put_us, lookup_us = ours.recv()
        finally:
            process.kill()
            process.join()
        expect(blocks, n, "blocks stored")
        yield Result(
            f"core-ram/{way}",
            resident,
            "bytes",
            BOUND_BYTES,
            resident / BOUND_BYTES,
            1,
            target=Target("<=", BOUND_BYTES, "value"),
            extra={
                "counted_bytes": counted,
                "blocks": blocks,
                "put_p99_us": put_us,
                "lookup_p99_us": lookup_us,
            },
        )


def _fill(way: str, n: int, pipe: Connection) -> None:
    """Fills a node and sends the measurements. Runs in a separate process."""
    warm = Node(CHAIN, CHAIN, 1 << 16)  # memory of the first use of numpy does not count
    warm.put(Keys(os.urandom(32 * CHAIN), 32), b"")
    before = _resident_bytes()
    node = Node(n // DRAM_SHARE, n, 4 * n)
    last = Keys(b"", 32)
    step = CHAIN * (AT_ONCE if way == "restored" else 1)
    for start in range(0, n, step):
        chains = [Keys(os.urandom(32 * CHAIN), 32) for _ in range(start, min(n, start + step), CHAIN)]
        last = chains[-1]
        if way == "put":
            expect(node.put(last, b""), CHAIN, "blocks stored")
            continue
        node.restore(chains, start)
        for chain in chains[::DRAM_SHARE]:
            lease, found = node.acquire(chain)
            expect(found, CHAIN, "blocks found")
            node.release(lease)
    del chains
    gc.collect()
    residency = node.placement.residency
    blocks = residency.blocks.used
    per_block = (_resident_bytes() - before) / blocks, residency.ram_bytes() / blocks
    lookup_us = _p99_us(lambda: expect(node.lookup(last), CHAIN, "blocks found"))
    put_us = _p99_us(lambda: expect(node.put(Keys(os.urandom(32 * 32), 32), b""), 32, "blocks stored"))
    pipe.send((*per_block, blocks, put_us, lookup_us))


def _p99_us(call: Callable[[], object]) -> float:
    """Returns the p99 of the CPU time of a call."""
    took_us = []
    for _ in range(_CALLS):
        start = time.process_time()
        call()
        took_us.append(1e6 * (time.process_time() - start))
    return quantile(took_us, 0.99)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measures numbers of blocks from the command line. Prints JSON lines."""
    bench = Bench(8.0, Path.cwd())
    for n in map(int, sys.argv[1:]):
        for result in measured(bench, n):
            print(json.dumps(result.to_map()), flush=True)


if __name__ == "__main__":
    main()
