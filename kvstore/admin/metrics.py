"""Prometheus metrics, computed from the daemon's answers to `status` and `figures` at every scrape.

`COUNTERS` lists all counters of the placement core. A test fails if the core counts a name that is neither
listed here nor in `EXPORTED_OTHERWISE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
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
    "tier_fenced": "Times a device was fenced because it did not respond.",
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


class _Reading(Collector):
    """Collects the metrics of one scrape."""

    def __init__(self, status: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        self._status = status
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._process()
        yield from self._tiers()
        yield from self._devices()
        yield from self._network()
        yield from self._events()
        yield from self._tenants()
        yield from self._hits()
        yield from self._counted()
        yield from self._durations()

    def _process(self) -> Iterator[Metric]:
        s = self._status
        yield _gauge("kvstore_up", "1 if the daemon answers.", 1)
        info = GaugeMetricFamily("kvstore_info", "Versions of the daemon.", labels=["version", "nvme_io"])
        info.add_metric([s["version"], s["nvme_io"]], 1)
        yield info
        yield _gauge("kvstore_uptime_seconds", "Seconds since the daemon started to serve.", s["uptime_s"])
        yield _gauge("kvstore_blocks", "Blocks in the index.", s["blocks"])
        yield _gauge("kvstore_namespaces", "Open namespaces.", s["namespaces"])
        yield _gauge("kvstore_connections", "Open client connections.", s["connections"])
        yield _gauge("kvstore_leases", "Leases held by clients.", s["leases"])
        yield _gauge("kvstore_reservations", "Reservations held by clients.", s["reservations"])
        yield _gauge("kvstore_copies_under_way", "Running copies between tiers.", s["copies_under_way"])
        yield _gauge("kvstore_queued_requests", "Requests in the queues of tenants.", s["queued_requests"])
        yield _gauge("kvstore_core_memory_bytes", "Memory of the block index.", s["core_ram_bytes"])
        yield _gauge("kvstore_problems", "Current problems of the daemon.", len(s["problems"]))
        refused = s["refused_requests"]
        yield _counter("kvstore_refused_requests", "Requests refused because their queue was full.", refused)

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._status["tiers"]
        for key, what in (
            ("limit_bytes", "Hard limit of the tier."),
            ("capacity_bytes", "Size of the tier's extents."),
            ("used_bytes", "Bytes used by blocks in the tier."),
        ):
            yield _by(f"kvstore_tier_{key}", what, "tier", [(t["name"], t[key]) for t in tiers])
        for key, what in (
            ("blocks", "Copies of blocks in the tier."),
            ("retired_slots", "Slots taken out of use after bad checksums."),
            ("bandwidth_bytes_per_s", "Recent bandwidth of the tier's device."),
        ):
            name = key.replace("bytes_per_s", "bytes_per_second")
            yield _by(f"kvstore_tier_{name}", what, "tier", [(t["name"], t[key]) for t in tiers])
        for key, what in (
            ("readable", "1 if the tier accepts reads."),
            ("writable", "1 if the tier accepts writes."),
            ("fenced", "1 if the tier's device does not respond."),
        ):
            yield _by(f"kvstore_tier_{key}", what, "tier", [(t["name"], int(t[key])) for t in tiers])
        counters = self._status["counters"]
        for key, what in TIER_COUNTERS.items():
            family = CounterMetricFamily(f"kvstore_{key}", what, labels=["tier"])
            for t in tiers:
                family.add_metric([t["name"]], counters.get(f"{key}_{t['name']}", 0))
            yield family

    def _devices(self) -> Iterator[Metric]:
        devices = self._figures["devices"]
        for key, what in (
            ("queued", "Bytes queued for a device."),
            ("moving", "Bytes being copied from or to a device."),
        ):
            labels = ["tier", "class"]
            family = GaugeMetricFamily(f"kvstore_device_{key}_bytes", what, labels=labels)
            for device in devices:
                for kind, nbytes in device[f"{key}_bytes"].items():
                    family.add_metric([device["tier"], kind], nbytes)
            yield family
        threshold = [(d["tier"], d["admission"]["threshold"]) for d in devices]
        what = "Probability of reuse from which blocks are admitted to the tier."
        yield _by("kvstore_admission_threshold_ratio", what, "tier", threshold)
        budget = [(d["tier"], d["admission"]["bytes_a_day"]) for d in devices]
        yield _by("kvstore_write_budget_bytes_per_day", "Write budget of the tier; 0: none.", "tier", budget)
        for key, what in (
            ("written_bytes", "Bytes written to a tier from the tiers above."),
            ("refused_blocks", "Blocks refused by a tier's admission."),
        ):
            admitted = CounterMetricFamily(f"kvstore_admission_{key}", what, labels=["tier"])
            for device in devices:
                admitted.add_metric([device["tier"]], device["admission"][key])
            yield admitted

    def _network(self) -> Iterator[Metric]:
        network = self._status["network"]
        if network is None:
            return
        yield _gauge("kvstore_network_usable", "1 if the network tier is in use.", int(network["usable"]))
        speed = network["bandwidth_bytes_per_s"]
        yield _gauge(
            "kvstore_network_bandwidth_bytes_per_second", "Recent bandwidth of the network tier.", speed
        )
        yield _gauge(
            "kvstore_network_coming_blocks",
            "Blocks being downloaded from the network tier.",
            network["coming_blocks"],
        )
        yield _gauge(
            "kvstore_network_going_blocks",
            "Blocks being uploaded to the network tier.",
            network["going_blocks"],
        )
        family = CounterMetricFamily(
            "kvstore_network_blocks", "Blocks of the network tier by outcome.", labels=["what"]
        )
        for what, n in network["counters"].items():
            family.add_metric([what.removesuffix("_blocks")], n)
        yield family

    def _events(self) -> Iterator[Metric]:
        events = self._status["events"]
        for key, what in (
            ("batches", "Published batches of KV events."),
            ("dropped_batches", "Batches of KV events dropped because the queue was full."),
            ("stored", "Blocks announced as stored."),
            ("removed", "Blocks announced as removed."),
        ):
            if key in events:
                yield _counter(f"kvstore_events_{key}", what, events[key])

    def _tenants(self) -> Iterator[Metric]:
        for key, what in (
            ("used_bytes", "Bytes used by a tenant's blocks in a tier."),
            ("floor_bytes", "Guaranteed bytes of a tenant in a tier."),
            ("limit_bytes", "Limit of a tenant in a tier; absent: the tier's limit."),
        ):
            family = GaugeMetricFamily(f"kvstore_tenant_{key}", what, labels=["tenant", "tier"])
            for row in self._figures["holdings"]:
                if row[key] is not None:
                    family.add_metric([row["tenant"] or OTHER, row["tier"]], row[key])
            yield family

    def _hits(self) -> Iterator[Metric]:
        """See `core.insight.hit_counters`."""
        for name, (labels, kinds, what) in _HITS.items():
            for unit in ("blocks", "tokens", "bytes"):
                family = CounterMetricFamily(f"kvstore_{name}_{unit}", what, labels=["tenant", *labels])
                for row in self._figures["hits"]:
                    if row["what"] in kinds:
                        said = {"tier": row["tier"], "reason": row["what"]}
                        values = [row["tenant"] or OTHER, *(said[label] for label in labels)]
                        family.add_metric(values, row[unit])
                yield family

    def _counted(self) -> Iterator[Metric]:
        counters = self._status["counters"]
        for key, what in COUNTERS.items():
            yield _counter(f"kvstore_{key}", what, counters.get(key, 0))
        decided = CounterMetricFamily(
            "kvstore_decided_blocks", "Blocks by decision and tier.", labels=["decision", "tier"]
        )
        for row in self._figures["decisions"]:
            decided.add_metric([row["what"], row["tier"] or "all"], row["blocks"])
        yield decided

    def _durations(self) -> Iterator[Metric]:
        f = self._figures
        calls = HistogramMetricFamily(
            "kvstore_call_seconds",
            "Time from a request's arrival to its answer; waited: for a lower tier, for room or a device.",
            labels=["call", "waited"],
        )
        for row in f["calls"]:
            labels = [row["call"], "true" if row["waited"] else "false"]
            calls.add_metric(labels, _buckets(f["bounds_s"], row["counts"]), row["sum_s"])
        yield calls
        copies = HistogramMetricFamily(
            "kvstore_copy_seconds",
            "Duration of copies between tiers, a few blocks each.",
            labels=["source", "target"],
        )
        for row in f["copies"]:
            labels = [row["source"], row["target"]]
            copies.add_metric(labels, _buckets(f["bounds_s"], row["counts"]), row["sum_s"])
        yield copies
        lag = HistogramMetricFamily("kvstore_loop_lag_seconds", "Delay of the daemon's event loop.")
        lag.add_metric([], _buckets(f["bounds_s"], f["loop_lag"]["counts"]), f["loop_lag"]["sum_s"])
        yield lag


def exposition(status: Mapping[str, Any], figures: Mapping[str, Any]) -> bytes:
    """Returns all metrics in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reading(status, figures))
    return generate_latest(registry)


def exposition_of_nothing() -> bytes:
    """Returns the metrics for a daemon that does not answer."""
    return b"# HELP kvstore_up 1 if the daemon answers.\n# TYPE kvstore_up gauge\nkvstore_up 0.0\n"


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value=value)


def _by(name: str, what: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=[label])
    for label_value, value in values:
        family.add_metric([label_value], value)
    return family


def _buckets(bounds_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Returns cumulative counts by upper bound."""
    cumulative, total = [], 0
    for bound, count in zip([*map(str, bounds_s), "+Inf"], counts, strict=True):
        total += count
        cumulative.append((bound, float(total)))
    return cumulative
