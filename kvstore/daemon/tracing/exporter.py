"""Exports traces over OTLP on a thread. No request waits for a collector that does not answer."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from typing import Any

from kvstore.daemon.tracing.request_traces import RequestTrace
from kvstore.errors import ConfigError
from kvstore.wire import messages as m

_log = logging.getLogger(__name__)

MOST_WAITING = 4096
"""The most traces that wait for their export. Further ones are dropped."""

MOST_OF_TENANT = 256
"""The most of one tenant, so that no tenant takes the room of the others."""

BATCH = 128
PAUSE_S = 0.25
"""At most `BATCH` requests are exported every `PAUSE_S`: the thread takes time from the event loop."""

_EXPORT_WITHIN_S = 3.0


class Exporter:
    """The queues of traces, one a tenant, and the thread that exports them in turn.

    `counts`: requests whose spans the collector has taken, and requests whose spans were dropped: a queue was
    full, or the collector did not take them.
    """

    def __init__(self, collector: str, resource: dict[str, str]) -> None:
        """`collector`: the base of its URL.

        Raises ConfigError without OpenTelemetry's SDK and exporter, or if they refuse the environment.
        """
        try:
            self._spans = _Spans(resource)
            self._sender = _sender(f"{collector}/v1/traces")
        except ImportError as error:
            hint = "pip install 'kvstore[tracing]'"
            raise ConfigError(f"tracing.collector needs OpenTelemetry: {error}", hint) from None
        except Exception as error:  # of the variables that OpenTelemetry reads
            hint = "see the variables OTEL_... in the daemon's environment"
            raise ConfigError(f"tracing.collector cannot be used: {error}", hint) from None
        self.collector = collector
        self.counts = {"exported_requests": 0, "dropped_requests": 0}
        self._queues: OrderedDict[str, deque[RequestTrace]] = OrderedDict()
        self._waiting = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._reached = True
        self._thread = threading.Thread(target=self._run, name="kvstore-traces", daemon=True)
        self._thread.start()

    # -- on the event loop

    def put(self, trace: RequestTrace) -> None:
        """Takes the trace of an answered request. Never waits for the collector."""
        with self._lock:
            queue = self._queues.get(trace.tenant) or deque()
            if self._waiting >= MOST_WAITING or len(queue) >= MOST_OF_TENANT:
                self.counts["dropped_requests"] += 1
                return
            queue.append(trace)
            self._queues[trace.tenant] = queue
            self._waiting += 1
        self._wake.set()

    def close(self) -> threading.Thread:
        """Begins to export what waits. Returns the thread, which ends with it, or never."""
        self._closing.set()
        self._wake.set()
        return self._thread

    # -- the thread

    def _run(self) -> None:
        while not self._closing.is_set() or self._waiting:
            self._wake.wait()
            self._closing.wait(PAUSE_S)
            self._wake.clear()
            batch = self._next_batch()
            if self._waiting:
                self._wake.set()
            if batch:
                self._export(batch)

    def _next_batch(self) -> list[RequestTrace]:
        """Takes a trace of each tenant in turn."""
        batch: list[RequestTrace] = []
        with self._lock:
            while self._queues and len(batch) < BATCH:
                tenant, queue = self._queues.popitem(last=False)
                batch.append(queue.popleft())
                if queue:
                    self._queues[tenant] = queue
            self._waiting -= len(batch)
        return batch

    def _export(self, batch: list[RequestTrace]) -> None:
        try:
            taken = self._sender.export(self._spans.of(batch)).name == "SUCCESS"
        except Exception as error:
            _log.debug("no traces", exc_info=error)
            taken = False
        with self._lock:
            self.counts["exported_requests" if taken else "dropped_requests"] += len(batch)
        if taken != self._reached:
            self._reached = taken
            if taken:
                _log.info("the collector at %s takes traces again", self.collector)
            else:
                _log.warning("the collector at %s takes no traces: they are dropped", self.collector)


def _sender(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - optional

    # It logs each failure, and `Exporter` the first.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_WITHIN_S)


class _Spans:
    """Makes spans of OpenTelemetry from traces. Used by one thread."""

    def __init__(self, resource: dict[str, str]) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - optional
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON  # noqa: PLC0415

        self._api = trace
        self._ended: list[Any] = []
        ended = self._ended

        class Collect(SpanProcessor):
            def on_end(self, span: Any) -> None:
                ended.append(span)

        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(resource), shutdown_on_exit=False
        )
        provider.add_span_processor(Collect())
        self._tracer = provider.get_tracer("kvstore")

    def of(self, batch: list[RequestTrace]) -> list[Any]:
        """Returns the spans of requests, and those of their phases."""
        self._ended.clear()
        for trace in batch:
            self._make(trace)
        return list(self._ended)

    def _make(self, trace: RequestTrace) -> None:
        api = self._api

        def at(seconds: float) -> int:
            return int((trace.arrived + seconds - trace.began_s) * 1e9)

        whole = self._tracer.start_span(
            f"kvstore.daemon.{trace.name}",
            self._parent(trace.context),
            api.SpanKind.SERVER,
            {"kvstore.tenant": trace.tenant, **trace.attributes},
            start_time=at(trace.began_s),
        )
        inside = api.set_span_in_context(whole)
        for phase, start, end in trace.phases:
            part = self._tracer.start_span(f"kvstore.{phase}", inside, start_time=at(start))
            part.end(at(end))
        whole.end(at(trace.ended_s))

    def _parent(self, context: m.TraceContext) -> Any:
        api = self._api
        ids = int.from_bytes(context.trace, "big"), int.from_bytes(context.span, "big")
        parent = api.SpanContext(*ids, is_remote=True, trace_flags=api.TraceFlags(context.flags))
        return api.set_span_in_context(api.NonRecordingSpan(parent))
