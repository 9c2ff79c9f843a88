"""Times the requests of one connection, from reading to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.daemon.operator.latency import Calls


class RequestTimer:
    """The requests of one connection that have no answer yet."""

    def __init__(self, latency: Calls, stopwatch: Callable[[], float]) -> None:
        """Adds to `latency`. `stopwatch` returns seconds."""
        self._latency = latency
        self._stopwatch = stopwatch
        self._began_s: dict[int, tuple[type, float]] = {}
        self._running = 0

    def run(self, message: Any, waited_s: float) -> None:
        """A message runs now, `waited_s` seconds after it was read; the one before has run."""
        self._running = getattr(message, "id", 0)
        if self._running:
            self._began_s[self._running] = type(message), self._stopwatch() - waited_s

    def ran(self) -> None:
        """The message has run. If it is answered later, it has waited."""
        self._running = 0

    def answered(self, answer: Any) -> None:
        """A message is sent, which may answer a request."""
        request = getattr(answer, "id", 0)
        began = self._began_s.pop(request, None)
        if began is not None:
            self._latency.add(began[0], request != self._running, self._stopwatch() - began[1])
