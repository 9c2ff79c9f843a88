"""A collector of OpenTelemetry in this process: takes OTLP over HTTP, and decodes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Span:
    """A span as it arrived. Ids are bytes, times ns."""

    name: str
    trace: bytes
    span: bytes
    parent: bytes
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """`url`: the base of its address. `status`: the status of its answers. `bodies`: posted to `paths`."""

    url: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    bodies: list[bytes] = field(default_factory=list)

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]

    def inside(self, span: Span) -> dict[str, Span]:
        """The children of a span, by name without `kvstore.`, in the order of their start."""
        children = [each for each in self.spans if each.parent == span.span]
        return {each.name.removeprefix("kvstore."): each for each in sorted(children, key=lambda x: x.start)}

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        if self.status != 200:
            return
        self.paths.add(path)
        self.bodies.append(body)
        for each in request.resource_spans:
            resource = _plain(each.resource.attributes)
            for scope in each.scope_spans:
                self.spans += [
                    Span(
                        s.name, s.trace_id, s.span_id, s.parent_span_id, s.kind, s.start_time_unix_nano,
                        s.end_time_unix_nano, _plain(s.attributes), resource,
                    )
                    for s in scope.spans
                ]  # fmt: skip


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """Runs a collector on loopback."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.take(self.path, body)
            self.send_response(made.status)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
