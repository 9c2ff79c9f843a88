"""nvme-*: 4 MiB blocks between NVMe and DRAM slots, compared with direct I/O of the same size (see `disks`).

    nvme-read           promotions of evicted chains, verified; inside the daemon, without a client
    nvme-read-acquire   the same end to end: a client acquires the chains
    nvme-write          write-back of new blocks until their records are committed; without a client
    nvme-write-put      the same end to end: a client puts the blocks

Several reads run at a time, so that the queue of the device stays full. Before writes are measured, every
slot of the slabs has been written, so each write evicts a block.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from bench.disks import Disk, compare, reference_disks
from bench.harness import GIB, KIB, MIB, Bench, NotDone, Result, Target, expect
from bench.inprocess import InProcess, in_process, written_folder
from bench.served import serve, wait_until
from kvstore import Layout, Namespace, Tier

READERS = 3
READ_TARGETS = {name: Target(">=", 0.95) for name in ("fio", "same-memory")}
WRITE_TARGETS = {name: Target(">=", 0.90) for name in ("fio", "same-memory")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """A sample moves `sample_bytes` in chains of `chain` blocks. NVMe is larger than DRAM and a sample."""

    block_bytes: int = 4 * MIB
    chain: int = 16
    sample_bytes: int = 768 * MIB
    dram_bytes: int = 1 * GIB
    nvme_bytes: int = 2 * GIB

    @property
    def layout(self) -> Layout:
        """Returns the layout of the blocks."""
        return Layout(model="bench", block_bytes=self.block_bytes)

    @property
    def chains(self) -> int:
        """Number of chains per sample."""
        return self.sample_bytes // self.block_bytes // self.chain

    @property
    def flush(self) -> int:
        """Number of chains that replace everything in DRAM."""
        return self.dram_bytes // self.block_bytes // self.chain + 1

    def new_chains(self, n: int) -> list[list[bytes]]:
        """Returns the keys of new chains."""
        return [[os.urandom(32) for _ in range(self.chain)] for _ in range(n)]

    def data(self) -> np.ndarray:
        """Returns the bytes of every chain."""
        return np.random.default_rng(1).integers(0, 256, (self.chain, self.block_bytes), np.uint8)


SMOKE = Sizes(64 * KIB, 16, 4 * MIB, 16 * MIB, 32 * MIB)


@contextmanager
def _written(bench: Bench, z: Sizes) -> Iterator[tuple[Path, list[list[bytes]], list[Disk]]]:
    """Yields a folder with every slot written, the keys of its chains, and the references."""
    with bench.scratch() as folder:
        bench.doing("writing every slot once")
        chains = written_folder(folder / "nvme", z.nvme_bytes, z.layout, z.data())
        bench.doing("writing the reference")
        with reference_disks(folder, z.block_bytes, z.nvme_bytes, z.dram_bytes) as disks:
            yield folder / "nvme", chains, disks


def read(bench: Bench) -> Iterator[Result]:
    """Yields one row per reference."""
    z = bench.pick(Sizes(), SMOKE)
    with (
        _written(bench, z) as (folder, chains, disks),
        in_process(folder, z.dram_bytes, z.nvme_bytes, z.layout) as (inside, runner),
    ):
        # DRAM cannot hold all chains, so the next one in order is never in DRAM.
        turn = cycle(chains)

        async def reader(todo: Iterator[list[bytes]]) -> None:
            for keys in todo:
                grant = await inside.acquire(keys)
                expect(grant.slots["tier"].tolist(), [Tier.NVME] * z.chain, "tiers of a chain")
                inside.release(grant.lease)

        async def sample(_: int) -> float:
            todo = islice(turn, z.chains)
            target = inside.counter("promoted_blocks") + z.chains * z.chain
            start = time.perf_counter()
            await asyncio.gather(*(reader(todo) for _ in range(READERS)))
            took_s = time.perf_counter() - start
            if inside.counter("promoted_blocks") < target:
                raise NotDone("fewer blocks were promoted than requested")
            return z.sample_bytes / took_s / GIB

        def run(n: int) -> float:
            return runner.run(sample(n))

        rows = list(compare(bench, "nvme-read", run, disks, z.sample_bytes, False, READ_TARGETS))
        runner.run(_read_back(inside, next(turn), z))
        yield from rows


def read_acquire(bench: Bench) -> Iterator[Result]:
    """Yields one row per reference."""
    z = bench.pick(Sizes(), SMOKE)
    with (
        _written(bench, z) as (folder, chains, disks),
        serve(z.dram_bytes, (folder, z.nvme_bytes)) as (client, _),
        ThreadPoolExecutor(READERS) as readers,
    ):
        space = client.namespace(z.layout)
        turn = cycle(chains)
        lock = threading.Lock()

        def reader(todo: Iterator[list[bytes]]) -> None:
            while True:
                with lock:
                    keys = next(todo, None)
                if keys is None:
                    return
                with space.acquire(keys) as lease:
                    expect(list(lease.tiers), [Tier.NVME] * z.chain, "tiers of a chain")

        def sample(_: int) -> float:
            todo = islice(turn, z.chains)
            start = time.perf_counter()
            for done in [readers.submit(reader, todo) for _ in range(READERS)]:
                done.result()
            return z.sample_bytes / (time.perf_counter() - start) / GIB

        rows = list(compare(bench, "nvme-read-acquire", sample, disks, z.sample_bytes, False, {}))
        _get_back(space, next(turn), z)
        yield from rows


def write(bench: Bench) -> Iterator[Result]:
    """Yields one row per reference."""
    z = bench.pick(Sizes(), SMOKE)
    with (
        _written(bench, z) as (folder, old, disks),
        in_process(folder, z.dram_bytes, z.nvme_bytes, z.layout) as (inside, runner),
    ):

        async def fill() -> None:
            """Writes random bytes to every DRAM slot: some devices are faster with zeros."""
            for keys in old:
                inside.release((await inside.acquire(keys)).lease)

        async def put(chains: list[list[bytes]], data: np.ndarray | None = None) -> float:
            target = inside.counter("written_blocks") + len(chains) * z.chain
            start = time.perf_counter()
            for keys in chains:
                expect(await inside.put(keys, data), z.chain, "blocks stored")
            await inside.counted("written_blocks", target)
            return len(chains) * z.chain * z.block_bytes / (time.perf_counter() - start) / GIB

        async def write_and_read_back() -> None:
            """Checks that written blocks are read back from the slabs after their eviction from DRAM."""
            [keys] = z.new_chains(1)
            await put([keys], z.data())
            await put(z.new_chains(z.flush))
            await _read_back(inside, keys, z)

        def sample(_: int) -> float:
            return runner.run(put(z.new_chains(z.chains)))

        runner.run(fill())
        name = "nvme-write"
        rows = list(compare(bench, name, sample, disks, z.sample_bytes, True, WRITE_TARGETS))
        runner.run(write_and_read_back())
        yield from rows


def write_put(bench: Bench) -> Iterator[Result]:
    """Yields one row per reference."""
    z = bench.pick(Sizes(), SMOKE)
    data = z.data()
    with (
        _written(bench, z) as (folder, _, disks),
        serve(z.dram_bytes, (folder, z.nvme_bytes)) as (client, _),
    ):
        space = client.namespace(z.layout)
        written = 0

        def put(chains: list[list[bytes]]) -> float:
            nonlocal written
            written += len(chains) * z.chain
            start = time.perf_counter()
            for keys in chains:
                expect(space.put(keys, data).stored, z.chain, "blocks stored")
            wait_until(client, lambda s: s["counters"].get("written_blocks", 0) >= written, 0.002)
            return len(chains) * z.chain * z.block_bytes / (time.perf_counter() - start) / GIB

        def sample(_: int) -> float:
            return put(z.new_chains(z.chains))

        rows = list(compare(bench, "nvme-write-put", sample, disks, z.sample_bytes, True, {}))
        [keys] = z.new_chains(1)
        put([keys])
        put(z.new_chains(z.flush))
        _get_back(space, keys, z)
        yield from rows


async def _read_back(inside: InProcess, keys: list[bytes], z: Sizes) -> None:
    grant = await inside.acquire(keys)
    _check(grant.slots["tier"].tolist(), inside.slots(grant), z)
    inside.release(grant.lease)


def _get_back(space: Namespace, keys: list[bytes], z: Sizes) -> None:
    with space.acquire(keys) as lease:
        _check(lease.tiers, lease.blocks, z)


def _check(tiers: Sequence[int], blocks: Sequence[memoryview], z: Sizes) -> None:
    """Raises NotDone unless a chain was read from NVMe with its bytes. Its tail may be evicted."""
    if not tiers:
        raise NotDone("nothing of a written chain is stored")
    expect(list(tiers), [Tier.NVME] * len(tiers), "tiers of a chain")
    for number, (block, right) in enumerate(zip(blocks, z.data(), strict=False)):
        expect(bytes(block[: z.block_bytes]) == right.tobytes(), True, f"block {number} has the stored bytes")
