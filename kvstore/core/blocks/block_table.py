"""The block table: one row per block with its key, its slot in each tier and its parent. Columns, no objects.

A row is FREE, RESERVED (being written), LIVE (readable in at least one tier) or a HOLE: a block without bytes
that has children. A hole is a miss. The next put of its key fills it, and its descendants are hits again.

Columns are allocated at their full length as zero pages, so only rows in use take memory. The second half of
the keys is written, and so in memory, only where keys have more than 32 bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.key_batch import Keys
from kvstore.types import MAX_KEY_BYTES, MOST_TIERS

_NAMESPACES = 1 << 16
_WORDS = MAX_KEY_BYTES // 8
_HALF_WORDS = _WORDS // 2
_HALF_BYTES = MAX_KEY_BYTES // 2

KEY_INFO = np.dtype([("namespace", "<u2"), ("key_bytes", "u1"), ("zero", "u1")])

FREE, RESERVED, LIVE, HOLE = range(4)

Rows = npt.NDArray[np.int64]
Picked = slice | Rows
"""Row or slot numbers, as an index of columns."""


def compact(numbers: npt.NDArray[np.signedinteger]) -> Picked:
    """Returns consecutive numbers as a slice, which indexes five times as fast, and others as an array."""
    first, n = int(numbers[0]) if len(numbers) else 0, len(numbers)
    if numbers.tobytes() == np.arange(first, first + n, dtype=numbers.dtype).tobytes():
        return slice(first, first + n)
    return numbers.astype(np.int64, copy=False)


class Blocks:
    """Up to `capacity` blocks (at most 2**31 - 2) in `tiers` tier instances (at most `MOST_TIERS`).

    `rows_in` counts the rows of each namespace, by its number. `words` has the keys, padded with zeros, in
    two halves: the first four words of all rows, then the other four.
    """

    def __init__(self, capacity: int, tiers: int) -> None:
        self.capacity = capacity
        self.words = zeros(capacity * _WORDS, np.uint64).reshape(2, capacity, _HALF_WORDS)
        self._has_long_keys = False
        # One column, so a run of rows takes one comparison.
        self.key_info = zeros(capacity * KEY_INFO.itemsize, np.uint8).view(KEY_INFO)
        self.namespace = self.key_info["namespace"]
        self.key_bytes = self.key_info["key_bytes"]
        self.state = zeros(capacity, np.uint8)
        self.pinned = zeros(capacity, np.bool_)
        self.copy_marks = zeros(capacity, np.uint8)
        self.offered = zeros(capacity, np.bool_)
        self.parent = zeros(capacity, np.int32)
        self.children = zeros(capacity, np.int32)
        self.checksum = zeros(capacity, np.uint64)
        self._slots = zeros(MOST_TIERS * capacity, np.int32).reshape(MOST_TIERS, capacity)
        self.slot = self._slots[:tiers]
        self._widened = 0
        # Written, and so in memory, only for blocks that expire.
        self.expires = zeros(capacity, np.float64)
        self.rows_in = np.zeros(_NAMESPACES, np.int64)
        self._spare = zeros(capacity, np.int32)
        self._spares = 0
        self._fresh = 0

    def widen(self, rows: int) -> bool:
        """Prepares some rows of another slot column. Once it is complete, adds it and returns True."""
        end = min(self._widened + rows, self._fresh)
        column = self._slots[len(self.slot)]
        column[self._widened : end] = -1
        self._widened = end
        if end < self._fresh:
            return False
        self.slot, self._widened = self._slots[: len(self.slot) + 1], 0
        return True

    @property
    def used(self) -> int:
        """Rows that are not FREE."""
        return self._fresh - self._spares

    def take(self, namespace: int, keys: Keys, which: Rows) -> Rows:
        """Returns RESERVED rows for the keys numbered `which`, without slots and parents; fewer when full."""
        n = min(len(which), self.capacity - self.used)
        reused = min(n, self._spares)
        self._spares -= reused
        # Last freed, first taken: a chain that was dropped tail first gets ascending rows when stored again.
        rows = np.concatenate(
            (
                self._spare[self._spares : self._spares + reused][::-1].astype(np.int64),
                np.arange(self._fresh, self._fresh + n - reused, dtype=np.int64),
            )
        )
        at: Picked = rows if reused else slice(self._fresh, self._fresh + n)
        self._fresh += n - reused
        words = keys.words
        if len(words) > n:
            words = words[which[:n]]
        self._set_words(at, words)
        self.key_bytes[at] = keys.size
        self.namespace[at] = namespace
        self.rows_in[namespace] += n
        self.state[at] = RESERVED
        self.offered[at] = False
        self.parent[at] = -1
        self.slot[:, at] = -1
        return rows

    def _set_words(self, rows: Picked, words: npt.NDArray[np.uint64]) -> None:
        self._has_long_keys |= words.shape[1] > _HALF_WORDS
        parts = words[:, :_HALF_WORDS], words[:, _HALF_WORDS:]
        for half, part in zip(self.words, parts[: 1 + self._has_long_keys], strict=False):
            if part.shape[1] < _HALF_WORDS:
                half[rows] = 0
            half[rows, : part.shape[1]] = part

    def give_back(self, rows: Rows) -> None:
        """Makes rows FREE. They must be out of the index, out of all tiers and without children."""
        self.state[rows] = FREE
        self.pinned[rows] = False
        self.copy_marks[rows] = 0
        self.children[rows] = 0
        self.clear_expiry(rows)
        np.subtract.at(self.rows_in, self.namespace[rows], 1)
        end = self._spares + len(rows)
        self._spare[self._spares : end] = rows
        self._spares = end

    def key(self, row: int) -> bytes:
        """Returns the key of a row."""
        return bytes(self.words[:, row].tobytes()[: int(self.key_bytes[row])])

    def keys_of(self, rows: npt.NDArray[np.signedinteger]) -> list[bytes]:
        """Returns the keys of rows, empty where a row is -1."""
        words, sizes = self.some_words(rows), np.where(rows >= 0, self.key_bytes[rows], 0)
        raw, width = words.tobytes(), 8 * words.shape[1]
        starts = range(0, len(raw), width)
        return [raw[at : at + size] for at, size in zip(starts, sizes.tolist(), strict=True)]

    def some_words(self, rows: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.uint64]:
        """Returns the keys of rows, padded with zeros: four words each, eight if any is that long."""
        if self._has_long_keys:
            return self.all_words(rows)
        words: npt.NDArray[np.uint64] = self.words[0].take(rows, axis=0)
        return words

    def all_words(self, rows: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.uint64]:
        """Returns the keys of rows, eight words each, padded with zeros."""
        words = np.zeros((len(rows), _WORDS), np.uint64)
        words[:, :_HALF_WORDS] = self.words[0].take(rows, axis=0)
        if self._has_long_keys:
            words[:, _HALF_WORDS:] = self.words[1].take(rows, axis=0)
        return words

    def has_run(self, first: int, keys: Keys) -> bool:
        """Returns whether the rows from `first` on have these keys, and all of them the form of the first."""
        run, width = slice(first, first + keys.n), -(-keys.size // 8)
        raw = keys.raw if keys.size % 8 == 0 else keys.words.tobytes()
        if self.key_info[run].tobytes() != self.key_info[first].tobytes() * keys.n:
            return False
        if width <= _HALF_WORDS:
            # Bytes compare several times as fast as arrays of this size.
            return bool(self.words[0][run, :width].tobytes() == raw)
        return bool(np.hstack(tuple(self.words[:, run]))[:, :width].tobytes() == raw)

    def clear_expiry(self, rows: Rows) -> None:
        """Removes the expiry of rows."""
        if self.expires[rows].any():
            self.expires[rows] = 0

    def expired(self, rows: Picked, now: float) -> npt.NDArray[np.bool_]:
        """Returns which rows have expired."""
        ends = self.expires[rows]
        return (ends > 0) & (ends <= now)

    @property
    def rows_touched(self) -> int:
        """All row numbers that were ever in use are below this."""
        return self._fresh

    def ram_bytes(self) -> int:
        """Returns the bytes of the rows used so far: columns and spare list."""
        flat = (self.state, self.pinned, self.copy_marks, self.offered)
        wide = (self.key_info, self.parent, self.children, self.checksum)
        per_row = MAX_KEY_BYTES if self._has_long_keys else _HALF_BYTES
        per_row += self.slot.itemsize * len(self.slot)
        per_row += sum(column.itemsize for column in flat) + sum(column.itemsize for column in wide)
        return (per_row + self._spare.itemsize) * self._fresh
