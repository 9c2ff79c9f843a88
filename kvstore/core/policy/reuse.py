"""What each block's past says about its future: its class, when it was last used, and its tenant's curves.

A class is: how often a block was used, how long it had not been when it last was, and how much came with it
when it was first stored. A new block takes its parent's interval: it continues what the parent belongs to.
What has left every tier is remembered for a while (`Ghosts`): a block that comes back goes on where it was.
A later process goes on with it all the same way, its own blocks being ghosts to it at first (`ReuseState`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.policy.ghosts import Ghosts, fingerprints, fingerprints_of
from kvstore.core.policy.reuse_curves import (
    SPANS,
    TICKS_A_S,
    Counts,
    Floats,
    Ints,
    ReuseCurves,
    one_span_of,
    span_of,
    tick,
)

_COUNTS, _INTERVALS, _AMOUNTS = 4, 6, 3
SHAPE = (_COUNTS + 1, _INTERVALS, _AMOUNTS)
"""Classes: uses x interval x amount; the last row of uses is for blocks of which a client said something."""
CLASSES = int(np.prod(SHAPE)), SPANS
"""The shape of a column of a tenant's `Counts`."""
_TOLD = _COUNTS
_MOST_USES = 15
_INTERVAL_EDGES_S = (4.0, 10.0, 25.0, 62.5)
_TOLD_EDGES_S = (10.0, 60.0, 300.0, 1800.0, 7200.0)
_MEAN_OVER = 100
_LEARN_FIRST, _LEARN_AFTER = 64, 1024
HIGH, _CLASS = 128, 127
"""Bit of a kind: a client asked to keep these longer."""
_FAVOUR = 4.0
_NOTED_AT_ONCE = 1 << 16
_MOST_TICKS = 1 << 29
"""Half of what a ghost has room for."""


@dataclass(frozen=True, slots=True)
class ReuseState:
    """What one process knew at `ticks` of its time: curves by tenant, and ghosts of all blocks.

    The ghosts are the words of a table of `room` words that are not 0, and where they are. `seed` is theirs.
    """

    seed: int
    ticks: int
    curves: dict[int, Counts]
    room: int
    at: npt.NDArray[np.uint32]
    words: npt.NDArray[np.uint64]


class Reuse:
    """Histories of all rows of one node. Costs 6 bytes a row, 8 a ghost, some 70 KB a tenant."""

    def __init__(self, blocks: Blocks, ghosts: int, seed: int) -> None:
        self._blocks = blocks
        self._seed = seed
        self._used = zeros(blocks.capacity, np.uint32)
        self._uses = zeros(blocks.capacity, np.uint8)
        self._kind = zeros(blocks.capacity, np.uint8)
        self._ghosts = Ghosts(ghosts)
        self._curves: dict[int, ReuseCurves] = {}
        self._news: dict[int, int] = {}
        self._mean: dict[int, float] = {}
        self._epoch_ticks = 0

    @property
    def ram_bytes(self) -> int:
        """Bytes of state, columns as far as rows have been in use."""
        return (
            6 * self._blocks.rows_touched
            + self._ghosts.ram_bytes()
            + sum(c.ram_bytes for c in self._curves.values())
        )

    # -- what happens

    def stored(self, rows: Rows, tenant: int, now: float) -> None:
        """New bytes for a piece of a chain, in order: new blocks, or such as had been lost."""
        if not len(rows):
            return
        lost = self._used[rows] == 0
        came_back = self._recall(rows[lost])
        known = ~lost
        known[lost] = came_back
        self.used(rows[known], tenant, now)
        fresh = rows[~known]
        if not len(fresh):
            return
        kind = self._new_kind(int(self._blocks.parent[fresh[0]]), len(fresh), tenant)
        mean = self._mean.get(tenant, float(len(fresh)))
        self._mean[tenant] = mean + (len(fresh) - mean) / _MEAN_OVER
        self._enter(fresh, np.full(len(fresh), kind), np.ones(len(fresh)), tenant, now)

    def passed_by(self, rows: Rows, tenant: int, now: float) -> None:
        """The same for what is not kept, and about to be given back: it may come again."""
        self.stored(rows, tenant, now)
        self.gone(rows)

    def restored(self, rows: Rows, tenant: int, now: float) -> None:
        """Blocks of an earlier life; of those of which nothing was learned then only that they are here."""
        rows = rows[self._used[rows] == 0]
        rows = rows[~self._recall(rows)]
        self._enter(rows, np.zeros(len(rows), np.int64), np.ones(len(rows)), tenant, now)

    def used(self, rows: Rows, tenant: int, now: float) -> None:
        """Stored blocks were asked for, and there."""
        if not len(rows):
            return
        since, kinds = self._since(rows), self.classes(rows)
        self._of(tenant).used(kinds, since, now)
        uses = np.minimum(self.uses(rows) + 1, _MOST_USES)
        self._enter(rows, _kinds_after(kinds, uses, tick(now) - since), uses, tenant, now)

    def told(self, rows: Rows, tenant: int, next_use_s: float | None, now: float) -> None:
        """A client expects to use stored blocks again in so many seconds; None: never.

        They get classes of their own, and how far clients' words come true is learned like everything else.
        """
        if not len(rows):
            return
        self._of(tenant).left(self.classes(rows), self._since(rows))
        interval, amount = (
            (0, 1) if next_use_s is None else (int(np.searchsorted(_TOLD_EDGES_S, next_use_s)), 0)
        )
        kind = (_TOLD * _INTERVALS + interval) * _AMOUNTS + amount
        self._enter(rows, np.full(len(rows), kind), self._uses[rows], tenant, now)

    def favour(self, rows: Rows, high: bool) -> None:
        """A client asks to keep these longer than others, or no longer so."""
        self._kind[rows] = self._kind[rows] & _CLASS | (HIGH if high else 0)

    def _enter(self, rows: Rows, kinds: Ints, uses: npt.NDArray[np.generic], tenant: int, now: float) -> None:
        self._kind[rows] = self._kind[rows] & HIGH | kinds.astype(np.uint8)
        self._uses[rows] = uses
        self._used[rows] = self._ticks(now) + 1
        curves = self._of(tenant)
        curves.joined(kinds, now)
        news = self._news.get(tenant, 0) + len(rows)
        if news >= min(_LEARN_AFTER, _LEARN_FIRST + curves.joins // _LEARN_FIRST):
            curves.learn()
            news = 0
        self._news[tenant] = news

    def _of(self, tenant: int) -> ReuseCurves:
        if tenant not in self._curves:
            self._curves[tenant] = ReuseCurves(SHAPE)
        return self._curves[tenant]

    def forget(self, tenant: int) -> None:
        """A tenant is no more: nor is what was learned from it."""
        for book in (self._curves, self._news, self._mean):
            book.pop(tenant, None)

    def _new_kind(self, parent: int, n: int, tenant: int) -> int:
        """The class of n blocks that are stored for the first time, below a row or none (-1)."""
        mean = self._mean.get(tenant, float(n))
        return self._interval(parent) * _AMOUNTS + int(n >= mean / 4) + int(n >= mean)

    def _interval(self, row: int) -> int:
        """How long a block (-1: none) had not been used when it last was; 0: nobody knows."""
        known = row >= 0 and self._used[row] > 0
        kind = int(self._kind[row]) & _CLASS if known else 0
        return kind // _AMOUNTS % _INTERVALS if kind < _TOLD * _INTERVALS * _AMOUNTS else 0

    def _since(self, rows: Rows) -> Floats:
        return (self._used[rows].astype(np.float64) - 1 - self._epoch_ticks) / TICKS_A_S

    def _ticks(self, now: float) -> int:
        """Time as rows have it, which goes on from one process to the next."""
        return self._epoch_ticks + int(now * TICKS_A_S)

    # -- ghosts

    def gone(self, rows: Rows) -> None:
        """Rows are about to be given back: those that had a history leave a ghost."""
        rows = rows[self._used[rows] > 0]
        if len(rows):
            self._note(rows)
            self._used[rows] = 0
            self._kind[rows] = 0

    def _note(self, rows: Rows) -> None:
        past = self._used[rows].astype(np.uint64) << np.uint64(11)
        past |= self._uses[rows].astype(np.uint64) << np.uint64(7)
        past |= (self._kind[rows] & _CLASS).astype(np.uint64)
        self._ghosts.put(fingerprints(self._blocks, rows, self._seed), past)

    def _recall(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Gives rows the histories that their blocks had; which of them had one."""
        past = self._ghosts.take(fingerprints(self._blocks, rows, self._seed))
        known: npt.NDArray[np.bool_] = past >= 0
        back, past = rows[known], past[known]
        self._used[back], self._uses[back], self._kind[back] = past >> 11, past >> 7 & 15, past & _CLASS
        return known

    # -- from one process to the next

    def learned(self, now: float) -> ReuseState:
        """All of it: a pass over all blocks, for the end."""
        rows = np.flatnonzero(self._used[: self._blocks.rows_touched])
        for first in range(0, len(rows), _NOTED_AT_ONCE):
            self._note(rows[first : first + _NOTED_AT_ONCE])
        curves = {tenant: curves.counts() for tenant, curves in self._curves.items()}
        return ReuseState(self._seed, self._ticks(now), curves, *self._ghosts.dump())

    def go_on(self, learned: ReuseState, elapsed_s: float, now: float) -> None:
        """Before anything else: it was so long ago. Ghosts are for the same room and for some years."""
        for tenant, counts in learned.curves.items():
            self._curves[tenant] = ReuseCurves(SHAPE, counts)
        ticks = learned.ticks + max(0, int(elapsed_s * TICKS_A_S))
        if ticks < _MOST_TICKS and self._ghosts.load(learned.room, learned.at, learned.words):
            self._seed = learned.seed
            self._epoch_ticks = ticks - int(now * TICKS_A_S)

    # -- what to expect

    def kinds(self, rows: Rows) -> Ints:
        """The class of each row, and HIGH where it is to be kept longer."""
        return self._kind[rows].astype(np.int64)

    def classes(self, rows: Rows) -> Ints:
        """The class of each row."""
        return self.kinds(rows) & _CLASS

    def last_used(self, rows: Rows) -> Floats:
        """When each was last used, in core time."""
        return self._since(rows)

    def uses(self, rows: Rows) -> Ints:
        """How often each was used, its first storing counted, up to 15."""
        return self._uses[rows].astype(np.int64)

    def density(self, tenant: int, kinds: Ints, since: Floats, now: float) -> npt.NDArray[np.float32]:
        """What a slot earns a second with blocks of these classes, last used then."""
        density: npt.NDArray[np.float32] = self._of(tenant).density[kinds & _CLASS, span_of(now - since)]
        return np.where(kinds & HIGH, _FAVOUR * density, density)

    def earning(self, tenant: int, now: float) -> Callable[[int], float]:
        """The same for one row after another, until something is learned."""
        density, used, kinds = self._of(tenant).density.data, self._used.data, self._kind.data
        last = self._ticks(now) + 1

        def earned(row: int) -> float:
            kind = kinds[row]
            here = density[kind & _CLASS, one_span_of((last - used[row]) / TICKS_A_S)]
            return float(_FAVOUR * here if kind & HIGH else here)

        return earned

    def promise(
        self, words: npt.NDArray[np.uint64], namespace: int, parent: int, n: int, tenant: int, now: float
    ) -> float:
        """What n blocks would earn a second if stored now: as much as their first one, with a key of `words`.

        What comes behind it is no more likely to be used, and goes first. All there is, until enough is known
        of the tenant's blocks to say so.
        """
        curves = self._of(tenant)
        if curves.joins < _LEARN_AFTER:
            return math.inf
        name = fingerprints_of(words[None, :], np.array([namespace], np.uint64), self._seed)
        past = self._ghosts.peek(name)
        kinds = np.array([self._new_kind(parent, n, tenant)])
        if past[0] >= 0:
            last_used = ((past >> 11) - 1 - self._epoch_ticks) / TICKS_A_S
            kinds = _kinds_after(
                past & _CLASS, np.minimum((past >> 7 & 15) + 1, _MOST_USES), tick(now) - last_used
            )
        return float(curves.density[kinds[0], 0])

    def chance(self, rows: Rows, tenant: int, now: float) -> npt.NDArray[np.float32]:
        """P(a block is used again), for blocks of one tenant."""
        spans = span_of(now - self._since(rows))
        chance: npt.NDArray[np.float32] = self._of(tenant).chance[self.classes(rows), spans]
        return chance


def _kinds_after(kinds: Ints, uses: Ints, intervals_s: Floats) -> Ints:
    """The classes of blocks that are used again after so long, `uses` with this one."""
    counts = np.minimum(np.log2(uses).astype(np.int64), _COUNTS - 1)
    intervals = 1 + np.searchsorted(_INTERVAL_EDGES_S, intervals_s, "left")
    amounts = np.where(kinds // (_INTERVALS * _AMOUNTS) == _TOLD, 1, kinds % _AMOUNTS)
    kinds_after: Ints = (counts * _INTERVALS + intervals) * _AMOUNTS + amounts
    return kinds_after


def describe(kind: int) -> str:
    """A class in words."""
    count, interval, amount = kind // (_INTERVALS * _AMOUNTS), kind // _AMOUNTS % _INTERVALS, kind % _AMOUNTS
    if count == _TOLD:
        edges = (*(f"{e:.0f} s" for e in _TOLD_EDGES_S), "later")
        return "told: not used again" if amount else f"told: used again within {edges[interval]}"
    uses = ("once", "2 or 3 times", "4 to 7 times", "8 times or more")[count]
    gaps = ("", *(f"up to {e:g} s" for e in _INTERVAL_EDGES_S), f"over {_INTERVAL_EDGES_S[-1]:g} s")
    with_it = ("few", "some", "many")[amount]
    gap = f", {gaps[interval]} apart" if interval else ""
    return f"used {uses}{gap}, stored with {with_it} others"
