"""scale: small blocks put with write-through while the number of stored blocks grows, and look-ups beside it.

One client puts chains in batches of 256 blocks. At each milestone of stored blocks its rate is measured for
half of the measuring time; meanwhile another process looks up 256 stored keys every 5 ms. The reference is
the rate at the first milestone. `python -m bench.scale BYTES BLOCKS ...` measures other sizes.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.harness import GIB, KIB, MIB, Bench, Result, Target, cpu_seconds, expect, quantile
from bench.served import serve, wait_for_table, wait_until
from bench.tenant_load import Cue, running
from kvstore import Client, Layout, Namespace

Milestones = dict[str, int]
"""Numbers of stored blocks, by the name of the row."""

SIZES: dict[int, Milestones] = {
    4 * KIB: {"4KiB/0.1M": 100_000, "4KiB/0.5M": 500_000},
    64 * KIB: {"64KiB/0.05M": 50_000},
}
SMOKE: dict[int, Milestones] = {
    4 * KIB: {"4KiB/0.1M": 2048, "4KiB/0.5M": 4096},
    64 * KIB: {"64KiB/0.05M": 2048},
}
WANTED = {4 * KIB: 100_000, 64 * KIB: 20_000}
"""Blocks/s, by bytes of a block."""

BATCH, CHAIN = 256, 2048
DRAM_BYTES = 256 * MIB
MOST_PER_S = 50_000
"""Blocks of 64 KiB that are put in a second, at most: the tier has room for all that are put meanwhile."""
LOOKUP_P99_MS = 1.0
_LOOKUP_EVERY_S = 0.005


def run(bench: Bench) -> Iterator[Result]:
    """Yields two rows per milestone: puts, and look-ups beside them."""
    for block_bytes, milestones in bench.pick(SIZES, SMOKE).items():
        yield from measured(bench, block_bytes, milestones)


def measured(bench: Bench, block_bytes: int, milestones: Milestones) -> Iterator[Result]:
    """Yields the rows of one block size. The milestones ascend."""
    layout = Layout(model="bench", block_bytes=block_bytes)
    # What is put while it is measured must not evict the chain that is looked up.
    most = max(milestones.values()) + int(MOST_PER_S * bench.pick(bench.seconds / 2, 0.0))
    # A daemon has room for the names of blocks of 16 KiB on average, not for all of smaller ones.
    nvme_bytes = -(-(most * 5 // 4 * max(block_bytes, 16 * KIB)) // GIB) * GIB + GIB
    with bench.scratch() as folder, serve(DRAM_BYTES, (folder, nvme_bytes)) as (client, daemon):
        load, first = _Puts(client.namespace(layout), layout), 0.0
        for name, blocks in milestones.items():
            while load.stored < blocks:
                load.put_chain()
                bench.doing(f"filling {name}", load.stored / blocks)
            expect(client.namespace(layout).lookup(load.chains[0]), CHAIN, "blocks of the first chain found")
            with running(_look_up, daemon.url, layout, load.chains[-1]) as end:
                rate, longest_ms, cpu_us = load.measure(bench.seconds / 2, daemon.pid)
                took_ms = end()
            _all_written(client)
            first = first or rate
            target = Target(">=", WANTED.get(block_bytes, 0), "value")
            extra: dict[str, float] = {"longest_put_ms": longest_ms, "daemon_cpu_us_per_block": cpu_us}
            row, runs = f"scale/{name}", len(load.chains)
            yield Result(row, rate, "blocks/s", first, rate / first, runs, target=target, extra=extra)
            p99, p50 = quantile(took_ms, 0.99), quantile(took_ms, 0.5)
            bound = Target("<=", LOOKUP_P99_MS, "value")
            extra, row, runs = {"p50": p50, "longest": max(took_ms)}, f"{row}/lookup-p99", len(took_ms)
            yield Result(row, p99, "ms", LOOKUP_P99_MS, p99 / LOOKUP_P99_MS, runs, target=bound, extra=extra)


class _Puts:
    """Puts chains of new blocks."""

    def __init__(self, space: Namespace, layout: Layout) -> None:
        self._space = space
        self._data = np.zeros((BATCH, layout.block_bytes), np.uint8)
        self.stored = 0
        self.chains: list[list[bytes]] = []

    def put_chain(self) -> float:
        """Puts one chain. Returns the longest call in s."""
        keys = [os.urandom(32) for _ in range(CHAIN)]
        longest, parent = 0.0, None
        for at in range(0, CHAIN, BATCH):
            start = time.perf_counter()
            put = self._space.put(keys[at : at + BATCH], self._data, parent)
            longest = max(longest, time.perf_counter() - start)
            expect(put.stored, BATCH, f"blocks stored ({put.why})")
            parent = keys[at + BATCH - 1]
        self.stored += CHAIN
        self.chains.append(keys)
        return longest

    def measure(self, seconds: float, pid: int) -> tuple[float, float, float]:
        """Puts for some seconds. Returns blocks/s, the longest call in ms, and daemon CPU us a block."""
        before, cpu_s, start, longest = self.stored, cpu_seconds(pid), time.perf_counter(), 0.0
        while (passed := time.perf_counter() - start) < seconds or self.stored == before:
            longest = max(longest, self.put_chain())
        n = self.stored - before
        return n / passed, 1000 * longest, 1e6 * (cpu_seconds(pid) - cpu_s) / n


def _look_up(cue: Cue, url: str, layout: Layout, keys: list[bytes]) -> list[float]:
    """Looks up a part of a stored chain now and then. Returns ms per call."""
    took_ms = []
    dice = random.Random(1)
    with Client(url, deadline_s=30.0, strict=True) as client:
        wait_for_table(client, layout, keys[:1])
        space = client.namespace(layout)
        while not cue.is_set():
            at = dice.randrange(0, CHAIN - BATCH)
            start = time.perf_counter()
            found = space.lookup(keys[at : at + BATCH])
            took_ms.append(1000 * (time.perf_counter() - start))
            expect(found, BATCH, "blocks found")
            cue.begin()
            time.sleep(_LOOKUP_EVERY_S)
    return took_ms


def _all_written(client: Client) -> None:
    """Waits until no copies are queued or under way."""
    wait_until(client, lambda status: not status["copies_under_way"], 0.05)


def main() -> None:
    """Measures one block size with milestones from the command line. Prints JSON lines."""
    block_bytes, *milestones = map(int, sys.argv[1:])
    bench = Bench(8.0, Path.cwd())
    for result in measured(bench, block_bytes, {str(n): n for n in milestones}):
        print(json.dumps(result.to_map()), flush=True)


if __name__ == "__main__":
    main()
