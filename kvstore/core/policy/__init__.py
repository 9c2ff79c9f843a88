"""Eviction policies: which blocks of one tier and slot size should go first.

A policy sees row numbers only. It owns the order; placement owns the verdict (leases, leaf first, copies).
Every operation is a batch of distinct rows and costs amortised O(1) a row.
A new policy is one file here and one line in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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

    def ram_bytes(self, rows: int) -> int:
        """Bytes of state when row numbers below `rows` were in use."""


POLICIES: dict[str, Callable[[int], Policy]] = {"lru": LRU}
"""By name: from the largest number of rows to a fresh policy."""
