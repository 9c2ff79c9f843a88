"""Connections of both clients: what is posted arrives, in order and whole, or the connection ends.

Against a real daemon that is stopped, and against a peer that reads as slowly as a test wants.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import AsyncClient, Client
from kvstore.client import aio, protocol
from kvstore.client import connection as link
from kvstore.client.aio import AsyncConnection
from kvstore.client.connection import Connection
from kvstore.client.leases import Lease
from kvstore.client.protocol import Maps
from kvstore.errors import MisuseError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames, pack
from tests.daemons import SMALL, eventually, got, names, new_layout, payload, payloads

DEADLINE_S = 20.0
LEASES = 600
LARGE = m.Control(0, "none", {"much": "x" * (2 << 20)})
"""Takes more than a socket's buffers."""


class Loop:
    """An event loop in a thread: calls of the asynchronous client, as blocking ones."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(2 * DEADLINE_S)

    def call(self, what: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return what()

        return self.run(run())

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Blocking:
    """The blocking client, by the names that the tests use."""

    def client(self, url: str, deadline_s: float = DEADLINE_S) -> Any:
        return Client(url, deadline_s=deadline_s)

    def run(self, result: Any) -> Any:
        return result

    def in_place(self, what: Callable[[], Any]) -> Any:
        """Runs what must not wait."""
        return what()

    def link(self, path: Path) -> Any:
        return Connection(str(path), "", Maps(), time.monotonic() + DEADLINE_S)

    def call(self, connection: Any, message: Any, deadline_s: float = DEADLINE_S) -> Any:
        return connection.call(message, time.monotonic() + deadline_s)

    def stop(self) -> None:
        pass


class Awaiting:
    """The asynchronous client, likewise."""

    def __init__(self) -> None:
        self.own = Loop()

    def client(self, url: str, deadline_s: float = DEADLINE_S) -> Any:
        return AsyncClient(url, deadline_s=deadline_s)

    def run(self, result: Any) -> Any:
        return self.own.run(result)

    def in_place(self, what: Callable[[], Any]) -> Any:
        return self.own.call(what)

    def link(self, path: Path) -> Any:
        async def connected() -> AsyncConnection:
            made = AsyncConnection("", Maps())
            await made.connect(str(path))
            return made

        return self.own.run(connected())

    def call(self, connection: Any, message: Any, deadline_s: float = DEADLINE_S) -> Any:
        async def call() -> Any:
            async with asyncio.timeout(deadline_s):
                return await connection.call(message)

        return self.own.run(call())

    def stop(self) -> None:
        self.own.stop()


@pytest.fixture(params=[Blocking, Awaiting])
def kind(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.param()
    yield made
    made.stop()


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
        self.send(m.Welcome(m.VERSION, b"x", 1 << 24, 128, 128))

    def send(self, message: Any) -> None:
        self._greeter_is(self._sock).sendall(pack(message))

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


def leased(kind: Any, client: Any, count: int) -> tuple[Any, list[Lease]]:
    """A namespace and that many leases on one of its blocks, all over one connection."""
    ns = client.namespace(new_layout())
    keys = names(1)
    assert kind.run(ns.put(keys, payloads(keys))).stored == 1
    leases = [kind.run(ns.acquire(keys)) for _ in range(count)]
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


def test_a_full_queue_of_connections_is_waited_for(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(path))
            thread, came = in_thread(lambda: kind.link(path))
            time.sleep(0.1)
            assert not came, "the queue is full"
            listener.accept()[0].close()
            sock, _ = listener.accept()
            with sock:
                sock.sendall(pack(m.Welcome(m.VERSION, b"x", 1 << 24, 128, 128)))
                thread.join()
                kind.in_place(came[0].close)


# -- against a daemon


def test_leases_released_while_the_daemon_is_stopped_are_released(
    kind: Any, daemon: LocalDaemon, watcher: Client
) -> None:
    client = kind.client(daemon.url)
    _, leases = leased(kind, client, LEASES)
    [connection] = client._idle
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        for lease in leases:
            kind.in_place(lease.release)
        took_s = time.monotonic() - started_s
        assert connection.session.outbox, "the socket took it all: nothing was tried"
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    # Not one of them has waited for its deadline.
    assert took_s < DEADLINE_S / 2
    # No call follows that could take the rest along.
    eventually(lambda: watcher.status()["leases"] == 0)
    assert not connection.closed
    kind.run(client.close())


def test_what_waits_goes_out_before_the_next_request(kind: Any, daemon: LocalDaemon, watcher: Client) -> None:
    client = kind.client(daemon.url)
    ns, leases = leased(kind, client, LEASES)
    os.kill(daemon.pid, signal.SIGSTOP)
    for lease in leases:
        kind.in_place(lease.release)
    thread, came = in_thread(lambda: kind.run(ns.lookup(names(1))))
    time.sleep(0.05)
    os.kill(daemon.pid, signal.SIGCONT)
    thread.join()
    assert came == [1]
    assert watcher.status()["leases"] == 0
    kind.run(client.close())


def test_a_daemon_that_does_not_read_in_time_loses_the_connection(
    kind: Any, daemon: LocalDaemon, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (link, aio):
        monkeypatch.setattr(module, "POST_WAIT_S", 0.2)
    client = kind.client(daemon.url)
    ns, leases = leased(kind, client, LEASES)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for lease in leases[1:]:
            kind.in_place(lease.release)
        eventually(lambda: leases[0].ended)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    with pytest.raises(UnavailableError, match="the connection of the lease has ended"):
        leases[0].blocks  # noqa: B018
    assert leases[0].verify() == 0
    eventually(lambda: watcher.status()["leases"] == 0)
    assert kind.run(ns.lookup(names(1))) == 1
    kind.run(client.close())


def test_too_many_posts_end_the_connection(
    kind: Any, daemon: LocalDaemon, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "POST_BYTES", 100)
    client = kind.client(daemon.url)
    ns, leases = leased(kind, client, LEASES)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for lease in leases[1:]:
            kind.in_place(lease.release)
        assert leases[0].ended
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: watcher.status()["leases"] == 0)
    assert kind.run(ns.lookup(names(1))) == 1
    kind.run(client.close())


def test_a_lease_sees_that_the_daemon_has_hung_up(kind: Any) -> None:
    with LocalDaemon(SMALL) as served:
        client = kind.client(served.url)
        ns, [held, copied, released] = leased(kind, client, 3)
        views, keys = held.blocks, names(1)
        kind.in_place(released.release)
        assert [held.ended, copied.ended, released.ended] == [False, False, True]
        assert held.verify() == 1
        served.kill()
        assert [held.ended, copied.ended] == [True, True]
        assert [bytes(view) for view in views] == [payload(key) for key in keys]
        assert held.verify() == 0
        with pytest.raises(UnavailableError, match="the connection of the lease has ended"):
            held.read(0, bytearray(16))
        kind.in_place(held.release)
        with pytest.raises(MisuseError, match="ended"):
            held.blocks  # noqa: B018
        assert kind.run(ns.lookup(keys)) == 0
        kind.run(client.close())


def test_a_closed_client_misses(kind: Any, daemon: LocalDaemon, watcher: Client) -> None:
    client = kind.client(daemon.url)
    ns, [lease] = leased(kind, client, 1)
    kind.run(client.ping())
    kind.run(client.close())
    assert lease.ended
    assert kind.run(ns.lookup(names(1))) == 0
    with pytest.raises(UnavailableError, match="closed"):
        kind.run(client.ping())


def test_few_idle_connections_are_kept(daemon: LocalDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_IDLE_LINKS", 2)

    async def work() -> None:
        async with AsyncClient(daemon.url, deadline_s=DEADLINE_S) as client:
            await asyncio.gather(*(client.ping() for _ in range(8)))
            assert len(client._idle) == 2

    asyncio.run(work())


def test_a_fork_of_an_asynchronous_client_leaves_its_connections_alone(daemon: LocalDaemon) -> None:
    client = AsyncClient(daemon.url, deadline_s=DEADLINE_S)
    ns, keys = client.namespace(new_layout()), names(2)

    async def stored() -> Lease:
        assert (await ns.put(keys, payloads(keys))).stored == 2
        return await ns.acquire(keys)

    lease = asyncio.run(stored())
    pid = os.fork()
    if not pid:
        code = 1
        try:
            lease.release()
            found = asyncio.run(ns.lookup(keys))
            code = 0 if found == 2 and {made.pid for made in client._idle} == {os.getpid()} else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    with Client(daemon.url, deadline_s=DEADLINE_S) as watcher:
        assert watcher.status()["leases"] == 1
        lease.release()
        eventually(lambda: watcher.status()["leases"] == 0)
        assert got(watcher.namespace(ns.layout), keys) == 2
    asyncio.run(client.close())


# -- against a peer that reads slowly


def test_a_post_between_two_pieces_of_a_frame_comes_after_it(kind: Any, reader: Reader) -> None:
    connection = kind.link(reader.path)
    thread, came = in_thread(lambda: kind.call(connection, LARGE))
    # Half of it is sent.
    assert reader._greeter_is(reader._sock).recv(1000, socket.MSG_PEEK)
    time.sleep(0.05)
    for lease in range(1, 11):
        kind.in_place(lambda lease=lease: connection.post(m.Release(lease)))
    found = reader.read(11, at_a_time=5000)
    assert found == [m.Control(1, "none", LARGE.arguments), *(m.Release(lease) for lease in range(1, 11))]
    reader.send(m.Value(1, 7))
    thread.join()
    assert [answer.value for answer in came] == [7]
    kind.in_place(connection.close)


def test_posts_from_threads_arrive_whole(kind: Any, reader: Reader) -> None:
    connection = kind.link(reader.path)
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
    kind.in_place(connection.close)


def test_a_call_that_ends_within_a_frame_ends_its_connection(kind: Any, reader: Reader) -> None:
    connection = kind.link(reader.path)
    with pytest.raises(OSError):
        kind.call(connection, LARGE, deadline_s=0.1)
    assert connection.closed
    kind.in_place(lambda: connection.post(m.Release(1)))
    with pytest.raises(ConnectionError):
        kind.call(connection, m.Ping(0))
    # The half frame is the last that was sent.
    assert reader.drain() == ([], True)


def test_a_peer_that_hangs_up_within_a_frame_ends_the_call(kind: Any, reader: Reader) -> None:
    connection = kind.link(reader.path)
    thread, came = in_thread(lambda: kind.call(connection, LARGE))
    assert reader._greeter_is(reader._sock).recv(1000)
    reader._greeter_is(reader._sock).shutdown(socket.SHUT_RDWR)
    thread.join()
    assert isinstance(came[0], ConnectionError)
    assert connection.closed
    assert connection.ended()
