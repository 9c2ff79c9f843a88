"""Devices that are added, removed or lost at run time.

An added device has no extents at first; the daemon raises its limit. A removed device gets no more writes and
is read until its extents are removed, as with a lower limit; blocks that only it has are dropped, and pinned
blocks keep it. A lost device cannot be read any more.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import DeviceAdded, DeviceRemoved
from kvstore.core.jobs import Job
from kvstore.core.queues.device_queue import DRAINING, FENCED, TierSpec
from kvstore.core.reconfiguration.resizing import Resizing
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.residency import Residency
from kvstore.core.transfers.copy_queue import Arrived, CopyQueue
from kvstore.types import MOST_TIERS

_ROWS_AT_ONCE = 1 << 17
_SCANNED_AT_ONCE = 1 << 15
_LOST_AT_ONCE = 512
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


class Hotplug(Job):
    """The devices of one residency that are being added or removed.

    `_next_row` has for each lost device the first row whose copy may not be forgotten yet.
    """

    def __init__(self, residency: Residency, copies: CopyQueue, resizing: Resizing) -> None:
        self._r = residency
        self._copies = copies
        self._resizing = resizing
        self._next_row: dict[int, int] = {}
        self._adding: deque[TierSpec] = deque()
        self._removing: set[int] = set()

    @property
    def addable(self) -> int:
        """How many devices can still be added."""
        return MOST_TIERS - len(self._r.tiers) - len(self._adding)

    def add(self, event: ev.AddDevice, now: float) -> None:
        assert self.addable > 0
        assert len(self._r.tiers) > 1
        self._adding.append(event.spec)
        self._step(now)

    def remove(self, event: ev.RemoveDevice, now: float) -> None:
        state = self._r.tiers[event.tier]
        state.device.state, state.leaving = FENCED if state.lost else DRAINING, True
        state.extents.holdings.drop_floors()
        self._removing.add(event.tier)
        self._resizing.set_limit(ev.SetLimit(event.tier, 0), now)
        self._step(now)

    def lose(self, event: ev.LoseDevice, now: float) -> list[Arrived]:
        """Forgets the copies of a lost device, in steps. Returns the cancelled copies."""
        state = self._r.tiers[event.tier]
        if state.lost or state.gone:
            return []
        state.device.state, state.lost, state.leaving = FENCED, True, True
        self._r.topology.losing.add(event.tier)
        self._next_row[event.tier] = 0
        cancelled = self._copies.lose(event.tier)
        self._step(now)
        return cancelled

    def _step(self, now: float) -> None:
        if self._adding and self._r.blocks.widen(_ROWS_AT_ONCE):
            self._join(self._adding.popleft())
        for tier in list(self._next_row):
            self._forget_some(tier, now)
        for tier in sorted(self._removing):
            if not self._r.tiers[tier].extents.total and tier not in self._resizing.shrinking:
                self._removing.discard(tier)
                self._r.tiers[tier].gone = True
                self._r.topology.clear(tier)
                self._r.outbox.actions.append(DeviceRemoved(tier))
        at_once = bool(self._adding or self._next_row)
        self._next_step = now + (_NEXT_STEP_S if at_once else _NEXT_LOOK_S if self._removing else math.inf)

    def _forget_some(self, tier: int, now: float) -> None:
        """Drops some copies of a lost device. Removes the device after the last one."""
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
        for namespace in self._r.namespaces.values():
            namespace.pools = (*namespace.pools, namespace.pools[self._r.topology.persistent[0]])
        self._r.outbox.actions.append(DeviceAdded(tier))
