"""Fair turns of requests among tenants, on the event loop.

While nobody waits, what arrives runs at once. When more arrives than runs, it waits, undecoded and then
decoded, and turns of `SLICE_S` run what goes next by `FairQueue`; between turns the loop reads sockets. A
connection that sends faster than its requests run is not read for a while, nor are those of a tenant whose
requests take `QUEUED_BYTES` as they wait. Connections that send much are read in turns too, and of one tenant
at most `READ_BYTES_PER_S`. A tenant that has too much queued all the same, or is held back by
its cap, is told so. The messages of one connection run in their order.

Not covered: what a request leads to after it has run, such as copies between tiers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kvstore.core.transfers.fair_queue import FairQueue
from kvstore.wire import messages as m

SLICE_S = 200e-6
"""How long requests run before sockets are read again."""

QUEUED_BYTES = 16 << 20
"""What a tenant's requests may take while they wait, and one request more."""

READ_BYTES_PER_S = 64 << 20
"""What is read of a tenant's long requests beyond `_READ_BURST_BYTES`, while others are connected."""

_READ_BURST_BYTES = 8 << 20
_READ_UNIT_BYTES = 4096
_READ_QUANTUM = 64

_UNIT_S = 16e-6  # what a cost of 1 takes, about: a request of up to _UNIT_KEYS keys
_UNIT_KEYS = 256
_LONG_COST = 64
_OPEN_COST = 4
_QUANTUM = 4
_SAVED = 64
_READ_AT_ONCE = 16
_AHEAD = 64  # messages of a connection decoded ahead
_BURST_S = 0.1
_SOONEST_RETRY_S = 0.001
_UNLIMITED = 1 << 62
_MESSAGE_BYTES = 500
_LONG_FIELDS = "keys", "tokens", "checksums", "written"
_STRANGERS = -1
_OPERATORS = -2

_Request = tuple["TenantQueue", Any, float]


class Peer(Protocol):
    """A connection, as far as turns are concerned."""

    def run(self, message: Any, waited_s: float) -> None:
        """Runs a message that has waited so long. May raise."""

    def busy(self, message: Any, retry_s: float) -> None:
        """Answers a request that it was not run, and when to try again."""

    def failed(self, error: Exception) -> None:
        """A message could not be decoded, or not be run: ends the connection."""


class _Nobody:
    """In place of a connection that has ended, which is free at once so: nothing refers to it in a circle."""

    def run(self, message: Any, waited_s: float) -> None:
        """See Peer."""

    def busy(self, message: Any, retry_s: float) -> None:
        """See Peer."""

    def failed(self, error: Exception) -> None:
        """See Peer."""


class TenantQueue:
    """What one connection has sent and has not run yet."""

    __slots__ = (
        "_turns",
        "gone",
        "listed",
        "paused",
        "peer",
        "queued",
        "rests",
        "since",
        "tenant",
        "transport",
        "unread",
    )

    def __init__(self, turns: RequestScheduler, peer: Peer, transport: asyncio.ReadTransport) -> None:
        """Before `join`, messages run in turns of all strangers."""
        self._turns = turns
        self.peer = peer
        self.transport = transport
        self.tenant: int | None = None
        self.unread: Iterator[Any] | None = None
        self.since = 0.0
        self.queued = 0
        self.listed = False
        self.paused = False
        self.rests = False
        self.gone = False

    @property
    def held_up(self) -> bool:
        """Whether it is us who do not read on."""
        return self.unread is not None or self.paused

    def feed(self, messages: Iterator[Any]) -> None:
        """Messages that have arrived, decoded as they are asked for. Runs them, now or in turns."""
        self._turns.feed(self, messages)

    def rest(self, nbytes: int) -> None:
        """The connection has sent so much at once: it is read on in its turn, if it is not alone."""
        self._turns.rest(self, nbytes)

    def join(self, tenant: int) -> None:
        """From now on this is a connection of a tenant."""
        self.tenant = tenant
        self._turns.connected[tenant] += 1

    def leave(self) -> None:
        """The connection has ended: nothing more of it runs."""
        self._turns.leave(self)


class RequestScheduler:
    """All lines of one daemon."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, stopwatch: Callable[[], float], queued_requests: int = 1024
    ) -> None:
        """`stopwatch` gives seconds and moves on while requests run, as a loop's time may not.

        `queued_requests`: how many a tenant may have waiting before it is told that it has too many.
        """
        self.queued_requests = queued_requests
        self.refused = 0
        self.connected: Counter[int] = Counter()
        self._loop = loop
        self._stopwatch = stopwatch
        self._reading: FairQueue[TenantQueue] = FairQueue((1.0,), 1, _UNLIMITED, 1)
        self._resting: FairQueue[TenantQueue] = FairQueue((1.0,), _READ_QUANTUM, _UNLIMITED, _READ_QUANTUM)
        self._running: FairQueue[_Request] = FairQueue((1.0,), _QUANTUM, _UNLIMITED, _SAVED)
        self._queued: Counter[int] = Counter()
        self._queued_bytes: Counter[int] = Counter()
        self._full: dict[int, dict[TenantQueue, None]] = {}
        self._rates: dict[int, float] = {}
        self._soon = False
        self._sweeping = False
        self._timer: asyncio.TimerHandle | None = None
        self._spent_s = 0.0
        self._ended = 0.0

    def set(self, tenant: int, weight: float, requests_per_s: float = 0.0) -> None:
        """A tenant's weight, and the most requests a second that run (0: no cap).

        One request of many keys counts as several, of 256 keys each.
        """
        self._reading.set(tenant, weight)
        self._running.set(tenant, weight, requests_per_s, _BURST_S * requests_per_s)
        rate, burst = READ_BYTES_PER_S / _READ_UNIT_BYTES, _READ_BURST_BYTES / _READ_UNIT_BYTES
        self._resting.set(tenant, weight, rate, burst)
        self._rates.pop(tenant, None)
        if requests_per_s:
            self._rates[tenant] = requests_per_s
        self._go_on_soon()

    @property
    def waiting(self) -> int:
        """Requests that are decoded and have not run."""
        return self._queued.total()

    def line(self, peer: Peer, transport: asyncio.ReadTransport) -> TenantQueue:
        """For a new connection."""
        return TenantQueue(self, peer, transport)

    # -- in

    def feed(self, line: TenantQueue, messages: Iterator[Any]) -> None:
        """See TenantQueue."""
        start = self._stopwatch()
        if self._soon:
            self._put_off(line, messages, start)
            return
        if len(self.connected) > 1:
            # What runs at once must leave the loop time to read what other tenants have sent.
            self._spent_s = max(0.0, self._spent_s - (start - self._ended))
        else:
            self._spent_s = 0.0
        try:
            for message in messages:
                if self._spent_s > SLICE_S or line.tenant in self._rates:
                    self._put_off(line, itertools.chain((message,), messages), start)
                    return
                line.peer.run(message, 0.0)
                if line.transport.is_closing():
                    return
                self._ended = self._stopwatch()
                self._spent_s += self._ended - start
                start = self._ended
        except Exception as error:
            line.peer.failed(error)

    def _put_off(self, line: TenantQueue, messages: Iterator[Any], now: float) -> None:
        if line.unread is None:
            line.unread, line.since = messages, now
        else:
            line.unread = itertools.chain(line.unread, messages)
            _pause(line)
        self._list(line)
        self._go_on_soon()

    def _list(self, line: TenantQueue) -> None:
        if not line.listed:
            line.listed = True
            self._reading.put(_STRANGERS if line.tenant is None else line.tenant, 0, 1, line)

    def rest(self, line: TenantQueue, nbytes: int) -> None:
        """See TenantQueue."""
        if len(self.connected) <= 1 or line.rests or line.transport.is_closing():
            return
        line.rests = True
        _pause(line)
        tenant = _STRANGERS if line.tenant is None else line.tenant
        self._resting.put(tenant, 0, -(-nbytes // _READ_UNIT_BYTES), line)
        self._go_on_soon()

    def _wake(self, now: float) -> bool:
        """Reads on from one of those that rest; False if none may be read on."""
        taken = self._resting.take(now)
        if taken is None:
            return False
        line = taken[3]
        line.rests = False
        _resume(line)
        return True

    def leave(self, line: TenantQueue) -> None:
        """See TenantQueue."""
        line.gone, line.unread, line.peer = True, None, _Nobody()
        if line.tenant is not None:
            self.connected[line.tenant] -= 1
            if not self.connected[line.tenant]:
                del self.connected[line.tenant]
        if line.queued and not self._sweeping:
            # Once for all that leave in this round of the loop: a look at everything is not cheap.
            self._sweeping = True
            self._loop.call_soon(self._sweep)

    def _sweep(self) -> None:
        self._sweeping = False
        for line, message, _ in self._running.discard(lambda request: request[0].gone):
            self._count(line, message, -1)

    # -- turns

    def _go_on_soon(self) -> None:
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._soon = False
        now = self._stopwatch()
        ends = now + SLICE_S
        woken = self._wake(now)
        while now < ends:
            read, ran = self._read(now), self._run(now)
            if not read and not ran:
                if not woken:
                    self._wait(now)
                    return
                break
            now = self._stopwatch()
        self._go_on_soon()

    def _wait(self, now: float) -> None:
        """Nothing can be run or read on now: goes on when a tenant's cap lets it."""
        self._spent_s, self._ended = 0.0, now
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = min(self._running.ready_at(now), self._resting.ready_at(now))
        if at < float("inf"):
            self._timer = self._loop.call_later(at - now, self._go_on_soon)

    def _read(self, now: float) -> bool:
        """Decodes some of what one line has sent; False if there is none to decode."""
        taken = self._reading.take(now)
        if taken is None:
            return False
        line = taken[3]
        line.listed = False
        try:
            for _ in range(_READ_AT_ONCE):
                if line.unread is None or line.queued >= self._ahead(line):
                    return True
                if line.tenant is not None and self._queued_bytes[line.tenant] >= QUEUED_BYTES:
                    self._full.setdefault(line.tenant, {})[line] = None
                    return True
                message = next(line.unread, None)
                if message is None:
                    line.unread = None
                    _resume(line)
                elif line.tenant is None:
                    line.peer.run(message, now - line.since)
                    if line.transport.is_closing():
                        line.unread = None
                else:
                    self._queue(line, line.tenant, message)
                if self._stopwatch() - now > SLICE_S:
                    break
        except Exception as error:
            line.unread = None
            line.peer.failed(error)
        if line.unread is not None:
            self._list(line)
        return True

    def _ahead(self, line: TenantQueue) -> int:
        """How many messages of a connection may wait decoded; it is not read on meanwhile.

        A tenant with a cap is rather told that it sent too much: that would only get old unread.
        There is a bound all the same, for messages that can't be refused.
        """
        return 4 * self.queued_requests if line.tenant in self._rates else _AHEAD

    def _queue(self, line: TenantQueue, tenant: int, message: Any) -> None:
        if self._queued[tenant] >= self.queued_requests and _refusable(message):
            self.refused += 1
            if not message.id:
                return
            rate = self._rates.get(tenant, 1.0 / _UNIT_S)
            line.peer.busy(message, max(_SOONEST_RETRY_S, self._running.waiting(0, tenant) / rate))
            return
        self._count(line, message, 1)
        # What operators ask has no cap: it is how one is taken back.
        turn = _OPERATORS if type(message) is m.Control else tenant
        self._running.put(turn, 0, cost(message), (line, message, line.since))

    def _run(self, now: float) -> bool:
        """Runs one request; False if none may run."""
        taken = self._running.take(now)
        if taken is None:
            return False
        line, message, since = taken[3]
        self._count(line, message, -1)
        if not line.gone and not line.transport.is_closing():
            try:
                line.peer.run(message, now - since)
            except Exception as error:
                line.peer.failed(error)
            if line.unread is not None:
                self._list(line)
        return True

    def _count(self, line: TenantQueue, message: Any, by: int) -> None:
        assert line.tenant is not None
        line.queued += by
        self._queued[line.tenant] += by
        self._queued_bytes[line.tenant] += by * nbytes(message)
        if by < 0 and line.tenant in self._full and self._queued_bytes[line.tenant] < QUEUED_BYTES:
            for other in self._full.pop(line.tenant):
                if other.unread is not None:
                    self._list(other)
        if not self._queued[line.tenant]:
            del self._queued[line.tenant], self._queued_bytes[line.tenant]


def _pause(line: TenantQueue) -> None:
    if not line.paused:
        line.paused = True
        line.transport.pause_reading()


def _resume(line: TenantQueue) -> None:
    """Reads on, unless there still is a reason not to."""
    if line.paused and line.unread is None and not line.rests:
        line.paused = False
        if not line.transport.is_closing():
            line.transport.resume_reading()


def cost(message: Any) -> int:
    """What running it takes, in 16 µs or so: measured, a request is dear for itself and keys are cheap."""
    if type(message) in (m.Explain, m.Control):
        return _LONG_COST
    if type(message) is m.Open:
        return _OPEN_COST
    keys = getattr(message, "keys", b"")
    return 1 + len(keys) // (_UNIT_KEYS * message.key_bytes) if keys else 1


def nbytes(message: Any) -> int:
    """What it takes as it waits, about."""
    return _MESSAGE_BYTES + sum(len(getattr(message, name, b"")) for name in _LONG_FIELDS)


def _refusable(message: Any) -> bool:
    """Whether it need not run: it waits for an answer, or only warns; and it does not give anything back."""
    asks = bool(getattr(message, "id", 0)) or type(message) is m.Suspect
    return asks and type(message) is not m.Commit
