"""A shelf without a placement, for tests of policies."""

from __future__ import annotations

import numpy as np

from kvstore.core.blocks import Blocks
from kvstore.core.ghosts import Ghosts
from kvstore.core.keys import Keys
from kvstore.core.policy.queue import Segments
from kvstore.core.policy.shelf import Shelf
from kvstore.core.reuse import Reuse


class Tier:
    """One tier of `capacity` rows, each with a key of its own; shelves for its pools."""

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
        self._shelves = 0

    def shelf(self) -> Shelf:
        self._shelves += 1
        return Shelf(
            self.segments, self.blocks, lambda: self.ghosts, self._shelves, 0, self.recompute_s, self.reuse
        )
