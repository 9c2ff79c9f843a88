"""S3-FIFO (Yang et al., 2023): blocks without a use soon after their storing leave through a small queue.

Blocks that are used in the small queue move to the main queue, where each use, up to three, adds a round. A
block that is stored again soon after it left the small queue goes to the main queue directly.
"""

from __future__ import annotations

import numpy as np

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.base import PolicyContext
from kvstore.core.policy.ghost_queue import GhostQueue
from kvstore.core.policy.queue import Queue
from kvstore.core.policy.ranked import ROUNDS, Ranked, unused

_SMALL = 10
"""The small queue has one row in 10."""

_MOST_USES = 3


class S3FIFO(Ranked):
    """Two queues. A touch only counts the use; it moves no row."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._small, self._main = Queue(context.segments), Queue(context.segments)
        self._uses = context.segments.column("uses")
        self._ghosts = GhostQueue(context)

    def _queues(self) -> tuple[Queue, Queue]:
        return self._small, self._main

    def _enter(self, rows: Rows) -> None:
        self._uses[rows] = 0
        back = self._ghosts.recall(rows, (len(self), 0)) >= 0
        self._small.append(rows[~back][::-1])
        self._main.append(rows[back][::-1])

    def touch(self, rows: Rows, now: float) -> None:
        rows = self._segments.known(rows)
        self._uses[rows] = np.minimum(self._uses[rows] + 1, _MOST_USES)
        if len(self._cool):
            self._small.append(rows[self._of(self._cool, rows)][::-1])

    def remove(self, rows: Rows) -> None:
        self._ghosts.note(0, rows[self._of(self._small, rows)])
        super().remove(rows)

    def _forward(self, rows: Rows) -> None:
        main = self._of(self._main, rows)
        self._main.append(rows[main])
        self._small.append(rows[~main])

    def _rank(self, n: int) -> Rows:
        tenth = -(-len(self) // _SMALL)
        if self._stuck:
            first = self._from_small(n // 2, len(self._small))
        else:
            first = self._from_small(n, len(self._small) - tenth + 1)
        out = np.concatenate((first, self._from_main(n - len(first))))
        return out if len(out) else self._small.head(n)

    def _from_small(self, n: int, at_most: int) -> Rows:
        """Returns up to n rows. At most `at_most` rows are returned or moved to the main queue."""
        cold = np.empty(0, np.int64)
        for _ in range(ROUNDS):
            cold, used = unused(self._small, self._uses, n, at_most)
            if not len(used):
                break
            self._uses[used] = 0
            self._main.append(used)
            at_most -= len(used)
        return cold

    def _from_main(self, n: int) -> Rows:
        """Returns up to n rows, at least one if there is any. Rows with uses left go round once more."""
        for _ in range(ROUNDS):
            cold, used = unused(self._main, self._uses, n, len(self._main))
            if not len(used):
                return cold
            self._uses[used] -= 1
            self._main.append(used)
        return cold if len(cold) else self._main.head(n)
