"""Pipelined connections to Valkey and Redis.

All code runs on the caller's thread, and only `exchange` waits. After `exchange` no memory of the caller is
read or written.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.errors import RemoteProtocolError
from kvstore.tiers.network.base import NetworkError, Outcome
from kvstore.tiers.network.resolver import Address, NoAnswer, SocketAddress
from kvstore.tiers.network.sockets import Steps, connect, run
from kvstore.tiers.network.valkey.resp import Reader, Reply, ReplyParser

WINDOW_BYTES = 16 << 20
"""The most bytes of replies under way on a connection. The server holds them in memory."""

SMALL_BYTES = 64
"""The weight of a reply without payload."""

_PIECES = 64
_MOST_RECEIVES = 32
"""Parts of replies that are received between two looks at the time."""

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
        self._addresses = addresses
        self._tls = tls
        self._unsent = deque(hello)
        self._pieces: deque[memoryview] = deque()
        self._waiting: deque[Request] = deque()
        self._weight = 0
        self._reader = Reader()
        self._parsing: ReplyParser | None = None
        self._target = memoryview(b"")
        self._socket: socket.socket | None = None

    @property
    def greeted(self) -> bool:
        """Whether a server has accepted the login."""
        return all(request.answered for request in self._hello)

    def ask(self, requests: Sequence[Request]) -> Steps[None]:
        """Sends requests and receives their replies. Sets `broken` if this fails."""
        self.heard = False
        self._unsent.extend(requests)
        return self._run()

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
        if self.broken is None and (self._unsent or self._waiting):
            self.broken = NoAnswer("no answer in time")
        elif self.broken is None and (self._pieces or not self._reader.empty):
            self.broken = RemoteProtocolError("the server replied before a request, or more often")
        self.reused = True
        if self.broken is not None:
            self.close()

    def _run(self) -> Steps[None]:
        try:
            events = 0
            if self._socket is None:
                self._socket = yield from connect(self.address, self._addresses, self._tls)
            else:
                events = yield self._socket, select.POLLIN | select.POLLOUT
            while self._unsent or self._waiting:
                self._fill_window()
                if events & ~select.POLLOUT:
                    for _ in range(_MOST_RECEIVES):
                        if not self._waiting or not self._receive(self._socket):
                            break
                        self._fill_window()
                if self._pieces:
                    self._send(self._socket)
                if self._waiting:
                    events = yield self._socket, select.POLLIN | (select.POLLOUT if self._pieces else 0)
        except (OSError, RemoteProtocolError, NetworkError) as error:
            self.broken = error.with_traceback(None)  # its frames hold the caller's memory

    def _fill_window(self) -> None:
        """Moves requests to the send queue while their replies fit in the window."""
        while self._unsent and (not self._waiting or self._weight + self._unsent[0].weight <= WINDOW_BYTES):
            request = self._unsent.popleft()
            self._weight += request.weight
            self._waiting.append(request)
            self._pieces.extend(memoryview(piece) for piece in request.pieces)

    def _send(self, connection: socket.socket) -> None:
        try:
            if self._tls is None:
                sent = connection.sendmsg(list(islice(self._pieces, _PIECES)))
            else:
                sent = connection.send(self._pieces[0][:_TLS_BYTES])
        except _BLOCKED:
            return
        while sent:
            first = self._pieces.popleft()
            if sent < len(first):
                self._pieces.appendleft(first[sent:])
            sent -= min(sent, len(first))

    def _receive(self, connection: socket.socket) -> bool:
        """Receives a part of a reply. Returns False if none has arrived."""
        if self._parsing is None:
            self._next_reply()
        try:
            nbytes = connection.recv_into(self._target)
        except _BLOCKED:
            return False
        if not nbytes:
            raise ConnectionError("the server closed the connection")
        self.heard = True
        self._received(nbytes)
        return True

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


def exchange(
    batches: Sequence[tuple[Connection, Sequence[Request]]], ends: float, stopped: Callable[[], bool]
) -> None:
    """Runs the requests of all connections concurrently until they are answered, or until `ends`."""
    jobs = [connection.ask(requests) for connection, requests in batches]
    try:
        for _ in run(jobs, ends, stopped, len(jobs)):
            pass
    finally:
        for connection, _ in batches:
            connection.end()
