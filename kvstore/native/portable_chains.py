"""The twin of `chains.c`: from a row of the core's table of blocks to the root of its chain, by numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_ADJACENT = 256
_SHORT_RUN = 32

Parents = npt.NDArray[np.int32]
"""The row of each row's parent; -1: a root."""


def chain_above(parent: Parents, row: int, out: npt.NDArray[np.int64]) -> int:
    """Writes the chain that ends with `row` (-1: none), from `row` upwards, as far as there is room.

    Returns how many rows it has written. IndexError for a row that is not in the table.
    """
    done = 0
    for first, last in _runs(parent, row):
        some = np.arange(last, first - 1, -1)[: len(out) - done]
        out[done : done + len(some)] = some
        done += len(some)
        if done == len(out):
            break
    return done


def chain_root(parent: Parents, row: int, budget: int) -> tuple[int, int]:
    """Returns the root of the chain that ends with `row`, and the rest of the budget.

    Each run of consecutive rows costs 1, and so do 256 rows. The root is -1 if the budget
    does not suffice, and nothing is left of it. IndexError for a row that is not in the table.
    """
    rows, runs = 0, 1
    below = row + 1
    for first, last in _runs(parent, row):
        runs += last != below - 1
        rows, below = rows + last + 1 - first, first
        left = budget - runs - rows // _ADJACENT
        if left < 0:
            return -1, 0
        if parent[first] < 0:
            return first, left
    return -1, budget


def _runs(parent: Parents, row: int) -> Iterator[tuple[int, int]]:
    """Yields the chain that ends with `row`, from `row` upwards, as (first, last) of consecutive rows.

    Most chains were stored by one request and lie in ascending rows. Their runs are long.
    """
    look = _ADJACENT
    while row >= 0:
        if row >= len(parent):
            raise IndexError(f"row {row} of {len(parent)}")
        start, least = row, max(0, row - _SHORT_RUN)
        # A loop ends a short run sooner than numpy begins.
        while start > least and parent[start] == start - 1:
            start -= 1
        if start == least > 0:
            first = max(0, start - look)
            breaks = parent[start:first:-1] != np.arange(start - 1, first - 1, -1)
            n = int(breaks.argmax())
            broken = bool(breaks[n])
            start = start - n if broken else first
            look = _ADJACENT if broken else 2 * look
        yield start, row
        row = int(parent[start])
