"""The calls of a client, answer by answer and without a daemon; and how both clients get their methods."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore import AsyncClient, AsyncNamespace, Client, Layout, Namespace, PutResult, native
from kvstore.client.calls import client as client_calls
from kvstore.client.calls import namespace, reads, scope, writes
from kvstore.client.calls.call import Connect, Exchange, Flow, Work
from kvstore.client.calls.presence import PRESENCE_SINCE
from kvstore.client.calls.scope import Chain, Scope
from kvstore.client.calls.writes import Wanted
from kvstore.client.extents import Maps
from kvstore.client.protocol import ProtocolState
from kvstore.errors import DeniedError, RemoteProtocolError
from kvstore.wire import messages as m
from kvstore.wire.frames import pack
from tests.daemons import BLOCK, names, payloads, room_for

LAYOUT = Layout("answers", BLOCK)
OPENED = m.Opened(1, 7, b"f" * 16)
WITHOUT_TABLES = PRESENCE_SINCE - 1
"""A version of the wire in which every lookup is a request."""


class Recorded:
    """A connection that records what is posted on it."""

    closed = False

    def __init__(self, protocol: ProtocolState) -> None:
        self.pid = os.getpid()
        self.protocol = protocol
        self.sent: list[object] = []

    lags = False

    def post(self, message: object) -> None:
        self.sent.append(message)


def protocol_of(batch_keys: int = 16) -> ProtocolState:
    protocol = ProtocolState("", Maps())
    protocol.welcome(m.Welcome(WITHOUT_TABLES, b"x", 1 << 20, batch_keys, batch_keys))
    return protocol


def exchange_on(protocol: ProtocolState | None = None) -> Exchange:
    exchange = Exchange(time.monotonic() + 10, lambda *_: None, lambda _: None)
    exchange.use(Recorded(protocol or protocol_of()))  # type: ignore[arg-type]
    return exchange


def answered(
    make: Callable[[Exchange], Flow], *answers: object, on: Exchange | None = None
) -> tuple[list[Any], Any]:
    """What a flow sends that gets these answers, and its result or the exception that ends it."""
    exchange = on or exchange_on()
    flow, sent, replies, reply = make(exchange), exchange.connection.sent, list(answers), None
    try:
        while True:
            step = flow.send(reply)
            if isinstance(step, Work):
                reply = step.call()
            else:
                sent.append(step)
                reply = replies.pop(0)
    except StopIteration as end:
        assert not replies
        return sent, end.value
    except DeniedError as error:
        return sent, error


def test_busy_is_a_refusal_with_a_retry_time() -> None:
    busy, space, keys = m.Busy(1, 0.25, "too many requests wait"), Scope(LAYOUT), names(2)
    chain = Chain(keys)
    for make in (
        lambda e: reads.lookup(e, space, keys),
        lambda e: reads.acquire(e, space, chain),
        lambda e: writes.put(e, Wanted(space, chain), payloads(keys)),
        lambda e: scope.count(e, space, m.Prefetch, chain),
        lambda e: namespace.publish(e, space, ["a"]),
        lambda e: namespace.forget(e, space),
    ):
        _, error = answered(make, OPENED, busy)
        assert isinstance(error, DeniedError)
        assert (error.message, error.hint) == ("too many requests wait", "try again in 0.25 s")
    assert isinstance(answered(client_calls.ask(m.Status(0), scope.value_of), busy)[1], DeniedError)


def test_a_put_refused_after_its_first_batch_counts_stored_blocks() -> None:
    keys, there = names(40), bytes([writes.PRESENT]) * 16
    reserved = m.Reserved(1, 0, BLOCK, b"", there, "")
    sent, result = answered(
        lambda e: writes.put(e, Wanted(Scope(LAYOUT), Chain(keys)), payloads(keys)),
        OPENED,
        reserved,
        m.Busy(2, 1.0, "busy"),
    )
    assert result == PutResult(present=16, denied=24, why="busy")
    assert sent[2].parent == keys[15]


def test_the_keys_of_a_put_are_sent_in_batches() -> None:
    keys, there = names(40), bytes([writes.PRESENT])
    sent, result = answered(
        lambda e: writes.put(e, Wanted(Scope(LAYOUT), Chain(keys)), payloads(keys)),
        OPENED,
        *(m.Reserved(1, 0, BLOCK, b"", there * n, "") for n in (16, 16, 8)),
    )
    assert result == PutResult(present=40)
    assert [message.keys for message in sent[1:]] == [b"".join(keys[at : at + 16]) for at in (0, 16, 32)]


def test_a_refused_commit_aborts_its_reservation() -> None:
    for refusal in (m.Busy(1, 1.0, "busy"), m.Denied(1, "no", "")):
        sent, error = answered(lambda e: writes.commit(e, 9, bytes(8), PutResult()), refusal)
        assert sent == [m.Commit(0, 9, bytes(8), b"\1"), m.Abort(9)]
        assert isinstance(error, DeniedError)


def test_several_puts_are_asked_side_by_side() -> None:
    """One round trip reserves, and one opens their namespace before; a refused one has its reason."""
    there = m.Reserved(1, 0, BLOCK, b"", bytes([writes.PRESENT]) * 2, "")
    puts = [(Wanted(Scope(LAYOUT), Chain(names(2, str(i)))), lambda _: True) for i in range(3)]
    sent, results = answered(
        lambda e: writes.put_each(e, puts), [OPENED] * 3, [there, m.Denied(2, "no", "try"), there]
    )
    assert [len(step.messages) for step in sent] == [3, 3]
    assert results == [PutResult(present=2), PutResult(denied=2, why="no (try)"), PutResult(present=2)]


@pytest.mark.skipif(native.presence is None, reason="the C extension was not built")
def test_a_presence_table_of_slots_that_no_block_fits_is_refused() -> None:
    protocol, space = protocol_of(), Scope(LAYOUT)
    protocol.version = PRESENCE_SINCE
    protocol.opened(space.key, (7, OPENED.fingerprint, LAYOUT))
    exchange, fd = exchange_on(protocol), os.memfd_create("table")
    os.ftruncate(fd, 4096)
    exchange.connection.take_descriptor = lambda: fd  # type: ignore[method-assign]
    mapped = m.MappedPresence(1, 4096, False, False, BLOCK - 1)
    with pytest.raises(RemoteProtocolError, match=f"blocks of {BLOCK} bytes in slots of {BLOCK - 1}"):
        answered(lambda e: reads.lookup(e, space, names(2)), mapped, on=exchange)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(fd)


def test_a_namespace_is_opened_again_after_a_refusal() -> None:
    protocol, keys = protocol_of(), names(1)
    space = Scope(LAYOUT, "team-a", 60.0)

    def look(*answers: object) -> list[Any]:
        return answered(lambda e: reads.lookup(e, space, keys), *answers, on=exchange_on(protocol))[0]

    assert look(OPENED, m.Found(1, 0, False))[0] == m.Open(0, LAYOUT.to_map(), "team-a", 60.0)
    assert [type(message) for message in look(m.Found(1, 0, False))] == [m.Lookup]
    assert protocol.receive(pack(m.Denied(1, "taken back", ""))) == m.Denied(1, "taken back", "")
    assert [type(message) for message in look(OPENED, m.Found(1, 0, False))] == [m.Open, m.Lookup]


def test_each_read_sends_the_recompute_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, keys, asked = Layout("m", BLOCK, block_tokens=16), names(1200), []

    def drive(self: Client, exchange: Exchange, flow: Flow) -> object:
        answers = {m.Open: OPENED, m.Lookup: m.Found(1, 0, False), m.Acquire: m.Granted(1, 0, BLOCK, b"")}
        reply: object = None
        try:
            while True:
                step = flow.send(reply)
                if isinstance(step, Connect):
                    reply = Recorded(protocol_of(4096))
                else:
                    asked.append(step)
                    reply = answers[type(step)]
        except StopIteration as end:
            return end.value

    monkeypatch.setattr(Client, "_drive", drive)
    told, plain = Client("unix:///x", recompute_tokens_per_s=8000), Client("unix:///x")
    for client, speed, expected in (
        (told, None, 0.002),
        (told, 1600, 0.01),
        (plain, 1600, 0.01),
        (plain, None, 0.0),
    ):
        asked.clear()
        ns = client.namespace(layout)
        ns.lookup(keys, recompute_tokens_per_s=speed)
        ns.get(keys, room_for(len(keys)), recompute_tokens_per_s=speed)
        ns.acquire(keys, recompute_tokens_per_s=speed)
        reads = [step for step in asked if isinstance(step, m.Lookup | m.Acquire)]
        assert {step.recompute_s for step in reads} == {expected}
        lookups = [len(step.keys) // 32 for step in reads if isinstance(step, m.Lookup)]
        # Where what loading takes counts, no sample of the keys is asked.
        assert lookups == ([1200] if expected else [35, 33])
    asked.clear()
    told.namespace(LAYOUT).lookup(keys)
    assert asked[-1].recompute_s == 0, "a layout that does not say how many tokens a block has"


def test_both_clients_have_the_same_calls_with_their_signatures() -> None:
    for blocking, awaiting in ((Client, AsyncClient), (Namespace, AsyncNamespace)):
        calls = [
            name for name in vars(blocking) if not name.startswith("_") and name not in ("close", "namespace")
        ]
        assert calls
        for name in calls:
            ours, theirs = getattr(blocking, name), getattr(awaiting, name)
            assert inspect.signature(ours) == inspect.signature(theirs)
            assert "Call" not in str(inspect.signature(ours))
            assert ours.__doc__ == theirs.__doc__
            assert ours.__doc__, name
            assert inspect.iscoroutinefunction(theirs)
            assert not inspect.iscoroutinefunction(ours)
    assert inspect.signature(Namespace.lookup).return_annotation == "int"
    assert list(inspect.signature(Namespace.pin).parameters) == ["self", "keys", "ttl_s"]
