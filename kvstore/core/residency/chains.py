"""Chains of blocks: links from each row to its parent, and the holes that dropped blocks leave in chains.

A dropped block with children becomes a hole. A hole is freed when its last child is freed. The time to drop
rows is proportional to their number. Chains of freed holes are removed in bounded steps.

Not covered: slots and pins; see `residency` and `pin_table`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import FREE, HOLE, Blocks, Rows
from kvstore.core.blocks.index import Index
from kvstore.core.jobs import Job
from kvstore.core.residency.gaps import Gaps
from kvstore.core.reuse.reuse import Reuse
from kvstore.native import chain_above, chain_root

_LONGEST_CHAIN = 1 << 17
_MOST_RUNS = 256  # of neighbouring rows, looked at by one step
_REMOVING = 4
"""The state of a row within `remove`, in addition to those of `Blocks`."""
_ONE = np.int32(1)  # of the column's type, which makes counting several times as fast
_CHILDLESS_AT_ONCE = 512
_NEXT_CHILDLESS_S = 0.001


class Chains(Job):
    """The links between the rows of `blocks`.

    Holes are counted in `gaps`. `childless` has holes without children that later steps free, and with
    them the holes above that have no other children. `now`: the time of the current event, in s.
    """

    def __init__(self, blocks: Blocks, index: Index, reuse: Reuse, gaps: Gaps) -> None:
        self._blocks = blocks
        self._index = index
        self._reuse = reuse
        self.now = 0.0
        self._gaps = gaps
        self.childless: set[int] = set()
        self._above = np.empty(_LONGEST_CHAIN, np.int64)
        # A memoryview reads one row several times as fast as the array.
        self._parent_of = blocks.parent.data
        self._children_of = blocks.children.data
        self._state_of = blocks.state.data

    def with_ancestors(self, rows: Rows) -> Rows:
        """Returns the chain from its root to `rows`, which are a chain themselves, mostly in order."""
        row = self._parent_of[int(rows[0])] if len(rows) and rows[0] >= 0 else -1
        if row < 0:
            return rows
        up = self._above[: chain_above(self._blocks.parent, row, self._above)][::-1]
        if (self._blocks.parent[rows[1:]] != rows[:-1]).any():
            # A copy or a request may have a child before its parent.
            rows = rows[~np.isin(rows, up)]
        return np.concatenate((up, rows))

    def link(self, rows: Rows, parents: Rows) -> None:
        """Sets the parents (-1: root) of rows that have none, in the order of the rows.

        A row stays a root if the parent is its own descendant, which only a hostile client asks for. It also
        stays a root if the chain above the parent is too long to check in one step.
        """
        done, budget = 0, _MOST_RUNS + len(rows)
        # A row without children is no ancestor.
        for i in np.flatnonzero((self._blocks.children[rows] > 0) & (parents >= 0)).tolist():
            self._set_parents(rows[done:i], parents[done:i])
            root, budget = chain_root(self._blocks.parent, int(parents[i]), budget)
            done = i + 1 if root in (-1, rows[i]) else i
        self._set_parents(rows[done:], parents[done:])

    def separate(self, namespace: int) -> None:
        """Makes all rows of a namespace roots. Frees its holes."""
        blocks = self._blocks
        n = blocks.rows_touched
        rows = np.flatnonzero((blocks.namespace[:n] == namespace) & (blocks.state[:n] != FREE))
        blocks.parent[rows], blocks.children[rows] = -1, 0
        self.remove(rows[blocks.state[rows] == HOLE])

    def _set_parents(self, rows: Rows, parents: Rows) -> None:
        self._blocks.parent[rows] = parents
        np.add.at(self._blocks.children, parents[parents >= 0], _ONE)

    def remove(self, rows: Rows) -> None:
        """Frees rows without a copy and without pins. Rows with children become holes.

        Takes time proportional to the number of rows, whatever their order and links.
        """
        if not len(rows):
            return
        blocks = self._blocks
        self.count_holes(rows[blocks.state[rows] == HOLE], -1)
        blocks.state[rows] = _REMOVING
        # Without the links inside a removed branch, only rows with other children still have children.
        parents = blocks.parent[rows]
        np.subtract.at(blocks.children, parents[parents >= 0], _ONE)
        self._keep_ancestors(rows[blocks.children[rows] > 0])
        stays = blocks.state[rows] == HOLE
        if stays.any():
            # Rows that stay keep their parents too.
            above = parents[stays]
            np.add.at(blocks.children, above[above >= 0], _ONE)
            self.keep_as_holes(rows[stays])
            rows, parents = rows[~stays], parents[~stays]
        free = np.concatenate((rows, self._remove_childless(parents)))
        if len(free):
            self._index.remove(free)
            self._reuse.history.leave(free)
            blocks.give_back(free)

    def _keep_ancestors(self, rows: Rows) -> None:
        """Turns the rows, and the rows above them that are being removed, into holes."""
        for lowest in rows.tolist():
            row = lowest
            while row >= 0 and self._state_of[row] == _REMOVING:
                self._state_of[row] = HOLE
                row = self._parent_of[row]

    def _remove_childless(self, rows: npt.NDArray[np.int32]) -> Rows:
        """Removes holes without children, from these rows upwards. Returns the removed holes, to be freed.

        Later steps remove the holes beyond the bound of one step.
        """
        blocks, removed = self._blocks, list[int]()
        rows = np.unique(rows[rows >= 0])
        for lowest in rows[(blocks.state[rows] == HOLE) & (blocks.children[rows] == 0)].tolist():
            row = lowest
            while row >= 0 and self._state_of[row] == HOLE and not self._children_of[row]:
                if len(removed) >= _CHILDLESS_AT_ONCE:
                    self.childless.add(row)
                    self._next_step = min(self._next_step, self.now + _NEXT_CHILDLESS_S)
                    break
                self._state_of[row] = _REMOVING
                removed.append(row)
                row = self._parent_of[row]
                if row >= 0:
                    self._children_of[row] -= 1
        holes = np.array(removed, np.int64)
        self.count_holes(holes, -1)
        return holes

    def free_childless(self) -> None:
        """Frees some of the holes in `childless`."""
        n = min(len(self.childless), _CHILDLESS_AT_ONCE)
        some = np.array([self.childless.pop() for _ in range(n)], np.int64)
        self._next_step = self.now + _NEXT_CHILDLESS_S if self.childless else math.inf
        # A put may have filled some of them since.
        self.prune(some)

    def prune(self, rows: Rows) -> None:
        """Frees those of the rows that are holes without children. Ignores -1."""
        rows = rows[rows >= 0]
        self.remove(rows[(self._blocks.state[rows] == HOLE) & (self._blocks.children[rows] == 0)])

    def keep_as_holes(self, rows: Rows) -> None:
        """Turns rows without a copy, which have children, into holes."""
        self._blocks.state[rows] = HOLE
        self._blocks.clear_expiry(rows)
        self.count_holes(rows, 1)

    def count_holes(self, rows: Rows, sign: int) -> None:
        """Adds `sign` to the number of holes of each row's namespace."""
        if not len(rows):
            return
        for namespace, n in zip(*np.unique(self._blocks.namespace[rows], return_counts=True), strict=True):
            self._gaps.count_holes(int(namespace), sign * int(n))

    def _step(self, now: float) -> None:
        self.free_childless()
