"""Requests about stored blocks: pins, invalidation, publication, suspicion, blocks looked at in turn."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer, Probe
from kvstore.core.blocks.block_table import LIVE, RESERVED, Rows
from kvstore.core.blocks.residency import DEMOTE, WRITING
from kvstore.core.capacity.quotas import UNLIMITED, Space
from kvstore.core.insight.decision_log import EVERY_TIER, What
from kvstore.core.requests.leases import Ledger, Probing
from kvstore.core.requests.reads import Reads
from kvstore.core.transfers.devices import SCRUB
from kvstore.types import Tier

_PROBES = 64
_SCRUB_ROWS = 1 << 12  # looked through at a turn, which the event loop waits for
_BLOCKS_AT_ONCE = 512
_GIVE_UP_AFTER_S = 10.0
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


@dataclass(slots=True)
class _Move:
    """A namespace whose blocks move to another domain: from `row` on, which is waited at `since` then."""

    space: Space
    since: float
    row: int = 0


class Keeping:
    """Pin, unpin, invalidate, move; suspicion and scrubbing, and the probes that follow."""

    def __init__(self, ledger: Ledger, reads: Reads) -> None:
        self._ledger = ledger
        self._r = ledger.residency
        self._transfers = ledger.transfers
        self._reads = reads
        self._scrubbed: defaultdict[int, int] = defaultdict(int)
        self.pin_bytes: dict[int, int] = {}
        self._moving: dict[int, _Move] = {}
        self._next_step = math.inf

    def pin(self, event: ev.Pin, now: float) -> None:
        space = self._ledger.space(event)
        if space is None:
            return
        r, pool = self._r, space.pools[0]
        # Half of what it may have of the smallest tier that must hold them stays free to move.
        most: defaultdict[Tier, int] = defaultdict(int)
        for state, part in zip(r.tiers, space.pools, strict=True):
            if not state.gone and state.spec.tier >= Tier.DRAM:
                fits = state.extents.most_slots(part.slot_bytes) * pool.slot_bytes
                most[state.spec.tier] += min(state.extents.holdings.most(pool.tenant), fits)
        bound = min(min(most.values()) // 2, self.pin_bytes.get(pool.tenant, UNLIMITED))
        rows = r.prefix(event.namespace, event.keys)
        room = max(0, bound - r.pinned_bytes[pool.tenant]) // pool.slot_bytes
        kept = np.cumsum(~r.blocks.pinned[rows]) <= room
        rows = rows if kept.all() else rows[: int(kept.argmin())]
        r.pin(space, rows, event.until)
        self._ledger.say(Answer(event.request, len(rows)))

    def unpin(self, event: ev.Unpin, now: float) -> None:
        if self._ledger.space(event) is not None:
            rows = self._r.prefix(event.namespace, event.keys)
            pinned = rows[self._r.blocks.pinned[rows]]
            self._r.unpin(pinned)
            self._ledger.say(Answer(event.request, len(pinned)))

    def invalidate(self, event: ev.Invalidate, now: float) -> None:
        if self._ledger.space(event) is None:
            return
        rows = np.unique(self._r.index.find(event.namespace, event.keys))
        n = self.forget(rows[rows >= 0], What.INVALIDATED)
        self._r.counters["invalidated_blocks"] += n
        self._ledger.say(Answer(event.request, n))

    def forget(self, rows: Rows, what: What | None = None) -> int:
        """Makes misses of rows, whoever writes or awaits them; how many were readable.

        `what` is kept as the reason; None: nobody can ask for them any more.
        """
        r = self._r
        state = r.blocks.state[rows]
        reserved = rows[state == RESERVED]
        for reservation in self._ledger.reservations.values() if len(reserved) else ():
            hit = np.isin(reservation.rows, reserved) & reservation.alive
            if hit.any():
                reservation.alive[hit] = False
                r.vanish(reservation.rows[hit])
        live = rows[state == LIVE]
        if what is not None:
            r.decisions.record(what, EVERY_TIER, live, r.now)
        self._reads.arrived(self._transfers.cancel(live))
        held = [r.blocks.slot[tier, live] >= 0 for tier in range(len(r.tiers))]
        for tier in range(len(r.tiers)):
            r.give_up(tier, live[held[tier]])
        return len(live)

    def tell(self, event: ev.Tell, now: float) -> None:
        r = self._r
        rows = r.index.find(event.namespace, event.keys)
        rows = rows[rows >= 0]
        for tier in range(len(r.tiers)):
            r.tell(tier, rows[r.blocks.slot[tier, rows] >= 0], gained=True)

    # -- publication

    def move(self, space: Space, now: float) -> None:
        """What a namespace has in tier 0 goes to its new pool there, or away if another tier has it too.

        Step by step. Readers of other tenants that wait are told that there is nothing: they may not look
        where it is going, perhaps.
        """
        self._reads.arrived(self._transfers.cancel_promotions(space.number))
        self._reads.end(space, but=space.tenant)
        self._moving[space.number] = _Move(space, now)
        self._next_step = now
        self.at(now)

    def at(self, now: float) -> None:
        """It is `now`: goes on with what moves."""
        if now < self._next_step:
            return
        got_on = [self._move_some(move, now) for move in list(self._moving.values())]
        later = now + (_NEXT_STEP_S if any(got_on) else _NEXT_LOOK_S)
        self._next_step = later if self._moving else math.inf

    def wakes_at(self) -> float:
        """When there is something to go on with."""
        return self._next_step

    def has_moved(self, namespace: int) -> bool:
        """Whether nothing of a namespace is on its way to another pool of tier 0."""
        return namespace not in self._moving and not self._transfers.moves(namespace)

    def _move_some(self, move: _Move, now: float) -> bool:
        """Takes one step; whether that got it on."""
        r, space, blocks = self._r, move.space, self._r.blocks
        number, extents = space.number, r.tiers[0].extents
        if space.pools[0] not in extents.classes:
            # Before anything is held that would have to leave for it.
            self._transfers.eviction.make_room(0, space.pools[0], 1)
        last = min(move.row + _SCRUB_ROWS, blocks.rows_touched)
        here = slice(move.row, last)
        mine = (blocks.namespace[here] == number) & (blocks.state[here] == LIVE) & (blocks.slot[0, here] >= 0)
        rows = move.row + np.flatnonzero(mine)
        rows = rows[~extents.are_of(space.pools[0], blocks.slot[0, rows])]
        if len(rows) > _BLOCKS_AT_ONCE:
            rows, last = rows[:_BLOCKS_AT_ONCE], int(rows[_BLOCKS_AT_ONCE])
        # What is on its way down already leaves when it is there.
        writing = self._transfers.written_from(0, rows)
        blocks.moving[writing] |= DEMOTE
        # What a GPU has may be on its way down too.
        waits = rows[((blocks.moving[rows] & WRITING) > 0) & ~np.isin(rows, writing)]
        rows = rows[blocks.moving[rows] == 0]
        twice = rows[r.copies(rows) > 1]
        self._reads.arrived(self._transfers.cancel(twice, 0))
        r.decisions.record(What.EVICTED, 0, twice, now)
        r.give_up(0, twice)
        rows = rows[blocks.slot[0, rows] >= 0]
        n = self._transfers.move(space, rows)
        later = len(waits) > 0 or (n < len(rows) and self._transfers.eviction.under_way)
        if later and now - move.since < _GIVE_UP_AFTER_S:
            return n > 0
        move.row, move.since = last, now
        if last >= blocks.rows_touched or space.closed:
            del self._moving[number]
        return True

    # -- suspicion

    def suspect(self, event: ev.Suspect, now: float) -> None:
        if self._ledger.space(event) is None:
            return
        r = self._r
        rows = r.index.find(event.namespace, event.keys)
        rows = np.unique(rows[rows >= 0])
        rows = rows[(r.blocks.state[rows] == LIVE) & (r.blocks.slot[event.at, rows] >= 0)]
        if len(rows) and len(self._ledger.probes) < _PROBES and self._may_probe(event.at, rows):
            self._probe(event.request, event.at, rows)
        elif event.request:
            self._ledger.say(Answer(event.request, 0))

    def scrub(self, event: ev.Scrub, now: float) -> None:
        r = self._r
        tier, blocks = r.tiers[event.tier], r.blocks
        busy = any(p.tier == event.tier and not p.request for p in self._ledger.probes.values())
        if not tier.device.readable or busy or not blocks.rows_touched:
            return
        first = self._scrubbed[event.tier]
        last = min(first + _SCRUB_ROWS, blocks.rows_touched)
        there = (blocks.state[first:last] == LIVE) & (blocks.slot[event.tier, first:last] >= 0)
        rows = first + np.flatnonzero(there)
        if len(rows):
            # One pool a probe.
            slots = blocks.slot[event.tier, rows]
            pool = tier.extents.pool_of(int(slots[0]))
            n = min(max(1, event.limit_bytes // pool.slot_bytes), len(rows))
            alike = tier.extents.are_of(pool, slots[:n])
            n = n if alike.all() else int(alike.argmin())
            last = int(rows[n]) if n < len(rows) else last
            self._probe(0, event.tier, rows[:n])
            r.counters[f"scrubbed_blocks_{tier.spec.name}"] += n
        if last >= blocks.rows_touched:
            last = 0
            r.counters[f"scrub_passes_{tier.spec.name}"] += 1
        self._scrubbed[event.tier] = last

    def _may_probe(self, tier: int, rows: Rows) -> bool:
        """Whether a device can look at so much now, besides what it is to look at already."""
        state = self._r.tiers[tier]
        pool = state.extents.pool_of(int(self._r.blocks.slot[tier, rows[0]]))
        room = state.device.room(pool.tenant, SCRUB)
        return not tier or (state.device.readable and len(rows) * pool.slot_bytes <= room)

    def _probe(self, request: int, tier: int, rows: Rows) -> None:
        r = self._r
        slots = r.blocks.slot[tier, rows].astype(np.int64)
        extents = r.tiers[tier].extents
        extents.hold(slots)
        number = self._ledger.next_number()
        self._ledger.probes[number] = Probing(request, tier, rows, slots)
        pool = extents.pool_of(int(slots[0]))
        probe = Probe(number, tier, pool.slot_bytes, r.identity(rows), r.where(tier, slots))
        if tier:
            self._transfers.probe(probe, pool.tenant)
        else:
            self._ledger.say(probe)

    def probe_done(self, event: ev.ProbeDone, now: float) -> None:
        p = self._ledger.probes.pop(event.probe)
        if p.tier:
            self._transfers.probed(p.tier, event.probe)
        extents = self._r.tiers[p.tier].extents
        bad = (event.results == ev.CORRUPT) & (extents.owner[p.slots] == p.rows)
        extents.release(p.slots)
        self._reads.arrived(self._transfers.quarantine(p.tier, p.rows[bad]))
        if p.request:
            self._ledger.say(Answer(p.request, int(bad.sum())))
