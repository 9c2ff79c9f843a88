"""What the policies of several queues share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.pool_view import PolicyContext
from kvstore.core.policy.queue import Queue

ROUNDS = 16
"""How many batches of rows one call may look at to find some that were not used."""

_LOOK = 64


class Ranked(ABC):
    """A policy over queues. In front of them goes what will not be used again soon.

    `_stuck`: some of what was offered last could not go. Whoever prefers one queue then offers of others too,
    so that a queue full of blocks in use keeps nobody from room.
    """

    follows_children = True
    weighs = False

    def __init__(self, shelf: PolicyContext) -> None:
        self._segments = shelf.segments
        self._cool = Queue(shelf.segments)
        self._stuck = False

    @abstractmethod
    def _queues(self) -> Iterable[Queue]:
        """All queues but that of cool rows."""

    @abstractmethod
    def _enter(self, rows: Rows) -> None:
        """Rows, parents first, that were not known."""

    @abstractmethod
    def _forward(self, rows: Rows) -> None:
        """Known rows, coldest first, come to the recent end of where they belong."""

    @abstractmethod
    def _rank(self, n: int) -> Rows:
        """Up to n rows that are not cool, the first to go first; some if there are any."""

    def insert(self, rows: Rows, now: float) -> None:
        """See Policy: rows that are known already count as refreshed."""
        known = self._segments.stamps[rows] > 0
        if known.any():
            self._forward(rows[known][::-1])
            rows = rows[~known]
        if len(rows):
            self._enter(rows)

    def remove(self, rows: Rows) -> None:
        """See Policy."""
        self._segments.forget(rows)

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        """See Policy."""
        out = self._cool.head(n)
        if len(out) < n:
            out = np.concatenate((out, self._rank(n - len(out))))
        self._stuck = False
        return out

    def defer(self, rows: Rows, parents: bool = False) -> None:
        """See Policy."""
        rows = self._segments.known(rows)
        if len(rows):
            self._stuck = True
            self._forward(rows)

    def refresh(self, rows: Rows) -> None:
        """See Policy."""
        rows = self._segments.known(rows)
        if len(rows):
            self._forward(rows[::-1])

    def cool(self, rows: Rows) -> None:
        """See Policy: the end of a chain first."""
        self._cool.prepend(self._segments.known(rows)[::-1])

    def __len__(self) -> int:
        return len(self._cool) + sum(len(queue) for queue in self._queues())

    def ram_bytes(self) -> int:
        """See Policy."""
        return self._cool.ram_bytes() + sum(queue.ram_bytes() for queue in self._queues())

    def _of(self, queue: Queue, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows are in a queue."""
        inside: npt.NDArray[np.bool_] = self._segments.queues_of(rows) == queue.number
        return inside


def unused(queue: Queue, uses: npt.NDArray[np.uint8], n: int, at_most: int) -> tuple[Rows, Rows]:
    """Of the first rows of a queue, `at_most` in all: up to n without a use; those before them with one."""
    rows = queue.head(min(max(n, _LOOK), at_most) if n > 0 else 0)
    cold = uses[rows] == 0
    end = int(np.searchsorted(np.cumsum(cold), n)) + 1
    rows, cold = rows[:end], cold[:end]
    return rows[cold], rows[~cold]
