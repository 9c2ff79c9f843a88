"""Prometheus metrics, computed from the daemon's answers to `status` and `figures` at every scrape.

A metric is a line in one of the tables, and `families` lists all of them. A test fails if the core counts a
name that is in none of `COUNTERS`, `TIER_COUNTERS` and `EXPORTED_OTHERWISE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from kvstore.core.insight import hit_counters as hits

OTHER = "(other)"
"""Label of all tenants without a label of their own. No tenant can have this name."""

COUNTERS = {
    "stored_blocks": "Blocks stored by puts.",
    "present_blocks": "Blocks in puts that were already stored.",
    "denied_blocks": "Blocks denied because there was no room.",
    "denied_max_blocks": "Puts cut short because the block table was full.",
    "refused_blocks": "Blocks refused by admission, on put or when written to a lower tier.",
    "written_blocks": "Blocks written to a lower tier.",
    "written_bytes": "Bytes written to a lower tier.",
    "promoted_blocks": "Blocks loaded from a lower tier.",
    "promoted_bytes": "Bytes loaded from a lower tier.",
    "evicted_copies": "Evicted copies of blocks that another tier keeps.",
    "dropped_blocks": "Blocks evicted from every tier.",
    "invalidated_blocks": "Blocks invalidated by clients.",
    "expired_blocks": "Blocks whose time to live ended.",
    "forgotten_blocks": "Blocks deleted with their namespace or tenant.",
    "quarantined_blocks": "Blocks with a wrong checksum.",
    "failed_blocks": "Blocks whose copy between tiers failed.",
    "called_off_blocks": "Blocks whose copy between tiers was canceled.",
    "late_blocks": "Blocks not loaded by the deadline, in all acquires.",
    "not_worth_loading_blocks": "Blocks not loaded because recomputing them is faster, in all requests.",
    "unwritten_blocks": "Blocks not written to a lower tier because its queue was full.",
    "ahead_blocks": "Blocks prefetched behind a chain that was being loaded.",
    "dropped_prefetch_blocks": "Blocks of prefetch requests that were not started.",
    "hbm_full_requests": "Acquires served from DRAM because the GPU pool was full.",
    "busy_requests": "Requests answered with Busy.",
    "tier_fences": "Times a device was fenced because it did not respond.",
    "tier_closed": "Times a device was suspended after failures.",
    "renewed_extents": "Extents reallocated for another tenant.",
    "removed_extents": "Extents removed to shrink a tier.",
}
"""Counters of the core and their help texts, each exported as `kvstore_NAME_total`."""

TIER_COUNTERS = {
    "restored_blocks": "Blocks recovered at start.",
    "scrub_passes": "Completed scrubs of the whole tier.",
    "scrubbed_blocks": "Blocks verified by the scrubber.",
}
"""Counters of the core per tier (`NAME_TIER` in its status), exported with a label `tier`."""

EXPORTED_OTHERWISE = {
    "hit_blocks": "kvstore_hit_blocks_total counts each block of a prompt once",
    "served_bytes": "kvstore_delivered_bytes_total",
}
"""Counters of the core that are not exported, and the metrics to use instead."""

Table = dict[str, dict[str, tuple[str, str]]]
"""Metrics by source (see `_sources`): the name of each, its name in the rows of the source, its help text."""

_GAUGES: Table = {
    "daemon": {
        "up": ("up", "1 if the daemon answers."),
        "uptime_seconds": ("uptime_s", "Seconds since the daemon started to serve."),
        "blocks": ("blocks", "Blocks in the index."),
        "namespaces": ("namespaces", "Open namespaces."),
        "connections": ("connections", "Open client connections."),
        "leases": ("leases", "Leases held by clients."),
        "reservations": ("reservations", "Reservations held by clients."),
        "copies_under_way": ("copies_under_way", "Running copies between tiers."),
        "queued_requests": ("queued_requests", "Requests in the queues of tenants."),
        "core_memory_bytes": ("core_ram_bytes", "Memory of the block index and of presence tables."),
        "problems": ("n_problems", "Current problems of the daemon."),
    },
    "tier": {
        "tier_limit_bytes": ("limit_bytes", "Hard limit of the tier."),
        "tier_capacity_bytes": ("capacity_bytes", "Size of the tier's extents."),
        "tier_used_bytes": ("used_bytes", "Bytes used by blocks in the tier."),
        "tier_blocks": ("blocks", "Copies of blocks in the tier."),
        "tier_retired_slots": ("retired_slots", "Slots taken out of use after bad checksums."),
        "tier_bandwidth_bytes_per_second": (
            "bandwidth_bytes_per_s",
            "Recent bandwidth of the tier's device.",
        ),
        "tier_readable": ("readable", "1 if the tier accepts reads."),
        "tier_writable": ("writable", "1 if the tier accepts writes."),
        "tier_fenced": ("fenced", "1 if the tier's device does not respond."),
    },
    "admission": {
        "admission_threshold_ratio": (
            "threshold",
            "Probability of reuse from which blocks are admitted to the tier.",
        ),
        "write_budget_bytes_per_day": ("bytes_a_day", "Write budget of the tier; 0: none."),
    },
    "class": {
        "device_queued_bytes": ("queued_bytes", "Bytes queued for a device."),
        "device_moving_bytes": ("moving_bytes", "Bytes being copied from or to a device."),
    },
    "network": {
        "network_usable": ("usable", "1 if the network tier is in use."),
        "network_bandwidth_bytes_per_second": (
            "bandwidth_bytes_per_s",
            "Recent bandwidth of the network tier.",
        ),
        "network_coming_blocks": ("coming_blocks", "Blocks being downloaded from the network tier."),
        "network_going_blocks": ("going_blocks", "Blocks being uploaded to the network tier."),
    },
    "tenant": {
        "tenant_used_bytes": ("used_bytes", "Bytes used by a tenant's blocks in a tier."),
        "tenant_floor_bytes": ("floor_bytes", "Guaranteed bytes of a tenant in a tier."),
        "tenant_limit_bytes": ("limit_bytes", "Limit of a tenant in a tier; absent: the tier's limit."),
    },
}
"""Gauges `kvstore_NAME`."""

_COUNTERS: Table = {
    "daemon": {
        "refused_requests": ("refused_requests", "Requests refused because their queue was full."),
    },
    "admission": {
        "admission_written_bytes": ("written_bytes", "Bytes written to a tier from the tiers above."),
        "admission_refused_blocks": ("refused_blocks", "Blocks refused by a tier's admission."),
    },
    "network_outcome": {
        "network_blocks": ("blocks", "Blocks of the network tier by outcome."),
    },
    "events": {
        "events_batches": ("batches", "Published batches of KV events."),
        "events_dropped_batches": (
            "dropped_batches",
            "Batches of KV events dropped because the queue was full.",
        ),
        "events_stored": ("stored", "Blocks announced as stored."),
        "events_removed": ("removed", "Blocks announced as removed."),
    },
    "tracing": {
        "traces_exported_requests": ("exported_requests", "Requests whose spans the collector has taken."),
        "traces_dropped_requests": (
            "dropped_requests",
            "Requests whose spans were dropped: the queue was full, or the collector did not take them.",
        ),
    },
    "decision": {
        "decided_blocks": ("blocks", "Blocks by decision and tier."),
    },
    "core": {name: (name, what) for name, what in COUNTERS.items()},
    "core_tier": {name: (name, what) for name, what in TIER_COUNTERS.items()},
}
"""Counters `kvstore_NAME_total`."""

_HITS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "requested": (
        (),
        (hits.REQUESTED,),
        "Requested by prompts, in whole blocks; each block is counted once, at its first request. "
        "The hit ratio is hit / requested, the delivered ratio delivered / requested.",
    ),
    "hit": (("tier",), (hits.FOUND,), "Requested and stored at that time, by tier."),
    "missed": ((), (hits.MISSED,), "Requested and not stored at that time."),
    "delivered": (("tier",), (hits.DELIVERED,), "Delivered to an engine, by the tier where it was found."),
    "undelivered": (
        ("reason",),
        hits.REASONS,
        "Found and not delivered, by reason. Blocks that the engine did not fetch have no reason.",
    ),
}
"""Hit counters: labels besides the tenant, the kinds that each sums, and its help text."""

_UNITS = "blocks", "tokens", "bytes"
"""Units of the hit counters."""

_DURATIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "call_seconds": (
        ("call", "waited"),
        "Time from a request's arrival to its answer; waited: for a lower tier, for room or a device.",
    ),
    "copy_seconds": (("source", "target"), "Duration of copies between tiers, a few blocks each."),
    "loop_lag_seconds": ((), "Delay of the daemon's event loop."),
}
"""Histograms `kvstore_NAME`: labels and help text."""

_INFO: tuple[str, tuple[str, ...], str] = "kvstore_info", ("version", "nvme_io"), "Versions of the daemon."

_SOURCE_LABELS: dict[str, tuple[str, ...]] = {
    "core_tier": ("tier",),
    "tier": ("tier",),
    "admission": ("tier",),
    "class": ("tier", "class"),
    "tenant": ("tenant", "tier"),
    "decision": ("decision", "tier"),
    "network_outcome": ("what",),
}
"""The labels of each source in `_GAUGES` and `_COUNTERS` that has any."""

LABELS = {
    "call": "the kind of request",
    "class": "the class of copies in a device's queue",
    "decision": "the decision about a block, as in the event log",
    "nvme_io": "the I/O engine of the NVMe tier",
    "reason": "why a found block was not delivered",
    "source": "the tier that a block is copied from",
    "target": "the tier that a block is copied to",
    "tenant": f"the tenant; `{OTHER}`: all but the largest tenants",
    "tier": "the tier: `dram`, `nvme` or the name of another device, a GPU pool such as `hbm0`, or `network`",
    "version": "the version of the daemon",
    "waited": "`true` if the request waited for a lower tier, for room or a device",
    "what": "the outcome for a block of the network tier",
}
"""The meaning of each label."""


@dataclass(frozen=True, slots=True)
class Family:
    """The description of a metric, by its name in queries. `kind`: gauge, counter or histogram."""

    name: str
    kind: str
    about: str
    labels: tuple[str, ...]


def families() -> Iterator[Family]:
    """Yields the description of every metric that a daemon can export."""
    name, labels, about = _INFO
    yield Family(name, "gauge", about, labels)
    for kind, suffix, table in (("gauge", "", _GAUGES), ("counter", "_total", _COUNTERS)):
        for source, metrics in table.items():
            for name, (_, about) in metrics.items():
                yield Family(f"kvstore_{name}{suffix}", kind, about, _SOURCE_LABELS.get(source, ()))
    for name, (labels, _, about) in _HITS.items():
        for unit in _UNITS:
            yield Family(f"kvstore_{name}_{unit}_total", "counter", about, ("tenant", *labels))
    for name, (labels, about) in _DURATIONS.items():
        yield Family(f"kvstore_{name}", "histogram", about, labels)


Encode = Callable[[CollectorRegistry], bytes]
"""Makes text of metrics."""

Answer = Mapping[str, Any]
"""An answer of the daemon, or a row of one."""

Rows = Sequence[tuple[Sequence[str], Answer]]
"""Rows of numbers, each with the values of the labels."""


def _sources(status: Answer, figures: Answer) -> dict[str, Rows]:
    """Returns the rows of each source. Without a network tier, its sources are absent."""
    tiers, devices, network = status["tiers"], figures["devices"], status["network"]
    daemon = {**status, "up": 1, "n_problems": len(status["problems"])}
    counters = dict.fromkeys(COUNTERS, 0) | status["counters"]
    sources: dict[str, Rows] = {
        "daemon": [([], daemon)],
        "core": [([], counters)],
        "core_tier": [([t["name"]], _of_tier(counters, t["name"])) for t in tiers],
        "tier": [([t["name"]], t) for t in tiers],
        "admission": [([d["tier"]], d["admission"]) for d in devices],
        "class": [
            ([d["tier"], kind], {key: d[key][kind] for key in ("queued_bytes", "moving_bytes")})
            for d in devices
            for kind in d["queued_bytes"]
        ],
        "events": [([], status["events"])],
        "tracing": [([], status.get("tracing", {}))],
        "tenant": [([row["tenant"] or OTHER, row["tier"]], row) for row in figures["holdings"]],
        "decision": [([row["what"], row["tier"] or "all"], row) for row in figures["decisions"]],
    }
    if network is not None:
        outcomes = [([k.removesuffix("_blocks")], {"blocks": n}) for k, n in network["counters"].items()]
        sources |= {"network": [([], network)], "network_outcome": outcomes}
    return sources


def _of_tier(counters: Answer, tier: str) -> Answer:
    return {name: counters.get(f"{name}_{tier}", 0) for name in TIER_COUNTERS}


class _Reading(Collector):
    """Collects the metrics of one scrape."""

    def __init__(self, status: Answer, figures: Answer) -> None:
        self._status = status
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        name, versions, about = _INFO
        info = GaugeMetricFamily(name, about, labels=versions)
        info.add_metric([self._status[version] for version in versions], 1)
        yield info
        sources = _sources(self._status, self._figures)
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for source, metrics in table.items():
                labels, rows = _SOURCE_LABELS.get(source, ()), sources.get(source, [([], {})])
                for name, (key, what) in metrics.items():
                    if rows and not any(key in row for _, row in rows):
                        continue
                    family = kind(f"kvstore_{name}", what, labels=labels)
                    for values, row in rows:
                        if row[key] is not None:
                            family.add_metric(values, row[key])
                    yield family
        yield from self._hits()
        yield from self._durations()

    def _hits(self) -> Iterator[Metric]:
        """See `core.insight.hit_counters`."""
        for name, (labels, kinds, what) in _HITS.items():
            for unit in _UNITS:
                family = CounterMetricFamily(f"kvstore_{name}_{unit}", what, labels=["tenant", *labels])
                for row in self._figures["hits"]:
                    if row["what"] in kinds:
                        named = {"tier": row["tier"], "reason": row["what"]}
                        values = [row["tenant"] or OTHER, *(named[label] for label in labels)]
                        family.add_metric(values, row[unit])
                yield family

    def _durations(self) -> Iterator[Metric]:
        f = self._figures
        bounds = [*map(str, f["bounds_s"]), "+Inf"]
        calls = [([row["call"], "true" if row["waited"] else "false"], row) for row in f["calls"]]
        yield _histogram("call_seconds", bounds, calls)
        copies = [([row["source"], row["target"]], row) for row in f["copies"]]
        yield _histogram("copy_seconds", bounds, copies)
        yield _histogram("loop_lag_seconds", bounds, [([], f["loop_lag"])])


def _histogram(name: str, bounds: Sequence[str], rows: Rows) -> Metric:
    labels, about = _DURATIONS[name]
    family = HistogramMetricFamily(f"kvstore_{name}", about, labels=labels)
    for values, row in rows:
        exemplars = {
            bucket: Exemplar({"trace_id": trace}, seconds, arrived)
            for bucket, trace, seconds, arrived in row.get("exemplars", ())
        }
        counts = accumulate(map(float, row["counts"]))
        pairs = enumerate(zip(bounds, counts, strict=True))
        buckets = [(*pair, exemplars[i]) if i in exemplars else pair for i, pair in pairs]
        family.add_metric(values, buckets, row["sum_s"])
    return family


def exposition(
    status: Mapping[str, Any], figures: Mapping[str, Any], encode: Encode = generate_latest
) -> bytes:
    """Returns all metrics in Prometheus' text format 0.0.4, or as encoded otherwise."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reading(status, figures))
    return encode(registry)


def open_metrics(status: Mapping[str, Any], figures: Mapping[str, Any]) -> bytes:
    """Returns all metrics in the format OpenMetrics 1.0, with exemplars of traced requests."""
    return exposition(status, figures, openmetrics.generate_latest)


def exposition_of_nothing(end: bytes = b"") -> bytes:
    """Returns the metrics for a daemon that does not answer, with the `end` of a format."""
    return b"# HELP kvstore_up 1 if the daemon answers.\n# TYPE kvstore_up gauge\nkvstore_up 0.0\n" + end
