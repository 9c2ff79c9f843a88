"""Slices: queues of the rows of one kind that were last used at about the same time.

All rows of a slice earn about the same, so a policy compares some hundred slices instead of all rows. A slice
that was last used long ago may cover a longer time; close neighbours are joined.
"""

from __future__ import annotations

import numpy as np

from kvstore.columns import distinct
from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.queue import Queue, Segments
from kvstore.core.reuse.curves import Floats, Ints

_SPAN_S = 1.0
_BLUR = 0.15
"""The time that a slice may cover, as a share of its age."""
_TIDY_AFTER = 64


class Slices:
    """The slices of one pool. Columns by number: `kind` (-1: unused), `since` (s); queues are reused.

    `numbers`: those of their queues, 0 where none was made yet.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.kind: Ints = np.full(_TIDY_AFTER, -1)
        self.since: Floats = np.zeros(_TIDY_AFTER)
        self.numbers: Ints = np.zeros(_TIDY_AFTER, np.int64)
        self._queues: list[Queue | None] = [None] * _TIDY_AFTER
        self._free = list(range(_TIDY_AFTER))
        self._latest: dict[int, int] = {}
        self._tidy_at = _TIDY_AFTER

    def queues(self) -> list[Queue]:
        """Returns the queues of all slices."""
        return [q for q in self._queues if q is not None]

    def queue(self, number: int) -> Queue:
        """Returns the queue of a slice."""
        queue = self._queues[number]
        assert queue is not None, "the slice exists"
        return queue

    def ram_bytes(self) -> int:
        """Bytes of columns and queues."""
        columns = self.kind.nbytes + self.since.nbytes + self.numbers.nbytes
        return columns + sum(q.ram_bytes() for q in self.queues())

    # -- rows come

    def add(self, rows: Rows, kinds: Ints, last_used: Floats, now: float) -> None:
        """Appends rows to the slices of their kinds and times."""
        different = distinct(kinds)
        for kind in different:
            some = kinds == kind if len(different) > 1 else slice(None)
            first = float(last_used[some].min())
            latest = self._latest.get(kind, -1)
            if first < now - _SPAN_S or (latest >= 0 and first < self.since[latest]):
                self._add_older(kind, rows[some], last_used[some], now)
                continue
            if latest < 0 or now - self.since[latest] > _SPAN_S:
                latest = self._latest[kind] = self._new(kind, first, now)
            self.queue(latest).append(rows[some])

    def _add_older(self, kind: int, rows: Rows, last_used: Floats, now: float) -> None:
        """Adds rows of one kind that were last used some time ago; makes slices where none is near."""
        mine = np.flatnonzero(self.kind == kind)
        mine = mine[np.argsort(self.since[mine])]
        since = np.append(-np.inf, self.since[mine])
        position = np.searchsorted(since, last_used, "right") - 1
        near = last_used - since[position] <= np.maximum(_SPAN_S, _BLUR * (now - last_used))
        for i in distinct(position[near]):
            self.queue(int(mine[i - 1])).prepend(rows[near & (position == i)])
        # A new slice covers about _SPAN_S at age 0, and more at higher ages.
        ages = np.floor(np.log1p(_BLUR * (now - last_used) / _SPAN_S) / _BLUR)
        for age in distinct(ages[~near]):
            some = ~near & (ages == age)
            self.queue(self._new(kind, float(last_used[some].min()), now)).append(rows[some])

    # -- slices come and go

    def _new(self, kind: int, since: float, now: float) -> int:
        if not self._free:
            # A pool that evicts nothing has no other occasion.
            self._drop_empty()
            self.tidy(now)
        if not self._free:
            n = len(self._queues)
            self.kind = np.concatenate((self.kind, np.full(n, -1)))
            self.since = np.concatenate((self.since, np.zeros(n)))
            self.numbers = np.concatenate((self.numbers, np.zeros(n, np.int64)))
            self._queues += [None] * n
            self._free = list(range(n, 2 * n))
        number = self._free.pop()
        self.kind[number], self.since[number] = kind, since
        if self._queues[number] is None:
            self._queues[number] = queue = Queue(self._segments)
            self.numbers[number] = queue.number
        return number

    def _drop_empty(self) -> None:
        numbers = np.flatnonzero(self.kind >= 0)
        lengths = self._segments.lengths(self.numbers[numbers].astype(np.int32))
        for number in numbers[lengths == 0].tolist():
            self.drop(number)

    def drop(self, number: int) -> None:
        """Removes an empty slice."""
        kind = int(self.kind[number])
        if self._latest.get(kind) == number:
            del self._latest[kind]
        self.kind[number] = -1
        self._free.append(number)

    def tidy(self, now: float) -> None:
        """If there are many slices, joins neighbours of one kind that are close together for their age."""
        if len(self._queues) - len(self._free) <= self._tidy_at:
            return
        numbers = np.flatnonzero(self.kind >= 0)
        numbers = numbers[np.lexsort((self.since[numbers], self.kind[numbers]))]
        kinds, since = self.kind[numbers], self.since[numbers]
        same = np.append(kinds[1:] == kinds[:-1], False)
        ends = np.where(same, np.append(since[1:], now), now)
        older = -1
        for i in range(len(numbers) - 1):
            # `older` absorbed the slice right before this one.
            first = older if older >= 0 else i
            if same[i] and ends[i + 1] - since[first] <= _BLUR * (now - ends[i + 1]):
                self.queue(int(numbers[first])).absorb(self.queue(int(numbers[i + 1])))
                self.drop(int(numbers[i + 1]))
                older = first
            else:
                older = -1
        self._tidy_at = max(_TIDY_AFTER, 2 * (len(self._queues) - len(self._free)))
