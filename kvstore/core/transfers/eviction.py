"""Making room: a tenant's own blocks go, in the policy's order; extents move to tenants that have too few.

The verdicts, in this order: a copy that another tier holds too is simply given up; the only copy goes down
where a lower tier takes it; else it is dropped if it is a leaf. A block in use, pinned or with children
stays. Extents move slowly, one at a time a tier: each is emptied in small steps first, and made anew where it
changes hands.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import FormatExtent, RemoveExtent, RenewExtent
from kvstore.core.blocks.block_table import Rows
from kvstore.core.capacity.extents import SlotClass
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.queues.device_queue import WRITE_BACK
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.residency import DEMOTE, Residency
from kvstore.core.transfers.copy_queue import CopyQueue, write_chunk

_SCAN_MIN = 64
_MORE_WRITES = 2
"""Evictions may have so many more writes in flight than the backlog."""
_BUSY_COST = 16
"""So many blocks in use are passed over for what one costs that is evicted."""

_AHEAD, _AHEAD_OF = 32, 256
_EMPTIED_AT_ONCE = 512
_GIVE_UP_AFTER_S = 10.0
_NEXT_MOVE_S = 0.05
_NEXT_ASK_S = 1.0
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05
_LOOK = 16


@dataclass(slots=True)
class Leaving:
    """An extent that is being emptied since `since`, for a pool, or to be given back."""

    extent: int
    taker: SlotPool | None
    since: float


class Eviction:
    """Makes room in the tiers of one residency.

    `trying_again`: for a request that has had slots emptied already, and waits for them.
    """

    def __init__(self, residency: Residency, copies: CopyQueue) -> None:
        self._r = residency
        self._copies = copies
        self._leaving: dict[int, Leaving] = {}
        self._next_move: defaultdict[int, float] = defaultdict(float)
        self._next_ask: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._next_step = math.inf
        self._last_step: list[int] = []
        self.shrinking: set[tuple[int, int]] = set()
        self.trying_again = False

    def make_room(
        self, tier: int, pool: SlotPool, n: int, patient: bool = False, below: float = math.inf
    ) -> int:
        """Frees slots until n are free, if it can; returns how many of the n the pool's tenant may take.

        `patient`: evicts nothing while more extents are on their way. `below`: what the n blocks earn; those
        that earn more are not lost for them, see Policy.coldest.
        """
        r = self._r
        r.settle()
        state, size = r.tiers[tier], pool.slot_bytes
        extents, holdings = state.extents, state.extents.holdings
        holdings.saw(pool.tenant, r.now)
        while extents.free(pool) < n and extents.free(pool) * size < holdings.room(pool.tenant):
            if not self._assign(tier, pool):
                if not state.growing:
                    self._take_over(tier, pool)
                break
        short = n - extents.free(pool) - (self._copies.demoting(tier, pool) if self.trying_again else 0)
        if short > 0 and pool in extents.classes and not (patient and state.growing):
            # Ahead of need, where that costs little room: evicting one by one costs much time.
            ahead = min(_AHEAD, extents.classes[pool].total // _AHEAD_OF)
            self._evict(tier, pool, short + ahead, below)
        beyond = n * size - holdings.room(pool.tenant)
        if beyond > 0:
            self._shrink(tier, pool.tenant, beyond, below)
        return min(n, extents.free(pool), holdings.room(pool.tenant) // size)

    def weighs(self, tier: int, pool: SlotPool) -> bool:
        """Whether new blocks must be worth what goes for them: nothing is lost that can go down instead."""
        return self._r.topology.policy(tier, pool).weighs and not self._lower_tier_takes(tier, pool)

    def some_could_go(self, tier: int, pool: SlotPool) -> bool:
        """Whether a pool has blocks that nobody uses, as far as a look at the coldest ones tells."""
        r = self._r
        return bool(r.idle(tier, r.topology.policy(tier, pool).coldest(_SCAN_MIN, r.now)).any())

    def make_rows(self, n: int, tenant: int) -> None:
        """Drops blocks, from the lowest tier up, the tenant's own first, until n rows are free, if it can."""
        blocks = self._r.blocks
        if n <= blocks.capacity - blocks.used:
            return
        if self._r.chains.childless:
            self._r.chains.free_childless()
        for own in (True, False):
            for tier in (*reversed(self._r.topology.persistent), *self._r.topology.memory):
                pools = [p for p in self._r.tiers[tier].policies if (p.tenant == tenant) is own]
                if not own:
                    pools.sort(key=lambda p: -len(self._r.topology.policy(tier, p)))
                for pool in pools:
                    short = n - (blocks.capacity - blocks.used)
                    if short <= 0:
                        return
                    self._evict(tier, pool, short if own else min(short, self._above_floor(tier, pool)))

    def _above_floor(self, tier: int, pool: SlotPool) -> int:
        """How many blocks others may take from a pool."""
        return self._r.tiers[tier].extents.holdings.above_floor(pool.tenant) // pool.slot_bytes

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
                # Nothing can go down, so the order alone decides: a copy elsewhere is a warmer block's.
                idle &= np.cumsum(idle) <= n
            spare = rows[idle & ~only][:n]
            r.decisions.record(DecisionKind.EVICTED, tier, spare, r.now, pool.tenant)
            r.give_up(tier, spare)
            r.counters["evicted_copies"] += len(spare)
            n -= len(spare)
            writing = self._copies.written_from(tier, busy)[: max(n, 0)]
            r.blocks.copy_marks[writing] |= DEMOTE
            policy.defer(busy)
            n -= len(writing)
            last = rows[idle & only][: max(n, 0)]
            # Leases that never end may hold all that is coldest: to look past it is cheap.
            look = 2 * look if len(busy) == len(rows) else max(n, _SCAN_MIN)
            budget -= max(1, len(busy) // _BUSY_COST + len(spare) + len(last))
            n -= self._evict_last_copies(tier, pool, last)

    def _evict_last_copies(self, tier: int, pool: SlotPool, rows: Rows) -> int:
        """Sends only copies down, or drops leaves where there is no room below; how many slots that frees."""
        refused = self._drop_refused(tier, pool, rows)
        n = int(refused.sum())
        rows = rows[~refused]
        if not len(rows):
            return n
        leaving = self._demote(tier, rows)
        n += int(leaving.sum())
        waits = self._lower_tier_takes(tier, pool) and self._can_wait(pool, bool(leaving.any()))
        if not waits:
            # Or all that is below are parents of what is here: no room will come of waiting.
            leaf = self._leaf_first(rows)
            self._r.decisions.record(DecisionKind.DROPPED, tier, rows[leaf], self._r.now, pool.tenant)
            self._r.give_up(tier, rows[leaf])
            n, rows = n + int(leaf.sum()), rows[~leaf]
        self._r.topology.policy(tier, pool).defer(rows, parents=not waits)
        return n

    def _drop_refused(self, tier: int, pool: SlotPool, rows: Rows) -> npt.NDArray[np.bool_]:
        """Drops leaves that are not worth writing down; which of the rows those were.

        What has children goes down with them: without it they would be lost too. But not beyond a budget.
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
        """Whether blocks of this pool can go down at all, if perhaps not at once."""
        return any(
            t.device.takes_writes
            and (t.growing or (t.extents.ready and t.extents.slots_in(pool.slot_bytes)))
            and t.extents.holdings.may_ever_use(pool.tenant, pool.slot_bytes)
            for t in (self._r.tiers[n] for n in self._r.topology.below[tier])
        )

    def _can_wait(self, pool: SlotPool, started: bool) -> bool:
        """Whether copies of the same tenant are under way, whose end makes room: others' make none."""
        return started or self._r.copying[pool.tenant] > 0

    def _leaf_first(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of rows (coldest first) may go in this order without leaving a child behind."""
        children = self._r.blocks.children[rows].tolist()
        parents = self._r.blocks.parent[rows].tolist()
        going: dict[int, int] = {}
        leaf = np.zeros(len(rows), np.bool_)
        for i, row in enumerate(rows.tolist()):
            if children[i] == going.get(row, 0):
                leaf[i] = True
                going[parents[i]] = going.get(parents[i], 0) + 1
        return leaf

    # -- copies to lower tiers

    def _demote(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Starts moving rows to a lower tier: they leave this one when written. False where none starts."""
        started = self.write_down(tier, rows)
        self._r.blocks.copy_marks[rows[started]] |= DEMOTE
        return started

    def write_down(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Queues copies of rows to the next tier, the first rows first. False where the bounds allow none."""
        started = np.zeros(len(rows), np.bool_)
        for target in self._r.topology.takers(tier) if not self._r.tiers[tier].lost else ():
            left = np.flatnonzero(~started)
            if not len(left):
                break
            started[left] = self._write_to(tier, target, rows[left])
        return started

    def _write_to(self, tier: int, target: int, rows: Rows) -> npt.NDArray[np.bool_]:
        started, places = np.zeros(len(rows), np.bool_), np.arange(len(rows))
        for space, some in self._r.namespaces.split(rows):
            pool = space.pools[target]
            if len(some) < len(rows):
                places = np.flatnonzero(self._r.blocks.namespace[rows] == space.number)
            free = self._copies.room_for_writes(tier, pool.tenant, _MORE_WRITES)
            room = self._copies.device(tier, target).room(pool.tenant, WRITE_BACK) // pool.slot_bytes
            most = min(room, free * write_chunk(pool.slot_bytes))
            idle = np.flatnonzero(self._r.blocks.copy_marks[some] == 0)[:most]
            if not len(idle):
                continue
            idle = idle[: self.make_room(target, pool, len(idle), patient=True)]
            if len(idle):
                todo = some[idle]
                slots = self._r.tiers[target].extents.take(pool, len(todo))
                self._copies.put(pool.tenant, WRITE_BACK, tier, target, space, todo, slots, writing=True)
                started[places[idle]] = True
        return started

    # -- limits that were lowered

    def shrink(self, tier: int, tenant: int) -> None:
        """Has a tenant come down to its limit, step by step, if it is above."""
        self.shrinking.add((tier, tenant))
        self._step_at(self._r.now + _NEXT_STEP_S)

    def _shrink(self, tier: int, tenant: int, nbytes: int, below: float = math.inf) -> None:
        """Evicts a tenant's blocks, of whatever size, until so many bytes are free, if it can."""
        extents = self._r.tiers[tier].extents
        goal = int(extents.holdings.used[tenant]) - nbytes
        for members in extents.classes_of(tenant):
            over = int(extents.holdings.used[tenant]) - goal
            if over <= 0:
                return
            self._evict(tier, members.pool, -(-over // members.pool.slot_bytes), below)

    # -- steps

    def step(self, now: float) -> None:
        """It is `now`: goes on with what takes several steps."""
        if now < self._next_step:
            return
        for tier, tenant in list(self.shrinking):
            holdings = self._r.tiers[tier].extents.holdings
            over = holdings.over(tenant)
            if over:
                self._shrink(tier, tenant, min(over, _EMPTIED_AT_ONCE * 4096))
            elif holdings.extents[tenant] > -(-int(holdings.limit[tenant]) // holdings.extent_bytes):
                if not self._r.tiers[tier].extents.renewing:
                    self.give_back_one(tier, tenant)
            else:
                self.shrinking.discard((tier, tenant))
        for tier, leaving in list(self._leaving.items()):
            if now - leaving.since > _GIVE_UP_AFTER_S:
                self._stay(tier)
            else:
                self._empty(tier, leaving)
        self._next_step = math.inf
        if self._leaving or self.shrinking:
            # What waits for others is looked at now and then; what got on goes on.
            done = [int(t.extents.holdings.used.sum()) for t in self._r.tiers]
            done += [int(t.extents.holdings.extents.sum()) for t in self._r.tiers]
            self._step_at(now + (_NEXT_LOOK_S if done == self._last_step else _NEXT_STEP_S))
            self._last_step = done

    def _step_at(self, when: float) -> None:
        self._next_step = min(self._next_step, when)

    def has_leaving(self, tier: int) -> bool:
        """Whether an extent of a tier is on its way to somebody, or away."""
        return tier in self._leaving

    def call_off(self, tier: int) -> None:
        """No extent goes to another pool: there are more than there may be."""
        if tier in self._leaving and self._leaving[tier].taker is not None:
            self._stay(tier)

    def is_emptying(self, tier: int, extent: int) -> bool:
        """Whether an extent is on its way to somebody."""
        return tier in self._leaving and self._leaving[tier].extent == extent

    def wakes_at(self) -> float:
        """When there is something to go on with."""
        return self._next_step

    @property
    def under_way(self) -> bool:
        """Whether extents are on their way to somebody."""
        return bool(self._leaving) or any(t.extents.renewing for t in self._r.tiers)

    # -- extents that move

    def _assign(self, tier: int, pool: SlotPool, extent: int | None = None) -> bool:
        """Gives a pool an extent that is free (this one); whether there was one."""
        chosen = self._r.tiers[tier].extents.assign(pool, extent)
        if chosen is not None:
            self._r.outbox.actions.append(FormatExtent(tier, chosen, pool.slot_bytes, pool.domain))
        return chosen is not None

    def _take_over(self, tier: int, pool: SlotPool) -> None:
        """Has an extent of another pool leave for one that has too few, if one should."""
        extents, now = self._r.tiers[tier].extents, self._r.now
        if tier in self._leaving:
            if self._leaving[tier].taker == pool:
                self._empty(tier, self._leaving[tier])
            return
        if extents.renewing or extents.surplus or not extents.slots_in(pool.slot_bytes):
            return
        extent = self._own_to_spare(tier, pool)
        if extent is None:
            # Whoever was told no asks again later, and keeps nobody else from asking.
            asks = self._next_ask[tier]
            if now < max(self._next_move[tier], asks.get(pool.tenant, 0.0)):
                return
            giver = extents.holdings.giver(pool.tenant, now)
            if giver is None:
                asks[pool.tenant] = now + _NEXT_ASK_S
                return
            self._next_move[tier] = now + _NEXT_MOVE_S
            if extents.promised.get(giver):
                self._hand_over(tier, extents.promised[giver].pop(), giver, pool.tenant)
                return
            extent = self._emptiest(tier, extents.classes_of(giver))
        if extent is not None:
            self._leave(tier, Leaving(extent, pool, now))

    def _own_to_spare(self, tier: int, pool: SlotPool) -> int | None:
        """An extent of the same tenant that other pools of it have beyond an even share."""
        extents = self._r.tiers[tier].extents
        mine = extents.classes.get(pool)
        donors = [c for c in extents.classes_of(pool.tenant) if c.pool != pool]
        if not donors:
            return None
        all_of_them = sum(len(c.extents) for c in donors) + (len(mine.extents) if mine else 0)
        even = all_of_them // (len(donors) + 1)
        donor = max(donors, key=lambda c: len(c.extents))
        if mine is not None and (len(mine.extents) >= max(even, 1) or len(donor.extents) <= even):
            return None
        return self._emptiest(tier, [donor])

    def _emptiest(self, tier: int, classes: list[SlotClass], used: bool = False) -> int | None:
        """Of these, the extent with the fewest blocks that nobody uses and no pin keeps.

        `used`: one that somebody uses, if there is no other.
        """
        extents, kept = self._r.tiers[tier].extents, self._r.kept
        members = [e for c in classes for e in c.extents if e not in extents.leaving]
        by_rows = sorted(members, key=lambda e: np.count_nonzero(extents.owner[extents.span(e)] >= 0))
        unpinned = [e for e in by_rows[:_LOOK] if not kept(tier, extents.rows_of(e)).any()]
        for extent in unpinned:
            if not extents.is_referred(extent):
                return extent
        return unpinned[0] if used and unpinned else None

    def give_back_one(self, tier: int, tenant: int, used: bool = False) -> bool:
        """Has an extent of a tenant go to nobody; whether one is on its way now. `used`: see `_emptiest`."""
        extents = self._r.tiers[tier].extents
        if tier in self._leaving:
            return False
        if extents.promised.get(tenant):
            self._hand_over(tier, extents.promised[tenant].pop(), tenant, -1)
            return True
        extent = self._emptiest(tier, extents.classes_of(tenant), used)
        if extent is not None:
            self._leave(tier, Leaving(extent, None, self._r.now))
        return extent is not None

    def _leave(self, tier: int, leaving: Leaving) -> None:
        self._r.tiers[tier].extents.leave(leaving.extent)
        self._leaving[tier] = leaving
        self._step_at(self._r.now + _NEXT_STEP_S)
        self._empty(tier, leaving)

    def _empty(self, tier: int, leaving: Leaving) -> None:
        """Has some more blocks of an extent leave; passes it on when it is empty."""
        r = self._r
        extents = r.tiers[tier].extents
        pool = extents.class_of(leaving.extent).pool
        stranger = leaving.taker is None or leaving.taker.tenant != pool.tenant
        if stranger and extents.holdings.is_at_floor(pool.tenant):
            # Its floor was raised meanwhile.
            return self._stay(tier)
        rows = extents.rows_of(leaving.extent)
        idle = rows[r.idle(tier, rows)][:_EMPTIED_AT_ONCE]
        only = r.copies(idle) == 1
        r.decisions.record(DecisionKind.EVICTED, tier, idle[~only], r.now, pool.tenant)
        r.give_up(tier, idle[~only])
        alone = idle[only]
        going = self._demote(tier, alone) if len(alone) else np.zeros(0, np.bool_)
        below = len(alone) and self._lower_tier_takes(tier, pool)
        if not (below and self._can_wait(pool, bool(going.any()))):
            # They make way, unless all that is below are parents of what is here.
            r.decisions.record(DecisionKind.DROPPED, tier, alone[~going], r.now, pool.tenant)
            r.give_up(tier, alone[~going])
        if not extents.is_used(leaving.extent):
            del self._leaving[tier]
            extents.withdraw(leaving.extent)
            self._pass_on(tier, leaving.extent, pool, leaving.taker)
        return None

    def _stay(self, tier: int) -> None:
        """The extent that is leaving does not."""
        self._r.tiers[tier].extents.stay(self._leaving.pop(tier).extent)

    def _pass_on(self, tier: int, extent: int, pool: SlotPool, taker: SlotPool | None) -> None:
        """An extent that a pool had is another's, or nobody's; made anew, unless the same may map it."""
        holdings = self._r.tiers[tier].extents.holdings
        if taker is not None and taker[:2] == pool[:2] and self._assign(tier, taker, extent):
            return
        grows = taker is not None and holdings.may_grow(taker.tenant)
        self._renew(tier, extent, taker.tenant if taker is not None and grows else -1)

    def _hand_over(self, tier: int, extent: int, giver: int, taker: int) -> None:
        """An extent that is a tenant's, but not cut, becomes another's, or nobody's (-1)."""
        extents = self._r.tiers[tier].extents
        extents.holdings.hold(giver, -1)
        extents.unassigned.append(extent)
        self._renew(tier, extent, taker)

    def _renew(self, tier: int, extent: int, tenant: int) -> None:
        if tenant < 0 and self._r.tiers[tier].extents.surplus:
            self.remove(tier, extent)
            return
        self._r.tiers[tier].extents.renew(extent, tenant)
        self._r.counters["renewed_extents"] += 1
        self._r.outbox.actions.append(RenewExtent(tier, extent))

    def renew(self, tier: int, extent: int) -> None:
        """An extent that is nobody's is made anew."""
        self._renew(tier, extent, -1)

    def remove(self, tier: int, extent: int) -> None:
        """An extent that is nobody's goes for good."""
        self._r.tiers[tier].extents.remove(extent)
        self._r.counters["removed_extents"] += 1
        self._r.outbox.actions.append(RemoveExtent(tier, extent))
