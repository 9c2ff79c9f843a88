"""Moves extents between pools and tenants: one at a time in each tier, so that blocks are evicted slowly.

An extent is emptied first. It is reallocated when the new tenant may map memory that the old one could not.

Not covered: how its blocks are evicted; see `eviction`. Which tenant gives an extent; see `capacity.quotas`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from kvstore.core.actions import FormatExtent, RemoveExtent, RenewExtent
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.capacity.slot_classes import SlotClass
from kvstore.core.residency.residency import Residency

_NEXT_MOVE_S = 0.05
_NEXT_ASK_S = 1.0
_EXAMINED = 16


@dataclass(slots=True)
class Emptying:
    """An extent that is being emptied since `since` (s), for a pool, or to be unassigned (None)."""

    extent: int
    taker: SlotPool | None
    since: float


class Rebalancing:
    """The moves of extents in the tiers of one residency. `emptying` has the extent of each tier, if any."""

    def __init__(self, residency: Residency) -> None:
        self._r = residency
        self.emptying: dict[int, Emptying] = {}
        self._next_move: defaultdict[int, float] = defaultdict(float)
        self._next_ask: defaultdict[int, dict[int, float]] = defaultdict(dict)

    @property
    def under_way(self) -> bool:
        """Whether extents are being emptied or renewed."""
        return bool(self.emptying) or any(t.extents.renewing for t in self._r.tiers)

    def is_emptying(self, tier: int, extent: int) -> bool:
        """Returns whether an extent is being emptied."""
        return tier in self.emptying and self.emptying[tier].extent == extent

    def assign(self, tier: int, pool: SlotPool, extent: int | None = None) -> bool:
        """Assigns an available extent (or the given one) to a pool. Returns whether there was one."""
        chosen = self._r.tiers[tier].extents.assign(pool, extent)
        if chosen is not None:
            self._r.outbox.actions.append(FormatExtent(tier, chosen, pool.slot_bytes, pool.domain))
        return chosen is not None

    # -- choice of an extent

    def take_over(self, tier: int, pool: SlotPool) -> bool:
        """Chooses an extent of another pool for one that has too few. Returns whether it must be emptied."""
        state, now = self._r.tiers[tier], self._r.now
        extents = state.extents
        if (
            tier in self.emptying
            or extents.renewing
            or extents.surplus
            or not extents.slots_in(pool.slot_bytes)
        ):
            return False
        extent = self._own_to_spare(tier, pool)
        if extent is None:
            # A tenant that was refused asks again after 1 s. Meanwhile others may ask.
            asks = self._next_ask[tier]
            if now < max(self._next_move[tier], asks.get(pool.tenant, 0.0)):
                return False
            giver = extents.holdings.giver(pool.tenant, now)
            if giver is None:
                asks[pool.tenant] = now + _NEXT_ASK_S
                return False
            self._next_move[tier] = now + _NEXT_MOVE_S
            if extents.promised.get(giver):
                self._hand_over(tier, giver, pool.tenant)
                return False
            extent = self._emptiest(tier, state.slots.classes.of_tenant(giver))
        if extent is not None:
            self._start(tier, extent, pool)
        return extent is not None

    def give_back(self, tier: int, tenant: int, used: bool) -> bool:
        """Chooses an extent of a tenant to be unassigned. Returns whether there is one. `used`: see below."""
        state = self._r.tiers[tier]
        if tier in self.emptying:
            return False
        if state.extents.promised.get(tenant):
            self._hand_over(tier, tenant, -1)
            return True
        extent = self._emptiest(tier, state.slots.classes.of_tenant(tenant), used)
        if extent is not None:
            self._start(tier, extent, None)
        return extent is not None

    def _own_to_spare(self, tier: int, pool: SlotPool) -> int | None:
        """Returns an extent that other pools of the same tenant have beyond an even share."""
        classes = self._r.tiers[tier].slots.classes
        mine = classes.get(pool)
        donors = [c for c in classes.of_tenant(pool.tenant) if c.pool != pool]
        if not donors:
            return None
        everything = sum(len(c.extents) for c in donors) + (len(mine.extents) if mine else 0)
        even = everything // (len(donors) + 1)
        donor = max(donors, key=lambda c: len(c.extents))
        if mine is not None and (len(mine.extents) >= max(even, 1) or len(donor.extents) <= even):
            return None
        return self._emptiest(tier, [donor])

    def _emptiest(self, tier: int, classes: list[SlotClass], used: bool = False) -> int | None:
        """Returns the extent with the fewest blocks among those without references and without pins.

        With `used`, returns one with references if there is no other.
        """
        slots, kept = self._r.tiers[tier].slots, self._r.kept
        members = [e for c in classes for e in c.extents if e not in slots.closed]
        by_rows = sorted(members, key=lambda e: np.count_nonzero(slots.owner[slots.classes.span(e)] >= 0))
        unpinned = [e for e in by_rows[:_EXAMINED] if not kept(tier, slots.rows_of(e)).any()]
        for extent in unpinned:
            if not slots.is_referred(extent):
                return extent
        return unpinned[0] if used and unpinned else None

    # -- progress of a move

    def _start(self, tier: int, extent: int, taker: SlotPool | None) -> None:
        self._r.tiers[tier].slots.close(extent)
        self.emptying[tier] = Emptying(extent, taker, self._r.now)

    def cancel(self, tier: int) -> None:
        """Keeps the extent that is being emptied in its pool."""
        self._r.tiers[tier].slots.reopen(self.emptying.pop(tier).extent)

    def finish(self, tier: int) -> None:
        """Gives the emptied extent to its new pool. Reallocates it, unless the same tenants may map it."""
        done, extents = self.emptying.pop(tier), self._r.tiers[tier].extents
        pool, taker = extents.slots.classes.of_extent(done.extent).pool, done.taker
        extents.withdraw(done.extent)
        if taker is not None and taker[:2] == pool[:2] and self.assign(tier, taker, done.extent):
            return
        grows = taker is not None and extents.holdings.may_grow(taker.tenant)
        self.renew(tier, done.extent, taker.tenant if taker is not None and grows else -1)

    def _hand_over(self, tier: int, giver: int, taker: int) -> None:
        """Reallocates an extent that is promised to a tenant, but not cut, for another tenant (-1: none)."""
        extents = self._r.tiers[tier].extents
        extent = extents.promised[giver].pop()
        extents.holdings.add_extents(giver, -1)
        extents.unassigned.append(extent)
        self.renew(tier, extent, taker)

    def renew(self, tier: int, extent: int, tenant: int = -1) -> None:
        """Reallocates an unassigned extent for a tenant (-1: none). Removes it if the tier has too many."""
        if tenant < 0 and self._r.tiers[tier].extents.surplus:
            self.remove(tier, extent)
            return
        self._r.tiers[tier].extents.renew(extent, tenant)
        self._r.counters["renewed_extents"] += 1
        self._r.outbox.actions.append(RenewExtent(tier, extent))

    def remove(self, tier: int, extent: int) -> None:
        """Removes an unassigned extent."""
        self._r.tiers[tier].extents.remove(extent)
        self._r.counters["removed_extents"] += 1
        self._r.outbox.actions.append(RemoveExtent(tier, extent))
