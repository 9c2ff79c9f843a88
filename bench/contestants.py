"""What the bench of peers asks of a contestant, and how a client's process times and checks it.

Runs in the environments of other stores too, so it needs numpy only.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness import KIB, expect

Blocks = npt.NDArray[np.uint8]
"""The blocks of a batch, (blocks, bytes)."""

KEYS = 32
"""Keys of one existence check."""

_STAMPED_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True)
class Shape:
    """Batches of one size. A sample gets or puts `calls` of the `sets` different batches."""

    block_bytes: int
    batch: int
    sets: int
    calls: int

    @property
    def nbytes(self) -> int:
        """Bytes of a sample."""
        return self.block_bytes * self.batch * self.calls


class Contestant(ABC):
    """A client of a store. Batches and their keys have numbers; `fill` stores those from 0 to `shape.sets`.

    Every page of a block is stamped with its place in its batch, and the batch. Keys and stamps are made, and
    stamps checked, outside of the measured time.
    """

    name = ""

    def __init__(self) -> None:
        self._shape = Shape(0, 0, 0, 0)
        self._blocks = self._out = np.zeros((0, 0), np.uint8)

    @property
    def pids(self) -> list[int]:
        """The processes that work for it."""
        return [os.getpid()]

    def fill(self, shape: Shape) -> None:
        """Forgets what is stored and stores the batches of a shape."""
        self._shape = shape
        random = np.random.default_rng(3)
        self._blocks = random.integers(0, 256, (shape.batch, shape.block_bytes), np.uint8)
        self._out = np.ones_like(self._blocks)
        self._clear()
        self.put(range(shape.sets))

    def get(self, numbers: Sequence[int]) -> float:
        """Gets batches. Returns the seconds. Raises NotDone if a block is missing or wrong."""
        seconds = 0.0
        for number in numbers:
            keys = self._keys(number)
            self._out[:, ::_STAMPED_BYTES] = 0
            start = time.perf_counter()
            self._get(number, keys)
            seconds += time.perf_counter() - start
            wrong = np.flatnonzero(_stamps(self._out) != self._wanted(number))
            expect(wrong[:1].tolist(), [], f"wrong pages of {self.name}")
        return seconds

    def put(self, numbers: Sequence[int]) -> float:
        """Puts new batches. Returns the seconds. Raises NotDone if a block is refused."""
        seconds = 0.0
        for number in numbers:
            keys = self._keys(number)
            _stamps(self._blocks)[:] = self._wanted(number)
            start = time.perf_counter()
            self._put(number, keys)
            seconds += time.perf_counter() - start
        return seconds

    def tidy(self, numbers: Sequence[int]) -> None:
        """Removes new batches; by default, those that they have replaced are put again."""
        self.put(range(self._shape.sets))

    def exists(self) -> float:
        """Asks for the first keys of batch 0. Returns the seconds. Raises NotDone if one is missing."""
        keys = self._keys(0)[:KEYS]
        start = time.perf_counter()
        found = self._count(keys)
        seconds = time.perf_counter() - start
        expect(found, KEYS, f"keys found by {self.name}")
        return seconds

    def _wanted(self, number: int) -> npt.NDArray[np.uint64]:
        """Returns the stamps of a batch, one for each block, as a column."""
        return np.arange(self._shape.batch, dtype=np.uint64)[:, None] + np.uint64(1 + (number << 32))

    def _keys(self, number: int) -> list[Any]:
        """Returns the keys of a batch: text by default."""
        return [f"{self._shape.block_bytes}-{number}-{i}" for i in range(self._shape.batch)]

    @abstractmethod
    def _clear(self) -> None:
        """Forgets what is stored. `self._shape` and the arrays are those of what comes."""

    @abstractmethod
    def _get(self, number: int, keys: list[Any]) -> None:
        """Fills `self._out`."""

    @abstractmethod
    def _put(self, number: int, keys: list[Any]) -> None:
        """Stores `self._blocks`. Raises NotDone if it is refused."""

    def _count(self, keys: list[Any]) -> int:
        """Returns how many of the keys are stored. Contestants without keys cannot tell: 0."""
        return 0


def _stamps(blocks: Blocks) -> npt.NDArray[np.uint64]:
    """Returns a view of the first eight bytes of each page, (blocks, pages)."""
    return blocks.view(np.uint64)[:, :: _STAMPED_BYTES // 8]
