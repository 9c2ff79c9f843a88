"""Connections: bytes in, messages to their `requests`, answers out. One object a peer, all on the event loop.

A peer that breaks the protocol is told why and disconnected. Whatever it held is free at once, and nobody
else notices.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import socket
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from kvstore.config import Config
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.requests.leases import number_on_connection
from kvstore.daemon.operator.explain import named
from kvstore.daemon.server.peer_credentials import Peer, peer_of
from kvstore.daemon.server.request_scheduler import RequestScheduler, TenantQueue
from kvstore.daemon.server.requests import Requests
from kvstore.daemon.server.services import Services
from kvstore.daemon.tenancy.auth import Principal, RefusedError
from kvstore.errors import RemoteProtocolError, TierError
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames, pack

_log = logging.getLogger(__name__)

_HELLO_WITHIN_S = 5.0
_HELLO_BYTES = 4096
_STRANGERS = 256
"""The most connections without a Hello: more than are accepted before any of them is read."""
_FOR_OPERATORS = 16
_SHARE_OF_FREE = 2
_FRAME_WITHIN_S = 10.0
_UNFINISHED_BYTES = 32 << 20
"""The most that a tenant's frames that have not ended take."""
_UNREAD_BYTES = 16 << 20
"""The most that the answers to one connection take until it reads them; those to a tenant: twice that."""
_CLOSE_TURNS = 1000
_FRAME_TO_CLIENT_BYTES = 1 << 30
_READ_BYTES = 64 << 10
_LONG_READ_BYTES = 16 << 10
_numbers = itertools.count(1)

try:
    VERSION = version("kvstore")
except PackageNotFoundError:
    VERSION = "unknown"


class Server:
    """All connections of one daemon."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.clock = services.clock
        self.stopwatch = services.stopwatch
        self.calls = services.calls
        self.lag = services.lag
        self.turns = RequestScheduler(
            services.loop, services.stopwatch, services.config().limits.queued_requests
        )
        self.connections: set[Connection] = set()
        self.strangers: dict[Connection, None] = {}
        self.unfinished_bytes: Counter[int] = Counter()
        self.unread_bytes: Counter[int] = Counter()
        self.received = memoryview(bytearray(_READ_BYTES))
        self._told: set[tuple[int, int, int]] = set()
        self._set_turns()

    def connect(self, among_operators: bool = False) -> Connection:
        """A protocol for one more peer; `among_operators`: one that comes by their socket."""
        return Connection(self, among_operators)

    def room_for(self, who: Principal) -> str:
        """Why one more connection of a peer can't be, "" if it can.

        The last few are for operators. Where there are tenants, each may have twice as many as are left: so
        there is always room for one more tenant.
        """
        limits, connected = self.services.config().limits, self.turns.connected
        greeted = len(self.connections) - len(self.strangers)
        left = limits.connections - greeted
        if who.operator:
            return "" if left > 0 else f"{greeted} clients are connected"
        left -= min(_FOR_OPERATORS, limits.connections // 8)
        if left <= 0:
            return f"{greeted} clients are connected"
        mine = connected[who.tenant]
        if self.services.config().tenants and mine >= _SHARE_OF_FREE * left:
            return f"{mine} clients of tenant {who.name} are connected"
        return ""

    def crowded_out(self, uid: int) -> Connection | None:
        """Who has to go when somebody of this user has come: the one of theirs that has waited longest.

        If they have no other, it is one of the user who has most. None while there is room.
        """
        if len(self.strangers) <= _STRANGERS:
            return None
        count = Counter(stranger.uid for stranger in self.strangers)
        whose = uid if count[uid] > 1 else count.most_common(1)[0][0]
        return next(stranger for stranger in self.strangers if stranger.uid == whose)

    def reconfigure(self, config: Config) -> None:
        """Applies a configuration. A peer that is another principal by now is disconnected."""
        self._set_turns()
        for connection in list(self.connections):
            connection.check()

    def _set_turns(self) -> None:
        config, registry = self.services.config(), self.services.authenticator
        self.turns.queued_requests = config.limits.queued_requests
        for name in registry.names():
            tenant = config.tenants.get(name)
            weight, requests = (tenant.share, tenant.requests) if tenant is not None else (1.0, None)
            self.turns.set(registry.add(name), weight, float(requests or 0))

    def status(self, who: Principal) -> dict[str, Any]:
        """What one may see of the shell's status and of the connections: operators all, others their own."""
        mine = [c for c in self.connections if who.operator or (c.greeted and c.who.tenant == who.tenant)]
        more = self.queues() if who.operator else {}
        return {"version": VERSION, "connections": len(mine), **more, **self.services.status(who)}

    def summary(self) -> dict[str, Any]:
        """Returns the server's part of the daemon's status."""
        return {"version": VERSION, "connections": len(self.connections), **self.queues()}

    def told_of(self, uid: int, hello: m.Hello) -> None:
        """Logs that a client is too old or too new: once for each user's, as they try again."""
        whose = uid, hello.version, hello.newest
        if whose not in self._told and len(self._told) < _STRANGERS:
            self._told.add(whose)
            theirs, ours = m.span(*whose[1:]), m.span(m.OLDEST, m.VERSION)
            _log.warning("clients of user %d speak %s, this daemon %s: they get nothing", uid, theirs, ours)

    def queues(self) -> dict[str, Any]:
        """Requests that wait, and that were told to come again; connections by the version they speak."""
        spoken = Counter(str(c.version) for c in self.connections if c.greeted)
        return {
            "queued_requests": self.turns.waiting,
            "refused_requests": self.turns.refused,
            "wire_versions": dict(sorted(spoken.items())),
        }

    async def close(self) -> None:
        """Disconnects everybody; returns when what they held is free."""
        for connection in list(self.connections):
            connection.abort()
        for _ in range(_CLOSE_TURNS):
            if not self.connections:
                return
            await asyncio.sleep(0.001)


class Connection(asyncio.BufferedProtocol):
    """One peer, from its Hello to its end."""

    def __init__(self, server: Server, among_operators: bool = False) -> None:
        self._server = server
        self._among_operators = among_operators
        self._services = server.services
        self.number = next(_numbers)
        self.who: Principal
        self._frames = Frames(_HELLO_BYTES, self._decode)
        self._transport: asyncio.Transport
        self._peer: Peer
        self._token = ""
        self._version = m.VERSION
        self._requests: Requests | None = None
        self._line: TenantQueue
        self._hello_timer: asyncio.TimerHandle | None = None
        self._frame_timer: asyncio.TimerHandle | None = None
        self._unfinished_bytes = 0
        self._unread_bytes = 0
        self._reads_slowly = False
        self._began_s: dict[int, tuple[type, float]] = {}
        self._runs = 0

    # -- the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BaseProtocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._peer = peer_of(self._transport.get_extra_info("socket").fileno())
        self._line = self._server.turns.line(self, self._transport)
        self._server.connections.add(self)
        self._server.strangers[self] = None
        self._hello_timer = self._services.loop.call_later(_HELLO_WITHIN_S, self._too_quiet)
        gone = self._server.crowded_out(self.uid)
        if gone is not None:
            gone._fail(f"{_STRANGERS} peers have not said Hello", "say it as soon as you are connected")
            gone.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol. Strangers are read little at a time."""
        return self._server.received if self.greeted else self._server.received[:_HELLO_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        self.data_received(bytes(self._server.received[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Takes in what has come from the peer."""
        self._line.feed(self._frames.feed(data))
        self._count_unfinished(self._frames.waiting_bytes)
        if len(data) > _LONG_READ_BYTES:
            self._line.rest(len(data))

    def _count_unfinished(self, nbytes: int) -> None:
        """A frame that does not end has a bound, and so have all of a tenant; strangers' are short."""
        if nbytes and self._frame_timer is None:
            call, frames = self._services.loop.call_later, self._frames
            self._frame_timer = call(_FRAME_WITHIN_S, self._slow_frame, frames.ended)
        if nbytes == self._unfinished_bytes or self._line.tenant is None:
            return
        of_tenant = self._server.unfinished_bytes
        of_tenant[self._line.tenant] += nbytes - self._unfinished_bytes
        grown, self._unfinished_bytes = nbytes > self._unfinished_bytes, nbytes
        if grown and of_tenant[self._line.tenant] > _UNFINISHED_BYTES:
            why = f"frames of this tenant that have not ended take {of_tenant[self._line.tenant]} bytes"
            self._fail(why, f"at most {_UNFINISHED_BYTES}")
            self.abort()

    def _slow_frame(self, ended: int) -> None:
        self._frame_timer = None
        if not self._frames.unfinished:
            return
        if ended == self._frames.ended and not self._line.held_up:
            self._fail(f"a frame has not ended within {_FRAME_WITHIN_S:g} s", "send it in one go")
            self.abort()
        else:
            self._count_unfinished(self._frames.waiting_bytes)

    def eof_received(self) -> None:
        """See asyncio.BufferedProtocol."""
        if self._frames.unfinished:
            _log.info("connection %d: ended in the middle of a frame", self.number)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol. The core frees what the client held."""
        for timer in (self._hello_timer, self._frame_timer):
            if timer is not None:
                timer.cancel()
        if self in self._server.connections:
            self._count_unfinished(0)
            self._count_unread(0)
            self._server.connections.discard(self)
            self._server.strangers.pop(self, None)
            self._line.leave()
            # Without these circles all that it held is free now, not when the collector runs.
            self._frames = Frames(_HELLO_BYTES, m.decode_request)
            if self._requests is not None:
                self._requests.leave()
                self._requests = None
            self._hello_timer = self._frame_timer = None
            self._services.core.leave(self)
            if self._services.network is not None:
                self._services.network.tasks.cancel(self)
            self._services.recorder.leave(self.number)
            self._services.core.handle(ev.ClientLost(self.number))

    @property
    def uid(self) -> int:
        """Whose process the peer is."""
        return self._peer.uid

    @property
    def version(self) -> int:
        """The version of the wire that both speak."""
        return self._version

    @property
    def greeted(self) -> bool:
        """Whether the peer has said who it is."""
        return self._requests is not None

    def abort(self) -> None:
        """Ends the connection without waiting for the peer."""
        self._transport.abort()

    def check(self) -> None:
        """Hangs up, unless the peer still is who it was when it said Hello; its role may have changed."""
        if self._requests is None:
            return
        try:
            who = self._identify()
            if who.tenant != self.who.tenant:
                raise RefusedError("this peer is another tenant now", "connect again")
            self.who = who
        except RefusedError as error:
            self._fail(error.message, error.hint)
            if self._transport.get_write_buffer_size():
                self._transport.abort()

    # -- messages

    def _decode(self, body: memoryview) -> Any:
        most = m.MOST_OF_OPERATORS if self.greeted and self.who.operator else m.MOST_VALUES
        return m.decode_request(body, most)

    def run(self, message: Any, waited_s: float) -> None:
        """See Peer. Time in which a request waited for its turn is part of its deadline."""
        if waited_s and hasattr(message, "timeout_s"):
            message.timeout_s = max(0.0, message.timeout_s - waited_s)
        request = getattr(message, "id", 0)
        if request:
            self._began_s[request] = type(message), self._server.stopwatch() - waited_s
            self._runs = request
        self._handle(message)
        self._runs = 0

    def queue(self, message: Any) -> None:
        """See Wire."""
        self._line.feed(iter((message,)))

    def busy(self, message: Any, retry_s: float) -> None:
        """See Peer."""
        self.send(m.Busy(message.id, retry_s, "too many requests of this tenant are waiting"))

    def failed(self, error: Exception) -> None:
        """See Peer. A bug met by one peer's request ends that peer's connection, not the others'."""
        if isinstance(error, RemoteProtocolError):
            self._fail(error.message, error.hint)
        else:
            _log.error("connection %d: a request failed", self.number, exc_info=error)
            self._fail("internal error", "see the daemon's log")

    def _handle(self, message: Any) -> None:
        """Runs one message: every one passes here."""
        if type(message) is m.Hello:
            self._hello(message)
        elif self._requests is None:
            raise RemoteProtocolError(
                f"{type(message).__name__} before Hello", "is the peer a kvstore client?"
            )
        else:
            if self.who.expires < math.inf and self._server.clock() >= self.who.expires:
                self.check()
            if not self._transport.is_closing():
                self._requests.run(message)

    def _hello(self, hello: m.Hello) -> None:
        if hello.magic != m.MAGIC or self._requests is not None:
            raise RemoteProtocolError("not a kvstore client, or a second Hello")
        self._version = min(hello.newest, m.VERSION)
        if self._version < max(hello.version, m.OLDEST):
            self._server.told_of(self.uid, hello)
            theirs, ours = m.span(hello.version, hello.newest), m.span(m.OLDEST, m.VERSION)
            older = "client" if hello.newest < m.OLDEST else "daemon"
            self._fail(f"the client speaks {theirs}, this daemon {ours}", f"upgrade the {older}")
            return
        self._token = hello.token
        try:
            self.who = self._identify()
        except RefusedError as error:
            self._fail(error.message, error.hint)
            return
        full = self._server.room_for(self.who)
        if full:
            self._fail(full, "raise limits.connections, or connect less")
            return
        self._requests = Requests(self, self._services)
        self._server.strangers.pop(self, None)
        self._line.join(self.who.tenant)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        frame_bytes, limits = self._services.config().limits.frame_bytes, self._services.view.limits
        self._frames.limit_bytes = frame_bytes
        most = limits.batch_keys, limits.reserve_keys
        self.send(m.Welcome(self._version, self._services.instance, frame_bytes, *most, (), VERSION))

    def _identify(self) -> Principal:
        peer, now = self._peer, self._server.clock()
        known = self._services.authenticator
        return known.identify(peer.uid, peer.gids, self._token, now, self._among_operators)

    def _too_quiet(self) -> None:
        self._fail(f"no Hello within {_HELLO_WITHIN_S:g} s", "is the peer a kvstore client?")

    def send_descriptor(self, request: int, extent: int, writable: bool) -> None:
        """See Wire."""
        fd = self._services.tiers.dram.descriptor(extent, writable)
        try:
            if self._transport.get_write_buffer_size():
                hint = "read what was sent before asking for a descriptor"
                self.send(m.Denied(request, "answers are waiting to be read", hint))
            else:
                self._send_descriptor(m.Mapped(request, self._services.tiers.dram.extent_bytes), fd)
        finally:
            os.close(fd)

    def send_handle(self, request: int, extent: int) -> None:
        """See Wire."""
        tier = self._services.tiers.memory_of(extent)
        if tier is None:
            raise KeyError(extent)
        pool = self._services.tiers.pool_at(tier)
        try:
            handle = pool.handle(extent, self._peer.pidfd())
        except (TierError, OSError) as error:
            self.send(m.Denied(request, f"this memory can't be shared: {error}", "ask for blocks in DRAM"))
        else:
            self.send(m.MappedHbm(request, pool.extent_bytes, pool.gpu.uuid, handle))

    def _send_descriptor(self, message: m.Mapped, fd: int) -> None:
        """A short frame with a descriptor, past the transport, which can't carry one."""
        self._ended(message)
        number = os.dup(self._transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=number) as sock:
            frame = pack(message, version=self._version)
            try:
                sent = socket.send_fds(sock, [frame], [fd])
            except OSError as error:
                _log.info("connection %d: no descriptor can be sent: %s", self.number, error)
                self._transport.abort()
                return
        if sent < len(frame):
            self._transport.write(frame[sent:])

    # -- answers

    def answer(
        self, request: int, action: ac.Grant | ac.Reserved | ac.Answer | ac.Explained | ac.Deny
    ) -> None:
        """See Asker."""
        # While requests are recorded, clients ask all keys of a long prompt, not every so many.
        gaps = isinstance(action, ac.Found) and (action.gaps or self._services.recorder.running)
        if self._requests is not None:
            self._requests.prompts.answered(request, action, gaps)
        if isinstance(action, ac.Grant):
            self._services.recorder.answered(self.number, len(action.slots))
            slots, stored = action.slots.tobytes(), action.stored.blocks
            self.send(
                m.Granted(request, number_on_connection(action.lease), action.slot_bytes, slots, stored)
            )
        elif isinstance(action, ac.Found):
            self._services.recorder.answered(self.number, action.value)
            self.send(m.Found(request, action.value, gaps, action.stored.blocks))
        elif isinstance(action, ac.Answer):
            self.send(m.Value(request, action.value))
        elif isinstance(action, ac.Reserved):
            slots, status = action.slots.tobytes(), action.status.tobytes()
            lease = number_on_connection(action.lease)
            self.send(m.Reserved(request, lease, action.slot_bytes, slots, status, action.why))
        elif isinstance(action, ac.Explained):
            self.send(
                m.Explained(request, named(action, self._services.authenticator, self._services.namespaces))
            )
        elif action.retry_s > 0:
            self.send(m.Busy(request, action.retry_s, action.why))
        else:
            self.send(m.Denied(request, action.why, action.hint))

    def status(self) -> dict[str, Any]:
        """See Wire."""
        return self._server.status(self.who)

    def control(self, request: int, call: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """See Wire."""
        return self._services.commands.run(self, request, call, arguments)

    def send(self, message: Any) -> None:
        """See Wire. Hangs up on who does not read."""
        if self._transport.is_closing():
            return
        self._ended(message)
        self._transport.write(pack(message, _FRAME_TO_CLIENT_BYTES, self._version))
        if self._reads_slowly:
            self._count_unread(self._transport.get_write_buffer_size())

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._reads_slowly = True

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._reads_slowly = False
        self._count_unread(0)

    def _count_unread(self, nbytes: int) -> None:
        """Answers that are not read have a bound, and so have all of a tenant's."""
        if self._line.tenant is None:
            return
        of_tenant, tenant = self._server.unread_bytes, self._line.tenant
        of_tenant[tenant] += nbytes - self._unread_bytes
        self._unread_bytes = nbytes
        if nbytes > _UNREAD_BYTES or of_tenant[tenant] > 2 * _UNREAD_BYTES:
            _log.warning("connection %d does not read its answers: disconnected", self.number)
            self._transport.abort()

    def _ended(self, answer: Any) -> None:
        """A request has its answer: how long it took."""
        request = getattr(answer, "id", 0)
        began = self._began_s.pop(request, None)
        if began is not None:
            took_s = self._server.stopwatch() - began[1]
            self._server.calls.add(began[0], request != self._runs, took_s)

    def _fail(self, why: str, hint: str) -> None:
        """Says what is wrong and hangs up."""
        _log.info("connection %d: %s", self.number, why)
        if not self._transport.is_closing():
            self._transport.write(pack(m.Failure(why, hint)))
            self._transport.close()
