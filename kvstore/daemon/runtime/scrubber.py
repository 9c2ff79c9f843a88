"""Background scrubber: verifies every stored block at a bounded rate, so that damage is found early."""

from __future__ import annotations

import asyncio

from kvstore.core.events import Scrub
from kvstore.core.queues.device_queue import MEASURED_BYTES
from kvstore.daemon.runtime.executor import Executor

_STEP_BYTES = MEASURED_BYTES
"""So that each step also measures the device: one that was slow is known to be fast again."""


class Scrubber:
    """Sends `Scrub` events to the core, one tier after the other."""

    def __init__(self, core: Executor) -> None:
        self._core = core
        self._last = -1
        self._bytes_per_s = 0
        self._timer: asyncio.TimerHandle | None = None

    def set_rate(self, bytes_per_s: int) -> None:
        """Sets the rate of all tiers together. 0 stops the scrubber."""
        self.stop()
        self._bytes_per_s = bytes_per_s
        if bytes_per_s:
            self._timer = self._core.loop.call_later(_STEP_BYTES / bytes_per_s, self._step)

    def stop(self) -> None:
        """Sends no more events."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        there = [tier.number for tier in self._core.view.tiers if not tier.gone]
        self._last = next((number for number in there if number > self._last), there[0])
        self._timer = self._core.loop.call_later(_STEP_BYTES / self._bytes_per_s, self._step)
        self._core.handle(Scrub(self._last, _STEP_BYTES))
