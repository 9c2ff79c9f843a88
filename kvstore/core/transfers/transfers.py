"""Starts copies between tiers: promotions, writes to lower tiers, and copies within DRAM.

Not covered: the queue that the copies wait in, and their results; see `copy_queue`.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.columns import distinct
from kvstore.core.blocks.block_table import LIVE, Rows
from kvstore.core.jobs import Job
from kvstore.core.queues.device_queue import DEMAND
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.namespace import Namespace
from kvstore.core.residency.residency import Residency
from kvstore.core.transfers.copy_queue import CopyQueue, write_chunk
from kvstore.core.transfers.eviction import Eviction
from kvstore.core.transfers.worth import blocks_worth_loading

_TENANTS_AT_ONCE = 16
_AT_ONCE = 32


class Transfers(Job):
    """Starts the copies of one placement.

    `backlog` has the rows that wait to be written to a lower tier, by tenant. As a job, starts the writes of
    many blocks after the answer to their commit.
    """

    def __init__(self, residency: Residency, copies: CopyQueue, eviction: Eviction) -> None:
        self._r = residency
        self._copies = copies
        self._eviction = eviction
        self.backlog: dict[int, deque[Rows]] = {}
        self._fresh = 0

    def promote(
        self,
        namespace: Namespace,
        rows: Rows,
        asker: int,
        kind: int = DEMAND,
        patient: bool = False,
        target: int = 0,
        whole: bool = False,
    ) -> int:
        """Queues copies of rows of a namespace into the memory tier `target`, each from the fastest tier.

        Returns how many leading rows had room in the tier and in the asker's queues. `whole`: all rows, or
        none.
        """
        r, pool, least = self._r, namespace.pools[target], len(rows) if whole else 1
        if len(r.tiers) == 1:
            return 0
        source = self.source(rows, target)
        n = self._copies.room(namespace, source, asker, kind, target)
        rows, source = rows[:n], source[:n]
        if n < least:
            return 0
        others = [(t, r.blocks.slot[i, rows].astype(np.int64)) for i, t in enumerate(r.tiers) if i != target]
        # The sources of the promotion must not be evicted while room is made.
        for tier, slots in others:
            tier.slots.hold(slots[slots >= 0])
        n = self._eviction.make_room(target, pool, len(rows), patient)
        n = n if n >= least else 0
        for number in distinct(source[:n]):
            some = rows[:n][source[:n] == number]
            slots = r.tiers[target].slots.take(pool, len(some))
            self._copies.put(asker, kind, number, target, namespace, some, slots)
        for tier, slots in others:
            tier.slots.release(slots[slots >= 0])
        return n

    def source(self, rows: Rows, target: int) -> Rows:
        """Returns the tier from which each row would be promoted: readable tiers, memory first."""
        r = self._r
        order = np.array([i for i in (*r.topology.memory, *r.topology.persistent) if i != target])
        there = r.blocks.slot[:, rows][order] >= 0
        there[[i != 0 and not r.tiers[i].device.readable for i in order.tolist()]] = False
        source: Rows = order[np.argmax(there, axis=0)]
        return source

    def queue_writes(self, rows: Rows) -> None:
        """Adds rows to the backlog of writes to a persistent tier."""
        if self._r.topology.persistent:
            self._fresh += len(rows)
            for namespace, some in self._r.namespaces.split(rows):
                self.backlog.setdefault(namespace.tenant, deque()).append(some)

    def pump_soon(self) -> None:
        """Starts writes from the backlog: at once, or in the next step if this event queued many blocks."""
        if self._fresh > _AT_ONCE:
            self._fresh, self._next_step = 0, self._r.now
        else:
            self.pump()

    def _step(self, now: float) -> None:
        self.pump()

    def pump(self) -> None:
        """Starts writes from the backlog while fewer than the bound are in flight, tenant by tenant."""
        self._fresh, self._next_step = 0, math.inf
        for tenant in list(islice(self.backlog, _TENANTS_AT_ONCE)):
            waiting = self.backlog.pop(tenant)
            while waiting and self._copies.room_for_writes(0, tenant):
                if not self._write_some(waiting):
                    break
            if waiting:
                # To the end of the order of tenants.
                self.backlog[tenant] = waiting

    def _write_some(self, waiting: deque[Rows]) -> bool:
        """Starts one write of a tenant's backlog. Returns False if none can start for now."""
        r, blocks, tiers = self._r, self._r.blocks, self._r.tiers
        rows = waiting.popleft()
        rows = rows[(blocks.state[rows] == LIVE) & (blocks.copy_marks[rows] == 0) & r.alone_in_memory(rows)]
        if not len(rows):
            return True
        # A row may belong to another namespace by now.
        (namespace, alike), *others = r.namespaces.split(rows)
        waiting.extendleft(some for _, some in others)
        n = write_chunk(namespace.pools[r.topology.persistent[0]].slot_bytes)
        if len(alike) > n:
            waiting.appendleft(alike[n:])
        some = self._worth_writing(namespace, alike[:n])
        rest = some[~self._write_from_memory(some)]
        if not len(rest):
            return True
        takers = r.topology.takers(0)
        growing = any(tiers[t].growing for t in takers)
        if takers and (growing or self._r.copying[namespace.tenant] or self._eviction.rebalancing.under_way):
            waiting.appendleft(rest)
            return False
        r.counters["unwritten_blocks"] += len(rest)
        r.decisions.record(DecisionKind.UNWRITTEN, r.topology.persistent[0], rest, r.now)
        return True

    def _write_from_memory(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Queues writes of rows that only memory tiers have. False where the bounds allow none."""
        started = np.zeros(len(rows), np.bool_)
        for tier in self._r.topology.memory:
            here = np.flatnonzero(
                (self._r.blocks.slot[tier, rows] >= 0) & (self._r.blocks.copy_marks[rows] == 0)
            )
            if len(here):
                started[here] = self._eviction.write_down(tier, rows[here])
        return started

    def _worth_writing(self, namespace: Namespace, rows: Rows) -> Rows:
        """Returns the rows of a chain up to the last one that the next tier admits."""
        r = self._r
        tier = r.topology.gate(0)
        admitted = np.flatnonzero(r.tiers[tier].admission.admits(rows, namespace.tenant, r.now))
        n = int(admitted[-1]) + 1 if len(admitted) else 0
        r.counters["refused_blocks"] += len(rows) - n
        r.decisions.record(DecisionKind.REFUSED, tier, rows[n:], r.now, namespace.tenant)
        return rows[:n]

    def relocate(self, namespace: Namespace, rows: Rows) -> int:
        """Copies rows within DRAM to the current pool of their namespace. Returns how many have room."""
        pool = namespace.pools[0]
        table = self._r.tiers[0].slots
        if not len(rows):
            return 0
        held = self._r.blocks.slot[0, rows].astype(np.int64)
        table.hold(held)
        n = self._eviction.make_room(0, pool, len(rows))
        if n:
            self._copies.put(pool.tenant, DEMAND, 0, 0, namespace, rows[:n], table.take(pool, n))
        table.release(held)
        return n

    def worth(
        self,
        namespace: Namespace,
        rows: Rows,
        asker: int,
        ends: float,
        recompute_s: float,
        target: int = 0,
        step: int = 1,
        have: int = 0,
    ) -> int:
        """Returns how many leading rows to load: by `ends`, and as far as this saves the most time.

        The load time is estimated from the measured bandwidth and the queues of the devices. Each row stands
        for `step` blocks. The first `have` rows are not loaded.
        """
        r = self._r
        absent = (r.blocks.slot[target, rows] < 0) & ~self._copies.coming(target, rows)
        absent[:have] = False
        if not absent.any() or (ends == math.inf and not recompute_s):
            return len(rows)
        first = int(absent.argmax())
        absent = absent[first:]
        source, load_s = self.source(rows[first:], target), np.zeros(len(absent))
        for number in distinct(source[absent]):
            # Devices are read in parallel: the slowest one determines the load time of a chain.
            device = self._copies.device(number, target)
            per_row_s = step * namespace.pools[target].slot_bytes / device.share_of(r.now, asker)
            to_load = np.cumsum(absent & (source == number))
            wait_s = np.where(to_load > 0, device.wait_s(r.now, asker, 0), 0.0)
            load_s = np.maximum(load_s, wait_s + to_load * per_row_s)
        n = first + blocks_worth_loading(load_s, step * recompute_s, ends - r.now)
        r.counters["not_worth_loading_blocks"] += step * (len(rows) - n)
        return n
