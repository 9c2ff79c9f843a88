"""Devices that come while the daemon runs, and go.

One that comes has no extents at first: whoever is told that it is there has more asked for. One that goes
takes no more writes and is read until it is empty: its extents leave as with a lower limit. What only it has
is lost, and what pins keep there keeps it.
"""

from __future__ import annotations

import math
from collections import deque

from kvstore.core import events as ev
from kvstore.core.actions import Joined, Left
from kvstore.core.blocks import MOST_TIERS
from kvstore.core.devices import DRAINING, TierSpec
from kvstore.core.residency import Residency
from kvstore.core.resizing import Resizing

_ROWS_AT_ONCE = 1 << 17
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


class Joining:
    """Those of one residency."""

    def __init__(self, residency: Residency, resizing: Resizing) -> None:
        self._r = residency
        self._resizing = resizing
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
        self.at(now)

    def remove(self, event: ev.RemoveDevice, now: float) -> None:
        state = self._r.tiers[event.tier]
        state.device.state, state.leaving = DRAINING, True
        self._going.add(event.tier)
        self._resizing.set_limit(ev.SetLimit(event.tier, 0), now)
        self._next_step = now
        self.at(now)

    def at(self, now: float) -> None:
        """It is `now`: goes on with those that come, and lets go of those that are empty."""
        if now < self._next_step:
            return
        if self._coming and self._r.blocks.widen(_ROWS_AT_ONCE):
            self._join(self._coming.popleft())
        for tier in sorted(self._going):
            if not self._r.tiers[tier].extents.total and not self._resizing.is_at_work(tier):
                self._going.discard(tier)
                self._r.tiers[tier].gone = True
                self._r.out.append(Left(tier))
        waits = _NEXT_STEP_S if self._coming else _NEXT_LOOK_S if self._going else math.inf
        self._next_step = now + waits

    def wakes_at(self) -> float:
        """When there is something to go on with."""
        return self._next_step

    def _join(self, spec: TierSpec) -> None:
        tier = self._r.join(spec)
        for space in self._r.spaces.values():
            space.pools = (*space.pools, space.pools[-1])
        self._r.out.append(Joined(tier))
