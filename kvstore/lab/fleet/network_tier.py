"""The network tier that the nodes of a fleet share: which blocks it has.

A limited one evicts the least recently used block; of the blocks that were used together, the last of the
prompt first. Not covered: how long transfers take, failures, and stale caches of existence checks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NetworkSize:
    """The size of a network tier as given, and its blocks. `blocks` None: unlimited. 0: no network tier."""

    name: str
    blocks: int | None


class NetworkTier:
    """Blocks by key. `stored`: blocks that were written. `evicted`: blocks that were evicted."""

    def __init__(self, size: NetworkSize) -> None:
        self.exists = size.blocks != 0
        self._limit = size.blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.stored = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def prefix(self, keys: Sequence[int], start: int) -> int:
        """Returns how many keys from position `start` on are stored, up to the first one that is not."""
        blocks = self._blocks
        for at in range(start, len(keys)):
            if keys[at] not in blocks:
                return at - start
        return len(keys) - start

    def use(self, keys: Sequence[int]) -> None:
        """Makes stored blocks the most recently used ones."""
        if self._limit is None:
            return
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def store(self, keys: Sequence[int]) -> int:
        """Stores the keys that are absent. Returns their number. May evict others."""
        if not self.exists:
            return 0
        before = len(self._blocks)
        for key in reversed(keys):
            self._blocks.setdefault(key)
        new = len(self._blocks) - before
        self.stored += new
        while self._limit is not None and len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)
            self.evicted += 1
        return new
