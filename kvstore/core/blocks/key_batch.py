"""The keys of one request: one run of bytes, cut into equal keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]


class Keys:
    """`raw` holds n keys of `size` bytes each, one after another. Immutable."""

    __slots__ = ("_words", "n", "raw", "size")

    def __init__(self, raw: bytes | memoryview, size: int) -> None:
        self.raw = raw
        self.size = size
        self.n = len(raw) // size
        self._words: Words | None = None

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> bytes:
        return bytes(self.raw[i * self.size : (i + 1) * self.size])

    @property
    def distinct(self) -> bool:
        """Whether no key occurs twice."""
        raw, size = self.raw, self.size
        first = np.sort(self.words[:, 0])
        # Hashes seldom share their first word.
        if (first[1:] != first[:-1]).all():
            return True
        return len({raw[at : at + size] for at in range(0, len(raw), size)}) == self.n

    def take(self, start: int, stop: int) -> Keys:
        """Returns the keys from `start` up to `stop`."""
        return Keys(self.raw[start * self.size : stop * self.size], self.size)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """(n, size) bytes, read-only."""
        return np.frombuffer(self.raw, np.uint8).reshape(self.n, self.size)

    @property
    def words(self) -> Words:
        """(n, ceil(size / 8)) little-endian words, the last one padded with zeros."""
        if self._words is None:
            width = -(-self.size // 8)
            if self.size % 8 == 0:
                self._words = np.frombuffer(self.raw, "<u8").reshape(self.n, width)
            else:
                padded = np.zeros((self.n, width * 8), np.uint8)
                padded[:, : self.size] = self.array
                self._words = padded.view("<u8")
        return self._words
