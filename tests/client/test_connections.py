"""Connections of both clients: what is posted arrives, in order and whole, or the connection ends.

Against a real daemon that is stopped, and against a peer that reads as slowly as a test wants.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.client import aio, base, protocol
from kvstore.client import connection as client_connection
from kvstore.client.leases import Lease
from kvstore.errors import MisuseError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames, pack
from tests.client.drivers import DEADLINE_S, Driver
from tests.client.test_calls import WITHOUT_TABLES
from tests.daemons import SMALL, eventually, names, new_layout, payload, payloads
from tests.processes import stop

LEASES = 600
LARGE = m.Control(0, "none", {"much": "x" * (2 << 20)})
"""Takes more than a socket's buffers."""


class Reader:
    """A daemon's end of one connection at a time, which greets, and then reads when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)
        self._sock: socket.socket | None = None
        self._frames = Frames(1 << 30)
        self._greeter = threading.Thread(target=self._greet)
        self._greeter.start()

    def _greet(self) -> None:
        self._sock, _ = self._listener.accept()
        self._sock.settimeout(DEADLINE_S)
        [hello] = self.read(1)
        assert isinstance(hello, m.Hello)
        self.send(m.Welcome(WITHOUT_TABLES, b"x", 1 << 24, 128, 128))

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._greeter_is(self._sock), [pack(message)], descriptors)

    def _greeter_is(self, sock: socket.socket | None) -> socket.socket:
        assert sock is not None
        return sock

    def read(self, count: int, at_a_time: int = 1 << 16) -> list[Any]:
        """The next messages, as many as there are if the stream ends before."""
        found: list[Any] = []
        while len(found) < count:
            data = self._greeter_is(self._sock).recv(at_a_time)
            if not data:
                break
            found += self._frames.feed(data)
        return found

    def drain(self) -> tuple[list[Any], bool]:
        """All messages up to the end of the stream, and whether half a one is left."""
        found = self.read(1 << 30)
        return found, self._frames.unfinished

    def close(self) -> None:
        self._greeter.join()
        self._listener.close()
        self._greeter_is(self._sock).close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path / "reader.sock")
    yield made
    made.close()


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A call under way, and where its result or exception will be."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(call())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, came


def leased(client: Any, count: int) -> tuple[Any, list[Lease]]:
    """A namespace and that many leases on one of its blocks, all over one connection."""
    ns = client.namespace(new_layout())
    keys = names(1)
    assert ns.put(keys, payloads(keys)).stored == 1
    leases = [ns.acquire(keys) for _ in range(count)]
    assert {len(lease) for lease in leases} == {1}
    assert len(client._idle) == 1
    return ns, leases


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(SMALL) as served:
        yield served


@pytest.fixture
def watcher(daemon: LocalDaemon) -> Iterator[Client]:
    """Asks the daemon for its own figures."""
    with Client(daemon.url, deadline_s=DEADLINE_S) as made:
        yield made
        eventually(lambda: made.status()["leases"] == 0)


def test_connecting_waits_for_a_full_listen_queue(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(path))
            thread, came = in_thread(lambda: driver.connection(path))
            time.sleep(0.1)
            assert not came, "the queue is full"
            listener.accept()[0].close()
            sock, _ = listener.accept()
            with sock:
                sock.sendall(pack(m.Welcome(WITHOUT_TABLES, b"x", 1 << 24, 128, 128)))
                thread.join()
                driver.in_place(came[0].close)


# -- against a daemon


def test_leases_released_while_the_daemon_is_stopped_are_released(
    driver: Driver, daemon: LocalDaemon, watcher: Client
) -> None:
    client = driver.client(daemon.url, deadline_s=DEADLINE_S)
    _, leases = leased(client, LEASES)
    [connection] = client._idle
    stop(daemon.pid)
    try:
        started_s = time.monotonic()
        for lease in leases:
            driver.in_place(lease.release)
        took_s = time.monotonic() - started_s
        assert connection.protocol.outbox, "the socket took it all: nothing was tried"
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    # Not one of them has waited for its deadline.
    assert took_s < DEADLINE_S / 2
    # No call follows that could take the rest along.
    eventually(lambda: watcher.status()["leases"] == 0)
    assert not connection.closed
    client.close()


def test_waiting_posts_are_sent_before_the_next_request(
    driver: Driver, daemon: LocalDaemon, watcher: Client
) -> None:
    client = driver.client(daemon.url, deadline_s=DEADLINE_S)
    ns, leases = leased(client, LEASES)
    stop(daemon.pid)
    for lease in leases:
        driver.in_place(lease.release)
    thread, came = in_thread(lambda: ns.lookup(names(1)))
    time.sleep(0.05)
    os.kill(daemon.pid, signal.SIGCONT)
    thread.join()
    assert came == [1]
    assert watcher.status()["leases"] == 0
    client.close()


def test_a_daemon_that_does_not_read_in_time_loses_the_connection(
    driver: Driver, daemon: LocalDaemon, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (client_connection, aio):
        monkeypatch.setattr(module, "POST_WAIT_S", 0.2)
    client = driver.client(daemon.url, deadline_s=DEADLINE_S)
    ns, leases = leased(client, LEASES)
    stop(daemon.pid)
    try:
        for lease in leases[1:]:
            driver.in_place(lease.release)
        eventually(lambda: leases[0].ended)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    with pytest.raises(UnavailableError, match="the connection of the lease has ended"):
        leases[0].blocks  # noqa: B018
    assert leases[0].verify() == 0
    eventually(lambda: watcher.status()["leases"] == 0)
    assert ns.lookup(names(1)) == 1
    client.close()


def test_too_many_posts_end_the_connection(
    driver: Driver, daemon: LocalDaemon, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "POST_BYTES", 100)
    client = driver.client(daemon.url, deadline_s=DEADLINE_S)
    ns, leases = leased(client, LEASES)
    stop(daemon.pid)
    try:
        for lease in leases[1:]:
            driver.in_place(lease.release)
        assert leases[0].ended
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: watcher.status()["leases"] == 0)
    assert ns.lookup(names(1)) == 1
    client.close()


def test_a_lease_sees_that_the_daemon_has_hung_up(driver: Driver) -> None:
    with LocalDaemon(SMALL) as served:
        client = driver.client(served.url, deadline_s=DEADLINE_S)
        ns, [held, copied, released] = leased(client, 3)
        views, keys = held.blocks, names(1)
        driver.in_place(released.release)
        assert [held.ended, copied.ended, released.ended] == [False, False, True]
        assert held.verify() == 1
        served.kill()
        assert [held.ended, copied.ended] == [True, True]
        assert [bytes(view) for view in views] == [payload(key) for key in keys]
        assert held.verify() == 0
        with pytest.raises(UnavailableError, match="the connection of the lease has ended"):
            held.read(0, bytearray(16))
        driver.in_place(held.release)
        with pytest.raises(MisuseError, match="ended"):
            held.blocks  # noqa: B018
        assert ns.lookup(keys) == 0
        client.close()


def test_a_closed_client_misses(driver: Driver, daemon: LocalDaemon, watcher: Client) -> None:
    client = driver.client(daemon.url, deadline_s=DEADLINE_S)
    ns, [lease] = leased(client, 1)
    client.ping()
    client.close()
    assert lease.ended
    assert ns.lookup(names(1)) == 0
    with pytest.raises(UnavailableError, match="closed"):
        client.ping()
    client.close()


def test_few_idle_connections_are_kept(
    driver: Driver, daemon: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "IDLE_CONNECTIONS", 2)
    with driver.client(daemon.url, deadline_s=DEADLINE_S) as client, ThreadPoolExecutor(8) as pool:
        stop(daemon.pid)
        pings = [pool.submit(client.ping) for _ in range(8)]
        time.sleep(0.1)
        os.kill(daemon.pid, signal.SIGCONT)
        for ping in pings:
            ping.result()
        assert len(client._idle) == 2


def test_connections_with_leases_are_kept_beyond_the_cap(
    driver: Driver, daemon: LocalDaemon, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "IDLE_CONNECTIONS", 0)
    with driver.client(daemon.url, deadline_s=DEADLINE_S) as client:
        ns, keys = client.namespace(new_layout()), names(1)
        ns.put(keys, payloads(keys))
        assert not client._idle
        lease = ns.acquire(keys)
        assert len(client._idle) == 1
        assert not lease.ended
        driver.in_place(lease.release)
        client.ping()
        assert not client._idle


def test_a_closed_client_stays_closed_in_a_fork(driver: Driver, daemon: LocalDaemon) -> None:
    client = driver.client(daemon.url, deadline_s=DEADLINE_S)
    client.ping()
    client.close()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            with pytest.raises(UnavailableError, match="closed"):
                client.ping()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


# -- against a peer that reads slowly


def test_a_post_during_a_partial_send_follows_the_frame(driver: Driver, reader: Reader) -> None:
    connection = driver.connection(reader.path)
    thread, came = in_thread(lambda: driver.call(connection, LARGE))
    # Half of it is sent.
    assert reader._greeter_is(reader._sock).recv(1000, socket.MSG_PEEK)
    time.sleep(0.05)
    for lease in range(1, 11):
        driver.in_place(lambda lease=lease: connection.post(m.Release(lease)))
    found = reader.read(11, at_a_time=5000)
    assert found == [m.Control(1, "none", LARGE.arguments), *(m.Release(lease) for lease in range(1, 11))]
    reader.send(m.Value(1, 7))
    thread.join()
    assert [answer.value for answer in came] == [7]
    driver.in_place(connection.close)


def test_posts_from_threads_arrive_whole(driver: Driver, reader: Reader) -> None:
    connection = driver.connection(reader.path)
    each = 500

    def post(first: int) -> None:
        for lease in range(first, first + each):
            connection.post(m.Release(lease))

    threads = [in_thread(lambda i=i: post(i * each))[0] for i in range(4)]
    found = reader.read(4 * each, at_a_time=700)
    for thread in threads:
        thread.join()
    assert sorted(message.lease for message in found) == list(range(4 * each))
    for i in range(4):
        own = [message.lease for message in found if message.lease // each == i]
        assert own == sorted(own)
    driver.in_place(connection.close)


def test_a_call_that_ends_within_a_frame_ends_its_connection(driver: Driver, reader: Reader) -> None:
    connection = driver.connection(reader.path)
    with pytest.raises(OSError):
        driver.call(connection, LARGE, deadline_s=0.1)
    assert connection.closed
    driver.in_place(lambda: connection.post(m.Release(1)))
    with pytest.raises(ConnectionError):
        driver.call(connection, m.Ping(0))
    # The half frame is the last that was sent.
    assert reader.drain() == ([], True)


@pytest.mark.parametrize("taken", [True, False])
def test_a_received_descriptor_is_taken_or_closed(driver: Driver, reader: Reader, taken: bool) -> None:
    connection = driver.connection(reader.path)
    thread, came = in_thread(lambda: driver.call(connection, m.Map(0, 1, False)))
    reader.read(1)
    there, back = os.pipe()
    os.set_blocking(there, False)
    reader.send(m.Mapped(1, 4096), [back])
    os.close(back)
    thread.join()
    assert [answer.extent_bytes for answer in came] == [4096]
    if taken:
        os.close(connection.take_descriptor())
    driver.in_place(connection.close)
    # The end of the pipe, not BlockingIOError: its other end is closed.
    assert os.read(there, 1) == b""
    os.close(there)


def test_a_peer_that_hangs_up_within_a_frame_ends_the_call(driver: Driver, reader: Reader) -> None:
    connection = driver.connection(reader.path)
    thread, came = in_thread(lambda: driver.call(connection, LARGE))
    assert reader._greeter_is(reader._sock).recv(1000)
    reader._greeter_is(reader._sock).shutdown(socket.SHUT_RDWR)
    thread.join()
    assert isinstance(came[0], ConnectionError)
    assert connection.closed
    assert connection.ended()


# -- several requests at once


def questions(driver: Driver, reader: Reader, count: int) -> Callable[[], list[Any]]:
    """Asks for one key in each of `count` namespaces, in a thread; returns what waits for the answer."""
    client = driver.client(f"unix://{reader.path}", deadline_s=DEADLINE_S, strict=True)
    asked = [(client.namespace(new_layout()), [bytes([i])]) for i in range(count)]
    pool = ThreadPoolExecutor(1)

    def ask() -> list[Any]:
        with client:
            return [[mask.tolist() for mask in client.contains(asked)] for _ in range(2)]

    answer = pool.submit(ask)
    reader._greeter.join(DEADLINE_S)
    return lambda: answer.result(DEADLINE_S)


def test_questions_about_several_namespaces_take_one_round_trip(driver: Driver, reader: Reader) -> None:
    result = questions(driver, reader, 5)
    # All requests are read before the first is answered: a client that waits in between never ends.
    opens = reader.read(5)
    assert [type(message) for message in opens] == [m.Open] * 5
    for message in reversed(opens):
        reader.send(m.Opened(message.id, message.id, b"f" * 16))
    numbers = [message.id for message in opens]
    for stored in (0, 3):
        asked = reader.read(5)
        assert [type(message) for message in asked] == [m.Contains] * 5
        assert [message.namespace for message in asked] == numbers
        # The order of answers is the daemon's.
        for message in asked[::-1]:
            reader.send(m.Presence(message.id, bytes([message.keys[0] == stored])))
    assert result() == [[[i == stored] for i in range(5)] for stored in (0, 3)]


def test_a_lookup_of_chains_and_others_takes_one_round_trip(driver: Driver, reader: Reader) -> None:
    client = driver.client(f"unix://{reader.path}", deadline_s=DEADLINE_S, strict=True)
    spaces, keys = [client.namespace(new_layout()) for _ in range(4)], [bytes([i, i]) for i in range(100)]

    def ask() -> list[Any]:
        chains = [(ns, keys, prompt, None) for ns, prompt in zip(spaces[:2], (100, 0), strict=True)]
        with client:
            return [client.lookup(chains, [(ns, keys) for ns in spaces[2:]]) for _ in range(2)]

    result = ThreadPoolExecutor(1).submit(ask)
    reader._greeter.join(DEADLINE_S)
    opens = reader.read(4)
    assert [type(message) for message in opens] == [m.Open] * 4
    for message in opens:
        reader.send(m.Opened(message.id, message.id, b"f" * 16))
    for _ in range(2):
        asked = reader.read(4)
        assert [type(message) for message in asked] == [m.Lookup] * 2 + [m.Contains] * 2
        assert [message.namespace for message in asked] == [message.id for message in opens]
        assert [message.asks for message in asked[:2]] == [100, 0]
        assert [message.known for message in asked[:2]] == [0, 100]
        for message in asked[:1:-1]:
            reader.send(m.Presence(message.id, bytes([1] * 60 + [0] * 40)))
        reader.send(m.Found(asked[1].id, 7, False, 7))
        reader.send(m.Found(asked[0].id, 9, False, 9))
    for prefixes, masks in result.result(DEADLINE_S):
        assert ([each.blocks for each in prefixes], [mask.sum() for mask in masks]) == ([9, 7], [60, 60])


def test_an_answer_to_another_request_ends_the_connection(driver: Driver, reader: Reader) -> None:
    result = questions(driver, reader, 2)
    opens = reader.read(2)
    for _ in opens:
        reader.send(m.Opened(opens[0].id, 1, b"f" * 16))
    with pytest.raises(UnavailableError, match="answered other requests"):
        result()
    assert reader.drain() == ([], False)
