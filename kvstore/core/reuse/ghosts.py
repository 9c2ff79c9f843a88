"""Ghosts: a number for each of the blocks that have left, in a table of fixed size that drops the lowest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.native import ghosts_find, ghosts_put, splitmix

Fingerprints = npt.NDArray[np.uint64]

_WAYS = 8
_MIX = np.array(splitmix(1, 16), np.uint64) | np.uint64(1)


class Ghosts:
    """About `entries` values of 41 bits by fingerprint. One answer in 10**5 belongs to another block.

    The high half of a fingerprint chooses a bucket of 8 cells, the low bits are the tag above the value in a
    cell. A full bucket drops its lowest value, so later values should be higher. A free cell counts as the
    value 0. `puts` counts the values that were put.
    """

    def __init__(self, entries: int) -> None:
        self.puts = 0
        self._table = zeros(max(-(-entries // _WAYS), 1) * _WAYS, np.uint64)

    def put(self, fingerprints: Fingerprints, values: npt.NDArray[np.uint64]) -> None:
        """Sets a value below 2**41 for each fingerprint."""
        self.puts += len(fingerprints)
        ghosts_put(self._table, fingerprints, values)

    def take(self, fingerprints: Fingerprints) -> npt.NDArray[np.int64]:
        """Removes fingerprints. Returns their values as `peek` does."""
        return self._find(fingerprints, remove=True)

    def peek(self, fingerprints: Fingerprints) -> npt.NDArray[np.int64]:
        """Returns the value of each fingerprint, -1 if there is none."""
        return self._find(fingerprints, remove=False)

    def dump(self) -> tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Returns (number of words, positions of the words that are not 0, these words)."""
        at = np.flatnonzero(self._table)
        return len(self._table), at.astype(np.uint32), self._table[at]

    def load(self, room: int, at: npt.NDArray[np.uint32], words: npt.NDArray[np.uint64]) -> bool:
        """Loads what a table of this size dumped. Returns False for a table of another size."""
        if room != self._table.size or len(at) != len(words) or (len(at) and int(at.max()) >= room):
            return False
        self._table[at] = words
        return True

    def ram_bytes(self) -> int:
        """Returns the bytes of the table."""
        return self._table.nbytes

    def _find(self, fingerprints: Fingerprints, remove: bool) -> npt.NDArray[np.int64]:
        values = np.empty(len(fingerprints), np.int64)
        ghosts_find(self._table, fingerprints, values, remove)
        return values


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
