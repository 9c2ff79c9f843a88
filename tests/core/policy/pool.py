"""A tier without a placement, for tests of policies and of what they work with."""

from __future__ import annotations

import math

import numpy as np

from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.policy import Policy, make
from kvstore.core.policy.base import PolicyContext
from kvstore.core.policy.queue import Segments
from kvstore.core.reuse.ghosts import Ghosts
from kvstore.core.reuse.reuse import Reuse


class Tier:
    """One tier of `capacity` rows, each with a key of its own; contexts for its pools."""

    def __init__(self, capacity: int, ghosts: int = 1 << 14) -> None:
        self.blocks = Blocks(capacity, 1)
        for start in range(0, capacity, 1 << 16):
            n = min(1 << 16, capacity - start)
            keys = np.arange(start, start + n, dtype=np.uint64).tobytes()
            self.blocks.take(1, Keys(keys, 8), np.arange(n))
        self.segments = Segments(np.zeros(capacity, np.int32))
        self.recompute_s = np.zeros(1 << 16, np.float32)
        self.ghosts = Ghosts(ghosts)
        self.reuse = Reuse(self.blocks, ghosts, 1)
        self._contexts = 0

    def context(self) -> PolicyContext:
        self._contexts += 1
        return PolicyContext(
            self.segments, self.blocks, lambda: self.ghosts, self._contexts, 0, self.recompute_s, self.reuse
        )

    def told(self, name: str) -> Told:
        """A fresh policy of a pool of its own."""
        return Told(self, make(name, self.context()))


class Told:
    """A policy of a pool of tenant 0, which hears of blocks when `reuse` has, as in a placement.

    `now`: the latest time that was mentioned.
    """

    def __init__(self, tier: Tier, policy: Policy) -> None:
        self.policy = policy
        self.follows_children = policy.follows_children
        self.now = 0.0
        self._tier = tier

    def insert(self, rows: Rows, now: float) -> None:
        self.now = now
        self._tier.reuse.stored(rows, 0, now)
        self.policy.insert(rows, now)

    def touch(self, rows: Rows, now: float) -> None:
        self.now = now
        self._tier.reuse.used(self._tier.segments.known(rows), 0, now)
        self.policy.touch(rows, now)

    def remove(self, rows: Rows) -> None:
        self.policy.remove(rows)
        self._tier.reuse.history.leave(rows)

    def coldest(self, n: int, now: float | None = None, below: float = math.inf) -> Rows:
        self.now = self.now if now is None else now
        return self.policy.coldest(n, self.now, below)

    def defer(self, rows: Rows, parents: bool = False) -> None:
        self.policy.defer(rows, parents)

    def refresh(self, rows: Rows) -> None:
        self.policy.refresh(rows)

    def cool(self, rows: Rows) -> None:
        self.policy.cool(rows)

    def ram_bytes(self) -> int:
        return self.policy.ram_bytes()

    def __len__(self) -> int:
        return len(self.policy)
