"""LFU with dynamic ageing (Arlitt et al., 2000): the least used blocks go first, and old uses count less.

The priority of a block is its number of uses plus the age of the cache at its last use. The age is the lowest
priority at the last eviction. Blocks of one priority are a queue, least recently used first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.base import PolicyContext
from kvstore.core.policy.queue import Queue
from kvstore.core.policy.ranked import Ranked

_RING = 256
"""Priorities in use at a time. The number of uses, or its weight, is below this."""

_MOST_USES = 15


class LFUDA(Ranked):
    """Priority p has queue p modulo the length of the ring."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._uses = context.segments.column("uses")
        self._age = 0
        self._ring: dict[int, Queue] = {}
        self._numbers = np.zeros(_RING, np.int32)

    def _queues(self) -> list[Queue]:
        return list(self._ring.values())

    def _enter(self, rows: Rows) -> None:
        self._uses[rows] = 1
        self._forward(rows[::-1])

    def touch(self, rows: Rows, now: float) -> None:
        rows = self._segments.known(rows)
        self._uses[rows] = np.minimum(self._uses[rows] + 1, _MOST_USES)
        self._forward(rows[::-1])

    def _worth(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Returns what is added to the age, at least 1."""
        return self._uses[rows]

    def _forward(self, rows: Rows) -> None:
        worth = self._worth(rows)
        for more in np.flatnonzero(np.bincount(worth)).tolist():
            self._queue(self._age + more).append(rows[worth == more])

    def _queue(self, priority: int) -> Queue:
        place = priority % _RING
        if place not in self._ring:
            self._ring[place] = Queue(self._segments)
            self._numbers[place] = self._ring[place].number
        return self._ring[place]

    def _rank(self, n: int) -> Rows:
        lengths = self._segments.lengths(np.roll(self._numbers, -(self._age % _RING)))
        levels = np.flatnonzero(lengths)
        if len(levels):
            oldest, self._age = self._age, self._age + int(levels[0])
        out = [np.empty(0, np.int64)]
        for level in levels.tolist():
            out.append(self._queue(oldest + level).head(n))
            n -= len(out[-1])
            if n <= 0:
                break
        return np.concatenate(out)
