"""Pins: blocks that no eviction takes until a time."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer
from kvstore.core.capacity.quotas import UNLIMITED
from kvstore.core.requests.leases import LeaseTable
from kvstore.types import Tier


class Pins:
    """Pins and unpins blocks. `pin_bytes`: the most that a tenant may have pinned, by its number."""

    def __init__(self, leases: LeaseTable) -> None:
        self._leases = leases
        self._r = leases.residency
        self.pin_bytes: dict[int, int] = {}

    def pin(self, event: ev.Pin, now: float) -> None:
        namespace = self._leases.namespace(event)
        if namespace is None:
            return
        r, pool = self._r, namespace.pools[0]
        # Half of what it may have of the smallest tier that must hold them stays free to move.
        most: defaultdict[Tier, int] = defaultdict(int)
        for state, part in zip(r.tiers, namespace.pools, strict=True):
            if not state.gone and state.spec.tier.keeps_pins:
                fits = state.extents.most_slots(part.slot_bytes) * pool.slot_bytes
                most[state.spec.tier] += min(state.extents.holdings.limit_of(pool.tenant), fits)
        bound = min(min(most.values()) // 2, self.pin_bytes.get(pool.tenant, UNLIMITED))
        rows = r.prefix(event.namespace, event.keys)
        room = max(0, bound - r.pins.pinned_bytes[pool.tenant]) // pool.slot_bytes
        kept = np.cumsum(~r.blocks.pinned[rows]) <= room
        rows = rows if kept.all() else rows[: int(kept.argmin())]
        r.pins.pin(namespace, rows, event.until)
        self._leases.say(Answer(event.request, len(rows)))

    def unpin(self, event: ev.Unpin, now: float) -> None:
        if self._leases.namespace(event) is not None:
            rows = self._r.prefix(event.namespace, event.keys)
            pinned = rows[self._r.blocks.pinned[rows]]
            self._r.pins.unpin(pinned)
            self._leases.say(Answer(event.request, len(pinned)))
