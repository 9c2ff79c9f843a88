"""ARC (Megiddo and Modha, 2003): one LRU queue for blocks used once, one for blocks used again.

The target length of the first queue follows the ghosts: a block that is stored again soon after its eviction
votes for the queue that it was in. Differences from the paper: the capacity is the number of rows known now,
because the tier owns the capacity; room is made before the new blocks are known; a batch moves the target by
one step size; and a ghost that was recalled keeps its place in the ghost list until the list has aged.
"""

from __future__ import annotations

import numpy as np

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.base import PolicyContext
from kvstore.core.policy.ghost_queue import GhostQueue
from kvstore.core.policy.queue import Queue
from kvstore.core.policy.ranked import Ranked

ONCE, OFTEN = 0, 1


class ARC(Ranked):
    """The paper's T1 and T2 are `_once` and `_often`, p is `_target`. `_ghosts` holds B1 and B2."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._once, self._often = Queue(context.segments), Queue(context.segments)
        self._ghosts = GhostQueue(context)
        self._target = 0.0

    def _queues(self) -> tuple[Queue, Queue]:
        return self._once, self._often

    def _enter(self, rows: Rows) -> None:
        capacity = len(self)
        once = min(self._ghosts.gone[ONCE], max(capacity - len(self._once), 0))
        often = min(self._ghosts.gone[OFTEN], capacity - once)
        came_from = self._ghosts.recall(rows, (once, often))
        n_once, n_often = int(np.count_nonzero(came_from == ONCE)), int(np.count_nonzero(came_from == OFTEN))
        if n_once:
            self._target = min(self._target + n_once * max(1.0, often / once), capacity)
        if n_often:
            self._target = max(self._target - n_often * max(1.0, once / often), 0.0)
        self._once.append(rows[came_from < 0][::-1])
        self._often.append(rows[came_from >= 0][::-1])

    def touch(self, rows: Rows, now: float) -> None:
        self._often.append(self._segments.known(rows)[::-1])

    def remove(self, rows: Rows) -> None:
        self._ghosts.note(ONCE, rows[self._of(self._once, rows)])
        self._ghosts.note(OFTEN, rows[self._of(self._often, rows)])
        super().remove(rows)

    def _forward(self, rows: Rows) -> None:
        often = self._of(self._often, rows)
        self._often.append(rows[often])
        self._once.append(rows[~often])

    def _rank(self, n: int) -> Rows:
        beyond = max(len(self._once) - int(self._target), 0)
        first = self._once.head(n // 2 if self._stuck else min(n, beyond))
        others = self._often.head(n - len(first))
        rest = self._once.head(n - len(others))[len(first) :]
        return np.concatenate((first, others, rest))
