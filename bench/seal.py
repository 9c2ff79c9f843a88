"""seal: encryption compared with memcpy, and encrypted 4 MiB blocks on NVMe compared with plain ones.

Both tiers are NVMe tiers of the daemon in separate folders. A write ends when its records are committed, a
read when its bytes are verified. `loop_gap_us` is the median of waits above 20 µs of a thread that only reads
the clock while another thread encrypts or decrypts; the event loop would wait as long. `loop_gap_idle_us`:
the same without the other thread.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.harness import GIB, KIB, MIB, Bench, Result, Sample, expect, like_the_daemon
from kvstore import arena
from kvstore.core.actions import BlockIds, Copy, Where
from kvstore.core.events import OK
from kvstore.tiers.base import Owner
from kvstore.tiers.nvme.encryption import BlockCipher
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.key_files import MasterKey
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import ENCRYPTION_BYTES, Layout, slot_bytes

BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a block and of the single extent; seconds of the gap measurement."""

    block_bytes: int = 4 * MIB
    extent_bytes: int = 256 * MIB
    gaps_s: float = 0.5

    @property
    def layout(self) -> Layout:
        """Returns the layout of the blocks."""
        return Layout(model="bench", block_bytes=self.block_bytes)


SMOKE = Sizes(64 * KIB, 4 * MIB, 0.01)
_GAP_S = 20e-6  # shorter gaps are the time of the clock reads


def run(bench: Bench) -> Iterator[Result]:
    """Yields the rows of the cipher and of the tier, in both directions."""
    with like_the_daemon(), bench.scratch() as folder, ExitStack() as stack:
        z = bench.pick(Sizes(), SMOKE)
        memory = arena.Extent.create("kvstore-bench", (BLOCKS + 2) * z.block_bytes)
        stack.callback(memory.close)
        memory.populate(huge=True)
        memory.view[:] = np.random.default_rng(0).integers(0, 256, memory.nbytes, np.uint8).data
        yield from _cipher(bench, memory, z)
        bench.doing("making slabs")
        tiers = [_Tier(z, folder / name, memory, name == "sealed", stack) for name in ("sealed", "plain")]
        writes = bench.interleave("seal-write", [tier.write for tier in tiers], 0.3)
        reads = bench.interleave("seal-read", [tier.read for tier in tiers], 0.3)
        for tier in tiers:
            tier.check()
        yield writes.result("seal-write/plain", "GiB/s")
        yield reads.result("seal-read/plain", "GiB/s")


def _cipher(bench: Bench, memory: arena.Extent, z: Sizes) -> Iterator[Result]:
    block_bytes = z.block_bytes
    seal = BlockCipher(os.urandom(32), bytes(16), block_bytes)
    size = slot_bytes(block_bytes + ENCRYPTION_BYTES)
    payload, slot = memory.view[:block_bytes], memory.view[block_bytes : block_bytes + size]
    seal.encrypt(b"key", payload, slot)

    into = memory.view[-block_bytes:]

    def sealing() -> None:
        seal.encrypt(b"key", payload, slot)

    def opening() -> None:
        expect(seal.decrypt(b"key", slot, into), True, "a block opened")

    def copying() -> None:
        into[:] = payload

    into[:] = bytes(block_bytes)
    opening()
    expect(into == payload, True, "correct decrypted bytes")
    for name, work in (("seal-cipher", sealing), ("open-cipher", opening)):
        rounds = bench.interleave(name, [_rate(work, block_bytes), _rate(copying, block_bytes)], 0.15)
        gaps_us = {"loop_gap_us": 1e6 * _gap_s(work, z), "loop_gap_idle_us": 1e6 * _gap_s(None, z)}
        yield rounds.result(f"{name}/memcpy", "GiB/s", **gaps_us)


def _rate(work: Callable[[], None], nbytes: int) -> Sample:
    def sample(_: int) -> float:
        start = time.perf_counter()
        for _ in range(BLOCKS):
            work()
        return BLOCKS * nbytes / (time.perf_counter() - start) / GIB

    return sample


def _gap_s(work: Callable[[], None] | None, z: Sizes) -> float:
    """Returns the median wait of a thread that reads the clock while another one works, in s."""
    stop = threading.Event()

    def working() -> None:
        while work is not None and not stop.is_set():
            work()

    thread = threading.Thread(target=working)
    thread.start()
    gaps, last, ends = [], time.perf_counter(), time.perf_counter() + z.gaps_s
    while last < ends:
        now = time.perf_counter()
        if now - last > _GAP_S:
            gaps.append(now - last)
        last = now
    stop.set()
    thread.join()
    return statistics.median(gaps) if gaps else 0.0


class _Tier:
    """An NVMe tier of an encrypted or plain tenant, and batches of blocks to move."""

    def __init__(self, z: Sizes, folder: Path, memory: arena.Extent, sealed: bool, stack: ExitStack) -> None:
        master = MasterKey("the bench", os.urandom(32))
        tier = NvmeTier.open(
            folder, 2 * z.extent_bytes, z.extent_bytes, PosixEngine(), master, {"bench": sealed}
        )
        self._nbytes = BLOCKS * z.block_bytes
        stack.callback(tier.close)
        tier.load()
        made = threading.Event()
        tier.start(lambda _: None, lambda _: made.set())
        made.wait()
        size = slot_bytes(z.block_bytes + ENCRYPTION_BYTES * sealed)
        tier.format(0, size, Owner("bench"))
        fingerprint = z.layout.fingerprint("bench")
        tier.put_namespace(1, Namespace("bench", z.layout.to_map(), fingerprint))
        self._tier = tier
        self._slots = [memory.view[i * z.block_bytes :][: z.block_bytes] for i in range(BLOCKS)]
        keys = [b"%064d" % i for i in range(BLOCKS)]
        seeds = [arena.seed(fingerprint, key, z.block_bytes) for key in keys]
        sums = [arena.checksum(slot, seed) for slot, seed in zip(self._slots, seeds, strict=True)]
        words = np.frombuffer(b"".join(keys), np.uint64).reshape(BLOCKS, 8)
        ones = np.ones(BLOCKS, np.uint16)
        identity = BlockIds(ones, words, np.full(BLOCKS, 64, np.uint8), np.array(sums, np.uint64))
        where = Where(np.arange(BLOCKS, dtype=np.uint64))
        version = np.ones(BLOCKS, np.uint32)
        self._copy = Copy(1, 0, 1, identity, [b""] * BLOCKS, where, where, version, False, None)
        self._fingerprints, self._lengths = {1: fingerprint}, {1: z.block_bytes}

    def write(self, _: int) -> float:
        """Writes a batch. Returns GiB/s."""
        return self._timed(lambda done: self._tier.writer.write(self._copy, self._slots, self._lengths, done))

    def read(self, _: int) -> float:
        """Reads a batch. Returns GiB/s."""
        return self._timed(
            lambda done: self._tier.reader.read(
                self._copy, self._slots, self._fingerprints, self._lengths, done
            )
        )

    def check(self) -> None:
        """Raises NotDone unless the written bytes are read back into cleared memory."""
        before = [bytes(slot) for slot in self._slots]
        for slot in self._slots:
            slot[:] = bytes(len(slot))
        self.read(0)
        expect([bytes(slot) for slot in self._slots] == before, True, "correct bytes read back")

    def _timed(self, start: Callable[[Callable[[np.ndarray], None]], None]) -> float:
        ended, outcomes = threading.Event(), []

        def done(results: np.ndarray) -> None:
            outcomes.extend(results.tolist())
            ended.set()

        began = time.perf_counter()
        start(done)
        ended.wait()
        took_s = time.perf_counter() - began
        expect(outcomes, [OK] * BLOCKS, "outcomes")
        return self._nbytes / took_s / GIB
