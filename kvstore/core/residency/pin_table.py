"""Pins: which blocks eviction must keep, and until when."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.jobs import Job
from kvstore.core.residency.namespace import Namespace, Namespaces

_UNPINNED_AT_ONCE = 4096
_NEXT_STEP_S = 0.05


class PinTable(Job):
    """The pins of one placement.

    `ends` has the end of each pinned row's pin, in the clock of `now`. `pinned_bytes` counts by tenant.
    """

    def __init__(self, blocks: Blocks, namespaces: Namespaces) -> None:
        self._blocks = blocks
        self._namespaces = namespaces
        self.ends: dict[int, float] = {}
        self.pinned_bytes: Counter[int] = Counter()

    def pin(self, namespace: Namespace, rows: Rows, until: float) -> None:
        """Pins blocks of a namespace until then. A pin that ends later keeps its end."""
        pool, ends = namespace.pools[0], self.ends
        new = len(rows) - int(np.count_nonzero(self._blocks.pinned[rows]))
        self.pinned_bytes[pool.tenant] += new * pool.slot_bytes
        self._blocks.pinned[rows] = True
        ends.update((row, max(until, ends.get(row, until))) for row in rows.tolist())
        if len(rows):
            self._next_step = min(self._next_step, until)

    def unpin(self, rows: Rows) -> None:
        """Removes the pins of rows that are pinned."""
        if not len(rows):
            return
        for namespace, some in self._namespaces.split(rows):
            pool = namespace.pools[0]
            self.pinned_bytes[pool.tenant] -= len(some) * pool.slot_bytes
        self._blocks.pinned[rows] = False
        for row in rows.tolist():
            del self.ends[row]
        if not self.ends:
            self._next_step = math.inf

    def _step(self, now: float) -> None:
        """Removes some of the pins that have ended, at most every 50 ms."""
        ended = [row for row, until in self.ends.items() if until <= now]
        self.unpin(np.array(ended[:_UNPINNED_AT_ONCE], np.int64))
        first = min(self.ends.values(), default=math.inf)
        self._next_step = max(first, now + _NEXT_STEP_S)
