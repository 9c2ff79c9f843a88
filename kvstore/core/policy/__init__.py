"""Eviction policies: which blocks of one pool of a tier should go first.

A policy sees row numbers only. It owns the order; placement owns the verdict (leases, leaf first, copies).
Every operation is a batch of distinct rows and costs amortised O(1) a row.
A new policy is one file here and one line in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import Rows
from kvstore.core.policy.lru import LRU


class Policy(Protocol):
    """The order in which blocks leave a tier. Rows are in chain order, parents before children."""

    def insert(self, rows: Rows) -> None:
        """Blocks that this tier now holds."""

    def touch(self, rows: Rows) -> None:
        """Blocks that were used. Rows that were never inserted are ignored."""

    def remove(self, rows: Rows) -> None:
        """Blocks that have left the tier, or are about to. Unknown rows are ignored."""

    def coldest(self, n: int) -> Rows:
        """Up to n rows to evict next, the first to go first. Changes nothing but internal bookkeeping."""

    def defer(self, rows: Rows) -> None:
        """These cannot go now (in use, or not a leaf): do not offer them again soon."""

    def __len__(self) -> int:
        """How many rows are known."""

    def ram_bytes(self) -> int:
        """Bytes of state, the shared column of stamps not counted."""


POLICIES: dict[str, Callable[[npt.NDArray[np.int64]], Policy]] = {"lru": LRU}
"""By name: from a column of zeros by row, which all policies of a tier share, to a fresh policy.

A row is known to one of them at a time; its stamp is 0 while it is known to none.
"""
