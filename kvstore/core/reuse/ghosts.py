"""Ghosts: a number for each of the blocks that have left, in a table of fixed size that drops the lowest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.native import splitmix

Fingerprints = npt.NDArray[np.uint64]

_WAYS = 8
_VALUE_BITS = 41
_VALUE = np.uint64((1 << _VALUE_BITS) - 1)
_MIX = np.array(splitmix(1, 16), np.uint64) | np.uint64(1)


class Ghosts:
    """About `entries` values of 41 bits by fingerprint. One answer in 10**5 belongs to another block.

    A full bucket drops its lowest value, so later values should be higher. A free cell counts as the value 0.
    `puts` counts the values that were put.
    """

    def __init__(self, entries: int) -> None:
        self.puts = 0
        self._buckets = max(-(-entries // _WAYS), 1)
        self._table = zeros(self._buckets * _WAYS, np.uint64).reshape(-1, _WAYS)

    def put(self, fingerprints: Fingerprints, values: npt.NDArray[np.uint64]) -> None:
        """Sets a value below 2**41 for each fingerprint."""
        at, tags = self._split(fingerprints)
        words = tags | values
        self.puts += len(at)
        while len(at):
            bucket = self._table.take(at, axis=0)
            same = (bucket ^ tags[:, None]) <= _VALUE
            way = np.where(same.any(axis=1), same.argmax(axis=1), (bucket & _VALUE).argmin(axis=1))
            self._table[at, way] = words
            # Only the last of several fingerprints has got the same cell.
            lost = self._table[at, way] != words
            at, tags, words = at[lost], tags[lost], words[lost]

    def take(self, fingerprints: Fingerprints) -> npt.NDArray[np.int64]:
        """Removes fingerprints. Returns their values as `peek` does."""
        at, way, values = self._find(fingerprints)
        found = values >= 0
        self._table[at[found], way[found]] = 0
        return values

    def peek(self, fingerprints: Fingerprints) -> npt.NDArray[np.int64]:
        """Returns the value of each fingerprint, -1 if there is none."""
        return self._find(fingerprints)[2]

    def dump(self) -> tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Returns (number of words, positions of the words that are not 0, these words)."""
        words = self._table.reshape(-1)
        at = np.flatnonzero(words)
        return len(words), at.astype(np.uint32), words[at]

    def load(self, room: int, at: npt.NDArray[np.uint32], words: npt.NDArray[np.uint64]) -> bool:
        """Loads what a table of this size dumped. Returns False for a table of another size."""
        if room != self._table.size or len(at) != len(words) or (len(at) and int(at.max()) >= room):
            return False
        self._table.reshape(-1)[at] = words
        return True

    def ram_bytes(self) -> int:
        """Returns the bytes of the table."""
        return self._table.nbytes

    def _split(self, fingerprints: Fingerprints) -> tuple[Rows, Fingerprints]:
        """Returns buckets, and tags in the bits above a value. A tag is never 0."""
        at = (fingerprints >> np.uint64(32)) * np.uint64(self._buckets) >> np.uint64(32)
        tags = fingerprints << np.uint64(_VALUE_BITS)
        return at.view(np.int64), np.maximum(tags, _VALUE + np.uint64(1))

    def _find(self, fingerprints: Fingerprints) -> tuple[Rows, Rows, npt.NDArray[np.int64]]:
        at, tags = self._split(fingerprints)
        bucket = self._table.take(at, axis=0)
        way = ((bucket ^ tags[:, None]) <= _VALUE).argmax(axis=1)
        values = bucket[np.arange(len(at)), way] ^ tags
        return at, way, np.where(values <= _VALUE, values.view(np.int64), -1)


def fingerprints(blocks: Blocks, rows: Rows, seed: int) -> Fingerprints:
    """Returns a 64-bit hash of each row's key and namespace. `seed` selects the hash function."""
    return fingerprints_of(blocks.some_words(rows), blocks.namespace[rows].astype(np.uint64), seed)


def fingerprints_of(
    words: npt.NDArray[np.uint64], namespaces: npt.NDArray[np.uint64], seed: int
) -> Fingerprints:
    """Returns the same hash for keys as rows of words. Trailing words of 0 may be left out."""
    mixed: Fingerprints = words @ _MIX[: words.shape[1]]
    mixed ^= namespaces * _MIX[14] + np.uint64(seed % (1 << 64))
    mixed ^= mixed >> np.uint64(31)
    mixed *= _MIX[15]
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX[13]
    mixed ^= mixed >> np.uint64(32)
    return mixed
