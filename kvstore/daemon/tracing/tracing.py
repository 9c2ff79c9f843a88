"""Starts and stops the export of traces, as configured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvstore.config import Tracing as Settings
from kvstore.daemon.runtime.problems import Problems
from kvstore.daemon.tracing.exporter import Exporter
from kvstore.daemon.tracing.request_traces import ConnectionTraces
from kvstore.errors import ConfigError


@dataclass(slots=True, eq=False)
class Tracing:
    """The traces of one daemon. `_clock` returns Unix time in s.

    `_stopwatch` returns s and advances while a request runs.
    """

    _settings: Settings
    _problems: Problems
    _instance: bytes
    _clock: Callable[[], float]
    _stopwatch: Callable[[], float]
    _exporter: Exporter | None = field(init=False, default=None)

    def start(self) -> None:
        """Starts to export if this is configured. A failure is reported as a problem."""
        if self._settings.collector is None:
            return
        resource = {"service.name": "kvstore", "service.instance.id": self._instance.hex()}
        try:
            self._exporter = Exporter(self._settings.collector, resource)
        except ConfigError as error:
            self._problems.report(f"no traces: {error}")

    def of_connection(self) -> ConnectionTraces | None:
        """Returns the traces of a new connection, None if none are exported."""
        if self._exporter is None:
            return None
        return ConnectionTraces(self._exporter.put, self._clock, self._stopwatch)

    def close(self) -> list[threading.Thread]:
        """Begins to export waiting traces. Returns the threads that do, which may never end."""
        return [self._exporter.close()] if self._exporter is not None else []

    def status(self) -> dict[str, Any]:
        """Returns the part of `kvstore status`, empty if no traces are exported."""
        if self._exporter is None:
            return {}
        return {"collector": self._exporter.collector, **self._exporter.counts}
