"""The index from (namespace, key) to row: 64-byte buckets of eight (fingerprint, row) pairs, two per key.

A fingerprint only finds candidates. The full key of the row decides, so two keys are never confused. The
index grows by moving a few dozen buckets with each insertion. A dictionary has rows whose buckets are full.

Hash: multiply-and-add of the key's words with secret odd factors (a universal family), then a mixer.
`kvstore.native` finds, adds and removes batches.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.blocks.key_batch import Keys
from kvstore.native import index_add, index_find, index_remove, splitmix
from kvstore.types import MAX_KEY_BYTES

_WAYS = 8
_GROW_AT = 0.6
_PREPARE_AT = 0.5
_TOUCH_BUCKETS = 8
"""A new table has 2.6 buckets for each row that is added between `_PREPARE_AT` and `_GROW_AT`."""
_PAGE_BUCKETS = 64
_ADD_ROWS = 1024
_MOVE_BUCKETS = 32
_SETTLE = 256
_RUN_FROM = 12
"""Rows are compared with a run from so many keys on."""


class _Table:
    """`cells`: buckets (a power of two) of 16 u32: eight fingerprints, then eight rows. Fingerprint 0: empty.

    `parts`: the cells with the columns and factors that `kvstore.native` needs beside them.
    """

    def __init__(self, buckets: int, blocks: Blocks, factors: npt.NDArray[np.uint64]) -> None:
        self.cells = zeros(buckets * 2 * _WAYS, np.uint32).reshape(buckets, 2 * _WAYS)
        self.parts = self.cells, blocks.words, blocks.key_info.view(np.uint32), factors


class Index:
    """The index over the rows of `blocks`. `seed` is a secret 64-bit number of this daemon's run."""

    def __init__(self, blocks: Blocks, seed: int, buckets: int = 1 << 12) -> None:
        self._blocks = blocks
        self._factors = np.array(self._factors_of(seed), np.uint64)
        self._table = self._table_of(buckets)
        self._old: _Table | None = None
        self._next: _Table | None = None
        self._touched = self._moved = 0
        self._unsettled = 0
        self._overflow: dict[tuple[int, bytes], int] = {}
        self._first_words: npt.NDArray[np.uint64] | None = None
        self._one = np.empty(1, np.int64)
        self.count = 0

    @staticmethod
    def _factors_of(seed: int) -> list[int]:
        """Returns the factors of a key's words, of its namespace and of its length."""
        return [f | 1 for f in splitmix(seed, MAX_KEY_BYTES // 8 + 2)]

    def _table_of(self, buckets: int) -> _Table:
        return _Table(buckets, self._blocks, self._factors)

    # -- finding

    def find(self, namespace: int, keys: Keys) -> Rows:
        """Returns the row of each key, -1 for unknown keys."""
        if keys.n >= _RUN_FROM:
            first = self.find_run(namespace, keys)
            if first >= 0 and 0 not in self._blocks.state[first : first + keys.n].tobytes():
                return np.arange(first, first + keys.n)
        return self.find_each(namespace, keys)

    def find_each(self, namespace: int, keys: Keys) -> Rows:
        """Returns the same by the table alone."""
        if not self.count:
            return np.full(keys.n, -1)
        info, words = namespace | keys.size << 16, keys.words
        found = np.empty(keys.n, np.int64)
        index_find(self._table.parts, words, info, found)
        if self._old is not None or self._overflow:
            missing = np.flatnonzero(found < 0)
            if self._old is not None:
                old = np.empty(len(missing), np.int64)
                index_find(self._old.parts, words[missing], info, old)
                found[missing] = old
            for i in self._may_overflow(words, missing):
                if found[i] < 0:
                    found[i] = self._overflow.get((namespace, keys[i]), -1)
        return found

    def _may_overflow(self, words: npt.NDArray[np.uint64], missing: Rows) -> list[int]:
        """Returns which of these keys have the first word of a key in the overflow."""
        if not self._overflow:
            return []
        if self._first_words is None:
            rows = np.fromiter(self._overflow.values(), np.int64, len(self._overflow))
            self._first_words = np.sort(self._blocks.words[0, rows, 0])
        first, wanted = self._first_words, words[missing, 0]
        there = first[np.minimum(np.searchsorted(first, wanted), len(first) - 1)] == wanted
        which: list[int] = missing[there].tolist()
        return which

    def find_run(self, namespace: int, keys: Keys) -> int:
        """Returns the first of consecutive rows that have exactly these keys, else -1.

        Some of the rows may be free: a row keeps its key when it is freed.
        """
        first = self.find_one(namespace, keys[0]) if keys.n else -1
        return first if first >= 0 and self._blocks.has_run(first, keys) else -1

    def find_one(self, namespace: int, key: bytes) -> int:
        """Returns the row of one key, or -1."""
        size = len(key)
        info, words, one = namespace | size << 16, key + bytes(-size % 8), self._one
        for table in (self._table, self._old):
            if table is not None:
                index_find(table.parts, words, info, one)
                if (row := int(one[0])) >= 0:
                    return row
        return self._overflow.get((namespace, key), -1) if self._overflow else -1

    # -- changing

    def make_room(self, rows: int) -> None:
        """Enlarges an empty index for that many rows."""
        if not self.count:
            buckets = len(self._table.cells)
            while rows > _GROW_AT * _WAYS * buckets:
                buckets *= 2
            self._table, self._old, self._next = self._table_of(buckets), None, None

    def add(self, rows: Rows, step: int = _ADD_ROWS) -> None:
        """Adds rows with new keys, `step` rows at a time."""
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            self.count += len(part)
            self._grow_while_full()
            self._add(part)
            self._move_some(max(len(part) // 2, _MOVE_BUCKETS))
            self._prepare_next(len(part))

    def _add(self, rows: Rows) -> None:
        for i in index_add(self._table.parts, rows):
            self._overflow[self._name(int(rows[i]))] = int(rows[i])
            self._first_words = None

    def _name(self, row: int) -> tuple[int, bytes]:
        return int(self._blocks.namespace[row]), self._blocks.key(row)

    def remove(self, rows: Rows) -> None:
        """Removes rows, with the keys that they had when they were added."""
        self.count -= len(rows)
        for table in (self._table, self._old):
            if table is not None and len(rows):
                rows = rows[index_remove(table.parts, rows)]
        for row in rows.tolist():
            del self._overflow[self._name(row)]
            self._first_words = None

    # -- growing

    def _grow_while_full(self) -> None:
        while self._old is None and self.count > _GROW_AT * _WAYS * len(self._table.cells):
            self._old, self._moved = self._table, 0
            self._table = self._next or self._table_of(2 * len(self._old.cells))
            self._next = None
            self._unsettled = len(self._overflow)
            if len(self._old.cells) <= _ADD_ROWS:
                self._move_some(_ADD_ROWS)

    def _prepare_next(self, rows: int) -> None:
        """Touches some of the next table. Rows land all over it, each on a page of its own at first."""
        if self._next is None:
            buckets = len(self._table.cells)
            if self._old is not None or self.count <= _PREPARE_AT * _WAYS * buckets:
                return
            self._next, self._touched = self._table_of(2 * buckets), 0
        end = self._touched + _TOUCH_BUCKETS * max(rows, _PAGE_BUCKETS)
        self._next.cells[self._touched : end : _PAGE_BUCKETS, 0] = 0
        self._touched = min(end, len(self._next.cells))

    def _move_some(self, buckets: int) -> None:
        """Moves some buckets of the old table, and some keys from the overflow."""
        if self._old is not None:
            part = self._old.cells[self._moved : self._moved + buckets]
            rows = part[:, _WAYS:][part[:, :_WAYS] != 0].astype(np.int64)
            if len(rows):
                self._add(rows)
                part[:, :_WAYS] = 0
            self._moved += buckets
            if self._moved >= len(self._old.cells):
                self._old = None
        if self._unsettled > 0:
            some = list(islice(self._overflow, _SETTLE))
            self._unsettled -= _SETTLE
            self._first_words = None
            self._add(np.array([self._overflow.pop(name) for name in some], np.int64))

    def ram_bytes(self) -> int:
        """Returns the bytes of the tables."""
        tables = [self._table.cells, *([self._old.cells] if self._old is not None else [])]
        if self._next is not None:
            tables.append(self._next.cells[: self._touched])
        return sum(cells.nbytes for cells in tables) + 300 * len(self._overflow)
