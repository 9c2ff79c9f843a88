"""The table of a batch: which bytes of which source go to which bytes of which target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

PIECE = np.dtype(
    [
        ("source", "u4"), ("target", "u4"), ("source_offset", "u8"), ("target_offset", "u8"),
        ("length", "u8"), ("seed", "u8"), ("sum", "u8"), ("more", "u8"),
    ]
)  # fmt: skip
"""One piece: `length` bytes from `source_offset` of source number `source` to `target_offset` of target
number `target`. A block's pieces follow each other, and all but its last have `more` = 1. `seed` is read from
the first piece of a block, `sum` is written to its last one."""


def pieces(n: int) -> NDArray[Any]:
    """Returns a table of n empty pieces, each a block of its own."""
    return np.zeros(n, PIECE)


def whole(lengths: ArrayLike, seeds: ArrayLike = 0) -> NDArray[Any]:
    """Returns a table that copies source i, as one block, to target i."""
    length = np.asarray(lengths, np.uint64)
    table = pieces(len(length))
    table["source"] = table["target"] = np.arange(len(length))
    table["length"], table["seed"] = length, seeds
    return table
