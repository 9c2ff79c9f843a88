"""Ghosts: a number each about blocks that have left, in a table of fixed size that forgets the oldest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.blocks.index import splitmix

Fingerprints = npt.NDArray[np.uint64]

_WAYS = 8
_VALUE_BITS = 41
_VALUE = np.uint64((1 << _VALUE_BITS) - 1)
_MIX = np.array(splitmix(1, 16), np.uint64) | np.uint64(1)


class Ghosts:
    """Room for about `entries` values of 41 bits by fingerprint. One in 10**5 answers is about another block.

    A bucket that is full forgets its lowest value: let those that matter longest be the highest. Room that is
    free counts as a value of 0. `puts` is how many values have been put.
    """

    def __init__(self, entries: int) -> None:
        self.puts = 0
        self._buckets = max(-(-entries // _WAYS), 1)
        self._table = zeros(self._buckets * _WAYS, np.uint64).reshape(-1, _WAYS)

    def put(self, fingerprints: Fingerprints, values: npt.NDArray[np.uint64]) -> None:
        """Notes a value below 2**41 for each fingerprint, instead of what was noted for it."""
        at, tags = self._split(fingerprints)
        words = tags | values
        self.puts += len(at)
        while len(at):
            bucket = self._table.take(at, axis=0)
            same = (bucket ^ tags[:, None]) <= _VALUE
            way = np.where(same.any(axis=1), same.argmax(axis=1), (bucket & _VALUE).argmin(axis=1))
            self._table[at, way] = words
            # Of those that took the same place only the last got it.
            lost = self._table[at, way] != words
            at, tags, words = at[lost], tags[lost], words[lost]

    def take(self, fingerprints: Fingerprints) -> npt.NDArray[np.int64]:
        """As `peek`, and forgets them."""
        at, way, values = self._find(fingerprints)
        found = values >= 0
        self._table[at[found], way[found]] = 0
        return values

    def peek(self, fingerprints: Fingerprints) -> npt.NDArray[np.int64]:
        """The value noted for each fingerprint, -1 if there is none."""
        return self._find(fingerprints)[2]

    def dump(self) -> tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """(words in the table, where those are that are not 0, these)."""
        words = self._table.reshape(-1)
        at = np.flatnonzero(words)
        return len(words), at.astype(np.uint32), words[at]

    def load(self, room: int, at: npt.NDArray[np.uint32], words: npt.NDArray[np.uint64]) -> bool:
        """Takes in what a table of this size dumped; False, and nothing, if it was of another one."""
        if room != self._table.size or len(at) != len(words) or (len(at) and int(at.max()) >= room):
            return False
        self._table.reshape(-1)[at] = words
        return True

    def ram_bytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    def _split(self, fingerprints: Fingerprints) -> tuple[Rows, Fingerprints]:
        """Which bucket, and a tag that is never 0, in the bits above a value."""
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
    """64 bits of each row's key and namespace, other ones for another seed."""
    return fingerprints_of(blocks.words.take(rows, axis=0), blocks.namespace[rows].astype(np.uint64), seed)


def fingerprints_of(
    words: npt.NDArray[np.uint64], namespaces: npt.NDArray[np.uint64], seed: int
) -> Fingerprints:
    """The same for keys in words, as rows have them or without words of 0 at the end."""
    mixed: Fingerprints = words @ _MIX[: words.shape[1]]
    mixed ^= namespaces * _MIX[14] + np.uint64(seed % (1 << 64))
    mixed ^= mixed >> np.uint64(31)
    mixed *= _MIX[15]
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX[13]
    mixed ^= mixed >> np.uint64(32)
    return mixed
