"""Base class of the policies that keep several queues."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.base import Policy, PolicyContext
from kvstore.core.policy.queue import Queue

ROUNDS = 16
"""Batches of rows that one call may look at to find unused rows."""

_LOOK = 64


class Ranked(Policy):
    """A policy over queues. Cool rows go before all of them.

    `_stuck`: some of the rows returned last could not go. A policy that prefers one queue then returns rows
    of other queues too, because all blocks of the first may be in use.
    """

    follows_children = True
    weighs = False

    def __init__(self, context: PolicyContext) -> None:
        self._segments = context.segments
        self._cool = Queue(context.segments)
        self._stuck = False

    @abstractmethod
    def _queues(self) -> Iterable[Queue]:
        """Returns all queues but that of cool rows."""

    @abstractmethod
    def _enter(self, rows: Rows) -> None:
        """Adds rows that were not known, parents first."""

    @abstractmethod
    def _forward(self, rows: Rows) -> None:
        """Moves known rows, coldest first, to the recent ends of their queues."""

    @abstractmethod
    def _rank(self, n: int) -> Rows:
        """Returns up to n rows that are not cool, the first to go first; at least one if there is any."""

    def insert(self, rows: Rows, now: float) -> None:
        """Rows that are known already are moved as by `refresh`."""
        known = self._segments.stamps[rows] > 0
        if known.any():
            self._forward(rows[known][::-1])
            rows = rows[~known]
        if len(rows):
            self._enter(rows)

    def remove(self, rows: Rows) -> None:
        self._segments.forget(rows)

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        out = self._cool.head(n)
        if len(out) < n:
            out = np.concatenate((out, self._rank(n - len(out))))
        self._stuck = False
        return out

    def defer(self, rows: Rows, parents: bool = False) -> None:
        rows = self._segments.known(rows)
        if len(rows):
            self._stuck = True
            self._forward(rows)

    def refresh(self, rows: Rows) -> None:
        rows = self._segments.known(rows)
        if len(rows):
            self._forward(rows[::-1])

    def cool(self, rows: Rows) -> None:
        """The end of a chain goes first."""
        self._cool.prepend(self._segments.known(rows)[::-1])

    def __len__(self) -> int:
        return len(self._cool) + sum(len(queue) for queue in self._queues())

    def ram_bytes(self) -> int:
        return self._cool.ram_bytes() + sum(queue.ram_bytes() for queue in self._queues())

    def _of(self, queue: Queue, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which rows are in a queue."""
        inside: npt.NDArray[np.bool_] = self._segments.queues_of(rows) == queue.number
        return inside


def unused(queue: Queue, uses: npt.NDArray[np.uint8], n: int, at_most: int) -> tuple[Rows, Rows]:
    """Returns up to n unused rows of a queue, and the used rows before them.

    Looks at `at_most` rows.
    """
    rows = queue.head(min(max(n, _LOOK), at_most) if n > 0 else 0)
    cold = uses[rows] == 0
    end = int(np.searchsorted(np.cumsum(cold), n)) + 1
    rows, cold = rows[:end], cold[:end]
    return rows[cold], rows[~cold]
