"""Bad input and faults: each gets an error that names the thing and a hint, and hurts nobody else."""

from __future__ import annotations

import inspect
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import Client, Tier
from kvstore.client.sync import Namespace
from kvstore.core.actions import GRANTED
from kvstore.errors import TierError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.nvme.store import RecordStore
from kvstore.types import SLOT_RECORD, Geometry
from kvstore.wire import messages as m
from kvstore.wire.frames import pack
from tests.daemons import (
    BLOCK,
    SMALL,
    WITH_NVME,
    Peer,
    check_limits,
    cli,
    eventually,
    frame,
    got,
    greeted,
    idle,
    log_of,
    names,
    new_layout,
    payload,
    payloads,
    room_for,
    tier,
)
from tests.processes import stop
from tests.tenants import VICTIM, as_user, needs_root
from tests.tiers.nvme.disks import KINDS, small_disk

FRAME_LIMIT = 4 << 20
MIB = 1 << 20
CLIENT = "is the peer a kvstore client?"


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(WITH_NVME) as served:
        yield served


@pytest.fixture(scope="module")
def silent(daemon: LocalDaemon) -> Iterator[Peer]:
    """A peer that says nothing from the first test on."""
    with Peer(daemon.socket, wait_s=10) as peer:
        yield peer


@pytest.fixture(scope="module")
def bystander(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=5, strict=True) as client:
        yield client


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around every test of the shared daemon: another client's connection and blocks are as before."""
    if "daemon" not in inspect.signature(request.function).parameters:
        yield
        return
    request.getfixturevalue("silent")
    client = request.getfixturevalue("bystander")
    served = request.getfixturevalue("daemon")
    log_before = len(log_of(served))
    ns = client.namespace(new_layout())
    keys = names(4, request.node.name)
    ns.put(keys[:2], payloads(keys[:2]))
    with ns.acquire(keys[:2]) as lease:
        yield
        assert [bytes(view) for view in lease.blocks] == [payload(k) for k in keys[:2]]
    assert ns.put(keys, payloads(keys)).stored == 2
    assert got(ns, keys) == 4
    status = client.status()
    assert status["pid"] == served.pid
    assert "Traceback" not in log_of(served)[log_before:]
    check_limits(status)


def alone(bystander: Client) -> bool:
    """Nobody else is connected: who was, has left or was cut off, the silent one too (within 5 s)."""
    return int(bystander.status()["connections"]) == 1


@contextmanager
def victim(daemon: LocalDaemon) -> Iterator[tuple[Peer, int, list[bytes]]]:
    """A peer with a namespace and blocks in it."""
    layout, keys = new_layout(), names(3)
    with Client(daemon.url, deadline_s=5, strict=True) as client:
        client.namespace(layout).put(keys, payloads(keys))
    with greeted(daemon, layout) as (peer, number):
        yield peer, number, keys


# -- what a peer may send


@pytest.mark.parametrize(
    ("raw", "why", "hint"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "a frame of 542393671 bytes", CLIENT),
        (b"\xff" * 64, "a frame of 4294967295 bytes, the limit is 4096", CLIENT),
        (struct.pack("<I", 4097), "a frame of 4097 bytes, the limit is 4096", CLIENT),
        (frame(b"\xc1garbage"), "a frame of 8 bytes is not MessagePack", ""),
        (bytes(4), "a frame of 0 bytes is not MessagePack", ""),
        (frame(b"\x93\xcd\xff\xff\x01\x02"), "unknown message tag 65535", "a newer protocol?"),
        (frame(b"\xa5hello"), "not an array that starts with a tag", ""),
        (frame(b"\x92\x00\x01"), "Hello has 1 fields instead of 4", ""),
        (pack(m.Ping(1)), "Ping before Hello", CLIENT),
        (pack(m.Lookup(1, 1, 4, b"abcd", 0.0, 0.0)), "Lookup before Hello", CLIENT),
        (pack(m.Hello("redis", 1, "")), "not a kvstore client", ""),
        (pack(m.Hello(m.MAGIC, 99, "")), "version 99, this daemon versions 7 to 13", "upgrade the daemon"),
        (frame(b"\x92\x02" + b"\x91" * 1000 + b"\x01"), "Ping", ""),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)  # fmt: skip
def test_strangers_are_refused_with_a_reason(daemon: LocalDaemon, raw: bytes, why: str, hint: str) -> None:
    with Peer(daemon.socket) as peer:
        peer.send(raw)
        failure = peer.refused()
    assert why in failure.why
    assert hint in failure.hint


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (m.Hello(m.MAGIC, m.VERSION, ""), "a second Hello"),
        (m.Welcome(1, b"", 1, 1, 1), "Welcome is not for the daemon"),
        (m.Value(1, 1), "Value is not for the daemon"),
        (m.Failure("no", ""), "Failure is not for the daemon"),
        (frame(b"\xc1"), "not MessagePack"),
        (m.Lookup(1, 1, 0, b"", 0.0, 0.0), "keys of 0 bytes"),
        (m.Lookup(1, 1, 65, bytes(65), 0.0, 0.0), "keys of 65 bytes"),
        (m.Lookup(1, 1, 8, bytes(9), 0.0, 0.0), "9 bytes of keys are no multiple of 8"),
        (m.Reserve(1, 1, 4, b"abcd", bytes(65), 1.0), "a parent key of 65 bytes"),
        (m.Commit(1, 1, bytes(8), b"\1\1"), "8 bytes of checksums for 2 blocks"),
        (m.Failure("x" * FRAME_LIMIT, ""), f"the limit is {FRAME_LIMIT}"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_peers_that_break_the_protocol_are_disconnected_with_a_reason(
    daemon: LocalDaemon, message: Any, why: str
) -> None:
    with victim(daemon) as (peer, _, _):
        threading.Thread(target=send_in_spite, args=(peer, message)).start()
        assert why in peer.refused().why


def send_in_spite(peer: Peer, message: Any) -> None:
    """The other side may hang up before it has read everything."""
    with suppress(OSError):
        peer.send(message)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf"), -1.0, 1e300])
def test_invalid_times_are_harmless(daemon: LocalDaemon, bystander: Client, seconds: float) -> None:
    with victim(daemon) as (peer, ns, keys):
        joined = b"".join(keys)
        for query in (
            m.Pin(5, ns, 32, joined, seconds),
            m.Acquire(6, ns, 32, joined, seconds, 0.0),
            m.Reserve(7, ns, 32, names(1, "new")[0], b"", seconds),
        ):
            try:
                peer.send(query)
                answer = peer.receive()
            except ConnectionError:
                break
            if answer is None or isinstance(answer, m.Failure):
                break
            assert isinstance(answer, m.Value | m.Granted | m.Reserved | m.Denied)
        bystander.ping()
        with Client(daemon.url, strict=True) as fresh:
            fresh.namespace(new_layout()).pin(keys, ttl_s=0.01)
            assert fresh.namespace(new_layout()).lookup(keys) == 0
        time.sleep(0.05)
        bystander.ping()


def test_requests_about_unknown_namespaces_are_denied_and_the_connection_stays_open(
    daemon: LocalDaemon,
) -> None:
    with greeted(daemon) as (peer, opened):
        for number in (opened + 77, 0, 2**64 - 1):
            for query in (
                m.Lookup(5, number, 4, b"abcd", 0.0, 0.0),
                m.Acquire(5, number, 4, b"abcd", 0.1, 0.0),
                m.Reserve(5, number, 4, b"abcd", b"", 0.1),
                m.Prefetch(5, number, 4, b"abcd"),
                m.Pin(5, number, 4, b"abcd", 1.0),
                m.Unpin(5, number, 4, b"abcd"),
                m.Invalidate(5, number, 4, b"abcd"),
            ):
                answer = peer.ask(query)
                assert isinstance(answer, m.Denied)
                assert (answer.id, answer.why) == (5, f"unknown namespace {number}")
                assert answer.hint == "open the namespace on this connection first"
            peer.send(m.Suspect(0, number, 4, b"abcd"))
        assert peer.ask(m.Lookup(6, opened, 4, b"abcd", 0.0, 0.0)).value == 0


def test_a_namespace_opened_by_another_is_not_open_here(daemon: LocalDaemon) -> None:
    with (
        victim(daemon) as (_, number, keys),
        greeted(daemon) as (stranger, own),
        Peer(daemon.socket) as empty,
    ):
        assert own == number, "numbers are the connection's own"
        assert stranger.ask(m.Lookup(2, number, 32, keys[0], 0.0, 0.0)).value == 0
        empty.hello()
        answer = empty.ask(m.Lookup(2, number, 32, keys[0], 0.0, 0.0))
        assert isinstance(answer, m.Denied)
        assert answer.why == f"unknown namespace {number}"


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({}, "missing"),
        ({"model": "", "block_bytes": 1}, "layout.model is empty"),
        ({"model": "m", "block_bytes": 0}, "layout.block_bytes is 0"),
        ({"model": "m", "block_bytes": -1}, "layout.block_bytes is -1"),
        ({"model": "m", "block_bytes": (64 << 20) + 1}, "layout.block_bytes is 67108865"),
        ({"model": "m", "block_bytes": "4096"}, "layout.block_bytes is '4096'"),
        ({"model": "m" * 2000, "block_bytes": 1}, "layout.model is"),
        ({"model": "m", "block_bytes": 1, "colour": "red"}, "colour"),
        ({"model": "m", "block_bytes": 8 << 20}, "8388608 bytes does not fit into an extent"),
    ],
)
def test_layouts_that_make_no_sense_are_denied_and_named(
    daemon: LocalDaemon, layout: dict[str, Any], why: str
) -> None:
    with greeted(daemon) as (peer, _):
        answer = peer.ask(m.Open(8, layout, "", 0.0))
        assert isinstance(answer, m.Denied)
        assert why in answer.why
        assert peer.ask(m.Ping(9)) == m.Value(9, 0)


def test_too_many_keys_are_denied_with_the_limit(daemon: LocalDaemon) -> None:
    with Peer(daemon.socket) as peer:
        limits = peer.hello()
        number = peer.open(new_layout()).namespace
        answer = peer.ask(m.Lookup(5, number, 1, bytes(limits.batch_keys + 1), 0.0, 0.0))
        assert isinstance(answer, m.Denied)
        assert answer.why == f"{limits.batch_keys + 1} keys in one call"
        assert answer.hint == f"at most {limits.batch_keys} keys a call"
        keys = b"".join(i.to_bytes(4, "big") for i in range(limits.reserve_keys + 1))
        answer = peer.ask(m.Reserve(6, number, 4, keys, b"", 0.1))
        assert isinstance(answer, m.Denied)
        assert str(limits.reserve_keys) in answer.hint


def test_a_key_twice_in_a_reservation_is_denied(daemon: LocalDaemon) -> None:
    with greeted(daemon) as (peer, number):
        answer = peer.ask(m.Reserve(5, number, 4, b"abcdefghabcd", b"", 0.1))
        assert isinstance(answer, m.Denied)
        assert answer.why == "a key occurs twice in one call"


def test_a_repeated_key_is_harmless(daemon: LocalDaemon, bystander: Client) -> None:
    with victim(daemon) as (peer, number, keys):
        for _ in range(3):
            granted = peer.ask(m.Acquire(5, number, 32, keys[0] * 5, 1.0, 0.0))
            peer.send(m.Invalidate(6, number, 32, keys[0]))
            if isinstance(granted, m.Granted):
                peer.send(m.Release(granted.lease))
            peer.receive()
            room = peer.ask(m.Reserve(7, number, 32, keys[0], b"", 1.0))
            if isinstance(room, m.Reserved) and room.lease:
                peer.ask(m.Commit(8, room.lease, bytes(8), b"\1"))
    assert eventually(lambda: not bystander.status()["copies_under_way"])


def test_leases_of_others_cannot_be_ended(daemon: LocalDaemon, bystander: Client) -> None:
    with victim(daemon) as (peer, number, keys), greeted(daemon) as (thief, _):
        granted = peer.ask(m.Acquire(5, number, 32, keys[0], 1.0, 0.0))
        assert granted.lease
        before = bystander.status()["leases"]
        thief.send(m.Release(granted.lease), m.Abort(granted.lease), m.Release(2**64 - 1))
        denied = thief.ask(m.Commit(1, granted.lease, bytes(8), b"\1"))
        assert isinstance(denied, m.Denied)
        assert denied.why == f"no reservation {granted.lease}"
        assert bystander.status()["leases"] == before


def test_a_commit_of_the_wrong_length_is_denied_and_frees_the_slots(
    daemon: LocalDaemon, bystander: Client
) -> None:
    with greeted(daemon) as (peer, number):
        room = peer.ask(m.Reserve(5, number, 4, b"abcdefgh", b"", 0.1))
        answer = peer.ask(m.Commit(6, room.lease, bytes(8), b"\1"))
        assert isinstance(answer, m.Denied)
        assert answer.why == "1 checksums for 2 blocks"
        assert bystander.status()["reservations"] == 0
        assert peer.ask(m.Lookup(7, number, 4, b"abcd", 0.0, 0.0)).value == 0


def test_a_frame_cut_short_by_the_end_is_no_message(daemon: LocalDaemon, bystander: Client) -> None:
    for at in (1, 3, 4, 5, 20):
        with victim(daemon) as (peer, number, keys):
            peer.send(pack(m.Invalidate(3, number, 32, keys[0]))[:at])
            peer.sock.shutdown(socket.SHUT_WR)
            assert peer.receive() is None
    eventually(lambda: alone(bystander))
    assert "in the middle of a frame" in log_of(daemon)


def test_frames_may_come_byte_by_byte(daemon: LocalDaemon) -> None:
    with Peer(daemon.socket) as peer:
        for byte in pack(m.Hello(m.MAGIC, m.VERSION, "")) + pack(m.Ping(7)):
            peer.send(bytes([byte]))
        assert isinstance(peer.receive(), m.Welcome)
        assert peer.receive() == m.Value(7, 0)


def test_a_peer_that_disconnects_before_its_answer_causes_no_error(daemon: LocalDaemon) -> None:
    for _ in range(30):
        with greeted(daemon) as (peer, number):
            peer.send(*[m.Map(1, 0, False), m.Status(2), m.Lookup(3, number, 4, b"abcd", 0.0, 0.0)] * 3)


def test_many_requests_at_once_are_answered_in_order(daemon: LocalDaemon) -> None:
    with victim(daemon) as (peer, number, keys):
        joined = b"".join(keys)
        peer.send(*(m.Lookup(i, number, 32, joined, 0.0, 0.0) for i in range(2000)))
        answers = [peer.receive() for _ in range(2000)]
        assert [(answer.id, answer.value) for answer in answers] == [(i, 3) for i in range(2000)]


def test_a_peer_that_reads_nothing_is_cut_off(daemon: LocalDaemon, bystander: Client) -> None:
    with victim(daemon) as (peer, _, _):
        peer.sock.settimeout(60)
        requests = b"".join(pack(m.Status(i)) for i in range(1000))
        with suppress(OSError):
            for _ in range(60):
                peer.sock.sendall(requests)
                bystander.ping()
            pytest.fail("nobody stopped it")
    eventually(lambda: alone(bystander))
    assert "does not read its answers" in log_of(daemon)


def test_excess_connections_are_refused_with_a_reason() -> None:
    with LocalDaemon({**SMALL, "limits": {"connections": 2}}) as daemon, ExitStack() as held:
        for _ in range(2):
            held.enter_context(greeted(daemon))
        with Peer(daemon.socket) as third:
            third.send(m.Hello(m.MAGIC, m.VERSION, ""))
            failure = third.refused()
        assert failure.why == "2 clients are connected"
        assert "raise limits.connections" in failure.hint
        with pytest.raises(UnavailableError, match="2 clients are connected"):
            Client(daemon.url).ping()
        held.close()

        def comes_in() -> bool:
            with Peer(daemon.socket) as peer:
                return isinstance(peer.ask(m.Hello(m.MAGIC, m.VERSION, "")), m.Welcome)

        assert eventually(comes_in)


# -- clients that die


_HOLDER = """
import os, sys, time
from kvstore import Client, Layout
client = Client(sys.argv[1], deadline_s=5)
ns = client.namespace(Layout(model=sys.argv[2], block_bytes=int(sys.argv[3])))
keys = [bytes([i]) * 32 for i in range(8)]
assert ns.put(keys, [bytes([i]) * int(sys.argv[3]) for i in range(8)]).stored == 8
leases = [ns.acquire(keys) for _ in range(3)]
room = ns.reserve([b"n" * 32, b"m" * 32], parent=keys[-1])
room.fill(0, b"x" * int(sys.argv[3]))
room.write(1, b"half")
print("holding", flush=True)
time.sleep(60)
"""


def test_a_killed_client_frees_its_leases_and_its_half_put_shows_nothing(
    daemon: LocalDaemon, bystander: Client
) -> None:
    layout = new_layout()
    eventually(lambda: not bystander.status()["copies_under_way"])
    before = bystander.status()
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, daemon.url, layout.model, str(BLOCK)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"holding\n"
        status = bystander.status()
        assert status["leases"] == before["leases"] + 3
        assert status["reservations"] == before["reservations"] + 1
        child.kill()
        child.wait()
    ended = time.monotonic()
    eventually(lambda: bystander.status()["leases"] == before["leases"], 2)
    eventually(lambda: bystander.status()["reservations"] == before["reservations"], 2)
    assert time.monotonic() - ended < 1, "at once"
    ns = bystander.namespace(layout)
    keys = [bytes([i]) * 32 for i in range(8)]
    assert ns.lookup([*keys, b"n" * 32]) == 8
    out = room_for(8)
    assert ns.get(keys, out) == 8
    assert (out == np.arange(8)[:, None]).all()
    assert ns.lookup([b"n" * 32]) == ns.get([b"n" * 32], room_for(1)) == 0
    assert ns.put([b"n" * 32], [payload(b"n")], parent=keys[-1]).stored == 1


def test_a_client_that_disconnects_while_it_waits_is_forgotten(
    daemon: LocalDaemon, bystander: Client
) -> None:
    with victim(daemon) as (peer, number, _):
        for i in range(50):
            peer.send(m.Reserve(i, number, 4, i.to_bytes(4, "big") * 1, b"", 30.0))
        peer.send(m.Acquire(99, number, 32, bytes(32), 30.0, 0.0))
    eventually(lambda: bystander.status()["reservations"] == 0, 2)


# -- bytes that change


def scribble(peer: Peer, granted: m.Granted | m.Reserved, payload_at: int = 100) -> None:
    """Alters the payload of the first granted slot through a writer's map."""
    place = int(np.frombuffer(granted.slots, SLOT_RECORD)["place"][0])
    mapped = peer.ask(m.Map(50, place >> 32, True))
    assert isinstance(mapped, m.Mapped)
    geometry = Geometry(mapped.extent_bytes, granted.slot_bytes, table=True)
    start = geometry.payload_offset + (place & 0xFFFFFFFF) * granted.slot_bytes
    os.pwrite(peer.fds[-1], b"scribble", start + payload_at)


@pytest.mark.parametrize("nvme", [True, False])
def test_a_payload_altered_in_shared_memory_is_found_quarantined_and_not_served(nvme: bool) -> None:
    layout, keys = new_layout(), names(3)
    with LocalDaemon(WITH_NVME if nvme else SMALL) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns = client.namespace(layout)
        ns.put(keys, payloads(keys))
        eventually(lambda: idle(client.status()))
        with greeted(daemon, layout) as (peer, number):
            granted = peer.ask(m.Acquire(5, number, 32, keys[1], 1.0, 0.0))
            scribble(peer, granted)
            with ns.acquire(keys) as lease:
                assert lease.verify() == 1
                assert lease.copy_into(room_for(3)) == 1
        status = eventually(lambda: (s := client.status())["counters"].get("quarantined_blocks") and s)
        assert tier(status, "dram")["retired_slots"] == 1
        assert got(ns, keys) == (3 if nvme else 1)
        if not nvme:
            assert ns.put(keys, payloads(keys)).stored == 1
            assert got(ns, keys) == 3
        check_limits(client.status())


def test_a_bad_copy_in_dram_is_put_out_of_the_way_and_the_good_one_on_nvme_is_served(
    daemon: LocalDaemon,
) -> None:
    layout, [key] = new_layout(), names(1)
    with Client(daemon.url, deadline_s=5) as client, greeted(daemon, layout) as (peer, number):
        ns = client.namespace(layout)
        ns.put([key], payloads([key]))
        eventually(lambda: not client.status()["copies_under_way"])
        scribble(peer, peer.ask(m.Acquire(5, number, 32, key, 1.0, 0.0)))
        # Found bad in DRAM, and fetched from NVMe by the same call.
        assert got(ns, [key]) == 1


def test_a_writer_that_lies_about_its_checksum_is_found_out(daemon: LocalDaemon) -> None:
    layout, [key] = new_layout(), names(1)
    with Client(daemon.url, deadline_s=5) as client, greeted(daemon, layout) as (peer, number):
        room = peer.ask(m.Reserve(5, number, 32, key, b"", 1.0))
        assert room.status == bytes([GRANTED])
        assert peer.ask(m.Commit(6, room.lease, b"\x11" * 8, b"\1")) == m.Value(6, 1)
        ns = client.namespace(layout)
        assert ns.get([key], room_for(1)) == 0
        # The copy on NVMe is as bad, and found out when it is read.
        assert eventually(lambda: not ns.get([key], room_for(1)) and ns.put([key], payloads([key])).stored)
        assert got(ns, [key]) == 1


@pytest.mark.parametrize("how", ["flip", "swap", "zero", "cut", "gone"])
def test_a_payload_altered_on_disk_while_stopped_is_a_miss(how: str) -> None:
    with LocalDaemon(WITH_NVME) as daemon:
        layout, keys = new_layout(), names(40)
        with Client(daemon.url, deadline_s=5) as client:
            client.namespace(layout).put(keys, payloads(keys))
            eventually(lambda: idle(client.status()))
        daemon.stop()
        slabs = sorted((daemon.folder / "nvme" / "slabs").iterdir())
        where = {slab.read_bytes().find(payload(keys[7])): slab for slab in slabs}
        [at] = [offset for offset in where if offset >= 0]
        slab = where[at]
        with slab.open("r+b") as file:
            data = file.read()
            if how == "cut":
                file.truncate(at + BLOCK // 2)
            file.seek(at)
            if how == "flip":
                file.write(bytes([data[at] ^ 1]))
            elif how == "zero":
                file.write(bytes(BLOCK))
            elif how == "swap":
                other = data.find(payload(keys[8]))
                file.write(data[other : other + BLOCK])
                file.seek(other)
                file.write(data[at : at + BLOCK])
        if how == "gone":
            slab.unlink()
        daemon.start()
        with Client(daemon.url, deadline_s=5) as client:
            ns = client.namespace(layout)
            found = got(ns, keys)
            if how in ("cut", "gone"):
                assert found <= 7
            else:
                assert found == 7
                assert eventually(lambda: client.status()["counters"].get("quarantined_blocks", 0)) >= 1
                assert got(ns, keys[9:]) == 31
            assert ns.put(keys, payloads(keys)).denied == 0
            assert got(ns, keys) == 40
            assert "Traceback" not in log_of(daemon)


def test_records_that_lmdb_cannot_read_are_moved_aside_and_the_tier_starts_empty() -> None:
    with LocalDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=5) as client:
        ns, keys = client.namespace(new_layout()), names(20)
        ns.put(keys, payloads(keys))
        daemon.stop()
        records = daemon.folder / "nvme" / "records" / "data.mdb"
        records.write_bytes(b"\x5a" * records.stat().st_size)
        daemon.start()
        [aside] = (daemon.folder / "nvme").glob("records.corrupt-*")
        [problem] = eventually(client.status)["problems"]
        assert f"were moved to {aside}: the NVMe tier starts empty" in problem
        assert str(aside) in log_of(daemon)
        assert "Traceback" not in log_of(daemon)
        assert got(ns, keys) == 0
        assert ns.put(keys, payloads(keys)).stored == 20
        daemon.restart()
        assert eventually(lambda: got(ns, keys)) == 20


def test_a_folder_of_another_version_is_refused_and_left_alone() -> None:
    with LocalDaemon(WITH_NVME) as daemon:
        daemon.stop()
        records = daemon.folder / "nvme" / "records"
        with lmdb.open(str(records), max_dbs=8) as env, env.begin(write=True) as txn:
            txn.put(b"format", (1).to_bytes(8, "little"), db=env.open_db(b"meta", txn))
        with pytest.raises(UnavailableError) as refused:
            daemon.start()
        text = str(refused.value)
        assert "exit code 2" in text
        assert f"{daemon.folder / 'nvme'} holds format 1, this daemon reads 2 to 5" in text
        assert "run the version that wrote it, or move the folder away to start empty" in text
        assert "Traceback" not in text
        assert (records / "data.mdb").exists()


# -- disks and folders


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_too_small_is_used_partly(kind: str, tmp_path: Path) -> None:
    # Slabs are 8 MiB: the file system has room for two, files of 5 MiB for none.
    nbytes = 24 * MIB if kind == "mount" else 5 * MIB
    folder = tmp_path / "disk"
    with small_disk(kind, folder, nbytes):
        settings = {**SMALL, "nvme": {"path": str(folder / "nvme"), "limit": "64MiB"}}
        with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=5) as client:
            [problem] = eventually(lambda: client.status()["problems"])
            assert f"cannot allocate {8 * MIB} bytes in {folder / 'nvme' / 'slabs'}" in problem
            assert "lower nvme.limit, or make room: df -h" in problem
            ns = client.namespace(new_layout())
            for i in range(20):
                keys = names(100, f"{kind} {i}")
                assert ns.put(keys, payloads(keys)).stored == 100
                assert got(ns, keys) == 100
                check_limits(client.status())
            status = eventually(lambda: idle(client.status()) and client.status())
            nvme = tier(status, "nvme")
            assert nvme["capacity_bytes"] == (16 * MIB if kind == "mount" else 0)
            if kind == "mount":
                assert nvme["used_bytes"] > 12 * MIB
                daemon.restart()
                found = sum(got(ns, names(100, f"{kind} {i}")) for i in range(20))
                assert found > 500
            daemon.stop()


def test_a_disk_that_is_full_from_the_start_does_not_stop_the_daemon(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk("mount", folder, MIB):
        (folder / "ballast").write_bytes(bytes(MIB - 300 * 1024))
        settings = {**SMALL, "nvme": {"path": str(folder / "nvme"), "limit": "64MiB"}}
        with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=5) as client:
            assert eventually(lambda: client.status()["problems"])
            ns = client.namespace(new_layout())
            for i in range(12):
                keys = names(100, f"full {i}")
                assert ns.put(keys, payloads(keys)).stored == 100
                assert got(ns, keys) == 100


def test_a_disk_without_any_room_is_an_error_and_leaves_no_half_records(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk("mount", folder, MIB):
        with (folder / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
        for free in (0, 4096, 8192):
            os.truncate(folder / "ballast", (folder / "ballast").stat().st_size - free)
            said = refused(tmp_path, config_for(tmp_path, nvme=str(folder / "nvme")))
            assert "the disk is full (make room: df -h" in said
            assert "set nvme.path to a folder on another disk)" in said
        os.truncate(folder / "ballast", 0)
        with LocalDaemon({**SMALL, "nvme": {"path": str(folder / "nvme"), "limit": "64MiB"}}):
            pass


@needs_root
def test_a_folder_without_permission_is_named_with_the_command_that_gives_it() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)

        def refusal() -> str:
            with pytest.raises(TierError) as caught:
                RecordStore(folder / "nvme", 8 * MIB, 64 * MIB)
            return str(caught.value)

        said = as_user(VICTIM, refusal)
    assert f"cannot use folder {folder}/nvme: permission denied, uid {VICTIM} may not write there" in said
    assert (
        f"(give it to this user: `sudo install -d -m 700 -o {VICTIM} {folder}/nvme`; or set nvme.path" in said
    )


def test_dram_beyond_the_memory_of_the_machine_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    text = config_for(tmp_path).replace('limit = "2MiB"', 'limit = "4096TiB"')
    said = refused(tmp_path, text)
    assert "dram.limit is 4096TiB, and th" in said
    assert "of memory (set dram.limit in " in said
    assert "then: kvstore doctor -c " in said
    assert not (tmp_path / "own.sock").exists()


def test_a_disk_that_fills_up_while_running_loses_nothing_committed(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk("mount", folder, 80 * MIB):
        settings = {**SMALL, "nvme": {"path": str(folder / "nvme"), "limit": "64MiB"}}
        with LocalDaemon(settings) as daemon, Client(daemon.url, deadline_s=5) as client:
            ns = client.namespace(new_layout())
            first = names(200, "before")
            ns.put(first, payloads(first))
            eventually(lambda: idle(client.status()))
            eventually(lambda: tier(client.status(), "nvme")["capacity_bytes"] == 64 * MIB)
            with (folder / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
                while ballast.write(bytes(MIB)):
                    pass
            for i in range(30):
                keys = names(100, f"after {i}")
                ns.put(keys, payloads(keys))
                assert got(ns, keys) in range(101)
            assert got(ns, first) == 200
            (folder / "ballast").unlink()
            eventually(lambda: idle(client.status()))
            daemon.restart()
            assert got(ns, first) == 200
            assert "Traceback" not in log_of(daemon)


def refused(folder: Path, config: str) -> str:
    """What a daemon that cannot start prints; it must say one line and end with code 2."""
    run = cli("serve", folder=folder, config=config)
    assert run.returncode == 2, run
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, run.stderr
    return lines[0]


def config_for(folder: Path, *, socket_path: str = "", nvme: str = "", more: str = "") -> str:
    text = f'[daemon]\nsocket = "{socket_path or folder / "own.sock"}"\n'
    text += '[dram]\nlimit = "2MiB"\nhuge_pages = false\n'
    if nvme:
        text += f'[nvme]\nlimit = "16MiB"\npath = "{nvme}"\n'
    return text + more


def test_a_folder_that_cannot_be_written_is_named_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("I am no folder")
    said = refused(tmp_path, config_for(tmp_path, nvme=f"{tmp_path}/file/nvme"))
    assert f"cannot use folder {tmp_path}/file/nvme: a part of this path is a file" in said
    assert "(set nvme.path to a folder that this user may write)" in said
    assert not (tmp_path / "own.sock").exists()


def test_two_daemons_on_one_folder_the_second_names_the_first(daemon: LocalDaemon, tmp_path: Path) -> None:
    folder = daemon.folder / "nvme"
    said = refused(tmp_path, config_for(tmp_path, nvme=str(folder)))
    assert f"folder {folder} is in use by pid {daemon.pid}" in said
    assert f"(stop that daemon: `kill {daemon.pid}`; or set nvme.path to another folder)" in said
    assert not (tmp_path / "own.sock").exists()


def test_two_daemons_on_one_socket_the_second_ends(daemon: LocalDaemon, tmp_path: Path) -> None:
    said = refused(tmp_path, config_for(tmp_path, socket_path=str(daemon.socket)))
    assert f"another process serves {daemon.socket}: pid {daemon.pid}" in said
    assert f"(stop it: `kill {daemon.pid}`; or set daemon.socket to another path)" in said
    assert daemon.socket.exists()


def test_a_socket_path_that_is_too_long_is_named_with_its_length(tmp_path: Path) -> None:
    path = "/tmp/" + "x" * 110
    said = refused(tmp_path, config_for(tmp_path, socket_path=path))
    assert "daemon.socket: the path is 115 bytes long" in said
    assert "accepts at most 107 bytes" in said


def test_a_file_at_the_path_of_the_socket_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("data")
    said = refused(tmp_path, config_for(tmp_path, socket_path=str(file)))
    assert f"{file} exists and is not a socket" in said
    assert file.read_text() == "data"
    said = refused(tmp_path, config_for(tmp_path, socket_path=str(file / "s.sock")))
    assert f"cannot listen on {file}/s.sock" in said
    assert "set daemon.socket" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[dram2]\nx = 1\n", "unknown key dram2"),
        ("[limits]\nbatch_key = 5\n", "unknown key limits.batch_key = 5 (did you mean limits.batch_keys?)"),
        ('[limits]\nframe_bytes = "lots"\n', "limits.frame_bytes: 'lots' is not a size"),
        ("this is not toml", "is not TOML"),
    ],
)
def test_a_config_with_an_unknown_key_or_value_is_named(tmp_path: Path, more: str, said: str) -> None:
    text = config_for(tmp_path, more=more)
    assert said in refused(tmp_path, text)
    file = tmp_path / "checked.toml"
    file.write_text(text)
    check = cli("config", "check", str(file))
    assert check.returncode == 2
    assert said in check.stderr
    assert "Traceback" not in check.stderr


def test_a_config_that_is_not_there_is_named() -> None:
    run = cli("serve", "-c", "/nowhere/kvstore.toml")
    assert run.returncode == 2
    assert (
        "error: cannot read /nowhere/kvstore.toml: No such file or directory (`kvstore config" in run.stderr
    )


def test_too_little_memory_is_reported_and_the_daemon_serves_with_less(tmp_path: Path) -> None:
    # Every extent is a file of its own to the limit of file sizes: none of them can be made.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        said = refused(tmp_path, config_for(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"cannot create an extent of {2 * MIB} bytes" in said


def test_status_without_a_daemon_is_an_error_in_one_line() -> None:
    run = cli("status", "--socket", "/nowhere/kvstore.sock")
    assert run.returncode == 2
    assert "error: no answer from the daemon at /nowhere/kvstore.sock" in run.stderr
    assert "(start the daemon: `kvstore serve`" in run.stderr


# -- slow peers


def test_a_stopped_client_delays_no_other_client(daemon: LocalDaemon, bystander: Client) -> None:
    layout = new_layout()
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, daemon.url, layout.model, str(BLOCK)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"holding\n"
        stop(child.pid)
        ns = bystander.namespace(layout)
        started = time.monotonic()
        keys = [bytes([i]) * 32 for i in range(8)]
        assert ns.lookup(keys) == 8
        with ns.acquire(keys) as lease:
            assert len(lease) == 8
        flood = bystander.namespace(new_layout())
        for i in range(10):
            some = names(128, f"beside a stopped one {i}")
            assert flood.put(some, payloads(some)).stored == 128
        assert time.monotonic() - started < 3
        child.kill()
        child.wait()
    eventually(lambda: bystander.status()["reservations"] == 0, 2)


def test_promotions_show_where_blocks_were_found(daemon: LocalDaemon, bystander: Client) -> None:
    ns = bystander.namespace(new_layout())
    keys = names(30)
    ns.put(keys, payloads(keys))
    eventually(lambda: not bystander.status()["copies_under_way"])
    flood = bystander.namespace(new_layout())
    for i in range(12):
        some = names(128, f"promotions {i}")
        flood.put(some, payloads(some))
    with ns.acquire(keys) as lease:
        assert set(lease.tiers) <= {Tier.DRAM, Tier.NVME}
        assert Tier.NVME in set(lease.tiers)
        assert lease.verify() == 30


def test_a_peer_without_a_hello_is_disconnected(daemon: LocalDaemon, silent: Peer) -> None:
    failure = silent.refused()
    assert failure.why == "no Hello within 5 s"
    assert failure.hint == "is the peer a kvstore client?"


def test_namespaces_are_fine_after_all_that(daemon: LocalDaemon, bystander: Client) -> None:
    ns: Namespace = bystander.namespace(new_layout())
    keys = names(50)
    assert ns.put(keys, payloads(keys)).stored == 50
    assert got(ns, keys) == 50
    status = eventually(lambda: (s := bystander.status()) and not s["copies_under_way"] and s)
    assert (status["leases"], status["reservations"]) == (1, 0), "only the one around this test"
    assert status["connections"] <= 3
