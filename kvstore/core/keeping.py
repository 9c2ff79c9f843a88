"""Requests that keep or forget: pins, invalidation, blocks under suspicion or looked at in turn."""

from __future__ import annotations

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer, Probe
from kvstore.core.blocks import LIVE, RESERVED, Rows
from kvstore.core.ledger import NONE, Ledger, Probing
from kvstore.core.reads import Reads
from kvstore.core.transfers import Arrived
from kvstore.types import slot_bytes

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

    def pin(self, event: ev.Pin, now: float) -> None:
        size = self._ledger.slot_bytes(event)
        if not size:
            return
        r = self._r
        # Half of the smallest tier that must hold them stays free to move.
        bound = min(t.extents.most_slots(size) for t in r.tiers) // 2
        rows = r.prefix(event.namespace, event.keys)
        n = 0
        for row in rows.tolist():
            if row not in r.pins and len(r.pins) >= bound:
                break
            r.pin(row, max(event.until, r.pins.get(row, 0.0)))
            n += 1
        self._ledger.say(Answer(event.request, n))

    def unpin(self, event: ev.Unpin, now: float) -> None:
        if self._ledger.slot_bytes(event):
            rows = self._r.prefix(event.namespace, event.keys)
            pinned = rows[self._r.blocks.pinned[rows]].tolist()
            for row in pinned:
                self._r.unpin(row)
            self._ledger.say(Answer(event.request, len(pinned)))

    def invalidate(self, event: ev.Invalidate, now: float) -> None:
        size = self._ledger.slot_bytes(event)
        if not size:
            return
        r = self._r
        rows = np.unique(r.index.find(event.namespace, event.keys))
        rows = rows[rows >= 0]
        state = r.blocks.state[rows]
        for reservation in self._ledger.reservations.values():
            hit = np.isin(reservation.rows, rows[state == RESERVED]) & reservation.alive
            if hit.any():
                reservation.alive[hit] = False
                r.vanish(reservation.rows[hit])
        live = rows[state == LIVE]
        self._forget(live, size)
        r.counters["invalidated_blocks"] += len(live)
        self._ledger.say(Answer(event.request, len(live)))

    def _forget(self, rows: Rows, size: int) -> None:
        r = self._r
        self._transfers.cancel(rows)
        self._reads.arrived(Arrived(0, NONE, rows))
        held = [r.blocks.slot[tier, rows] >= 0 for tier in range(len(r.tiers))]
        for tier in range(len(r.tiers)):
            r.give_up(tier, size, rows[held[tier]])

    def suspect(self, event: ev.Suspect, now: float) -> None:
        size = self._ledger.slot_bytes(event)
        if not size:
            return
        r = self._r
        rows = r.index.find(event.namespace, event.keys)
        rows = np.unique(rows[rows >= 0])
        rows = rows[(r.blocks.state[rows] == LIVE) & (r.blocks.slot[0, rows] >= 0)]
        if len(rows) and len(self._ledger.probes) < _PROBES:
            self._probe(event.request, 0, size, rows)
        elif event.request:
            self._ledger.say(Answer(event.request, 0))

    def scrub(self, event: ev.Scrub, now: float) -> None:
        r = self._r
        tier, blocks = r.tiers[event.tier], r.blocks
        busy = any(p.tier == event.tier and not p.request for p in self._ledger.probes.values())
        if tier.fenced or busy or not blocks.rows_touched:
            return
        first = self._scrubbed[event.tier]
        last = min(first + _SCRUB_ROWS, blocks.rows_touched)
        there = (blocks.state[first:last] == LIVE) & (blocks.slot[event.tier, first:last] >= 0)
        rows = first + np.flatnonzero(there)
        if len(rows):
            # One size a probe.
            sizes = self._sizes(rows)
            size = int(sizes[0])
            n = min(max(1, event.limit_bytes // size), len(rows))
            n = n if (sizes[:n] == size).all() else int((sizes[:n] == size).argmin())
            last = int(rows[n]) if n < len(rows) else last
            self._probe(0, event.tier, size, rows[:n])
            r.counters[f"scrubbed_blocks_{tier.spec.tier.name.lower()}"] += n
        if last >= blocks.rows_touched:
            last = 0
            r.counters[f"scrub_passes_{tier.spec.tier.name.lower()}"] += 1
        self._scrubbed[event.tier] = last

    def _sizes(self, rows: Rows) -> Rows:
        """The slot size of each row."""
        spaces, inverse = np.unique(self._r.blocks.namespace[rows], return_inverse=True)
        sizes = [slot_bytes(self._ledger.namespaces[n]) for n in spaces.tolist()]
        return np.array(sizes, np.int64)[inverse]

    def _probe(self, request: int, tier: int, size: int, rows: Rows) -> None:
        r = self._r
        slots = r.blocks.slot[tier, rows].astype(np.int64)
        r.tiers[tier].extents.hold(slots)
        number = self._ledger.next_number()
        self._ledger.probes[number] = Probing(request, tier, size, rows, slots)
        self._ledger.say(Probe(number, tier, size, r.identity(rows), r.where(tier, slots)))

    def probe_done(self, event: ev.ProbeDone, now: float) -> None:
        p = self._ledger.probes.pop(event.probe)
        extents = self._r.tiers[p.tier].extents
        bad = (event.results == ev.CORRUPT) & (extents.owner[p.slots] == p.rows)
        extents.release(p.slots)
        self._transfers.quarantine(p.tier, p.slot_bytes, p.rows[bad])
        # Copies of them that were on their way up are cancelled with them.
        self._reads.arrived(Arrived(0, NONE, p.rows[bad]))
        if p.request:
            self._ledger.say(Answer(p.request, int(bad.sum())))
