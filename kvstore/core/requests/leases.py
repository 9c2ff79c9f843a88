"""Leases, reservations, waiting requests, and their limits. All kinds of requests share one table of them."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.actions import Action, Deny, Stored
from kvstore.core.blocks.block_table import Picked, Rows
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.capacity.slot_classes import Slots
from kvstore.core.residency.namespace import Namespace
from kvstore.core.residency.residency import Residency
from kvstore.core.transfers.copy_queue import CopyQueue
from kvstore.core.transfers.eviction import Eviction
from kvstore.core.transfers.transfers import Transfers

NONE = np.empty(0, np.int64)
_RETRY_S = 0.05
_NUMBER_BITS = 32


def lease_number(client: int, number: int) -> int:
    """Returns the core's number of a lease. A client knows only `number`, and nothing of other clients."""
    return client << _NUMBER_BITS | number & (1 << _NUMBER_BITS) - 1


def number_on_connection(lease: int) -> int:
    """Returns the client's number of a lease or reservation; 0: none."""
    return lease & (1 << _NUMBER_BITS) - 1


@dataclass(slots=True)
class Lease:
    """Slots of `tier` that the tenant `reader` may read, and their `tenant`; `lent_bytes`: if they differ."""

    client: int
    tenant: int
    slots: Picked
    tier: int = 0
    namespace: int = 0
    reader: int = 0
    lent_bytes: int = 0


@dataclass(slots=True)
class Reservation:
    """Slots of `tier` that a client may fill, and their future rows. `alive`: not invalidated meanwhile.

    `chain`, `chain_key`: see `events.Reserve`.
    """

    client: int
    namespace: Namespace
    tier: int
    pool: SlotPool
    rows: Rows
    slots: Slots
    alive: npt.NDArray[np.bool_]
    loading: bool = False
    chain: int = 0
    chain_key: bytes = b""


@dataclass(slots=True)
class Waiter:
    """An Acquire that waits for promotions of rows `missing`. slot -1: not promoted yet.

    `tiers`: the number of the tier in which each block was found.
    """

    event: ev.Acquire
    namespace: Namespace
    rows: Rows
    slots: Slots
    tiers: npt.NDArray[np.int16]
    stored: Stored
    missing: set[int] = field(default_factory=set)


@dataclass(slots=True)
class PendingProbe:
    """Copies in one tier that are being verified, and the request that asked (0: none)."""

    request: int
    tier: int
    rows: Rows
    slots: Slots


class Stalled:
    """Requests that wait for room without holding any. They are retried as a whole."""

    def __init__(self) -> None:
        self._tenant_of: dict[int, int] = {}
        self._by_tenant: dict[int, dict[int, ev.Acquire | ev.Reserve]] = {}

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tenant_of)

    def __contains__(self, request: int) -> bool:
        return request in self._tenant_of

    def count(self, tenant: int) -> int:
        """Returns the number of a tenant's requests."""
        return len(self._by_tenant.get(tenant, ()))

    def add(self, tenant: int, event: ev.Acquire | ev.Reserve) -> None:
        """Adds a request behind those of the same tenant."""
        self._tenant_of[event.request] = tenant
        self._by_tenant.setdefault(tenant, {})[event.request] = event

    def pop(self, request: int) -> ev.Acquire | ev.Reserve:
        """Removes a request and returns it."""
        tenant = self._tenant_of.pop(request)
        mine = self._by_tenant[tenant]
        event = mine.pop(request)
        if not mine:
            del self._by_tenant[tenant]
        return event

    def of_client(self, client: int) -> list[int]:
        """Returns the requests of a connection."""
        return [n for mine in self._by_tenant.values() for n, e in mine.items() if e.client == client]

    def of_namespace(self, namespace: int) -> list[ev.Acquire | ev.Reserve]:
        """Returns the requests for a namespace."""
        return [e for mine in self._by_tenant.values() for e in mine.values() if e.namespace == namespace]

    def namespaces(self) -> set[int]:
        """Returns the namespaces of all requests."""
        return {e.namespace for mine in self._by_tenant.values() for e in mine.values()}

    def tenants(self) -> list[int]:
        """Returns the tenants with requests, in round-robin order: the next call starts with another one."""
        order = list(self._by_tenant)
        if len(order) > 1:
            self._by_tenant[order[0]] = self._by_tenant.pop(order[0])
        return order

    def oldest(self, tenant: int) -> int:
        """Returns the tenant's request that was tried longest ago; 0: none."""
        return next(iter(self._by_tenant.get(tenant, ())), 0)


@dataclass(slots=True)
class Limits:
    """Limits of clients and calls."""

    batch_keys: int = 4096
    reserve_keys: int = 256
    leases_per_client: int = 1024
    namespaces: int = 4096
    namespaces_per_tenant: int = 4096
    waiting_per_tenant: int = 1024

    def __post_init__(self) -> None:
        self.reserve_keys = min(self.reserve_keys, self.batch_keys)


class LeaseTable:
    """All leases, reservations and waiting requests of one placement.

    `retried`: the stalled request that is being retried (0: none). `next_end`: when the next block expires.
    """

    def __init__(
        self,
        residency: Residency,
        copies: CopyQueue,
        eviction: Eviction,
        transfers: Transfers,
        limits: Limits,
    ) -> None:
        self.residency = residency
        self.copies = copies
        self.eviction = eviction
        self.transfers = transfers
        self.limits = limits
        self.namespaces = residency.namespaces
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.waiting: dict[int, Waiter] = {}
        self.wanted_by: dict[int, list[int]] = {}
        self.stalled = Stalled()
        self.deadlines: list[tuple[float, int]] = []
        self.probes: dict[int, PendingProbe] = {}
        self.held: dict[int, set[int]] = {}
        self.lent: Counter[tuple[int, int]] = Counter()
        self.next_end = math.inf
        self.retried = 0
        self._last = 0
        self._last_of: Counter[int] = Counter()

    def say(self, action: Action) -> None:
        """Adds an action to the output."""
        self.residency.outbox.actions.append(action)

    def deny(self, request: int, why: str, hint: str = "", retry_s: float = 0.0) -> None:
        """Refuses a request."""
        self.say(Deny(request, why, hint, retry_s))

    def next_number(self) -> int:
        """Returns an unused number for a probe."""
        self._last += 1
        return self._last

    def namespaces_in_use(self) -> set[int]:
        """Returns the numbers of the namespaces with leases, reservations or waiting requests."""
        numbers = {lease.namespace for lease in self.leases.values()}
        numbers |= {reservation.namespace.number for reservation in self.reservations.values()}
        numbers |= {waiter.namespace.number for waiter in self.waiting.values()}
        return numbers | self.stalled.namespaces()

    def namespace(self, event: Any) -> Namespace | None:
        """Returns the event's namespace; None, after a Deny, if it is unknown or the keys are too many."""
        namespace = self.namespaces.get(event.namespace)
        if namespace is None or namespace.closed:
            hint = "open the namespace on this connection first"
            self.deny(event.request, f"unknown namespace {event.namespace}", hint)
            return None
        if event.keys.n > self.limits.batch_keys:
            hint = f"at most {self.limits.batch_keys} keys a call"
            self.deny(event.request, f"{event.keys.n} keys in one call", hint)
            return None
        return namespace

    def tier_for(self, event: Any, namespace: Namespace, asker: int) -> int:
        """Returns the memory tier that serves a request: the preferred one if possible, else DRAM.

        Only the tenant of a namespace may use it in GPU memory, because GPU memory is mapped writable.
        """
        if not event.tier or asker != namespace.tenant:
            return 0
        state = self.residency.tiers[event.tier]
        usable = state.extents.ready and state.device.readable and not state.leaving
        return event.tier if usable and state.extents.slots_in(namespace.pools[event.tier].slot_bytes) else 0

    def end_at(self, when: float) -> None:
        """Records that blocks expire at `when`."""
        self.next_end = min(self.next_end, when)

    def hold(self, client: int) -> int:
        """Returns a new lease number for a client; 0 beyond its limit."""
        held = self.held.setdefault(client, set())
        if len(held) >= self.limits.leases_per_client:
            return 0
        self._last_of[client] += 1
        number = lease_number(client, self._last_of[client])
        held.add(number)
        return number

    def forget_client(self, client: int) -> None:
        """Forgets a client without leases."""
        self.held.pop(client, None)
        self._last_of.pop(client, None)

    def lendable_bytes(self, tenant: int) -> int:
        """Returns how much more of a tenant's DRAM other tenants may lease: half of its extents or share."""
        extents = self.residency.tiers[0].extents
        most = (
            max(extents.holdings.held(tenant), extents.holdings.fair_bytes(tenant, extents.capacity_bytes))
            // 2
        )
        return max(0, most - sum(self.lent_by(tenant).values()))

    def lent_by(self, tenant: int) -> dict[int, int]:
        """Returns the bytes of a tenant's blocks that other tenants lease, by tenant."""
        return {reader: n for (owner, reader), n in self.lent.items() if owner == tenant}

    def lend(self, lease: Lease, nbytes: int) -> None:
        """Counts a lease on another tenant's blocks."""
        lease.lent_bytes = nbytes
        self.lent[lease.tenant, lease.reader] += nbytes

    def drop_lease(self, number: int) -> None:
        """Ends a lease."""
        lease = self.leases.pop(number)
        self.held[lease.client].discard(number)
        if lease.lent_bytes:
            pair = lease.tenant, lease.reader
            self.lent[pair] -= lease.lent_bytes
            if not self.lent[pair]:
                del self.lent[pair]
        self.residency.tiers[lease.tier].slots.release(lease.slots)

    def drop_reservation(self, number: int) -> Reservation:
        """Ends a reservation. Its slots stay held."""
        reservation = self.reservations.pop(number)
        self.held[reservation.client].discard(number)
        self.residency.gaps.end(reservation.namespace.number, number)
        return reservation

    def may_hold(self, client: int) -> bool:
        """Returns whether the client has fewer leases and reservations than its limit."""
        return len(self.held.get(client, ())) < self.limits.leases_per_client

    def deny_hold(self, request: int) -> None:
        """Refuses a request of a client with too many leases."""
        hint = f"at most {self.limits.leases_per_client} leases and reservations a connection"
        self.deny(request, "too many leases", hint)

    def deny_loan(self, request: int) -> None:
        """Refuses a request for more blocks of another tenant than `lendable_bytes`."""
        self.residency.counters["busy_requests"] += 1
        hint = "release leases, or read by copies, which hold none for long"
        self.deny(request, "other tenants hold as many blocks of this one as they may", hint, _RETRY_S)

    def room_is_coming(self, event: ev.Acquire | ev.Reserve, tenant: int, now: float) -> bool:
        """Returns whether slots of a tenant may become free before the deadline of a request."""
        if event.deadline <= now:
            return False
        moving = self.residency.copying[tenant] > 0 and not self.residency.topology.out_of_reach
        growing = any(t.growing for t in self.residency.tiers)
        return moving or growing or self.eviction.rebalancing.under_way

    def remind(self, event: ev.Acquire | ev.Reserve) -> None:
        """Has the request answered at its deadline at the latest."""
        heapq.heappush(self.deadlines, (event.deadline, event.request))

    def stall(self, event: ev.Acquire | ev.Reserve, tenant: int) -> None:
        """Lets a request without slots wait for room. Refuses it if too many of the tenant's wait."""
        again = event.request == self.retried
        if self.stalled.count(tenant) >= self.limits.waiting_per_tenant:
            hint = "fewer calls at a time, or with shorter deadlines"
            self.residency.counters["busy_requests"] += 1
            self.deny(event.request, "too many requests of this tenant wait for room", hint, _RETRY_S)
            return
        self.stalled.add(tenant, event)
        if not again:
            self.remind(event)
