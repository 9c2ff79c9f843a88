"""Devices that come while the daemon runs, those that go, and those that are lost.

One that comes has no extents at first: whoever is told that it is there has more asked for. One that goes
takes no more writes and is read until it is empty: its extents leave as with a lower limit. What only it has
is lost, and what pins keep there keeps it. Of one that is lost nothing can be read from then on.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import DeviceAdded, DeviceRemoved
from kvstore.core.blocks.block_table import MOST_TIERS
from kvstore.core.queues.device_queue import DRAINING, FENCED, TierSpec
from kvstore.core.reconfiguration.resizing import Resizing
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.residency import Residency
from kvstore.core.transfers.copy_queue import Arrived, CopyQueue

_ROWS_AT_ONCE = 1 << 17
_SCANNED_AT_ONCE = 1 << 15
_LOST_AT_ONCE = 512
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


class Hotplug:
    """Those of one residency."""

    def __init__(self, residency: Residency, copies: CopyQueue, resizing: Resizing) -> None:
        self._r = residency
        self._copies = copies
        self._resizing = resizing
        self._next_row: dict[int, int] = {}
        self._coming: deque[TierSpec] = deque()
        self._going: set[int] = set()
        self._next_step = math.inf

    @property
    def room(self) -> int:
        """How many may still come."""
        return MOST_TIERS - len(self._r.tiers) - len(self._coming)

    def add(self, event: ev.AddDevice, now: float) -> None:
        assert self.room > 0
        assert len(self._r.tiers) > 1
        self._coming.append(event.spec)
        self._next_step = now
        self.step(now)

    def remove(self, event: ev.RemoveDevice, now: float) -> None:
        state = self._r.tiers[event.tier]
        state.device.state, state.leaving = FENCED if state.lost else DRAINING, True
        state.extents.holdings.drop_floors()
        self._going.add(event.tier)
        self._resizing.set_limit(ev.SetLimit(event.tier, 0), now)
        self._next_step = now
        self.step(now)

    def lose(self, event: ev.LoseDevice, now: float) -> list[Arrived]:
        """Returns which blocks were on their way, and do not arrive because of it."""
        state = self._r.tiers[event.tier]
        if state.lost or state.gone:
            return []
        state.device.state, state.lost, state.leaving = FENCED, True, True
        self._r.topology.losing.add(event.tier)
        self._next_row[event.tier] = 0
        gone = self._copies.lose(event.tier)
        self._next_step = now
        self.step(now)
        return gone

    def step(self, now: float) -> None:
        """It is `now`: goes on with those that come, and lets go of those that are empty."""
        if now < self._next_step:
            return
        if self._coming and self._r.blocks.widen(_ROWS_AT_ONCE):
            self._join(self._coming.popleft())
        for tier in list(self._next_row):
            self._forget_some(tier, now)
        for tier in sorted(self._going):
            if not self._r.tiers[tier].extents.total and not self._resizing.is_at_work(tier):
                self._going.discard(tier)
                self._r.tiers[tier].gone = True
                self._r.outbox.actions.append(DeviceRemoved(tier))
        at_once = bool(self._coming or self._next_row)
        self._next_step = now + (_NEXT_STEP_S if at_once else _NEXT_LOOK_S if self._going else math.inf)

    def wakes_at(self) -> float:
        """When there is something to go on with."""
        return self._next_step

    def _forget_some(self, tier: int, now: float) -> None:
        """Gives up some of the copies that a lost device had; when that was all, its extents go."""
        r, blocks = self._r, self._r.blocks
        first = self._next_row[tier]
        last = min(first + _SCANNED_AT_ONCE, blocks.rows_touched)
        rows = first + np.flatnonzero(blocks.slot[tier, first:last] >= 0)
        if len(rows) > _LOST_AT_ONCE:
            rows, last = rows[:_LOST_AT_ONCE], int(rows[_LOST_AT_ONCE])
        r.decisions.record(DecisionKind.LOST, tier, rows, r.now)
        r.give_up(tier, rows)
        if last >= blocks.rows_touched:
            del self._next_row[tier]
            r.topology.losing.discard(tier)
            self.remove(ev.RemoveDevice(tier), now)
        else:
            self._next_row[tier] = last

    def _join(self, spec: TierSpec) -> None:
        tier = self._r.topology.join(spec)
        for space in self._r.namespaces.values():
            space.pools = (*space.pools, space.pools[self._r.topology.persistent[0]])
        self._r.outbox.actions.append(DeviceAdded(tier))
