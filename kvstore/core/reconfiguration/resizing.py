"""Changes the limits of tiers at run time: extents are made, or emptied and removed.

Surplus extents are removed one at a time: unassigned extents first, except those that floors need, then those
of the tenant that is most above its share, but never below a floor. Until then no extent is assigned.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvstore.core import events as ev
from kvstore.core.actions import MakeExtents
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.jobs import Job
from kvstore.core.residency.residency import Residency
from kvstore.core.transfers.eviction import Eviction

_REMOVED_AT_ONCE = 4
_TENANTS_AT_ONCE = 16
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


class Resizing(Job):
    """Brings the extents of each tier to its limit.

    `_again` has the tiers whose limit was raised while extents were being made. `shrinking` has the tiers
    that may have more extents than their limit allows.
    """

    def __init__(self, residency: Residency, eviction: Eviction) -> None:
        self._r = residency
        self._eviction = eviction
        self._again: set[int] = set()
        self.shrinking: set[int] = set()

    def set_limit(self, event: ev.SetLimit, now: float) -> None:
        state = self._r.tiers[event.tier]
        state.spec = replace(state.spec, limit_bytes=event.limit_bytes)
        state.extents.set_limit(event.limit_bytes)
        self.shrinking.add(event.tier)
        self._next_step = now
        self._fill(event.tier)
        self.step(now)

    def _fill(self, tier: int) -> None:
        """Asks for the extents that the limit allows, unless extents are being made."""
        state = self._r.tiers[tier]
        if not state.extents.lacking:
            self._again.discard(tier)
        elif state.growing:
            self._again.add(tier)
        else:
            state.growing = True
            self._r.outbox.actions.append(MakeExtents(tier, state.extents.lacking))

    def extent_ready(self, event: ev.ExtentReady, now: float) -> None:
        slots, extents = self._r.tiers[event.tier].slots, self._r.tiers[event.tier].extents
        extents.add(event.extent, event.replaces)
        if event.tenant == ev.UNKNOWN:
            self._eviction.rebalancing.renew(event.tier, event.extent)
        if not event.slot_bytes:
            return
        pool = SlotPool(event.tenant, event.domain, event.slot_bytes)
        assigned = extents.assign(pool, event.extent)
        self._eviction.shrink(event.tier, event.tenant)
        if event.versions is not None and assigned is not None:
            numbers = slots.classes.slots_of(event.extent)
            slots.version[numbers] = event.versions[: len(numbers)]

    def extents_end(self, event: ev.ExtentsEnd, now: float) -> None:
        self._r.tiers[event.tier].growing = False
        if event.tier in self._again:
            self._again.discard(event.tier)
            self._fill(event.tier)

    def extent_lost(self, event: ev.ExtentLost, now: float) -> None:
        extents = self._r.tiers[event.tier].extents
        removed = event.extent in extents.removing
        extents.lose(event.extent)
        if removed:
            # The limit may have been raised since.
            self._fill(event.tier)

    def _step(self, now: float) -> None:
        progressed = [self._shrink(tier) for tier in sorted(self.shrinking)]
        later = now + (_NEXT_STEP_S if any(progressed) else _NEXT_LOOK_S)
        self._next_step = later if self.shrinking else math.inf

    def _shrink(self, tier: int) -> bool:
        """Begins to remove surplus extents. Returns whether there was progress."""
        state, rebalancing = self._r.tiers[tier], self._eviction.rebalancing
        extents = state.extents
        if not extents.surplus:
            if not extents.removing and not state.growing:
                extents.bound_bytes = extents.limit_bytes
                self.shrinking.discard(tier)
            return False
        if tier in rebalancing.emptying and rebalancing.emptying[tier].taker is not None:
            rebalancing.cancel(tier)
        spare = min(extents.surplus, len(extents.unassigned) - extents.holdings.unmet, _REMOVED_AT_ONCE)
        if spare > 0:
            for extent in extents.unassigned[:spare]:
                rebalancing.remove(tier, extent)
            return True
        if tier in rebalancing.emptying or len(extents.renewing) > len(extents.removing):
            # A renewed extent may turn out to be unassigned.
            return False
        tenants = extents.holdings.above_floors()[:_TENANTS_AT_ONCE]
        return any(self._eviction.give_back(tier, tenant, used=True) for tenant in tenants)
