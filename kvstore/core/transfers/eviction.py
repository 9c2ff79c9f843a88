"""Eviction: frees slots and rows by dropping blocks in the policy's order, a tenant's own blocks first.

A copy that another tier has too is dropped. The only copy of a block is demoted if a lower tier takes it,
else dropped if the block has no children. Blocks that are in use or pinned stay.

Not covered: the order (`policy`), and which extent moves to which tenant (`rebalancing`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.jobs import Job
from kvstore.core.queues.device_queue import WRITE_BACK
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.residency import DEMOTE, Residency
from kvstore.core.transfers.copy_queue import CopyQueue, write_chunk
from kvstore.core.transfers.rebalancing import Emptying, Rebalancing

_SCAN_MIN = 64
_MORE_WRITES = 2
"""Writes by eviction that may be in flight in addition to those of the backlog."""
_BUSY_COST = 16
"""Blocks in use that are passed over for the cost of one eviction."""

_AHEAD, _AHEAD_OF = 128, 256
_EMPTIED_AT_ONCE = 512
_GIVE_UP_AFTER_S = 10.0
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


@dataclass(slots=True)
class _Stuck:
    """A lower tier that could free nothing for a pool above it: all of its blocks are parents, or in use.

    `looked_at`: about how many of its blocks were looked at in vain. `asked`: when it was asked last.
    `until`: it takes nothing before.
    """

    looked_at: int = 0
    asked: float = -math.inf
    until: float = -math.inf


class Eviction(Job):
    """The eviction of blocks from the tiers of one residency.

    `shrinking` has the (tier, tenant) pairs whose limit was lowered, until they keep it. `trying_again`: the
    current request has started demotions before, and waits for them.
    """

    def __init__(self, residency: Residency, copies: CopyQueue, rebalancing: Rebalancing) -> None:
        self._r = residency
        self._copies = copies
        self.rebalancing = rebalancing
        self._last_step: list[int] = []
        self._stuck: dict[tuple[int, SlotPool], _Stuck] = {}
        self.shrinking: set[tuple[int, int]] = set()
        self.trying_again = False

    def make_room(
        self, tier: int, pool: SlotPool, n: int, patient: bool = False, below: float = math.inf
    ) -> int:
        """Frees up to n slots of a pool. Returns how many of the n its tenant may take.

        `patient`: evicts nothing while more extents are being made. `below`: drops no block that earns this
        or more; see `Policy.coldest`.
        """
        r = self._r
        r.settle()
        state, size = r.tiers[tier], pool.slot_bytes
        slots, holdings = state.slots, state.extents.holdings
        holdings.mark_active(pool.tenant, r.now)
        while slots.free(pool) < n and slots.free(pool) * size < holdings.room(pool.tenant):
            if not self.rebalancing.assign(tier, pool):
                if not state.growing:
                    self._take_over(tier, pool)
                break
        short = n - slots.free(pool) - (self._copies.demoting(tier, pool) if self.trying_again else 0)
        if short > 0 and pool in slots.classes and not (patient and state.growing):
            self._evict(tier, pool, short + _ahead(slots.classes[pool].total), below)
        beyond = n * size - holdings.room(pool.tenant)
        if beyond > 0:
            self._evict_bytes(tier, pool.tenant, beyond, below)
        return min(n, slots.free(pool), holdings.room(pool.tenant) // size)

    def has_room(self, tier: int, pool: SlotPool, n: int) -> bool:
        """Returns whether n slots of a pool are free, and its tenant may take them."""
        state = self._r.tiers[tier]
        room = state.extents.holdings.room(pool.tenant)
        return n <= state.slots.free(pool) and n * pool.slot_bytes <= room

    def weighs(self, tier: int, pool: SlotPool) -> bool:
        """Returns whether new blocks must earn more than those they replace. Not if those can be demoted."""
        return self._r.topology.policy(tier, pool).weighs and not self._lower_tier_takes(tier, pool)

    def has_idle(self, tier: int, pool: SlotPool) -> bool:
        """Returns whether the coldest blocks of a pool include one that is neither in use nor pinned."""
        r = self._r
        return bool(r.idle(tier, r.topology.policy(tier, pool).coldest(_SCAN_MIN, r.now)).any())

    def make_rows(self, n: int, tenant: int) -> None:
        """Frees up to n rows and some ahead: drops blocks from the lowest tier up, the tenant's own first."""
        blocks, topology = self._r.blocks, self._r.topology
        if n <= blocks.capacity - blocks.used:
            return
        if self._r.chains.childless:
            self._r.chains.free_childless()
        for own in (True, False):
            for tier in (*reversed(topology.persistent), *topology.memory):
                state = self._r.tiers[tier]
                pools = [p for p in state.policies if (p.tenant == tenant) is own]
                if not own:
                    pools.sort(key=lambda p: -len(topology.policy(tier, p)))
                for pool in pools:
                    short = n - (blocks.capacity - blocks.used)
                    if short <= 0:
                        return
                    if own:
                        short += _ahead(blocks.capacity)
                    else:
                        short = min(short, state.extents.holdings.above_floor(pool.tenant) // pool.slot_bytes)
                    self._evict(tier, pool, short)

    # -- one pool

    def _evict(self, tier: int, pool: SlotPool, n: int, below: float = math.inf) -> None:
        r, policy = self._r, self._r.topology.policy(tier, pool)
        budget, look = 4 * n + _SCAN_MIN, max(n, _SCAN_MIN)
        while n > 0 and budget > 0:
            rows = policy.coldest(min(look, budget), r.now, below)
            if not len(rows):
                return
            idle = r.idle(tier, rows)
            busy = rows[~idle]
            only = r.copies(rows, r.ending and tier in r.topology.persistent) == 1
            if not self._lower_tier_takes(tier, pool):
                # Nothing can be demoted, so the order alone decides, whether or not another tier has a copy.
                idle &= np.cumsum(idle) <= n
            spare = rows[idle & ~only][:n]
            self._drop(tier, pool, spare, DecisionKind.EVICTED)
            r.counters["evicted_copies"] += len(spare)
            n -= len(spare)
            writing = self._copies.written_from(tier, busy)[: max(n, 0)]
            r.blocks.copy_marks[writing] |= DEMOTE
            policy.defer(busy)
            n -= len(writing)
            last = rows[idle & only][: max(n, 0)]
            # Long leases may hold all of the coldest blocks: looking past them is cheap.
            look = 2 * look if len(busy) == len(rows) else max(n, _SCAN_MIN)
            budget -= max(1, len(busy) // _BUSY_COST + len(spare) + len(last))
            n -= self._evict_last_copies(tier, pool, last)

    def _evict_last_copies(self, tier: int, pool: SlotPool, rows: Rows) -> int:
        """Demotes only copies, or drops leaves if no lower tier has room. Returns the slots freed."""
        refused = self._drop_refused(tier, pool, rows)
        n = int(refused.sum())
        rows = rows[~refused]
        if not len(rows):
            return n
        leaving = self._demote(tier, rows)
        n += int(leaving.sum())
        waits = self._lower_tier_takes(tier, pool) and self._can_wait(pool, bool(leaving.any()))
        if not waits:
            # Waiting would not help: all blocks of the lower tier may be parents of these.
            leaf = self._leaf_first(rows)
            self._drop(tier, pool, rows[leaf], DecisionKind.DROPPED)
            n, rows = n + int(leaf.sum()), rows[~leaf]
        self._r.topology.policy(tier, pool).defer(rows, parents=not waits)
        return n

    def _drop(self, tier: int, pool: SlotPool, rows: Rows, why: DecisionKind) -> None:
        """Drops the copies of rows in a tier, for others."""
        r = self._r
        r.decisions.record(why, tier, rows, r.now, pool.tenant)
        r.tiers[tier].admission.replaced(rows, pool.tenant, r.now)
        r.give_up(tier, rows)

    def _drop_refused(self, tier: int, pool: SlotPool, rows: Rows) -> npt.NDArray[np.bool_]:
        """Drops leaves that admission refuses. Returns which rows were dropped.

        Parents are demoted with their children, which would be lost without them, but only within the budget.
        """
        gone = np.zeros(len(rows), np.bool_)
        if len(rows) and self._r.topology.below[tier]:
            gate = self._r.topology.gate(tier)
            admission = self._r.tiers[gate].admission
            refused = np.flatnonzero(~admission.admits(rows, pool.tenant, self._r.now))
            gone[refused if admission.spent else refused[self._leaf_first(rows[refused])]] = True
            self._r.counters["refused_blocks"] += int(gone.sum())
            self._r.decisions.record(DecisionKind.REFUSED, gate, rows[gone], self._r.now, pool.tenant)
            self._r.give_up(tier, rows[gone])
        return gone

    def _lower_tier_takes(self, tier: int, pool: SlotPool) -> bool:
        """Returns whether a lower tier takes blocks of this pool, now or later."""
        return any(self._takes(target, pool) for target in self._r.topology.below[tier])

    def _takes(self, target: int, pool: SlotPool) -> bool:
        state = self._r.tiers[target]
        extents, size = state.extents, pool.slot_bytes
        return (
            state.device.takes_writes
            and (state.growing or (bool(extents.ready) and extents.slots_in(size) > 0))
            and extents.holdings.limit_of(pool.tenant) >= size
            and not self._is_stuck(target, pool)
        )

    def _is_stuck(self, target: int, pool: SlotPool) -> bool:
        """Returns whether waiting for a lower tier would not help blocks of `pool`."""
        stuck = self._stuck.get((target, pool))
        return stuck is not None and self._r.now <= stuck.until

    def _may_ask(self, target: int, pool: SlotPool) -> bool:
        """Returns whether to look for room in a lower tier: not again in the step that found none."""
        stuck = self._stuck.get((target, pool))
        return stuck is None or self._r.now > max(stuck.asked, stuck.until)

    def _note_room(self, target: int, pool: SlotPool, lower: SlotPool, wanted: int, room: int) -> None:
        """Notes what a lower tier had for blocks of `pool`."""
        if room or self._r.tiers[target].growing or self.rebalancing.under_way:
            self._stuck.pop((target, pool), None)
            return
        stuck = self._stuck.setdefault((target, pool), _Stuck())
        stuck.asked = self._r.now
        if self._r.copying[pool.tenant]:
            return
        stuck.looked_at += 4 * wanted + _SCAN_MIN
        # Until it has looked at all of them, it goes on in the next step.
        all_seen = stuck.looked_at >= len(self._r.topology.policy(target, lower))
        stuck.until = self._r.now + (_NEXT_LOOK_S if all_seen else 0.0)

    def _can_wait(self, pool: SlotPool, started: bool) -> bool:
        """Returns whether copies of the same tenant are under way. Only these make room for it."""
        return started or self._r.copying[pool.tenant] > 0

    def _leaf_first(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which rows (coldest first) can be dropped in this order without leaving children."""
        children, parents = self._r.blocks.children[rows], self._r.blocks.parent[rows]
        if (children[:1] == 0).all() and (children[1:] == (parents[:-1] == rows[1:])).all():
            # Ends of chains, each behind the parts of its chain that go before it.
            return np.ones(len(rows), np.bool_)
        counts, above = children.tolist(), parents.tolist()
        dropped: dict[int, int] = {}
        leaf = np.zeros(len(rows), np.bool_)
        for i, row in enumerate(rows.tolist()):
            if counts[i] == dropped.get(row, 0):
                leaf[i] = True
                dropped[above[i]] = dropped.get(above[i], 0) + 1
        return leaf

    # -- copies to lower tiers

    def _demote(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Queues writes of rows to a lower tier, whose end drops the upper copies. False: none queued."""
        started = self.write_down(tier, rows)
        self._r.blocks.copy_marks[rows[started]] |= DEMOTE
        return started

    def write_down(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Queues copies of rows to the next tier, in order. False where the bounds allow none."""
        started = np.zeros(len(rows), np.bool_)
        for target in self._r.topology.takers(tier) if not self._r.tiers[tier].lost else ():
            left = np.flatnonzero(~started)
            if not len(left):
                break
            started[left] = self._write_to(tier, target, rows[left])
        return started

    def _write_to(self, tier: int, target: int, rows: Rows) -> npt.NDArray[np.bool_]:
        started, places = np.zeros(len(rows), np.bool_), np.arange(len(rows))
        for namespace, some in self._r.namespaces.split(rows):
            pool = namespace.pools[target]
            if len(some) < len(rows):
                places = np.flatnonzero(self._r.blocks.namespace[rows] == namespace.number)
            free = self._copies.room_for_writes(tier, pool.tenant, _MORE_WRITES)
            room = self._copies.device(tier, target).room(pool.tenant, WRITE_BACK) // pool.slot_bytes
            most = min(room, free * write_chunk(pool.slot_bytes))
            idle, upper = np.flatnonzero(self._r.blocks.copy_marks[some] == 0)[:most], namespace.pools[tier]
            if not len(idle) or not self._may_ask(target, upper):
                continue
            room = self.make_room(target, pool, len(idle), patient=True)
            self._note_room(target, upper, pool, len(idle), room)
            idle = idle[:room]
            if len(idle):
                todo = some[idle]
                slots = self._r.tiers[target].slots.take(pool, len(todo))
                self._copies.put(pool.tenant, WRITE_BACK, tier, target, namespace, todo, slots, writing=True)
                started[places[idle]] = True
        return started

    # -- limits of tenants

    def shrink(self, tier: int, tenant: int) -> None:
        """Begins to evict a tenant's blocks above its limit, in steps."""
        self.shrinking.add((tier, tenant))
        self._step_at(self._r.now + _NEXT_STEP_S)

    def _evict_bytes(self, tier: int, tenant: int, nbytes: int, below: float = math.inf) -> None:
        """Evicts a tenant's blocks of any size until these bytes are free, if possible."""
        state = self._r.tiers[tier]
        used = state.extents.holdings.used
        goal = int(used[tenant]) - nbytes
        for members in state.slots.classes.of_tenant(tenant):
            over = int(used[tenant]) - goal
            if over <= 0:
                return
            self._evict(tier, members.pool, -(-over // members.pool.slot_bytes), below)

    # -- extents

    def _take_over(self, tier: int, pool: SlotPool) -> None:
        """Empties some of an extent of another pool for one that has too few, if one should be moved."""
        if self.rebalancing.take_over(tier, pool):
            self._step_at(self._r.now + _NEXT_STEP_S)
        emptying = self.rebalancing.emptying.get(tier)
        if emptying is not None and emptying.taker == pool:
            self._empty(tier, emptying)

    def give_back(self, tier: int, tenant: int, used: bool = False) -> bool:
        """Begins to unassign an extent of a tenant. Returns whether there is one. `used`: even one in use."""
        if not self.rebalancing.give_back(tier, tenant, used):
            return False
        if tier in self.rebalancing.emptying:
            self._step_at(self._r.now + _NEXT_STEP_S)
            self._empty(tier, self.rebalancing.emptying[tier])
        return True

    def _empty(self, tier: int, emptying: Emptying) -> None:
        """Evicts up to 512 idle blocks of an extent. Hands the extent over once it is unused."""
        r = self._r
        slots = r.tiers[tier].slots
        pool, taker = slots.classes.of_extent(emptying.extent).pool, emptying.taker
        to_others = taker is None or taker.tenant != pool.tenant
        if to_others and r.tiers[tier].extents.holdings.is_at_floor(pool.tenant):
            # The floor was raised meanwhile.
            self.rebalancing.cancel(tier)
            return
        rows = slots.rows_of(emptying.extent)
        idle = rows[r.idle(tier, rows)][:_EMPTIED_AT_ONCE]
        only = r.copies(idle) == 1
        r.decisions.record(DecisionKind.EVICTED, tier, idle[~only], r.now, pool.tenant)
        r.give_up(tier, idle[~only])
        alone = idle[only]
        going = self._demote(tier, alone) if len(alone) else np.zeros(0, np.bool_)
        below = len(alone) and self._lower_tier_takes(tier, pool)
        if not (below and self._can_wait(pool, bool(going.any()))):
            # Without room below, waiting would not help: all blocks there may be parents of these.
            r.decisions.record(DecisionKind.DROPPED, tier, alone[~going], r.now, pool.tenant)
            r.give_up(tier, alone[~going])
        if not slots.is_used(emptying.extent):
            self.rebalancing.finish(tier)

    # -- steps

    def _step(self, now: float) -> None:
        for tier, tenant in list(self.shrinking):
            extents = self._r.tiers[tier].extents
            holdings = extents.holdings
            over = holdings.over(tenant)
            if over:
                self._evict_bytes(tier, tenant, min(over, _EMPTIED_AT_ONCE * 4096))
            elif holdings.extents[tenant] > -(-int(holdings.limit[tenant]) // holdings.extent_bytes):
                if not extents.renewing:
                    self.give_back(tier, tenant)
            else:
                self.shrinking.discard((tier, tenant))
        for tier, emptying in list(self.rebalancing.emptying.items()):
            if now - emptying.since > _GIVE_UP_AFTER_S:
                self.rebalancing.cancel(tier)
            else:
                self._empty(tier, emptying)
        self._next_step = math.inf
        if self.rebalancing.emptying or self.shrinking:
            # Without progress, it waits for others, and the next step is later.
            done = [int(t.extents.holdings.used.sum()) for t in self._r.tiers]
            done += [int(t.extents.holdings.extents.sum()) for t in self._r.tiers]
            self._step_at(now + (_NEXT_LOOK_S if done == self._last_step else _NEXT_STEP_S))
            self._last_step = done

    def _step_at(self, when: float) -> None:
        self._next_step = min(self._next_step, when)


def _ahead(room: int) -> int:
    """Returns how many more blocks than needed are evicted of so many: evicting one by one is slow."""
    return min(_AHEAD, room // _AHEAD_OF)
