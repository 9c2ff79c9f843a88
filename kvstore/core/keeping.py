"""Requests that keep or forget: pins, invalidation, and blocks under suspicion."""

from __future__ import annotations

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer, Probe
from kvstore.core.blocks import LIVE, RESERVED, Rows
from kvstore.core.ledger import NONE, Ledger
from kvstore.core.reads import Reads
from kvstore.core.transfers import Arrived


class Keeping:
    """Pin, unpin, invalidate, suspect and the probe that follows."""

    def __init__(self, ledger: Ledger, reads: Reads) -> None:
        self._ledger = ledger
        self._r = ledger.residency
        self._transfers = ledger.transfers
        self._reads = reads

    def pin(self, event: ev.Pin, now: float) -> None:
        size = self._ledger.slot_bytes(event)
        if not size:
            return
        r = self._r
        # Half of the smallest tier that must hold them stays free to move.
        bound = min(t.spec.limit_bytes for t in r.tiers) // (2 * size)
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
        if len(rows) and len(self._ledger.probes) < 64:
            slots = r.blocks.slot[0, rows].astype(np.int64)
            r.tiers[0].extents.hold(slots)
            number = self._ledger.next_number()
            self._ledger.probes[number] = (rows, slots, size)
            self._ledger.say(Probe(number, 0, size, r.identity(rows), r.where(0, slots)))

    def probe_done(self, event: ev.ProbeDone, now: float) -> None:
        rows, slots, size = self._ledger.probes.pop(event.probe)
        r = self._r
        bad = ~event.good & (r.tiers[0].extents.owner[slots] == rows)
        r.tiers[0].extents.release(slots)
        self._transfers.quarantine(0, size, rows[bad])
