"""Greedy-Dual-Size-Frequency (Cherkasova, 1998): LFUDA with uses weighted by recompute time.

A use saves the time to recompute the block, and all blocks of one pool have the same size. So blocks of an
expensive model outlive those of a cheap model in the same pool. The cheapest known model has weight 1, as has
a model whose recompute time is unknown.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.base import PolicyContext
from kvstore.core.policy.lfuda import LFUDA

_MOST_COST = 16.0
_MOST = 255


class GDSF(LFUDA):
    """Costs are relative to the cheapest, and at most `_MOST_COST`."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._context = context
        self._cheapest_s = np.inf

    def _worth(self, rows: Rows) -> npt.NDArray[np.uint8]:
        cost_s = self._context.recompute_s[self._context.blocks.namespace[rows]]
        known = cost_s[cost_s > 0]
        if not len(known):
            return self._uses[rows]
        self._cheapest_s = min(self._cheapest_s, float(known.min()))
        cost = np.clip(cost_s / self._cheapest_s, 1.0, _MOST_COST)
        worth: npt.NDArray[np.uint8] = np.minimum(np.rint(self._uses[rows] * cost), _MOST).astype(np.uint8)
        return worth
