"""Traces of requests: real daemons, real clients with OpenTelemetry's SDK, and a collector that decodes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvstore import AsyncClient, Client, Layout, trace_parent
from kvstore.client import protocol
from kvstore.client.calls.call import Exchange, Flow
from kvstore.client.calls.tracing import outcome_of
from kvstore.client.calls.tracing import traced as traced_flow
from kvstore.client.leases import PutResult
from kvstore.config import parse
from kvstore.daemon.tenancy.auth import hash_of
from kvstore.daemon.tracing import exporter
from kvstore.daemon.tracing.exporter import BATCH, MOST_OF_TENANT, MOST_WAITING, PAUSE_S, Exporter
from kvstore.daemon.tracing.request_traces import MOST_OPEN, ConnectionTraces, RequestTrace
from kvstore.errors import ConfigError, DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from kvstore.wire.frames import pack
from tests.collector import Collector, Span, collector
from tests.daemons import (
    SMALL,
    WITH_NVME,
    Peer,
    eventually,
    greeted,
    idle,
    names,
    new_layout,
    payloads,
    room_for,
    tier,
)
from tests.tenants import TenantDaemon

SERVER = 2
"""The kind of a server's span in OTLP."""
TRACE, SPAN = bytes(range(16)), bytes(range(1, 9))
SAMPLED = {"traceparent": f"00-{TRACE.hex()}-{SPAN.hex()}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE.hex()}-{SPAN.hex()}-00"}

_MEMORY = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def sdk() -> None:
    """OpenTelemetry takes one provider in a process. Other tests have no spans: nothing changes for them."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # a smoke test of a bench may have set it
        trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(_MEMORY))


@pytest.fixture(autouse=True)
def empty() -> None:
    _MEMORY.clear()


@pytest.fixture
def collected() -> Iterator[Collector]:
    with collector() as made:
        yield made


def traced(settings: Any, to: Collector) -> dict[str, Any]:
    return {**settings, "tracing": {"collector": to.url}}


def engine_spans() -> dict[str, Any]:
    """The spans of this process, by name; of one name, the last."""
    return {span.name: span for span in _MEMORY.get_finished_spans()}


def the(to: Collector, name: str, n: int = 1) -> Span:
    """The last of n spans of a name, as soon as there are n."""
    found: list[Span] = eventually(lambda: len(to.named(name)) >= n and to.named(name))
    assert len(found) == n
    return found[-1]


@contextmanager
def span(name: str = "engine") -> Iterator[Any]:
    with trace.get_tracer("engine").start_as_current_span(name) as made:
        yield made.get_span_context()


def id_of(context: Any) -> bytes:
    made: bytes = context.span_id.to_bytes(8, "big")
    return made


def check_phases(to: Collector, whole: Span) -> dict[str, Span]:
    """The phases of a request, which are its whole time, one after another. Left out: a queue before them."""
    phases = to.inside(whole)
    at = whole.start
    for phase in phases.values():
        assert abs(phase.start - at) < 2_000 <= 2_000 + phase.end - phase.start
        assert phase.trace == whole.trace
        at = phase.end
    assert abs(at - whole.end) < 2_000
    phases.pop("queue", None)  # where the machine is busy
    return phases


# -- one trace: engine, client, daemon, tier


def test_a_hit_on_nvme_is_one_trace_from_the_engine_to_the_tier(collected: Collector) -> None:
    layout, keys = new_layout(), names(8)
    with LocalDaemon(traced(WITH_NVME, collected)) as daemon:
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            assert client.namespace(layout).put(keys, payloads(keys)).stored == 8
            eventually(lambda: tier(client.status(), "nvme")["blocks"] == 8 and idle(client.status()))
        daemon.restart()
        assert not collected.spans, "none of these requests was in a span"
        began = time.time_ns()
        with (
            Client(daemon.url, deadline_s=10, strict=True) as client,
            span() as engine,
            client.namespace(layout).acquire(keys) as lease,
        ):
            assert len(lease) == 8
        mine = engine_spans()["kvstore.acquire"]
        assert mine.parent.span_id == engine.span_id
        assert mine.attributes == {
            "kvstore.model": layout.model, "kvstore.keys": 8, "kvstore.blocks": 8, "kvstore.outcome": "hit",
        }  # fmt: skip
        whole = the(collected, "kvstore.daemon.acquire")
        assert whole.trace == engine.trace_id.to_bytes(16, "big")
        assert whole.parent == id_of(mine.context)
        assert whole.kind == SERVER
        assert whole.attributes == {
            "kvstore.tenant": "default", "kvstore.keys": 8, "kvstore.blocks": 8, "kvstore.stored": 8,
            "kvstore.blocks.nvme": 8, "kvstore.outcome": "hit",
        }  # fmt: skip
        assert whole.resource["service.name"] == "kvstore"
        assert began - 1_000_000 <= whole.start < whole.end <= time.time_ns() + 1_000_000
        phases = check_phases(collected, whole)
        assert list(phases) == ["placement", "copies"]
        # The namespace and the extent were asked for in the same call.
        assert the(collected, "kvstore.daemon.open").parent == id_of(mine.context)
        assert the(collected, "kvstore.daemon.map").parent == id_of(mine.context)
        assert collected.paths == {"/v1/traces"}
        told = {"collector": collected.url, "exported_requests": 3, "dropped_requests": 0}
        with Client(daemon.url, strict=True) as client:
            eventually(lambda: client.status()["tracing"] == told)
            calls = client.control("figures")["calls"]
        traced_calls = {row["call"]: {trace for _, trace, *_ in row["exemplars"]} for row in calls}
        assert traced_calls["acquire"] == traced_calls["open"] == {f"{engine.trace_id:032x}"}


def test_every_call_has_a_span_with_its_outcome(collected: Collector) -> None:
    layout, keys = new_layout(), names(4)
    with LocalDaemon(traced(SMALL, collected)) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns = client.namespace(layout)
        with span() as engine:
            assert ns.lookup(keys) == 0
            missed = engine_spans()["kvstore.lookup"]
            assert ns.put(keys[:2], payloads(keys[:2])).stored == 2
            with ns.reserve(keys[2:], parent=keys[1]) as room:
                for slot, block in zip(room.blocks, payloads(keys[2:]), strict=True):
                    slot[:] = block
                assert room.commit().stored == 2
            assert ns.get(keys, room_for(4)) == 4
            assert ns.lookup(keys) == 4
            assert client.lookup([(ns, keys, None, None)])[0][0].blocks == 4
            assert ns.contains(keys).all()
        mine = engine_spans()
        assert {each.parent.span_id for name, each in mine.items() if name != "engine"} == {engine.span_id}
        told = {name: dict(each.attributes) for name, each in mine.items()}
        assert missed.attributes["kvstore.outcome"] == "miss"
        assert told["kvstore.put"] == {
            "kvstore.model": layout.model, "kvstore.keys": 2, "kvstore.stored": 2, "kvstore.present": 0,
            "kvstore.denied": 0, "kvstore.outcome": "stored",
        }  # fmt: skip
        assert told["kvstore.reserve"]["kvstore.granted"] == 2
        assert told["kvstore.commit"]["kvstore.stored"] == 2
        for name in ("get", "lookup", "contains"):
            assert (
                told[f"kvstore.{name}"]["kvstore.blocks"],
                told[f"kvstore.{name}"]["kvstore.outcome"],
            ) == (
                4,
                "hit",
            )
        last = the(collected, "kvstore.daemon.commit", 2)
        assert last.parent == id_of(mine["kvstore.commit"].context)
        assert last.attributes["kvstore.value"] == 2
        asked = the(collected, "kvstore.daemon.reserve", 2)
        assert asked.parent == id_of(mine["kvstore.reserve"].context)
        assert asked.attributes["kvstore.granted"] == 2


def test_a_refusal_and_a_daemon_that_is_away_say_why(tmp_path: Path) -> None:
    with span(), Client(f"unix://{tmp_path}/nobody") as client:
        ns = client.namespace(new_layout())
        assert ns.lookup(names(1)) == 0
        told = engine_spans()["kvstore.lookup"].attributes
        assert told["kvstore.outcome"] == "failed"
        assert told["kvstore.why"]
    with LocalDaemon(SMALL) as daemon, span(), Client(daemon.url, strict=True, deadline_s=10) as client:
        other = client.namespace(new_layout(), owner="somebody")
        with pytest.raises(DeniedError) as denied:
            other.acquire(names(1))
        told = engine_spans()["kvstore.acquire"].attributes
        assert (told["kvstore.outcome"], told["kvstore.why"]) == ("refused", denied.value.message)


def test_downloads_from_the_network_are_phases(collected: Collector, tmp_path: Path) -> None:
    shared = {"network": {"url": f"file://{tmp_path}/shared", "timeout": "5s"}}
    layout, keys = new_layout(), names(6)
    with (
        LocalDaemon({**SMALL, **shared}) as first,
        LocalDaemon(traced({**SMALL, **shared}, collected)) as second,
        Client(first.url, deadline_s=20, strict=True) as a,
        Client(second.url, deadline_s=20, strict=True) as b,
    ):
        for client in (a, b):
            eventually(lambda client=client: client.status()["network"]["usable"])
        a.namespace(layout).put(keys, payloads(keys))
        eventually(lambda: a.status()["network"]["counters"].get("written_ok_blocks", 0) >= 6)
        ns = b.namespace(layout)
        with span():
            assert ns.lookup(keys) == 6
            with ns.acquire(keys) as lease:
                assert len(lease) == 6
        whole = the(collected, "kvstore.daemon.acquire")
        phases = check_phases(collected, whole)
        assert list(phases) == ["placement", "network.lookup", "network.download", "copies"]
        assert phases["network.download"].end > phases["network.download"].start
        looked = check_phases(collected, the(collected, "kvstore.daemon.lookup"))
        assert list(looked)[:2] == ["placement", "network.lookup"]


def test_a_wait_for_the_first_block_is_a_phase(collected: Collector) -> None:
    layout, keys = new_layout(), names(1)
    with LocalDaemon(traced(SMALL, collected)) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns = client.namespace(layout)
        ns.put(names(1, "other"), payloads(names(1, "other")))

        def store() -> None:
            time.sleep(0.2)
            ns.put(keys, payloads(keys))

        writer = threading.Thread(target=store)
        writer.start()
        with span(), ns.acquire(keys, wait_s=10.0) as lease:
            assert len(lease) == 1
        writer.join()
        phases = check_phases(collected, the(collected, "kvstore.daemon.acquire"))
        assert list(phases) == ["placement", "wait", "copies"]
        assert phases["wait"].end - phases["wait"].start > 50_000_000


def test_the_asyncio_client_traces_too(collected: Collector) -> None:
    keys = names(3)

    async def use(url: str) -> None:
        async with AsyncClient(url, deadline_s=10, strict=True) as client:
            ns = client.namespace(new_layout())
            with span():
                assert (await ns.put(keys, payloads(keys))).stored == 3
            assert await ns.lookup(keys) == 3

    with LocalDaemon(traced(SMALL, collected)) as daemon:
        asyncio.run(use(daemon.url))
        mine = engine_spans()
        assert the(collected, "kvstore.daemon.commit").parent == id_of(mine["kvstore.put"].context)
        assert "kvstore.lookup" not in mine


def test_headers_of_an_engines_request_are_the_parent(collected: Collector) -> None:
    keys = names(1)
    with LocalDaemon(traced(SMALL, collected)) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns = client.namespace(new_layout())
        for headers in (None, {}, UNSAMPLED, {"traceparent": "nonsense"}, {"traceparent": None}):
            with trace_parent(headers):  # type: ignore[arg-type]
                ns.put(keys, payloads(keys))
        assert not engine_spans()
        with trace_parent(SAMPLED):
            ns.acquire(keys).release()
        ns.acquire(keys).release()
        mine = engine_spans()["kvstore.acquire"]
        assert (mine.context.trace_id, mine.parent.span_id) == (
            int.from_bytes(TRACE, "big"),
            int.from_bytes(SPAN, "big"),
        )
        whole = the(collected, "kvstore.daemon.acquire")
        assert (whole.trace, whole.parent) == (TRACE, id_of(mine.context))
        assert not [each for each in collected.spans if each.trace != TRACE]


# -- off


def sent(url: str, headers: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The requests of a conversation, decoded, with the times that depend on the moment left out."""
    frames: list[bytes] = []
    layout, keys = new_layout(), names(6)
    add = protocol.Outbox.add

    def note(outbox: Any, frame: bytes) -> None:
        frames.append(bytes(frame))
        add(outbox, frame)

    with monkeypatch.context() as patch, Client(url, deadline_s=10, strict=True) as client:
        client.ping()
        patch.setattr(protocol.Outbox, "add", note)
        with trace_parent(headers):
            ns = client.namespace(layout)
            ns.put(keys, payloads(keys))
            ns.acquire(keys).release()
            ns.prefetch(keys)
    decoded = [msgpack.unpackb(message) for frame in frames for message in cut(frame)]
    # Checksums depend on the namespace.
    commit = m.ALL.index(m.Commit)
    told = [message[:3] if message[0] == commit else message for message in decoded]
    return [[None if isinstance(each, float | dict) else each for each in message] for message in told]


def cut(frame: bytes) -> Iterator[bytes]:
    while frame:
        n = 4 + int.from_bytes(frame[:4], "little")
        yield frame[4:n]
        frame = frame[n:]


def test_without_a_sampled_span_frames_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalDaemon(SMALL) as daemon:
        plain = sent(daemon.url, None, monkeypatch)
        assert sent(daemon.url, UNSAMPLED, monkeypatch) == plain
        named = sent(daemon.url, SAMPLED, monkeypatch)
        contexts = [each for each in named if each[0] == m.ALL.index(m.TraceContext)]
        assert [each for each in named if each not in contexts] == plain
        asked = [each[1] for each in plain if m.ALL[each[0]] is not m.Release]
        assert [each[1] for each in contexts] == asked
        with Client(daemon.url, strict=True) as client:
            assert client.status()["tracing"] == {}


def test_a_context_is_one_frame_before_its_request_and_version_12_has_none() -> None:
    for version in (m.VERSION, 12, 7):
        state, plain = protocol.ProtocolState("", None), protocol.ProtocolState("", None)  # type: ignore[arg-type]
        state.version = plain.version = version
        state.context = TRACE, SPAN, 1
        frame, usual = state.send(m.Ping(0)), plain.send(m.Ping(0))
        context = pack(m.TraceContext(1, TRACE, SPAN, 1)) if version > 12 else b""
        assert frame == context + usual
        assert len(context) < 50
        state.context = None
        assert state.send(m.Ping(0)) == plain.send(m.Ping(0))


class Daemon12(LocalDaemon):
    """A daemon that speaks version 12."""

    def _command(self) -> list[str]:
        code = (
            "import sys; from pathlib import Path; import kvstore.wire.messages as m; m.VERSION = 12;"
            "from kvstore.daemon.main import run; sys.exit(run(Path(sys.argv[1])))"
        )
        return [sys.executable, "-P", "-c", code, str(self.folder / "kvstore.toml")]


@pytest.mark.parametrize("older", ["daemon", "client"])
def test_an_older_daemon_is_told_no_context_and_an_older_client_tells_none(
    older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older == "client":
        monkeypatch.setattr(m, "VERSION", 12)
    with {"daemon": Daemon12, "client": LocalDaemon}[older](SMALL) as daemon:
        named = sent(daemon.url, SAMPLED, monkeypatch)
        assert m.ALL.index(m.TraceContext) not in {each[0] for each in named}
        assert named == sent(daemon.url, None, monkeypatch)
        assert "kvstore.put" in engine_spans(), "the client's own span is made"
        with Client(daemon.url, strict=True) as client:
            assert list(client.status()["wire_versions"]) == ["12"]


def test_a_client_without_spans_imports_nothing_of_opentelemetry() -> None:
    code = """if True:
        import sys
        import kvstore.daemon.main
        from kvstore import Client
        with Client("unix:///nowhere") as client:
            from kvstore import Layout
            assert client.namespace(Layout(model="m", block_bytes=4096)).lookup([b"k"]) == 0
        assert not [name for name in sys.modules if name.startswith("opentelemetry")]
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ})


# -- hostile peers


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[tuple[LocalDaemon, Collector]]:
    with collector() as made, LocalDaemon(traced(SMALL, made)) as daemon:
        yield daemon, made


MALFORMED = [
    m.TraceContext(2, TRACE[:15], SPAN, 1),
    m.TraceContext(2, TRACE * 1000, SPAN, 1),
    m.TraceContext(2, bytes(16), SPAN, 1),
    m.TraceContext(2, b"", b"", 1),
    m.TraceContext(2, TRACE, SPAN[1:], 1),
    m.TraceContext(2, TRACE, bytes(8), 1),
    m.TraceContext(2, TRACE, SPAN, 257),
    m.TraceContext(2, TRACE, SPAN, 0),
]


def test_malformed_contexts_are_ignored(shared_daemon: tuple[LocalDaemon, Collector]) -> None:
    daemon, to = shared_daemon
    with greeted(daemon) as (peer, _):
        for context in MALFORMED:
            assert (peer.send(context), peer.ask(m.Ping(2)))[1] == m.Value(2, 0)
        last = bytes([9]) * 16
        peer.send(m.TraceContext(2, last, SPAN, 1), m.Ping(2))
        assert peer.receive() == m.Value(2, 0)
    eventually(lambda: any(each.trace == last for each in to.spans))
    assert {each.trace for each in to.spans if each.name == "kvstore.daemon.ping"} == {last}


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (m.TraceContext(2, TRACE, SPAN, -1), "TraceContext.flags is -1"),
        (m.TraceContext(2, "x" * 16, SPAN, 1), "TraceContext.trace is 'x"),  # type: ignore[arg-type]
        (pack(m.TraceContext(2, TRACE, SPAN, 1))[:-1] + b"\xc1", "is not MessagePack"),
    ],
)
def test_a_message_that_is_no_context_ends_only_its_connection(
    context: Any, why: str, shared_daemon: tuple[LocalDaemon, Collector]
) -> None:
    daemon, _ = shared_daemon
    with Peer(daemon.socket) as good, Peer(daemon.socket) as peer:
        good.hello()
        peer.hello()
        peer.send(context, m.Ping(2))
        assert why in peer.refused().why
        assert good.ask(m.Ping(1)) == m.Value(1, 0)


def test_a_context_may_come_byte_by_byte_or_be_torn(shared_daemon: tuple[LocalDaemon, Collector]) -> None:
    daemon, to = shared_daemon
    whole, torn = bytes([11]) * 16, bytes([12]) * 16
    with greeted(daemon) as (peer, _):
        for byte in pack(m.TraceContext(2, whole, SPAN, 1)) + pack(m.Ping(2)):
            peer.send(bytes([byte]))
        assert peer.receive() == m.Value(2, 0)
        peer.send(pack(m.TraceContext(3, torn, SPAN, 1))[:-3])
    with greeted(daemon) as (peer, _):
        assert peer.ask(m.Ping(3)) == m.Value(3, 0)
    eventually(lambda: any(each.trace == whole for each in to.spans))
    assert not [each for each in to.spans if each.trace == torn]


@given(trace=st.binary(max_size=20), span=st.binary(max_size=10), flags=st.integers(0, 1 << 20))
@example(trace=TRACE, span=SPAN, flags=1)
@example(trace=TRACE, span=SPAN, flags=0xFF)
def test_only_contexts_of_w3c_reach_the_exporter(trace: bytes, span: bytes, flags: int) -> None:
    taken: list[RequestTrace] = []
    traces = ConnectionTraces(taken.append, time.time, time.perf_counter)
    traces.note(m.decode(m.encode(m.TraceContext(1, trace, span, flags))))
    traces.begin(m.Ping(1), 0.0)
    traces.answered(m.Value(1, 0))
    header = f"00-{trace.hex()}-{span.hex()}-{flags:02x}"
    parent = get_current_span(TraceContextTextMapPropagator().extract({"traceparent": header}))
    context = parent.get_span_context()
    assert len(taken) == (context.is_valid and context.trace_flags.sampled)


def test_a_context_counts_for_the_next_request_only(shared_daemon: tuple[LocalDaemon, Collector]) -> None:
    daemon, to = shared_daemon
    own = bytes([7]) * 16

    def context(request: int) -> m.TraceContext:
        return m.TraceContext(request, own, SPAN, 3)

    with greeted(daemon) as (peer, _):
        peer.send(context(50), m.Ping(51), m.Ping(50))
        peer.send(*[context(n) for n in range(100)], m.Ping(1000))
        peer.send(context(60), m.Ping(60), m.Ping(61))
        peer.send(*(context(0), m.Suspect(0, 1, 1, b"k")))
        peer.send(context(70), context(71), m.Ping(71))
        for n in (51, 50, 1000, 60, 61, 71):
            assert peer.receive() == m.Value(n, 0)

    def mine() -> list[str]:
        return [each.name for each in to.spans if each.trace == own]

    eventually(lambda: mine().count("kvstore.daemon.ping") >= 2)
    assert (mine().count("kvstore.daemon.ping"), mine().count("kvstore.placement")) == (2, 2)
    assert set(mine()) <= {"kvstore.daemon.ping", "kvstore.placement", "kvstore.queue"}


def test_unanswered_requests_of_a_connection_are_traced_up_to_a_bound() -> None:
    taken: list[RequestTrace] = []
    traces = ConnectionTraces(taken.append, time.time, time.perf_counter)
    for n in range(1, MOST_OPEN + 100):
        traces.note(m.TraceContext(n, TRACE, SPAN, 1))
        traces.begin(m.Ping(n), 0.0)
        traces.ran(m.Ping(n))
    assert len(traces._open) == MOST_OPEN
    for n in range(1, MOST_OPEN + 100):
        traces.answered(m.Value(n, 0))
        traces.answered(m.Value(n, 0))
    assert len(taken) == MOST_OPEN
    assert not traces._open


def test_waiting_for_its_turn_is_a_phase() -> None:
    taken: list[RequestTrace] = []
    now = [100.0]
    traces = ConnectionTraces(taken.append, lambda: 5000.0, lambda: now[0])
    traces.note(m.TraceContext(3, TRACE, SPAN, 1))
    reserve = m.Reserve(3, 1, 1, b"ab", b"", 1.0)
    traces.begin(reserve, 2.0)
    now[0] += 0.5
    traces.ran(reserve)
    now[0] += 4.0
    traces.answered(m.Reserved(3, 9, 4096, b"", b"\0\3", "no room"))
    [whole] = taken
    assert (whole.arrived, whole.began_s, whole.ended_s) == (4998.0, 98.0, 104.5)
    assert whole.phases == [("queue", 98.0, 100.0), ("placement", 100.0, 100.5), ("room", 100.5, 104.5)]
    assert whole.attributes["kvstore.keys"] == 2
    assert (whole.attributes["kvstore.granted"], whole.attributes["kvstore.denied"]) == (1, 1)
    assert (whole.attributes["kvstore.outcome"], whole.attributes["kvstore.why"]) == ("refused", "no room")


# -- the collector


def test_a_collector_that_is_away_or_refuses_delays_nobody(collected: Collector) -> None:
    layout, keys = new_layout(), names(2)
    collected.status = 400
    with LocalDaemon(traced(SMALL, collected)) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns = client.namespace(layout)

        def dropped() -> int:
            n: int = client.status()["tracing"]["dropped_requests"]
            return n

        with span():
            assert ns.put(keys, payloads(keys)).stored == 2
        assert eventually(dropped) >= 2
        assert (daemon.folder / "daemon.log").read_text().count("takes no traces") == 1
        collected.status = 200
        with span():
            ns.acquire(keys).release()
        the(collected, "kvstore.daemon.acquire")
        eventually(lambda: "takes traces again" in (daemon.folder / "daemon.log").read_text())
    with (
        LocalDaemon({**SMALL, "tracing": {"collector": "http://127.0.0.1:9"}}) as daemon,
        Client(daemon.url, deadline_s=10) as client,
    ):
        ns = client.namespace(layout)
        with span():
            ns.put(keys, payloads(keys))
            began = time.monotonic()
            for _ in range(200):
                ns.acquire(keys).release()
            assert time.monotonic() - began < 5.0
        began = time.monotonic()
        daemon.stop()
        assert time.monotonic() - began < 8.0


class Stuck:
    """A sender that does not return before `release`."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.exports: list[Any] = []

    def export(self, spans: Any) -> Any:
        self.exports.append(spans)
        self.release.wait(30)
        raise OSError("no")


def a_trace(tenant: str = "default") -> RequestTrace:
    return RequestTrace("ping", tenant, m.TraceContext(1, TRACE, SPAN, 1), 1.0, 1.0, time.perf_counter, {})


def put(made: Exporter, tenant: str, n: int) -> float:
    """Hands n traces to an exporter. Returns the longest time of one, s."""
    took = 0.0
    for each in [a_trace(tenant) for _ in range(n)]:
        began = time.thread_time()
        made.put(each)
        took = max(took, time.thread_time() - began)
    return took


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    made = Stuck()
    monkeypatch.setattr(exporter, "_sender", lambda endpoint: made)
    yield made
    made.release.set()


def test_queues_are_bounded_and_drops_are_counted(stuck: Stuck) -> None:
    made = Exporter("http://nowhere", {})
    tenants = MOST_WAITING // MOST_OF_TENANT
    for n in range(tenants + 10):
        assert put(made, f"tenant {n}", MOST_OF_TENANT + 100) < 0.1
    # The first batch may be on its way.
    assert MOST_WAITING <= made._waiting + BATCH <= MOST_WAITING + BATCH
    dropped = (tenants + 10) * (MOST_OF_TENANT + 100) - MOST_WAITING
    assert dropped - BATCH <= made.counts["dropped_requests"] <= dropped
    began = time.monotonic()
    thread = made.close()
    assert time.monotonic() - began < 0.5
    stuck.release.set()
    thread.join(30)
    assert not thread.is_alive()
    assert made.counts["dropped_requests"] == (tenants + 10) * (MOST_OF_TENANT + 100)


def test_a_tenant_takes_no_room_and_no_turn_of_another(stuck: Stuck) -> None:
    made = Exporter("http://nowhere", {})
    put(made, "greedy", 1)
    eventually(lambda: stuck.exports)
    put(made, "greedy", 100_000)
    put(made, "modest", 5)
    assert made.counts["dropped_requests"] == 100_000 - MOST_OF_TENANT
    stuck.release.set()
    eventually(lambda: len(stuck.exports) >= 2)
    second = [each.attributes["kvstore.tenant"] for each in stuck.exports[1]]
    assert (len(second), second.count("modest")) == (BATCH, 5)
    made.close().join(30)


def test_exports_take_a_bounded_part_of_the_time(stuck: Stuck) -> None:
    stuck.release.set()
    made = Exporter("http://nowhere", {})
    began = time.monotonic()
    for tenant in ("a", "b"):
        put(made, tenant, MOST_OF_TENANT)
    eventually(lambda: made.counts["dropped_requests"] == 2 * MOST_OF_TENANT, 30.0)
    assert time.monotonic() - began >= 2 * MOST_OF_TENANT / BATCH * PAUSE_S
    made.close().join(30)


def test_without_the_extra_the_daemon_serves_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ConfigError, match=r"tracing\.collector needs OpenTelemetry") as told:
                Exporter("http://127.0.0.1:9", {})
        assert told.value.hint == "pip install 'kvstore[tracing]'"


def test_an_environment_that_the_exporter_refuses_is_a_problem_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(endpoint: str) -> Any:
        raise ValueError("nonsense")

    monkeypatch.setattr(exporter, "_sender", refuses)
    with pytest.raises(ConfigError, match=r"tracing\.collector cannot be used.*nonsense"):
        Exporter("http://127.0.0.1:9", {})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("collector:4318", "is not the address of a collector"),
        ("grpc://collector:4317", "is not the address of a collector"),
        ("http://", "is not the address of a collector"),
        ("http://collector:4318?key=1", "is not the address of a collector"),
        ("http://me:secret@collector:4318", "contains a password"),
    ],
)
def test_a_wrong_address_is_an_error(value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(f'[tracing]\ncollector = "{value}"')
    assert parse('[tracing]\ncollector = "http://c:4318/"').tracing.collector == "http://c:4318"


# -- what spans tell


def test_spans_have_the_tenant_of_the_connection_bounded_names_and_no_secrets(collected: Collector) -> None:
    tokens = {name: f"secret-{name}-{'t' * 32}" for name in ("a", "b")}
    tenants = "".join(
        f"[[tenants.{name}.tokens]]\nhash = 'sha256:{hash_of(token).hex()}'\n"
        for name, token in tokens.items()
    )
    keys, prompt, bytes_of_blocks = (
        names(3, "secret key"),
        [77_123_456, 77_123_457, 77_123_458],
        b"secret block",
    )
    layout = Layout(model="m", block_bytes=4096, block_tokens=1)
    with TenantDaemon(traced(SMALL, collected), tenants) as daemon:
        for token in tokens.values():
            with Client(daemon.url, token=token, deadline_s=10) as client, span():
                ns = client.namespace(layout)
                blocks = [bytes_of_blocks.ljust(4096)] * 3
                assert ns.put(keys, blocks, tokens=prompt).stored == 3
                assert ns.get(keys, np.zeros((3, 4096), np.uint8)) == 3
                ns.acquire(keys).release()
        with Peer(daemon.socket) as peer:
            peer.ask(m.Hello(m.MAGIC, m.VERSION, tokens["b"]))
            peer.send(m.TraceContext(1, TRACE, SPAN, 1), m.Lookup(1, 999, 4, b"secr", 1.0, 0.0))
            assert "unknown namespace" in peer.receive().why
        eventually(lambda: [each for each in collected.spans if each.trace == TRACE])
    by_trace: dict[bytes, set[str]] = {}
    for each in collected.spans:
        if "kvstore.tenant" in each.attributes:
            by_trace.setdefault(each.trace, set()).add(each.attributes["kvstore.tenant"])
    # Who names the trace of another is seen in it under its own name.
    assert sorted(map(sorted, by_trace.values())) == [["a"], ["b"], ["b"]]
    assert by_trace[TRACE] == {"b"}
    requests = {f"kvstore.daemon.{each.__name__.lower()}" for each in m.ALL}
    phases = {f"kvstore.{phase}" for phase in ("queue", "placement", "copies", "room", "completion")}
    assert {each.name for each in collected.spans} <= requests | phases
    mine = [repr((each.name, dict(each.attributes))) for each in _MEMORY.get_finished_spans()]
    assert len(mine) > 6
    told = b"".join(collected.bodies) + "".join(mine).encode()
    for secret in (b"secr", b"secr".hex().encode(), *(str(token).encode() for token in prompt)):
        assert secret not in told


def test_the_text_of_an_unexpected_error_is_not_told() -> None:
    def fails() -> Flow[int]:
        raise ValueError("a secret argument")
        yield

    with span():
        flow = traced_flow(Exchange(0.0, lambda *_: None, lambda _: None), fails(), ("get", None, (), {}))
        with pytest.raises(ValueError, match="secret"):
            next(flow)
    told = engine_spans()["kvstore.get"].attributes
    assert (told["kvstore.outcome"], told["kvstore.why"]) == ("failed", "ValueError")


def test_a_call_within_a_span_that_is_not_sampled_asks_for_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    flow: Flow[int] = iter(())  # type: ignore[assignment]
    with trace_parent(UNSAMPLED), monkeypatch.context() as patch:
        patch.setattr(trace, "get_tracer", lambda *_: asked.append(1))
        assert (
            traced_flow(Exchange(0.0, lambda *_: None, lambda _: None), flow, ("get", None, (), {})) is flow
        )
    assert not asked


# -- the end of the daemon


def test_a_stopping_daemon_exports_what_waits(collected: Collector) -> None:
    with LocalDaemon(traced(SMALL, collected)) as daemon:
        with Client(daemon.url, deadline_s=10) as client, span():
            client.namespace(new_layout()).put(names(1), payloads(names(1)))
        daemon.stop()
        assert len(collected.named("kvstore.daemon.commit")) == 1


def test_a_collector_that_never_answers_delays_a_stop_by_a_second_at_most() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = {**SMALL, "tracing": {"collector": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        with LocalDaemon(settings) as daemon:
            with Client(daemon.url, deadline_s=10) as client, span():
                for _ in range(3 * BATCH):
                    client.ping()
            began = time.monotonic()
            daemon.stop()
            # Each batch of the three is given up after 3 s.
            assert time.monotonic() - began < 5.0


# -- outcomes


@pytest.mark.parametrize(
    ("result", "failure", "told"),
    [
        (0, None, {"kvstore.blocks": 0, "kvstore.outcome": "miss"}),
        (3, None, {"kvstore.blocks": 3, "kvstore.outcome": "hit"}),
        (np.array([True, False]), None, {"kvstore.blocks": 1, "kvstore.outcome": "hit"}),
        (([], []), None, {"kvstore.blocks": 0, "kvstore.outcome": "miss"}),
        (0, ("refused", "no"), {"kvstore.outcome": "refused", "kvstore.why": "no"}),
        (None, ("failed", "v" * 999), {"kvstore.outcome": "failed", "kvstore.why": "v" * 200}),
        (None, None, {}),
        (
            [PutResult(1, 2, 0), PutResult(0, 0, 3, "no room")],
            None,
            {
                "kvstore.stored": 1,
                "kvstore.present": 2,
                "kvstore.denied": 3,
                "kvstore.outcome": "refused",
                "kvstore.why": "no room",
            },
        ),
    ],
)
def test_outcomes_are_told(result: Any, failure: tuple[str, str] | None, told: dict[str, Any]) -> None:
    assert outcome_of(result, failure) == told


def test_a_failure_of_the_callers_tracing_fails_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    with LocalDaemon(SMALL) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        ns = client.namespace(new_layout())
        with span(), monkeypatch.context() as patch:
            patch.setattr(trace, "get_tracer", broken)
            assert ns.lookup(names(1)) == 0
        with span(), monkeypatch.context() as patch:
            patch.setattr("opentelemetry.sdk.trace.Span.set_attributes", broken)
            assert ns.lookup(names(1)) == 0
