"""Requests that keep or forget: pins, invalidation, blocks under suspicion or looked at in turn."""

from __future__ import annotations

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer, Probe
from kvstore.core.blocks import LIVE, RESERVED, Rows
from kvstore.core.ledger import NONE, Ledger, Probing
from kvstore.core.reads import Reads
from kvstore.core.tenants import UNLIMITED, Space
from kvstore.core.transfers import Arrived

_PROBES = 64
_SCRUB_ROWS = 1 << 12  # looked through at a turn, which the event loop waits for


class Keeping:
    """Pin, unpin, invalidate; suspicion and scrubbing, and the probes that follow."""

    def __init__(self, ledger: Ledger, reads: Reads) -> None:
        self._ledger = ledger
        self._r = ledger.residency
        self._transfers = ledger.transfers
        self._reads = reads
        self._scrubbed = [0] * len(self._r.tiers)
        self.pin_bytes: dict[int, int] = {}

    def pin(self, event: ev.Pin, now: float) -> None:
        space = self._ledger.space(event)
        if space is None:
            return
        r, pool = self._r, space.pools[0]
        # Half of what it may have of the smallest tier that must hold them stays free to move.
        slots = min(t.extents.most_slots(p.slot_bytes) for t, p in zip(r.tiers, space.pools, strict=True))
        most = [t.extents.holdings.most(pool.tenant) for t in r.tiers] + [slots * pool.slot_bytes]
        bound = min(min(most) // 2, self.pin_bytes.get(pool.tenant, UNLIMITED))
        rows = r.prefix(event.namespace, event.keys)
        n = 0
        for row in rows.tolist():
            if row not in r.pins and r.pinned_bytes[pool.tenant] + pool.slot_bytes > bound:
                break
            r.pin(row, max(event.until, r.pins.get(row, 0.0)))
            n += 1
        self._ledger.say(Answer(event.request, n))

    def unpin(self, event: ev.Unpin, now: float) -> None:
        if self._ledger.space(event) is not None:
            rows = self._r.prefix(event.namespace, event.keys)
            pinned = rows[self._r.blocks.pinned[rows]].tolist()
            for row in pinned:
                self._r.unpin(row)
            self._ledger.say(Answer(event.request, len(pinned)))

    def invalidate(self, event: ev.Invalidate, now: float) -> None:
        if self._ledger.space(event) is None:
            return
        rows = np.unique(self._r.index.find(event.namespace, event.keys))
        n = self.forget(rows[rows >= 0])
        self._r.counters["invalidated_blocks"] += n
        self._ledger.say(Answer(event.request, n))

    def forget(self, rows: Rows) -> int:
        """Makes misses of rows, whoever writes or awaits them; how many were readable."""
        r = self._r
        state = r.blocks.state[rows]
        reserved = rows[state == RESERVED]
        for reservation in self._ledger.reservations.values() if len(reserved) else ():
            hit = np.isin(reservation.rows, reserved) & reservation.alive
            if hit.any():
                reservation.alive[hit] = False
                r.vanish(reservation.rows[hit])
        live = rows[state == LIVE]
        self._transfers.cancel(live)
        self._reads.arrived(Arrived(0, NONE, live))
        held = [r.blocks.slot[tier, live] >= 0 for tier in range(len(r.tiers))]
        for tier in range(len(r.tiers)):
            r.give_up(tier, live[held[tier]])
        return len(live)

    def move(self, space: Space) -> set[int]:
        """What a namespace has in tier 0 goes to its new pool there, or away if a lower tier has it too.

        Returns the numbers of the copies that are on their way.
        """
        r = self._r
        rows = np.flatnonzero((r.blocks.namespace == space.number) & (r.blocks.state == LIVE))
        self._transfers.cancel(rows)
        self._reads.arrived(Arrived(0, NONE, rows))
        rows = rows[r.blocks.slot[0, rows] >= 0]
        twice = (r.blocks.slot[1:, rows] >= 0).any(axis=0)
        r.give_up(0, rows[twice])
        return self._transfers.move(space, rows[~twice])

    def suspect(self, event: ev.Suspect, now: float) -> None:
        if self._ledger.space(event) is None:
            return
        r = self._r
        rows = r.index.find(event.namespace, event.keys)
        rows = np.unique(rows[rows >= 0])
        rows = rows[(r.blocks.state[rows] == LIVE) & (r.blocks.slot[0, rows] >= 0)]
        if len(rows) and len(self._ledger.probes) < _PROBES:
            self._probe(event.request, 0, rows)
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
            r.counters[f"scrubbed_blocks_{tier.spec.tier.name.lower()}"] += n
        if last >= blocks.rows_touched:
            last = 0
            r.counters[f"scrub_passes_{tier.spec.tier.name.lower()}"] += 1
        self._scrubbed[event.tier] = last

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
        self._transfers.quarantine(p.tier, p.rows[bad])
        # Copies of them that were on their way up are cancelled with them.
        self._reads.arrived(Arrived(0, NONE, p.rows[bad]))
        if p.request:
            self._ledger.say(Answer(p.request, int(bad.sum())))
