"""The command that watches a daemon: rates and latencies between two samples."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from rich.console import Group
from rich.live import Live
from typer import Option

from kvstore import Client
from kvstore.cli.shared.options import DaemonOptions, named, url_of
from kvstore.cli.shared.output import console, percent, table, tier_table
from kvstore.config import format_size, parse_duration
from kvstore.core.insight.hit_counters import DELIVERED, FOUND, MISSED, REASONS, REQUESTED
from kvstore.errors import MisuseError

_SHOWN_CALLS = ("lookup", "acquire", "reserve", "commit", "prefetch")
_SHOWN_TENANTS = 8
_DEADLINE_S = 5.0


def top(
    *,
    every: Annotated[str, Option(metavar="TIME", help="Time between two samples, 0.1s to 1h.")] = "1s",
    count: Annotated[int, Option(min=0, help="Number of samples; 0: until Ctrl-C.")] = 0,
    daemon: DaemonOptions,
) -> None:
    """Watch tiers, hits, calls and tenants of a running daemon.

    Shows rates since the previous sample. Hit ratios are blocks found and blocks delivered, divided by blocks
    requested; each block of a prompt is counted once. With --json, prints one object per line. For operators.

    Example: kvstore top --every 5s
    """
    every_s = named("--every", parse_duration, every)
    if not 0.1 <= every_s <= 3600:
        raise MisuseError(f"--every is {every}", "0.1s to 1h")
    with Client(url_of(daemon.socket), deadline_s=_DEADLINE_S) as client:
        first = sample(client)
        rates = _rates(client, first, every_s, count)
        if daemon.as_json or not sys.stdout.isatty():
            for seen in rates:
                daemon.show(seen, partial(_rendered, seen))
            return
        with Live(_rendered(between(first, first)), console=console(), screen=True) as live:
            for seen in rates:
                live.update(_rendered(seen))


def _rates(client: Client, before: dict[str, Any], every_s: float, count: int) -> Iterator[dict[str, Any]]:
    """Yields the rates since the previous sample every `every_s` seconds, `count` times; 0: endlessly."""
    for _ in range(count) if count else itertools.count():
        time.sleep(every_s)
        now = sample(client)
        yield between(before, now)
        before = now


def sample(client: Client) -> dict[str, Any]:
    """Returns the daemon's status and counters with the time. Raises DeniedError, UnavailableError."""
    return {"at": time.monotonic(), **client.control("status"), **client.control("figures")}


def between(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rates per second between two samples, and the state at the later one.

    Raises KeyError for malformed samples. If the daemon has restarted, all rates are 0.
    """
    if before["instance"] != now["instance"]:
        before = {**now, "at": before["at"], "calls": [], "hits": [], "decisions": [], "devices": []}
    seconds = max(now["at"] - before["at"], 1e-9)
    prompts = _increments(before["hits"], now["hits"], ("tenant", "what", "tier"), "blocks", "bytes")
    return {
        "seconds": seconds,
        "uptime_s": now["uptime_s"],
        "blocks": now["blocks"],
        "connections": now["connections"],
        "queued_requests": now["queued_requests"],
        "problems": now["problems"],
        "tiers": [_tier(tier, before, now, prompts, seconds) for tier in now["tiers"]],
        **_ratios(prompts),
        "requested_blocks_per_s": _sum(prompts, REQUESTED) / seconds,
        "missed_blocks_per_s": _sum(prompts, MISSED) / seconds,
        **{f"{reason}_blocks_per_s": _sum(prompts, reason) / seconds for reason in REASONS},
        "calls": _calls(before, now, seconds),
        "tenants": _tenants(now, prompts, seconds),
        "decisions": [
            {"what": row["what"], "tier": row["tier"], "blocks_per_s": row["blocks"] / seconds}
            for row in _increments(before["decisions"], now["decisions"], ("what", "tier"), "blocks")
            if row["blocks"]
        ],
    }


def _increments(
    before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]], by: tuple[str, ...], *sums: str
) -> list[dict[str, Any]]:
    """Returns the rows of `now` with their sums reduced by those of `before`."""
    known = {tuple(row[name] for name in by): row for row in before}
    return [
        {**row, **{name: row[name] - known.get(tuple(row[k] for k in by), {}).get(name, 0) for name in sums}}
        for row in now
    ]


def _tier(
    tier: Mapping[str, Any],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    prompts: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    name = tier["name"]

    def written(sampled: Mapping[str, Any]) -> int:
        return sum(d["admission"]["written_bytes"] for d in sampled["devices"] if d["tier"] == name)

    mine = [row for row in prompts if row["tier"] == name]
    return {
        "name": name,
        "used_bytes": tier["used_bytes"],
        "limit_bytes": tier["limit_bytes"],
        "hit_blocks_per_s": _sum(mine, FOUND) / seconds,
        "served_bytes_per_s": _sum(mine, DELIVERED, "bytes") / seconds,
        "written_bytes_per_s": (written(now) - written(before)) / seconds,
        "state": "hangs" if tier["fenced"] else "ok" if tier["readable"] and tier["writable"] else "fails",
    }


def _sum(prompts: Iterable[Mapping[str, Any]], what: str, unit: str = "blocks") -> int:
    return sum(row[unit] for row in prompts if row["what"] == what)


def _ratios(prompts: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns found and delivered blocks divided by requested blocks; None if no block was requested."""
    requested = _sum(prompts, REQUESTED)
    return {
        name: _sum(prompts, what) / requested if requested else None
        for name, what in (("hit_ratio", FOUND), ("delivered_ratio", DELIVERED))
    }


def _calls(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
    """Returns calls per second and latency quantiles, as upper bounds of histogram buckets."""
    counts: dict[str, list[int]] = {}
    for sign, sampled in ((1, now), (-1, before)):
        for row in sampled["calls"]:
            sums = counts.setdefault(row["call"], [0] * len(row["counts"]))
            counts[row["call"]] = [have + sign * n for have, n in zip(sums, row["counts"], strict=True)]
    bounds = [*now["bounds_s"], float("inf")]
    return [
        {
            "call": call,
            "per_s": sum(counts[call]) / seconds,
            "p50_s": _quantile(bounds, counts[call], 0.5),
            "p99_s": _quantile(bounds, counts[call], 0.99),
        }
        for call in _SHOWN_CALLS
        if call in counts
    ]


def _quantile(bounds: list[float], counts: list[int], share: float) -> float | None:
    total, seen = sum(counts), 0
    for bound, count in zip(bounds, counts, strict=True):
        seen += count
        if total and seen >= share * total:
            return bound if bound < float("inf") else bounds[-2]
    return None


def _tenants(now: Mapping[str, Any], prompts: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    used: Counter[str] = Counter()
    for row in now["holdings"]:
        used[row["tenant"]] += row["used_bytes"]
    rows = []
    for tenant, nbytes in used.items():
        mine = [row for row in prompts if row["tenant"] == tenant]
        asked = {"asked_blocks_per_s": _sum(mine, REQUESTED) / seconds}
        rows.append({"tenant": tenant, "used_bytes": nbytes, **asked, **_ratios(mine)})
    return sorted(rows, key=lambda row: (-row["asked_blocks_per_s"], -row["used_bytes"]))


# -- text


def _rendered(seen: Mapping[str, Any]) -> Group:
    ratio = "no requests"
    if seen["hit_ratio"] is not None:
        ratio = f"{percent(seen['hit_ratio'], 1)} found, {percent(seen['delivered_ratio'], 1)} delivered"
    line = (
        f"kvstore, up {seen['uptime_s']:.0f} s: {seen['blocks']} blocks, {seen['connections']} clients, "
        f"{seen['queued_requests']} queued requests; {ratio}, {seen['missed_blocks_per_s']:.0f} missed/s"
    )
    calls = (
        (call["call"], f"{call['per_s']:.0f}", _time(call["p50_s"]), _time(call["p99_s"]))
        for call in seen["calls"]
    )
    tenants = (
        (
            tenant["tenant"] or "(others)",
            format_size(tenant["used_bytes"]),
            f"{tenant['asked_blocks_per_s']:.0f}",
            *(percent(tenant[name], 1) for name in ("hit_ratio", "delivered_ratio")),
        )
        for tenant in seen["tenants"][:_SHOWN_TENANTS]
    )
    decisions = (
        (row["what"], row["tier"] or "all", f"{row['blocks_per_s']:.0f}") for row in seen["decisions"]
    )
    return Group(
        line,
        *seen["problems"],
        tier_table(list(seen["tiers"])),
        table(("call", "calls/s", "p50", "p99"), calls),
        table(("tenant", "used", "requested blocks/s", "found", "delivered"), tenants),
        table(("decision", "tier", "blocks/s"), decisions),
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"
