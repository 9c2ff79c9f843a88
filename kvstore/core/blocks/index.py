"""The index from (namespace, key) to row: 64-byte buckets of eight (fingerprint, row) pairs, two per key.

A fingerprint only finds candidates. The full key of the row decides, so two keys are never confused. Batches
of `VECTOR_FROM` keys and more use numpy, smaller ones plain integers, which are faster there. The index grows
by moving a few dozen buckets with each insertion.

Hash: multiply-and-add of the key's words with secret odd factors (a universal family), then a mixer.
"""

from __future__ import annotations

import struct
from itertools import islice
from operator import mul

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.blocks.key_batch import Keys
from kvstore.types import MAX_KEY_BYTES

VECTOR_FROM = 12
_WAYS = 8
_GROW_AT = 0.6
_ADD_ROWS = 1024
_MOVE_BUCKETS = 32
_SETTLE = 256
_MASK64 = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
_SPREAD = 0x5BD1E995

_KEY_INFO = struct.Struct("<HBx")
_WORDS = [f"<{n // 8}Q" for n in range(MAX_KEY_BYTES + 1)]

U64 = npt.NDArray[np.uint64]


def _words(key: bytes) -> tuple[int, ...]:
    """Returns the words of a key with a short last word."""
    return struct.unpack(f"<{-(-len(key) // 8)}Q", key + bytes(-len(key) % 8))


def splitmix(seed: int, n: int) -> list[int]:
    """Returns n mixed 64-bit numbers from one seed."""
    out = []
    for i in range(1, n + 1):
        z = (seed + i * _MIX) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        out.append(z ^ (z >> 31))
    return out


class _Table:
    """`buckets` (a power of two) of 16 u32: eight fingerprints, then eight rows. Fingerprint 0: empty."""

    def __init__(self, buckets: int) -> None:
        self.mask = buckets - 1
        self.cells = zeros(buckets * 2 * _WAYS, np.uint32).reshape(buckets, 2 * _WAYS)
        self.flat = self.cells.data.cast("B").cast("I")


class Index:
    """The index over the rows of `blocks`. `seed` is a secret 64-bit number of this daemon's run."""

    def __init__(self, blocks: Blocks, seed: int, buckets: int = 1 << 12) -> None:
        self._blocks = blocks
        width = MAX_KEY_BYTES // 8
        factors = [f | 1 for f in splitmix(seed, width + 2)]
        self._factors = factors[:width]
        self._vector_factors = np.array(self._factors, np.uint64)
        self._namespace_factor, self._size_factor = factors[width:]
        self._table = _Table(buckets)
        self._old: _Table | None = None
        self._tables = [self._table]
        self._moved = 0
        self._unsettled = 0
        self._overflow: dict[int, list[int]] = {}
        self.count = 0

    # -- hashing

    def _start(self, namespace: int, size: int) -> int:
        return (namespace * self._namespace_factor + size * self._size_factor + 1) & _MASK64

    def _hash_one(self, namespace: int, key: bytes) -> int:
        h = self._start(namespace, len(key))
        words = struct.unpack(_WORDS[len(key)], key) if len(key) % 8 == 0 else _words(key)
        h = (h + sum(map(mul, words, self._factors))) & _MASK64
        h = ((h ^ (h >> 32)) * _MIX) & _MASK64
        return int(h ^ (h >> 29))

    def _hash(self, starts: U64 | np.uint64, words: U64) -> U64:
        h = words @ self._vector_factors[: words.shape[1]] + starts
        h ^= h >> np.uint64(32)
        h *= np.uint64(_MIX)
        h ^= h >> np.uint64(29)
        return h

    def _hash_keys(self, namespace: int, keys: Keys) -> U64:
        return self._hash(np.uint64(self._start(namespace, keys.size)), keys.words)

    def _hash_rows(self, rows: Rows) -> U64:
        blocks = self._blocks
        with np.errstate(over="ignore"):
            starts = (
                blocks.namespace[rows].astype(np.uint64) * np.uint64(self._namespace_factor)
                + blocks.key_bytes[rows].astype(np.uint64) * np.uint64(self._size_factor)
                + np.uint64(1)
            )
        return self._hash(starts, blocks.words[rows])

    # -- finding

    def find(self, namespace: int, keys: Keys) -> Rows:
        """Returns the row of each key, -1 for unknown keys."""
        if keys.n < VECTOR_FROM:
            return np.array([self.find_one(namespace, keys[i]) for i in range(keys.n)], np.int64)
        if not self.count:
            return np.full(keys.n, -1, np.int64)
        first = self.find_run(namespace, keys)
        if first >= 0 and 0 not in self._blocks.state[first : first + keys.n].tobytes():
            return np.arange(first, first + keys.n)
        return self._find_many(namespace, keys)

    def find_run(self, namespace: int, keys: Keys) -> int:
        """Returns the first of consecutive rows that have exactly these keys, else -1.

        Some of the rows may be free: a row keeps its key when it is freed.
        """
        blocks, n = self._blocks, keys.n
        raw = keys.raw if keys.size % 8 == 0 else keys.words.tobytes()
        for first in self._likely(self._hash_one(namespace, keys[0])) if n else ():
            run = slice(first, first + n)
            # Bytes compare several times as fast as arrays of this size.
            if (
                blocks.words[run, : -(-keys.size // 8)].tobytes() == raw
                and blocks.key_info[run].tobytes() == _KEY_INFO.pack(namespace, keys.size) * n
            ):
                return first
        return -1

    def _find_many(self, namespace: int, keys: Keys) -> Rows:
        h = self._hash_keys(namespace, keys)
        found = self._probe(self._table, h)
        if self._old is not None:
            missing = np.flatnonzero(found < 0)
            found[missing] = self._probe(self._old, h[missing])
        present = np.flatnonzero(found >= 0)
        wrong = present[~self._blocks.matches(found[present], namespace, keys, present)]
        doubtful = wrong.tolist()
        if self._overflow:
            hashes = h.tolist()
            doubtful += [i for i in np.flatnonzero(found < 0).tolist() if hashes[i] in self._overflow]
        for i in doubtful:
            found[i] = self.find_one(namespace, keys[i])
        return found

    @staticmethod
    def _places(h: U64, mask: int) -> tuple[Rows, Rows, npt.NDArray[np.uint32]]:
        mark = (h >> np.uint64(32)).astype(np.uint32)
        mark[mark == 0] = 1
        first = (h & np.uint64(mask)).astype(np.int64)
        second = first ^ ((mark.astype(np.int64) * _SPREAD) & mask)
        return first, second, mark

    def _probe(self, table: _Table, h: U64) -> Rows:
        first, second, mark = self._places(h, table.mask)
        found = np.full(len(h), -1, np.int64)
        todo = np.arange(len(h))
        for bucket in (first, second):
            cells = table.cells[bucket[todo]]
            hit = cells[:, :_WAYS] == mark[todo, None]
            way = hit.argmax(axis=1)
            each = np.arange(len(todo))
            ok = hit[each, way]
            found[todo[ok]] = cells[each[ok], _WAYS + way[ok]]
            todo = todo[~ok]
            if not len(todo):
                break
        return found

    def find_one(self, namespace: int, key: bytes) -> int:
        """Returns the row of one key, or -1."""
        is_key = self._blocks.is_key
        for row in self._candidates(self._hash_one(namespace, key)):
            if is_key(row, namespace, key):
                return row
        return -1

    def _likely(self, h: int) -> list[int]:
        """Returns the row in its usual place, or what `_candidates` finds."""
        table, mark = self._table, (h >> 32) or 1
        at = (h & table.mask) * 2 * _WAYS
        marks = table.flat[at : at + _WAYS].tolist()
        if mark in marks:
            return [table.flat[at + _WAYS + marks.index(mark)]]
        return self._candidates(h)

    def _candidates(self, h: int) -> list[int]:
        """Returns the rows with keys that may have this hash."""
        mark = (h >> 32) or 1
        found: list[int] = []
        for table in self._tables:
            first = h & table.mask
            for bucket in (first, first ^ ((mark * _SPREAD) & table.mask)):
                cells = table.flat[bucket * 2 * _WAYS : (bucket + 1) * 2 * _WAYS].tolist()
                if mark in cells:
                    found += [cells[way + _WAYS] for way in range(_WAYS) if cells[way] == mark]
        return found + self._overflow[h] if h in self._overflow else found

    # -- changing

    def make_room(self, rows: int) -> None:
        """Enlarges an empty index for that many rows."""
        if not self.count:
            buckets = len(self._table.cells)
            while rows > _GROW_AT * _WAYS * buckets:
                buckets *= 2
            self._table = _Table(buckets)
            self._old, self._tables = None, [self._table]

    def add(self, rows: Rows, step: int = _ADD_ROWS) -> None:
        """Adds rows with new keys, `step` rows at a time."""
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            self.count += len(part)
            self._grow_while_full()
            h = self._hash_rows(part)
            if len(part) < VECTOR_FROM:
                for row, value in zip(part.tolist(), h.tolist(), strict=True):
                    self._add_one(self._table, row, value)
            else:
                self._add_many(self._table, part, h)
            self._move_some(max(len(part) // 2, _MOVE_BUCKETS))

    def _add_many(self, table: _Table, rows: Rows, h: U64) -> None:
        first, second, mark = self._places(h, table.mask)
        todo = np.arange(len(rows))
        for bucket in (first, second):
            empty = table.cells[bucket[todo], :_WAYS] == 0
            way = empty.argmax(axis=1)
            fits = np.flatnonzero(empty[np.arange(len(todo)), way])
            # Two keys of a batch may select one cell: the first gets it.
            _, lone = np.unique(bucket[todo[fits]] * _WAYS + way[fits], return_index=True)
            chosen = fits[lone]
            at = todo[chosen]
            table.cells[bucket[at], way[chosen]] = mark[at]
            table.cells[bucket[at], _WAYS + way[chosen]] = rows[at]
            left = np.ones(len(todo), np.bool_)
            left[chosen] = False
            todo = todo[left]
        for i in todo.tolist():
            self._add_one(table, int(rows[i]), int(h[i]))

    def _add_one(self, table: _Table, row: int, h: int) -> None:
        mark = (h >> 32) or 1
        first = h & table.mask
        for bucket in (first, first ^ ((mark * _SPREAD) & table.mask)):
            at = bucket * 2 * _WAYS
            marks = table.flat[at : at + _WAYS].tolist()
            if 0 in marks:
                way = marks.index(0)
                table.flat[at + _WAYS + way] = row
                table.flat[at + way] = mark
                return
        self._overflow.setdefault(h, []).append(row)

    def remove(self, rows: Rows) -> None:
        """Removes rows, with the keys that they had when they were added."""
        self.count -= len(rows)
        h = self._hash_rows(rows)
        left = self._clear(self._table, rows, h)
        if self._old is not None and len(left):
            left = left[self._clear(self._old, rows[left], h[left])]
        for i in left.tolist():
            chain = self._overflow[int(h[i])]
            chain.remove(int(rows[i]))
            if not chain:
                del self._overflow[int(h[i])]

    def _clear(self, table: _Table, rows: Rows, h: U64) -> Rows:
        """Empties the cells of `rows`. Returns the positions of rows that were not found."""
        first, second, _ = self._places(h, table.mask)
        todo = np.arange(len(rows))
        for bucket in (first, second):
            cells = table.cells[bucket[todo]]
            hit = (cells[:, _WAYS:] == rows[todo, None].astype(np.uint32)) & (cells[:, :_WAYS] != 0)
            way = hit.argmax(axis=1)
            ok = hit[np.arange(len(todo)), way]
            table.cells[bucket[todo[ok]], way[ok]] = 0
            todo = todo[~ok]
            if not len(todo):
                break
        return todo

    # -- growing

    def _grow_while_full(self) -> None:
        while self._old is None and self.count > _GROW_AT * _WAYS * len(self._table.cells):
            self._old, self._moved = self._table, 0
            self._table = _Table(2 * len(self._old.cells))
            self._tables = [self._table, self._old]
            self._unsettled = len(self._overflow)
            if len(self._old.cells) <= _ADD_ROWS:
                self._move_some(_ADD_ROWS)

    def _move_some(self, buckets: int) -> None:
        """Moves some buckets of the old table, and some keys from the overflow."""
        if self._old is not None:
            part = self._old.cells[self._moved : self._moved + buckets]
            rows = part[:, _WAYS:][part[:, :_WAYS] != 0].astype(np.int64)
            if len(rows):
                self._add_many(self._table, rows, self._hash_rows(rows))
                part[:, :_WAYS] = 0
            self._moved += buckets
            if self._moved >= len(self._old.cells):
                self._old = None
                self._tables = [self._table]
        if self._unsettled > 0:
            some = list(islice(self._overflow, _SETTLE))
            self._unsettled -= _SETTLE
            for h in some:
                for row in self._overflow.pop(h):
                    self._add_one(self._table, row, h)

    def ram_bytes(self) -> int:
        """Returns the bytes of the tables."""
        return sum(table.cells.nbytes for table in self._tables) + 100 * len(self._overflow)
