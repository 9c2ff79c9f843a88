"""Fair queueing: of tenants within a class of work, and of classes.

Tenants share a class by weighted deficit round robin (Shreedhar and Varghese, "Efficient Fair Queuing using
Deficit Round Robin", 1995). As in FQ-CoDel (RFC 8290, section 4.2), a tenant with an empty queue is served
before the round, until it has caught up with what it left to others lately. So bursts of a tenant that uses
no more than its share hardly wait. Classes share by start-time fair queueing (Goyal, Vin and Cheng, 1996),
which is exact to one item and compares all classes: there are few.

With q = `quantum` x weight, s = `saved` x weight, c = the highest cost of an item, and queues that are never
empty:

    shares      two tenants of the round differ in service by weight by at most quantum + c/weight of each
    sparse      a new tenant waits for no tenant of the round, and for q + c of each other new one at a time
    round       for its next q, a tenant waits for at most 2 (q + c) + s + c of each other tenant
    classes     two classes differ in service by weight by at most c/weight of each
    cap         in any time t a tenant gets at most rate x t + max(burst, c)

Each step is O(1) amortised while q >= c (else O(c / q)), and O(log n) for tenants that their cap holds back.
Not covered: time. `now` is given by the caller, in seconds, and never decreases.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Tenant:
    """`full_at`: when the token bucket of the tenant's cap is full again."""

    weight: float = 1.0
    rate: float = 0.0
    burst: float = 0.0
    full_at: float = -math.inf

    def may_go_at(self, cost: int) -> float:
        """Returns when the bucket covers a cost. A cost above `burst` waits until the bucket is full."""
        if not self.rate:
            return -math.inf
        return self.full_at - max(self.burst - cost, 0.0) / self.rate

    def spend(self, cost: int, now: float) -> None:
        if self.rate:
            self.full_at = max(self.full_at, now) + cost / self.rate


@dataclass(slots=True)
class _Flow(Generic[T]):
    """The queue of a tenant in a class. It exists while it is in a list of its class, or parked by its cap.

    `got`: the service of the tenant by weight, on the scale of the class's `level`; kept while it is fresh.
    """

    number: int
    tenant: _Tenant
    deficit: float
    got: float
    items: deque[tuple[int, T]] = field(default_factory=deque)
    waiting: int = 0
    parked: bool = False


@dataclass(slots=True)
class _Class(Generic[T]):
    """One class. `fresh` flows are served before those of the `round`.

    `start` is the virtual time of the class, in cost by weight. `level` is the service of the tenants of the
    round, by weight. `gone` has the same for tenants that left lately; others have saved the maximum.
    `backlog` counts the flows with queued items, `active` is the sum of their weights.
    """

    kind: int
    weight: float
    saved: float
    start: float = 0.0
    level: float = 0.0
    waiting: int = 0
    backlog: int = 0
    active: float = 0.0
    flows: dict[int, _Flow[T]] = field(default_factory=dict)
    gone: dict[int, float] = field(default_factory=dict)
    fresh: deque[_Flow[T]] = field(default_factory=deque)
    round: deque[_Flow[T]] = field(default_factory=deque)

    def activate(self, flow: _Flow[T]) -> None:
        self.backlog += 1
        self.active += flow.tenant.weight

    def deactivate(self, flow: _Flow[T]) -> None:
        self.backlog -= 1
        self.active -= flow.tenant.weight
        if not self.backlog:
            self.active = 0.0
            for flows in (self.fresh, self.round):
                while flows:
                    self.leave(flows)

    def enter(self, number: int, tenant: _Tenant, quantum: float) -> _Flow[T]:
        """Adds the flow of a tenant that is in no list."""
        got = max(self.gone.pop(number, -math.inf), self.level - self.saved)
        flow = self.flows[number] = _Flow(number, tenant, quantum, got)
        (self.fresh if got < self.level else self.round).append(flow)
        return flow

    def leave(self, flows: deque[_Flow[T]]) -> None:
        """Removes the flow at the head of a list, which has no queued items."""
        flow = flows.popleft()
        del self.flows[flow.number]
        left = self.level - flow.deficit / flow.tenant.weight
        self.gone[flow.number] = flow.got if flows is self.fresh else left
        for number, got in list(itertools.islice(self.gone.items(), 2)):
            if got <= self.level - self.saved:
                del self.gone[number]


class FairQueue(Generic[T]):
    """Queues of items with costs, by tenant and class (`kind`, counted from 0)."""

    def __init__(self, class_weights: Sequence[float], quantum: int, limit: int, saved: int) -> None:
        """A tenant of weight 1 gets `quantum` per round, and may queue up to `limit` in each class.

        While its queue is empty it saves its share for later, up to `saved`.
        """
        self._quantum = quantum
        self._limit = limit
        self._classes: list[_Class[T]] = [_Class(kind, w, saved) for kind, w in enumerate(class_weights)]
        self._tenants: dict[int, _Tenant] = {}
        self._parked: list[tuple[float, int, _Class[T], _Flow[T]]] = []
        self._sequence = itertools.count()

    def set(self, tenant: int, weight: float, rate: float = 0.0, burst: float = 0.0) -> None:
        """Sets a weight (above 0) and a cap: `rate` cost units/s (0: none) with bursts of `burst`."""
        full_at = self._tenants[tenant].full_at if tenant in self._tenants else -math.inf
        self._tenants[tenant] = _Tenant(weight, rate, burst, full_at)
        self._refer(tenant)

    def forget(self, tenant: int) -> None:
        """Resets a tenant to weight 1 without a cap. Its queued items stay."""
        self._tenants.pop(tenant, None)
        self._refer(tenant)

    def _refer(self, number: int) -> None:
        tenant = self._tenants.get(number) or _Tenant()
        for c in self._classes:
            flow = c.flows.get(number)
            if flow is not None:
                if flow.items:
                    c.active += tenant.weight - flow.tenant.weight
                flow.tenant = tenant
                self._unpark(c, flow)

    # -- in

    def put(self, tenant: int, kind: int, cost: int, item: T) -> bool:
        """Queues an item. Returns False if its tenant would exceed its limit in this class.

        The first item of a tenant may exceed the limit.
        """
        c = self._classes[kind]
        flow = c.flows.get(tenant)
        if flow is None:
            known = self._tenants.get(tenant) or _Tenant()
            flow = c.enter(tenant, known, self._quantum * known.weight)
        elif flow.items and flow.waiting + cost > self._limit:
            return False
        if not flow.items:
            c.activate(flow)
        flow.items.append((cost, item))
        flow.waiting += cost
        c.waiting += cost
        return True

    # -- out

    def take(self, now: float, kinds: Sequence[int] | None = None) -> tuple[int, int, int, T] | None:
        """Removes the next item of `kinds` (None: all). Returns (tenant, kind, cost, item), or None if none
        is due.

        A class does not catch up on time in which it is left out, or in which caps hold back all its tenants.
        """
        while self._parked and self._parked[0][0] <= now:
            _, _, c, flow = heapq.heappop(self._parked)
            self._unpark(c, flow)
        chosen: _Class[T] | None = None
        for c in self._classes:
            if (
                (chosen is None or c.start < chosen.start)
                and (kinds is None or c.kind in kinds)
                and self._turn(c, now)
            ):
                chosen = c
        if chosen is None:
            return None
        for c in self._classes:
            c.start = max(c.start, chosen.start)
        flow = (chosen.fresh or chosen.round)[0]
        cost, item = flow.items.popleft()
        if chosen.fresh:
            flow.got += cost / flow.tenant.weight
        else:
            chosen.level += cost / chosen.active
        chosen.start += cost / chosen.weight
        chosen.waiting -= cost
        flow.waiting -= cost
        flow.deficit -= cost
        flow.tenant.spend(cost, now)
        if not flow.items:
            chosen.deactivate(flow)
        return flow.number, chosen.kind, cost, item

    def _turn(self, c: _Class[T], now: float) -> bool:
        """Puts the next flow to the head of `fresh`, else of `round`. Returns whether there is one."""
        while flows := c.fresh or c.round:
            flow = flows[0]
            if flows is c.fresh and flow.items and flow.got >= c.level:
                c.round.append(flows.popleft())
            elif flow.deficit <= 0 and (flow.items or flows is c.round):
                # A flow in debt pays before it leaves the round.
                flow.deficit += self._quantum * flow.tenant.weight
                flows.rotate(-1)
            elif flow.items:
                at = flow.tenant.may_go_at(flow.items[0][0])
                if at <= now:
                    return True
                flow.parked = True
                heapq.heappush(self._parked, (at, next(self._sequence), c, flows.popleft()))
            else:
                c.leave(flows)
        return False

    def _unpark(self, c: _Class[T], flow: _Flow[T]) -> None:
        """Returns a parked flow to the head of the round, with the rest of its quantum."""
        if flow.parked:
            flow.parked = False
            c.round.appendleft(flow)

    def ready_at(self, now: float) -> float:
        """Returns when the next tenant that its cap holds back may be served; infinity if there is none."""
        while self._parked and not self._parked[0][3].parked:
            heapq.heappop(self._parked)
        return max(now, self._parked[0][0]) if self._parked else math.inf

    def discard(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Removes and returns all unwanted items. Costs time proportional to the number of items."""
        gone: list[T] = []
        for c in self._classes:
            for flow in [f for f in c.flows.values() if f.items]:
                kept = deque(entry for entry in flow.items if not unwanted(entry[1]))
                if len(kept) == len(flow.items):
                    continue
                gone += [item for _, item in flow.items if unwanted(item)]
                left = sum(cost for cost, _ in kept)
                c.waiting -= flow.waiting - left
                flow.items, flow.waiting = kept, left
                self._unpark(c, flow)
                if not kept:
                    c.deactivate(flow)
        return gone

    # -- amounts

    def weight(self, tenant: int) -> float:
        """Returns a tenant's weight."""
        known = self._tenants.get(tenant)
        return known.weight if known is not None else 1.0

    def waiting(self, kind: int, tenant: int | None = None) -> int:
        """Returns the cost queued in a class, of one tenant or of all."""
        c = self._classes[kind]
        if tenant is None:
            return c.waiting
        flow = c.flows.get(tenant)
        return flow.waiting if flow is not None else 0

    def active(self, kind: int) -> float:
        """Returns the sum of the weights of the tenants with items in a class."""
        return self._classes[kind].active
