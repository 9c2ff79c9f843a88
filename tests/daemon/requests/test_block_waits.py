"""Calls that wait for a block (`Acquire.wait_s`): what wakes them, what ends them, how many there may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import Layout
from kvstore.wire import messages as m
from tests.daemons import SMALL, Peer, eventually, names, new_layout, payloads

LIMITED: dict[str, Any] = {**SMALL, "limits": {"queued_requests": 4}}
KEYS = names(3)


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(LIMITED) as served:
        yield served


def waiting(namespace: int, request: int, keys: list[bytes] = KEYS, wait_s: float = 30.0) -> m.Acquire:
    return m.Acquire(request, namespace, 32, b"".join(keys), 60.0, 0.0, "", wait_s)


def opened(daemon: LocalDaemon, layout: Layout, wait_s: float = 5.0) -> tuple[Peer, int]:
    peer = Peer(daemon.socket, wait_s)
    peer.hello()
    return peer, peer.open(layout).namespace


def begin(peer: Peer, *calls: m.Acquire) -> None:
    """Sends calls, and returns when the daemon has seen them: none is answered before the Ping."""
    peer.send(*calls)
    assert peer.ask(m.Ping(99)) == m.Value(99, 0)


def test_a_block_wakes_those_that_wait_for_it_alone(daemon: LocalDaemon) -> None:
    layout = new_layout()
    peer, space = opened(daemon, layout)
    with peer, Client(daemon.url, strict=True) as client:
        begin(peer, waiting(space, 7), waiting(space, 8, KEYS[1:]))
        client.namespace(layout).put(KEYS[:1], payloads(KEYS[:1]))
        granted = peer.receive()
        assert isinstance(granted, m.Granted)
        assert granted.id == 7
        begin(peer)
        client.namespace(layout).put(KEYS[1:], payloads(KEYS[1:]), parent=KEYS[0])
        granted = peer.receive()
        assert isinstance(granted, m.Granted)
        assert granted.id == 8


def test_too_many_keys_are_refused_before_they_are_waited_for(daemon: LocalDaemon) -> None:
    peer, space = opened(daemon, new_layout())
    with peer:
        denied = peer.ask(waiting(space, 7, names(4097)))
        assert isinstance(denied, m.Denied)
        assert "4097 keys" in denied.why


def test_the_waits_of_a_tenant_are_bounded_over_all_connections(daemon: LocalDaemon) -> None:
    layout = new_layout()
    (one, space), (two, same) = opened(daemon, layout), opened(daemon, layout)
    with one, two:
        begin(one, *[waiting(space, i) for i in range(1, 4)])
        begin(two, waiting(same, 4))
        denied = two.ask(waiting(same, 5))
        assert isinstance(denied, m.Denied)
        assert "limits.queued_requests" in denied.hint
        one.close()

        def has_room() -> bool:
            two.send(waiting(same, 6), m.Ping(99))
            return isinstance(two.receive(), m.Value) or two.receive() is None

        assert eventually(has_room)


def test_the_keys_that_a_tenant_waits_for_have_a_bound() -> None:
    keys = [bytes([i % 256, i // 256]) * 32 for i in range(4096)]
    layout = new_layout()
    with LocalDaemon(SMALL) as daemon:
        (one, space), (two, same) = opened(daemon, layout), opened(daemon, layout)
        with one, two:
            for i in range(1, 65):
                one.send(m.Acquire(i, space, 64, b"".join(keys), 60.0, 0.0, "", 30.0))
            begin(one)
            denied = two.ask(m.Acquire(9, same, 64, keys[0], 60.0, 0.0, "", 30.0))
            assert isinstance(denied, m.Denied)
            assert "at most 16777216" in denied.why


def test_a_wait_ends_with_its_namespace(daemon: LocalDaemon) -> None:
    layout = new_layout()
    peer, space = opened(daemon, layout)
    with peer, Client(daemon.url, strict=True) as client:
        begin(peer, waiting(space, 7))
        client.namespace(layout).invalidate()
        ended = peer.receive()
        assert isinstance(ended, m.Granted)
        assert not ended.slots


@pytest.mark.long
def test_nothing_is_waited_for_longer_than_a_minute(daemon: LocalDaemon) -> None:
    peer, space = opened(daemon, new_layout(), 70.0)
    with peer:
        ended = peer.ask(waiting(space, 7, wait_s=3600.0))
        assert isinstance(ended, m.Granted)
        assert not ended.slots
