"""Least recently used, tail first: of blocks used together, the end of the chain goes before its start.

A use of a child is also a use of its parents, so this order is leaf first (measured equal to evicting
radix-tree leaves).
"""

from __future__ import annotations

import math

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.base import Policy, PolicyContext
from kvstore.core.policy.queue import Queue


class LRU(Policy):
    """One queue, least recently used first."""

    follows_children = True
    weighs = False

    def __init__(self, context: PolicyContext) -> None:
        self._segments = context.segments
        self._queue = Queue(context.segments)

    def __len__(self) -> int:
        return len(self._queue)

    def insert(self, rows: Rows, now: float) -> None:
        self._queue.append(rows[::-1])

    def touch(self, rows: Rows, now: float) -> None:
        self._queue.append(self._segments.known(rows)[::-1])

    def remove(self, rows: Rows) -> None:
        self._segments.forget(rows)

    def defer(self, rows: Rows, parents: bool = False) -> None:
        self._queue.append(self._segments.known(rows))

    def refresh(self, rows: Rows) -> None:
        self._queue.append(self._segments.known(rows)[::-1])

    def cool(self, rows: Rows) -> None:
        self._queue.prepend(self._segments.known(rows)[::-1])

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        return self._queue.head(n)

    def ram_bytes(self) -> int:
        return self._queue.ram_bytes()
