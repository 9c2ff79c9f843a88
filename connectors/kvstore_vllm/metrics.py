"""What vLLM shows of the store: figures in `/metrics` and in its log, and one DEBUG line per event.

Each half records its events. vLLM takes the figures of all workers and of the scheduler after every step and
gives their sum to its log (`Figures.reduce`) and to Prometheus (`PromMetrics`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Histogram as PromHistogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore import Tier
from kvstore.errors import DeniedError, RemoteProtocolError, TierError, UnavailableError, printable

logger = logging.getLogger("vllm.kvstore")

NOT_STORED, LATE, UNAVAILABLE, REFUSED = "not_stored", "late", "unavailable", "refused"
NOT_WORTH_LOADING = "not_worth_loading"
NAMING, UNNAMED = "naming", "unnamed"
DAMAGED, CANCELLED, FAILED, DROPPED = "damaged", "cancelled", "failed", "dropped"
LOADED, STORED, PRESENT = "loaded", "stored", "present"

UNANSWERED = (UnavailableError, DeniedError, TierError, TimeoutError)
"""What a call raises if the daemon is away, late or refuses. Any other exception is an error of a hook."""

_SILENT_S = 60.0
"""A warning of the same kind is not logged again for so long, in seconds."""

_FROM_100_US = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_FROM_1_MS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric `vllm:kvstore_NAME`: a counter, or a histogram of seconds if it has `buckets`.

    `label`: the name of its label. `values`: the values of the label that are shown from the start.
    """

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric(
        "asked_tokens",
        "Prompt tokens in whole blocks that the engine's own cache lacked, so the store was asked for them.",
    ),
    Metric("hit_tokens", "Asked tokens that were found in the store."),
    Metric(
        "missed_tokens",
        "Asked tokens that were not found, or not worth loading, by reason.",
        "reason",
        (NOT_STORED, NOT_WORTH_LOADING, LATE, UNAVAILABLE, REFUSED, NAMING, UNNAMED),
    ),
    Metric(
        "load_blocks",
        "Engine blocks that were to be loaded, of all workers, by outcome.",
        "outcome",
        (LOADED, NOT_STORED, LATE, UNAVAILABLE, REFUSED, DAMAGED, CANCELLED, FAILED),
    ),
    Metric(
        "save_blocks",
        "Stored blocks that were to be saved, of all workers, by outcome.",
        "outcome",
        (STORED, PRESENT, LATE, UNAVAILABLE, REFUSED, CANCELLED, DROPPED, FAILED),
    ),
    Metric(
        "loaded_bytes",
        "Bytes read from the store, of all workers, by the tier where the daemon found them.",
        "tier",
        tuple(tier.name.lower() for tier in Tier),
    ),
    Metric("saved_bytes", "Bytes written to the store, of all workers."),
    Metric(
        "lookup_seconds",
        "Time that the scheduler waited for a lookup, in seconds.",
        buckets=_FROM_100_US,
    ),
    Metric(
        "load_seconds",
        "Time from the order of a request's load to its end, in seconds.",
        buckets=_FROM_1_MS,
    ),
    Metric(
        "save_seconds",
        "Time from the order of a save to its end, in seconds.",
        buckets=_FROM_1_MS,
    ),
    Metric(
        "request_problems",
        "Requests of which a wish was not followed, by kind.",
        "kind",
        ("bad_parameters", "bad_options", "refused_tokens", "ignored_hints", "dropped_hints"),
    ),
    Metric("pinned_blocks", "Stored blocks that requests have pinned."),
    Metric("hook_failures", "Hooks of the connector that raised, by hook. Each is a miss.", "hook"),
)

_LOGGED = {
    "lookup_seconds": "lookups",
    "hit_tokens": "hit tokens",
    "missed_tokens": "missed tokens",
    f"missed_tokens:{NOT_WORTH_LOADING}": "not worth loading",
    "load_blocks": "lost",
    f"load_blocks:{LOADED}": "loaded",
    "save_blocks": "not saved",
    f"save_blocks:{STORED}": "saved",
    f"save_blocks:{PRESENT}": "saved",
    f"save_blocks:{DROPPED}": "dropped",
    "request_problems:bad_parameters": "bad parameters",
    "request_problems:bad_options": "bad options",
    "request_problems:refused_tokens": "refused tokens",
    "request_problems:ignored_hints": "ignored hints",
    "request_problems:dropped_hints": "dropped hints",
    "pinned_blocks": "pinned",
    "hook_failures": "hook failures",
}
"""The names of figures in vLLM's log. Figures without a name are only in `/metrics`."""


def reason_of(error: BaseException) -> str:
    """Returns the reason of a miss from one of the exceptions UNANSWERED."""
    cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, TimeoutError | BlockingIOError):
        return LATE
    return REFUSED if isinstance(cause, DeniedError | RemoteProtocolError) else UNAVAILABLE


@dataclass
class Figures(KVConnectorStats):
    """Figures since the last report: numbers and lists of seconds by `METRIC` or `METRIC:LABEL VALUE`."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Clears the figures."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Figures:
        """Adds the figures of `other`."""
        both = dict(self.data)
        for key, value in other.data.items():
            both[key] = both[key] + value if key in both else value
        self.data = both
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the counts to log, by name."""
        counts: Counter[str] = Counter()
        for key, value in self.data.items():
            name = _LOGGED.get(key) or _LOGGED.get(key.partition(":")[0])
            if name:
                counts[name] += len(value) if isinstance(value, list) else value
        return dict(counts)

    def is_empty(self) -> bool:
        """Returns whether there are no figures."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """The metrics of `METRICS` in vLLM's registry. See the base class for the arguments."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[int, str], Any] = {}
        for metric in METRICS:
            more: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            self._metrics[metric.name] = metric_types[PromHistogram if more else PromCounter](
                name=f"vllm:kvstore_{metric.name}",
                documentation=metric.help,
                labelnames=[*labelnames, *([metric.label] if metric.label else [])],
                **more,
            )
            for engine in per_engine_labelvalues:
                for value in metric.values if metric.label else ("",):
                    self._child(engine, f"{metric.name}:{value}" if value else metric.name)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the `data` of Figures to the metrics of an engine."""
        for key, value in transfer_stats_data.items():
            child = self._child(engine_idx, key)
            if not isinstance(value, list):
                child.inc(value)
                continue
            for each in value:
                child.observe(each)

    def _child(self, engine: int, key: str) -> Any:
        """Returns the metric of an engine with the label value that `key` names."""
        if (child := self._children.get((engine, key))) is None:
            name, _, value = key.partition(":")
            labels = [*self.per_engine_labelvalues[engine], *([value] if value else [])]
            child = self._children[engine, key] = self._metrics[name].labels(*labels)
        return child


@dataclass(slots=True)
class Outcome:
    """What became of the blocks of one load or save so far.

    `good`: the leading blocks that are loaded, or that are stored. `present`: those of them that were stored
    before. `why`: the reason for the others. `read`: the number of stored blocks read, by tier.
    """

    good: int = 0
    present: int = 0
    why: str = FAILED
    read: Counter[int] = field(default_factory=Counter)


class Recorder:
    """The figures of one half. Thread-safe. Its DEBUG lines begin with the id of their request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {}
        self._clock = clock
        self._silent_until_s: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def take(self) -> dict[str, Any]:
        """Returns the `data` of Figures since the last call."""
        with self._lock:
            data, self._data = self._data, {}
            return data

    def add(self, count: int, metric: str, label: str = "") -> None:
        """Adds to a counter. Does nothing for 0."""
        if count:
            key = f"{metric}:{label}" if label else metric
            with self._lock:
                self._data[key] = self._data.get(key, 0) + count

    def time(self, metric: str, seconds: float) -> None:
        """Adds an observation to a histogram."""
        with self._lock:
            self._data.setdefault(metric, []).append(seconds)

    def problem(self, kind: str, message: str) -> None:
        """Counts a request whose wish was not followed, and logs it like `warn`."""
        self.add(1, "request_problems", kind)
        self.warn(kind, message)

    def warn(self, kind: str, message: str) -> None:
        """Logs a warning, unless one of its kind was logged in the last minute."""
        self._unlogged[kind] += 1
        if self._clock() < self._silent_until_s.get(kind, -math.inf):
            return
        self._silent_until_s[kind] = self._clock() + _SILENT_S
        logger.warning("%s (%d since the last such line)", printable(message), self._unlogged.pop(kind))

    def admitted(
        self, request_id: str, asked: int, hit: int, computed: int, why: str, unworthy: int = 0
    ) -> None:
        """Records the admission of a request, in tokens.

        `unworthy`: those that are stored, but not worth loading. `why`: the reason for other misses.
        """
        unworthy = min(unworthy, asked - hit)
        missed = asked - hit - unworthy
        self.add(asked, "asked_tokens")
        self.add(hit, "hit_tokens")
        self.add(missed, "missed_tokens", why)
        self.add(unworthy, "missed_tokens", NOT_WORTH_LOADING)
        if _debugs():
            found = f"{hit} of {asked} tokens found behind {computed} of the engine's own cache"
            others = _others(unworthy, NOT_WORTH_LOADING) + _others(missed, why)
            logger.debug("%s: %s%s", request_id, found, others)

    def unasked(self, request_id: str, why: str) -> None:
        """Records that the store was not asked for a request."""
        logger.debug("%s: not looked up, %s", request_id, why)

    def loaded(self, request_id: str, group: int, wanted: int, block_bytes: int, outcome: Outcome) -> None:
        """Records a load of `wanted` engine blocks of a group, from stored blocks of `block_bytes`."""
        lost = wanted - outcome.good
        self.add(outcome.good, "load_blocks", LOADED)
        self.add(lost, "load_blocks", outcome.why)
        for tier, blocks in outcome.read.items():
            self.add(blocks * block_bytes, "loaded_bytes", Tier(tier).name.lower())
        if _debugs():
            done = f"loaded {outcome.good} of {wanted} blocks of group {group}"
            read = "".join(f", {n * block_bytes} bytes from {Tier(t).name}" for t, n in outcome.read.items())
            logger.debug("%s: %s%s%s", request_id, done, read, _others(lost, outcome.why))

    def saved(self, request_id: str, group: int, wanted: int, block_bytes: int, outcome: Outcome) -> None:
        """Records a save of `wanted` stored blocks of a group."""
        stored, lost = outcome.good - outcome.present, wanted - outcome.good
        self.add(stored, "save_blocks", STORED)
        self.add(outcome.present, "save_blocks", PRESENT)
        self.add(lost, "save_blocks", outcome.why)
        self.add(stored * block_bytes, "saved_bytes")
        if _debugs():
            done = f"saved {stored} of {wanted} blocks of group {group}, {stored * block_bytes} bytes"
            present = f", {outcome.present} present" if outcome.present else ""
            logger.debug("%s: %s%s%s", request_id, done, present, _others(lost, outcome.why))


def _debugs() -> bool:
    return logger.isEnabledFor(logging.DEBUG)


def _others(count: int, why: str) -> str:
    """Returns the end of a line: why `count` tokens or blocks are missing from it."""
    return f"; {count} {why}" if count else ""
