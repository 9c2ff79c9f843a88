"""Numpy columns of zeros, allocated page by page on the first write."""

from __future__ import annotations

import mmap
from typing import TypeVar

import numpy as np
import numpy.ma  # np.unique imports it on its first call, which takes 10 ms: too long for an event
import numpy.typing as npt

_T = TypeVar("_T", bound=np.generic)


def distinct(numbers: npt.NDArray[np.integer]) -> list[int]:
    """Returns the different numbers, ascending: mostly one, which a comparison of bytes finds much faster."""
    raw = numbers.tobytes()
    if raw and raw == raw[: numbers.itemsize] * len(numbers):
        return [int(numbers[0])]
    several: list[int] = np.unique(numbers).tolist()
    return several


def zeros(n: int, kind: type[_T]) -> npt.NDArray[_T]:
    """Returns n zeros. Not in huge pages: clearing one takes milliseconds, in the middle of an event."""
    size = n * np.dtype(kind).itemsize
    # Private, because a read of shared memory would allocate the page too.
    pages = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, kind, n)
