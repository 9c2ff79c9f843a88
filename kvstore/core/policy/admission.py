"""Admission: which blocks are written to a lower tier. Writes wear flash out, and most blocks are never
reused.

A rule selects blocks. The rule `reuse` has a price: what the blocks earned that were evicted from the tier to
make room. A block that earns less would replace a better one, and is not written. A write budget raises the
threshold: the bytes of a day go to the blocks that are most likely to be reused, and a day never exceeds it.
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
_PRICE_OVER, _PRICE_HALF_LIFE_S = 100, 600.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Admits blocks `always`, blocks used `twice`, or blocks that are worth it (`reuse`).

    Those have P(used again) >= `threshold`, and earn at least what the blocks earn that they replace.

    `bytes_a_day`: the write budget, 0: none. A day may exceed it by 4 % and one batch.
    """

    mode: Literal["always", "twice", "reuse"] = "always"
    threshold: float = 0.2
    bytes_a_day: int = 0


@dataclass(slots=True)
class _Price:
    """What the evicted blocks of a tenant earned, in uses/s. It falls from `at` (s) until the next one."""

    earned: float = 0.0
    at: float = 0.0

    def now(self, now: float) -> float:
        fallen: float = self.earned * 0.5 ** ((now - self.at) / _PRICE_HALF_LIFE_S)
        return fallen


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
        self._prices: dict[int, _Price] = {}
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
        if self.rule.mode == "reuse" and (price := self.price(tenant, now)):
            admitted &= self._earnings(rows, tenant, now) >= price
        if self.threshold:
            admitted &= self._reuse.chance(rows, tenant, now) >= self.threshold
        self.refused += len(rows) - int(admitted.sum())
        return admitted

    def replaced(self, rows: Rows, tenant: int, now: float) -> None:
        """Learns the price of a slot from a tenant's blocks that are about to be evicted from the tier."""
        if self.rule.mode != "reuse" or not len(rows):
            return
        before, share = self.price(tenant, now), min(1.0, len(rows) / _PRICE_OVER)
        earned = float(self._earnings(rows, tenant, now).mean())
        self._prices[tenant] = _Price(before + share * (earned - before), now)

    def price(self, tenant: int, now: float) -> float:
        """Returns the least that a block of a tenant must earn, in uses/s; 0: none was evicted yet."""
        price = self._prices.get(tenant)
        return price.now(now) if price is not None else 0.0

    def _earnings(self, rows: Rows, tenant: int, now: float) -> npt.NDArray[np.float32]:
        history = self._reuse.history
        return self._reuse.density(tenant, history.kinds(rows), history.last_used(rows), now)

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
