"""Queues of rows: what every policy is made of. One row costs four bytes of stamp and about six of queue.

A queue is a chain of segments, coldest first. A row's stamp says where its latest entry is (segment and
offset), so that all earlier entries are stale: to move a row is to append it elsewhere. Segments that hold
nothing but stale entries are given back at once; while too much is stale, every segment that is opened has a
few others looked at, and thin ones made smaller or one with the next. So a batch costs a handful of array
operations, and the queues of a tier take about twice the entries that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Rows

_BITS = 12
_SEGMENT = 1 << _BITS
_SEGMENTS = 1 << (31 - _BITS)
_FIRST = 64
_WINDOW = 1024
_WINDOWS = 16
_LOOKS = 64
_TIDY = 4
_OVERHEAD = 48
"""What a segment takes besides its entries, in entries."""

_OFFSETS = np.arange(_SEGMENT, dtype=np.int32)
_ONE = np.int32(1)  # of the column's type, which makes counting five times as fast

Entries = npt.NDArray[np.int32]


class Segment:
    """Some entries of a queue, `start` to `end` of them in use, coldest first, stale ones among them."""

    __slots__ = ("end", "entries", "number", "older", "queue", "start", "younger")

    def __init__(self, number: int, queue: Queue, entries: Entries) -> None:
        self.number = number
        self.queue = queue
        self.entries = entries
        self.start = self.end = 0
        self.older: Segment | None = None
        self.younger: Segment | None = None


class Segments:
    """The segments of all queues of one tier. A row is in one of these queues at most.

    `stamps` is a column of zeros by row: 0 is unknown, else `number of the segment << 12 | offset`. Numbers
    start at 1 and are used again.
    """

    def __init__(self, stamps: npt.NDArray[np.int32]) -> None:
        self.stamps = stamps
        self._columns: dict[str, npt.NDArray[np.uint8]] = {}
        self._all: list[Segment | None] = [None]
        self._free: list[int] = []
        self._cursor = 0
        # By the number of a segment: how many of its entries are not stale, and whose it is.
        self._live = np.zeros(64, np.int32)
        self._owner = np.zeros(64, np.int32)
        self._lengths = np.zeros(64, np.int64)
        self._queues = 1
        self._known = 0
        self._room = 0

    def column(self, name: str) -> npt.NDArray[np.uint8]:
        """A byte a row under that name, zeros at first, for whichever queue holds a row."""
        if name not in self._columns:
            self._columns[name] = zeros(len(self.stamps), np.uint8)
        return self._columns[name]

    @property
    def bytes_a_row(self) -> int:
        """What stamps and columns take for a row."""
        return self.stamps.itemsize + len(self._columns)

    @property
    def known_rows(self) -> int:
        """How many rows are in a queue."""
        return self._known

    def ram_bytes(self) -> int:
        """Bytes of all queues and of the rows' stamps and columns, as far as rows are in a queue."""
        return self._room * 4 + self._known * self.bytes_a_row

    def known(self, rows: Rows) -> Rows:
        """Those of rows that are in a queue."""
        inside = self.stamps.take(rows) > 0
        return rows if inside.all() else rows[inside]

    def queues_of(self, rows: Rows) -> npt.NDArray[np.int32]:
        """The number of the queue that each row is in; 0: in none."""
        numbers: npt.NDArray[np.int32] = self._owner.take(self.stamps.take(rows) >> _BITS)
        return numbers

    def membership(self, queue: Queue) -> Callable[[int], bool]:
        """Whether a row is in a queue, for one row after another, until the next change."""
        stamps, owner, number = self.stamps.data, self._owner.data, queue.number
        return lambda row: bool(owner[stamps[row] >> _BITS] == number)

    def lengths(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """How many rows are in the queues of these numbers."""
        return self._lengths[numbers]

    def forget(self, rows: Rows) -> None:
        """These are in no queue any more. Unknown rows are ignored."""
        self._leave(rows)
        self.stamps[rows] = 0

    def check(self) -> None:
        """Asserts that every segment has as many live entries as are counted."""
        numbers = self.stamps[self.stamps > 0] >> _BITS
        assert (np.bincount(numbers, minlength=len(self._live)) == self._live).all(), (
            "live entries miscounted"
        )

    # -- for queues

    def _enlist(self) -> int:
        """A number for a queue."""
        number = self._queues
        self._queues += 1
        if self._queues > len(self._lengths):
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
        return number

    def _open(self, queue: Queue, wanted: int) -> Segment:
        """A segment of a queue, linked nowhere yet, with room for up to `wanted` entries."""
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._all)
            assert number < _SEGMENTS, "out of numbers for segments"
            self._all.append(None)
            if number == len(self._live):
                self._live = np.concatenate((self._live, np.zeros_like(self._live)))
                self._owner = np.concatenate((self._owner, np.zeros_like(self._owner)))
        segment = Segment(number, queue, np.zeros(_size(wanted), np.int32))
        self._all[number] = segment
        self._owner[number] = queue.number
        self._room += len(segment.entries) + _OVERHEAD
        return segment

    def _place(self, segment: Segment, at: int, rows: Rows | Entries) -> None:
        """Writes rows, which have left where they were, to a segment, from an offset on."""
        n = len(rows)
        segment.entries[at : at + n] = rows
        self.stamps[rows] = _OFFSETS[at : at + n] + (segment.number << _BITS)
        self._live[segment.number] += n

    def _come(self, queue: Queue, n: int) -> None:
        self._lengths[queue.number] += n
        self._known += n

    def _leave(self, rows: Rows) -> None:
        """The latest entries of rows are about to become stale."""
        stamps = self.stamps.take(rows)
        known = int(np.count_nonzero(stamps))
        if not known:
            return
        numbers = stamps >> _BITS
        np.subtract.at(self._live, numbers, _ONE)
        np.subtract.at(self._lengths, self._owner.take(numbers), 1)
        # Number 0 is where unknown rows are counted.
        self._live[0] = self._lengths[0] = 0
        self._known -= known
        left = self._live.take(numbers)
        if not left.all():
            for number in set(numbers[left == 0].tolist()) - {0}:
                segment = self._all[number]
                if segment is not None and segment is not segment.queue._recent:
                    self._give_back(segment)

    def _alive(self, segment: Segment) -> Entries:
        """The entries of a segment that are not stale, coldest first."""
        at, end = segment.start, segment.end
        entries = segment.entries[at:end]
        alive: Entries = entries[self.stamps.take(entries) == _OFFSETS[at:end] + (segment.number << _BITS)]
        return alive

    def _give_back(self, segment: Segment) -> None:
        """A segment without live entries leaves its queue."""
        segment.queue._unlink(segment)
        self._room -= len(segment.entries) + _OVERHEAD
        self._live[segment.number] = self._owner[segment.number] = 0
        self._all[segment.number] = None
        self._free.append(segment.number)

    # -- making room

    def _tidy(self, opened: int) -> None:
        """If too much is stale, looks at some segments, a few times the entries that have been opened."""
        if not opened or self._room <= 2 * self._known:
            return
        budget = _TIDY * opened
        for _ in range(min(_LOOKS, len(self._all) - 1)):
            self._cursor = self._cursor % (len(self._all) - 1) + 1
            segment = self._all[self._cursor]
            if segment is not None:
                budget -= len(segment.entries)
                self._tidy_one(segment)
            if budget <= 0:
                break

    def _tidy_one(self, segment: Segment) -> None:
        live, room = int(self._live[segment.number]), len(segment.entries)
        younger, recent = segment.younger, segment.queue._recent
        if not live:
            self._give_back(segment)
        elif younger is None:
            if room > _FIRST and live <= room // 4:
                self._refill(segment, self._alive(segment), _size(2 * live))
        elif younger is not recent and live + self._live[younger.number] <= _SEGMENT:
            rows = np.concatenate((self._alive(segment), self._alive(younger)))
            self._give_back(younger)
            self._refill(segment, rows, len(rows))
        elif live <= room // 2:
            self._refill(segment, self._alive(segment), live)

    def _refill(self, segment: Segment, rows: Entries, room: int) -> None:
        """Makes a segment hold just these rows, in this order, and so many entries in all."""
        self._room += room - len(segment.entries)
        segment.entries = np.zeros(room, np.int32)
        segment.start, segment.end = 0, len(rows)
        self._live[segment.number] = 0
        self._place(segment, 0, rows)


class Queue:
    """Rows in an order, coldest first. Every operation takes distinct rows."""

    __slots__ = ("_coldest", "_recent", "_segments", "number")

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.number = segments._enlist()
        self._coldest: Segment | None = None
        self._recent: Segment | None = None

    def __len__(self) -> int:
        return int(self._segments._lengths[self.number])

    def append(self, rows: Rows) -> None:
        """Rows come to the recent end, in this order, from wherever they were."""
        segments, n = self._segments, len(rows)
        segments._leave(rows)
        done = opened = 0
        while done < n:
            segment = self._recent
            if segment is None or segment.end == len(segment.entries):
                segment = segments._open(self, max(len(self), n - done))
                opened += len(segment.entries)
                self._link_recent(segment)
            some = min(len(segment.entries) - segment.end, n - done)
            segments._place(segment, segment.end, rows[done : done + some])
            segment.end += some
            done += some
        segments._come(self, n)
        segments._tidy(opened)

    def prepend(self, rows: Rows) -> None:
        """Rows come to the cold end, the first of them coldest, from wherever they were."""
        segments, left = self._segments, len(rows)
        segments._leave(rows)
        opened = 0
        while left:
            segment = self._coldest
            if segment is None or segment.start == 0:
                segment = segments._open(self, max(len(self), left))
                opened += len(segment.entries)
                segment.start = segment.end = len(segment.entries)
                self._link_coldest(segment)
            some = min(segment.start, left)
            segment.start -= some
            left -= some
            segments._place(segment, segment.start, rows[left : left + some])
        segments._come(self, len(rows))
        segments._tidy(opened)

    def head(self, n: int) -> Rows:
        """Up to n rows, coldest first, at least one if there is any: fewer where much is stale."""
        out: list[Entries] = []
        segments, windows, segment = self._segments, 0, self._coldest
        while segment is not None and n > 0 and (windows < _WINDOWS or not out):
            at = segment.start
            base = segment.number << _BITS
            while at < segment.end and n > 0 and (windows < _WINDOWS or not out):
                end = min(at + _WINDOW, segment.end)
                entries = segment.entries[at:end]
                live = segments.stamps.take(entries) == _OFFSETS[at:end] + base
                if at == segment.start:
                    segment.start += int(live.argmax()) if live.any() else end - at
                some = entries[live][:n]
                if len(some):
                    out.append(some)
                    n -= len(some)
                windows += 1
                at = end
            segment = segment.younger
        if not out:
            return np.empty(0, np.int64)
        return (out[0] if len(out) == 1 else np.concatenate(out)).astype(np.int64)

    def absorb(self, younger: Queue) -> None:
        """All rows of another queue come behind mine, in their order; it is empty then."""
        segments, first = self._segments, younger._coldest
        if first is None:
            return
        for segment in younger._chain():
            segment.queue = self
            segments._owner[segment.number] = self.number
        segments._lengths[self.number] += segments._lengths[younger.number]
        segments._lengths[younger.number] = 0
        self._link_recent(first)
        self._recent = younger._recent
        younger._coldest = younger._recent = None

    def ram_bytes(self) -> int:
        """Bytes of its segments, the stamps not counted."""
        return sum(4 * (len(s.entries) + _OVERHEAD) for s in self._chain()) + 4 * _OVERHEAD

    def _chain(self) -> Iterator[Segment]:
        segment = self._coldest
        while segment is not None:
            younger = segment.younger
            yield segment
            segment = younger

    def _link_recent(self, segment: Segment) -> None:
        segment.older = self._recent
        if self._recent is None:
            self._coldest = segment
        else:
            self._recent.younger = segment
        # What was the open end may have gone stale meanwhile.
        last, self._recent = self._recent, segment
        if last is not None and not self._segments._live[last.number]:
            self._segments._give_back(last)

    def _link_coldest(self, segment: Segment) -> None:
        segment.younger = self._coldest
        if self._coldest is None:
            self._recent = segment
        else:
            self._coldest.older = segment
        self._coldest = segment

    def _unlink(self, segment: Segment) -> None:
        if segment.older is None:
            self._coldest = segment.younger
        else:
            segment.older.younger = segment.younger
        if segment.younger is None:
            self._recent = segment.older
        else:
            segment.younger.older = segment.older


def _size(wanted: int) -> int:
    """Entries of a segment for a queue of that length: few for a short one."""
    return min(_SEGMENT, max(_FIRST, 1 << max(wanted - 1, 0).bit_length()))
