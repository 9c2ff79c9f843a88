"""Verification: compares suspect blocks, and in turn all blocks, with their checksums."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer, Probe
from kvstore.core.blocks.block_table import LIVE, Rows
from kvstore.core.queues.device_queue import SCRUB
from kvstore.core.requests.leases import LeaseTable, PendingProbe
from kvstore.core.requests.reads import Reads

_PROBES = 64
_SCRUB_ROWS = 1 << 12  # rows searched per event, which delay all other requests
_SCRUB_BLOCKS = 256  # blocks probed per event, for the same reason


class Verification:
    """Probes copies. Quarantines corrupt copies. `_scrubbed`: the next row to scrub, by tier."""

    def __init__(self, leases: LeaseTable, reads: Reads) -> None:
        self._leases = leases
        self._r = leases.residency
        self._copies = leases.copies
        self._reads = reads
        self._scrubbed: defaultdict[int, int] = defaultdict(int)

    def suspect(self, event: ev.Suspect, now: float) -> None:
        if self._leases.namespace(event) is None:
            return
        r = self._r
        rows = r.index.find(event.namespace, event.keys)
        rows = np.unique(rows[rows >= 0])
        rows = rows[(r.blocks.state[rows] == LIVE) & (r.blocks.slot[event.tier, rows] >= 0)]
        if len(rows) and len(self._leases.probes) < _PROBES and self._may_probe(event.tier, rows):
            self._probe(event.request, event.tier, rows)
        elif event.request:
            self._leases.say(Answer(event.request, 0))

    def scrub(self, event: ev.Scrub, now: float) -> None:
        r = self._r
        tier, blocks = r.tiers[event.tier], r.blocks
        busy = any(p.tier == event.tier and not p.request for p in self._leases.probes.values())
        if not tier.device.readable or busy or not blocks.rows_touched:
            return
        first = self._scrubbed[event.tier]
        last = min(first + _SCRUB_ROWS, blocks.rows_touched)
        there = (blocks.state[first:last] == LIVE) & (blocks.slot[event.tier, first:last] >= 0)
        rows = first + np.flatnonzero(there)
        if len(rows):
            # One pool a probe.
            slots = blocks.slot[event.tier, rows]
            pool = tier.slots.pool_of(int(slots[0]))
            n = min(max(1, -(-event.step_bytes // pool.slot_bytes)), _SCRUB_BLOCKS, len(rows))
            alike = tier.slots.are_of(pool, slots[:n])
            n = n if alike.all() else int(alike.argmin())
            last = int(rows[n]) if n < len(rows) else last
            self._probe(0, event.tier, rows[:n])
            r.counters[f"scrubbed_blocks_{tier.spec.name}"] += n
        if last >= blocks.rows_touched:
            last = 0
            r.counters[f"scrub_passes_{tier.spec.name}"] += 1
        self._scrubbed[event.tier] = last

    def _may_probe(self, tier: int, rows: Rows) -> bool:
        """Returns whether the queue of a device has room for a probe of these rows."""
        state = self._r.tiers[tier]
        pool = state.slots.pool_of(int(self._r.blocks.slot[tier, rows[0]]))
        room = state.device.room(pool.tenant, SCRUB)
        return not tier or (state.device.readable and len(rows) * pool.slot_bytes <= room)

    def _probe(self, request: int, tier: int, rows: Rows) -> None:
        r = self._r
        slots = r.blocks.slot[tier, rows].astype(np.int64)
        table = r.tiers[tier].slots
        table.hold(slots)
        number = self._leases.next_number()
        self._leases.probes[number] = PendingProbe(request, tier, rows, slots)
        pool = table.pool_of(int(slots[0]))
        probe = Probe(number, tier, pool.slot_bytes, r.outbox.ids(rows), r.where(tier, slots))
        if tier:
            self._copies.probe(probe, pool.tenant)
        else:
            self._leases.say(probe)

    def probe_done(self, event: ev.ProbeDone, now: float) -> None:
        p = self._leases.probes.pop(event.probe)
        if p.tier:
            self._copies.probed(p.tier, event.probe)
        table = self._r.tiers[p.tier].slots
        bad = (event.results == ev.CORRUPT) & (table.owner[p.slots] == p.rows)
        table.release(p.slots)
        self._reads.arrived(self._copies.quarantine(p.tier, p.rows[bad]))
        if p.request:
            self._leases.say(Answer(p.request, int(bad.sum())))
