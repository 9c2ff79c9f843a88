"""Reuse hazard: evicts the blocks whose slots earn least, by what blocks like them did before (see `reuse`).

Blocks are kept in slices of equal earnings (see `slices`). Within a slice, the end of a chain goes first.

Only ends of chains compete, because a use of a block is also a use of its parents. A parent is set aside
until its last child is evicted. Then it follows that child, if it earns no more than the other candidates. A
block in use is set aside for 0.25 s.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heapreplace

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Picked, Rows
from kvstore.core.policy.base import Policy, PolicyContext
from kvstore.core.policy.queue import Queue
from kvstore.core.policy.slices import Slices
from kvstore.core.reuse.classes import CLASS_MASK, describe

_SAME_S = 0.2
_BACK_AFTER_S, _LOOK_AFTER_S = 0.25, 1.0
_BACK_AT_ONCE, _LOOK_AT = 256, 4096
_RUN = 256
"""Rows that one look for the run of a chain covers."""


class Hazard(Policy):
    """One pool: slices of ends of chains, and queues of rows that are set aside.

    `_cold` goes first. `_parents` have children, `_orphans` have just lost a child, `_busy` are in use.
    """

    follows_children = False
    weighs = True

    def __init__(self, context: PolicyContext) -> None:
        self._reuse, self._tenant = context.reuse, context.tenant
        self._history = context.reuse.history
        self._segments = context.segments
        self._parent, self._children = context.blocks.parent, context.blocks.children
        self._slices = Slices(self._segments)
        self._cold, self._parents, self._orphans, self._busy = (Queue(self._segments) for _ in range(4))
        self._now = self._back_s = self._look_s = 0.0

    def __len__(self) -> int:
        return sum(len(q) for q in (*self._slices.queues(), *self._aside()))

    def ram_bytes(self) -> int:
        return self._slices.ram_bytes() + sum(q.ram_bytes() for q in self._aside())

    def _aside(self) -> tuple[Queue, ...]:
        return self._cold, self._parents, self._orphans, self._busy

    # -- what is where

    def insert(self, rows: Rows, now: float) -> None:
        first = self._file_chain(rows, now)
        # What they continue is an end no more.
        above = self._parent[first].astype(np.int64)
        above = above[above >= 0]
        if len(above):
            self._parents.append(np.unique(above[self._are_ends(above)]))

    def touch(self, rows: Rows, now: float) -> None:
        """Blocks above those that were asked for stay where they are."""
        rows = self._segments.known(rows)
        self._file_chain(rows[self._history.last_used(rows) >= now - _SAME_S], now)

    def remove(self, rows: Rows) -> None:
        self._segments.forget(rows)
        if len(self._parents):
            above = np.unique(self._parent[rows].astype(np.int64))
            above = above[above >= 0]
            self._orphans.append(above[self._are_parents(above)])

    def defer(self, rows: Rows, parents: bool = False) -> None:
        """Only `parents` wait for a child: the child of a busy block may have left this tier."""
        if not parents and not len(self._busy):
            self._back_s = self._now + _BACK_AFTER_S
        (self._parents if parents else self._busy).append(self._segments.known(rows))

    def cool(self, rows: Rows) -> None:
        self._cold.prepend(self._segments.known(rows)[::-1])

    def _file_chain(self, rows: Rows, now: float) -> Rows:
        """Sets rows aside that are followed by their child. Files the others in slices.

        Returns the rows that do not follow their parent.
        """
        inner = np.zeros(len(rows) + 1, np.bool_)
        inner[1:-1] = self._parent[rows[1:]] == rows[:-1]
        self._parents.append(rows[inner[1:]])
        self._file(rows[~inner[1:]][::-1], now)
        return rows[~inner[:-1]]

    def _file(self, rows: Rows, now: float) -> None:
        self._slices.add(rows, self._history.kinds(rows), self._history.last_used(rows), now)

    # -- which rows go

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        self._now = now
        self._slices.tidy(now)
        self._take_back(now)
        found = self._lowest(n, now, below)
        if not len(found) and below == math.inf:
            self._file(self._busy.head(_BACK_AT_ONCE), now)
            self._look(now)
            # The child of a parent may be in another tier, and the way down may be open again.
            self._file(self._parents.head(_BACK_AT_ONCE), now)
            found = self._lowest(n, now, below)
        return found

    def _lowest(self, n: int, now: float, below: float) -> Rows:
        out = [self._cold.head(n)]
        cold = len(out[0])
        wanted = n - cold
        for number in self._in_order(now, below):
            if wanted <= 0:
                break
            rows = self._slices.queue(number).head(wanted)
            if len(rows):
                out.append(rows)
                wanted -= len(rows)
            else:
                self._slices.drop(number)
        rows = np.concatenate(out)
        return self._with_parents(rows, cold, n, now, below) if len(self._parents) else rows

    def _in_order(self, now: float, below: float) -> list[int]:
        """Returns the numbers of slices, those that earn least first, then by age."""
        kind, since = self._slices.kind, self._slices.since
        numbers = np.flatnonzero(kind >= 0)
        scores = self._reuse.density(self._tenant, kind[numbers], since[numbers], now)
        numbers, scores = numbers[scores < below], scores[scores < below]
        order: list[int] = numbers[np.lexsort((since[numbers], scores))].tolist()
        return order

    def _take_back(self, now: float) -> None:
        """Files parents that have lost a child in this tier; others, and blocks in use, now and then."""
        self._file(self._orphans.head(len(self._orphans)), now)
        if now >= self._back_s and len(self._busy):
            self._back_s = now + _BACK_AFTER_S
            self._file(self._busy.head(_BACK_AT_ONCE), now)
        if now >= self._look_s:
            self._look_s = now + _LOOK_AFTER_S
            self._look(now)

    def _look(self, now: float) -> None:
        """Files parents without children: their children left in another tier, or were never stored."""
        rows = self._parents.head(_LOOK_AT)
        self._parents.append(rows)
        self._file(rows[self._children[rows] == 0], now)

    def _with_parents(self, rows: Rows, cold: int, n: int, now: float, below: float) -> Rows:
        """Returns the n lowest of these rows (lowest first) and of the parents set aside above them.

        The first `cold` rows go first, whatever they earn.
        """
        above = self._parent[rows].astype(np.int64)
        more = (above >= 0) & (self._children[above] == 1) & self._are_parents(above)
        if not more.any():
            return rows[:n]
        scores = self._earnings(rows, now)
        scores[:cold] = -1
        density = self._reuse.density_of_row(self._tenant, now)
        may_climb, parent, children = more.tolist(), self._parent.data, self._children.data
        is_parent = self._segments.membership(self._parents)
        ends = list(zip(scores.tolist(), range(len(rows)), rows.tolist(), strict=True))
        heapify(ends)
        out: list[int] = []
        while ends and len(out) < n:
            score, i, row = ends[0]
            if score >= below:
                break
            # Those that earn the same are next.
            top = self._top_of_equals(row, min(n - len(out), _RUN)) if may_climb[i] and i >= cold else row
            out.extend(range(row, top - 1, -1))
            up = parent[top]
            if may_climb[i] and up >= 0 and children[up] == 1 and is_parent(up):
                # A parent never goes before its child, even if it earns less.
                heapreplace(ends, (max(score, density(up)), i, up))
            else:
                heappop(ends)
        return np.array(out)

    def _top_of_equals(self, row: int, n: int) -> int:
        """Returns the first of up to n consecutive rows that end with `row`, are one chain and earn the same.

        Those above `row` are set aside as parents of one child. Rows of a chain are mostly consecutive.
        """
        first = max(0, row + 1 - n)
        above = slice(first, row)
        kind, ticks = self._history.kind, self._history.ticks
        same = self._parent[first + 1 : row + 1] == np.arange(first, row)
        same &= (self._children[above] == 1) & self._are_parents(above)
        same &= (kind[above] == kind[row]) & (ticks[above] == ticks[row])
        return first if same.all() else row - int(same[::-1].argmin())

    def _are_parents(self, rows: Picked) -> npt.NDArray[np.bool_]:
        aside: npt.NDArray[np.bool_] = self._segments.queues_of(rows) == self._parents.number
        return aside

    def _are_ends(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which rows are in a slice of this pool, or have just lost a child."""
        queues = self._segments.queues_of(rows)
        ends: npt.NDArray[np.bool_] = np.isin(queues, self._slices.numbers) & (queues > 0)
        ends |= queues == self._orphans.number
        return ends

    def _earnings(self, rows: Rows, now: float) -> npt.NDArray[np.float32]:
        kinds, last_used = self._history.kinds(rows), self._history.last_used(rows)
        return self._reuse.density(self._tenant, kinds, last_used, now)

    def explain(self, rows: Rows, now: float) -> list[str]:
        """Returns what is expected of each row, in words."""
        kinds, scores = self._history.kinds(rows).tolist(), self._earnings(rows, now).tolist()
        return [
            f"{describe(kind & CLASS_MASK)}: {score:.3g} uses/s expected"
            for kind, score in zip(kinds, scores, strict=True)
        ]
