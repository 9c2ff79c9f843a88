"""One connection: decodes a peer's bytes, and runs its messages through the scheduler.

A peer that breaks the protocol gets the reason and is disconnected. Its leases and reservations are freed at
once, and no other peer is affected. Everything runs on the event loop. What a message does is not covered
here: see `requests`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from kvstore.core import events as ev
from kvstore.daemon.requests.dispatch import run_request
from kvstore.daemon.requests.services import Services
from kvstore.daemon.requests.session import Session
from kvstore.daemon.server.connection_table import STRANGERS, ConnectionTable, TenantBytes
from kvstore.daemon.server.frame_reader import STRANGERS_BYTES, FrameReader
from kvstore.daemon.server.handshake import Handshake, VersionError
from kvstore.daemon.server.outbox import Outbox
from kvstore.daemon.server.peer_credentials import peer_of
from kvstore.daemon.server.request_scheduler import ConnectionQueue
from kvstore.daemon.server.request_timer import RequestTimer
from kvstore.daemon.tenancy.auth import Principal, RefusedError
from kvstore.errors import RemoteProtocolError
from kvstore.wire import messages as m

_log = logging.getLogger(__name__)

_HELLO_WITHIN_S = 5.0
_LONG_READ_BYTES = 16 << 10
_numbers = itertools.count(1)

try:
    VERSION = version("kvstore")
except PackageNotFoundError:
    VERSION = "unknown"


class Connection(asyncio.BufferedProtocol):
    """The protocol of one peer. `session` is None before the peer's Hello and after its end."""

    def __init__(self, table: ConnectionTable, services: Services, among_operators: bool = False) -> None:
        """`among_operators`: the peer connected to the operators' socket."""
        self.number = next(_numbers)
        self.services = services
        self.session: Session | None = None
        self._table = table
        self._among_operators = among_operators
        self._transport: asyncio.Transport
        self._handshake: Handshake
        self._queue: ConnectionQueue
        self._reader: FrameReader
        self._outbox: Outbox
        self._traces = services.tracing.of_connection()
        self._timer = RequestTimer(services.calls, services.stopwatch, self._traces)
        self._hello_timer: asyncio.TimerHandle | None = None

    # -- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        table, services = self._table, self.services
        peer = peer_of(self._transport.get_extra_info("socket").fileno())
        self._handshake = Handshake(peer, services.authenticator, self._among_operators)
        self._queue = ConnectionQueue(self, self._transport)
        unread, unfinished = TenantBytes(table.unread_bytes), TenantBytes(table.unfinished_bytes)
        self._outbox = Outbox(self.number, self._transport, unread, self._timer)
        self._reader = FrameReader(services.core.loop, unfinished, self._queue.is_held_up, self._end)
        self._hello_timer = services.core.loop.call_later(_HELLO_WITHIN_S, self._hello_late)
        table.add(self)
        crowded_out = table.crowded_out(peer.uid)
        if crowded_out is not None:
            crowded_out._end(f"{STRANGERS} peers have not said Hello", "say it as soon as you are connected")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the shared buffer. Strangers get a small part of it."""
        buffer = self._table.read_buffer
        return buffer if self.session is not None else buffer[:STRANGERS_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._table.read_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Runs or queues the messages that end in these bytes."""
        scheduler = self._table.scheduler
        scheduler.feed(self._queue, self._reader.frames.feed(data))
        self._reader.count()
        if len(data) > _LONG_READ_BYTES:
            scheduler.throttle(self._queue, len(data))

    def eof_received(self) -> None:
        if self._reader.frames.unfinished:
            _log.info("connection %d: ended in the middle of a frame", self.number)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the session. The core frees the client's leases and reservations."""
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        if self not in self._table.connections:
            return
        self._table.remove(self)
        self._reader.close()
        self._outbox.unread.set(0)
        self._table.scheduler.leave(self._queue)
        session, self.session = self.session, None
        if session is not None:
            session.end()
        self.services.recorder.leave(self.number)
        self.services.core.handle(ev.ClientLost(self.number))

    def pause_writing(self) -> None:
        self._outbox.pause()

    def resume_writing(self) -> None:
        self._outbox.resume()

    # -- state that the table and the server use

    @property
    def uid(self) -> int:
        """The user of the peer's process."""
        return self._handshake.peer.uid

    @property
    def version(self) -> int:
        """The wire version of this connection."""
        return self._handshake.version

    def check(self) -> None:
        """Identifies the peer again. Disconnects it if it has another tenant now, or none."""
        if self.session is None:
            return
        try:
            who = self._handshake.identify(self.services.clock())
            if who.tenant != self.session.principal.tenant:
                raise RefusedError("this peer is another tenant now", "connect again")
            self._identified(self.session, who)
        except RefusedError as error:
            self._outbox.fail(error.message, error.hint)
            if self._outbox.waiting_bytes:
                self._transport.abort()

    def abort(self) -> None:
        """Ends the connection without waiting for the peer."""
        self._transport.abort()

    # -- messages

    def run(self, message: Any, waited_s: float) -> None:
        """See `request_scheduler.Peer`. Subtracts the time in the queue from the timeout of a request."""
        if waited_s and hasattr(message, "timeout_s"):
            message.timeout_s = max(0.0, message.timeout_s - waited_s)
        self._timer.run(message, waited_s)
        session = self.session
        if session is None or type(message) is m.Hello:
            self._hello(message)
        else:
            expires = session.principal.expires
            if expires < math.inf and self.services.clock() >= expires:
                self.check()
            if not self._transport.is_closing():
                run_request(session, message)
        self._timer.running = 0
        if self._traces is not None:
            self._traces.ran(message)

    def enqueue(self, message: Any) -> None:
        """Schedules a message as if the peer had sent it."""
        self._table.scheduler.feed(self._queue, iter((message,)))

    def busy(self, message: Any, retry_s: float) -> None:
        self._outbox.send(m.Busy(message.id, retry_s, "too many requests of this tenant are waiting"))

    def failed(self, error: Exception) -> None:
        """See `request_scheduler.Peer`. A bug in one peer's request ends only that peer's connection."""
        if isinstance(error, RemoteProtocolError):
            self._outbox.fail(error.message, error.hint)
        else:
            _log.error("connection %d: a request failed", self.number, exc_info=error)
            self._outbox.fail("internal error", "see the daemon's log")

    def _end(self, why: str, hint: str) -> None:
        """Sends the reason and aborts the connection."""
        self._outbox.fail(why, hint)
        self._transport.abort()

    def _hello(self, hello: Any) -> None:
        if type(hello) is not m.Hello:
            raise RemoteProtocolError(f"{type(hello).__name__} before Hello", "is the peer a kvstore client?")
        if self.session is not None:
            raise RemoteProtocolError("not a kvstore client, or a second Hello")
        services, table = self.services, self._table
        try:
            who = self._handshake.greet(hello, services.clock())
            full = table.why_full(who, services.config())
            if full:
                raise RefusedError(full, "raise limits.connections, or connect less")
        except RefusedError as error:
            if isinstance(error, VersionError):
                table.log_version(self.uid, hello)
            self._outbox.fail(error.message, error.hint)
            return
        self._greet(who)

    def _greet(self, who: Principal) -> None:
        services, table = self.services, self._table
        self.session = Session(self._outbox, self._handshake.peer, who, services, self.enqueue, self._traces)
        table.strangers.pop(self, None)
        table.scheduler.join(self._queue, who.tenant)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        frame_bytes, limits = services.config().limits.frame_bytes, services.core.view.limits
        self._reader.greet(who.tenant, frame_bytes)
        self._identified(self.session, who)
        self._outbox.unread.tenant = who.tenant
        self._outbox.version = self._handshake.version
        most = limits.batch_keys, limits.reserve_keys
        self._outbox.send(m.Welcome(self.version, services.instance, frame_bytes, *most, (), VERSION))

    def _identified(self, session: Session, who: Principal) -> None:
        session.principal = who
        if self._traces is not None:
            self._traces.tenant = who.name
        self._reader.allow(m.MOST_OF_OPERATORS if who.operator else m.MOST_VALUES)

    def _hello_late(self) -> None:
        self._outbox.fail(f"no Hello within {_HELLO_WITHIN_S:g} s", "is the peer a kvstore client?")
