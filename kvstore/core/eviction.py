"""Making room: a tenant's own blocks go, in the policy's order; extents move to tenants that have too few.

The verdicts, in this order: a copy that another tier holds too is simply given up; the only copy goes down
where a lower tier takes it; else it is dropped if it is a leaf. A block in use, pinned or with children
stays. Extents move slowly, one at a time a tier: each is emptied in small steps first, and made anew where it
changes hands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import Format, Renew
from kvstore.core.blocks import Rows
from kvstore.core.residency import DEMOTE, WRITING, Residency
from kvstore.core.tenants import Pool

Demote = Callable[[int, Rows], npt.NDArray[np.bool_]]
"""(tier, rows) -> which of these rows are now on their way down, and will leave when there."""

_SCAN_MIN = 64
_AHEAD = 32
_EMPTIED_AT_ONCE = 512
_GIVE_UP_AFTER_S = 10.0
_NEXT_MOVE_S = 0.05
_NEXT_STEP_S = 0.001


@dataclass(slots=True)
class Leaving:
    """An extent that is being emptied since `since`, for a pool, or to be given back."""

    extent: int
    taker: Pool | None
    since: float


class Eviction:
    """Makes room in the tiers of one residency."""

    def __init__(self, residency: Residency, demote: Demote) -> None:
        self._r = residency
        self._demote = demote
        self._leaving: dict[int, Leaving] = {}
        self._next_move = [0.0] * len(residency.tiers)
        self.shrinking: set[tuple[int, int]] = set()

    def make_room(self, tier: int, pool: Pool, n: int, patient: bool = False) -> int:
        """Frees slots until n are free, if it can; returns how many of the n the pool's tenant may take.

        `patient`: evicts nothing while more extents are on their way.
        """
        r = self._r
        r.settle()
        state, size = r.tiers[tier], pool.slot_bytes
        extents, holdings = state.extents, state.extents.holdings
        holdings.saw(pool.tenant, r.now)
        while extents.free(pool) < n and extents.free(pool) * size < holdings.room(pool.tenant):
            extent = extents.assign(pool)
            if extent is None and not state.growing:
                extent = self._take_over(tier, pool)
            if extent is None:
                break
            r.out.append(Format(tier, extent, size, pool.domain))
        short = n - extents.free(pool)
        if short > 0 and pool in extents.classes and not (patient and state.growing):
            self._evict(tier, pool, short + min(_AHEAD, extents.classes[pool].total // 64))
        beyond = n * size - holdings.room(pool.tenant)
        if beyond > 0:
            self._shrink(tier, pool.tenant, beyond)
        return min(n, extents.free(pool), holdings.room(pool.tenant) // size)

    def make_rows(self, n: int, tenant: int) -> None:
        """Drops blocks, from the lowest tier up, the tenant's own first, until n rows are free, if it can."""
        blocks = self._r.blocks
        for own in (True, False):
            for tier in reversed(range(len(self._r.tiers))):
                pools = [p for p in self._r.tiers[tier].policies if (p.tenant == tenant) is own]
                if not own:
                    pools.sort(key=lambda p: -len(self._r.policy(tier, p)))
                for pool in pools:
                    short = n - (blocks.capacity - blocks.used)
                    if short <= 0:
                        return
                    if own or not self._is_guarded(tier, pool):
                        self._evict(tier, pool, short)

    def _is_guarded(self, tier: int, pool: Pool) -> bool:
        holdings = self._r.tiers[tier].extents.holdings
        return bool(holdings.extents[pool.tenant] <= holdings.floor[pool.tenant])

    # -- one pool

    def _evict(self, tier: int, pool: Pool, n: int) -> None:
        r, policy = self._r, self._r.policy(tier, pool)
        budget = 4 * n + _SCAN_MIN
        while n > 0 and budget > 0:
            rows = policy.coldest(min(max(n, 16), budget))
            if not len(rows):
                return
            budget -= len(rows)
            idle = r.idle(tier, rows)
            busy = rows[~idle]
            only = (r.blocks.slot[:, rows] >= 0).sum(axis=0) == 1
            if not self._lower_tier_takes(tier, pool):
                # Nothing can go down, so the order alone decides: a copy elsewhere is a warmer block's.
                idle &= np.cumsum(idle) <= n
            spare = rows[idle & ~only][:n]
            r.give_up(tier, spare)
            r.counters["evicted_copies"] += len(spare)
            n -= len(spare)
            writing = busy[(r.blocks.moving[busy] & WRITING) > 0]
            r.blocks.moving[writing] |= DEMOTE
            policy.defer(busy)
            n -= len(writing)
            last = rows[idle & only][: max(n, 0)]
            n -= self._evict_last_copies(tier, pool, last)

    def _evict_last_copies(self, tier: int, pool: Pool, rows: Rows) -> int:
        """Sends only copies down, or drops leaves where there is no room below; how many slots that frees."""
        if not len(rows):
            return 0
        leaving = self._demote(tier, rows)
        n = int(leaving.sum())
        stuck = rows
        if not self._lower_tier_takes(tier, pool) or not (n or self._r.tiers[tier + 1].device.moving):
            # Or all that is below are parents of what is here: no room will come of waiting.
            leaf = self._leaf_first(rows)
            self._r.give_up(tier, rows[leaf])
            n, stuck = int(leaf.sum()), rows[~leaf]
        self._r.policy(tier, pool).defer(stuck)
        return n

    def _lower_tier_takes(self, tier: int, pool: Pool) -> bool:
        """Whether blocks of this pool can go down at all, if perhaps not at once."""
        return any(
            t.device.takes_writes
            and (t.growing or (t.extents.ready and t.extents.geometry(pool.slot_bytes).slots))
            and t.extents.holdings.may_ever_use(pool.tenant, pool.slot_bytes)
            for t in self._r.tiers[tier + 1 :]
        )

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

    # -- limits that were lowered

    def _shrink(self, tier: int, tenant: int, nbytes: int) -> None:
        """Evicts a tenant's blocks, of whatever size, until so many bytes are free, if it can."""
        extents = self._r.tiers[tier].extents
        goal = int(extents.holdings.used[tenant]) - nbytes
        for pool in [p for p in extents.classes if p.tenant == tenant]:
            over = int(extents.holdings.used[tenant]) - goal
            if over <= 0:
                return
            self._evict(tier, pool, -(-over // pool.slot_bytes))

    def at(self, now: float) -> None:
        """It is `now`: goes on with what takes several steps."""
        for tier, tenant in list(self.shrinking):
            extents = self._r.tiers[tier].extents
            holdings = extents.holdings
            over = holdings.over(tenant)
            if over:
                self._shrink(tier, tenant, min(over, _EMPTIED_AT_ONCE * 4096))
            elif holdings.extents[tenant] > -(-int(holdings.limit[tenant]) // extents.extent_bytes):
                self._give_back_one(tier, tenant)
            else:
                self.shrinking.discard((tier, tenant))
        for tier, leaving in list(self._leaving.items()):
            if now - leaving.since > _GIVE_UP_AFTER_S:
                self._r.tiers[tier].extents.stay(leaving.extent)
                del self._leaving[tier]
            else:
                self._empty(tier, leaving)

    def is_emptying(self, tier: int, extent: int) -> bool:
        """Whether an extent is on its way to somebody."""
        return tier in self._leaving and self._leaving[tier].extent == extent

    def wakes_at(self, now: float) -> float:
        """When there is something to go on with."""
        return now + _NEXT_STEP_S if self._leaving or self.shrinking else math.inf

    @property
    def under_way(self) -> bool:
        """Whether extents are on their way to somebody."""
        return bool(self._leaving) or any(t.extents.renewing for t in self._r.tiers)

    # -- extents that move

    def _take_over(self, tier: int, pool: Pool) -> int | None:
        """An extent of another pool for one that has too few; None if there is none, or not yet."""
        extents = self._r.tiers[tier].extents
        if tier in self._leaving:
            self._empty(tier, self._leaving[tier])
            return extents.assign(pool)
        if extents.renewing or not extents.geometry(pool.slot_bytes).slots:
            return None
        extent = self._own_to_spare(tier, pool)
        if extent is None and self._r.now >= self._next_move[tier]:
            self._next_move[tier] = self._r.now + _NEXT_MOVE_S
            giver = extents.holdings.giver(pool.tenant, self._r.now)
            if giver is not None and extents.promised.get(giver):
                self._hand_over(tier, extents.promised[giver].pop(), giver, pool.tenant)
                return None
            extent = self._emptiest(tier, [c for c in extents.classes if c.tenant == giver])
        if extent is None:
            return None
        self._leave(tier, Leaving(extent, pool, self._r.now))
        return extents.assign(pool)

    def _own_to_spare(self, tier: int, pool: Pool) -> int | None:
        """An extent of the same tenant that other pools of it have beyond an even share."""
        classes = self._r.tiers[tier].extents.classes
        mine = classes.get(pool)
        donors = [c for p, c in classes.items() if p.tenant == pool.tenant and p != pool]
        if not donors:
            return None
        all_of_them = sum(len(c.extents) for c in donors) + (len(mine.extents) if mine else 0)
        even = all_of_them // (len(donors) + 1)
        donor = max(donors, key=lambda c: len(c.extents))
        if mine is not None and (len(mine.extents) >= max(even, 1) or len(donor.extents) <= even):
            return None
        return self._emptiest(tier, [donor.pool])

    def _emptiest(self, tier: int, pools: list[Pool]) -> int | None:
        """Of these pools, the extent with the fewest blocks that nobody uses and no pin keeps."""
        extents = self._r.tiers[tier].extents
        best, fewest = None, math.inf
        for extent in [e for p in pools for e in extents.classes[p].extents]:
            slots = extents.slots_of(extent)
            rows: Rows = extents.owner[slots].astype(np.int64)
            rows = rows[rows >= 0]
            free_to_go = not (extents.references(extent) > 0).any() and not self._r.blocks.pinned[rows].any()
            if len(rows) < fewest and free_to_go:
                best, fewest = extent, len(rows)
        return best

    def _give_back_one(self, tier: int, tenant: int) -> None:
        """An extent of a tenant that has more than its limit goes to nobody."""
        extents = self._r.tiers[tier].extents
        if tier in self._leaving or extents.renewing:
            return
        if extents.promised.get(tenant):
            self._hand_over(tier, extents.promised[tenant].pop(), tenant, -1)
            return
        extent = self._emptiest(tier, [p for p in extents.classes if p.tenant == tenant])
        if extent is not None:
            self._leave(tier, Leaving(extent, None, self._r.now))

    def _leave(self, tier: int, leaving: Leaving) -> None:
        self._r.tiers[tier].extents.leave(leaving.extent)
        self._leaving[tier] = leaving
        self._empty(tier, leaving)

    def _empty(self, tier: int, leaving: Leaving) -> None:
        """Has some more blocks of an extent leave; hands it over when it is empty."""
        r = self._r
        extents = r.tiers[tier].extents
        slots = extents.slots_of(leaving.extent)
        rows: Rows = extents.owner[slots].astype(np.int64)
        rows = rows[rows >= 0][:_EMPTIED_AT_ONCE]
        idle = rows[r.idle(tier, rows)]
        pool = extents.class_of(leaving.extent).pool
        only = (r.blocks.slot[:, idle] >= 0).sum(axis=0) == 1
        r.give_up(tier, idle[~only])
        alone = idle[only]
        going = self._demote(tier, alone) if len(alone) else np.zeros(0, np.bool_)
        below = len(alone) and self._lower_tier_takes(tier, pool)
        if not (below and (going.any() or r.tiers[tier + 1].device.moving)):
            # They make way, unless all that is below are parents of what is here.
            r.give_up(tier, alone[~going])
        if not extents.is_used(leaving.extent):
            del self._leaving[tier]
            extents.withdraw(leaving.extent)
            same = leaving.taker is not None and leaving.taker[:2] == pool[:2]
            if same:
                extents.promise(leaving.extent, pool.tenant)
            else:
                taker = leaving.taker.tenant if leaving.taker is not None else -1
                self._renew(tier, leaving.extent, taker)

    def _hand_over(self, tier: int, extent: int, giver: int, taker: int) -> None:
        """An extent that is a tenant's, but not cut, becomes another's, or nobody's (-1)."""
        extents = self._r.tiers[tier].extents
        extents.holdings.hold(giver, -1)
        extents.unassigned.append(extent)
        self._renew(tier, extent, taker)

    def _renew(self, tier: int, extent: int, tenant: int) -> None:
        self._r.tiers[tier].extents.renew(extent, tenant)
        self._r.counters["renewed_extents"] += 1
        self._r.out.append(Renew(tier, extent))
