"""Who holds what and who waits for what: leases, reservations, waiters, and the limits on all of them.

Shared by the parts of placement (`reads`, `writes`, `keeping`); decides nothing but whether a limit is kept.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.actions import Action, Deny
from kvstore.core.blocks import Picked, Rows
from kvstore.core.extents import Slots
from kvstore.core.residency import Residency
from kvstore.core.transfers import Transfers
from kvstore.types import slot_bytes

NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class Lease:
    """Slots of tier 0 that a reader may look at."""

    client: int
    slots: Picked


@dataclass(slots=True)
class Reservation:
    """Slots of tier 0 that a writer may fill, and the rows they will belong to."""

    client: int
    namespace: int
    slot_bytes: int
    rows: Rows
    slots: Slots
    alive: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Waiter:
    """An Acquire whose blocks are still on their way up. slot -1: not there yet."""

    event: ev.Acquire
    slot_bytes: int
    rows: Rows
    slots: Slots
    tiers: npt.NDArray[np.uint8]
    missing: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Probing:
    """Copies of one tier that are being looked at, and who wants to know (0: nobody)."""

    request: int
    tier: int
    slot_bytes: int
    rows: Rows
    slots: Slots


@dataclass(slots=True)
class Limits:
    """What one client or one call may ask for."""

    batch_keys: int = 4096
    reserve_keys: int = 128
    leases_per_client: int = 1024
    namespaces: int = 4096

    def __post_init__(self) -> None:
        self.reserve_keys = min(self.reserve_keys, self.batch_keys)


class Ledger:
    """The book of one placement."""

    def __init__(self, residency: Residency, transfers: Transfers, limits: Limits) -> None:
        self.residency = residency
        self.transfers = transfers
        self.limits = limits
        self.namespaces: dict[int, int] = {}
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.writers: Counter[int] = Counter()
        self.waiting: dict[int, Waiter] = {}
        self.wanted_by: dict[int, list[int]] = {}
        self.stalled: dict[int, ev.Acquire | ev.Reserve] = {}
        self.deadlines: list[tuple[float, int]] = []
        self.probes: dict[int, Probing] = {}
        self.held: dict[int, set[int]] = {}
        self._last = 0

    def say(self, action: Action) -> None:
        """One more action."""
        self.residency.out.append(action)

    def next_number(self) -> int:
        """A number that no lease, reservation or probe had before."""
        self._last += 1
        return self._last

    def slot_bytes(self, event: Any) -> int:
        """The slot size of the event's namespace; 0 (and a Deny) if the request cannot be served."""
        size = self.namespaces.get(event.namespace)
        if size is None:
            hint = "open the namespace on this connection first"
            self.say(Deny(event.request, f"unknown namespace {event.namespace}", hint))
            return 0
        if event.keys.n > self.limits.batch_keys:
            hint = f"at most {self.limits.batch_keys} keys a call"
            self.say(Deny(event.request, f"{event.keys.n} keys in one call", hint))
            return 0
        return slot_bytes(size)

    def hold(self, client: int) -> int:
        """A new lease number for a client, or 0 beyond its limit."""
        held = self.held.setdefault(client, set())
        if len(held) >= self.limits.leases_per_client:
            return 0
        number = self.next_number()
        held.add(number)
        return number

    def may_hold(self, client: int) -> bool:
        """Whether `hold` would give a number."""
        return len(self.held.get(client, ())) < self.limits.leases_per_client

    def deny_hold(self, request: int) -> None:
        """Says that the client holds too much."""
        hint = f"at most {self.limits.leases_per_client} leases and reservations a connection"
        self.say(Deny(request, "too many leases", hint))

    def room_is_coming(self, event: ev.Acquire | ev.Reserve, now: float) -> bool:
        """Whether to wait for slots rather than do with less: not past the deadline, not for nothing."""
        t = self.transfers
        moving = (t.writes_in_flight > 0 or t.reads_in_flight > 0) and not self.residency.fenced
        return event.deadline > now and (moving or any(t.growing for t in self.residency.tiers))

    def remind(self, event: ev.Acquire | ev.Reserve) -> None:
        """A Tick at the event's deadline has to look at it."""
        heapq.heappush(self.deadlines, (event.deadline, event.request))

    def stall(self, event: ev.Acquire | ev.Reserve) -> None:
        """The request holds nothing, and is tried again as a whole when something has got free."""
        self.stalled[event.request] = event
        self.remind(event)
