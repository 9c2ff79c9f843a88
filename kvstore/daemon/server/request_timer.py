"""Times the requests of one connection, from reading to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.daemon.operator.latency import Calls


class RequestTimer:
    """The requests of one connection that have no answer yet."""

    def __init__(self, latency: Calls, stopwatch: Callable[[], float]) -> None:
        """Adds to `latency`. `stopwatch` returns seconds.

        `running`: the request that runs now, 0 for none. One that is answered after it has run has waited.
        """
        self._latency = latency
        self._stopwatch = stopwatch
        self._began_s: dict[int, tuple[type, float]] = {}
        self.running = 0

    def run(self, message: Any, waited_s: float) -> None:
        """Starts a message, `waited_s` seconds after it was read."""
        self.running = getattr(message, "id", 0)
        if self.running:
            self._began_s[self.running] = type(message), self._stopwatch() - waited_s

    def answered(self, answer: Any) -> None:
        """Ends the request that a message answers, if it is an answer."""
        request = getattr(answer, "id", 0)
        began = self._began_s.pop(request, None)
        if began is not None:
            self._latency.add(began[0], request != self.running, self._stopwatch() - began[1])
