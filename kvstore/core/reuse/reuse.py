"""Learns from the past of blocks how likely they are to be used again, tenant by tenant.

The history of a block gives its class (`history`, `classes`). The curves of its tenant give what
a slot earns with a block of that class (`curves`). A new block takes the interval of its parent, whose
chain it continues. A new independent block takes the class of the chain that it belongs to, because it is
worth nothing without it. The curves do not count it: few such blocks are used again. A later process
continues from a saved `ReuseState`.

Not covered: which block is evicted. Policies decide that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.reuse.classes import (
    CLASS_MASK,
    HIGH_PRIORITY,
    MOST_USES,
    SHAPE,
    classes_after,
    hinted_class,
    new_class,
)
from kvstore.core.reuse.curves import (
    TICKS_A_S,
    Counts,
    Floats,
    Ints,
    ReuseCurves,
    one_span_of,
    span_of,
    tick,
)
from kvstore.core.reuse.history import BlockHistory, GhostTable

_MEAN_OVER = 100
_LEARN_FIRST, _LEARN_AFTER = 64, 1024
_HIGH_PRIORITY_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class ReuseState:
    """What one process has learned: curves by tenant, and ghosts of all blocks."""

    curves: dict[int, Counts]
    ghosts: GhostTable


@dataclass(slots=True)
class _Tenant:
    """One tenant's curves. `new`: blocks counted since the curves were last updated.

    `mean`: the mean number of blocks stored together; 0: none were.
    """

    curves: ReuseCurves = field(default_factory=lambda: ReuseCurves(SHAPE))
    new: int = 0
    mean: float = 0.0


class Reuse:
    """Histories of all blocks of one node, and curves of all tenants, about 70 KB each."""

    def __init__(self, blocks: Blocks, ghosts: int, seed: int) -> None:
        self._blocks = blocks
        self.history = BlockHistory(blocks, ghosts, seed)
        self._tenants: dict[int, _Tenant] = {}

    @property
    def ram_bytes(self) -> int:
        """Bytes of state. Columns count up to the last row in use."""
        return self.history.ram_bytes + sum(t.curves.ram_bytes for t in self._tenants.values())

    # -- what happens

    def stored(self, rows: Rows, tenant: int, now: float, independent: bool = False, chain: int = -1) -> None:
        """Counts stored bytes of a piece of a chain, in order: of new blocks, or of holes.

        Each of `independent` blocks counts as stored alone, and leaves the tenant's mean of blocks stored
        together as it is. Those of a `chain` (a row; -1: none) have its past instead of one of their own.
        """
        if not len(rows):
            return
        if chain >= 0 and self.history.ticks[chain]:
            self.history.follow(rows, chain, now)
            return
        lost = ~self.history.is_known(rows)
        came_back = self.history.recall(rows[lost])
        known = ~lost
        known[lost] = came_back
        self.used(rows[known], tenant, now)
        new = rows[~known]
        if not len(new):
            return
        together = 1 if independent else len(new)
        number = self._new_class(int(self._blocks.parent[new[0]]), together, tenant)
        if not independent:
            of_tenant = self._of(tenant)
            mean = of_tenant.mean or float(together)
            of_tenant.mean = mean + (together - mean) / _MEAN_OVER
        self._enter(new, np.full(len(new), number), np.ones(len(new)), tenant, now)

    def passed_by(
        self, rows: Rows, tenant: int, now: float, independent: bool = False, chain: int = -1
    ) -> None:
        """Counts blocks that are not stored, and whose rows are about to be given back: they may return."""
        self.stored(rows, tenant, now, independent, chain)
        self.history.leave(rows)

    def restored(self, rows: Rows, tenant: int, now: float) -> None:
        """Counts blocks that a tier held at start-up, unless their history is known."""
        rows = rows[~self.history.is_known(rows)]
        rows = rows[~self.history.recall(rows)]
        self._enter(rows, np.zeros(len(rows), np.int64), np.ones(len(rows)), tenant, now)

    def used(self, rows: Rows, tenant: int, now: float) -> None:
        """Counts a use of stored blocks."""
        if not len(rows):
            return
        history = self.history
        since, classes, counted = history.last_used(rows), history.classes(rows), ~history.follows(rows)
        self._of(tenant).curves.used(classes[counted], since[counted], now)
        uses = np.minimum(history.uses(rows) + 1, MOST_USES)
        self._enter(rows, classes_after(classes, uses, tick(now) - since), uses, tenant, now)

    def hinted(self, rows: Rows, tenant: int, next_use_s: float | None, now: float) -> None:
        """Takes a client's hint: stored blocks are used again in `next_use_s` seconds (None: never).

        The blocks get classes of their own, whose curves show how reliable the tenant's hints are.
        """
        if not len(rows):
            return
        history = self.history
        counted = rows[~history.follows(rows)]
        self._of(tenant).curves.left(history.classes(counted), history.last_used(counted))
        classes = np.full(len(rows), hinted_class(next_use_s))
        self._enter(rows, classes, history.uses(rows), tenant, now)

    def _enter(
        self, rows: Rows, classes: Ints, uses: npt.NDArray[np.generic], tenant: int, now: float
    ) -> None:
        self.history.record(rows, classes, uses, now)
        of_tenant = self._of(tenant)
        curves = of_tenant.curves
        classes = classes[~self.history.follows(rows)]
        curves.joined(classes, now)
        of_tenant.new += len(classes)
        if of_tenant.new >= min(_LEARN_AFTER, _LEARN_FIRST + curves.joins // _LEARN_FIRST):
            curves.learn()
            of_tenant.new = 0

    def _of(self, tenant: int) -> _Tenant:
        if tenant not in self._tenants:
            self._tenants[tenant] = _Tenant()
        return self._tenants[tenant]

    def curves(self, tenant: int) -> ReuseCurves:
        """Returns the curves of a tenant."""
        return self._of(tenant).curves

    def forget(self, tenant: int) -> None:
        """Drops all that was learned from a tenant."""
        self._tenants.pop(tenant, None)

    def _new_class(self, parent: int, n: int, tenant: int) -> int:
        """Returns the class of n blocks stored for the first time; `parent` is a row, or -1 for a root."""
        mean = self._of(tenant).mean or float(n)
        return new_class(self.history.interval(parent), n, mean)

    # -- from one process to the next

    def save(self, now: float) -> ReuseState:
        """Returns all that was learned. Passes over all blocks; meant for the end of a process."""
        curves = {number: tenant.curves.counts() for number, tenant in self._tenants.items()}
        return ReuseState(curves, self.history.save(now))

    def load(self, state: ReuseState, elapsed_s: float, now: float) -> None:
        """Continues from a state saved `elapsed_s` ago. Must come before any block."""
        for number, counts in state.curves.items():
            self._tenants[number] = _Tenant(ReuseCurves(SHAPE, counts))
        self.history.load(state.ghosts, elapsed_s, now)

    # -- what to expect

    def density(self, tenant: int, kinds: Ints, since: Floats, now: float) -> npt.NDArray[np.float32]:
        """Returns what a slot earns, in uses/s, with blocks of these kinds that were last used at `since`."""
        density: npt.NDArray[np.float32] = self.curves(tenant).density[
            kinds & CLASS_MASK, span_of(now - since)
        ]
        return np.where(kinds & HIGH_PRIORITY, _HIGH_PRIORITY_FACTOR * density, density)

    def density_of_row(self, tenant: int, now: float) -> Callable[[int], float]:
        """Returns a function of one row with the same result. It is valid until the next change."""
        density = self.curves(tenant).density.data
        ticks, kinds = self.history.ticks.data, self.history.kind.data
        last = self.history.ticks_at(now) + 1

        def of_row(row: int) -> float:
            kind = kinds[row]
            plain = density[kind & CLASS_MASK, one_span_of((last - ticks[row]) / TICKS_A_S)]
            return float(_HIGH_PRIORITY_FACTOR * plain if kind & HIGH_PRIORITY else plain)

        return of_row

    def density_if_stored(
        self,
        words: npt.NDArray[np.uint64],
        namespace: int,
        parent: int,
        n: int,
        tenant: int,
        now: float,
        chain: int = -1,
    ) -> float:
        """Returns what each slot would earn if n blocks were stored now; `words` is the key of the first.

        The blocks behind the first are no more likely to be used, and are evicted first. Blocks of a `chain`
        earn what it would earn. Returns infinity until enough blocks of the tenant were counted.
        """
        curves = self.curves(tenant)
        if curves.joins < _LEARN_AFTER:
            return math.inf
        if chain >= 0 and self.history.ticks[chain]:
            return float(curves.density[self.history.kind[chain] & CLASS_MASK, 0])
        ghost = self.history.ghost(words, namespace)
        if ghost is None:
            return float(curves.density[self._new_class(parent, n, tenant), 0])
        classes, uses, last_used = ghost
        after = classes_after(classes, np.minimum(uses + 1, MOST_USES), tick(now) - last_used)
        return float(curves.density[after[0], 0])

    def chance(self, rows: Rows, tenant: int, now: float) -> npt.NDArray[np.float32]:
        """Returns the probability that each block of a tenant is used again."""
        spans = span_of(now - self.history.last_used(rows))
        chance: npt.NDArray[np.float32] = self.curves(tenant).chance[self.history.classes(rows), spans]
        return chance
