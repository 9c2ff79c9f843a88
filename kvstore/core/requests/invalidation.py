"""Invalidation: turns blocks into misses, even while they are written or awaited."""

from __future__ import annotations

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer
from kvstore.core.blocks.block_table import LIVE, RESERVED, Rows
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.requests.reads import Reads
from kvstore.core.residency.decision_log import EVERY_TIER, DecisionKind


class Invalidation:
    """Drops blocks from every tier. Leases keep their slots."""

    def __init__(self, leases: LeaseTable, reads: Reads) -> None:
        self._leases = leases
        self._r = leases.residency
        self._copies = leases.copies
        self._reads = reads

    def invalidate(self, event: ev.Invalidate, now: float) -> None:
        if self._leases.namespace(event) is None:
            return
        rows = np.unique(self._r.index.find(event.namespace, event.keys))
        n = self.forget(rows[rows >= 0], DecisionKind.INVALIDATED)
        self._r.counters["invalidated_blocks"] += n
        self._leases.say(Answer(event.request, n))

    def forget(self, rows: Rows, what: DecisionKind | None = None) -> int:
        """Drops rows from every tier, and from reservations. Returns how many were readable.

        `what` is the recorded reason. None: no record, because their namespace is deleted.
        """
        r = self._r
        state = r.blocks.state[rows]
        reserved = rows[state == RESERVED]
        for reservation in self._leases.reservations.values() if len(reserved) else ():
            hit = np.isin(reservation.rows, reserved) & reservation.alive
            if hit.any():
                reservation.alive[hit] = False
                r.vanish(reservation.rows[hit])
        live = rows[state == LIVE]
        if what is not None:
            r.decisions.record(what, EVERY_TIER, live, r.now)
        self._reads.arrived(self._copies.cancel(live))
        for tier, held in enumerate(r.blocks.slot[:, live] >= 0):
            r.give_up(tier, live[held])
        return len(live)
