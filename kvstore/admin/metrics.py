"""Prometheus metrics, made of what the daemon says when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.core.insight import hit_counters as hits

OTHER = "(other)"
"""Stands for all tenants that have no label of their own; none can be called so."""

_COUNTERS = {
    "stored_blocks": "Blocks that were put.",
    "present_blocks": "Blocks that were to be put and were there already.",
    "denied_blocks": "Blocks for which there was no room.",
    "refused_blocks": "Blocks that were not worth storing, or not worth writing to a lower tier.",
    "written_blocks": "Blocks written to a lower tier.",
    "written_bytes": "Bytes written to a lower tier.",
    "promoted_blocks": "Blocks loaded from a lower tier.",
    "promoted_bytes": "Bytes loaded from a lower tier.",
    "evicted_copies": "Copies given up whose block another tier keeps.",
    "dropped_blocks": "Blocks given up altogether.",
    "invalidated_blocks": "Blocks that clients invalidated.",
    "expired_blocks": "Blocks whose time was over.",
    "quarantined_blocks": "Blocks whose checksum did not match.",
    "failed_blocks": "Blocks whose copy between tiers failed.",
    "late_blocks": "Blocks that were not loaded within the deadline, in all acquires.",
    "not_worth_loading_blocks": "Blocks left out because computing them again is faster, in all requests.",
    "unwritten_blocks": "Blocks not written down because the device took no more.",
    "busy_requests": "Requests told to come again later.",
    "tier_fenced": "Times a device was fenced because nothing came back from it.",
    "tier_closed": "Times a device was left alone after it only failed.",
    "renewed_extents": "Extents made anew for another tenant.",
}

_HITS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "requested": (
        (),
        (hits.REQUESTED,),
        "In whole blocks of prompts that were asked for, each counted once, at its first question. "
        "The hit ratio is hit / requested, the delivered ratio delivered / requested.",
    ),
    "hit": (("tier",), (hits.FOUND,), "Found: requested and stored then, by tier, delivered or not."),
    "missed": ((), (hits.MISSED,), "Requested and not stored then."),
    "delivered": (("tier",), (hits.DELIVERED,), "Got by an engine, by the tier in which it was found."),
    "undelivered": (
        ("reason",),
        hits.REASONS,
        "Found and not delivered; the engine had the rest, or asked for less.",
    ),
}
"""Counters of prompts: their labels, what they sum, and what they say."""


class _Reading(Collector):
    """The metrics of one reading."""

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
        yield _gauge("kvstore_up", "Whether the daemon answers.", 1)
        info = GaugeMetricFamily("kvstore_info", "The daemon.", labels=["version", "nvme_io"])
        info.add_metric([s["version"], s["nvme_io"]], 1)
        yield info
        yield _gauge("kvstore_uptime_seconds", "Since the daemon serves.", s["uptime_s"])
        yield _gauge("kvstore_blocks", "Blocks that are known.", s["blocks"])
        yield _gauge("kvstore_namespaces", "Namespaces.", s["namespaces"])
        yield _gauge("kvstore_connections", "Connected clients.", s["connections"])
        yield _gauge("kvstore_leases", "Leases that clients hold.", s["leases"])
        yield _gauge("kvstore_reservations", "Reservations that clients hold.", s["reservations"])
        yield _gauge("kvstore_copies_under_way", "Copies between tiers under way.", s["copies_under_way"])
        yield _gauge("kvstore_queued_requests", "Requests that wait for their turn.", s["queued_requests"])
        yield _gauge("kvstore_core_memory_bytes", "What the index of blocks takes.", s["core_ram_bytes"])
        yield _gauge("kvstore_problems", "Problems that the daemon met.", len(s["problems"]))
        refused = s["refused_requests"]
        yield _counter("kvstore_refused_requests", "Requests refused because too many wait.", refused)

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._status["tiers"]
        for key, what in (
            ("limit_bytes", "The tier's hard limit."),
            ("capacity_bytes", "What its extents take."),
            ("used_bytes", "What blocks take in it."),
        ):
            yield _by(f"kvstore_tier_{key}", what, "tier", [(t["name"], t[key]) for t in tiers])
        for key, what in (
            ("blocks", "Copies of blocks in the tier."),
            ("retired_slots", "Slots that are used no more because their bytes were bad."),
            ("bandwidth_bytes_per_s", "What its device has done lately."),
        ):
            name = key.replace("bytes_per_s", "bytes_per_second")
            yield _by(f"kvstore_tier_{name}", what, "tier", [(t["name"], t[key]) for t in tiers])
        for key, what in (
            ("readable", "Whether copies from it may start."),
            ("writable", "Whether copies to it may start."),
            ("fenced", "Whether it hangs."),
        ):
            yield _by(f"kvstore_tier_{key}", what, "tier", [(t["name"], int(t[key])) for t in tiers])
        passes = CounterMetricFamily("kvstore_scrub_passes", "Times all of a tier was read.", labels=["tier"])
        for t in tiers:
            passes.add_metric([t["name"]], t["scrub_passes"])
        yield passes

    def _devices(self) -> Iterator[Metric]:
        devices = self._figures["devices"]
        for key, what in (
            ("queued", "Bytes that wait for a device."),
            ("moving", "Bytes on their way from or to a device."),
        ):
            labels = ["tier", "class"]
            family = GaugeMetricFamily(f"kvstore_device_{key}_bytes", what, labels=labels)
            for device in devices:
                for kind, nbytes in device[f"{key}_bytes"].items():
                    family.add_metric([device["tier"], kind], nbytes)
            yield family
        threshold = [(d["tier"], d["admission"]["threshold"]) for d in devices]
        what = "Chance of being used again that a block needs to be written to the tier."
        yield _by("kvstore_admission_threshold_ratio", what, "tier", threshold)
        budget = [(d["tier"], d["admission"]["bytes_a_day"]) for d in devices]
        yield _by("kvstore_write_budget_bytes_per_day", "0: no bound.", "tier", budget)
        for key, what in (
            ("written_bytes", "Bytes that went to a tier from above."),
            ("refused_blocks", "Blocks that a tier's admission refused."),
        ):
            admitted = CounterMetricFamily(f"kvstore_admission_{key}", what, labels=["tier"])
            for device in devices:
                admitted.add_metric([device["tier"]], device["admission"][key])
            yield admitted

    def _network(self) -> Iterator[Metric]:
        network = self._status["network"]
        if network is None:
            return
        yield _gauge("kvstore_network_usable", "Whether the network tier is asked.", int(network["usable"]))
        speed = network["bandwidth_bytes_per_s"]
        yield _gauge("kvstore_network_bandwidth_bytes_per_second", "What it has done lately.", speed)
        yield _gauge("kvstore_network_coming_blocks", "Blocks on their way here.", network["coming_blocks"])
        yield _gauge("kvstore_network_going_blocks", "Blocks on their way there.", network["going_blocks"])
        family = CounterMetricFamily("kvstore_network_blocks", "What became of blocks.", labels=["what"])
        for what, n in network["counters"].items():
            family.add_metric([what.removesuffix("_blocks")], n)
        yield family

    def _events(self) -> Iterator[Metric]:
        events = self._status["events"]
        for key, what in (
            ("batches", "Batches of KV events that were published."),
            ("dropped_batches", "Those that were not, because too many waited."),
            ("stored", "Blocks that were announced."),
            ("removed", "Blocks that were taken back."),
        ):
            if key in events:
                yield _counter(f"kvstore_events_{key}", what, events[key])

    def _tenants(self) -> Iterator[Metric]:
        for key, what in (
            ("used_bytes", "What a tenant's blocks take in a tier."),
            ("floor_bytes", "What is never taken from a tenant."),
            ("limit_bytes", "What a tenant may have at most; absent: the tier's."),
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
        for key, what in _COUNTERS.items():
            yield _counter(f"kvstore_{key}", what, counters.get(key, 0))
        decided = CounterMetricFamily(
            "kvstore_decided_blocks", "Blocks by what was decided, and where.", labels=["decision", "tier"]
        )
        for row in self._figures["decisions"]:
            decided.add_metric([row["what"], row["tier"] or "all"], row["blocks"])
        yield decided

    def _durations(self) -> Iterator[Metric]:
        f = self._figures
        calls = HistogramMetricFamily(
            "kvstore_call_seconds",
            "From a request's arrival to its answer; waited: for a lower tier, for room or a device.",
            labels=["call", "waited"],
        )
        for row in f["calls"]:
            labels = [row["call"], "true" if row["waited"] else "false"]
            calls.add_metric(labels, _buckets(f["bounds_s"], row["counts"]), row["sum_s"])
        yield calls
        copies = HistogramMetricFamily(
            "kvstore_copy_seconds", "Copies of a few blocks between tiers.", labels=["source", "target"]
        )
        for row in f["copies"]:
            labels = [row["source"], row["target"]]
            copies.add_metric(labels, _buckets(f["bounds_s"], row["counts"]), row["sum_s"])
        yield copies
        lag = HistogramMetricFamily(
            "kvstore_loop_lag_seconds", "How late the daemon's event loop comes back."
        )
        lag.add_metric([], _buckets(f["bounds_s"], f["loop_lag"]["counts"]), f["loop_lag"]["sum_s"])
        yield lag


def exposition(status: Mapping[str, Any], figures: Mapping[str, Any]) -> bytes:
    """All metrics of a reading, as Prometheus reads them (text format 0.0.4)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reading(status, figures))
    return generate_latest(registry)


def exposition_of_nothing() -> bytes:
    """The same while the daemon is away."""
    return b"# HELP kvstore_up Whether the daemon answers.\n# TYPE kvstore_up gauge\nkvstore_up 0.0\n"


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value=value)


def _by(name: str, what: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=[label])
    for of, value in values:
        family.add_metric([of], value)
    return family


def _buckets(bounds_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts added up, by upper bound."""
    out, total = [], 0
    for bound, count in zip([*map(str, bounds_s), "+Inf"], counts, strict=True):
        total += count
        out.append((bound, float(total)))
    return out
