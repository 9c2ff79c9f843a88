"""Reuse hazard: what earns its slot least goes first, by what blocks like it did before (see `reuse_curves`).

Blocks of one class that were last used at about the same time form a *slice*, a queue, tail first. All blocks
of a slice earn alike, so the worst slices are found among some hundred, whatever the number of blocks. Slices
that are close together for their age are joined.

Only ends of chains compete: whoever uses a block uses its parents too. A parent is set aside until a child of
it goes, and then comes right behind it if it earns no more than others; a block in use, for a moment.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heapreplace

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.pool_view import PolicyContext
from kvstore.core.policy.queue import Queue
from kvstore.core.policy.reuse import describe
from kvstore.core.policy.reuse_curves import Floats, Ints

_SPAN_S = 1.0
_SAME_S = 0.2
_BLUR = 0.15
_TIDY_AFTER = 64
_BACK_AFTER_S, _LOOK_AFTER_S = 0.25, 1.0
_BACK_AT_ONCE, _LOOK_AT = 256, 4096


class Hazard:
    """The slices of one pool, in columns by number: kind (-1: none), start, queue (kept for the next one)."""

    follows_children = False
    weighs = True

    def __init__(self, shelf: PolicyContext) -> None:
        assert shelf.reuse is not None, "what is learned here comes from there"
        self._reuse, self._tenant = shelf.reuse, shelf.tenant
        self._segments = shelf.segments
        self._parent, self._children = shelf.blocks.parent, shelf.blocks.children
        self._kind: Ints = np.full(_TIDY_AFTER, -1)
        self._since: Floats = np.zeros(_TIDY_AFTER)
        self._queues: list[Queue | None] = [None] * _TIDY_AFTER
        self._free = list(range(_TIDY_AFTER))
        self._latest: dict[int, int] = {}
        self._cold, self._parents, self._orphans, self._busy = (Queue(self._segments) for _ in range(4))
        self._now = self._back_s = self._look_s = 0.0
        self._tidy_at = _TIDY_AFTER

    def __len__(self) -> int:
        return sum(len(q) for q in self._all())

    def ram_bytes(self) -> int:
        """See Policy."""
        return self._kind.nbytes + self._since.nbytes + sum(q.ram_bytes() for q in self._all())

    def _all(self) -> list[Queue]:
        return [
            q for q in (*self._queues, self._cold, self._parents, self._orphans, self._busy) if q is not None
        ]

    # -- what is where

    def insert(self, rows: Rows, now: float) -> None:
        """See Policy."""
        self._file_chain(rows, now)

    def touch(self, rows: Rows, now: float) -> None:
        """See Policy. Blocks above those that were asked for stay where they are."""
        rows = self._segments.known(rows)
        self._file_chain(rows[self._reuse.last_used(rows) >= now - _SAME_S], now)

    def refresh(self, rows: Rows) -> None:
        """Not called."""

    def remove(self, rows: Rows) -> None:
        """See Policy."""
        self._segments.forget(rows)
        if len(self._parents):
            above = np.unique(self._parent[rows].astype(np.int64))
            above = above[above >= 0]
            self._orphans.append(above[self._are_aside(above)])

    def defer(self, rows: Rows, parents: bool = False) -> None:
        """See Policy. Only parents wait for a child to go: that of one in use may long be gone from here."""
        if not parents and not len(self._busy):
            self._back_s = self._now + _BACK_AFTER_S
        (self._parents if parents else self._busy).append(self._segments.known(rows))

    def cool(self, rows: Rows) -> None:
        """See Policy."""
        self._cold.prepend(self._segments.known(rows)[::-1])

    def _file_chain(self, rows: Rows, now: float) -> None:
        """Those that have their child right behind them are set aside, the others go where they belong."""
        inner = np.zeros(len(rows), np.bool_)
        inner[:-1] = self._parent[rows[1:]] == rows[:-1]
        self._parents.append(rows[inner])
        self._file(rows[~inner][::-1], now)

    def _file(self, rows: Rows, now: float) -> None:
        """Puts rows at the recent ends of the slices where they belong."""
        kinds, last = self._reuse.kinds(rows), self._reuse.last_used(rows)
        for kind in np.unique(kinds).tolist():
            some = kinds == kind
            first = float(last[some].min())
            latest = self._latest.get(kind, -1)
            if first < now - _SPAN_S or (latest >= 0 and first < self._since[latest]):
                self._file_back(kind, rows[some], last[some], now)
                continue
            if latest < 0 or now - self._since[latest] > _SPAN_S:
                latest = self._latest[kind] = self._new_slice(kind, first)
            self._queue(latest).append(rows[some])

    def _file_back(self, kind: int, rows: Rows, last: Floats, now: float) -> None:
        """The same for rows of one class that were last used some time ago: in new slices if none is near."""
        mine = np.flatnonzero(self._kind == kind)
        mine = mine[np.argsort(self._since[mine])]
        since = np.append(-np.inf, self._since[mine])
        at = np.searchsorted(since, last, "right") - 1
        near = last - since[at] <= np.maximum(_SPAN_S, _BLUR * (now - last))
        for i in np.unique(at[near]).tolist():
            self._queue(int(mine[i - 1])).prepend(rows[near & (at == i)])
        # About a span wide for the latest, the older the wider.
        ages = np.floor(np.log1p(_BLUR * (now - last) / _SPAN_S) / _BLUR)
        for age in np.unique(ages[~near]).tolist():
            some = ~near & (ages == age)
            self._queue(self._new_slice(kind, float(last[some].min()))).append(rows[some])

    # -- who goes

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        """See Policy."""
        self._now = now
        if len(self._queues) - len(self._free) > self._tidy_at:
            self._tidy(now)
        self._take_back(now)
        found = self._lowest(n, now, below)
        if not len(found) and below == math.inf:
            self._file(self._busy.head(_BACK_AT_ONCE), now)
            self._look(now)
            # What a parent waits for may never come: no child here, or a way down that is open again.
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
            rows = self._queue(number).head(wanted)
            if len(rows):
                out.append(rows)
                wanted -= len(rows)
            else:
                self._drop_slice(number)
        rows = np.concatenate(out)
        return self._with_parents(rows, cold, n, now, below) if len(self._parents) else rows

    def _in_order(self, now: float, below: float) -> list[int]:
        """Numbers of slices, those that earn least first, the oldest of them before others."""
        there = np.flatnonzero(self._kind >= 0)
        scores = self._reuse.density(self._tenant, self._kind[there], self._since[there], now)
        there, scores = there[scores < below], scores[scores < below]
        order: list[int] = there[np.lexsort((self._since[there], scores))].tolist()
        return order

    def _take_back(self, now: float) -> None:
        """Blocks that were set aside: those that have lost a child here; others now and then."""
        self._file(self._orphans.head(len(self._orphans)), now)
        if now >= self._back_s and len(self._busy):
            self._back_s = now + _BACK_AFTER_S
            self._file(self._busy.head(_BACK_AT_ONCE), now)
        if now >= self._look_s:
            self._look_s = now + _LOOK_AFTER_S
            self._look(now)

    def _look(self, now: float) -> None:
        """Some of the parents have lost their children elsewhere, or never got those they were to have."""
        rows = self._parents.head(_LOOK_AT)
        self._parents.append(rows)
        self._file(rows[self._children[rows] == 0], now)

    def _with_parents(self, rows: Rows, cold: int, n: int, now: float, below: float) -> Rows:
        """The first n of these, lowest first, and of what was set aside above them, where those come in.

        The first few are `cold`: what they earn does not count.
        """
        above = self._parent[rows].astype(np.int64)
        more = (above >= 0) & (self._children[above] == 1) & self._are_aside(above)
        if not more.any():
            return rows[:n]
        scores = self._earned(rows, now)
        scores[:cold] = -1
        # One by one: the next is hardly ever in the same chain, and less than this would cost numpy.
        earned = self._reuse.earning(self._tenant, now)
        may_climb, parent, children = more.tolist(), self._parent.data, self._children.data
        aside = self._segments.membership(self._parents)
        ends = list(zip(scores.tolist(), range(len(rows)), rows.tolist(), strict=True))
        heapify(ends)
        out: list[int] = []
        while ends and len(out) < n:
            score, i, row = ends[0]
            if score >= below:
                break
            out.append(row)
            up = parent[row]
            if may_climb[i] and up >= 0 and children[up] == 1 and aside(up):
                # None goes before its child, though it may earn less.
                heapreplace(ends, (max(score, earned(up)), i, up))
            else:
                heappop(ends)
        return np.array(out)

    def _are_aside(self, rows: Rows) -> npt.NDArray[np.bool_]:
        aside: npt.NDArray[np.bool_] = self._segments.queues_of(rows) == self._parents.number
        return aside

    def _earned(self, rows: Rows, now: float) -> npt.NDArray[np.float32]:
        kinds, last = self._reuse.kinds(rows), self._reuse.last_used(rows)
        return self._reuse.density(self._tenant, kinds, last, now)

    def explain(self, rows: Rows, now: float) -> list[str]:
        """What is expected of each row."""
        kinds, scores = self._reuse.kinds(rows).tolist(), self._earned(rows, now).tolist()
        return [f"{describe(k)}: {s:.3g} uses/s expected" for k, s in zip(kinds, scores, strict=True)]

    # -- slices

    def _queue(self, number: int) -> Queue:
        queue = self._queues[number]
        assert queue is not None, "only numbers of slices that are there go around"
        return queue

    def _new_slice(self, kind: int, since: float) -> int:
        if not self._free:
            n = len(self._queues)
            self._kind = np.concatenate((self._kind, np.full(n, -1)))
            self._since = np.concatenate((self._since, np.zeros(n)))
            self._queues += [None] * n
            self._free = list(range(n, 2 * n))
        number = self._free.pop()
        self._kind[number], self._since[number] = kind, since
        if self._queues[number] is None:
            self._queues[number] = Queue(self._segments)
        return number

    def _drop_slice(self, number: int) -> None:
        kind = int(self._kind[number])
        if self._latest.get(kind) == number:
            del self._latest[kind]
        self._kind[number] = -1
        self._free.append(number)

    def _tidy(self, now: float) -> None:
        """Joins neighbours of one class that are close together for their age."""
        there = np.flatnonzero(self._kind >= 0)
        there = there[np.lexsort((self._since[there], self._kind[there]))]
        kinds, since = self._kind[there], self._since[there]
        same = np.append(kinds[1:] == kinds[:-1], False)
        ends = np.where(same, np.append(since[1:], now), now)
        older = -1
        for i in range(len(there) - 1):
            # `older` took what came right before.
            first = older if older >= 0 else i
            if same[i] and ends[i + 1] - since[first] <= _BLUR * (now - ends[i + 1]):
                self._queue(int(there[first])).absorb(self._queue(int(there[i + 1])))
                self._drop_slice(int(there[i + 1]))
                older = first
            else:
                older = -1
        self._tidy_at = max(_TIDY_AFTER, 2 * (len(self._queues) - len(self._free)))
