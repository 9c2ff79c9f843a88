"""Has every block looked at in turn, slowly, so that what rots is found before it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized

from kvstore.core.events import Scrub

_TURN_BYTES = 4 << 20


class Scrubber:
    """Sends `Scrub` events for one tier after the other, together at most `bytes_per_s`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tiers: Sized, handle: Callable[[Scrub], None]
    ) -> None:
        self._loop = loop
        self._tiers = tiers
        self._handle = handle
        self._next = 0
        self._bytes_per_s = 0
        self._timer: asyncio.TimerHandle | None = None

    def set_rate(self, bytes_per_s: int) -> None:
        """From now on; 0 stops it."""
        self.stop()
        self._bytes_per_s = bytes_per_s
        if bytes_per_s:
            self._timer = self._loop.call_later(_TURN_BYTES / bytes_per_s, self._turn)

    def stop(self) -> None:
        """No more events."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        tier, self._next = self._next, (self._next + 1) % len(self._tiers)
        self._timer = self._loop.call_later(_TURN_BYTES / self._bytes_per_s, self._turn)
        self._handle(Scrub(tier, _TURN_BYTES))
