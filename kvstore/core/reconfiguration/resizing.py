"""Tiers that become larger or smaller while they run: extents are asked for, or emptied and removed.

What is too much goes one extent at a time: what is nobody's first, but for what floors still want, then from
the tenant most over its share, never below a floor. Until enough has gone, no extent is given to anybody.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvstore.core import events as ev
from kvstore.core.actions import MakeExtents
from kvstore.core.residency.residency import Residency
from kvstore.core.transfers.eviction import Eviction

_REMOVED_AT_ONCE = 4
_TENANTS_AT_ONCE = 16
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


class Resizing:
    """Brings the extents of each tier to its limit. `_again`: of tiers that grow, those that want more."""

    def __init__(self, residency: Residency, eviction: Eviction) -> None:
        self._r = residency
        self._eviction = eviction
        self._again: set[int] = set()
        self._shrinking: set[int] = set()
        self._next_step = math.inf

    def set_limit(self, event: ev.SetLimit, now: float) -> None:
        state = self._r.tiers[event.tier]
        state.spec = replace(state.spec, limit_bytes=event.limit_bytes)
        state.extents.set_limit(event.limit_bytes)
        self._shrinking.add(event.tier)
        self._next_step = now
        self.fill(event.tier)
        self.step(now)

    def fill(self, tier: int) -> None:
        """Asks for the extents that the limit allows and nobody makes."""
        state = self._r.tiers[tier]
        if not state.extents.lacking:
            self._again.discard(tier)
        elif state.growing:
            self._again.add(tier)
        else:
            state.growing = True
            self._r.outbox.actions.append(MakeExtents(tier, state.extents.lacking))

    def ended(self, tier: int) -> None:
        """No more extents come: all are there, or there is no room for them."""
        self._r.tiers[tier].growing = False
        if tier in self._again:
            self._again.discard(tier)
            self.fill(tier)

    def lost(self, tier: int, extent: int) -> None:
        """An extent is gone. One that was removed on purpose may be wanted again by now."""
        extents = self._r.tiers[tier].extents
        wanted = extent in extents.removing
        extents.lose(extent)
        if wanted:
            self.fill(tier)

    def step(self, now: float) -> None:
        """It is `now`: goes on where there is too much."""
        if now < self._next_step:
            return
        got_on = [self._shrink(tier) for tier in sorted(self._shrinking)]
        later = now + (_NEXT_STEP_S if any(got_on) else _NEXT_LOOK_S)
        self._next_step = later if self._shrinking else math.inf

    def wakes_at(self) -> float:
        """When there is something to go on with."""
        return self._next_step

    def is_at_work(self, tier: int) -> bool:
        """Whether a tier may still have more than its limit allows."""
        return tier in self._shrinking

    def _shrink(self, tier: int) -> bool:
        """Has some extents leave that are too many; whether that got on."""
        state, eviction = self._r.tiers[tier], self._eviction
        extents = state.extents
        if not extents.surplus:
            if not extents.removing and not state.growing:
                extents.bound_bytes = extents.limit_bytes
                self._shrinking.discard(tier)
            return False
        eviction.call_off(tier)
        spare = min(extents.surplus, len(extents.unassigned) - extents.holdings.unmet, _REMOVED_AT_ONCE)
        if spare > 0:
            for extent in extents.unassigned[:spare]:
                eviction.remove(tier, extent)
            return True
        if eviction.has_leaving(tier) or len(extents.renewing) > len(extents.removing):
            # One at a time; and what is made anew may turn out to be nobody's.
            return False
        for tenant in extents.holdings.above_floors()[:_TENANTS_AT_ONCE]:
            if eviction.give_back_one(tier, tenant, used=True):
                return True
        return False
