"""Pipelined connections to Valkey and Redis.

All code runs on the caller's thread, and only `exchange` waits. After `exchange` no memory of the caller is
read or written.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.errors import RemoteProtocolError
from kvstore.tiers.network.base import NetworkError, Outcome
from kvstore.tiers.network.resolver import Address, NoAnswer, SocketAddress
from kvstore.tiers.network.valkey.resp import Reader, Reply, ReplyParser

WINDOW_BYTES = 16 << 20
"""The most bytes of replies under way on a connection. The server holds them in memory."""

SMALL_BYTES = 64
"""The weight of a reply without payload."""

_CHECK_CLOSED_EVERY_S = 0.1  # the time between checks whether the backend was closed
_PIECES = 64
_TLS_BYTES = 64 << 10  # a send that would block must be repeated with the same bytes
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(slots=True)
class Request:
    """A command in `pieces`, and its reply.

    `judge` turns the reply into an outcome as soon as it is there. It may raise NetworkError, which closes
    the connection. `into`: see `Reader.reply`. `weight`: the reply's share of `WINDOW_BYTES`. `asked_at`: the
    node that a cluster redirected this request to.
    """

    pieces: Sequence[bytes | memoryview]
    key: bytes = b""
    judge: Callable[[Reply], Outcome] | None = None
    into: Sequence[memoryview] = ()
    weight: int = SMALL_BYTES
    reply: Reply = None
    answered: bool = False
    outcome: Outcome = Outcome.FAILED
    asked_at: Address | None = None

    def answer(self, reply: Reply) -> None:
        """Takes the complete reply."""
        self.reply, self.answered = reply, True
        if self.judge is not None:
            self.outcome = self.judge(reply)


class Connection:
    """One connection, opened during its first exchange. Not thread-safe.

    `broken`: the error that ended it. `reused`: it was used in an earlier exchange. `heard`: bytes have
    arrived in this exchange.
    """

    def __init__(
        self,
        address: Address,
        addresses: Sequence[SocketAddress],
        tls: ssl.SSLContext | None,
        hello: Sequence[Request],
    ) -> None:
        """`hello` is sent before all other requests, one at a time."""
        self.address = address
        self.broken: Exception | None = None
        self.reused = self.heard = False
        self._hello = tuple(hello)
        self.wants = select.POLLOUT
        self._addresses = deque(addresses)
        self._tls = tls
        self._unsent = deque(hello)
        self._pieces: deque[memoryview] = deque()
        self._waiting: deque[Request] = deque()
        self._weight = 0
        self._reader = Reader()
        self._parsing: ReplyParser | None = None
        self._target = memoryview(b"")
        self._on_ready: Callable[[int], None] = self._connect
        self._socket: socket.socket | None = None

    def ask(self, requests: Sequence[Request]) -> None:
        """Queues requests for the next exchange."""
        self.heard = False
        self._unsent.extend(requests)
        if self._socket is None:
            self._catch(self._start_connect)
        elif self.reused:
            self.wants = select.POLLIN | select.POLLOUT

    @property
    def greeted(self) -> bool:
        """Whether a server has accepted the login."""
        return all(request.answered for request in self._hello)

    @property
    def busy(self) -> bool:
        """Whether a request is unsent or unanswered."""
        return self.broken is None and bool(self._unsent or self._waiting)

    @property
    def pending(self) -> bool:
        """Whether TLS has received bytes that a poll does not see."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def fileno(self) -> int:
        """Returns the descriptor of the socket. A step may replace the socket."""
        assert self._socket is not None
        return self._socket.fileno()

    def step(self, events: int) -> None:
        """Sends and receives without waiting, after a poll with these events."""
        self._catch(lambda: self._on_ready(events))

    def close(self) -> None:
        """Closes the socket and drops references to the caller's memory."""
        self.broken = self.broken or ConnectionError("closed")
        self._parsing, self._target = None, memoryview(b"")
        for queue in (self._unsent, self._pieces, self._waiting):
            queue.clear()
        if self._socket is not None:
            self._socket.close()

    def end(self) -> None:
        """Ends an exchange. A connection with unanswered requests is closed."""
        if self.busy:
            self.broken = NoAnswer("no answer in time")
        elif self.broken is None and not self._reader.empty:
            self.broken = RemoteProtocolError("the server sent more replies than requests")
        self.reused = True
        if self.broken is not None:
            self.close()

    def _catch(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, RemoteProtocolError, NetworkError) as error:
            self.broken = error.with_traceback(None)  # its frames hold the caller's memory

    def _start_connect(self) -> None:
        """Starts to connect to the next address that accepts it."""
        error = errno.EADDRNOTAVAIL
        while self._addresses:
            family, address = self._addresses.popleft()
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            if family != socket.AF_UNIX:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            error = self._socket.connect_ex(address)
            if error in (0, errno.EINPROGRESS):
                return
            self._socket.close()
        raise OSError(error, os.strerror(error))

    def _connect(self, events: int) -> None:
        assert self._socket is not None
        if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._socket.close()
            if not self._addresses:
                raise OSError(error, os.strerror(error))
            self._start_connect()
        elif self._tls is None:
            self._established()
        else:
            host = self.address.host
            self._socket = self._tls.wrap_socket(
                self._socket, server_hostname=host, do_handshake_on_connect=False
            )
            self._on_ready = self._shake_hands
            self._on_ready(events)

    def _shake_hands(self, events: int) -> None:
        assert isinstance(self._socket, ssl.SSLSocket)
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self.wants = select.POLLIN
        except ssl.SSLWantWriteError:
            self.wants = select.POLLOUT
        else:
            self._established()

    def _established(self) -> None:
        self._on_ready = self._talk
        self._talk(0)

    def _talk(self, events: int) -> None:
        self._fill_window()
        if events & ~select.POLLOUT or self.pending:
            self._receive()
            self._fill_window()
        if self._pieces:
            self._send()
        self.wants = select.POLLIN | (select.POLLOUT if self._pieces else 0)

    def _fill_window(self) -> None:
        """Moves requests to the send queue while their replies fit in the window."""
        while self._unsent and (not self._waiting or self._weight + self._unsent[0].weight <= WINDOW_BYTES):
            request = self._unsent.popleft()
            self._weight += request.weight
            self._waiting.append(request)
            self._pieces.extend(memoryview(piece) for piece in request.pieces)

    def _send(self) -> None:
        assert self._socket is not None
        try:
            if self._tls is None:
                sent = self._socket.sendmsg(list(islice(self._pieces, _PIECES)))
            else:
                sent = self._socket.send(self._pieces[0][:_TLS_BYTES])
        except _BLOCKED:
            return
        while sent:
            first = self._pieces.popleft()
            if sent < len(first):
                self._pieces.appendleft(first[sent:])
            sent -= min(sent, len(first))

    def _receive(self) -> None:
        assert self._socket is not None
        if self._parsing is None:
            if not self._waiting:
                raise RemoteProtocolError("the server sent more replies than requests")
            self._next_reply()
        try:
            nbytes = self._socket.recv_into(self._target)
        except _BLOCKED:
            return
        if not nbytes:
            raise ConnectionError("the server closed the connection")
        self.heard = True
        self._received(nbytes)

    def _received(self, nbytes: int) -> None:
        """Parses bytes that have arrived, and answers the requests that they complete."""
        assert self._parsing is not None
        try:
            self._target = self._parsing.send(nbytes)
        except StopIteration as done:
            self._answer(done.value)
            while self._waiting and not self._reader.empty and self._next_reply():
                pass

    def _next_reply(self) -> bool:
        """Starts to parse the next reply. Returns whether it was complete already."""
        self._parsing = self._reader.reply(self._waiting[0].into)
        try:
            self._target = next(self._parsing)
        except StopIteration as done:
            self._answer(done.value)
            return True
        return False

    def _answer(self, reply: Reply) -> None:
        self._parsing, self._target = None, memoryview(b"")
        request = self._waiting.popleft()
        self._weight -= request.weight
        request.answer(reply)


def exchange(connections: Sequence[Connection], ends: float, stopped: Callable[[], bool]) -> None:
    """Runs all connections in parallel until their requests are answered, or until `ends`."""
    try:
        while busy := [connection for connection in connections if connection.busy]:
            left_s = ends - time.monotonic()
            if left_s <= 0 or stopped():
                break
            _move(busy, min(left_s, _CHECK_CLOSED_EVERY_S))
    finally:
        for connection in connections:
            connection.end()


def _move(connections: Sequence[Connection], wait_s: float) -> None:
    """Waits until a connection is ready, then steps all that are ready."""
    poll, by_number = select.poll(), {}
    for connection in connections:
        number = connection.fileno()
        by_number[number] = connection
        poll.register(number, connection.wants)
    if any(connection.pending for connection in connections):
        wait_s = 0
    ready = dict(poll.poll(wait_s * 1000))
    for number, connection in by_number.items():
        if number in ready or connection.pending:
            connection.step(ready.get(number, 0))
