"""One policy in the course of being replaced by another, which takes over what it knew.

The rows that would go first move first, so that the new policy hears of all of them in the order in which
they were to go: what it is told last it takes for the most recent. What moved is in front of what did not.
What is stored, used or deferred meanwhile is the old one's again, and moves later. So the new one begins with
the order that the old one would have had by then.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy import Policy

_RETURNS = 2
"""How often a row may move back, on average: after that, all that happens brings the end nearer."""


class MigratingPolicy:
    """A policy of two. Rows that `new` has already bear `mark` in `marks`, all others are the old one's."""

    def __init__(self, old: Policy, new: Policy, marks: npt.NDArray[np.uint32], mark: int) -> None:
        self._old, self.new = old, new
        self._marks, self._mark = marks, mark
        self._now = 0.0
        self.follows_children = old.follows_children or new.follows_children
        self.weighs = old.weighs and new.weighs
        self._returns = _RETURNS * len(old)
        self._stuck = False

    def go_on(self, n: int, now: float) -> int:
        """Moves up to n rows; how many. It is over when nothing is `left`."""
        rows = self._old.coldest(n, now)
        self._old.remove(rows)
        self._give(rows[::-1], now)
        return len(rows)

    @property
    def left(self) -> int:
        """How many rows have not moved."""
        return len(self._old)

    # -- as a policy

    def insert(self, rows: Rows, now: float) -> None:
        """See Policy."""
        self._now = now
        if self._returns > 0:
            self._take(rows)
            self._old.insert(rows, now)
        else:
            self._old.remove(rows)
            self._give(rows, now)

    def touch(self, rows: Rows, now: float) -> None:
        """See Policy."""
        self._now = now
        self._take_back(rows)
        self._old.touch(rows, now)
        self.new.touch(rows, now)

    def remove(self, rows: Rows) -> None:
        """See Policy."""
        self._old.remove(rows)
        self._take(rows)

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        """See Policy: what moved is in front, unless it is stuck there."""
        self._now = now
        first, then = (self._old, self.new) if self._stuck else (self.new, self._old)
        rows = first.coldest(n, now, below)
        return rows if len(rows) >= n else np.concatenate((rows, then.coldest(n - len(rows), now, below)))

    def defer(self, rows: Rows, parents: bool = False) -> None:
        """See Policy."""
        # Where nothing moves back, both take turns.
        self._stuck = self._returns <= 0 and not self._stuck
        self._take_back(rows[::-1])
        self._old.defer(rows, parents)
        self.new.defer(rows, parents)

    def refresh(self, rows: Rows) -> None:
        """See Policy."""
        if self._old.follows_children:
            self._take_back(rows)
            self._old.refresh(rows)
        if self.new.follows_children:
            self.new.refresh(rows)

    def cool(self, rows: Rows) -> None:
        """See Policy."""
        self._old.cool(rows)
        self.new.cool(rows)

    def explain(self, rows: Rows, now: float) -> list[str]:
        """Who decides about each row."""
        old, new = (type(policy).__name__.lower() for policy in (self._old, self.new))
        return [new if moved else f"{old}, until {new} takes over" for moved in self._has_moved(rows)]

    def __len__(self) -> int:
        return len(self._old) + len(self.new)

    def ram_bytes(self) -> int:
        """See Policy."""
        return self._old.ram_bytes() + self.new.ram_bytes()

    # -- who has what

    def _has_moved(self, rows: Rows) -> npt.NDArray[np.bool_]:
        moved: npt.NDArray[np.bool_] = self._marks[rows] == self._mark
        return moved

    def _give(self, rows: Rows, now: float) -> None:
        self.new.insert(rows, now)
        self._marks[rows] = self._mark

    def _take(self, rows: Rows) -> Rows:
        """Those of rows that had moved are nobody's."""
        moved = rows[self._has_moved(rows)]
        if len(moved):
            self.new.remove(moved)
            self._marks[moved] = 0
        return moved

    def _take_back(self, rows: Rows) -> None:
        """Those of rows, in chain order, that had moved are the old policy's again."""
        if self._returns > 0:
            back = self._take(rows)
            self._returns -= len(back)
            if len(back):
                self._old.insert(back, self._now)
