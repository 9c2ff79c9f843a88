"""The ghosts of one policy: blocks that its pool has evicted lately, in order of eviction.

The value of a ghost is the tier's count of ghosts at its eviction, so that a full table drops the oldest
ghosts of all pools. Marks, which pair this count with the length of one list now and then, tell how many
blocks of the list were evicted later.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.base import PolicyContext
from kvstore.core.reuse.ghosts import fingerprints

_MARKS = 64


class GhostQueue:
    """Two lists of evicted blocks. `gone` counts the blocks that were added to each."""

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self.gone = [0, 0]
        self._marks: tuple[deque[tuple[int, int]], ...] = (deque(maxlen=_MARKS), deque(maxlen=_MARKS))
        self._step = 1

    def note(self, which: int, rows: Rows) -> None:
        """Adds rows, in order of eviction, to a list (0 or 1)."""
        n = len(rows)
        if not n:
            return
        ghosts, marks = self._context.ghosts(), self._marks[which]
        if not marks or self.gone[which] - marks[-1][0] >= self._step:
            marks.append((self.gone[which], ghosts.puts))
        values = np.arange(ghosts.puts, ghosts.puts + n, dtype=np.uint64)
        names = fingerprints(self._context.blocks, rows, self._context.seed)
        ghosts.put(names, values << np.uint64(1) | np.uint64(which))
        self.gone[which] += n

    def recall(self, rows: Rows, last: tuple[int, int]) -> npt.NDArray[np.int64]:
        """Removes the ghosts of rows. Returns the list that each was in; -1: none.

        Only the latest `last` ghosts of each list count, to a few per cent.
        """
        self._step = max(max(last) * 2 // _MARKS, 1)
        if not any(self.gone):
            return np.full(len(rows), -1, np.int64)
        values = self._context.ghosts().take(fingerprints(self._context.blocks, rows, self._context.seed))
        which = values & 1
        first = np.array([self._since(0, last[0]), self._since(1, last[1])])
        which[(values < 0) | (values >> 1 < first[which])] = -1
        return which

    def _since(self, which: int, n: int) -> int:
        """Returns the tier's count at the eviction of the first of the last n ghosts of a list."""
        first, later = self.gone[which] - n, self._context.ghosts().puts
        if n > 0:
            for gone, puts in reversed(self._marks[which]):
                if gone <= first:
                    return min(puts + first - gone, later)
                later = puts
        return later
