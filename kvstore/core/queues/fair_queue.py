"""Who goes next: fair turns of tenants within a class of work, and of the classes among each other.

Tenants share a class by deficit round robin, weighted (Shreedhar and Varghese, "Efficient Fair Queuing using
Deficit Round Robin", 1995). One that comes with an empty queue goes before the round, as in FQ-CoDel (RFC
8290, section 4.2), until it has made up for what it left to the others lately: so bursts of a tenant that
uses no more than its share hardly wait. Classes share by start-time fair queuing (Goyal, Vin and Cheng,
1996), which is exact to one item and looks at all of them: there are few.

With q = `quantum` x weight, s = `saved` x weight, c = the cost of the dearest item, while something is always
queued:

    shares      what two tenants of the round get, by weight, differs by at most quantum + c/weight + c/weight
    sparse      a newcomer waits for no tenant of the round, only for q + c of every other newcomer at a time
    round       for its next q, anyone waits at most for 2 (q + c) + s + c of every other tenant
    classes     what two classes get, by weight, differs by at most c/weight + c/weight
    cap         over any time t a tenant gets at most rate x t + max(burst, c)

Every step is O(1) amortised while q >= c (else O(c / q)), and O(log n) for tenants held back by a cap.
Not covered: time. `now` is the caller's, in seconds, and never goes back.
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
    """`full_at`: when the bucket of its cap is full again."""

    weight: float = 1.0
    rate: float = 0.0
    burst: float = 0.0
    full_at: float = -math.inf

    def may_go_at(self, cost: int) -> float:
        """When so much is in the bucket; what is dearer than the bucket waits until it is full."""
        if not self.rate:
            return -math.inf
        return self.full_at - max(self.burst - cost, 0.0) / self.rate

    def spend(self, cost: int, now: float) -> None:
        if self.rate:
            self.full_at = max(self.full_at, now) + cost / self.rate


@dataclass(slots=True)
class _Flow(Generic[T]):
    """What a tenant has queued in a class. It exists while it is in a list of its class, or parked.

    `got`: what it has got, by weight, on the scale of the class's `level`; kept while it is fresh.
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
    """`fresh` flows go before those of the `round`. `start` is its virtual time, in cost by weight.

    `level` is what tenants of the round have got, by weight. `gone` says the same of those that left lately;
    who is not there has all that can be saved. `backlog` counts flows that have something queued, `active` is
    the sum of their weights.
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

    def filled(self, flow: _Flow[T]) -> None:
        self.backlog += 1
        self.active += flow.tenant.weight

    def emptied(self, flow: _Flow[T]) -> None:
        self.backlog -= 1
        self.active -= flow.tenant.weight
        if not self.backlog:
            self.active = 0.0
            for flows in (self.fresh, self.round):
                while flows:
                    self.leave(flows)

    def come(self, number: int, tenant: _Tenant, quantum: float) -> _Flow[T]:
        """A tenant has something queued that had nothing in any list."""
        got = max(self.gone.pop(number, -math.inf), self.level - self.saved)
        flow = self.flows[number] = _Flow(number, tenant, quantum, got)
        (self.fresh if got < self.level else self.round).append(flow)
        return flow

    def leave(self, flows: deque[_Flow[T]]) -> None:
        """The flow at the head of a list has nothing queued any more."""
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
        """A tenant of weight 1 gets `quantum` a round, and may have `limit` queued in each class.

        Of what it leaves to others while it has nothing queued, it gets up to `saved` when it comes back.
        """
        self._quantum = quantum
        self._limit = limit
        self._classes: list[_Class[T]] = [_Class(kind, w, saved) for kind, w in enumerate(class_weights)]
        self._tenants: dict[int, _Tenant] = {}
        self._parked: list[tuple[float, int, _Class[T], _Flow[T]]] = []
        self._sequence = itertools.count()

    def set(self, tenant: int, weight: float, rate: float = 0.0, burst: float = 0.0) -> None:
        """From now on: weight (above 0), at most `rate` cost units/s (0: no cap) with bursts of `burst`."""
        full_at = self._tenants[tenant].full_at if tenant in self._tenants else -math.inf
        self._tenants[tenant] = _Tenant(weight, rate, burst, full_at)
        self._refer(tenant)

    def forget(self, tenant: int) -> None:
        """It has weight 1 and no cap again. What it has queued stays."""
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
        """Queues an item. False: its tenant has something queued in this class, and this would exceed it."""
        c = self._classes[kind]
        flow = c.flows.get(tenant)
        if flow is None:
            who = self._tenants.get(tenant) or _Tenant()
            flow = c.come(tenant, who, self._quantum * who.weight)
        elif flow.items and flow.waiting + cost > self._limit:
            return False
        if not flow.items:
            c.filled(flow)
        flow.items.append((cost, item))
        flow.waiting += cost
        c.waiting += cost
        return True

    # -- out

    def take(self, now: float, kinds: Sequence[int] | None = None) -> tuple[int, int, int, T] | None:
        """(tenant, kind, cost, item) of who goes next among `kinds` (None: all); None if nobody may go now.

        A class that is left out meanwhile, or whose tenants are all held back, is not made up to for it.
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
            chosen.emptied(flow)
        return flow.number, chosen.kind, cost, item

    def _turn(self, c: _Class[T], now: float) -> bool:
        """Whether somebody of a class may go now; then it is at the head of `fresh`, or else of `round`."""
        while flows := c.fresh or c.round:
            flow = flows[0]
            if flows is c.fresh and flow.items and flow.got >= c.level:
                c.round.append(flows.popleft())
            elif flow.deficit <= 0 and (flow.items or flows is c.round):
                # Who was dear pays before it leaves the round.
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
        """A flow goes on where it was held back: with what is left of its quantum, at the head."""
        if flow.parked:
            flow.parked = False
            c.round.appendleft(flow)

    def ready_at(self, now: float) -> float:
        """From when on a tenant held back by its cap may go; infinity if there is none."""
        while self._parked and not self._parked[0][3].parked:
            heapq.heappop(self._parked)
        return max(now, self._parked[0][0]) if self._parked else math.inf

    def discard(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Takes out all such items, whoever's they are. Looks at every item."""
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
                    c.emptied(flow)
        return gone

    # -- how much

    def weight(self, tenant: int) -> float:
        """What a tenant's weight is."""
        known = self._tenants.get(tenant)
        return known.weight if known is not None else 1.0

    def waiting(self, kind: int, tenant: int | None = None) -> int:
        """Cost queued in a class, by one tenant or all."""
        c = self._classes[kind]
        if tenant is None:
            return c.waiting
        flow = c.flows.get(tenant)
        return flow.waiting if flow is not None else 0

    def active(self, kind: int) -> float:
        """Sum of the weights of the tenants that have something queued in a class."""
        return self._classes[kind].active
