"""Retries of requests that wait for room, and the deadlines of all waiting requests.

A stalled request holds nothing. It is tried again as a whole after an event that may have freed room of its
tenant, and once more at its deadline.

Not covered: requests that wait for promotions. `reads` answers them when their blocks arrive.
"""

from __future__ import annotations

import heapq
import math

from kvstore.core import events as ev
from kvstore.core.jobs import Job
from kvstore.core.requests.leases import LeaseTable, Reservation
from kvstore.core.requests.reads import Reads
from kvstore.core.requests.writes import Writes

FREEING_EVENTS = frozenset(
    {
        ev.Release,
        ev.Commit,
        ev.Abort,
        ev.Invalidate,
        ev.ProbeDone,
        ev.CopyDone,
        ev.ClientLost,
        ev.ExtentReady,
        ev.ExtentLost,
        ev.ExtentsEnd,
        ev.Forget,
        ev.ForgetTenant,
        ev.SetDevice,
        ev.LoseDevice,
        ev.Tick,
    }
)
"""Events that may free room for stalled requests."""

_RETRIES = 8
"""Stalled requests that are tried again after one event."""
_NOBODY = -1


class Retries(Job):
    """Tries stalled requests again. As a job, answers requests at their deadlines."""

    def __init__(self, leases: LeaseTable, reads: Reads, writes: Writes) -> None:
        self._leases = leases
        self._reads = reads
        self._writes = writes

    def tenant_of(self, event: ev.Event) -> int | None:
        """Returns the only tenant for which an event can free room, before its handling; None: any tenant."""
        if isinstance(event, ev.CopyDone):
            copied = self._leases.copies.under_way.get(event.transfer)
            return copied.pool.tenant if copied is not None else None
        if isinstance(event, ev.Release):
            lease = self._leases.leases.get(event.lease)
            return lease.tenant if lease is not None else _NOBODY
        if isinstance(event, ev.Commit | ev.Abort):
            reservation = self._leases.reservations.get(event.lease)
            if reservation is None or (isinstance(event, ev.Commit) and self._keeps_all(event, reservation)):
                return _NOBODY
            return reservation.pool.tenant
        return None

    def _keeps_all(self, event: ev.Commit, reservation: Reservation) -> bool:
        """Whether all reserved slots stay in use."""
        n, state = len(reservation.rows), self._leases.residency.tiers[reservation.tier]
        whole = len(event.written) == len(event.checksums) == n and not state.lost
        return whole and bool(event.written.all() and reservation.alive.all())

    def retry_stalled(self, now: float, tenant: int | None) -> None:
        """Tries some stalled requests again: those of one tenant, or of all (None) in turns."""
        stalled, budget = self._leases.stalled, _RETRIES
        for number in stalled.tenants() if tenant is None else (tenant,):
            # Tenants wait for room of their own. If the oldest request finds none, neither do the next.
            while budget and (request := stalled.oldest(number)):
                budget -= 1
                self.retry(stalled.pop(request), now)
                if request in stalled:
                    break

    def retry(self, event: ev.Acquire | ev.Reserve, now: float) -> None:
        """Tries one request again."""
        eviction = self._leases.eviction
        self._leases.retried = event.request
        eviction.trying_again = now < event.deadline
        if isinstance(event, ev.Acquire):
            self._reads.acquire(event, now)
        else:
            self._writes.reserve(event, now)
        self._leases.retried = 0
        eviction.trying_again = False

    # -- deadlines

    def step(self, now: float) -> None:
        leases = self._leases
        while leases.deadlines and leases.deadlines[0][0] <= now:
            _, request = heapq.heappop(leases.deadlines)
            if request in leases.waiting:
                self._reads.answer_waiter(leases.waiting.pop(request))
            elif request in leases.stalled:
                self.retry(leases.stalled.pop(request), now)

    def wakes_at(self) -> float:
        deadlines = self._leases.deadlines
        return deadlines[0][0] if deadlines else math.inf
