"""Versions of the wire: clients and daemons that are one apart work together, others say so.

`data/wire-7.json` has the frames of `conversation` between a client and a daemon of version 7, in order, and
what it told. They are what that version was: no change here may need other ones.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from kvstore import Client, Layout
from kvstore.client.protocol import ProtocolState
from kvstore.errors import DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import HEADER_BYTES, LABEL_BYTES, SLOT_RECORD, Geometry
from kvstore.wire import messages as m
from tests.daemons import SMALL, WITH_NVME, Peer, eventually, log_of, names, new_layout, payloads, room_for

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "wire-7.json").read_text())
FRAMES = [(who, bytes.fromhex(raw)) for who, raw in RECORDED["frames"]]
TOLD = RECORDED["told"]
HELLO, RESERVE, COMMIT, RELEASE, MAP, MAPPED, VALUE, GRANTED, RESERVED, FOUND = (
    0,
    7,
    8,
    10,
    16,
    17,
    20,
    21,
    22,
    25,
)
BLOCKS = np.stack([np.full(4096, n + 1, np.uint8) for n in range(6)])


def conversation(client: Client) -> list[object]:
    """Every kind of request that engines make, in an order in which each answer is known."""
    layout = Layout(model="wire-7", block_bytes=4096)
    keys = [bytes([n]) * 32 for n in range(6)]
    out = np.zeros((6, 4096), np.uint8)
    ns = client.namespace(layout)
    told: list[object] = [client.ping() is None]
    put = ns.put(keys, BLOCKS)
    told += [put.stored, put.present, put.denied]
    told += [ns.lookup(keys), ns.get(keys, out), bool((out == BLOCKS).all())]
    with ns.acquire(keys[:4]) as lease:
        told += [len(lease), bytes(lease.blocks[3]) == bytes(BLOCKS[3])]
    told += [ns.prefetch(keys), ns.pin(keys[:2], 60.0), ns.unpin(keys[:2])]
    told += [ns.hint(keys, next_use_s=5.0, priority=1), ns.put(keys, BLOCKS).present]
    told += [ns.invalidate(keys[4:]), ns.lookup(keys)]
    told += [ns.publish(["reader"]), ns.invalidate(), ns.lookup(keys)]
    return told


def items_of(raw: bytes) -> list[Any]:
    return list(msgpack.unpackb(raw, use_list=False))


def payloads_in(fd: int, nbytes: int, slot_bytes: int, slots: np.ndarray, writable: bool) -> list[memoryview]:
    """The memory of slots, as version 7 laid it out."""
    whole = memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)))
    start = Geometry(nbytes, slot_bytes, table=True).payload_offset
    at = [start + (int(place) & 0xFFFFFFFF) * slot_bytes for place in slots["place"]]
    return [whole[offset : offset + slot_bytes] for offset in at]


def test_a_client_of_version_7_is_answered_as_by_a_daemon_of_version_7() -> None:
    with LocalDaemon(SMALL) as daemon, Peer(daemon.socket) as peer:
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            eventually(lambda: client.status()["tiers"][0]["capacity_bytes"] == 16 << 20)
        fds: dict[bool, tuple[int, int]] = {}
        slots, checked = np.empty(0, SLOT_RECORD), 0
        for at, (who, raw) in enumerate(FRAMES):
            if who == "daemon":
                continue
            asked = items_of(raw)
            if asked[0] == MAP:
                asked[2] = int(slots["place"][0]) >> 32
            if asked[0] == COMMIT:
                fd, nbytes = fds[True]
                for view, block in zip(payloads_in(fd, nbytes, 4096, slots, True), BLOCKS, strict=True):
                    view[:] = block
            frame = msgpack.packb(asked)
            peer.sock.sendall(struct.pack("<I", len(frame)) + frame)
            if asked[0] == RELEASE:
                continue
            answer, expected = items_of(next_frame(peer)), items_of(FRAMES[at + 1][1])
            assert [answer[0], len(answer)] == [expected[0], len(expected)], (asked, answer)
            assert [type(item) for item in answer] == [type(item) for item in expected]
            if answer[0] in (VALUE, FOUND):
                assert answer == expected
            elif answer[0] == HELLO + 1:
                assert answer[1] == 7
            elif answer[0] == MAPPED:
                fds[asked[3]] = peer.fds[-1], answer[2]
            elif answer[0] in (RESERVED, GRANTED):
                assert answer[1:4] == expected[1:4]
                slots = np.frombuffer(answer[4], SLOT_RECORD)
                theirs = np.frombuffer(expected[4], SLOT_RECORD)
                assert len(slots) == len(theirs)
                if answer[0] == GRANTED:
                    assert (slots["checksum"] == theirs["checksum"]).all()
                    if False in fds:
                        fd, nbytes = fds[False]
                        views = payloads_in(fd, nbytes, 4096, slots, False)
                        assert [bytes(v) for v in views] == [bytes(b) for b in BLOCKS[: len(views)]]
                        checked += 1
        assert checked


def next_frame(peer: Peer) -> bytes:
    """The body of the next frame, not looked at; descriptors that come with it are in `peer.fds`."""

    def exactly(n: int) -> bytes:
        data = b""
        while len(data) < n:
            got, fds, _, _ = socket.recv_fds(peer.sock, n - len(data), 1)
            assert got, "the daemon has closed the connection"
            peer.fds += fds
            data += got
        return data

    return exactly(struct.unpack("<I", exactly(4))[0])


@contextmanager
def daemon_of_version_7(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A fake: it answers as the recorded daemon did, and notes where it is asked something else."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "socket"))
    listener.listen()
    wrong: list[str] = []
    memory = os.memfd_create("extent")
    os.truncate(memory, 2 << 20)

    def stamp(answer: list[Any]) -> None:
        """The daemon writes versions beside the slots."""
        for slot in np.frombuffer(answer[4], SLOT_RECORD):
            index = int(slot["place"]) & 0xFFFFFFFF
            os.pwrite(memory, struct.pack("<Q", int(slot["version"])), LABEL_BYTES + index * HEADER_BYTES + 8)

    def serve() -> None:
        with listener.accept()[0] as sock:
            for at, (who, raw) in enumerate(FRAMES):
                if who == "daemon":
                    continue
                head = sock.recv(4, socket.MSG_WAITALL)
                asked = items_of(sock.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL))
                expected = items_of(raw)
                if asked[0] == HELLO:
                    expected[4] = asked[4]  # which version 7 did not look at
                # Times are what was left of a deadline.
                asked, expected = ([float if type(x) is float else x for x in of] for of in (asked, expected))
                if asked != expected:
                    wrong.append(f"{asked} instead of {expected}")
                if FRAMES[at + 1][0] != "daemon":
                    continue
                answer = FRAMES[at + 1][1]
                if answer[1] == GRANTED:
                    stamp(items_of(answer))
                fds = [memory] if answer[1] == MAPPED else []
                socket.send_fds(sock, [struct.pack("<I", len(answer)) + answer], fds)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"unix://{folder}/socket", wrong
    finally:
        listener.close()
        os.close(memory)


def test_a_current_client_sends_a_daemon_of_version_7_only_known_fields(tmp_path: Path) -> None:
    with (
        daemon_of_version_7(tmp_path) as (url, wrong),
        Client(url, token="", strict=True, deadline_s=10) as client,
    ):
        assert conversation(client) == TOLD
    assert not wrong


def test_two_of_today_tell_each_other_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstore")
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, token="", strict=True, deadline_s=10) as client:
        assert conversation(client) == TOLD
        with Peer(daemon.socket) as old:
            assert isinstance(old.ask(m.Hello(m.MAGIC, 7, "")), m.Welcome)
            spoken = client.status()["wire_versions"]
        assert spoken == {"7": 1, str(m.VERSION): 1}
    assert f"version {m.VERSION} of the wire" in caplog.text


def test_frames_for_older_peers_lack_newer_fields() -> None:
    welcome = m.Welcome(7, b"12345678", 1, 2, 3, (), "0.1.0")
    old = m.encode(welcome, 7)
    assert items_of(old) == [1, 7, b"12345678", 1, 2, 3, ()]
    assert m.decode(old) == m.Welcome(7, b"12345678", 1, 2, 3, (), "")
    assert m.decode(m.encode(welcome)) == welcome


def test_fields_are_added_at_the_end_and_may_be_absent() -> None:
    for codec in m._BY_TAG:
        assert list(codec.since) == sorted(codec.since), f"{codec.cls.__name__}: newer fields come last"
        assert all(m.OLDEST <= since <= m.VERSION for since in codec.since)
        for name, since in zip(codec.names, codec.since, strict=True):
            assert since == m.OLDEST or hasattr(codec.cls(*[None] * codec.fields_at(m.OLDEST)), name)


@pytest.mark.parametrize(
    ("speaks", "theirs", "older"),
    [((5, 6), "versions 5 to 6", "client"), ((14, 15), "versions 14 to 15", "daemon")],
    ids=["too old", "too new"],
)
def test_versions_too_far_apart_are_misses_and_both_sides_log_this_once(
    speaks: tuple[int, int],
    theirs: str,
    older: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = names(2)
    with LocalDaemon(SMALL) as daemon:
        monkeypatch.setattr(m, "OLDEST", speaks[0])
        monkeypatch.setattr(m, "VERSION", speaks[1])
        with Client(daemon.url, deadline_s=10) as client:
            ns = client.namespace(new_layout())
            for _ in range(3):
                assert ns.put(keys, payloads(keys)).denied == 2
                assert ns.lookup(keys) == 0
                time.sleep(0.12)
        with (
            Client(daemon.url, deadline_s=10, strict=True) as client,
            pytest.raises(UnavailableError) as told,
        ):
            client.ping()
        monkeypatch.undo()
        assert f"the client speaks {theirs}, this daemon versions 7 to 13" in str(told.value)
        assert f"upgrade the {older}" in str(told.value)
        told_there = [line for line in log_of(daemon).splitlines() if line.startswith("WARNING")]
        assert [f"speak {theirs}, this daemon versions 7 to 13" in line for line in told_there] == [True]
    told_here = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    # The second client is strict: its caller is told.
    [line] = told_here
    assert f"this client: the client speaks {theirs}" in line


class OldDaemon(LocalDaemon):
    """A daemon that speaks version 7 only, until it is `upgraded`."""

    upgraded = False

    def _command(self) -> list[str]:
        if self.upgraded:
            return super()._command()
        config = str(self.folder / "kvstore.toml")
        code = (
            "import sys; from pathlib import Path; import kvstore.wire.messages as m; m.VERSION = 7;"
            "from kvstore.daemon.main import run; sys.exit(run(Path(sys.argv[1])))"
        )
        return [sys.executable, "-P", "-c", code, config]


def test_an_older_daemon_is_not_asked_what_it_does_not_know() -> None:
    keys = names(3)
    with OldDaemon(SMALL) as daemon:
        with Client(daemon.url, deadline_s=10) as client:
            ns = client.namespace(new_layout())
            assert ns.put(keys, payloads(keys)).stored == 3
            assert not ns.contains(keys).any()
            assert ns.lookup(keys) == 3, "the connection stays"
        told = pytest.raises(DeniedError, match="upgrade the daemon: it speaks version 7")
        with Client(daemon.url, deadline_s=10, strict=True) as client, told:
            client.namespace(new_layout()).contains(keys)


def test_an_older_daemon_gets_no_independent_namespace() -> None:
    keys, told = names(3), "upgrade the daemon: it speaks version 7 of the wire, this needs 10"
    layout = replace(new_layout(), kind="independent")
    with OldDaemon(SMALL) as daemon:
        with Client(daemon.url, deadline_s=10) as client:
            ns = client.namespace(layout)
            assert ns.put(keys, payloads(keys)).denied == 3
            assert (ns.lookup(keys), len(ns.acquire(keys))) == (0, 0)
            assert client.status()["namespaces"] == 0
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            ns = client.namespace(layout)
            for call in (lambda: ns.lookup(keys), lambda: ns.put(keys, payloads(keys)), ns.invalidate):
                with pytest.raises(DeniedError, match="does not know independent namespaces") as denied:
                    call()
                assert denied.value.hint == told


def test_engines_go_on_over_an_upgrade_of_the_daemon() -> None:
    layout, n = new_layout(), 32
    chains = [names(n, f"chain {i}") for i in range(4)]
    seen: Counter[str] = Counter()
    spoken: set[int] = set()
    stop = threading.Event()

    def engine(who: int, client: Client) -> None:
        ns, out = client.namespace(layout), room_for(n)
        keys = chains[who]
        while not stop.is_set():
            got = ns.get(keys, out)
            seen["wrong"] += not np.array_equal(out[:got], payloads(keys[:got]))
            seen["hit" if got == n else "miss"] += 1
            if got < n:
                ns.put(keys, payloads(keys))
                time.sleep(0.005)
            seen[f"after {who}"] += bool(daemon.upgraded and got == n)

    def note(session: ProtocolState, welcome: m.Welcome) -> None:
        spoken.add(welcome.version)
        kept(session, welcome)

    kept = ProtocolState.welcome
    ProtocolState.welcome = note  # type: ignore[method-assign]
    try:
        with OldDaemon(WITH_NVME) as daemon, Client(daemon.url, deadline_s=2) as client:
            engines = [threading.Thread(target=engine, args=(who, client)) for who in range(4)]
            for thread in engines:
                thread.start()
            try:
                eventually(lambda: seen["hit"] > 200)
                assert spoken == {7}
                daemon.upgraded = True
                daemon.stop()
                missed = seen["miss"]
                daemon.start()
                eventually(lambda: all(seen[f"after {who}"] > 50 for who in range(4)), 20)
                settled = seen["miss"]
                time.sleep(0.5)
                assert seen["miss"] == settled, "misses end when the daemon is back"
                assert missed < settled
            finally:
                stop.set()
                for thread in engines:
                    thread.join()
            assert seen["wrong"] == 0
            assert spoken == {7, m.VERSION}
    finally:
        ProtocolState.welcome = kept  # type: ignore[method-assign]
