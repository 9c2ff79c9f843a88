"""tracing: acquire of 32 blocks with OpenTelemetry in the process, compared with acquire without it.

`off`: the caller has no span. `1%`: one call of a hundred is within a sampled span, and the daemon exports
its spans to a collector, a process of its own. The reference is the same call in the same process, from
which OpenTelemetry is hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.harness import KIB, MIB, PROCESSES, Bench, Result, Target, Unable, expect, quantile
from bench.latency import CALLS, Timed
from bench.served import serve, wait_until
from bench.zero_copy import BLOCKS, SMOKE, Sizes
from kvstore import Layout
from kvstore.client.calls import call, tracing
from kvstore.client.leases import Lease

_HIDDEN = "opentelemetry.hidden"
"""No module has this name."""


def run(bench: Bench) -> Iterator[Result]:
    """Yields `acquire` without a span, and with a sampled span around one call of a hundred."""
    tracer = _tracer()
    z = bench.pick(Sizes(64 * KIB, 64 * MIB), SMOKE)
    with _collector() as url, serve(z.dram_bytes, tracing={"collector": url}) as (client, _):
        space = client.namespace(Layout(model="bench", block_bytes=z.block_bytes))
        keys = [os.urandom(32) for _ in range(BLOCKS)]
        blocks = np.zeros((BLOCKS, z.block_bytes), np.uint8)
        expect(space.put(keys, blocks).stored, BLOCKS, "blocks stored")
        held: list[Lease] = []

        def acquire(_: int) -> None:
            held.append(space.acquire(keys))

        def sampled(n: int) -> None:
            if n % CALLS:
                acquire(n)
            else:
                with tracer.start_as_current_span("engine"):
                    acquire(n)

        def release() -> None:
            expect(len(held[-1]), BLOCKS, "blocks leased")
            # The ping waits for the release, so that the next call does not include it.
            held.pop().release()
            client.ping()

        for row, call, bound in (("off", acquire, 1.005), ("1%", sampled, 1.02)):
            timed, plain = Timed(call, release), Timed(acquire, release)
            contestants = timed.sample, _hidden(plain.sample)
            rounds = bench.interleave(f"tracing/{row}", contestants, 0.5)
            yield rounds.result(
                f"tracing/{row}",
                "µs",
                Target("<=", bound),
                p99=quantile(timed.all_us, 0.99),
                reference_p99=quantile(plain.all_us, 0.99),
            )
        wait_until(client, lambda status: status["tracing"]["exported_requests"] > 0)
        expect(client.status()["tracing"]["dropped_requests"], 0, "traces dropped")


def _tracer() -> Any:
    """Returns a tracer whose spans are sampled and go nowhere. Raises Unable without OpenTelemetry."""
    try:
        from opentelemetry import trace  # noqa: PLC0415 - optional
        from opentelemetry.exporter.otlp.proto import http  # noqa: F401, PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    except ImportError:
        raise Unable("no OpenTelemetry: pip install '.[tracing]'") from None
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    return trace.get_tracer("bench")


def _hidden(sample: Callable[[int], float]) -> Callable[[int], float]:
    """Returns a sample during which the client finds no OpenTelemetry in the process."""

    def without(number: int) -> float:
        there = call.OPENTELEMETRY
        call.OPENTELEMETRY = tracing.OPENTELEMETRY = _HIDDEN
        try:
            return sample(number)
        finally:
            call.OPENTELEMETRY = tracing.OPENTELEMETRY = there

    return without


@contextmanager
def _collector() -> Iterator[str]:
    """Runs a collector that takes everything. Yields its URL."""
    ours, its = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_collect, args=(its,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


class _Takes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _collect(port: Connection) -> None:
    with HTTPServer(("127.0.0.1", 0), _Takes) as server:
        port.send(server.server_port)
        server.serve_forever()
