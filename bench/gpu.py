"""gpu: transfers of blocks between DRAM, NVMe and a GPU. Each row has its own reference:

    row              measured                                          reference
    dram-to-device   DRAM slots of a daemon to device memory           one cudaMemcpy from pinned memory
    hbm-hit          blocks of a pool at random slots                  one copy within the device
    hbm-hit-verified the same, with checksums of the read blocks       one copy within the device
    hbm-get          get of a client from the daemon's pool, CUDA IPC  one copy within the device
    nvme-to-hbm      kvikio engine of the daemon to device memory      kvikio on the same file
    checksum         checksums of blocks                               copy in the device, reads plus writes
    pages            one kernel scatters blocks to 16-token pages      one copy within the device

The data is several times as large as the L2 cache of the device, and every sample waits for the device. The
pool of `hbm-hit` belongs to this process, that of `hbm-get` to the daemon. `nvme-to-hbm` needs kvikio.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import GIB, KIB, MIB, Bench, Result, Sample, Target, Unable
from bench.served import serve
from kvstore import Layout
from kvstore.cuda import device
from kvstore.cuda.kernels import checksums, copy_pieces, spans
from kvstore.tiers.base import BlockIO
from kvstore.tiers.nvme.io import kvikio_engine

BLOCK_BYTES, BLOCKS = 2 * MIB, 256
TOTAL_BYTES = BLOCK_BYTES * BLOCKS
PAGE_BYTES = 32 * KIB
"""Keys or values of 16 tokens in one layer: 8 heads of 128 values of 16 bits."""

MANY = 8
"""Factor of blocks per call of a second row, in which the host's share of the call is negligible."""

REPEATS = 8
"""Repetitions per sample, so that the wait for the device is a small part of it."""

NVME_BLOCKS = 1024  # 2 GiB, read at random offsets
READS = 128  # blocks per sample
IO_THREADS, TASK_BYTES = 4, 512 * KIB
LAYOUT = Layout(model="bench", block_bytes=BLOCK_BYTES)


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per kind of transfer. Raises Unable without a GPU."""
    if why := device.why_not():
        raise Unable(f"no GPU to measure: {why}")
    gpu = device.Gpu.open(device.uuids()[0])
    for way in (_dram, _hbm, _client, _nvme, _checksum, _pages):
        with ExitStack() as stack:
            yield from way(bench, _Device(gpu, stack))


class _Device:
    """Memory and streams of the device during one measurement, and plain copies by cupy."""

    def __init__(self, gpu: device.Gpu, stack: ExitStack) -> None:
        import cupy  # noqa: PLC0415

        self.gpu = gpu
        self.stack = stack
        stack.enter_context(cupy.cuda.Device(gpu.ordinal))
        self.stream = gpu.stream()
        self.cupy = cupy
        self._plain = cupy.cuda.Stream(non_blocking=True)

    def allocate(self, nbytes: int) -> device.DeviceBuffer:
        """Returns device memory that is freed at the end."""
        buffer = self.gpu.allocate(nbytes)
        self.stack.callback(self.gpu.free, buffer)
        return buffer

    def filled(self, nbytes: int) -> device.DeviceBuffer:
        """Returns device memory filled with random bytes."""
        buffer = self.allocate(nbytes)
        data = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        self.stream.copy(buffer, data.data)
        self.stream.wait()
        return buffer

    def plain_copy(self, target: int, source: int, counted_bytes: int) -> Sample:
        """Returns a sample that copies everything between two addresses by one cudaMemcpyAsync."""
        copy = self.cupy.cuda.runtime.memcpyAsync
        anywhere = self.cupy.cuda.runtime.memcpyDefault

        def work() -> None:
            for _ in range(REPEATS):
                copy(target, source, TOTAL_BYTES, anywhere, self._plain.ptr)
            self._plain.synchronize()

        return _timed(counted_bytes * REPEATS, work)


def _dram(bench: Bench, on: _Device) -> Iterator[Result]:
    keys = [os.urandom(32) for _ in range(BLOCKS)]
    into = on.allocate(TOTAL_BYTES)
    parts = _blocks(into)
    pinned = on.cupy.cuda.alloc_pinned_memory(TOTAL_BYTES)
    data = np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
    with serve(TOTAL_BYTES + GIB) as (client, _):
        space = client.namespace(LAYOUT)
        assert space.put(keys, data).stored == BLOCKS
        with space.acquire(keys) as lease, ExitStack() as registered:
            slots = list(lease.blocks)
            pins = [on.gpu.register(slot, readonly=True) for slot in slots]
            for slot, pin in zip(slots, pins, strict=True):
                if pin:
                    registered.callback(on.gpu.unregister, slot)

            def work() -> None:
                for _ in range(REPEATS):
                    for part, slot in zip(parts, slots, strict=True):
                        on.stream.copy(part, slot)
                on.stream.wait()

            plain = on.plain_copy(into.address, pinned.ptr, TOTAL_BYTES)
            rounds = bench.interleave("DRAM to device", (_timed(TOTAL_BYTES * REPEATS, work), plain), 1 / 6)
            yield rounds.result("gpu/dram-to-device", "GiB/s", Target(">=", 0.9), pinned=all(pins))


def _hbm(bench: Bench, on: _Device) -> Iterator[Result]:
    pool, into = on.filled(TOTAL_BYTES), on.allocate(TOTAL_BYTES)
    slots, parts, seeds = _blocks(pool), _blocks(into), range(BLOCKS)

    order = np.random.default_rng(5).permutation(BLOCKS).tolist()
    sources, nbytes = spans([slots[i] for i in order])
    right = checksums(on.stream, sources, nbytes, seeds)
    targets, _ = spans(parts)

    def unverified() -> None:
        for _ in range(REPEATS):
            copy_pieces(on.stream, targets, sources, nbytes)
        on.stream.wait()

    def verified() -> None:
        for _ in range(REPEATS):
            copy_pieces(on.stream, targets, sources, nbytes)
            assert np.array_equal(checksums(on.stream, targets, nbytes, seeds), right)

    plain = on.plain_copy(into.address, pool.address, TOTAL_BYTES)
    samples = _timed(TOTAL_BYTES * REPEATS, unverified), plain
    yield bench.interleave("HBM hit", samples, 1 / 6).result("gpu/hbm-hit", "GiB/s", Target(">=", 0.8))
    samples = _timed(TOTAL_BYTES * REPEATS, verified), plain
    yield bench.interleave("HBM hit, verified", samples, 1 / 6).result("gpu/hbm-hit-verified", "GiB/s")


def _client(bench: Bench, on: _Device) -> Iterator[Result]:
    """Yields the row of a whole hit: request, copies and checksums."""
    keys = [os.urandom(32) for _ in range(BLOCKS)]
    data, into = on.filled(TOTAL_BYTES), on.allocate(TOTAL_BYTES)
    with serve(TOTAL_BYTES + GIB, hbm_bytes=2 * TOTAL_BYTES) as (client, _):
        space = client.namespace(LAYOUT)
        assert space.put(keys, data).stored == BLOCKS

        def work() -> None:
            for _ in range(REPEATS):
                assert space.get(keys, into) == BLOCKS

        with space.acquire(keys, device=on.gpu.ordinal) as lease:
            assert lease.in_hbm, "CUDA IPC does not work here"
        plain = on.plain_copy(into.address, data.address, TOTAL_BYTES)
        samples = _timed(TOTAL_BYTES * REPEATS, work), plain
        yield bench.interleave("get from the pool", samples, 1 / 6).result("gpu/hbm-get", "GiB/s")


def _nvme(bench: Bench, on: _Device) -> Iterator[Result]:
    if why := kvikio_engine.why_not():
        print(f"gpu/nvme-to-hbm is left out: {why}", file=sys.stderr)
        return
    from kvikio import CuFile  # noqa: PLC0415

    into = on.allocate(READS * BLOCK_BYTES)
    parts = [into.part(i * BLOCK_BYTES, (i + 1) * BLOCK_BYTES) for i in range(READS)]
    arrays = [on.cupy.asarray(part) for part in parts]
    random = np.random.default_rng(2)
    with bench.scratch() as folder:
        path = folder / "blocks"
        bench.doing("writing the file")
        _write(path)
        engine = on.stack.enter_context(closing(kvikio_engine.KvikioEngine(IO_THREADS, TASK_BYTES)))
        engine.register(into)  # one buffer for both: cuFile registers it by address
        on.stack.callback(engine.unregister, into)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        on.stack.callback(os.close, fd)
        on.stack.callback(engine.release, fd)
        file = on.stack.enter_context(CuFile(str(path), "r"))

        def ours() -> None:
            offsets = random.permutation(NVME_BLOCKS)[:READS] * BLOCK_BYTES
            ios = [BlockIO(fd, int(at), part, False) for at, part in zip(offsets, parts, strict=True)]
            over = threading.Event()
            outcomes: list[OSError | None] = []

            def done(ended: list[OSError | None]) -> None:
                outcomes.extend(ended)
                over.set()

            engine.submit(ios, done)
            assert over.wait(60.0), "the engine does not answer"
            assert outcomes == [None] * READS, outcomes

        def alone() -> None:
            offsets = random.permutation(NVME_BLOCKS)[:READS] * BLOCK_BYTES
            futures = [
                file.pread(array, BLOCK_BYTES, int(at), task_size=TASK_BYTES)
                for at, array in zip(offsets, arrays, strict=True)
            ]
            assert sum(future.get() for future in futures) == READS * BLOCK_BYTES

        samples = [_timed(READS * BLOCK_BYTES, work) for work in (ours, alone)]
        rounds = bench.interleave("NVMe to HBM", samples, 1 / 6)
        yield rounds.result("gpu/nvme-to-hbm", "GiB/s", Target(">=", 0.95))


def _checksum(bench: Bench, on: _Device) -> Iterator[Result]:
    pool, other = on.filled(TOTAL_BYTES), on.allocate(TOTAL_BYTES)
    plain = on.plain_copy(other.address, pool.address, 2 * TOTAL_BYTES)
    # Large calls read their blocks repeatedly. TOTAL_BYTES is larger than any cache.
    for times in (1, MANY):
        addresses, lengths = spans(_blocks(pool) * times)
        seeds = list(range(BLOCKS * times))

        def work(args: tuple[Any, ...] = (addresses, lengths, seeds)) -> None:
            for _ in range(REPEATS):
                checksums(on.stream, *args)

        samples = _timed(TOTAL_BYTES * times * REPEATS, work), plain
        rounds = bench.interleave(f"checksums of {len(seeds)} blocks", samples, 1 / 6)
        yield rounds.result(f"gpu/checksum/{len(seeds)}-blocks", "GiB/s", Target(">=", 0.5))


def _pages(bench: Bench, on: _Device) -> Iterator[Result]:
    pool, cache = on.filled(TOTAL_BYTES), on.allocate(TOTAL_BYTES)
    n = TOTAL_BYTES // PAGE_BYTES
    offsets = np.arange(n, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    sources = offsets + np.uint64(pool.address)
    targets = np.random.default_rng(3).permutation(offsets) + np.uint64(cache.address)
    nbytes = np.full(n, PAGE_BYTES, np.uint64)

    def work() -> None:
        for _ in range(REPEATS):
            copy_pieces(on.stream, targets, sources, nbytes)
        on.stream.wait()

    plain = on.plain_copy(cache.address, pool.address, TOTAL_BYTES)
    rounds = bench.interleave("pages", (_timed(TOTAL_BYTES * REPEATS, work), plain), 1 / 6)
    yield rounds.result("gpu/pages", "GiB/s", Target(">=", 0.7))


def _timed(nbytes: int, work: Callable[[], None]) -> Sample:
    """Returns a sample of synchronous work, in GiB/s."""

    def sample(_: int) -> float:
        start = time.perf_counter()
        work()
        return nbytes / (time.perf_counter() - start) / GIB

    return sample


def _blocks(buffer: device.DeviceBuffer) -> list[device.DeviceBuffer]:
    return [buffer.part(i * BLOCK_BYTES, (i + 1) * BLOCK_BYTES) for i in range(BLOCKS)]


def _write(path: Path) -> None:
    """Writes a file of random bytes to the device, past the page cache."""
    data = np.random.default_rng(4).integers(0, 256, BLOCK_BYTES, np.uint8)
    with path.open("wb") as file:
        for _ in range(NVME_BLOCKS):
            file.write(data.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
