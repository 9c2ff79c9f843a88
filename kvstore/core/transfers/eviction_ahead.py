"""Makes room before it is asked for: a request for many slots is mostly followed by another like it.

Not covered: how room is made; see `eviction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.jobs import Job
from kvstore.core.residency.residency import Residency

_LEAST, _SHARE = 32, 256
"""Slots made free ahead: more than `_LEAST`, and no more than one in `_SHARE` of a pool."""


class EvictionAhead(Job):
    """Makes room for as many slots again as a request takes, one pool a step.

    `make_room` is that of `Eviction`.
    """

    def __init__(
        self, residency: Residency, make_room: Callable[[int, SlotPool, int, bool, float], int]
    ) -> None:
        self._r = residency
        self._make_room = make_room
        self._wanted: dict[tuple[int, SlotPool], tuple[int, float]] = {}
        self._asked_at = 0.0

    def ask(self, tier: int, pool: SlotPool, n: int, below: float = math.inf) -> None:
        """Has n slots made free in the next step, beside the n that a request takes now.

        `below`: see `Policy.coldest`.
        """
        slots = self._r.tiers[tier].slots
        if n > _LEAST and slots.free(pool) < 2 * n <= 2 * slots.classes[pool].total // _SHARE:
            self._wanted[tier, pool] = n, below
            self._asked_at = self._r.now

    def step(self, now: float) -> None:
        """Makes room in one pool."""
        if not self._wanted:
            return
        tier, pool = next(iter(self._wanted))
        n, below = self._wanted.pop((tier, pool))
        state = self._r.tiers[tier]
        if pool in state.slots.classes and not (state.leaving or state.lost):
            self._make_room(tier, pool, n, True, below)

    def wakes_at(self) -> float:
        return self._asked_at if self._wanted else math.inf
