"""Latency histograms of requests, copies and the event loop."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvstore.daemon.tracing.request_traces import RequestTrace

BOUNDS_S = tuple(16e-6 * 2**k for k in range(20))
"""Upper bounds of buckets, from 16 microseconds to 8.4 s; a last bucket has no bound."""

_LAG_EVERY_S = 0.1


class Exemplar(NamedTuple):
    """A traced request: the id of its trace in hex, its duration (s), and its arrival (Unix time, s)."""

    trace: str
    seconds: float
    arrived: float


class Histogram:
    """Counts durations by bucket, and sums them. `exemplars` has the last traced request of buckets."""

    __slots__ = ("counts", "exemplars", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def add(self, seconds: float) -> int:
        """Adds one duration. Returns the number of its bucket."""
        bucket = bisect_left(BOUNDS_S, seconds)
        self.counts[bucket] += 1
        self.sum_s += seconds
        return bucket

    def plain(self) -> dict[str, Any]:
        """Returns plain values. An exemplar has the number of its bucket first."""
        exemplars = [(bucket, *exemplar) for bucket, exemplar in self.exemplars.items()]
        return {"counts": list(self.counts), "sum_s": self.sum_s, "exemplars": exemplars}


class Calls:
    """Latency of requests, from the read to the answer, by message and by whether the request waited.

    A request that waited was answered later than it ran: for blocks of a lower tier, for room, for a device.
    """

    def __init__(self) -> None:
        self._at_once: dict[type, Histogram] = {}
        self._waited: dict[type, Histogram] = {}

    def add(self, message: type, waited: bool, seconds: float, trace: RequestTrace | None = None) -> None:
        """Adds one answer. `trace`: that of the request, if it is traced."""
        book = self._waited if waited else self._at_once
        histogram = book.get(message)
        if histogram is None:
            histogram = book[message] = Histogram()
        bucket = histogram.add(seconds)
        if trace is not None:
            histogram.exemplars[bucket] = Exemplar(trace.context.trace.hex(), seconds, trace.arrived)

    def plain(self) -> list[dict[str, Any]]:
        """Returns plain values."""
        return [
            {"call": message.__name__.lower(), "waited": waited, **histogram.plain()}
            for waited, book in ((False, self._at_once), (True, self._waited))
            for message, histogram in book.items()
        ]


class CopyLatency:
    """Latency of copies between tiers, by the numbers of source and target."""

    def __init__(self) -> None:
        self._by_tiers: defaultdict[tuple[int, int], Histogram] = defaultdict(Histogram)

    def add(self, source: int, target: int, seconds: float) -> None:
        """Adds one copy."""
        self._by_tiers[source, target].add(seconds)

    def items(self) -> Iterable[tuple[tuple[int, int], Histogram]]:
        """Returns the histograms by (source, target)."""
        return self._by_tiers.items()


class Lag:
    """Delay of the event loop: how much later than planned a timer runs, ten times a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stopwatch: Callable[[], float]) -> None:
        self.histogram = Histogram()
        self._loop = loop
        self._stopwatch = stopwatch
        self._due_s = 0.0

    def start(self) -> None:
        """Starts to measure. Never stops."""
        self._due_s = self._stopwatch() + _LAG_EVERY_S
        self._loop.call_later(_LAG_EVERY_S, self._look)

    def _look(self) -> None:
        self.histogram.add(max(0.0, self._stopwatch() - self._due_s))
        self.start()
