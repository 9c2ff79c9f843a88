"""Connections to Valkey and Redis: many requests on the way at once, over several of them at a time.

Everything runs on the caller's thread, and nothing waits but `exchange`: so when that has returned, no memory
of the caller's is read or written any more.
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
from kvstore.tiers.network.resolver import Address, NoAnswer, Place
from kvstore.tiers.network.valkey.resp import Filling, Reader, Reply

WINDOW_BYTES = 16 << 20
"""At most so many bytes of answers are on the way over one connection: a server holds them in memory."""

SMALL_BYTES = 64
"""What an answer counts for that has no payload."""

_LOOK_S = 0.1  # how often it is looked whether the backend was closed
_PIECES = 64
_TLS_BYTES = 64 << 10  # a send that would block must be repeated with the same bytes
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(slots=True)
class Request:
    """A command, as the `pieces` that it is sent in, and its answer.

    `judge` makes an outcome of an answer as soon as that is there, while others are still on the way; it may
    raise NetworkError, and the connection is given up. `into`, `weight`: see `Reader.reply`, `WINDOW_BYTES`.
    `asked_at` is the node that a cluster sent it to, for this once.
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
        """The reply has come as a whole."""
        self.reply, self.answered = reply, True
        if self.judge is not None:
            self.outcome = self.judge(reply)


class Connection:
    """One connection, which is made as part of its first exchange. Not for two threads at once.

    `broken` is why it is of no more use; `reused`: it was good in an earlier exchange;
    `heard`: something came over it in this one.
    """

    def __init__(
        self, address: Address, places: Sequence[Place], tls: ssl.SSLContext | None, hello: Sequence[Request]
    ) -> None:
        """`hello` goes before everything else, one at a time."""
        self.address = address
        self.broken: Exception | None = None
        self.reused = self.heard = False
        self._hello = tuple(hello)
        self.wants = select.POLLOUT
        self._places = deque(places)
        self._tls = tls
        self._unsent = deque(hello)
        self._pieces: deque[memoryview] = deque()
        self._waiting: deque[Request] = deque()
        self._weight = 0
        self._reader = Reader()
        self._filling: Filling | None = None
        self._room = memoryview(b"")
        self._stage: Callable[[int], None] = self._connect
        self._socket: socket.socket | None = None

    def ask(self, requests: Sequence[Request]) -> None:
        """Has these sent in the next exchange."""
        self.heard = False
        self._unsent.extend(requests)
        if self._socket is None:
            self._guarded(self._dial)
        elif self.reused:
            self.wants = select.POLLIN | select.POLLOUT

    @property
    def greeted(self) -> bool:
        """Whether there is a server that lets us in."""
        return all(request.answered for request in self._hello)

    @property
    def busy(self) -> bool:
        """Whether something is unsent or unanswered."""
        return self.broken is None and bool(self._unsent or self._waiting)

    @property
    def pending(self) -> bool:
        """Whether bytes have come that a poll does not see."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def fileno(self) -> int:
        """Of the socket, which may be another one after each step."""
        assert self._socket is not None
        return self._socket.fileno()

    def step(self, events: int) -> None:
        """Does what can be done without waiting, after a poll that told these events."""
        self._guarded(lambda: self._stage(events))

    def close(self) -> None:
        """Lets go of the socket, and of the caller's memory."""
        self.broken = self.broken or ConnectionError("closed")
        self._filling, self._room = None, memoryview(b"")
        for queue in (self._unsent, self._pieces, self._waiting):
            queue.clear()
        if self._socket is not None:
            self._socket.close()

    def end(self) -> None:
        """An exchange is over: what is unanswered stays so."""
        if self.busy:
            self.broken = NoAnswer("no answer in time")
        elif self.broken is None and not self._reader.empty:
            self.broken = RemoteProtocolError("more came than was asked for")
        self.reused = True
        if self.broken is not None:
            self.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, RemoteProtocolError, NetworkError) as error:
            self.broken = error.with_traceback(None)  # its frames hold the caller's memory

    def _dial(self) -> None:
        """Begins to connect to the next place, or to one behind it."""
        error = errno.EADDRNOTAVAIL
        while self._places:
            family, place = self._places.popleft()
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            if family != socket.AF_UNIX:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            error = self._socket.connect_ex(place)
            if error in (0, errno.EINPROGRESS):
                return
            self._socket.close()
        raise OSError(error, os.strerror(error))

    def _connect(self, events: int) -> None:
        assert self._socket is not None
        if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._socket.close()
            if not self._places:
                raise OSError(error, os.strerror(error))
            self._dial()
        elif self._tls is None:
            self._established()
        else:
            host = self.address.host
            self._socket = self._tls.wrap_socket(
                self._socket, server_hostname=host, do_handshake_on_connect=False
            )
            self._stage = self._shake_hands
            self._stage(events)

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
        self._stage = self._talk
        self._talk(0)

    def _talk(self, events: int) -> None:
        self._take_up()
        if events & ~select.POLLOUT or self.pending:
            self._receive()
            self._take_up()
        if self._pieces:
            self._send()
        self.wants = select.POLLIN | (select.POLLOUT if self._pieces else 0)

    def _take_up(self) -> None:
        """Has what may be on the way now sent next."""
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
        if self._filling is None:
            if not self._waiting:
                raise RemoteProtocolError("more came than was asked for")
            self._next_reply()
        try:
            came = self._socket.recv_into(self._room)
        except _BLOCKED:
            return
        if not came:
            raise ConnectionError("the server closed the connection")
        self.heard = True
        self._took(came)

    def _took(self, came: int) -> None:
        """So many bytes are in the room; answers what they complete."""
        assert self._filling is not None
        try:
            self._room = self._filling.send(came)
        except StopIteration as done:
            self._answer(done.value)
            while self._waiting and not self._reader.empty and self._next_reply():
                pass

    def _next_reply(self) -> bool:
        """Begins with the next reply; whether it was complete already."""
        self._filling = self._reader.reply(self._waiting[0].into)
        try:
            self._room = next(self._filling)
        except StopIteration as done:
            self._answer(done.value)
            return True
        return False

    def _answer(self, reply: Reply) -> None:
        self._filling, self._room = None, memoryview(b"")
        request = self._waiting.popleft()
        self._weight -= request.weight
        request.answer(reply)


def exchange(links: Sequence[Connection], ends: float, stopped: Callable[[], bool]) -> None:
    """Has everything answered that was asked over these links, side by side, or until `ends`."""
    try:
        while busy := [link for link in links if link.busy]:
            left_s = ends - time.monotonic()
            if left_s <= 0 or stopped():
                break
            _move(busy, min(left_s, _LOOK_S))
    finally:
        for link in links:
            link.end()


def _move(links: Sequence[Connection], wait_s: float) -> None:
    """One step of every link that can make one, after waiting for the first that can."""
    poll, by_number = select.poll(), {}
    for link in links:
        number = link.fileno()
        by_number[number] = link
        poll.register(number, link.wants)
    if any(link.pending for link in links):
        wait_s = 0
    ready = dict(poll.poll(wait_s * 1000))
    for number, link in by_number.items():
        if number in ready or link.pending:
            link.step(ready.get(number, 0))
