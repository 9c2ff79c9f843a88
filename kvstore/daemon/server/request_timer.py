"""Measures the latency of one connection's requests, from the read to the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvstore.daemon.operator.latency import Calls
from kvstore.daemon.tracing.request_traces import ConnectionTraces


@dataclass(slots=True)
class RequestTimer:
    """The unanswered requests of one connection. `_stopwatch` returns seconds.

    `running`: the number of the request that runs, 0 for none. Requests answered later have waited.
    `_traces`: None if no traces are exported.
    """

    _latency: Calls
    _stopwatch: Callable[[], float]
    _traces: ConnectionTraces | None = None
    _began_s: dict[int, tuple[type, float]] = field(default_factory=dict)
    running: int = 0

    def run(self, message: Any, waited_s: float) -> None:
        """Starts the time of a message that was read `waited_s` seconds ago."""
        self.running = getattr(message, "id", 0)
        if self.running:
            self._began_s[self.running] = type(message), self._stopwatch() - waited_s
            if self._traces is not None:
                self._traces.begin(message, waited_s)

    def answered(self, answer: Any) -> None:
        """Records the latency of the request that this message answers, if it is an answer."""
        request = getattr(answer, "id", 0)
        began = self._began_s.pop(request, None)
        if began is not None:
            trace = self._traces.answered(answer) if self._traces is not None else None
            self._latency.add(began[0], request != self.running, self._stopwatch() - began[1], trace)
