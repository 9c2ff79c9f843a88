"""SIEVE (Zhang et al., 2024): blocks in the order of their storing, and a hand that passes over them.

A block that was used since the hand last passed keeps its place. Other blocks are evicted. New blocks are
added where the hand arrives last.
"""

from __future__ import annotations

import numpy as np

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.base import PolicyContext
from kvstore.core.policy.queue import Queue
from kvstore.core.policy.ranked import ROUNDS, Ranked, unused


class SIEVE(Ranked):
    """The hand is between two queues: the blocks that it has passed in this round, and the blocks ahead."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._ahead, self._passed = Queue(context.segments), Queue(context.segments)
        self._uses = context.segments.column("uses")

    def _queues(self) -> tuple[Queue, Queue]:
        return self._ahead, self._passed

    def _enter(self, rows: Rows) -> None:
        self._uses[rows] = 0
        self._forward(rows[::-1])

    def touch(self, rows: Rows, now: float) -> None:
        rows = self._segments.known(rows)
        self._uses[rows] = 1
        if len(self._cool):
            self._forward(rows[self._of(self._cool, rows)][::-1])

    def defer(self, rows: Rows, parents: bool = False) -> None:
        """The hand passes over these rows."""
        self._passed.append(self._segments.known(rows))

    def _turn(self) -> None:
        """At the end of a round, moves the hand back to the first block."""
        if not len(self._ahead):
            self._ahead, self._passed = self._passed, self._ahead

    def _forward(self, rows: Rows) -> None:
        self._turn()
        self._ahead.append(rows)

    def _rank(self, n: int) -> Rows:
        cold = np.empty(0, np.int64)
        for _ in range(ROUNDS):
            self._turn()
            cold, used = unused(self._ahead, self._uses, n, len(self._ahead))
            if not len(used):
                break
            self._uses[used] = 0
            self._passed.append(used)
        if len(cold):
            return cold
        return self._ahead.head(n) if len(self._ahead) else self._passed.head(n)
