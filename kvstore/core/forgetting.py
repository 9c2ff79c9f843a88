"""What is forgotten as a whole: blocks whose time is over, namespaces, tenants. Step by step: it may be much.

From the first moment nothing of it is readable; the answer comes when nothing of it is left.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer, Renew
from kvstore.core.blocks import FREE, LIVE, RESERVED
from kvstore.core.keeping import Keeping
from kvstore.core.ledger import Ledger
from kvstore.core.tenants import Quota

_ROWS_AT_ONCE = 4096
_BLOCKS_AT_ONCE = 512
_NEXT_STEP_S = 0.001


@dataclass(slots=True)
class _Sweep:
    """Namespaces that are being forgotten; with `tenant`, all that it has (-1: no tenant)."""

    request: int
    namespaces: tuple[int, ...]
    tenant: int = -1
    row: int = 0
    blocks: int = 0


class Forgetting:
    """TTLs, Forget, ForgetTenant."""

    def __init__(self, ledger: Ledger, keeping: Keeping) -> None:
        self._ledger = ledger
        self._r = ledger.residency
        self._keeping = keeping
        self._sweeps: list[_Sweep] = []

    def forget(self, event: ev.Forget, now: float) -> None:
        spaces = tuple(n for n in event.namespaces if n in self._r.spaces)
        self._begin(_Sweep(event.request, spaces))

    def forget_tenant(self, event: ev.ForgetTenant, now: float) -> None:
        spaces = tuple(n for n, space in self._r.spaces.items() if space.tenant == event.tenant)
        for tier in self._r.tiers:
            tier.extents.holdings.set(event.tenant, Quota(limit=0))
        for number, lease in list(self._ledger.leases.items()):
            slots = lease.slots
            first = slots.start if isinstance(slots, slice) else int(slots[0])
            if self._r.tiers[0].extents.pool_of(first).tenant == event.tenant:
                self._ledger.drop_lease(number)
        self._begin(_Sweep(event.request, spaces, event.tenant))

    def _begin(self, sweep: _Sweep) -> None:
        for number in sweep.namespaces:
            self._r.spaces[number].closed = True
        for reservation in self._ledger.reservations.values():
            if reservation.space.closed and reservation.alive.any():
                lost = reservation.rows[reservation.alive]
                reservation.alive[:] = False
                self._r.vanish(lost)
        self._sweeps.append(sweep)
        self._go_on(sweep)

    def at(self, now: float) -> None:
        """It is `now`: blocks end, sweeps go on."""
        blocks, ending = self._r.blocks, self._ledger.ending
        budget = _BLOCKS_AT_ONCE
        while ending and ending[0][0] <= now and budget > 0:
            _, _, rows = heapq.heappop(ending)
            rows = rows[(blocks.state[rows] != FREE) & (blocks.expires[rows] > 0)]
            over = rows[blocks.expires[rows] <= now]
            if len(over) > budget:
                self._ledger.end_at(now, over[budget:])
                over = over[:budget]
            budget -= len(over)
            later = rows[blocks.expires[rows] > now]
            if len(later):
                self._ledger.end_at(float(blocks.expires[later].min()), later)
            self._r.counters["expired_blocks"] += self._keeping.forget(over)
        for sweep in list(self._sweeps):
            self._go_on(sweep)

    def wakes_at(self, now: float) -> float:
        """When there is something to go on with."""
        ending = self._ledger.ending
        wake = max(now, ending[0][0]) if ending else math.inf
        return min(wake, now + _NEXT_STEP_S) if self._sweeps else wake

    def _go_on(self, sweep: _Sweep) -> None:
        blocks = self._r.blocks
        budget = _BLOCKS_AT_ONCE
        if sweep.row < blocks.rows_touched:
            last = min(sweep.row + _ROWS_AT_ONCE, blocks.rows_touched)
            state = blocks.state[sweep.row : last]
            mine = np.isin(blocks.namespace[sweep.row : last], sweep.namespaces)
            rows = sweep.row + np.flatnonzero(mine & ((state == LIVE) | (state == RESERVED)))
            if len(rows) > budget:
                rows, last = rows[:budget], int(rows[budget])
            sweep.blocks += self._keeping.forget(rows)
            sweep.row = last
        if sweep.row < blocks.rows_touched or self._ledger.transfers.concern(sweep.namespaces):
            return
        if sweep.tenant < 0 or self._is_bare(sweep.tenant):
            for number in sweep.namespaces:
                del self._r.spaces[number]
                self._r.holes.pop(number, None)
            self._sweeps.remove(sweep)
            self._r.counters["forgotten_blocks"] += sweep.blocks
            self._ledger.say(Answer(sweep.request, sweep.blocks))

    def _is_bare(self, tenant: int) -> bool:
        """Has the extents of a tenant renewed, as far as nobody uses them; whether it has none any more."""
        for tier, state in enumerate(self._r.tiers):
            extents = state.extents
            mine = [e for p, c in extents.classes.items() if p.tenant == tenant for e in c.extents]
            for extent in mine:
                if extent not in extents.leaving:
                    extents.leave(extent)
                if not extents.is_used(extent) and not self._ledger.transfers.eviction.is_emptying(
                    tier, extent
                ):
                    extents.withdraw(extent)
                    self._renew(tier, extent)
            for extent in extents.promised.pop(tenant, []):
                extents.holdings.hold(tenant, -1)
                extents.unassigned.append(extent)
                self._renew(tier, extent)
        return not any(t.extents.holdings.extents[tenant] or t.extents.renewing for t in self._r.tiers)

    def _renew(self, tier: int, extent: int) -> None:
        self._r.tiers[tier].extents.renew(extent, -1)
        self._r.out.append(Renew(tier, extent))
