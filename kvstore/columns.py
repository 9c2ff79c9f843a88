"""Columns of zeros that take memory page by page, as they are written."""

from __future__ import annotations

import mmap
from typing import TypeVar

import numpy as np
import numpy.ma  # np.unique loads it when first called, which takes 10 ms: not within an event
import numpy.typing as npt

_T = TypeVar("_T", bound=np.generic)


def zeros(n: int, kind: type[_T]) -> npt.NDArray[_T]:
    """n zeros. Never in huge pages: to clear one takes up to milliseconds, in the middle of an event."""
    size = n * np.dtype(kind).itemsize
    # Private: of shared memory a page would be taken by reading it, too.
    pages = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, kind, n)
