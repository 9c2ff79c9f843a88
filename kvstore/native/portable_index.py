"""Rows of the block table in a table of the index, by numpy: for machines without the C extension.

A table is the buckets (n, 16) u32, eight fingerprints and eight rows each (fingerprint 0: empty), the columns
of all rows, words (2, rows, 4) u64, the halves of the keys, and infos u32 (the namespace in the low 16 bits,
the bytes of the key above), and ten factors u64 of the hash. Its user: `kvstore.core.blocks.index`.
"""

from __future__ import annotations

from operator import mul
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.native.mixing import MASK64, MIX, mixed

U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]
Parts: TypeAlias = tuple[U32, U64, U32, U64]

_VECTOR_FROM = 12
"""Smaller batches are faster with plain integers."""
_WAYS = 8
_SPREAD = 0x5BD1E995


def index_find(parts: Parts, words: Any, info: int, rows: I64) -> None:
    """Writes the row of each key to `rows`, -1 for absent ones. `words`: the keys, each padded to words."""
    cells, all_words, infos, factors = parts
    if not len(rows):
        return
    words = np.frombuffer(words, np.uint64).reshape(len(rows), -1)
    if len(rows) < _VECTOR_FROM:
        rows[:] = [_find_one(parts, each, info) for each in words]
        return
    starts = np.uint64(_start(info & 0xFFFF, info >> 16, factors))
    first, second, mark = _places(_hash(starts, words, factors), len(cells) - 1)
    rows[:] = -1
    todo = np.arange(len(rows))
    for bucket in (first, second):
        here = cells[bucket[todo]]
        hit = here[:, :_WAYS] == mark[todo, None]
        while hit.any():
            way = hit.argmax(axis=1)
            some = np.flatnonzero(hit[np.arange(len(todo)), way])
            row = here[some, _WAYS + way[some]].astype(np.int64)
            same = (_of_rows(all_words, row)[:, : words.shape[1]] == words[todo[some]]).all(axis=1)
            same &= infos[row] == info
            rows[todo[some[same]]] = row[same]
            hit[some, way[some]] = False
        todo = todo[rows[todo] < 0]


def index_add(parts: Parts, rows: I64) -> list[int]:
    """Adds rows whose keys are absent. Returns the numbers (0, 1, ...) of those without an empty cell."""
    cells = parts[0]
    if len(rows) < _VECTOR_FROM:
        return [i for i, row in enumerate(rows.tolist()) if not _add_one(parts, row)]
    first, second, mark = _places(_hash_rows(parts, rows), len(cells) - 1)
    todo = np.arange(len(rows))
    # Two keys of a batch may select one cell: the first gets it, the other one looks again.
    for bucket in (first, second):
        while len(todo):
            empty = cells[bucket[todo], :_WAYS] == 0
            way = empty.argmax(axis=1)
            fits = np.flatnonzero(empty[np.arange(len(todo)), way])
            if not len(fits):
                break
            _, lone = np.unique(bucket[todo[fits]] * _WAYS + way[fits], return_index=True)
            chosen = fits[lone]
            at = todo[chosen]
            cells[bucket[at], way[chosen]] = mark[at]
            cells[bucket[at], _WAYS + way[chosen]] = rows[at]
            todo = np.delete(todo, chosen)
    return todo.tolist()


def index_remove(parts: Parts, rows: I64) -> list[int]:
    """Removes rows, by the keys that they had when they were added. Returns the numbers of absent ones."""
    cells = parts[0]
    first, second, _ = _places(_hash_rows(parts, rows), len(cells) - 1)
    todo = np.arange(len(rows))
    for bucket in (first, second):
        here = cells[bucket[todo]]
        hit = (here[:, _WAYS:] == rows[todo, None].astype(np.uint32)) & (here[:, :_WAYS] != 0)
        way = hit.argmax(axis=1)
        ok = hit[np.arange(len(todo)), way]
        cells[bucket[todo[ok]], way[ok]] = 0
        todo = todo[~ok]
    return todo.tolist()


def _find_one(parts: Parts, words: U64, info: int) -> int:
    cells, all_words, infos, factors = parts
    mark, buckets = _place(words, info, factors, len(cells) - 1)
    key = words.tobytes()
    for bucket in buckets:
        marks = cells[bucket, :_WAYS].tolist()
        for way in (way for way in range(_WAYS) if marks[way] == mark):
            row = int(cells[bucket, _WAYS + way])
            if infos[row] == info and all_words[:, row].tobytes()[: len(key)] == key:
                return row
    return -1


def _add_one(parts: Parts, row: int) -> bool:
    cells, words, infos, factors = parts
    mark, buckets = _place(words[:, row].reshape(-1), int(infos[row]), factors, len(cells) - 1)
    for bucket in buckets:
        marks = cells[bucket, :_WAYS].tolist()
        if 0 in marks:
            cells[bucket, _WAYS + marks.index(0)] = row
            cells[bucket, marks.index(0)] = mark
            return True
    return False


def _place(words: U64, info: int, factors: U64, mask: int) -> tuple[int, tuple[int, int]]:
    h = _start(info & 0xFFFF, info >> 16, factors) + sum(map(mul, words.tolist(), factors.tolist()))
    h = (((h & MASK64) ^ ((h & MASK64) >> 32)) * MIX) & MASK64
    h ^= h >> 29
    mark, first = (h >> 32) or 1, h & mask
    return mark, (first, first ^ ((mark * _SPREAD) & mask))


def _start(namespace: int, size: int, factors: U64) -> int:
    return (namespace * int(factors[-2]) + size * int(factors[-1]) + 1) & MASK64


def _hash(starts: U64 | np.uint64, words: U64, factors: U64) -> U64:
    return mixed(words @ factors[: words.shape[1]] + starts)


def _hash_rows(parts: Parts, rows: I64) -> U64:
    _, words, infos, factors = parts
    info = infos[rows].astype(np.uint64)
    with np.errstate(over="ignore"):
        starts = (
            (info & np.uint64(0xFFFF)) * factors[-2] + (info >> np.uint64(16)) * factors[-1] + np.uint64(1)
        )
    return _hash(starts, _of_rows(words, rows), factors)


def _of_rows(words: U64, rows: I64) -> U64:
    """Returns the keys of rows, eight words each."""
    return np.hstack((words[0, rows], words[1, rows]))


def _places(h: U64, mask: int) -> tuple[I64, I64, U32]:
    mark = (h >> np.uint64(32)).astype(np.uint32)
    mark[mark == 0] = 1
    first = (h & np.uint64(mask)).astype(np.int64)
    second = first ^ ((mark.astype(np.int64) * _SPREAD) & mask)
    return first, second, mark
