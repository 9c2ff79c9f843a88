"""Queues of rows, of which all policies are built. A row takes 4 bytes of stamp and about 6 of queue.

A queue is a chain of segments, coldest first. The stamp of a row is the place of its latest entry (segment
and offset); all earlier entries are stale. So to move a row is to append it elsewhere. A segment with only
stale entries is freed at once. While too many entries are stale, each new segment triggers a look at a few
others: thin ones are shrunk or merged with the next. So a batch costs a few array operations, and the queues
of a tier take about twice the entries that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import ref

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Picked, Rows

_BITS = 12
_SEGMENT = 1 << _BITS
_SEGMENTS = 1 << (31 - _BITS)
_FIRST = 64
_WINDOW = 1024
_WINDOWS = 16
_LOOKS = 64
_TIDY = 4
_OVERHEAD = 48
"""The overhead of a segment, in entries."""

_OFFSETS = np.arange(_SEGMENT, dtype=np.int32)
_ONE = np.int32(1)  # of the column's type, which makes counting five times as fast

Entries = npt.NDArray[np.int32]


class Segment:
    """Entries of a queue, coldest first. `start` to `end` are in use; some of them may be stale.

    `queue` is a weak reference, and a queue that goes takes its chain apart: a replaced policy has no cycles,
    so its memory is freed at once. The garbage collector would find it much later.
    """

    __slots__ = ("end", "entries", "number", "older", "queue", "start", "younger")

    def __init__(self, number: int, queue: Queue, entries: Entries) -> None:
        self.number = number
        self.queue = ref(queue)
        self.entries = entries
        self.start = self.end = 0
        self.older: Segment | None = None
        self.younger: Segment | None = None

    def unlink(self) -> None:
        """Removes the segment from its chain."""
        queue, older, younger = self.queue(), self.older, self.younger
        if older is not None:
            older.younger = younger
        elif queue is not None:
            queue._coldest = younger
        if younger is not None:
            younger.older = older
        elif queue is not None:
            queue._recent = older


class Segments:
    """The segments of all queues of one tier. A row is in at most one of these queues.

    `stamps` is a column of zeros by row. A stamp is 0 (unknown) or `number of the segment << 12 | offset`.
    Segment numbers start at 1 and are reused.
    """

    def __init__(self, stamps: npt.NDArray[np.int32]) -> None:
        self.stamps = stamps
        self._columns: dict[str, npt.NDArray[np.uint8]] = {}
        self._all: list[Segment | None] = [None]
        self._free: list[int] = []
        self._cursor = 0
        # By segment number: the number of live entries, and the number of the queue.
        self._live = np.zeros(64, np.int32)
        self._owner = np.zeros(64, np.int32)
        self._lengths = np.zeros(64, np.int64)
        self._queues = 1
        self._spare_queues: list[int] = []
        self._known = 0
        self._room = 0

    def column(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns a named column of one byte a row, of zeros at first, shared by the queues of the tier."""
        if name not in self._columns:
            self._columns[name] = zeros(len(self.stamps), np.uint8)
        return self._columns[name]

    @property
    def bytes_a_row(self) -> int:
        """Bytes of stamp and columns per row."""
        return self.stamps.itemsize + len(self._columns)

    @property
    def known_rows(self) -> int:
        """The number of rows in queues."""
        return self._known

    def ram_bytes(self) -> int:
        """Returns the bytes of all queues, and of the stamps and columns of rows in queues."""
        return self._room * 4 + self._known * self.bytes_a_row

    def known(self, rows: Rows) -> Rows:
        """Returns the rows that are in a queue."""
        inside = self.stamps.take(rows) > 0
        return rows if inside.all() else rows[inside]

    def queues_of(self, rows: Picked) -> npt.NDArray[np.int32]:
        """Returns the queue number of each row; 0: in no queue."""
        numbers: npt.NDArray[np.int32] = self._owner.take(self.stamps[rows] >> _BITS)
        return numbers

    def membership(self, queue: Queue) -> Callable[[int], bool]:
        """Returns a function that tests one row. It is valid until the next change."""
        stamps, owner, number = self.stamps.data, self._owner.data, queue.number
        return lambda row: bool(owner[stamps[row] >> _BITS] == number)

    def lengths(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Returns the lengths of the queues of these numbers."""
        return self._lengths[numbers]

    def forget(self, rows: Rows) -> None:
        """Removes rows from their queues. Unknown rows are ignored."""
        self._leave(rows)
        self.stamps[rows] = 0

    def check(self) -> None:
        """Asserts that the live entries of every segment are counted correctly."""
        numbers = self.stamps[self.stamps > 0] >> _BITS
        assert (np.bincount(numbers, minlength=len(self._live)) == self._live).all(), (
            "live entries miscounted"
        )

    # -- for queues

    def _enlist(self) -> int:
        """Returns a number for a new queue."""
        if self._spare_queues:
            return self._spare_queues.pop()
        number = self._queues
        self._queues += 1
        if self._queues > len(self._lengths):
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
        return number

    def _delist(self, number: int) -> None:
        """Makes the number of a queue that is gone available. Only segments without live entries have it."""
        if not self._lengths[number]:
            self._spare_queues.append(number)

    def _open(self, queue: Queue, wanted: int) -> Segment:
        """Returns a new segment of a queue, not linked yet, for up to `wanted` entries."""
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
        """Writes rows to a segment from an offset on. They must have left their old places."""
        n = len(rows)
        segment.entries[at : at + n] = rows
        self.stamps[rows] = _OFFSETS[at : at + n] + (segment.number << _BITS)
        self._live[segment.number] += n

    def _come(self, queue: Queue, n: int) -> None:
        self._lengths[queue.number] += n
        self._known += n

    def _leave(self, rows: Rows) -> None:
        """Makes the latest entries of rows stale."""
        stamps = self.stamps.take(rows)
        known = int(np.count_nonzero(stamps))
        if not known:
            return
        numbers = stamps >> _BITS
        np.subtract.at(self._live, numbers, _ONE)
        np.subtract.at(self._lengths, self._owner.take(numbers), 1)
        # Unknown rows are counted under number 0.
        self._live[0] = self._lengths[0] = 0
        self._known -= known
        left = self._live.take(numbers)
        if not left.all():
            for number in set(numbers[left == 0].tolist()) - {0}:
                segment = self._all[number]
                if segment is not None and segment.younger is not None:
                    self._give_back(segment)

    def _alive(self, segment: Segment) -> Entries:
        """Returns the live entries of a segment, coldest first."""
        at, end = segment.start, segment.end
        entries = segment.entries[at:end]
        alive: Entries = entries[self.stamps.take(entries) == _OFFSETS[at:end] + (segment.number << _BITS)]
        return alive

    def _give_back(self, segment: Segment) -> None:
        """Frees a segment without live entries."""
        segment.unlink()
        self._room -= len(segment.entries) + _OVERHEAD
        self._live[segment.number] = self._owner[segment.number] = 0
        self._all[segment.number] = None
        self._free.append(segment.number)

    # -- making room

    def _tidy(self, opened: int) -> None:
        """If too many entries are stale, tidies segments with a few times as many entries as were opened."""
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
        younger = segment.younger
        if not live:
            self._give_back(segment)
        elif younger is None:
            if room > _FIRST and live <= room // 4:
                self._refill(segment, self._alive(segment), _size(2 * live))
        elif younger.younger is not None and live + self._live[younger.number] <= _SEGMENT:
            rows = np.concatenate((self._alive(segment), self._alive(younger)))
            self._give_back(younger)
            self._refill(segment, rows, len(rows))
        elif live <= room // 2:
            self._refill(segment, self._alive(segment), live)

    def _refill(self, segment: Segment, rows: Entries, room: int) -> None:
        """Replaces the entries of a segment by these rows, in this order, in an array of `room` entries."""
        self._room += room - len(segment.entries)
        segment.entries = np.zeros(room, np.int32)
        segment.start, segment.end = 0, len(rows)
        self._live[segment.number] = 0
        self._place(segment, 0, rows)


class Queue:
    """Rows in order, coldest first. Every operation takes distinct rows."""

    __slots__ = ("__weakref__", "_coldest", "_recent", "_segments", "number")

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.number = segments._enlist()
        self._coldest: Segment | None = None
        self._recent: Segment | None = None

    def __del__(self) -> None:
        self._segments._delist(self.number)
        # Without cycles, the memory of segments is freed at once.
        for segment in self._chain():
            segment.older = None

    def __len__(self) -> int:
        return int(self._segments._lengths[self.number])

    def append(self, rows: Rows) -> None:
        """Moves rows, in this order, to the recent end, from whichever queue has them."""
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
        """Moves rows to the cold end, the first one coldest, from whichever queue has them."""
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
        """Returns up to n rows, coldest first, and at least one if there is any.

        Returns fewer where many entries are stale.
        """
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
        """Appends all rows of another queue, in their order. The other queue is empty afterwards."""
        segments, first = self._segments, younger._coldest
        if first is None:
            return
        for segment in younger._chain():
            segment.queue = ref(self)
            segments._owner[segment.number] = self.number
        segments._lengths[self.number] += segments._lengths[younger.number]
        segments._lengths[younger.number] = 0
        self._link_recent(first)
        self._recent = younger._recent
        younger._coldest = younger._recent = None

    def ram_bytes(self) -> int:
        """Returns the bytes of the segments, without stamps."""
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
        # The old open end may be stale by now.
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


def _size(wanted: int) -> int:
    """Returns the size of a segment, in entries, for a queue of `wanted` rows."""
    return min(_SEGMENT, max(_FIRST, 1 << max(wanted - 1, 0).bit_length()))
