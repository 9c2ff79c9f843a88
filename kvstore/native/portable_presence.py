"""The writer of presence tables, by numpy: for machines without the C extension.

Layout: `kvstore.core.residency.presence`. Each change is one aligned store of numpy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.native.mixing import MASK64, mixed, splitmix

U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]

_WAYS = 8
_KEY_WORDS = 8
_PREFERRED = 5  # cells of its first bucket that a key takes before it looks at the second
_FLAGS = np.uint64(0x1F)
_LEAST_MARK = np.uint64(0x20)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def presence_set(
    table: U64, words: U64, size: int, flags: U64, there: npt.NDArray[np.bool_], places: U64
) -> tuple[int, bool]:
    """Adds keys of `size` bytes, changes what is said of them, or removes those that are not `there`.

    `words`: (keys, 8), padded with zeros. Returns how many keys the table has gained, and whether there was
    room for all.
    """
    cells, beside = table[_WAYS:].reshape(2, -1, _WAYS)
    mark, first, second = presence_hash(words, size, int(table[1]), len(cells))
    value = np.where(there, mark | flags, np.uint64(0))
    todo, gained = np.arange(len(mark)), 0
    for bucket in (first, second):
        hit = (cells[bucket[todo]] & ~_FLAGS) == mark[todo, None]
        way = hit.argmax(axis=1)
        found = hit[np.arange(len(todo)), way]
        known = todo[found]
        beside[bucket[known], way[found]] = places[known]
        cells[bucket[known], way[found]] = value[known]
        gained -= len(known) - int(there[known].sum())
        todo = todo[~found]
    todo = todo[there[todo]]
    value, places, first, second = value[todo], places[todo], first[todo], second[todo]
    while len(value):
        used, others = cells[first] != 0, cells[second] != 0
        # Most keys in their first bucket: readers then load one line for each.
        filled = used.sum(axis=1)
        emptier = (filled >= _PREFERRED) & (others.sum(axis=1) < filled)
        bucket, used = np.where(emptier, second, first), np.where(emptier[:, None], others, used)
        if used.all(axis=1).any():
            return gained, False
        way = used.argmin(axis=1)
        # Two keys of a batch may select one cell: the first gets it.
        _, chosen = np.unique(bucket * _WAYS + way, return_index=True)
        beside[bucket[chosen], way[chosen]] = places[chosen]
        cells[bucket[chosen], way[chosen]] = value[chosen]
        gained += len(chosen)
        left = np.delete(np.arange(len(value)), chosen)
        value, places, first, second = value[left], places[left], first[left], second[left]
    return gained, True


def presence_hash(words: U64, size: int, seed: int, buckets: int) -> tuple[U64, I64, I64]:
    """Returns the mark and the two buckets of each key of `size` bytes."""
    words = words[:, : -(-size // 8)]
    factors, size_factor = _factors(seed)
    sums = _folded(words) @ factors[: words.shape[1]]
    sums += np.uint64(size * size_factor & MASK64)
    hashes = mixed(sums)
    mark = hashes & ~_FLAGS
    mark[mark == 0] = _LEAST_MARK
    places = mixed(hashes)
    first = ((places >> _HALF) * np.uint64(buckets)) >> _HALF
    second = ((places & _LOW) * np.uint64(buckets)) >> _HALF
    return mark, first.astype(np.int64), second.astype(np.int64)


@lru_cache(maxsize=64)
def _factors(seed: int) -> tuple[U64, int]:
    """Returns the factors of the eight words of a key, and that of its length."""
    *words, size = (f | 1 for f in splitmix(seed, _KEY_WORDS + 1))
    return np.array(words, np.uint64), size


def _folded(words: U64) -> U64:
    return words ^ (words >> _HALF)
