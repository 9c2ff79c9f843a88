"""Replaces one policy by another, which starts with the order of the old one.

The rows that would be evicted first move first, so the new policy gets all rows in that order, and takes the
last for the most recent. Moved rows are evicted before the others. A row that is stored, used or deferred in
the meantime returns to the old policy and moves later. So the new policy starts with the order that the old
one would have at the end.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy import Policy

_RETURNS = 2
"""Returns to the old policy, per row on average. Beyond that, rows do not return, so that the move ends."""


class MigratingPolicy(Policy):
    """A policy over two policies. Rows of `new` have `mark` in `marks`; all others belong to the old one."""

    def __init__(self, old: Policy, new: Policy, marks: npt.NDArray[np.uint32], mark: int) -> None:
        self._old, self.new = old, new
        self._marks, self._mark = marks, mark
        self._now = 0.0
        self.follows_children = old.follows_children or new.follows_children
        self.weighs = old.weighs and new.weighs
        self._returns = _RETURNS * len(old)
        self._stuck = False

    def go_on(self, n: int, now: float) -> int:
        """Moves up to n rows to the new policy. Returns how many. The migration ends when none is `left`."""
        rows = self._old.coldest(n, now)
        self._old.remove(rows)
        self._give(rows[::-1], now)
        return len(rows)

    @property
    def left(self) -> int:
        """The number of rows that have not moved."""
        return len(self._old)

    # -- as a policy

    def insert(self, rows: Rows, now: float) -> None:
        self._now = now
        if self._returns > 0:
            self._take(rows)
            self._old.insert(rows, now)
        else:
            self._old.remove(rows)
            self._give(rows, now)

    def touch(self, rows: Rows, now: float) -> None:
        self._now = now
        self._take_back(rows)
        self._old.touch(rows, now)
        self.new.touch(rows, now)

    def remove(self, rows: Rows) -> None:
        self._old.remove(rows)
        self._take(rows)

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        """Moved rows go first, unless they could not go."""
        self._now = now
        first, then = (self._old, self.new) if self._stuck else (self.new, self._old)
        rows = first.coldest(n, now, below)
        return rows if len(rows) >= n else np.concatenate((rows, then.coldest(n - len(rows), now, below)))

    def defer(self, rows: Rows, parents: bool = False) -> None:
        # If no row returns, the two policies take turns.
        self._stuck = self._returns <= 0 and not self._stuck
        self._take_back(rows[::-1])
        self._old.defer(rows, parents)
        self.new.defer(rows, parents)

    def refresh(self, rows: Rows) -> None:
        if self._old.follows_children:
            self._take_back(rows)
            self._old.refresh(rows)
        if self.new.follows_children:
            self.new.refresh(rows)

    def cool(self, rows: Rows) -> None:
        self._old.cool(rows)
        self.new.cool(rows)

    def explain(self, rows: Rows, now: float) -> list[str]:
        """Returns which policy decides about each row, in words."""
        old, new = (type(policy).__name__.lower() for policy in (self._old, self.new))
        return [new if moved else f"{old}, until {new} takes over" for moved in self._has_moved(rows)]

    def __len__(self) -> int:
        return len(self._old) + len(self.new)

    def ram_bytes(self) -> int:
        return self._old.ram_bytes() + self.new.ram_bytes()

    # -- who has what

    def _has_moved(self, rows: Rows) -> npt.NDArray[np.bool_]:
        moved: npt.NDArray[np.bool_] = self._marks[rows] == self._mark
        return moved

    def _give(self, rows: Rows, now: float) -> None:
        self.new.insert(rows, now)
        self._marks[rows] = self._mark

    def _take(self, rows: Rows) -> Rows:
        """Removes the moved ones of these rows from the new policy. Returns them."""
        moved = rows[self._has_moved(rows)]
        if len(moved):
            self.new.remove(moved)
            self._marks[moved] = 0
        return moved

    def _take_back(self, rows: Rows) -> None:
        """Returns the moved ones of these rows, in chain order, to the old policy."""
        if self._returns > 0:
            back = self._take(rows)
            self._returns -= len(back)
            if len(back):
                self._old.insert(back, self._now)
