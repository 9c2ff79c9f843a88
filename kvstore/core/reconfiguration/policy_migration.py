"""Changes the eviction policy at run time, pool by pool, a few rows per step.

A pool keeps its policy until its turn comes; `policy.migrating` replaces one policy. A change that is
requested during a migration starts after it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.jobs import Job
from kvstore.core.policy import Policy, find
from kvstore.core.policy.migrating import MigratingPolicy
from kvstore.core.residency.residency import Residency
from kvstore.core.residency.topology import PolicyGeneration
from kvstore.errors import MisuseError

_ROWS_AT_ONCE = 64
_POOLS_AT_ONCE = 4
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05
_NOBODY = SlotPool(0, 0, 4096)
_PARTS = [name for name in (*Policy.__annotations__, *vars(Policy)) if not name.startswith("_")]
_WANTED = "a class like those in kvstore.core.policy"


class PolicyMigration(Job):
    """The eviction policy of one node. New pools get the policy `name`; `wanted` is the latest request.

    `rows_at_once`: rows that move in one step.
    """

    def __init__(self, residency: Residency, name: str) -> None:
        self._r = residency
        self.name = self.wanted = name
        self.rows_at_once = _ROWS_AT_ONCE
        self._pools: list[tuple[int, SlotPool]] = []
        self._marks: list[npt.NDArray[np.uint32]] = []
        self._under_way = False

    @property
    def pools_left(self) -> int:
        """The number of pools that still have the old policy."""
        return len(self._pools)

    def to(self, name: str, now: float) -> None:
        """Starts a migration. Raises MisuseError, and changes nothing, if there is no such policy."""
        if name == self.wanted:
            return
        generations = self._generations(name)
        self.wanted = name
        if not self._under_way:
            self._begin(generations, now)

    def _generations(self, name: str) -> list[PolicyGeneration]:
        """Returns a new policy generation for each tier. Makes one policy as a test."""
        make = find(name)
        generations = [self._r.topology.new_generation(make) for _ in self._r.tiers]
        try:
            made = self._r.topology.make_policy(0, _NOBODY, generations[0])
        except Exception as error:
            raise MisuseError(f"eviction policy {name!r} cannot be made: {error}", _WANTED) from error
        lacking = [part for part in _PARTS if not hasattr(made, part)]
        if lacking:
            raise MisuseError(f"eviction policy {name!r} has no {', '.join(lacking)}", _WANTED)
        return generations

    def _begin(self, generations: list[PolicyGeneration], now: float) -> None:
        r = self._r
        self.name, self._under_way = self.wanted, True
        for state, generation in zip(r.tiers, generations, strict=True):
            state.old_generation, state.generation = state.generation, generation
        self._pools = [(tier, pool) for tier, state in enumerate(r.tiers) for pool in state.policies]
        self._marks = [zeros(r.blocks.capacity, np.uint32) for _ in r.tiers]
        self._next_step = now

    def _step(self, now: float) -> None:
        rows, pools = self.rows_at_once, len(self._pools)
        for _ in range(_POOLS_AT_ONCE):
            if rows <= 0 or not self._pools:
                break
            rows -= self._move_some(*self._pools[-1], rows, now)
        progressed = rows < self.rows_at_once or len(self._pools) < pools
        self._next_step = now + (_NEXT_STEP_S if progressed else _NEXT_LOOK_S)
        if not self._pools:
            self._end(now)

    def _move_some(self, tier: int, pool: SlotPool, n: int, now: float) -> int:
        """Moves up to n rows of a pool. Returns how many. Finishes the pool when none are left."""
        state = self._r.tiers[tier]
        policy = state.policies.get(pool)
        if policy is None:
            # The device was removed meanwhile.
            self._pools.pop()
            return 0
        if not isinstance(policy, MigratingPolicy):
            new = self._r.topology.make_policy(tier, pool, state.generation)
            # The mark is unique to this pool within the migration.
            policy = state.policies[pool] = MigratingPolicy(policy, new, self._marks[tier], len(self._pools))
        moved = policy.go_on(n, now)
        if not policy.left:
            state.policies[pool] = policy.new
            self._pools.pop()
        return moved

    def _end(self, now: float) -> None:
        """Drops the old policies. Starts the next migration if another policy is wanted by now."""
        for state in self._r.tiers:
            state.old_generation = None
        self._marks, self._under_way, self._next_step = [], False, math.inf
        if self.wanted != self.name:
            self._begin(self._generations(self.wanted), now)
