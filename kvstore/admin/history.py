"""History of the last hour: one point every ten seconds, kept in this process's memory.

A restart of this process clears it. Points at which the daemon does not answer, or has restarted, are gaps.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.admin.daemon_state import DaemonState
from kvstore.core.insight.hit_counters import DELIVERED, FOUND, MISSED, REASONS, REQUESTED
from kvstore.errors import KVStoreError

EVERY_S = 10.0
POINTS = 360
_DAY_S = 86_400
_UNITS = ("blocks", "tokens", "bytes")
_CALL = "acquire"

Sums = Counter[tuple[str, ...]]
"""Counts by name, such as ("delivered_bytes", "dram"), ("acquire", "3") or ("decided", "evicted", "nvme")."""


@dataclass(frozen=True, slots=True)
class Point:
    """One moment. `counts` holds the increments since the previous point; None in a gap."""

    at_s: float
    seconds: float | None = None
    counts: Sums | None = None
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: Mapping[str, int] = field(default_factory=dict)
    p50_s: float | None = None
    p99_s: float | None = None


class History:
    """The latest points, and the bytes written to each tier today (UTC)."""

    def __init__(self, points: int = POINTS) -> None:
        self._points: deque[Point] = deque(maxlen=points)
        self._previous: tuple[str, Sums] | None = None
        self._devices: list[dict[str, Any]] = []
        self._today: Counter[str] = Counter()
        self._today_since_s = 0.0
        self._continuous = False

    def __len__(self) -> int:
        return len(self._points)

    def miss(self, at_s: float) -> None:
        """Adds a gap: the daemon did not answer."""
        self._points.append(Point(at_s))
        self._continuous = False

    def add(self, at_s: float, status: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """Adds a point from the daemon's answers at Unix time `at_s`."""
        instance, sums = status["instance"], _sums(figures)
        self._count_today(at_s, status, sums)
        counts = seconds = None
        if self._continuous and self._previous is not None and self._previous[0] == instance:
            before, seconds = self._previous[1], at_s - self._points[-1].at_s
            # Counts of a removed device are no longer reported.
            counts = Counter({name: n - before[name] for name, n in sums.items()})
            # A gap: the clock was set back, or the counts belong to another daemon.
            if seconds <= 0 or min(counts.values(), default=0) < 0:
                counts = seconds = None
        bounds = figures["bounds_s"]
        calls = [0 if counts is None else counts[_CALL, str(n)] for n in range(len(bounds) + 1)]
        self._points.append(
            Point(
                at_s,
                seconds,
                counts,
                {tier["name"]: tier["used_bytes"] for tier in status["tiers"]},
                {tier["name"]: tier["limit_bytes"] for tier in status["tiers"]},
                quantile(bounds, calls, 0.5),
                quantile(bounds, calls, 0.99),
            )
        )
        self._previous, self._continuous, self._devices = (instance, sums), True, figures["devices"]

    def _count_today(self, at_s: float, status: Mapping[str, Any], sums: Sums) -> None:
        midnight_s, start_s = at_s - at_s % _DAY_S, at_s - status["uptime_s"]
        if self._today_since_s < midnight_s:
            self._today.clear()
            self._today_since_s = midnight_s
        if self._previous is None:
            self._today_since_s = start_s if start_s >= midnight_s else at_s
            if start_s < midnight_s:
                return
        before: Sums = Counter()
        if self._previous is not None and self._previous[0] == status["instance"]:
            before = self._previous[1]
        for tier in status["tiers"]:
            key = "written_bytes", tier["name"]
            self._today[tier["name"]] += max(0, sums[key] - before[key])

    def columns(self) -> dict[str, Any]:
        """Returns the history as columns: one list per quantity, one element per point, None in gaps."""
        points = list(self._points)

        def counted(*name: str) -> list[int | None]:
            return [None if p.counts is None else p.counts[name] for p in points]

        def ratio(what: str) -> list[float | None]:
            return [None if p.counts is None else _ratio(p.counts, what) for p in points]

        tiers = list(dict.fromkeys(name for p in points for name in p.limit_bytes))
        # The network tier has hits but reports no limit.
        found = (name for p in points for name in p.counts or () if name[0] == f"{FOUND}_blocks")
        tiers += [tier for _, tier in dict.fromkeys(found) if tier not in tiers]
        decided = sorted(
            {name for p in points for name, n in (p.counts or {}).items() if name[0] == "decided" and n}
        )
        return {
            "every_s": EVERY_S,
            "at_s": [p.at_s for p in points],
            "seconds": [p.seconds for p in points],
            "hit_ratio": ratio(FOUND),
            "delivered_ratio": ratio(DELIVERED),
            **{f"{what}_blocks": counted(f"{what}_blocks", "") for what in (REQUESTED, *REASONS)},
            "acquires": [_calls(p) for p in points],
            "acquire_p50_s": [p.p50_s for p in points],
            "acquire_p99_s": [p.p99_s for p in points],
            **{f"missed_{unit}": counted(f"{MISSED}_{unit}", "") for unit in _UNITS},
            "tiers": [
                {
                    "name": tier,
                    "used_bytes": [p.used_bytes.get(tier) for p in points],
                    "limit_bytes": [p.limit_bytes.get(tier) for p in points],
                    "found_blocks": counted(f"{FOUND}_blocks", tier),
                    **{f"served_{unit}": counted(f"{DELIVERED}_{unit}", tier) for unit in _UNITS},
                    "written_bytes": counted("written_bytes", tier),
                }
                for tier in tiers
            ],
            "decisions": [
                {"what": what, "tier": tier, "blocks": counted("decided", what, tier)}
                for _, what, tier in decided
            ],
            "devices": [{**d, "written_today_bytes": self._today[d["tier"]]} for d in self._devices],
            "today_since_s": self._today_since_s,
        }


async def keep(history: History, daemon: DaemonState, clock: Callable[[], float] = time.time) -> None:
    """Adds a point every `EVERY_S` seconds until cancelled. `clock` returns Unix time in seconds."""
    while True:
        try:
            status, figures = await daemon.status(), await daemon.figures()
        except KVStoreError:
            history.miss(clock())
        else:
            history.add(clock(), status, figures)
        await asyncio.sleep(EVERY_S)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Returns a quantile of a histogram in seconds, interpolated within its bucket; None if it is empty."""
    wanted, seen, low = share * sum(counts), 0, 0.0
    if not wanted:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if seen + count >= wanted:
            return low + (bound - low) * (wanted - seen) / count
        seen, low = seen + count, bound
    return low


def _sums(figures: Mapping[str, Any]) -> Sums:
    """Returns all monotonic counts, summed over tenants."""
    sums: Sums = Counter()
    for row in figures["hits"]:
        for unit in _UNITS:
            sums[f"{row['what']}_{unit}", row["tier"]] += row[unit]
    for row in figures["calls"]:
        if row["call"] == _CALL:
            for n, count in enumerate(row["counts"]):
                sums[_CALL, str(n)] += count
    for row in figures["decisions"]:
        sums["decided", row["what"], row["tier"]] += row["blocks"]
    for device in figures["devices"]:
        sums["written_bytes", device["tier"]] += device["admission"]["written_bytes"]
    return sums


def _calls(point: Point) -> int | None:
    return None if point.counts is None else sum(n for name, n in point.counts.items() if name[0] == _CALL)


def _ratio(counts: Sums, what: str) -> float | None:
    """Returns found or delivered blocks divided by requested blocks; None if no block was requested."""
    requested = counts[f"{REQUESTED}_blocks", ""]
    blocks = sum(n for name, n in counts.items() if name[0] == f"{what}_blocks")
    return blocks / requested if requested else None
