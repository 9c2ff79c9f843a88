"""Whom a pool has let go of lately: the ghosts of one policy, in the order in which they left."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import Rows
from kvstore.core.ghosts import fingerprints
from kvstore.core.policy.shelf import Shelf


class Past:
    """Two lists of blocks that left. `gone` is how many have been noted in each so far."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.gone = [0, 0]

    def note(self, which: int, rows: Rows) -> None:
        """These leave, in this order, and are remembered in a list (0 or 1)."""
        n = len(rows)
        if n:
            values = np.arange(self.gone[which], self.gone[which] + n, dtype=np.uint64)
            names = fingerprints(self._shelf.blocks, rows, self._shelf.seed)
            self._shelf.ghosts().put(names, values << np.uint64(1) | np.uint64(which))
            self.gone[which] += n

    def recall(self, rows: Rows, last: tuple[int, int]) -> npt.NDArray[np.int64]:
        """Which list each row's block is in, -1 for none, and strikes it out.

        Only as many as `last` says count of each list, those that left last.
        """
        if not any(self.gone):
            return np.full(len(rows), -1, np.int64)
        marks = self._shelf.ghosts().take(fingerprints(self._shelf.blocks, rows, self._shelf.seed))
        which = marks & 1
        since = np.array(self.gone)[which] - (marks >> 1)
        which[(marks < 0) | (since > np.array(last)[which])] = -1
        return which
