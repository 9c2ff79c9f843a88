"""seal: encrypted blocks beside plain ones: cipher against memcpy, and 4 MiB blocks to NVMe and back.

Both tiers are the daemon's own, each in a folder of its own; a write lasts until its records are committed, a
read until its bytes are verified. `loop_gap_us` is how long a thread that does nothing but look at the clock
waits at a time while another seals or opens, as the event loop may: the middle one of the waits above 20 us.
`loop_gap_idle_us`: without the other thread.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.harness import GIB, MIB, Bench, Result, Sample, like_the_daemon
from kvstore import arena
from kvstore.core.actions import Copy, Identity, Where
from kvstore.core.events import OK
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.keys import MasterKey
from kvstore.tiers.nvme.posix import PosixEngine
from kvstore.tiers.nvme.seal import Seal
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import SEAL_BYTES, Layout, slot_bytes

BLOCK_BYTES, BLOCKS = 4 * MIB, 32
LAYOUT = Layout(model="bench", block_bytes=BLOCK_BYTES)
LIMIT_BYTES, EXTENT_BYTES = 512 * MIB, 256 * MIB
_GAP_S = 20e-6  # what is shorter is the clock's own


def run(bench: Bench) -> Iterator[Result]:
    """The cipher, then the tier, each way."""
    with like_the_daemon(), bench.scratch() as folder, ExitStack() as stack:
        memory = arena.Extent.create("kvstore-bench", (BLOCKS + 2) * BLOCK_BYTES)
        stack.callback(memory.close)
        memory.populate(huge=True)
        memory.view[:] = np.random.default_rng(0).integers(0, 256, memory.nbytes, np.uint8).data
        yield from _cipher(bench, memory)
        bench.doing("making slabs")
        tiers = [_Tier(folder / name, memory, name == "sealed", stack) for name in ("sealed", "plain")]
        writes = bench.interleave("seal-write", [tier.write for tier in tiers], 0.3)
        yield writes.result("seal-write/plain", "GiB/s")
        reads = bench.interleave("seal-read", [tier.read for tier in tiers], 0.3)
        yield reads.result("seal-read/plain", "GiB/s")


def _cipher(bench: Bench, memory: arena.Extent) -> Iterator[Result]:
    seal = Seal(os.urandom(32), bytes(16), BLOCK_BYTES)
    size = slot_bytes(BLOCK_BYTES + SEAL_BYTES)
    payload, slot = memory.view[:BLOCK_BYTES], memory.view[BLOCK_BYTES : BLOCK_BYTES + size]
    seal.seal(b"key", payload, slot)

    into = memory.view[-BLOCK_BYTES:]

    def sealing() -> None:
        seal.seal(b"key", payload, slot)

    def opening() -> None:
        assert seal.open(b"key", slot, into)

    def copying() -> None:
        into[:] = payload

    for name, work in (("seal-cipher", sealing), ("open-cipher", opening)):
        rounds = bench.interleave(name, [_rate(work), _rate(copying)], 0.15)
        gaps_us = {"loop_gap_us": 1e6 * _gap_s(work), "loop_gap_idle_us": 1e6 * _gap_s(None)}
        yield rounds.result(f"{name}/memcpy", "GiB/s", **gaps_us)


def _rate(work: Callable[[], None]) -> Sample:
    def sample(_: int) -> float:
        start = time.perf_counter()
        for _ in range(BLOCKS):
            work()
        return BLOCKS * BLOCK_BYTES / (time.perf_counter() - start) / GIB

    return sample


def _gap_s(work: Callable[[], None] | None) -> float:
    """How long a thread waits for its next look at the clock when it has to, while another one works."""
    stop = threading.Event()

    def working() -> None:
        while work is not None and not stop.is_set():
            work()

    thread = threading.Thread(target=working)
    thread.start()
    gaps, last, ends = [], time.perf_counter(), time.perf_counter() + 0.5
    while last < ends:
        now = time.perf_counter()
        if now - last > _GAP_S:
            gaps.append(now - last)
        last = now
    stop.set()
    thread.join()
    return statistics.median(gaps) if gaps else 0.0


class _Tier:
    """An NVMe tier whose tenant is encrypted or not, and batches of blocks to move."""

    def __init__(self, folder: Path, memory: arena.Extent, sealed: bool, stack: ExitStack) -> None:
        master = MasterKey("the bench", os.urandom(32))
        tier = NvmeTier.open(folder, LIMIT_BYTES, EXTENT_BYTES, PosixEngine(), master, {"bench": sealed})
        stack.callback(tier.close)
        tier.load()
        tier.allocate(lambda _: None, lambda _: None)
        size = slot_bytes(BLOCK_BYTES + SEAL_BYTES * sealed)
        tier.format(0, size, "bench")
        fingerprint = LAYOUT.fingerprint("bench")
        tier.put_namespace(1, Namespace("bench", LAYOUT.to_map(), fingerprint))
        self._tier = tier
        self._slots = [memory.view[i * BLOCK_BYTES :][:BLOCK_BYTES] for i in range(BLOCKS)]
        keys = [b"%064d" % i for i in range(BLOCKS)]
        seeds = [arena.seed(fingerprint, key, BLOCK_BYTES) for key in keys]
        sums = [arena.checksum(slot, seed) for slot, seed in zip(self._slots, seeds, strict=True)]
        words = np.frombuffer(b"".join(keys), np.uint64).reshape(BLOCKS, 8)
        ones = np.ones(BLOCKS, np.uint16)
        identity = Identity(ones, words, np.full(BLOCKS, 64, np.uint8), np.array(sums, np.uint64))
        where = Where(np.arange(BLOCKS, dtype=np.uint64))
        version = np.ones(BLOCKS, np.uint32)
        self._copy = Copy(1, 0, 1, identity, [b""] * BLOCKS, where, where, version, False, None)
        self._fingerprints, self._lengths = {1: fingerprint}, {1: BLOCK_BYTES}

    def write(self, _: int) -> float:
        """GiB/s down."""
        return self._timed(lambda done: self._tier.write(self._copy, self._slots, self._lengths, done))

    def read(self, _: int) -> float:
        """GiB/s up."""
        return self._timed(
            lambda done: self._tier.read(self._copy, self._slots, self._fingerprints, self._lengths, done)
        )

    def _timed(self, start: Callable[[Callable[[np.ndarray], None]], None]) -> float:
        ended, outcomes = threading.Event(), []

        def done(results: np.ndarray) -> None:
            outcomes.extend(results.tolist())
            ended.set()

        began = time.perf_counter()
        start(done)
        ended.wait()
        assert outcomes == [OK] * BLOCKS
        return BLOCKS * BLOCK_BYTES / (time.perf_counter() - began) / GIB
