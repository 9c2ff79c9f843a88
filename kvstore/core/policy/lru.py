"""Least recently used, tail first: of blocks used together, the end of the chain goes before its start.

Since a parent is touched whenever a child is, this order is leaf first by itself (measured equal to evicting
radix-tree leaves). The order is a log of touches in segments: every touch appends, the position of a row's
latest entry makes all earlier ones stale, and sparse segments are merged a little with every touch. So a
batch costs a handful of array operations, and the log never exceeds about twice the rows it knows.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import Rows

_BITS = 12
_SEGMENT = 1 << _BITS
_LOOK = 32


class LRU:
    """An LRU over rows 0 to capacity - 1. Positions start at 1; stamp 0 means unknown."""

    def __init__(self, capacity: int) -> None:
        self._stamp = np.zeros(capacity, np.int64)
        self._segments: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()
        self._valid: dict[int, int] = {}
        self._next = _SEGMENT
        self._known = 0
        self._cursor = 0
        self._top_row = 0

    def __len__(self) -> int:
        return self._known

    def insert(self, rows: Rows) -> None:
        """See Policy."""
        self._forget(rows)
        self._append(rows[::-1])

    def touch(self, rows: Rows) -> None:
        """See Policy."""
        rows = rows[self._stamp[rows] > 0]
        self._forget(rows)
        self._append(rows[::-1])

    def remove(self, rows: Rows) -> None:
        """See Policy."""
        self._forget(rows)

    def defer(self, rows: Rows) -> None:
        """See Policy: to the recent end, in the order given."""
        rows = rows[self._stamp[rows] > 0]
        self._forget(rows)
        self._append(rows)

    def coldest(self, n: int) -> Rows:
        """See Policy."""
        out: list[Rows] = []
        wanted = n
        for key, segment in islice(self._segments.items(), _LOOK):
            live = self._live(key, segment)[:wanted]
            out.append(live)
            wanted -= len(live)
            if wanted <= 0:
                break
        return np.concatenate(out) if out else np.empty(0, np.int64)

    def _live(self, key: int, rows: npt.NDArray[np.int32]) -> Rows:
        wide: Rows = rows.astype(np.int64)
        base = key << _BITS
        live: Rows = wide[self._stamp[wide] == np.arange(base, base + len(wide))]
        return live

    def _forget(self, rows: Rows) -> None:
        stamps = self._stamp[rows]
        stamps = stamps[stamps > 0]
        if not len(stamps):
            return
        self._stamp[rows] = 0
        self._known -= len(stamps)
        segments = stamps >> _BITS
        low, high = int(segments.min()), int(segments.max())
        if low == high:
            self._lose(low, len(segments))
        else:
            for key, n in zip(*(a.tolist() for a in np.unique(segments, return_counts=True)), strict=True):
                self._lose(key, n)

    def _lose(self, key: int, n: int) -> None:
        left = self._valid[key] - n
        if left or key == self._next >> _BITS:
            self._valid[key] = left
        else:
            del self._valid[key], self._segments[key]

    def _append(self, rows: Rows) -> None:
        done = opened = 0
        while done < len(rows):
            key, at = self._next >> _BITS, self._next & (_SEGMENT - 1)
            if at == 0:
                self._segments[key] = np.zeros(_SEGMENT, np.int32)
                self._valid[key] = 0
                opened += 1
            n = min(_SEGMENT - at, len(rows) - done)
            part = rows[done : done + n]
            self._segments[key][at : at + n] = part
            self._stamp[part] = np.arange(self._next, self._next + n)
            self._valid[key] += n
            self._next += n
            done += n
        self._known += len(rows)
        if len(rows):
            self._top_row = max(self._top_row, int(rows.max()))
        self._tidy(2 * opened)

    def _tidy(self, steps: int) -> None:
        """Merges neighbouring segments that fit into one, while the log is over twice its live rows."""
        for _ in range(steps):
            if len(self._segments) * _SEGMENT <= 2 * self._known + 4 * _SEGMENT:
                return
            self._merge_some()

    def _merge_some(self) -> None:
        keys = [k for k in self._segments if k >= self._cursor]
        last = self._next >> _BITS
        for a, b in pairwise(keys[: _LOOK + 1]):
            self._cursor = b
            if b < last and self._valid[a] + self._valid[b] <= _SEGMENT:
                self._merge(a, b)
                return
        if len(keys) <= _LOOK:
            self._cursor = 0

    def _merge(self, a: int, b: int) -> None:
        rows = np.concatenate((self._live(a, self._segments[a]), self._live(b, self._segments[b])))
        start = ((b + 1) << _BITS) - len(rows)
        segment = self._segments[b]
        segment[:] = 0
        segment[_SEGMENT - len(rows) :] = rows
        self._stamp[rows] = np.arange(start, start + len(rows))
        self._valid[b] = len(rows)
        del self._segments[a], self._valid[a]

    def ram_bytes(self) -> int:
        """Bytes of the stamps of the rows seen so far, and of the log."""
        return 8 * (self._top_row + 1) + len(self._segments) * 4 * _SEGMENT
