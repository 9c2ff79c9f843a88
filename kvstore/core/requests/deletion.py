"""Deletion in steps: expired blocks, namespaces, tenants.

Blocks of a deleted namespace or tenant are unreadable at once. The request is answered when none is left.
Expired blocks are found by a pass over all rows, at most one a second, because no list by expiry is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer, RenewExtent
from kvstore.core.blocks.block_table import LIVE, RESERVED
from kvstore.core.capacity.quotas import Quota
from kvstore.core.jobs import Job
from kvstore.core.requests.invalidation import Invalidation
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.requests.reads import Reads
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.namespace import Namespace

_ROWS_AT_ONCE = 4096
_ENDS_AT_ONCE = 1 << 15
_BLOCKS_AT_ONCE = 512
_EXTENTS_AT_ONCE = 4
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05
_NEXT_PASS_S = 1.0


@dataclass(slots=True)
class _Sweep:
    """Namespaces that are being deleted: all of `tenant`, unless it is -1.

    `extents`: (tier, extent) of the extents that are still to be renewed.
    """

    request: int
    namespaces: tuple[Namespace, ...]
    tenant: int = -1
    row: int = 0
    blocks: int = 0
    extents: set[tuple[int, int]] = field(default_factory=set)


class Deletion(Job):
    """TTLs, Forget, ForgetTenant."""

    def __init__(self, leases: LeaseTable, invalidation: Invalidation, reads: Reads) -> None:
        self._leases = leases
        self._r = leases.residency
        self._invalidation = invalidation
        self._reads = reads
        self._sweeps: list[_Sweep] = []
        self._row = 0
        self._next_look = 0.0

    def forget(self, event: ev.Forget, now: float) -> None:
        namespaces = tuple(self._r.namespaces[n] for n in event.namespaces if n in self._r.namespaces)
        self._begin(_Sweep(event.request, namespaces))
        self.step(now)

    def forget_tenant(self, event: ev.ForgetTenant, now: float) -> None:
        namespaces = tuple(s for s in self._r.namespaces.values() if s.tenant == event.tenant)
        sweep = _Sweep(event.request, namespaces, event.tenant)
        for tier, state in enumerate(self._r.tiers):
            state.extents.holdings.set(event.tenant, Quota(limit=0))
            held = [e for c in state.slots.classes.of_tenant(event.tenant) for e in c.extents]
            sweep.extents.update((tier, e) for e in held + state.extents.promised.get(event.tenant, []))
        for number, lease in list(self._leases.leases.items()):
            slots = lease.slots
            first = slots.start if isinstance(slots, slice) else int(slots[0])
            if self._r.tiers[lease.tier].slots.pool_of(first).tenant == event.tenant:
                self._leases.drop_lease(number)
        self._begin(sweep)
        for number, reservation in list(self._leases.reservations.items()):
            if reservation.pool.tenant == event.tenant:
                self._r.tiers[reservation.tier].slots.release(self._leases.drop_reservation(number).slots)
        self.step(now)

    def _begin(self, sweep: _Sweep) -> None:
        for namespace in sweep.namespaces:
            namespace.closed = True
            self._r.presence.retire(namespace.number)
            self._reads.end(namespace)
        for reservation in self._leases.reservations.values():
            if reservation.namespace.closed and reservation.alive.any():
                lost = reservation.rows[reservation.alive]
                reservation.alive[:] = False
                self._r.vanish(lost)
        self._sweeps.append(sweep)
        self._next_step = 0.0

    def step(self, now: float) -> None:
        if self._looks_at() <= now:
            self._end_some(now)
        if self._next_step <= now:
            progressed = [self._go_on(sweep) for sweep in list(self._sweeps)]
            # Sweeps that wait for copies or for new extents are polled.
            later = now + (_NEXT_STEP_S if any(progressed) else _NEXT_LOOK_S)
            self._next_step = later if self._sweeps else math.inf

    def wakes_at(self) -> float:
        return min(self._looks_at(), self._next_step)

    # -- expired blocks

    def _looks_at(self) -> float:
        return self._next_look if self._row else max(self._next_look, self._leases.next_end)

    def _end_some(self, now: float) -> None:
        blocks, first = self._r.blocks, self._row
        if not first:
            self._leases.next_end = math.inf
        last = min(first + _ENDS_AT_ONCE, blocks.rows_touched)
        ends = blocks.expires[first:last]
        over = np.flatnonzero((ends > 0) & (ends <= now))
        if len(over) > _BLOCKS_AT_ONCE:
            over = over[:_BLOCKS_AT_ONCE]
            last = first + int(over[-1]) + 1
        later = ends[: last - first]
        self._leases.end_at(float(later[later > now].min(initial=math.inf)))
        self._r.counters["expired_blocks"] += self._invalidation.forget(first + over, DecisionKind.EXPIRED)
        done = last >= blocks.rows_touched
        self._row = 0 if done else last
        self._next_look = now + (_NEXT_PASS_S if done else _NEXT_STEP_S)

    # -- namespaces and tenants

    def _go_on(self, sweep: _Sweep) -> bool:
        """Takes one step of a sweep. Returns whether it made progress."""
        blocks = self._r.blocks
        # Another sweep may have closed a namespace, whose number may be reused.
        numbers = [s.number for s in sweep.namespaces if self._r.namespaces.get(s.number) is s]
        if sweep.row < blocks.rows_touched:
            last = min(sweep.row + _ROWS_AT_ONCE, blocks.rows_touched)
            state = blocks.state[sweep.row : last]
            mine = np.isin(blocks.namespace[sweep.row : last], numbers)
            rows = sweep.row + np.flatnonzero(mine & ((state == LIVE) | (state == RESERVED)))
            if len(rows) > _BLOCKS_AT_ONCE:
                rows, last = rows[:_BLOCKS_AT_ONCE], int(rows[_BLOCKS_AT_ONCE])
            sweep.blocks += self._invalidation.forget(rows)
            sweep.row = last
            if last < blocks.rows_touched:
                return True
        if np.isin(blocks.namespace[list(self._r.chains.childless)], numbers).any():
            return False
        if self._leases.copies.concern(numbers):
            return False
        if sweep.tenant >= 0 and not self._is_bare(sweep):
            return False
        for number in numbers:
            del self._r.namespaces[number]
            self._r.gaps.forget(number)
        if sweep.tenant >= 0:
            self._r.reuse.forget(sweep.tenant)
        self._sweeps.remove(sweep)
        self._r.counters["forgotten_blocks"] += sweep.blocks
        self._leases.say(Answer(sweep.request, sweep.blocks))
        return True

    def _is_bare(self, sweep: _Sweep) -> bool:
        """Renews some unused extents of a tenant. Returns whether all are renewed."""
        tenant, budget = sweep.tenant, _EXTENTS_AT_ONCE
        eviction = self._leases.eviction
        for tier, state in enumerate(self._r.tiers):
            extents = state.extents
            for extent in [e for c in extents.slots.classes.of_tenant(tenant) for e in c.extents]:
                if (
                    budget
                    and not eviction.rebalancing.is_emptying(tier, extent)
                    and not extents.slots.is_used(extent)
                ):
                    extents.slots.close(extent)
                    extents.withdraw(extent)
                    self._renew(tier, extent)
                    budget -= 1
            for extent in extents.promised.pop(tenant, []):
                extents.holdings.add_extents(tenant, -1)
                extents.unassigned.append(extent)
                self._renew(tier, extent)
        sweep.extents = {
            (tier, extent)
            for tier, extent in sweep.extents
            if extent in self._r.tiers[tier].extents.renewing
            or (
                (pool := self._r.tiers[tier].slots.classes.pool_at(extent)) is not None
                and pool.tenant == tenant
            )
        }
        return not sweep.extents and not any(t.extents.holdings.held(tenant) for t in self._r.tiers)

    def _renew(self, tier: int, extent: int) -> None:
        self._r.tiers[tier].extents.renew(extent, -1)
        self._r.outbox.actions.append(RenewExtent(tier, extent))
