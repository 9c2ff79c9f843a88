"""Runs the requests of all connections on the event loop, fairly by tenant.

While nothing is queued, a request runs when it arrives. Otherwise requests are queued, first undecoded, then
decoded. Slots of `SLICE_S` run queued requests by `FairQueue`. Between slots the loop reads sockets.

A connection is not read while it has undecoded messages, nor while its tenant has `QUEUED_BYTES` queued.
After long reads, connections are read one in a slot, at most `READ_BYTES_PER_S` for each tenant. A tenant
that has too many requests queued, or that is over its cap, gets Busy. The messages of one connection run in
order. Copies between tiers that a request starts are not covered here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.core.queues.fair_queue import FairQueue
from kvstore.wire import messages as m

SLICE_S = 200e-6
"""The duration of a slot, after which sockets are read again."""

QUEUED_BYTES = 16 << 20
"""A tenant with this number of bytes queued gets no more messages decoded."""

READ_BYTES_PER_S = 64 << 20
"""The rate of a tenant's long reads after `_READ_BURST_BYTES`, while other tenants are connected."""

_READ_BURST_BYTES = 8 << 20
_READ_UNIT_BYTES = 4096
_READ_QUANTUM = 64

_UNIT_S = 16e-6  # about the duration of a request of cost 1, which has up to _UNIT_KEYS keys
_UNIT_KEYS = 256
_LONG_COST = 64
_OPEN_COST = 4
_QUANTUM = 4
_SAVED = 64
_DECODED_AT_ONCE = 16
_DECODED = 64  # queued messages of a connection
_BURST_S = 0.1
_SOONEST_RETRY_S = 0.001
_UNLIMITED = 1 << 62
_MESSAGE_BYTES = 500
_LONG_FIELDS = "keys", "tokens", "checksums", "written"
_UNANSWERED = m.Suspect, m.BlocksRead, m.TraceContext
_STRANGERS = -1
_OPERATORS = -2

_Request = tuple["ConnectionQueue", Any, float]


class Peer(Protocol):
    """The connection of a queue."""

    def run(self, message: Any, waited_s: float) -> None:
        """Runs a message that was queued for `waited_s` seconds. May raise."""

    def busy(self, message: Any, retry_s: float) -> None:
        """Refuses a request, which may be sent again after `retry_s` seconds."""

    def failed(self, error: Exception) -> None:
        """Ends the connection, because a message could not be decoded or run."""


class _ClosedPeer:
    """Replaces a connection that has ended. No reference cycle then keeps the connection in memory."""

    def run(self, message: Any, waited_s: float) -> None:
        pass

    def busy(self, message: Any, retry_s: float) -> None:
        pass

    def failed(self, error: Exception) -> None:
        pass


@dataclass(slots=True, eq=False)
class ConnectionQueue:
    """The messages of one connection that have not run yet. Strangers have `tenant` None and share slots."""

    peer: Peer
    transport: asyncio.ReadTransport
    tenant: int | None = None
    undecoded: Iterator[Any] | None = None
    received_s: float = 0.0
    decoded: int = 0
    scheduled: bool = False
    paused: bool = False
    throttled: bool = False
    closed: bool = False

    def is_held_up(self) -> bool:
        """Returns whether the daemon has stopped reading, so that a late frame is not the peer's fault."""
        return self.undecoded is not None or self.paused

    def pause(self) -> None:
        """Stops reading."""
        if not self.paused:
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Reads again, unless messages are undecoded or the connection is throttled."""
        if self.paused and self.undecoded is None and not self.throttled:
            self.paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()


class RequestScheduler:
    """The queues of all connections of one daemon."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, stopwatch: Callable[[], float], queued_requests: int = 1024
    ) -> None:
        """`stopwatch` returns s and advances while requests run, unlike the event loop's time.

        `queued_requests`: the most queued requests of a tenant. Further requests get Busy.
        """
        self.queued_requests = queued_requests
        self.refused = 0
        self.connected: Counter[int] = Counter()
        self._loop = loop
        self._stopwatch = stopwatch
        self._to_decode: FairQueue[ConnectionQueue] = FairQueue((1.0,), 1, _UNLIMITED, 1)
        self._to_read: FairQueue[ConnectionQueue] = FairQueue(
            (1.0,), _READ_QUANTUM, _UNLIMITED, _READ_QUANTUM
        )
        self._to_run: FairQueue[_Request] = FairQueue((1.0,), _QUANTUM, _UNLIMITED, _SAVED)
        self._decoded: Counter[int] = Counter()
        self._decoded_bytes: Counter[int] = Counter()
        self._full: dict[int, dict[ConnectionQueue, None]] = {}
        self._rates: dict[int, float] = {}
        self._slot_due = False
        self._sweeping = False
        self._timer: asyncio.TimerHandle | None = None
        self._spent_s = 0.0
        self._ended = 0.0

    def set(self, tenant: int, weight: float, requests_per_s: float = 0.0) -> None:
        """Sets a tenant's weight, and its cap in requests of 256 keys each a second (0: no cap)."""
        self._to_decode.set(tenant, weight)
        self._to_run.set(tenant, weight, requests_per_s, _BURST_S * requests_per_s)
        rate, burst = READ_BYTES_PER_S / _READ_UNIT_BYTES, _READ_BURST_BYTES / _READ_UNIT_BYTES
        self._to_read.set(tenant, weight, rate, burst)
        self._rates.pop(tenant, None)
        if requests_per_s:
            self._rates[tenant] = requests_per_s
        self._schedule_slot()

    @property
    def waiting(self) -> int:
        """The number of decoded requests that have not run."""
        return self._decoded.total()

    # -- connections

    def join(self, queue: ConnectionQueue, tenant: int) -> None:
        """Assigns a connection to a tenant."""
        queue.tenant = tenant
        self.connected[tenant] += 1

    def feed(self, queue: ConnectionQueue, messages: Iterator[Any]) -> None:
        """Decodes and runs messages that have arrived: at once if nothing is queued, else in later slots."""
        start = self._stopwatch()
        if self._slot_due:
            self._put_off(queue, messages, start)
            return
        if len(self.connected) > 1:
            # The loop must get time to read the sockets of other tenants.
            self._spent_s = max(0.0, self._spent_s - (start - self._ended))
        else:
            self._spent_s = 0.0
        try:
            for message in messages:
                if self._spent_s > SLICE_S or queue.tenant in self._rates:
                    self._put_off(queue, itertools.chain((message,), messages), start)
                    return
                queue.peer.run(message, 0.0)
                if queue.transport.is_closing():
                    return
                self._ended = self._stopwatch()
                self._spent_s += self._ended - start
                start = self._ended
        except Exception as error:
            queue.peer.failed(error)

    def _put_off(self, queue: ConnectionQueue, messages: Iterator[Any], now: float) -> None:
        """Queues undecoded messages. A connection that has some already is not read until they have run."""
        if queue.undecoded is None:
            queue.undecoded, queue.received_s = messages, now
        else:
            queue.undecoded = itertools.chain(queue.undecoded, messages)
            queue.pause()
        self._schedule_decoding(queue)
        self._schedule_slot()

    def _schedule_decoding(self, queue: ConnectionQueue) -> None:
        if not queue.scheduled:
            queue.scheduled = True
            self._to_decode.put(_STRANGERS if queue.tenant is None else queue.tenant, 0, 1, queue)

    def throttle(self, queue: ConnectionQueue, nbytes: int) -> None:
        """Pauses a connection that has sent `nbytes` at once, until a slot. A single tenant is not paused."""
        if len(self.connected) <= 1 or queue.throttled or queue.transport.is_closing():
            return
        queue.throttled = True
        queue.pause()
        tenant = _STRANGERS if queue.tenant is None else queue.tenant
        self._to_read.put(tenant, 0, -(-nbytes // _READ_UNIT_BYTES), queue)
        self._schedule_slot()

    def leave(self, queue: ConnectionQueue) -> None:
        """Drops the queue of a connection that has ended."""
        queue.closed, queue.undecoded, queue.peer = True, None, _ClosedPeer()
        if queue.tenant is not None:
            self.connected[queue.tenant] -= 1
            if not self.connected[queue.tenant]:
                del self.connected[queue.tenant]
        if queue.decoded and not self._sweeping:
            # A pass over all requests is slow: one for all connections that end in this round of the loop.
            self._sweeping = True
            self._loop.call_soon(self._sweep)

    def _sweep(self) -> None:
        self._sweeping = False
        for queue, message, _ in self._to_run.discard(lambda request: request[0].closed):
            self._count(queue, message, -1)

    # -- slots

    def _schedule_slot(self) -> None:
        if not self._slot_due:
            self._slot_due = True
            self._loop.call_soon(self._run_slot)

    def _run_slot(self) -> None:
        self._slot_due = False
        now = self._stopwatch()
        ends = now + SLICE_S
        read_on = self._read_on(now)
        while now < ends:
            decoded, ran = self._decode_some(now), self._run_one(now)
            if not decoded and not ran:
                if not read_on:
                    self._wait(now)
                    return
                break
            now = self._stopwatch()
        self._schedule_slot()

    def _wait(self, now: float) -> None:
        """Schedules the next slot for the time when a tenant's cap allows a read or a request."""
        self._spent_s, self._ended = 0.0, now
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = min(self._to_run.ready_at(now), self._to_read.ready_at(now))
        if at < float("inf"):
            self._timer = self._loop.call_later(at - now, self._schedule_slot)

    def _read_on(self, now: float) -> bool:
        """Reads one throttled connection again. Returns False if none may be read."""
        taken = self._to_read.take(now)
        if taken is None:
            return False
        queue = taken[3]
        queue.throttled = False
        queue.resume()
        return True

    def _decode_some(self, now: float) -> bool:
        """Decodes up to 16 messages of one connection. Returns False if no connection has any."""
        taken = self._to_decode.take(now)
        if taken is None:
            return False
        queue = taken[3]
        queue.scheduled = False
        try:
            for _ in range(_DECODED_AT_ONCE):
                if queue.undecoded is None or queue.decoded >= self._most_decoded(queue):
                    return True
                if queue.tenant is not None and self._decoded_bytes[queue.tenant] >= QUEUED_BYTES:
                    self._full.setdefault(queue.tenant, {})[queue] = None
                    return True
                message = next(queue.undecoded, None)
                if message is None:
                    queue.undecoded = None
                    queue.resume()
                elif queue.tenant is None:
                    queue.peer.run(message, now - queue.received_s)
                    if queue.transport.is_closing():
                        queue.undecoded = None
                else:
                    self._put(queue, queue.tenant, message)
                if self._stopwatch() - now > SLICE_S:
                    break
        except Exception as error:
            queue.undecoded = None
            queue.peer.failed(error)
        if queue.undecoded is not None:
            self._schedule_decoding(queue)
        return True

    def _most_decoded(self, queue: ConnectionQueue) -> int:
        """Returns the most decoded messages of a connection.

        Messages of a tenant with a cap are decoded and refused, because undecoded ones would only get old.
        They have a bound too, because some messages cannot be refused.
        """
        return 4 * self.queued_requests if queue.tenant in self._rates else _DECODED

    def _put(self, queue: ConnectionQueue, tenant: int, message: Any) -> None:
        if self._decoded[tenant] >= self.queued_requests and _refusable(message):
            self.refused += 1
            if not getattr(message, "id", 0):
                return
            rate = self._rates.get(tenant, 1.0 / _UNIT_S)
            queue.peer.busy(message, max(_SOONEST_RETRY_S, self._to_run.waiting(0, tenant) / rate))
            return
        self._count(queue, message, 1)
        # Operator commands have no cap, because a command removes a cap.
        payer = _OPERATORS if type(message) is m.Control else tenant
        self._to_run.put(payer, 0, cost(message), (queue, message, queue.received_s))

    def _run_one(self, now: float) -> bool:
        """Runs one request. Returns False if none may run."""
        taken = self._to_run.take(now)
        if taken is None:
            return False
        queue, message, received_s = taken[3]
        self._count(queue, message, -1)
        if not queue.closed and not queue.transport.is_closing():
            try:
                queue.peer.run(message, now - received_s)
            except Exception as error:
                queue.peer.failed(error)
            if queue.undecoded is not None:
                self._schedule_decoding(queue)
        return True

    def _count(self, queue: ConnectionQueue, message: Any, by: int) -> None:
        assert queue.tenant is not None
        queue.decoded += by
        self._decoded[queue.tenant] += by
        self._decoded_bytes[queue.tenant] += by * nbytes(message)
        if by < 0 and queue.tenant in self._full and self._decoded_bytes[queue.tenant] < QUEUED_BYTES:
            for other in self._full.pop(queue.tenant):
                if other.undecoded is not None:
                    self._schedule_decoding(other)
        if not self._decoded[queue.tenant]:
            del self._decoded[queue.tenant], self._decoded_bytes[queue.tenant]


def cost(message: Any) -> int:
    """Returns the cost of running a message, in units of about 16 µs. Keys cost little beside the request."""
    if type(message) in (m.Explain, m.Control):
        return _LONG_COST
    if type(message) is m.Open:
        return _OPEN_COST
    keys = getattr(message, "keys", b"")
    return 1 + len(keys) // (_UNIT_KEYS * message.key_bytes) if keys else 1


def nbytes(message: Any) -> int:
    """Returns the approximate size of a queued message in bytes."""
    return _MESSAGE_BYTES + sum(len(getattr(message, name, b"")) for name in _LONG_FIELDS)


def _refusable(message: Any) -> bool:
    """Returns whether a message may be dropped: it has an answer or is a report, and it frees nothing."""
    has_answer = bool(getattr(message, "id", 0)) or type(message) in _UNANSWERED
    return has_answer and type(message) is not m.Commit
