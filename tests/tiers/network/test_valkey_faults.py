"""The valkey backend beside servers that refuse, die, hang, and lie.

Those that lie are sockets of the test's own; all others are real ones.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.tiers.network import BackendSettings
from kvstore.tiers.network.base import Name, NetworkError, Outcome
from kvstore.tiers.network.objects import HEADER_BYTES, header, path
from kvstore.tiers.network.valkey.backend import Valkey, open_url
from kvstore.tiers.network.valkey.errors import judge_hello
from kvstore.tiers.network.valkey.resp import Refusal
from tests.processes import stop
from tests.tiers.network.contract import SPACE, block, ends, memory, payload, wanted
from tests.tiers.network.valkeys import Server, server

LATE_S = 0.3
"""What a loaded machine may add to a call's end."""

MIB = 1 << 20


@pytest.fixture
def running() -> Iterator[Server]:
    with server() as made:
        yield made


@contextlib.contextmanager
def opened(url: str, **settings) -> Iterator[Valkey]:
    backend = open_url(BackendSettings(url, **settings))
    try:
        yield backend
    finally:
        backend.close()


@contextlib.contextmanager
def in_time(within_s: float) -> Iterator[float]:
    """When the call must end; it is later than `LATE_S` at no time."""
    until = time.monotonic() + within_s
    yield until
    assert time.monotonic() < until + LATE_S


class Fake:
    """Listens, and has `serve` do what it likes to each connection, in a thread of its own."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.serve = serve
        self.connections = 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.listening.getsockname()[1]}"
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            self.connections += 1
            self.open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.serve(connection)

    def close(self) -> None:
        for sock in (self.listening, *self.open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def fake(serve: Callable[[socket.socket], None]) -> Iterator[Fake]:
    made = Fake(serve)
    try:
        yield made
    finally:
        made.close()


def greet(connection: socket.socket) -> None:
    """As a server would, and waits for what comes first."""
    assert connection.recv(1 << 16) == b"*1\r\n$4\r\nPING\r\n"
    connection.sendall(b"+PONG\r\n")
    connection.recv(1 << 16)


def answering(raw: bytes, then_close: bool = False, first: bool = False) -> Callable[[socket.socket], None]:
    """Says this to whatever comes, or whatever comes `first`, and then nothing."""

    def serve(connection: socket.socket) -> None:
        if first:
            connection.recv(1 << 16)
        else:
            greet(connection)
        connection.sendall(raw)
        while not then_close and connection.recv(1 << 16):
            pass

    return serve


def value(thing) -> bytes:
    return header(thing) + payload(thing)


def test_wrong_password() -> None:
    with server("requirepass right") as running:
        with opened(running.url, password="right") as backend:
            backend.health(ends())
            assert backend.write([block(b"k", MIB)], ends()) == [Outcome.OK]
        for settings in ({"password": "wrong"}, {}, {"user": "who", "password": "right"}):
            with opened(running.url, **settings) as backend:
                with pytest.raises(NetworkError) as caught:
                    backend.write([block(b"k", MIB)], ends())
                assert caught.value.fatal
                assert "right" not in str(caught.value)
                with pytest.raises(NetworkError):
                    backend.health(ends())


def test_error_replies_are_cut_and_escaped() -> None:
    with fake(answering(b"-NOPERM \x1b[31m\xe2\x80\xae" + b"n" * 9000 + b"\r\n", first=True)) as made:
        with opened(made.url) as backend, pytest.raises(NetworkError) as told:
            backend.health(ends())
        assert ": NOPERM \\x1b[31m\\u202en" in str(told.value)
        assert len(str(told.value)) < 500


def test_a_user_without_permission(running: Server) -> None:
    running.ask("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+get", "+exists")
    put = block(b"k")
    with opened(running.url) as backend:
        assert backend.write([put], ends()) == [Outcome.OK]
    with opened(running.url, user="reader", password="secret") as backend:
        assert backend.read([wanted(put)], ends()) == [Outcome.OK]
        assert backend.probe([put.name], ends()) == [Outcome.OK]
        with pytest.raises(NetworkError, match="permissions") as caught:
            backend.write([put], ends())
        assert caught.value.fatal
        with pytest.raises(NetworkError):
            list(backend.list(None, ends()))
        assert backend.read([wanted(put)], ends()) == [Outcome.OK]


def test_a_database_that_is_none(running: Server) -> None:
    with opened(f"{running.url}/9") as backend:
        assert backend.write([block(b"k")], ends()) == [Outcome.OK]
    assert running.ask("DBSIZE") == 0
    with opened(f"{running.url}/99") as backend, pytest.raises(NetworkError) as caught:
        backend.probe([Name(SPACE, b"k")], ends())
    assert caught.value.fatal


def test_no_room() -> None:
    with server("maxmemory 20mb", "maxmemory-policy noeviction") as running, opened(running.url) as backend:
        blocks = [block(bytes([i]), 4 * MIB) for i in range(8)]
        outcomes = backend.write(blocks, ends())
        assert set(outcomes) == {Outcome.OK, Outcome.FULL}
        assert outcomes[0] == Outcome.OK
        assert outcomes[-1] == Outcome.FULL
        fits = outcomes.count(Outcome.OK)
        assert backend.read([wanted(b) for b in blocks], ends()).count(Outcome.OK) == fits
        assert backend.delete([b.name for b in blocks], ends()) == [Outcome.OK] * 8
        assert backend.write(blocks[-1:], ends()) == [Outcome.OK]


def test_nothing_may_be_written(running: Server) -> None:
    running.ask("REPLICAOF", "127.0.0.1", "1")
    with opened(running.url) as backend:
        assert backend.write([block(b"k")], ends()) == [Outcome.FULL]


def test_a_policy_that_never_evicts_is_logged(running: Server, caplog) -> None:
    with opened(running.url) as backend:
        backend.health(ends())
        assert "no maxmemory" in caplog.text
        running.ask("CONFIG", "SET", "maxmemory", "1gb")
        backend.health(ends())
        assert "noeviction" in caplog.text
        running.ask("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
        backend.health(ends())
        assert "volatile-lru" in caplog.text
        caplog.clear()
        backend.health(ends())
        assert not caplog.text
    with opened(f"{running.url}?ttl=100") as backend:
        backend.health(ends())
        assert not caplog.text


def test_no_server_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"redis://127.0.0.1:{sock.getsockname()[1]}"
    with opened(url) as backend:
        for call in (
            lambda: backend.read([wanted(block(b"k"))], ends()),
            lambda: backend.write([block(b"k")], ends()),
            lambda: list(backend.list(None, ends())),
            lambda: backend.health(ends()),
        ):
            with pytest.raises(NetworkError, match="cannot connect to") as caught:
                call()
            assert not caught.value.fatal
    with opened("unix:///nowhere/at/all") as backend, pytest.raises(NetworkError):
        backend.health(ends())


def test_a_server_with_too_many_clients_refuses_for_now() -> None:
    with pytest.raises(NetworkError) as caught:
        judge_hello(Refusal("ERR max number of clients reached"))
    assert not caught.value.fatal


def test_a_name_that_is_none() -> None:
    with opened("redis://no-such-host.invalid") as backend, pytest.raises(NetworkError) as caught:
        backend.probe([Name(SPACE, b"k")], ends())
    assert not caught.value.fatal


def test_looking_up_a_name_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: released.wait(20) and [])
    with opened("redis://hangs.invalid") as backend:
        for _ in range(2):
            with in_time(0.3) as until:
                assert backend.probe([Name(SPACE, b"k")], until) == [Outcome.FAILED]
    released.set()


def test_a_restarted_server_is_used_again(running: Server) -> None:
    put = block(b"k")
    with opened(running.url) as backend:
        assert backend.write([put], ends()) == [Outcome.OK]
        running.kill()
        with pytest.raises(NetworkError):
            backend.read([wanted(put)], ends())
        running.start()
        running.wait()
        assert backend.write([put], ends()) == [Outcome.OK]


def test_connections_that_the_server_has_closed(running: Server) -> None:
    put = block(b"k")
    with opened(running.url) as backend:
        assert backend.write([put], ends()) == [Outcome.OK]
        for _ in range(3):
            running.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            got = wanted(put)
            assert backend.read([got], ends()) == [Outcome.OK]
            assert payload(got) == payload(put)


def test_a_server_that_hangs(running: Server) -> None:
    blocks = [block(bytes([i]), 4 * MIB) for i in range(8)]
    with opened(running.url) as backend:
        assert backend.write(blocks, ends()) == [Outcome.OK] * 8
        stop(running.process.pid)
        with in_time(0.4) as until:
            assert backend.write(blocks, until) == [Outcome.FAILED] * 8
        with in_time(0.4) as until:
            assert backend.read([wanted(b) for b in blocks], until) == [Outcome.FAILED] * 8
        with in_time(0.2) as until:
            assert backend.probe([blocks[0].name], until) == [Outcome.FAILED]
        with in_time(0.2) as until:
            assert backend.delete([blocks[0].name], until) == [Outcome.FAILED]
        with in_time(0.2) as until, pytest.raises(NetworkError):
            backend.health(until)
        with in_time(0.2) as until, pytest.raises(NetworkError):
            list(backend.list(None, until))
        running.signal(signal.SIGCONT)
        got = [wanted(b) for b in blocks]
        assert backend.write(blocks[:1], ends()) == [Outcome.OK]
        assert backend.read(got, ends()) == [Outcome.OK] * 8
        assert [payload(g) for g in got] == [payload(b) for b in blocks]


def test_a_server_that_dies_while_it_is_written_to(running: Server) -> None:
    blocks = [block(bytes([i]), 4 * MIB) for i in range(8)]
    with opened(running.url) as backend:
        backend.health(ends())
        stop(running.process.pid)
        threading.Timer(0.3, running.kill).start()
        start = time.monotonic()
        with pytest.raises(NetworkError):  # it is connected to again, in vain
            backend.write(blocks, ends())
        assert time.monotonic() - start < 2


def test_a_server_that_dies_while_it_is_read_from(running: Server) -> None:
    blocks = [block(bytes([i]), 4 * MIB) for i in range(8)]
    with opened(running.url) as backend:
        assert backend.write(blocks, ends()) == [Outcome.OK] * 8
    with fake(_cutting(running, 10 * MIB)) as proxy, opened(proxy.url) as backend:
        got = [wanted(b) for b in blocks]
        outcomes = backend.read(got, ends(3))
        assert outcomes == [Outcome.OK] * 2 + [Outcome.FAILED] * 6
        assert [payload(g) for g in got[:2]] == [payload(b) for b in blocks[:2]]


def _cutting(to: Server, behind: int) -> Callable[[socket.socket], None]:
    """Passes on what a server says, and kills it behind so many bytes."""

    def serve(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", to.port)) as server:
            upwards = threading.Thread(target=_pass_on, args=(connection, server), daemon=True)
            upwards.start()
            left = behind
            while left and (raw := server.recv(min(left, 1 << 16))):
                connection.sendall(raw)
                left -= len(raw)
            to.kill()

    return serve


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while raw := source.recv(1 << 16):
            target.sendall(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\0" * 1000,
        b"$-5\r\n",
        b"*9999999999\r\n",
        b"*1\r\n" * 1000,
        b"+" + b"x" * 100_000,
        b":12\r\n:13\r\n:14\r\n",
        b"-\r\n",
        b"",
    ],
    ids=["http", "zeros", "negative", "array", "nested", "line", "more", "refusal", "nothing"],
)
@pytest.mark.parametrize(
    ("then_close", "first"), [(False, False), (True, False), (False, True)], ids=["", "closes", "first"]
)
def test_a_server_that_talks_nonsense(raw: bytes, then_close: bool, first: bool) -> None:
    raised = [NetworkError] if first else []
    with fake(answering(raw, then_close, first)) as made, opened(made.url) as backend:
        for call in (
            lambda until: backend.read([wanted(block(b"a")), wanted(block(b"b"))], until),
            lambda until: backend.write([block(b"a"), block(b"b")], until),
        ):
            with in_time(0.15) as until, contextlib.suppress(*raised):
                assert set(call(until)) <= {Outcome.FAILED, Outcome.TORN}
        with in_time(0.15) as until, pytest.raises(NetworkError):
            backend.health(until)
        with in_time(0.15) as until, pytest.raises(NetworkError):
            list(backend.list(None, until))


def test_a_reply_that_is_none_ends_the_connection() -> None:
    """What comes behind nonsense is never taken for an answer."""
    put = block(b"k")
    good = b"$%d\r\n%b\r\n" % (len(value(put)), value(put))
    with fake(answering(b"?\r\n" + good * 3)) as made, opened(made.url) as backend:
        assert backend.read([wanted(put)], ends(0.3)) == [Outcome.FAILED]
        assert backend.read([wanted(put)], ends(0.3)) == [Outcome.FAILED]
        assert made.connections == 2


def test_surplus_replies_are_never_used() -> None:
    put, other = block(b"k"), block(b"other")
    two = b"".join(b"$%d\r\n%b\r\n" % (len(value(b)), value(b)) for b in (put, other))
    with fake(answering(two)) as made, opened(made.url) as backend:
        assert backend.read([wanted(put)], ends(0.5)) == [Outcome.OK]
        time.sleep(0.1)
        assert backend.read([wanted(put)], ends(0.5)) == [Outcome.OK]
        assert made.connections == 2


def test_a_connection_with_unsent_bytes_is_not_reused() -> None:
    """A server that replies early leaves bytes of a slot unsent: they must not be sent in a later call."""

    def serve(connection: socket.socket) -> None:
        greet(connection)
        connection.sendall(b"+OK\r\n")
        time.sleep(0.2)
        while connection.recv(1 << 16):
            pass

    with fake(serve) as made, opened(made.url) as backend:
        assert backend.write([block(b"k", 64 * MIB)], ends(2)) == [Outcome.OK]
        assert backend.write([block(b"k", 64 * MIB)], ends(2)) == [Outcome.OK]
        assert made.connections == 2


@pytest.mark.parametrize("claim", [0, 100, HEADER_BYTES, 70_000, 70_000 + HEADER_BYTES + 1, 1 << 30, 1 << 39])
def test_lengths_are_claims(claim: int) -> None:
    """Whatever is said and sent, nothing is put behind the slot, and it ends in time."""
    put = block(b"k", 70_000)

    def serve(connection: socket.socket) -> None:
        greet(connection)
        connection.sendall(b"$%d\r\n" % claim + value(put))
        while True:
            connection.sendall(b"\xdd" * (1 << 20))

    room = memory(200_000)
    got = wanted(put)
    got.memory = room[: len(got.memory)]
    with fake(serve) as made, opened(made.url) as backend:
        with in_time(0.4) as until:
            assert backend.read([got], until)[0] in (Outcome.FAILED, Outcome.TORN)
        before = bytes(room)
        time.sleep(0.1)
    assert bytes(room) == before
    assert not any(room[got.length :])


def test_a_server_that_trickles() -> None:
    put = block(b"k", 70_000)

    def serve(connection: socket.socket) -> None:
        greet(connection)
        raw = b"$%d\r\n" % len(value(put)) + value(put)
        connection.sendall(raw[:300])
        for byte in raw[300:]:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    got = wanted(put)
    with fake(serve) as made, opened(made.url) as backend:
        with in_time(0.5) as until:
            assert backend.read([got], until) == [Outcome.FAILED]
        before = payload(got)
        time.sleep(0.2)
        with in_time(0.3) as until:
            assert backend.write([put], until) == [Outcome.FAILED]
        assert payload(got) == before  # also after a later call


def test_a_server_that_reads_nothing() -> None:
    def serve(connection: socket.socket) -> None:
        greet(connection)
        time.sleep(20)

    put = block(b"k", 32 * MIB)
    with fake(serve) as made, opened(made.url) as backend, in_time(0.3) as until:
        assert backend.write([put], until) == [Outcome.FAILED]


def test_a_server_that_redirects_in_circles() -> None:
    def serve(connection: socket.socket) -> None:
        _, port = connection.getsockname()
        greet(connection)
        connection.sendall(b"-MOVED 1 127.0.0.1:%d\r\n" % port)
        while raw := connection.recv(1 << 16):
            said = b"-MOVED 1 127.0.0.1:%d\r\n" % port
            connection.sendall(said * raw.count(b"*"))

    with fake(serve) as made, opened(made.url) as backend, in_time(2) as until:
        assert backend.probe([Name(SPACE, b"k")], until) == [Outcome.FAILED]


def test_a_cluster_that_is_none(running: Server) -> None:
    with opened(f"{running.url}?cluster=1") as backend, pytest.raises(NetworkError, match="slots") as caught:
        backend.probe([Name(SPACE, b"k")], ends())
    assert caught.value.fatal


def test_calls_wait_for_their_turn_no_longer_than_they_may(running: Server) -> None:
    put = block(b"k")
    with opened(running.url, threads=1) as backend:
        assert backend.write([put], ends()) == [Outcome.OK]
        stop(running.process.pid)
        first = threading.Thread(target=backend.read, args=([wanted(put)], ends(1)))
        first.start()
        time.sleep(0.1)
        with in_time(0.3) as until:
            assert backend.probe([put.name], until) == [Outcome.FAILED]
        running.signal(signal.SIGCONT)
        first.join()
        assert backend.probe([put.name], ends()) == [Outcome.OK]


def test_calls_under_way_end_when_it_is_closed(running: Server) -> None:
    put = block(b"k")
    outcomes = []
    with opened(running.url) as backend:
        assert backend.write([put], ends()) == [Outcome.OK]
        stop(running.process.pid)
        call = threading.Thread(target=lambda: outcomes.append(backend.read([wanted(put)], ends())))
        call.start()
        time.sleep(0.2)
        backend.close()
        call.join(0.5)
        assert outcomes == [[Outcome.FAILED]]


def test_connections_are_kept_and_no_more_than_needed(running: Server) -> None:
    with opened(running.url, threads=3) as backend:
        blocks = [block(bytes([i])) for i in range(20)]
        threads = [threading.Thread(target=backend.write, args=([b], ends())) for b in blocks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(5):
            assert backend.probe([b.name for b in blocks], ends()) == [Outcome.OK] * 20
        assert len(running.ask("CLIENT", "LIST").splitlines()) - 1 <= 3


def test_a_key_that_is_no_string(running: Server) -> None:
    put = block(b"k")
    running.ask("RPUSH", path(put.name), "x")
    with opened(running.url) as backend:
        assert backend.read([wanted(put)], ends()) == [Outcome.TORN]
        assert list(backend.list(None, ends())) == []
        assert backend.delete([put.name], ends()) == [Outcome.OK]
        assert backend.write([put], ends()) == [Outcome.OK]


def test_requests_in_flight_are_bounded_in_bytes() -> None:
    asked = bytearray()

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"+PONG\r\n")
        while raw := connection.recv(1 << 16):
            asked.extend(raw)

    big, small = [[wanted(block(bytes([i]), n)) for i in range(40)] for n in (4 * MIB, 1000)]
    with fake(serve) as made, opened(made.url) as backend:
        assert backend.read(big, ends(0.2)) == [Outcome.FAILED] * 40
        assert asked.count(b"GET") == 3
        asked.clear()
        assert backend.read(small, ends(0.2)) == [Outcome.FAILED] * 40
        assert asked.count(b"GET") == 40


def test_late_replies_are_dropped(running: Server) -> None:
    there, absent = block(b"there"), block(b"absent")
    with opened(running.url) as backend:
        assert backend.write([there], ends()) == [Outcome.OK]
        stop(running.process.pid)
        assert backend.probe([there.name], ends(0.1)) == [Outcome.FAILED]
        running.signal(signal.SIGCONT)
        assert backend.probe([absent.name], ends()) == [Outcome.MISSING]
