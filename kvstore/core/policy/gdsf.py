"""Greedy-Dual-Size-Frequency (Cherkasova, 1998): as LFUDA, but uses weigh by what they save.

A use saves the time that computing the block anew takes; all blocks of one pool take the same room. So a
model that is dear to compute outlives one that is cheap in the same pool. The cheapest known counts as 1, and
so does one of which nobody said.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.lfuda import LFUDA
from kvstore.core.policy.pool_view import PolicyContext

_DEAREST = 16.0
_MOST = 255


class GDSF(LFUDA):
    """Costs are relative, and none is over `_DEAREST`."""

    def __init__(self, shelf: PolicyContext) -> None:
        super().__init__(shelf)
        self._shelf = shelf
        self._cheapest_s = np.inf

    def _worth(self, rows: Rows) -> npt.NDArray[np.uint8]:
        cost_s = self._shelf.recompute_s[self._shelf.blocks.namespace[rows]]
        said = cost_s[cost_s > 0]
        if not len(said):
            return self._uses[rows]
        self._cheapest_s = min(self._cheapest_s, float(said.min()))
        cost = np.clip(cost_s / self._cheapest_s, 1.0, _DEAREST)
        worth: npt.NDArray[np.uint8] = np.minimum(np.rint(self._uses[rows] * cost), _MOST).astype(np.uint8)
        return worth
