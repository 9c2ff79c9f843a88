"""evict: CPU time of an eviction policy per inserted and evicted block, at 10 M and at 100 k rows.

Chains of 128 blocks are inserted, others are evicted for them (coldest, remove), and 128 stored blocks are
used. The updates of `reuse` count too. `longest_ms` is the longest single call of any kind at 10 M rows,
filling included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from bench.harness import Bench, NotDone, Result, Target, expect
from kvstore.columns import zeros
from kvstore.config import Policy
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.policy import POLICIES, make
from kvstore.core.policy.base import PolicyContext
from kvstore.core.policy.queue import Segments
from kvstore.core.reuse.ghosts import Ghosts
from kvstore.core.reuse.reuse import Reuse
from kvstore.daemon.main import GC_THRESHOLD

SIZES, SMOKE = (100_000, 10_000_000), (2048, 8192)
BATCH = 128
STEPS, SMOKE_STEPS = 100, 4
"""Batches per sample."""

BOUND = Target("<=", 2.0)


def run(bench: Bench) -> Iterator[Result]:
    """Yields one row per policy. The bound is for the default policy."""
    small, large = map(_blocks, bench.pick(SIZES, SMOKE))
    steps = bench.pick(STEPS, SMOKE_STEPS)
    with _collecting_rarely():
        yield from _measured(bench, small, large, steps)


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Sets the thresholds of the garbage collector as the daemon does."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _measured(bench: Bench, small: Blocks, large: Blocks, steps: int) -> Iterator[Result]:
    for name in POLICIES:
        bench.doing(f"{name}: filling")
        many, few = _Filled(name, large, steps), _Filled(name, small, steps)
        gc.collect()
        rounds = bench.interleave(name, (many.sample, few.sample), 1 / len(POLICIES))
        target = BOUND if name == Policy().eviction else None
        yield rounds.result(
            f"evict/{name}",
            "us/block",
            target,
            longest_ms=1e3 * many.longest_s,
            bytes_a_row=many.bytes_a_row(),
        )


def _blocks(n: int) -> Blocks:
    blocks = Blocks(n, 1)
    for start in range(0, n, 1 << 16):
        keys = np.arange(start, min(start + (1 << 16), n), dtype=np.uint64)
        blocks.take(1, Keys(keys.tobytes(), 8), np.arange(len(keys)))
    return blocks


class _Filled:
    """A policy filled with every row, in chains of BATCH. Used chains follow a heavy-tailed distribution."""

    def __init__(self, name: str, blocks: Blocks, steps: int) -> None:
        self._steps = steps
        self._blocks, n = blocks, blocks.capacity
        self._segments = Segments(zeros(n, np.int32))
        self._ghosts: Ghosts | None = None
        costs = np.zeros(1 << 16, np.float32)
        self._reuse = Reuse(blocks, n, 1)
        context = PolicyContext(self._segments, blocks, self._make_ghosts, 1, 0, costs, self._reuse)
        self._policy = make(name, context)
        self._dice = np.random.default_rng(1)
        self._chains = n // BATCH
        self._next_key = n
        self.longest_s = 0.0
        for start in range(0, self._chains * BATCH, BATCH):
            rows = np.arange(start, start + BATCH)
            self._chain(rows)
            self._timed(lambda rows=rows: self._insert(rows, 0.0))
        for _ in range(self._chains // 2):
            self._use()

    def _make_ghosts(self) -> Ghosts:
        if self._ghosts is None:
            self._ghosts = Ghosts(2 * self._blocks.capacity)
        return self._ghosts

    def sample(self, number: int) -> float:
        """Returns microseconds per block. A policy may return fewer blocks than requested."""
        took_s, now, evicted = 0.0, float(number), 0
        for _ in range(self._steps):
            gone, spent_s = self._timed(lambda: self._policy.coldest(BATCH, now))
            expect(len(np.unique(gone)), len(gone), "distinct blocks to evict")
            evicted += len(gone)
            took_s += spent_s
            took_s += self._timed(lambda gone=gone: self._remove(gone))[1]
            self._blocks.words[0, gone, 0] = np.arange(self._next_key, self._next_key + len(gone))
            self._next_key += len(gone)
            new = np.sort(gone)
            self._unchain(new)
            self._chain(new)
            took_s += self._timed(lambda new=new: self._insert(new, now))[1]
            self._use(now)
        if evicted < self._steps * BATCH // 2:
            raise NotDone(f"{evicted} blocks evicted in {self._steps} batches of {BATCH}")
        return 1e6 * took_s / evicted

    def _chain(self, rows: Rows) -> None:
        """Makes each row the parent of the next one."""
        self._blocks.parent[rows] = np.append(-1, rows[:-1])
        self._blocks.children[rows] = 1
        self._blocks.children[rows[-1:]] = 0

    def _unchain(self, rows: Rows) -> None:
        above = self._blocks.parent[rows].astype(np.int64)
        np.subtract.at(self._blocks.children, above[above >= 0], 1)

    def _insert(self, rows: Rows, now: float) -> None:
        self._reuse.stored(rows, 0, now)
        self._policy.insert(rows, now)

    def _remove(self, rows: Rows) -> None:
        self._policy.remove(rows)
        self._reuse.history.leave(rows)

    def _use(self, now: float = 0.0) -> None:
        chain = int(self._dice.zipf(1.1)) * 7919 % self._chains
        rows = np.arange(chain * BATCH, (chain + 1) * BATCH)

        def use() -> None:
            self._reuse.used(rows, 0, now)
            self._policy.touch(rows, now)

        self._timed(use)

    def _timed(self, call: Callable[[], Rows | None]) -> tuple[Rows | None, float]:
        start_s = time.thread_time()
        out = call()
        took_s = time.thread_time() - start_s
        self.longest_s = max(self.longest_s, took_s)
        return out, took_s

    def bytes_a_row(self) -> float:
        """Returns the bytes of the policy's state per row, with ghosts and columns."""
        held = self._policy.ram_bytes() + (self._ghosts.ram_bytes() if self._ghosts else 0)
        return self._segments.bytes_a_row + held / self._blocks.capacity
