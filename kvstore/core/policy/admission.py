"""Admission: which blocks are written to a lower tier. Writes wear flash out, and most blocks are never
reused.

A rule selects blocks. A write budget raises the threshold, so that the bytes of a day go to the blocks that
are most likely to be reused, and are never exceeded.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.reuse.reuse import Reuse

DAY_S = 86_400.0
_SLACK = 0.04
_STEP_S = 60.0
_GAIN = 0.5
_LOWEST, _HIGHEST = -7.0, 7.0
_HOUR_S = 3600.0
_HOURS = 24


@dataclass(frozen=True, slots=True)
class Rule:
    """Admits blocks `always`, blocks used `twice`, or blocks with P(used again) >= `threshold` (`reuse`).

    `bytes_a_day`: the write budget, 0: none. A day may exceed it by 4 % and one batch.
    """

    mode: Literal["always", "twice", "reuse"] = "always"
    threshold: float = 0.2
    bytes_a_day: int = 0


class Admission:
    """The admission of one tier: its rule, its write budget, and counters."""

    def __init__(self, rule: Rule, reuse: Reuse) -> None:
        self._reuse = reuse
        self.refused = 0
        self.written = 0
        self._odds = _LOWEST
        self._at: float | None = None
        self._next_step_s = 0.0
        self._left = 0.0
        self._by_hour: deque[tuple[int, int]] = deque(maxlen=_HOURS + 1)
        self.rule = rule

    def change(self, rule: Rule, now: float) -> None:
        """Changes the rule. The writes of the last 24 hours count towards a new budget."""
        before, self.rule = self.rule.bytes_a_day, rule
        if rule.bytes_a_day == before:
            return
        if not rule.bytes_a_day:
            self._odds = _LOWEST
        self._at = now
        self._left = -self._beyond(rule.bytes_a_day, now)

    def _beyond(self, bytes_a_day: int, now: float) -> float:
        """Returns by how much the latest hours exceeded their part of a budget, at most one day's budget.

        Each hour counts as if written at its end, which may overstate the excess.
        """
        most = 0.0
        written = 0
        for hour, nbytes in reversed(self._by_hour):
            written += nbytes
            age_s = max(now - (hour + 1) * _HOUR_S, 0.0)
            if age_s < DAY_S:
                most = max(most, written - bytes_a_day * age_s / DAY_S)
        return min(most, float(bytes_a_day))

    def written_in_a_day(self, now: float) -> int:
        """Returns the bytes written in the last 24 hours, to the hour."""
        return sum(nbytes for hour, nbytes in self._by_hour if now - (hour + 1) * _HOUR_S < DAY_S)

    @property
    def threshold(self) -> float:
        """The least P(used again) of a block to be admitted now."""
        budget = 1 / (1 + math.exp(-self._odds)) if self._odds > _LOWEST else 0.0
        return max(budget, self.rule.threshold if self.rule.mode == "reuse" else 0.0)

    @property
    def spent(self) -> bool:
        """Whether the budget is used up for now."""
        return self.rule.bytes_a_day > 0 and self._left <= 0

    def admits(self, rows: Rows, tenant: int, now: float) -> npt.NDArray[np.bool_]:
        """Returns which blocks of a tenant are admitted."""
        self._step(now)
        admitted = np.full(len(rows), not self.spent)
        if self.rule.mode == "twice":
            admitted &= self._reuse.history.uses(rows) >= 2
        if self.threshold:
            admitted &= self._reuse.chance(rows, tenant, now) >= self.threshold
        self.refused += len(rows) - int(admitted.sum())
        return admitted

    def wrote(self, nbytes: int, now: float) -> None:
        """Counts bytes that are being written to the device."""
        self.written += nbytes
        self._left -= nbytes
        hour = int(now // _HOUR_S)
        if self._by_hour and self._by_hour[-1][0] == hour:
            nbytes += self._by_hour.pop()[1]
        self._by_hour.append((hour, nbytes))

    def _step(self, now: float) -> None:
        """Refills the budget with time. The less is left, the higher the threshold rises."""
        if not self.rule.bytes_a_day:
            return
        slack = _SLACK * self.rule.bytes_a_day
        if self._at is not None:
            self._left = min(slack, self._left + (now - self._at) * self.rule.bytes_a_day / DAY_S)
        self._at = now
        if now >= self._next_step_s:
            self._next_step_s = now + _STEP_S
            self._odds = min(_HIGHEST, max(_LOWEST, self._odds + _GAIN * (1 - 2 * self._left / slack)))
