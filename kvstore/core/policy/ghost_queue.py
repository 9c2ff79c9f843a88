"""Whom a pool has let go of lately: the ghosts of one policy, in the order in which they left.

A ghost's value is the tier's count of ghosts when it left, so that a full table forgets the oldest of all
pools. How many of one list left since is found from marks: pairs of both counts, taken now and then.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.ghosts import fingerprints
from kvstore.core.policy.pool_view import PolicyContext

_MARKS = 64


class GhostQueue:
    """Two lists of blocks that left. `gone` is how many have been noted in each so far."""

    def __init__(self, shelf: PolicyContext) -> None:
        self._shelf = shelf
        self.gone = [0, 0]
        self._marks: tuple[deque[tuple[int, int]], ...] = (deque(maxlen=_MARKS), deque(maxlen=_MARKS))
        self._step = 1

    def note(self, which: int, rows: Rows) -> None:
        """These leave, in this order, and are remembered in a list (0 or 1)."""
        n = len(rows)
        if not n:
            return
        ghosts, marks = self._shelf.ghosts(), self._marks[which]
        if not marks or self.gone[which] - marks[-1][0] >= self._step:
            marks.append((self.gone[which], ghosts.puts))
        values = np.arange(ghosts.puts, ghosts.puts + n, dtype=np.uint64)
        names = fingerprints(self._shelf.blocks, rows, self._shelf.seed)
        ghosts.put(names, values << np.uint64(1) | np.uint64(which))
        self.gone[which] += n

    def recall(self, rows: Rows, last: tuple[int, int]) -> npt.NDArray[np.int64]:
        """Which list each row's block is in, -1 for none, and strikes it out.

        Only as many as `last` says count of each list, those that left last: to a few per cent.
        """
        self._step = max(max(last) * 2 // _MARKS, 1)
        if not any(self.gone):
            return np.full(len(rows), -1, np.int64)
        values = self._shelf.ghosts().take(fingerprints(self._shelf.blocks, rows, self._shelf.seed))
        which = values & 1
        first = np.array([self._since(0, last[0]), self._since(1, last[1])])
        which[(values < 0) | (values >> 1 < first[which])] = -1
        return which

    def _since(self, which: int, n: int) -> int:
        """The tier's count when the first of the last n of a list left."""
        first, later = self.gone[which] - n, self._shelf.ghosts().puts
        if n > 0:
            for gone, puts in reversed(self._marks[which]):
                if gone <= first:
                    return min(puts + first - gone, later)
                later = puts
        return later
