"""Background scrubber: verifies every stored block at a bounded rate, so that damage is found early."""

from __future__ import annotations

import asyncio

from kvstore.core.events import Scrub
from kvstore.core.view import View
from kvstore.daemon.runtime.ports import Core

_STEP_BYTES = 4 << 20


class Scrubber:
    """Sends `Scrub` events to the core, one tier after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: Core, view: View) -> None:
        self._loop = loop
        self._core = core
        self._view = view
        self._next = 0
        self._bytes_per_s = 0
        self._timer: asyncio.TimerHandle | None = None

    def set_rate(self, bytes_per_s: int) -> None:
        """Sets the rate of all tiers together. 0 stops the scrubber."""
        self.stop()
        self._bytes_per_s = bytes_per_s
        if bytes_per_s:
            self._timer = self._loop.call_later(_STEP_BYTES / bytes_per_s, self._step)

    def stop(self) -> None:
        """Sends no more events."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        tier, self._next = self._next, (self._next + 1) % len(self._view.tiers)
        self._timer = self._loop.call_later(_STEP_BYTES / self._bytes_per_s, self._step)
        self._core.handle(Scrub(tier, _STEP_BYTES))
