"""Least recently used, tail first: of blocks used together, the end of the chain goes before its start.

Since a parent is touched whenever a child is, this order is leaf first by itself (measured equal to evicting
radix-tree leaves). The order is a log of touches in segments: every touch appends, and the position of a
row's latest entry makes all earlier ones stale. Whenever a segment is full, a few others are looked at, and
thin ones merged: so a batch costs a handful of array operations, and the log stays within about twice the
rows it knows.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import Rows

_BITS = 12
_SEGMENT = 1 << _BITS
_LOOK = 32
_TIDY = 8


class LRU:
    """An LRU over rows. Positions start at `_SEGMENT`; stamp 0 means unknown."""

    def __init__(self, stamps: npt.NDArray[np.int64]) -> None:
        """`stamps`: a column of zeros by row, shared with policies that know other rows."""
        self._stamp = stamps
        self._segments: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()
        self._next = _SEGMENT
        self._known = 0
        self._cursor = 0

    def __len__(self) -> int:
        return self._known

    def insert(self, rows: Rows) -> None:
        """See Policy."""
        self._known += len(rows) - int(np.count_nonzero(self._stamp[rows]))
        self._append(rows[::-1])

    def touch(self, rows: Rows) -> None:
        """See Policy."""
        stamps = self._stamp[rows]
        if np.count_nonzero(stamps) < len(rows):
            rows = rows[stamps > 0]
        self._append(rows[::-1])

    def remove(self, rows: Rows) -> None:
        """See Policy."""
        self._known -= int(np.count_nonzero(self._stamp[rows]))
        self._stamp[rows] = 0

    def defer(self, rows: Rows) -> None:
        """See Policy: to the recent end, in the order given."""
        self._append(rows[self._stamp[rows] > 0])

    def coldest(self, n: int) -> Rows:
        """See Policy."""
        out: list[Rows] = []
        empty = []
        wanted = n
        for key, segment in self._segments.items():
            live = self._live(key, segment)
            if len(live):
                out.append(live[:wanted])
                wanted -= len(live)
            elif key != self._next >> _BITS:
                empty.append(key)
            if wanted <= 0 or len(out) == _LOOK:
                break
        for key in empty:
            del self._segments[key]
        return np.concatenate(out) if out else np.empty(0, np.int64)

    def _live(self, key: int, segment: npt.NDArray[np.int32]) -> Rows:
        """The entries of a segment that are still their row's latest, oldest first."""
        rows: Rows = segment.astype(np.int64)
        base = key << _BITS
        live: Rows = rows[self._stamp[rows] == np.arange(base, base + len(rows))]
        return live

    def _append(self, rows: Rows) -> None:
        done, n = 0, len(rows)
        while done < n:
            key, at = self._next >> _BITS, self._next & (_SEGMENT - 1)
            if at == 0:
                self._tidy()
                self._segments[key] = np.zeros(_SEGMENT, np.int32)
            some = min(_SEGMENT - at, n - done)
            part = rows[done : done + some]
            self._segments[key][at : at + some] = part
            self._stamp[part] = np.arange(self._next, self._next + some)
            self._next += some
            done += some

    def _tidy(self) -> None:
        """While the log is over twice its live rows: looks at a few segments, merges those that fit."""
        if len(self._segments) * _SEGMENT <= 2 * self._known + 4 * _SEGMENT:
            return
        keys = list(islice((k for k in self._segments if k >= self._cursor), _TIDY))
        if len(keys) < _TIDY:
            self._cursor = 0
        else:
            self._cursor = keys[-1]
        kept, held = -1, np.empty(0, np.int64)
        for key in keys:
            live = self._live(key, self._segments[key])
            if kept >= 0 and len(held) + len(live) <= _SEGMENT:
                del self._segments[kept]
                held = np.concatenate((held, live))
            else:
                held = live
            kept = key
            self._refill(key, held)

    def _refill(self, key: int, rows: Rows) -> None:
        """Makes a segment hold just these rows, at its end, in this order."""
        segment = self._segments[key]
        start = _SEGMENT - len(rows)
        segment[:start] = 0
        segment[start:] = rows
        base = key << _BITS
        self._stamp[rows] = np.arange(base + start, base + _SEGMENT)

    def ram_bytes(self) -> int:
        """See Policy."""
        return len(self._segments) * 4 * _SEGMENT
