"""Connections: bytes in, events to the shell, answers out. One object a peer, all on the event loop.

A peer that breaks the protocol is told why and disconnected. Whatever it held is free at once, and nobody
else notices.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import numpy as np

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.keys import Keys
from kvstore.daemon.shell import Shell
from kvstore.daemon.turns import Line, Turns
from kvstore.errors import MisuseError, RemoteProtocolError
from kvstore.types import MAX_KEY_BYTES, Layout
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames, pack

_log = logging.getLogger(__name__)

_HELLO_WITHIN_S = 5.0
_UNREAD_BYTES = 16 << 20
_CLOSE_TURNS = 1000
_FRAME_TO_CLIENT_BYTES = 1 << 30
_numbers = itertools.count(1)

try:
    VERSION = version("kvstore")
except PackageNotFoundError:
    VERSION = "unknown"


class Server:
    """All connections of one daemon."""

    def __init__(self, shell: Shell, stopwatch: Callable[[], float] = time.perf_counter) -> None:
        """`stopwatch`: see Turns."""
        self.shell = shell
        self.turns = Turns(shell.loop, stopwatch)
        self.connections: set[Connection] = set()

    def connect(self) -> Connection:
        """A protocol for one more peer."""
        return Connection(self)

    def status(self) -> dict[str, Any]:
        """The shell's status and the connections."""
        queues = {"queued_requests": self.turns.waiting, "refused_requests": self.turns.refused}
        return {"version": VERSION, "connections": len(self.connections), **queues, **self.shell.status()}

    async def close(self) -> None:
        """Disconnects everybody; returns when what they held is free."""
        for connection in list(self.connections):
            connection.abort()
        for _ in range(_CLOSE_TURNS):
            if not self.connections:
                return
            await asyncio.sleep(0.001)


class Connection(asyncio.Protocol):
    """One peer, from its Hello to its end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._shell = server.shell
        self._number = next(_numbers)
        self._frames = Frames(server.shell.config.limits.frame_bytes)
        self._greeted = False
        self._open: set[int] = set()
        self._transport: asyncio.Transport
        self._line: Line
        self._hello_timer: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Hello: self._hello,
            m.Ping: lambda q: self._send(m.Value(q.id, 0)),
            m.Open: self._open_namespace,
            m.Lookup: lambda q: self._ask(q, ev.Lookup(0, q.namespace, self._keys(q))),
            m.Acquire: self._acquire,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: lambda q: self._shell.handle(ev.Abort(self._number, q.lease)),
            m.Release: lambda q: self._shell.handle(ev.Release(self._number, q.lease)),
            m.Prefetch: lambda q: self._ask(q, ev.Prefetch(0, q.namespace, self._keys(q))),
            m.Pin: self._pin,
            m.Unpin: lambda q: self._ask(q, ev.Unpin(0, q.namespace, self._keys(q))),
            m.Invalidate: self._invalidate,
            m.Suspect: self._suspect,
            m.Map: self._map,
            m.Status: lambda q: self._send(m.Report(q.id, self._server.status())),
        }

    # -- the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._line = self._server.turns.line(self, self._transport)
        limit = self._shell.config.limits.connections
        if len(self._server.connections) >= limit:
            self._fail(f"{limit} clients are connected", "raise limits.connections, or connect less")
            return
        self._server.connections.add(self)
        self._hello_timer = self._shell.loop.call_later(_HELLO_WITHIN_S, self._too_quiet)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._line.feed(self._frames.feed(data))

    def eof_received(self) -> None:
        """See asyncio.Protocol."""
        if self._frames.unfinished:
            _log.info("connection %d: ended in the middle of a frame", self._number)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol. The core frees what the client held."""
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self in self._server.connections:
            self._server.connections.discard(self)
            self._line.leave()
            self._shell.forget(self)
            self._shell.handle(ev.ClientLost(self._number))

    def abort(self) -> None:
        """Ends the connection without waiting for the peer."""
        self._transport.abort()

    # -- messages

    def run(self, message: Any, waited_s: float) -> None:
        """See Peer. Time in which a request waited for its turn is part of its deadline."""
        if waited_s and hasattr(message, "timeout_s"):
            message.timeout_s = max(0.0, message.timeout_s - waited_s)
        self._handle(message)

    def busy(self, message: Any, retry_s: float) -> None:
        """See Peer."""
        self._send(m.Denied(message.id, "too many requests are waiting", f"try again in {retry_s:.3f} s"))

    def failed(self, error: Exception) -> None:
        """See Peer. A bug met by one peer's request ends that peer's connection, not the others'."""
        if isinstance(error, RemoteProtocolError):
            self._fail(error.message, error.hint)
        else:
            _log.error("connection %d: a request failed", self._number, exc_info=error)
            self._fail("internal error", "see the daemon's log")

    def _handle(self, message: Any) -> None:
        if not self._greeted and type(message) is not m.Hello:
            raise RemoteProtocolError(
                f"{type(message).__name__} before Hello", "is the peer a kvstore client?"
            )
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RemoteProtocolError(f"{type(message).__name__} is not for the daemon")
        handler(message)

    def _hello(self, hello: m.Hello) -> None:
        if hello.magic != m.MAGIC or self._greeted:
            raise RemoteProtocolError("not a kvstore client, or a second Hello")
        if hello.version != m.VERSION:
            raise RemoteProtocolError(
                f"the client speaks version {hello.version}, this daemon {m.VERSION}", "upgrade the older one"
            )
        self._greeted = True
        self._line.join(0)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        frame_bytes, limits = self._shell.config.limits.frame_bytes, self._shell.placement.limits
        self._send(
            m.Welcome(m.VERSION, self._shell.instance, frame_bytes, limits.batch_keys, limits.reserve_keys)
        )

    def _too_quiet(self) -> None:
        self._fail(f"no Hello within {_HELLO_WITHIN_S:g} s", "is the peer a kvstore client?")

    def _open_namespace(self, query: m.Open) -> None:
        try:
            layout = Layout(**query.layout)
        except (MisuseError, TypeError) as error:
            self._send(m.Denied(query.id, f"the layout makes no sense: {error}", ""))
            return
        number, fingerprint, answer = self._shell.open_namespace(layout)
        if isinstance(answer, ac.Deny):
            self._send(m.Denied(query.id, answer.why, answer.hint))
        else:
            self._open.add(number)
            self._send(m.Opened(query.id, number, fingerprint))

    def _keys(self, query: Any) -> Keys:
        return Keys(query.keys, query.key_bytes)

    def _ask(self, query: Any, event: Any, ask: Callable[..., None] | None = None) -> None:
        # A number of a namespace is good only on a connection that has opened it.
        if hasattr(event, "namespace") and event.namespace not in self._open:
            hint = "open the namespace on this connection first"
            self._send(m.Denied(query.id, f"unknown namespace {event.namespace}", hint))
            return
        (ask or self._shell.ask)(self, query.id, event)

    def _deadline(self, timeout_s: float) -> float:
        return self._shell.now() + min(max(timeout_s, 0.0), 86400.0)

    def _acquire(self, q: m.Acquire) -> None:
        until = self._deadline(q.timeout_s)
        self._ask(q, ev.Acquire(0, self._number, q.namespace, self._keys(q), until))

    def _reserve(self, q: m.Reserve) -> None:
        if len(q.parent) > MAX_KEY_BYTES:
            raise RemoteProtocolError(f"a parent key of {len(q.parent)} bytes")
        until = self._deadline(q.timeout_s)
        self._ask(q, ev.Reserve(0, self._number, q.namespace, self._keys(q), q.parent, until))

    def _commit(self, q: m.Commit) -> None:
        sums = np.frombuffer(q.checksums, "<u8")
        written = np.frombuffer(q.written, np.uint8) != 0
        self._ask(q, ev.Commit(0, self._number, q.lease, sums, written))

    def _pin(self, q: m.Pin) -> None:
        self._ask(q, ev.Pin(0, q.namespace, self._keys(q), self._deadline(q.ttl_s)))

    def _invalidate(self, q: m.Invalidate) -> None:
        self._ask(q, ev.Invalidate(0, q.namespace, self._keys(q)), self._shell.ask_durably)

    def _suspect(self, q: m.Suspect) -> None:
        event = ev.Suspect(0, q.namespace, self._keys(q))
        if q.id:
            self._ask(q, event)
        elif q.namespace in self._open:
            self._shell.handle(event)

    def _map(self, query: m.Map) -> None:
        try:
            fd = self._shell.dram.descriptor(query.extent, query.writable)
        except KeyError:
            self._send(m.Denied(query.id, f"there is no extent {query.extent}", ""))
            return
        try:
            if self._transport.get_write_buffer_size():
                hint = "read what was sent before asking for a descriptor"
                self._send(m.Denied(query.id, "answers are waiting to be read", hint))
            else:
                self._send_descriptor(m.Mapped(query.id, self._shell.dram.extent_bytes), fd)
        finally:
            os.close(fd)

    def _send_descriptor(self, message: m.Mapped, fd: int) -> None:
        """A short frame with a descriptor, past the transport, which can't carry one."""
        number = os.dup(self._transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=number) as sock:
            frame = pack(message)
            try:
                sent = socket.send_fds(sock, [frame], [fd])
            except OSError as error:
                _log.info("connection %d: no descriptor can be sent: %s", self._number, error)
                self._transport.abort()
                return
        if sent < len(frame):
            self._transport.write(frame[sent:])

    # -- answers

    def answer(self, request: int, action: ac.Grant | ac.Room | ac.Answer | ac.Deny) -> None:
        """See Asker."""
        if isinstance(action, ac.Grant):
            self._send(m.Granted(request, action.lease, action.slot_bytes, action.slots.tobytes()))
        elif isinstance(action, ac.Found):
            self._send(m.Found(request, action.value, action.gaps))
        elif isinstance(action, ac.Answer):
            self._send(m.Value(request, action.value))
        elif isinstance(action, ac.Room):
            slots, status = action.slots.tobytes(), action.status.tobytes()
            self._send(m.Reserved(request, action.lease, action.slot_bytes, slots, status, action.why))
        else:
            self._send(m.Denied(request, action.why, action.hint))

    def _send(self, message: Any) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(pack(message, _FRAME_TO_CLIENT_BYTES))
        if self._transport.get_write_buffer_size() > _UNREAD_BYTES:
            _log.warning("connection %d does not read its answers: disconnected", self._number)
            self._transport.abort()

    def _fail(self, why: str, hint: str) -> None:
        """Says what is wrong and hangs up."""
        _log.info("connection %d: %s", self._number, why)
        if not self._transport.is_closing():
            self._transport.write(pack(m.Failure(why, hint)))
            self._transport.close()
