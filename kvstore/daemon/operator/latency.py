"""What is measured while the daemon runs: how long calls, copies and the event loop's turns take."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

BOUNDS_S = tuple(16e-6 * 2**k for k in range(20))
"""Upper bounds of buckets, from 16 microseconds to 8.4 s; a last bucket has no bound."""

_LAG_EVERY_S = 0.1


class Histogram:
    """Durations by bucket, and their sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One more duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def plain(self) -> dict[str, Any]:
        """As it goes over the wire."""
        return {"counts": list(self.counts), "sum_s": self.sum_s}


class Calls:
    """How long requests took, from when they were read to their answer, by message and whether they waited.

    One that waited was answered later than it was run: for blocks of a lower tier, for room, for a device.
    """

    def __init__(self) -> None:
        self._at_once: dict[type, Histogram] = {}
        self._waited: dict[type, Histogram] = {}

    def add(self, message: type, waited: bool, seconds: float) -> None:
        """One more answer."""
        book = self._waited if waited else self._at_once
        histogram = book.get(message)
        if histogram is None:
            histogram = book[message] = Histogram()
        histogram.add(seconds)

    def plain(self) -> list[dict[str, Any]]:
        """As it goes over the wire."""
        return [
            {"call": message.__name__.lower(), "waited": waited, **histogram.plain()}
            for waited, book in ((False, self._at_once), (True, self._waited))
            for message, histogram in book.items()
        ]


class Lag:
    """How much later than asked for the event loop comes back, looked at ten times a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stopwatch: Callable[[], float]) -> None:
        self.histogram = Histogram()
        self._loop = loop
        self._stopwatch = stopwatch
        self._due_s = 0.0

    def start(self) -> None:
        """From now on, for as long as the loop turns."""
        self._due_s = self._stopwatch() + _LAG_EVERY_S
        self._loop.call_later(_LAG_EVERY_S, self._look)

    def _look(self) -> None:
        self.histogram.add(max(0.0, self._stopwatch() - self._due_s))
        self.start()
