"""What a daemon is asked for, recorded: the same requests come out, and no key; bounds hold."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.daemon.operator.trace_recorder import LEAST_BYTES, TraceRecorder
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.lab.traces import Trace
from kvstore.types import Layout
from kvstore.wire import messages as m
from tests.daemons import SMALL, Peer, cli, eventually, greeted, names, payloads
from tests.tenants import VICTIM, TenantDaemon, needs_root, peer_of

_numbers = itertools.count()


def layout(block_tokens: int = 32, model: str = "") -> Layout:
    return Layout(model or f"record-{next(_numbers)}", 4096, block_tokens=block_tokens)


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon({**SMALL, "limits": {"batch_keys": 1024}}) as served:
        yield served


@contextmanager
def recording(daemon: LocalDaemon, out: Path, seconds: float, *more: str) -> Iterator[dict[str, Any]]:
    """Records what is asked for in the block; what came of it is in the map then."""
    command = [sys.executable, "-m", "kvstore", "lab", "record", "--out", str(out), "--for", f"{seconds}s"]
    command += ["--socket", str(daemon.socket), "--json", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    result: dict[str, Any] = {}
    try:
        # The file is made once the daemon records.
        eventually(out.exists)
        yield result
        told, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    result |= json.loads(told)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


# -- the whole way


def test_a_recording_has_all_requests_and_replays(daemon: LocalDaemon, tmp_path: Path) -> None:
    out, shared = tmp_path / "trace.jsonl", names(6, "shared")
    prompts = [shared + names(4, f"tail {i}") for i in range(3)] + [names(3, "other")]
    with recording(daemon, out, 4) as result, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(layout())
        for keys in (*prompts, prompts[0]):
            found = ns.lookup(keys)
            ns.acquire(keys[:found]).release()
            ns.put(keys, payloads(keys, 4096))
        # Without a look-up before.
        ns.acquire(prompts[1]).release()
    asked = [*prompts, prompts[0], prompts[1]]
    rows = lines(out)
    assert [len(row["hash_ids"]) for row in rows] == [len(keys) for keys in asked]
    ids = {
        key: i
        for row, keys in zip(rows, asked, strict=True)
        for key, i in zip(keys, row["hash_ids"], strict=True)
    }
    assert [row["hash_ids"] for row in rows] == [[ids[key] for key in keys] for keys in asked]
    assert len(set(ids.values())) == len(ids) == 6 + 3 * 4 + 3
    assert [row["input_length"] for row in rows] == [32 * len(keys) for keys in asked]
    assert {(row["block_tokens"], row["output_length"]) for row in rows} == {(32, 0)}
    times = [row["timestamp"] for row in rows]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 4000
    size = out.stat().st_size
    told = {"file": str(out), "requests": 6, "blocks": 53, "dropped_requests": 0, "written_bytes": size}
    assert result == told
    # No key in any form.
    text = out.read_text()
    for key in ids:
        assert key not in text.encode()
        assert key.hex() not in text
        assert str(int.from_bytes(key[:8], "little")) not in text
    trace = Trace(out)
    assert trace.block_tokens == 32
    assert [len(request.keys) for request in trace] == [len(keys) for keys in asked]
    replayed = cli("replay", str(out), "--socket", str(daemon.socket), "--block-bytes", "4KiB", "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["requests"] == 6


def test_a_long_prompt_is_one_request_with_all_its_keys(daemon: LocalDaemon, tmp_path: Path) -> None:
    out, long = tmp_path / "trace.jsonl", names(2500, "long")
    with recording(daemon, out, 4), Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(layout())
        assert ns.lookup(long[:900]) == 0
        ns.put(long, payloads(long, 4096))
        assert ns.lookup(long) == 2500
    assert [len(row["hash_ids"]) for row in lines(out)] == [900, 2500]
    assert lines(out)[1]["hash_ids"][:900] == lines(out)[0]["hash_ids"]
    # And it is asked for in short again.
    with greeted(daemon, layout(16)) as (peer, number):
        found = peer.ask(m.Lookup(1, number, 32, names(1)[0], 1.0, 0.0))
        assert found == m.Found(1, 0, False)


def test_requests_beyond_the_size_of_the_file_are_counted(daemon: LocalDaemon, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    with (
        recording(daemon, out, 4, "--max-bytes", "64KiB") as result,
        Client(daemon.url, strict=True) as client,
    ):
        ns = client.namespace(layout())
        for i in range(8):
            ns.lookup(names(500, f"prompt {i}"))
    assert out.stat().st_size <= 64 << 10
    assert result["requests"] == len(lines(out)) > 0
    assert result["dropped_requests"] == 8 - result["requests"] > 0


def test_an_existing_file_is_not_overwritten(daemon: LocalDaemon, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    out.write_text("mine")
    done = cli("lab", "record", "--out", str(out), "--for", "1s", "--socket", str(daemon.socket))
    assert (done.returncode, out.read_text()) == (2, "mine")
    assert "already exists" in done.stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--for", "0s"], "a recording of 0 s"),
        (["--for", "2d"], "at most a day"),
        (["--for", "x"], "--for: "),
        (["--max-bytes", "1KiB"], "a recording of 1024 bytes"),
        (["--max-bytes", "x"], "--max-bytes: "),
    ],
)
def test_a_refused_recording_is_an_error_and_leaves_no_file(
    daemon: LocalDaemon, tmp_path: Path, more: list[str], says: str
) -> None:
    out = tmp_path / "trace.jsonl"
    done = cli("lab", "record", "--out", str(out), *more, "--socket", str(daemon.socket))
    assert done.returncode == 2
    assert says in done.stderr
    assert not out.exists()


def test_no_daemon_is_an_error(tmp_path: Path) -> None:
    done = cli(
        "lab",
        "record",
        "--out",
        str(tmp_path / "x"),
        "--for",
        "1s",
        "--socket",
        str(tmp_path / "nobody.sock"),
    )
    assert done.returncode == 2
    assert "`kvstore serve`" in done.stderr


# -- the daemon


@needs_root
def test_only_operators_record() -> None:
    with TenantDaemon(SMALL, f"[tenants.victim]\nuids = [{VICTIM}]\nrole = 'admin'") as daemon:
        with peer_of(daemon, VICTIM) as peer:
            denied = peer.ask(m.RecordStart(1, 5.0, 1 << 20))
            assert isinstance(denied, m.Denied)
            assert "only operators" in denied.why
            assert isinstance(peer.ask(m.RecordRead(2)), m.Denied)
        with peer_of(daemon, 0) as peer:
            assert peer.ask(m.RecordStart(1, 5.0, 1 << 20)) == m.Value(1, 0)


def test_there_is_one_recording_and_it_ends_with_its_connection(daemon: LocalDaemon) -> None:
    with greeted(daemon) as (other, _):
        with Peer(daemon.socket) as peer:
            peer.hello()
            assert peer.ask(m.RecordStart(1, 60.0, 1 << 20)) == m.Value(1, 0)
            denied = other.ask(m.RecordStart(1, 60.0, 1 << 20))
            assert isinstance(denied, m.Denied)
            assert "a recording is under way" in denied.why
            assert isinstance(other.ask(m.RecordRead(2)), m.Denied)
            read = peer.ask(m.RecordRead(2))
            assert (read.requests, read.dropped, read.ended) == (b"", 0, False)
        eventually(lambda: other.ask(m.RecordStart(3, 60.0, 1 << 20)) == m.Value(3, 0))


# -- what belongs together


class Clock:
    """Time that stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A recorder of calls of up to 8 keys, and what it has recorded, as numbers of keys."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.clock = Clock()
        self.recorder = TraceRecorder(self.clock, lambda: 8)
        self.recorder.start(99, 60.0, max_bytes)
        layouts = [layout(model="m"), layout(model="m"), replace(layout(model="m"), kind="independent")]
        self.spaces = [NamespaceEntry(n, bytes([n]) * 16, 0, 4096, each) for n, each in enumerate(layouts, 1)]
        self.asked = 0

    def look(self, keys: list[int], connection: int = 1, space: int = 0, found: int = 0) -> None:
        self.recorder.answered(connection, self.ask(keys, connection, space), found)

    def ask(self, keys: list[int], connection: int = 1, space: int = 0) -> int:
        """Looks up keys. Returns the number of the request, which is not answered yet."""
        self.asked += 1
        self.recorder.looked_up(connection, self.asked, self.spaces[space], 4, raw(keys))
        return self.asked

    def acquire(self, keys: list[int], connection: int = 1, space: int = 0, found: int | None = None) -> None:
        self.asked += 1
        self.recorder.acquired(connection, self.asked, self.spaces[space], 4, raw(keys))
        self.recorder.answered(connection, self.asked, len(keys) if found is None else found)

    def recorded(self) -> list[list[int]]:
        """All requests, as keys: known by the hashes that a look-up of each one by itself has."""
        keys = range(256)
        known = {}
        for space in self.spaces:
            hashes = self.recorder._hashes(space, 4, raw(list(keys)))
            known |= {hashes[8 * i : 8 * i + 8]: i for i in keys}
        self.clock.now += 61.0
        data, self.dropped, ended = self.recorder.read()
        assert ended
        out, at = [], 0
        while at < len(data):
            _, _, n = m.REQUEST_RECORD.unpack_from(data, at)
            at += m.REQUEST_RECORD.size
            out.append([known[data[at + 8 * i : at + 8 * i + 8]] for i in range(n)])
            at += 8 * n
        return out


def raw(keys: list[int]) -> bytes:
    return b"".join(key.to_bytes(4, "little") for key in keys)


def test_a_lookup_and_its_acquire_are_one_request_even_of_two_connections() -> None:
    desk = Desk()
    desk.look([1, 2, 3])
    desk.acquire([1, 2], connection=2)
    # Only once: the next one is another request.
    desk.acquire([1, 2], connection=2)
    assert desk.recorded() == [[1, 2, 3], [1, 2]]


def test_a_late_or_different_acquire_is_another_request() -> None:
    desk = Desk()
    desk.look([1, 2, 3])
    desk.acquire([1, 2, 4])
    desk.acquire([1, 2], space=1)
    desk.clock.now += 1.5
    desk.acquire([1, 2])
    assert desk.recorded() == [[1, 2, 3], [1, 2, 4], [1, 2], [1, 2]]


def test_two_look_ups_alike_are_two_requests_and_have_two_acquires() -> None:
    desk = Desk()
    for connection in (1, 2):
        desk.look([1, 2, 3], connection)
    for connection in (1, 2):
        desk.acquire([1, 2, 3], connection)
    assert desk.recorded() == [[1, 2, 3], [1, 2, 3]]


def test_parts_of_a_long_prompt_are_joined() -> None:
    desk, long = Desk(), list(range(20))
    desk.look(long[:8], found=8)
    desk.look(long[8:16], found=8)
    desk.look(long[16:], found=2)
    desk.acquire(long[:8])
    desk.acquire(long[8:16])
    desk.acquire(long[16:18])
    desk.acquire(long[40:] or [50, 51])
    desk.acquire(list(range(60, 68)))
    desk.acquire([68, 69])
    assert desk.recorded() == [long, [50, 51], list(range(60, 70))]


def test_a_request_after_an_incomplete_part_is_another_prompt() -> None:
    desk = Desk()
    desk.look(list(range(8)), found=3)
    desk.look([50, 51])
    desk.acquire(list(range(60, 68)), found=3)
    desk.acquire([70, 71])
    assert desk.recorded() == [list(range(8)), [50, 51], list(range(60, 68)), [70, 71]]


def test_a_sample_of_a_prompt_is_no_request() -> None:
    desk, keys = Desk(), list(range(1, 8))
    desk.look(keys[2::3])
    desk.look(keys)
    # Neither a prompt that goes on, nor one that begins alike, is sampled by the one before.
    desk.look([31, 32], 2)
    desk.look([31, 32, 33], 2)
    desk.look([41, 42], 3)
    desk.look([40, 41, 43, 44], 3)
    assert desk.recorded() == [keys, [31, 32], [31, 32, 33], [41, 42], [40, 41, 43, 44]]


def test_the_same_key_of_two_namespaces_has_two_hashes_and_two_recordings_share_none() -> None:
    desk, other = Desk(), Desk()
    one, two = (desk.recorder._hashes(space, 4, raw([1])) for space in desk.spaces[:2])
    assert len({one, two, other.recorder._hashes(other.spaces[0], 4, raw([1]))}) == 3


def test_requests_beyond_the_bound_are_dropped_and_counted_until_others_are_read() -> None:
    desk = Desk(LEAST_BYTES)
    for i in range(200):
        desk.look([i], connection=i)
        assert desk.recorder._bytes <= LEAST_BYTES
    desk.clock.now += 2.0
    data, dropped, ended = desk.recorder.read()
    kept = len(data) // (m.REQUEST_RECORD.size + 8)
    assert 0 < kept == 200 - dropped < 200
    assert (desk.recorder._bytes, ended) == (0, False)
    desk.look([1])
    assert desk.recorded() == [[1]]
    assert desk.dropped == dropped


def test_a_request_that_grows_beyond_the_bound_is_dropped() -> None:
    desk = Desk(LEAST_BYTES)
    desk.look(list(range(8)), connection=300, found=8)
    for i in range(200):
        desk.look([i], connection=i)
    dropped, parts = desk.recorder._dropped, 0
    while desk.recorder._dropped == dropped:
        desk.look(list(range(8, 16)), connection=300, found=8)
        parts += 1
        assert desk.recorder._bytes <= LEAST_BYTES
    assert parts > 1
    assert not [keys for keys in desk.recorded() if len(keys) > 1]


def test_requests_for_independent_blocks_are_not_recorded_and_end_no_prompt() -> None:
    desk = Desk()
    prompt = list(range(12))
    desk.look(prompt[:8], found=8)
    desk.look([7], space=2)
    desk.look(prompt[8:], found=4)
    desk.acquire(prompt[:8])
    desk.acquire([7, 11], space=2, found=2)
    desk.acquire(prompt[8:])
    assert desk.recorded() == [prompt]


def test_lookups_of_several_namespaces_at_once_are_recorded_as_one_prompt_each() -> None:
    """A client sends the first message for each chain before the first answer."""
    desk = Desk()
    prompt = list(range(8))
    first = [desk.ask(prompt, space=space) for space in (0, 1)]
    for number, found in zip(reversed(first), (8, 3), strict=True):
        desk.recorder.answered(1, number, found)
    for space in (1, 0):
        desk.look([20 + space], space=space, found=1)
    assert desk.recorded() == [prompt, [*prompt, 21], [20]]


def test_a_sample_of_several_namespaces_belongs_to_the_lookup_that_follows() -> None:
    desk = Desk()
    for keys in ([1, 3, 5], list(range(6))):
        for number in [desk.ask(keys, space=space) for space in (0, 1)]:
            desk.recorder.answered(1, number, 0)
    assert desk.recorded() == [list(range(6))] * 2


def test_nothing_is_recorded_before_and_after() -> None:
    desk = Desk()
    desk.recorder.leave(99)
    desk.look([1, 2])
    assert not desk.recorder.running
    desk.recorder.start(98, 5.0, LEAST_BYTES)
    desk.recorder.leave(97)
    assert desk.recorder.running
    with pytest.raises(MisuseError, match="a recording is under way"):
        desk.recorder.start(97, 5.0, LEAST_BYTES)
    desk.clock.now += 5.0
    desk.look([1, 2])
    assert desk.recorder.read() == (b"", 0, True)
    assert desk.recorder.owner == 0
