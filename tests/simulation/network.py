"""Connections: bytes both ways in pieces cut anywhere, late, until either side or the network breaks them.

`Transport` is what the daemon's `Connection` holds, `Link` stands for a client's `AsyncConnection`. Requests
are followed by their ids: each is answered once, and in the time that it gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore.client.connection import in_order
from kvstore.client.extents import Maps
from kvstore.client.protocol import ProtocolState
from kvstore.types import SLOT_RECORD
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames
from tests.simulation.faults import Faults
from tests.simulation.loop import MICRO, Loop, Process

_UNBOUNDED = (m.Invalidate, m.Suspect, m.Publish, m.Forget, m.DeleteTenant)
"""Requests that wait for a device, however long that takes."""


class Network:
    """All connections there are. `serve` is called for each new one while a daemon listens."""

    def __init__(
        self, loop: Loop, dice: random.Random, faults: Faults, fail: Callable[[str, str], None]
    ) -> None:
        self.loop = loop
        self.dice = dice
        self.faults = faults
        self.fail = fail
        self.listener: tuple[Process, Callable[[], Any]] | None = None
        self.connections: dict[int, Link] = {}
        self._last = 0

    def link(self, token: str, maps: Maps) -> Link:
        """One more connection of the running client, for now unconnected."""
        self._last += 1
        return Link(self, self._last, token, maps)

    def delay(self) -> float:
        if self.faults.hits(self.dice, "slow_message"):
            return self.dice.uniform(0.001, 0.2)
        return self.dice.uniform(5, 100) * MICRO

    def reset_all(self) -> None:
        """The daemon is gone: what it had sent arrives, then its clients notice."""
        self.listener = None
        for link in list(self.connections.values()):
            link.daemon_gone()

    def check_due(self) -> None:
        """Every request was answered in the time that it gave."""
        for link in self.connections.values():
            for what, due in link.due.values():
                if due < self.loop.now - 1e-5:
                    self.fail("answered in time", f"{what} is {self.loop.now - due:.6f} s late")


class _Pipe:
    """One direction: in order, in pieces, each some time after the one before."""

    def __init__(self, net: Network, owner: Process, deliver: Callable[[bytes, int], None]) -> None:
        self.net = net
        self.owner = owner
        self.deliver = deliver
        self.last = 0.0
        self.cut = False

    def send(self, data: bytes, fd: int = -1) -> None:
        dice = self.net.dice
        cuts = sorted(
            dice.randrange(1, len(data)) for _ in range(dice.choice((0, 0, 0, 1, 2))) if len(data) > 1
        )
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if start < stop:
                self._later(data[start:stop], fd)
                fd = -1

    def end(self, call: Callable[[], None]) -> None:
        """Calls when all that was sent has arrived."""
        self.last = max(self.last, self.net.loop.now + self.net.delay())
        self.net.loop.at(self.last, self.owner, call)

    def _later(self, data: bytes, fd: int) -> None:
        self.last = max(self.last, self.net.loop.now + self.net.delay())
        self.net.loop.at(self.last, self.owner, self._arrive, (data, fd))

    def _arrive(self, data: bytes, fd: int) -> None:
        if not self.cut:
            self.deliver(data, fd)
        elif fd >= 0:
            os.close(fd)


class Transport:
    """The daemon's end of a connection: an asyncio.Transport as far as `Connection` uses it."""

    def __init__(self, link: Link, owner: Process, protocol: Any) -> None:
        self._link = link
        self._owner = owner
        self._protocol = protocol
        self._closing = False
        self._lost = False
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._answers = Frames(1 << 30)
        self._unread: list[tuple[bytes, int]] | None = None
        self.out = _Pipe(link.net, link.owner, link.arrived)
        protocol.connection_made(self)

    def received(self, data: bytes, fd: int = -1) -> None:
        if self._unread is not None:
            self._unread.append((data, fd))
        elif not self._closing:
            self._protocol.data_received(data)

    def pause_reading(self) -> None:
        assert self._unread is None
        self._unread = []

    def resume_reading(self) -> None:
        assert self._unread is not None
        unread, self._unread = self._unread, None
        for data, fd in unread:
            self._owner.call_soon(self.received, data, fd)

    def write(self, data: bytes) -> None:
        if self._lost:
            return
        self._pass_descriptors()
        self._send(data)

    def _send(self, data: bytes, fd: int = -1) -> None:
        for message in self._answers.feed(data):
            number = getattr(message, "id", None)
            if isinstance(message, m.Granted):
                self._may_look(message)
            if number is not None:
                self._link.answered(number, type(message).__name__)
        self.out.send(data, fd)

    def _may_look(self, granted: m.Granted) -> None:
        """Nobody is granted slots in memory that it may not map."""
        services, who = self._protocol.services, self._protocol.session.principal
        places = np.frombuffer(granted.slots, SLOT_RECORD)["place"]
        for extent in np.unique(places >> np.uint64(32)).tolist():
            if not services.catalog.may_map(who, extent, writable=False):
                self._link.net.fail("never mixing", f"{who.name} is granted slots in {extent}")

    def _pass_descriptors(self) -> None:
        """What was sent past the transport, with a descriptor, takes its place among the bytes."""
        while self._sockets is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self._sockets[1], 1 << 16, 1)
            except BlockingIOError:
                return
            self._send(data, fds[0] if fds else -1)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.out.end(self._link.peer_closed)
            self._owner.call_soon(self.lost, None)

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self.out.cut = True
            self._link.owner.call_later(self._link.net.delay(), self._link.peer_closed)
            self._owner.call_soon(self.lost, None)

    def lost(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self.drop()
            self._link.net.connections.pop(self._link.number, None)
            if error is None:
                self._protocol.eof_received()
            self._protocol.connection_lost(error)

    def drop(self) -> None:
        if self._sockets is not None:
            for sock in self._sockets:
                sock.close()
            self._sockets = None

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        if self._sockets is None:
            self._sockets = socket.socketpair()
            self._sockets[1].setblocking(False)
        else:
            # Whatever is about to be sent past the transport.
            self._owner.call_soon(self._pass_descriptors)
        return self._sockets[0]


class Link:
    """The client's end of a connection; see `kvstore.client.aio.AsyncConnection`."""

    def __init__(self, net: Network, number: int, token: str, maps: Maps) -> None:
        self.net = net
        self.number = number
        self.pid = os.getpid()
        self.protocol = ProtocolState(token, maps)
        self.owner: Process = asyncio.get_running_loop()  # type: ignore[assignment]
        self.due: dict[int, tuple[str, float]] = {}
        self._answered = 0
        self._spoiled = False
        self._descriptor = -1
        self._transport: Transport | None = None
        self._in: _Pipe | None = None
        self._received: list[tuple[bytes, int]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._gone: Exception | None = None

    @property
    def closed(self) -> bool:
        return isinstance(self._gone, ConnectionAbortedError)

    def ended(self) -> bool:
        return self._gone is not None

    async def connect(self, path: str, ends_s: float) -> Link:
        async with self._until(ends_s):
            await asyncio.sleep(self.net.delay())
            if self.net.listener is None:
                raise ConnectionRefusedError(111, "nobody listens")
            process, serve = self.net.listener
            self._transport = Transport(self, process, serve())
            self._in = _Pipe(self.net, process, self._transport.received)
            self.net.connections[self.number] = self
            self._send(self.protocol.hello())
            self.protocol.welcome((await self._receive())[0])
        return self

    async def call(self, message: Any, ends_s: float) -> Any:
        self._check()
        async with self._until(ends_s):
            self._send(self.protocol.send(message), message)
            answer, self._descriptor = await self._receive()
            return answer

    async def call_all(self, messages: Sequence[Any], ends_s: float) -> list[Any]:
        self._check()
        async with self._until(ends_s):
            for message in messages:
                self._send(self.protocol.send(message), message)
            return in_order(messages, [(await self._receive())[0] for _ in messages])

    def take_descriptor(self) -> int:
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    @contextlib.asynccontextmanager
    async def _until(self, ends_s: float) -> AsyncIterator[None]:
        """Ends the connection if its block fails or takes longer."""
        try:
            async with asyncio.timeout(max(ends_s - self.net.loop.now, 0.001)):
                yield
        except BaseException:
            self.close()
            raise

    def post(self, message: Any) -> None:
        if self._gone is None and self._transport is not None:
            self._send(self.protocol.post(message))

    @property
    def lags(self) -> bool:
        return False

    def report(self, namespace: int, asks: int, tiers: bytes) -> None:
        self.protocol.reports.add_lookup(namespace, asks, tiers)

    def report_read(self, namespace: int, keys: Sequence[bytes], key_bytes: int) -> None:
        self.protocol.reports.add_read(namespace, keys, key_bytes)

    def send_reports(self) -> None:
        if self._gone is None and self._transport is not None and (frames := self.protocol.reported()):
            self._send(frames)

    def send_raw(self, data: bytes) -> None:
        """Bytes that no client sends: what comes after them may never be understood."""
        self._spoiled = True
        if self._gone is None and self._transport is not None:
            self._send(data)

    def close(self) -> None:
        """Hangs up; what was sent arrives."""
        if self._gone is None:
            self._gone = ConnectionAbortedError("closed here")
            self._drop_received()
            if (descriptor := self.take_descriptor()) >= 0:
                os.close(descriptor)
            if self._transport is not None:
                self._transport.out.cut = True
                self._in.end(partial(self._transport.lost, None))

    # -- sending and receiving

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _send(self, data: bytes, message: Any = None) -> None:
        net, pipe = self.net, self._in
        if net.faults.hits(net.dice, "disconnect"):
            pipe.send(data[: net.dice.randrange(len(data) + 1)] or b"\0")
            self.break_()
            return
        if net.faults.hits(net.dice, "hang"):
            pipe.last = max(pipe.last, net.loop.now + net.dice.uniform(0.5, 8))
        pipe.send(data)
        if message is not None:
            pipe.net.loop.at(pipe.last, pipe.owner, self._asked, (pipe, message, message.id))

    def _asked(self, pipe: _Pipe, message: Any, number: int) -> None:
        """The last byte of a request has arrived, and been handled, a moment ago."""
        if self._spoiled or self._transport.is_closing() or number <= self._answered:
            return
        wait = float("inf") if isinstance(message, _UNBOUNDED) else getattr(message, "timeout_s", 0.0)
        self.due[number] = (type(message).__name__, self.net.loop.now + wait)

    def answered(self, number: int, what: str) -> None:
        """The daemon has answered: requests come one at a time, so in order."""
        if number <= self._answered:
            self.net.fail("answered once", f"request {number} by a second {what}")
        self._answered = number
        self.due.pop(number, None)

    def arrived(self, data: bytes, fd: int) -> None:
        if self._gone is not None:
            if fd >= 0:
                os.close(fd)
            return
        self._received.append((data, fd))
        self._wake()

    async def _receive(self) -> tuple[Any, int]:
        got = -1
        if (answer := self.protocol.received()) is not None:
            return answer, got
        while True:
            while not self._received:
                self._check()
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            data, fd = self._received.pop(0)
            got = fd if fd >= 0 else got
            answer = self.protocol.receive(data)
            if answer is not None:
                return answer, got

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- ends

    def break_(self) -> None:
        """The connection breaks: both sides notice, each in its time."""
        if self._transport is None:
            return
        transport, pipe = self._transport, self._in
        pipe.end(partial(transport.lost, ConnectionResetError("reset")))
        self.net.loop.at(self.net.loop.now + self.net.delay(), self.owner, self.peer_closed)

    def peer_closed(self) -> None:
        """The other side has hung up, or nothing is there any more."""
        if self._gone is None:
            self._gone = ConnectionResetError("the daemon closed the connection")
            self._wake()

    def daemon_gone(self) -> None:
        """The daemon's process has ended."""
        self.net.connections.pop(self.number, None)
        if self._transport is not None:
            self._in.cut = True
            self._transport.drop()
            self._transport.out.end(self.peer_closed)

    def _drop_received(self) -> None:
        for _, fd in self._received:
            if fd >= 0:
                os.close(fd)
        self._received.clear()
