"""Many connections, silent ones, and frames that take long: who sends them has a bound, others are served."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import msgpack
import pytest

from kvstore import Client
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from kvstore.wire.frames import pack
from tests.daemons import SMALL, Peer, eventually, got, log_of, names, new_layout, payloads
from tests.tenants import (
    ATTACKER,
    VICTIM,
    Member,
    TenantDaemon,
    acting_as,
    acting_as_root,
    needs_root,
    peer_of,
)

MIB = 1 << 20
TENANTS = f"[tenants.victim]\nuids = [{VICTIM}]\n[tenants.attacker]\nuids = [{ATTACKER}]\n"
HELLO = m.Hello(m.MAGIC, m.VERSION, "")


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(SMALL) as served:
        yield served


@pytest.fixture(scope="module")
def shared() -> Iterator[TenantDaemon]:
    with TenantDaemon({**SMALL, "limits": {"connections": 80}}, TENANTS) as served:
        yield served


def _array(n: int, item: bytes) -> bytes:
    """The head of an array of so many items, and these."""
    return b"\xdd" + struct.pack(">I", n) + item * n


def _fan(n: int, item: bytes) -> bytes:
    """Arrays of 1000 items each."""
    return b"\xdc" + struct.pack(">H", n) + (b"\xdc" + struct.pack(">H", 1000) + item * 1000) * n


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (_array(MIB, b"\xd4\x01\x00"), f"{MIB} exceeds max_array_len(1024)"),
        (_array(4 * MIB - 8, b"\x80"), "exceeds max_array_len(1024)"),
        (_fan(1000, b"\x80"), "more than 16384 values in lists and maps"),
        (_fan(1000, b"\xd4\x01\x00"), "exceeds max_ext_len(0)"),
        (b"\x94\x24\x01\xa1x\x81\xa1y" + _fan(20, b"\x01"), "more than 16384 values in lists and maps"),
        (msgpack.packb((36, 1, "x", {str(i): i for i in range(1025)})), "1025 exceeds max_map_len(1024)"),
    ],
    ids=["extensions", "maps", "maps in lists", "extensions in lists", "numbers in a call", "keys in a call"],
)  # fmt: skip
def test_a_request_of_too_many_values_ends_its_connection(daemon: LocalDaemon, body: bytes, why: str) -> None:
    with Peer(daemon.socket) as peer:
        peer.hello()
        with suppress(BrokenPipeError):
            peer.send(struct.pack("<I", len(body)), body)
        assert why in peer.refused().why


@needs_root
def test_a_tenants_request_has_fewer_values_than_an_operators(shared: TenantDaemon) -> None:
    call = m.Control(1, "none", {"x": [[1] * 100] * 100})
    with Peer(shared.socket) as operator:
        operator.hello()
        assert isinstance(operator.ask(call), m.Denied)
    with peer_of(shared, ATTACKER) as peer:
        peer.send(call)
        assert "more than 1024 values in lists and maps" in peer.refused().why


@needs_root
def test_many_connections_of_one_user_do_not_delay_other_users() -> None:
    with TenantDaemon(SMALL, TENANTS) as own, ExitStack() as held:
        crowd: list[Peer] = []
        with acting_as(ATTACKER):
            ends = time.monotonic() + 2.0
            while time.monotonic() < ends and len(crowd) < 2000:
                with suppress(BlockingIOError):
                    crowd.append(held.enter_context(Peer(own.socket)))
                if len(crowd) % 500 == 100:
                    with acting_as_root(), Member(own, VICTIM, deadline_s=1.0) as victim:
                        victim.ping()
        assert len(crowd) >= 600
        # Opened are what may be at once, and what the rate allows; those beyond are closed unheard.
        eventually(lambda: any(not peer.quiet(for_s=0) and _unheard(peer) for peer in crowd))


def _unheard(peer: Peer) -> bool:
    """Whether the daemon hung up without a word."""
    try:
        return peer.receive() is None
    except ConnectionResetError:
        return True


@needs_root
def test_unread_answers_are_bounded_per_tenant(shared: TenantDaemon) -> None:
    before = _rss(shared)
    keys = b"".join(struct.pack("<Q", n) for n in range(4096))  # 4 KiB of answer each
    with ExitStack() as held:
        peers = [held.enter_context(peer_of(shared, ATTACKER)) for _ in range(8)]
        frames = [pack(m.Contains(2, peer.open(new_layout()).namespace, 8, keys, 0.0)) for peer in peers]
        unsent = [b""] * len(peers)
        ends = time.monotonic() + 30.0
        while "does not read its answers" not in log_of(shared) and time.monotonic() < ends:
            for n, peer in enumerate(peers):
                peer.sock.settimeout(0.01)
                with suppress(TimeoutError, OSError):
                    unsent[n] = unsent[n] or frames[n]
                    unsent[n] = unsent[n][peer.sock.send(unsent[n]) :]
            assert _rss(shared) - before < 128 * MIB
        assert "does not read its answers" in log_of(shared)
        with Member(shared, VICTIM) as member:
            assert member.status()["connections"] == 1


def test_long_frames_and_many_frames_have_separate_limits(daemon: LocalDaemon) -> None:
    with Peer(daemon.socket) as peer:
        peer.hello()
        number = peer.open(new_layout()).namespace
        found = peer.ask(m.Lookup(2, number, 64, b"".join(bytes([i % 256]) * 64 for i in range(4096)), 0, 0))
        assert isinstance(found, m.Found)


def test_a_stranger_sends_little(daemon: LocalDaemon) -> None:
    # Packed before the connection: a stranger has 5 s for its Hello.
    frame = pack(m.Hello(m.MAGIC, m.VERSION, "", tuple({} for _ in range(4 * MIB - 100))), 1 << 30)
    with Peer(daemon.socket) as peer:
        with suppress(BrokenPipeError):
            peer.send(frame)
        assert "the limit is 4096" in peer.refused().why


def test_silent_strangers_do_not_block_other_users(daemon: LocalDaemon) -> None:
    with ExitStack() as held, Client(daemon.url, strict=True, deadline_s=10) as client:
        first = held.enter_context(Peer(daemon.socket))
        for _ in range(260):
            held.enter_context(_silent(daemon))
        assert first.refused().why == "256 peers have not said Hello"
        ns, keys = client.namespace(new_layout()), names(5)
        assert ns.put(keys, payloads(keys)).stored == 5
        assert got(ns, keys) == 5


@needs_root
def test_new_connections_of_a_crowding_user_replace_its_oldest(shared: TenantDaemon) -> None:
    with ExitStack() as held:
        with acting_as(VICTIM):
            quiet = held.enter_context(Peer(shared.socket))
        with acting_as(ATTACKER):
            crowd = [held.enter_context(_silent(shared)) for _ in range(270)]
        assert crowd[0].refused().why == "256 peers have not said Hello"
        assert isinstance(quiet.ask(HELLO), m.Welcome), "of another user"


@needs_root
def test_connections_are_reserved_for_other_tenants_and_operators(shared: TenantDaemon) -> None:
    with ExitStack() as held:
        for uid, most in ((ATTACKER, range(40, 60)), (VICTIM, range(10, 30))):
            n = 0
            while True:
                with acting_as(uid):
                    peer = held.enter_context(Peer(shared.socket))
                answer = peer.ask(HELLO)
                if isinstance(answer, m.Failure):
                    break
                n += 1
            assert n in most
            assert answer.why.startswith(f"{n} clients of tenant")
            assert "raise limits.connections" in answer.hint
        with Client(shared.url, strict=True, deadline_s=10) as operator:
            assert operator.status()["connections"] >= 50
    with Member(shared, VICTIM) as member:
        eventually(member.status)


@needs_root
def test_frames_that_do_not_end_have_a_bound_for_each_tenant(shared: TenantDaemon) -> None:
    before = _rss(shared)
    part = struct.pack("<I", 4 * MIB) + bytes(4 * MIB - 1)
    with ExitStack() as held:
        peers = [held.enter_context(peer_of(shared, ATTACKER)) for _ in range(30)]
        for peer in peers:
            with suppress(BrokenPipeError, ConnectionResetError):
                peer.send(part)
        eventually(lambda: "frames of this tenant that have not ended take" in log_of(shared))
        assert _rss(shared) - before < 128 * MIB
        with Member(shared, VICTIM) as member:
            ns, keys = member.namespace(new_layout()), names(5)
            assert ns.put(keys, payloads(keys)).stored == 5
            assert got(ns, keys) == 5


@pytest.mark.long
def test_a_frame_has_to_end(daemon: LocalDaemon) -> None:
    with Peer(daemon.socket, wait_s=30) as peer, Peer(daemon.socket, wait_s=30) as slow:
        peer.hello()
        slow.hello()
        peer.send(pack(m.Ping(7))[:-1])
        frames = pack(m.Ping(1)) * 26
        for at in range(0, len(frames), 9):
            # Always in the middle of a frame, of another one each time.
            slow.send(frames[at : at + 9])
            slow.quiet(for_s=0.5)
        assert peer.refused().why == "a frame has not ended within 10 s"
        assert slow.ask(m.Status(3)) is not None


def _silent(daemon: LocalDaemon) -> Peer:
    """A connection, as soon as there is room in the queue of those to be accepted."""

    def connected() -> Peer | None:
        try:
            return Peer(daemon.socket)
        except BlockingIOError:
            return None

    return cast(Peer, eventually(connected))


def _rss(daemon: LocalDaemon) -> int:
    return int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[1]) * 4096
