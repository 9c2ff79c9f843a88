"""Blocks in a real Mooncake over TCP: what every backend owes, and what is left of it when Mooncake fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.daemon.network.names import ZERO
from kvstore.tiers.network import BackendSettings, objects, open_backend
from kvstore.tiers.network.base import Backend, Name, NetworkError, Object, Outcome
from kvstore.tiers.network.mooncake import subprocess_pool
from tests.daemon.network.test_epochs import FINGERPRINT, Node
from tests.engines.mooncake.cluster import CLIENT_TTL_S, Cluster, without_rdma
from tests.processes import stop
from tests.tiers.network.contract import Contract, block, ends, payload, wanted

OK, MISSING, FULL, FAILED = Outcome.OK, Outcome.MISSING, Outcome.FULL, Outcome.FAILED
SOON_S = 0.5
SLACK_S = 0.3
"""More than the seam allows: this machine may be busy."""


@pytest.fixture(scope="session", autouse=True)
def libibverbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The fake, made for all processes, unless this machine has the real one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in without_rdma(tmp_path_factory.mktemp("fake")).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def shared(libibverbs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Mooncake that no test harms."""
    with Cluster(tmp_path_factory.mktemp("mooncake"), 256 << 20) as cluster:
        yield cluster


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A Mooncake for one test."""
    with Cluster(tmp_path, 64 << 20) as cluster:
        yield cluster


@pytest.fixture
def opened() -> Iterator[Callable[..., Backend]]:
    """Opens backends, and closes them in the end."""
    backends: list[Backend] = []

    def opens(url: str, threads: int = 8) -> Backend:
        backends.append(open_backend(BackendSettings(url, threads=threads)))
        return backends[-1]

    yield opens
    for backend in backends:
        backend.close()


def in_time(call: Callable[[float], list[Outcome]], wanted: list[Outcome], within_s: float = SOON_S) -> None:
    """The call ends in time, with that."""
    started = time.monotonic()
    assert call(started + within_s) == wanted
    assert time.monotonic() - started < within_s + SLACK_S


def eventually(call: Callable[[], list[Outcome]], wanted: list[Outcome], within_s: float = 20) -> None:
    """What the call ends with becomes that."""
    until = time.monotonic() + within_s
    while True:
        try:
            got: object = call()
        except NetworkError as error:
            got = error
        if got == wanted:
            return
        assert time.monotonic() < until, got
        time.sleep(0.1)


class TestMooncake(Contract):
    lists = False

    @pytest.fixture
    def backend(self, shared: Cluster, opened: Callable[..., Backend]) -> Backend:
        shared.clear()
        return opened(shared.url)

    @pytest.fixture(autouse=True)
    def _cluster(self, shared: Cluster) -> None:
        self.cluster = shared

    def alter(self, backend: Backend, name: Name, change: Callable[[bytes], bytes]) -> None:
        key = objects.path(name)
        raw = change(self.cluster.get(key))
        if not raw:
            pytest.skip("Mooncake holds nothing empty")
        assert self.cluster.remove(key) == 0
        assert self.cluster.put(key, raw) == 0

    def test_more_objects_than_a_worker_holds(self, backend: Backend) -> None:
        blocks = [block(bytes([i]), 3 << 20) for i in range(13)]
        assert backend.write(blocks, ends()) == [OK] * 13
        got = [wanted(b) for b in blocks]
        assert backend.read(got, ends()) == [OK] * 13
        assert [payload(g) for g in got] == [payload(b) for b in blocks]

    def test_the_largest_block(self, backend: Backend) -> None:
        small, large = block(b"small"), block(b"large", 64 << 20)
        assert backend.write([small, large, small], ends()) == [OK] * 3
        got = [wanted(large), wanted(small)]
        assert backend.read(got, ends()) == [OK] * 2
        assert [payload(g) for g in got] == [payload(large), payload(small)]

    def test_more_names_than_one_request_has(self, backend: Backend) -> None:
        there = [block(i.to_bytes(2, "little"), 100) for i in range(300)]
        absent = [Name(b.name.namespace, b.name.key + b"!") for b in there]
        assert backend.write(there, ends()) == [OK] * 300
        names = [name for b, no in zip(there, absent, strict=True) for name in (b.name, no)]
        assert backend.probe(names, ends()) == [OK, MISSING] * 300
        assert backend.delete(names, ends()) == [OK] * 600
        assert backend.probe(names, ends()) == [MISSING] * 600

    def test_a_read_object_can_be_deleted_at_once(self, backend: Backend) -> None:
        put = block(b"k")
        backend.write([put], ends())
        assert backend.read([wanted(put)], ends()) == [OK]
        assert backend.delete([put.name], ends()) == [OK]
        assert backend.read([wanted(put)], ends()) == [MISSING]


def test_a_peer_that_is_killed_takes_its_blocks_along(own: Cluster, opened: Callable[..., Backend]) -> None:
    backend, put = opened(own.url), block(b"k")
    assert backend.write([put], ends()) == [OK]
    own.kill_peer()
    in_time(lambda by: backend.read([wanted(put)], by), [FAILED], 3)
    eventually(lambda: backend.read([wanted(put)], ends()), [MISSING], CLIENT_TTL_S + 10)
    assert backend.write([put], ends()) == [FULL]
    own.start_peer()
    eventually(lambda: backend.write([put], ends()), [OK])
    assert backend.read([wanted(put)], ends()) == [OK]


def test_a_hanging_peer_delays_no_call(own: Cluster, opened: Callable[..., Backend]) -> None:
    backend, put = opened(own.url, 2), block(b"k")
    assert backend.write([put], ends()) == [OK]
    stop(own.peer.pid)
    got = [wanted(put) for _ in range(5)]
    for each in got:  # more than there are lanes
        in_time(lambda by, each=each: backend.read([each], by), [FAILED])
    before = [bytes(each.memory) for each in got]
    own.peer.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert [bytes(each.memory) for each in got] == before
    eventually(lambda: backend.write([put], ends()), [OK], 40)
    assert backend.read([wanted(put)], ends()) == [OK]


def test_an_object_being_written_is_missing(own: Cluster, opened: Callable[..., Backend]) -> None:
    """Mooncake says of it that it is."""
    backend, put = opened(own.url), block(b"k")
    assert backend.write([block(b"other")], ends()) == [OK]
    stop(own.peer.pid)
    first = threading.Thread(target=lambda: backend.write([put], ends(3)))
    first.start()
    time.sleep(0.3)
    in_time(lambda by: backend.write([put], by), [FAILED])
    first.join()


def test_a_hanging_master_delays_no_call(own: Cluster, opened: Callable[..., Backend]) -> None:
    backend, put, other = opened(own.url), block(b"k"), block(b"other")
    assert backend.write([put, other], ends()) == [OK, OK]
    stop(own.master.pid)
    in_time(lambda by: backend.read([wanted(put)], by), [FAILED])
    in_time(lambda by: backend.write([put], by), [FAILED])
    in_time(lambda by: backend.probe([put.name], by), [FAILED])
    # The master may still do it later.
    in_time(lambda by: backend.delete([other.name], by), [FAILED])
    own.master.send_signal(signal.SIGCONT)
    eventually(lambda: backend.write([put], ends()), [OK])
    assert backend.read([wanted(put)], ends()) == [OK]


def test_closing_ends_calls_under_way(own: Cluster, opened: Callable[..., Backend]) -> None:
    backend, put = opened(own.url), block(b"k")
    assert backend.write([put], ends()) == [OK]
    stop(own.master.pid)
    outcomes: list[list[Outcome]] = []
    reader = threading.Thread(target=lambda: outcomes.append(backend.read([wanted(put)], ends(30))))
    reader.start()
    time.sleep(0.3)
    started = time.monotonic()
    backend.close()
    reader.join(5)
    assert outcomes == [[FAILED]]
    assert time.monotonic() - started < 4


def test_a_restarted_master_is_used_again(own: Cluster, opened: Callable[..., Backend]) -> None:
    backend, put = opened(own.url), block(b"k")
    assert backend.write([put], ends()) == [OK]
    own.master.kill()
    own.master.wait()
    with pytest.raises(NetworkError, match=own.address):
        backend.read([wanted(put)], ends())
    with pytest.raises(NetworkError):
        backend.health(ends())
    own.start_master()
    eventually(lambda: backend.write([put], ends()), [OK])
    assert backend.read([wanted(put)], ends()) == [OK]


def test_a_missing_master_is_named(own: Cluster, opened: Callable[..., Backend]) -> None:
    own.master.kill()
    own.master.wait()
    backend, put = opened(own.url), block(b"k")
    with pytest.raises(NetworkError, match=own.address) as raised:
        backend.write([put], ends(6))  # Mooncake itself would try for longer
    assert not raised.value.fatal
    own.start_master()
    eventually(lambda: backend.write([put], ends()), [OK])


def test_a_master_with_no_or_malformed_answers(libibverbs: None, opened: Callable[..., Backend]) -> None:
    for says in (b"", b"\xff\x00rubbish" * 1000):
        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=_accept, args=(server, says), daemon=True).start()
            backend = opened(f"mooncake://127.0.0.1:{server.getsockname()[1]}?host=127.0.0.1", 2)
            for _ in range(4):
                started = time.monotonic()
                with contextlib.suppress(NetworkError):
                    assert backend.read([wanted(block(b"k"))], started + SOON_S) == [FAILED]
                assert time.monotonic() - started < SOON_S + SLACK_S
            backend.close()


def _accept(server: socket.socket, says: bytes) -> None:
    kept = []
    try:
        while True:
            kept.append(server.accept()[0])
            kept[-1].sendall(says)
    except OSError:
        for connection in kept:
            connection.close()


def test_memory_that_is_lent_is_taken_back(own: Cluster, opened: Callable[..., Backend]) -> None:
    own.kill_peer()
    lender, other = opened(f"{own.url}&segment={64 << 20}"), opened(own.url)
    lender.probe([block(b"k").name], ends())
    put = block(b"k")
    eventually(lambda: other.write([put], ends()), [OK])
    assert other.read([wanted(put)], ends()) == [OK]
    lender.close()
    assert other.read([wanted(put)], ends()) == [MISSING]  # at once, no time for the master to find out


def test_no_room(own: Cluster, opened: Callable[..., Backend]) -> None:
    """Mooncake evicts when it is nearly full, in its own time: until then there is no room."""
    backend = opened(own.url)
    assert backend.write([block(b"too large", 64 << 20)], ends()) == [FULL]
    blocks = [block(bytes([i]), 4 << 20) for i in range(30)]
    outcomes = [backend.write([b], ends())[0] for b in blocks]
    assert set(outcomes) <= {OK, FULL}
    assert FULL in outcomes
    eventually(lambda: backend.write([block(b"later", 4 << 20)], ends()), [OK])
    got = [wanted(b) for b in blocks]
    read = backend.read(got, ends())
    assert set(read) <= {OK, MISSING}
    assert OK in read
    kept = [
        (payload(g), payload(b)) for g, b, outcome in zip(got, blocks, read, strict=True) if outcome is OK
    ]
    assert all(mine == theirs for mine, theirs in kept)


def test_a_killed_client_process_is_replaced(shared: Cluster, opened: Callable[..., Backend]) -> None:
    shared.clear()
    backend, put = opened(shared.url), block(b"k")
    assert backend.write([put], ends()) == [OK]
    first = _helper(backend)
    first.kill()
    first.wait()
    assert backend.read([wanted(put)], ends()) == [OK]
    assert _helper(backend) is not first


def test_a_hanging_client_process_is_replaced(
    shared: Cluster, opened: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_pool, "_HANGS_AFTER_S", 1.0)
    shared.clear()
    backend, put = opened(shared.url, 1), block(b"k")
    assert backend.write([put], ends()) == [OK]
    stop(_helper(backend).pid)
    in_time(lambda by: backend.read([wanted(put)], by), [FAILED])
    eventually(lambda: backend.read([wanted(put)], ends(5)), [OK])


def _helper(backend: Backend) -> subprocess.Popen[bytes]:
    return backend._pool._client._process  # type: ignore[attr-defined]


LEAVES = """
import sys, time
from kvstore.tiers.network import BackendSettings, open_backend
from kvstore.tiers.network.base import Name
backend = open_backend(BackendSettings(sys.argv[1]))
print(backend.probe([Name(bytes(16), b"k")], time.monotonic() + 20)[0].name, flush=True)
print(backend._pool._client._process.pid, flush=True)
input()
print(backend.probe([Name(bytes(16), b"k")], time.monotonic() + 1)[0].name, flush=True)
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended"])
def test_no_process_is_left(own: Cluster, killed: bool) -> None:
    """The helper ends with whoever uses it, who ends in spite of calls that hang."""
    command = [sys.executable, "-W", "ignore", "-c", LEAVES, own.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdin is not None
        assert user.stdout is not None
        assert user.stdout.readline() == "MISSING\n"
        helper = int(user.stdout.readline())
        stop(own.master.pid)
        if killed:
            user.kill()
        else:
            print(file=user.stdin, flush=True)
            assert user.stdout.readline() == "FAILED\n"
            assert user.wait(3) == 0
    until = time.monotonic() + 5
    while _lives(helper):
        assert time.monotonic() < until
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_objects_of_others_are_not_read(shared: Cluster, opened: Callable[..., Backend]) -> None:
    """What is stored under our key, of the right size, and is not ours."""
    shared.clear()
    backend, put = opened(shared.url), block(b"k")
    shared.put(objects.path(put.name), os.urandom(objects.HEADER_BYTES + put.length))
    thing: Object = wanted(put)
    assert backend.read([thing], ends()) == [Outcome.TORN]


def test_epochs_reach_other_nodes_and_are_replaced(shared: Cluster, opened: Callable[..., Backend]) -> None:
    """Also right after a read, and though Mooncake keeps existing objects."""

    async def test() -> None:
        a, b = (Node(opened(shared.url), ZERO) for _ in range(2))
        for node, other in ((a, b), (b, a), (b, a)):
            renewal = await node.epochs.renew(FINGERPRINT)
            assert renewal is not None
            node.epochs.settle(FINGERPRINT, renewal)
            await other.rounds()
            assert other.namespace.epoch == node.namespace.epoch == renewal.written

    shared.clear()
    asyncio.run(test())
