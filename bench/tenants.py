"""tenants: many tenants of one `Placement`, in virtual time, without bytes.

`tenants/fair`: a thousand tenants with equal quotas, skewed request rates, and more demand than capacity. At
every event, no tenant may be above its limit, or below its floor because of others. The figure is Jain's
index of held extents divided by the weighted max-min share of each tenant's demand. `tenants/admission`: CPU
time of a reservation of 8 blocks and its commit among a thousand tenants, divided by the same with one
tenant.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness import Bench, NotDone, Result, Target, expect
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.quotas import Quota
from kvstore.core.placement import Placement
from kvstore.core.queues.device_queue import TierSpec
from kvstore.types import Tier


@dataclass(frozen=True, slots=True)
class Sizes:
    """Virtual seconds before shares are measured, and during the measurement."""

    tenants: int = 1000
    settle_s: float = 110.0
    measure_s: float = 10.0
    look_every: int = 500


SMOKE = Sizes(10, 0.2, 0.2, 50)
BLOCK_BYTES = 64 << 10
CHAIN = 8
_COPY_S = 0.002
_RENEWAL_S = 0.005


def run(bench: Bench) -> Iterator[Result]:
    """Yields two rows."""
    z = bench.pick(Sizes(), SMOKE)
    yield _fair(bench, z)
    yield _admission(bench, z)


# -- fairness


REQUEST_S = 0.002
"""Virtual time between two requests."""
FLOOR, LIMIT, EACH, CHAINS = (1, 1), (6, 6), (3, 4), 12
"""Extents (one chain each) in DRAM and on NVMe per tenant, and demand of each tenant in chains."""


def _fair(bench: Bench, z: Sizes) -> Result:
    rng = np.random.default_rng(1)
    weights = 1.0 / np.arange(1, z.tenants + 1)
    quotas = [(FLOOR[tier] * _extent(tier, CHAIN), LIMIT[tier] * _extent(tier, CHAIN)) for tier in (0, 1)]
    crowd = Crowd(z.tenants, [n * z.tenants for n in EACH], CHAIN, quotas)
    crowd.watch = Watch(crowd)
    chains = [[os.urandom(32 * CHAIN) for _ in range(CHAINS)] for _ in range(z.tenants)]
    asked = np.zeros((z.tenants, CHAINS), np.bool_)
    requests = int((z.settle_s + z.measure_s) / REQUEST_S)
    who = rng.choice(z.tenants, requests, p=weights / weights.sum())
    what = rng.integers(0, CHAINS, requests)
    indexes: list[float] = []
    for n, (tenant, chain) in enumerate(zip(who.tolist(), what.tolist(), strict=True)):
        crowd.pass_time(REQUEST_S)
        asked[tenant, chain] = True
        crowd.serve(tenant, Keys(chains[tenant][chain], 32))
        if n % z.look_every == 0:
            bench.doing("sharing", n / requests)
            if crowd.now > z.settle_s:
                wanted = asked.sum(axis=1)
                indexes.append(min(crowd.jain(tier, wanted, FLOOR[tier], LIMIT[tier]) for tier in (0, 1)))
    watch = crowd.watch
    expect(watch.violations, 0, "violated floors and limits")
    if not crowd.found or not crowd.stored:
        raise NotDone(f"{crowd.found} blocks found, {crowd.stored} stored")
    return Result(
        "tenants/fair",
        float(np.mean(indexes)),
        "Jain's index",
        1.0,
        float(np.mean(indexes)),
        watch.events,
        target=Target(">=", 0.95, "value"),
        extra={
            "events": watch.events,
            "violations": watch.violations,
            "hit_ratio": crowd.found / (CHAIN * requests),
            "moved_extents": crowd.placement.view.counters["renewed_extents"],
            "virtual_s": crowd.now,
        },
    )


class Watch:
    """Checks floors and limits of all tenants after every event."""

    def __init__(self, crowd: Crowd) -> None:
        self._holdings = [t.extents.holdings for t in crowd.placement.residency.tiers]
        self._before = [h.extents.copy() for h in self._holdings]
        self.events = self.violations = 0

    def look(self) -> None:
        """Checks the state after an event."""
        self.events += 1
        for i, holdings in enumerate(self._holdings):
            over = holdings.used > holdings.limit
            below = holdings.extents < np.minimum(self._before[i], holdings.floor)
            self.violations += int(over.sum() + below.sum())
            self._before[i][:] = holdings.extents


# -- admission


SLOTS, HELD = 256, (1, 1)
"""Slots per extent, and extents per tenant in DRAM and on NVMe."""
FILL, FILL_CHAIN = 1.5, 128
"""Factor of blocks put per held slot during filling; blocks per measured reservation."""
SAMPLE = 64


def _admission(bench: Bench, z: Sizes) -> Result:
    bench.doing("filling")
    many, one = _full(z.tenants, z.tenants), _full(1, z.tenants)
    rng = np.random.default_rng(2)

    def timed(crowd: Crowd) -> float:
        crowd.admission_s = 0.0
        for tenant in rng.integers(0, crowd.tenants, SAMPLE).tolist():
            expect(crowd.put(tenant, Keys(os.urandom(32 * CHAIN), 32), b""), CHAIN, "blocks stored")
            crowd.pass_time(REQUEST_S)
        return crowd.admission_s / SAMPLE * 1e6

    rounds = bench.interleave("admission", (lambda _: timed(many), lambda _: timed(one)))
    return rounds.result("tenants/admission", "us", Target("<=", 1.3))


def _full(tenants: int, extents: int) -> Crowd:
    """Returns a node with all extents full and evenly distributed."""
    quotas = [(n * extents // tenants * _extent(t, SLOTS), 1 << 62) for t, n in enumerate(HELD)]
    crowd = Crowd(tenants, [n * extents for n in HELD], SLOTS, quotas)
    for n in range(int(FILL * extents * SLOTS) // FILL_CHAIN):
        crowd.put(n % tenants, Keys(os.urandom(32 * FILL_CHAIN), 32), b"")
        crowd.pass_time(REQUEST_S)
    return crowd


# -- the node


class Crowd:
    """A node with one namespace per tenant. Copies and new extents take virtual time."""

    def __init__(self, tenants: int, extents: list[int], slots: int, quotas: list[tuple[int, int]]) -> None:
        specs = [
            TierSpec(Tier.DRAM, extents[0] * _extent(0, slots), _extent(0, slots), True),
            TierSpec(Tier.NVME, extents[1] * _extent(1, slots), _extent(1, slots), False),
        ]
        self.tenants = tenants
        self.placement = Placement(specs, max_blocks=4 * slots * sum(extents), seed=1)
        self.now = 0.0
        self.watch: Watch | None = None
        self.admission_s = 0.0
        self.found = self.stored = 0
        self._request = 0
        self._sequence = 0
        self._coming: list[tuple[float, int, Any]] = []
        self._extents = extents[0]
        for tenant in range(tenants):
            self._send(ev.SetTenant(tenant, tuple(Quota(floor, limit) for floor, limit in quotas)))
            self._ask(ev.OpenNamespace(0, tenant, BLOCK_BYTES, tenant, tenant))
        for tier, n in enumerate(extents):
            for extent in range(n):
                self._send(ev.ExtentReady(tier, extent))
            self._send(ev.ExtentsEnd(tier))

    def serve(self, tenant: int, keys: Keys) -> None:
        """Gets the stored prefix of a chain without waiting, and puts the rest."""
        grant = self._ask(ev.Acquire(0, 1, tenant, keys, self.now, tenant))
        found = len(grant.where)
        self.found += found
        if found < keys.n:
            self.put(tenant, keys.take(found, keys.n), keys[found - 1] if found else b"")
        if grant.lease:
            self._send(ev.Release(1, grant.lease))

    def put(self, tenant: int, keys: Keys, parent: bytes) -> int:
        """Reserves and commits. Returns the number of stored blocks."""
        start = time.perf_counter()
        room = self._ask(ev.Reserve(0, 1, tenant, keys, parent, self.now))
        stored = 0
        if isinstance(room, ac.Reserved) and room.lease:
            n = len(room.where)
            commit = ev.Commit(0, 1, room.lease, np.zeros(n, np.uint64), np.ones(n, np.bool_))
            stored = int(self._ask(commit).value)
        self.admission_s += time.perf_counter() - start
        self.stored += stored
        return stored

    def pass_time(self, seconds: float) -> None:
        """Advances the time and handles all due events in order."""
        until = self.now + seconds
        while True:
            wake = self.placement.next_wakeup()
            tick_at = until if wake is None else wake
            if self._coming and self._coming[0][0] <= min(until, tick_at):
                when, _, event = heapq.heappop(self._coming)
            elif tick_at < until:
                when, event = tick_at, ev.Tick()
            else:
                break
            self.now = max(self.now, when)
            self._send(event)
        self.now = until

    def jain(self, tier: int, wanted: npt.NDArray[np.int64], floor: int, limit: int) -> float:
        """Returns Jain's index of held extents divided by due extents."""
        held = self.placement.residency.tiers[tier].extents.holdings.extents[: self.tenants]
        due = _max_min(np.clip(wanted, floor, limit), floor, int(held.sum()))
        x = held / due
        return float(x.sum() ** 2 / (len(x) * (x * x).sum()))

    def _ask(self, event: Any) -> Any:
        self._request += 1
        event.request = self._request
        return self._send(event)

    def _send(self, event: Any) -> Any:
        answer = None
        todo = deque([event])
        while todo:
            for action in self.placement.handle(todo.popleft(), self.now):
                if isinstance(action, ac.Copy):
                    results = np.zeros(len(action.identity), np.uint8)
                    self._later(_COPY_S, ev.CopyDone(action.transfer, results))
                elif isinstance(action, ac.RenewExtent):
                    new = action.extent
                    if action.tier == 0:
                        new = self._extents
                        self._extents += 1
                    self._later(_RENEWAL_S, ev.ExtentReady(action.tier, new, replaces=action.extent))
                elif getattr(action, "request", 0):
                    answer = action
            if self.watch is not None:
                self.watch.look()
        return answer

    def _later(self, seconds: float, event: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._coming, (self.now + seconds, self._sequence, event))


def _extent(tier: int, slots: int) -> int:
    """Returns the bytes of an extent; in DRAM with its header table."""
    return (slots + (tier == 0)) * BLOCK_BYTES


def _max_min(wanted: npt.NDArray[np.int64], floor: int, total: int) -> npt.NDArray[np.float64]:
    """Returns max-min shares of a total: at most the demand, at least the floor, otherwise equal."""
    low, high = float(floor), float(wanted.max())
    for _ in range(50):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(wanted, level).sum() < total else (low, level)
    due: npt.NDArray[np.float64] = np.maximum(np.minimum(wanted, high), floor)
    return due
