"""What is known of each block's past: its last use, its number of uses and its kind.

A block that leaves every tier becomes a ghost. Its history is found again if it is stored within the time
that the ghost table covers. Times are kept in ticks of 1/8 s that continue from one process to the next.

Not covered: what a history says about future uses. See `reuse`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.reuse.classes import CLASS_MASK, HIGH_PRIORITY, MOST_USES, interval_of
from kvstore.core.reuse.curves import TICKS_A_S, Floats, Ints
from kvstore.core.reuse.ghosts import Ghosts, fingerprints, fingerprints_of

_NOTED_AT_ONCE = 1 << 16
_RECALLED_AT_ONCE = 1 << 12
"""The buckets of so many ghosts stay in the cache of a core, which makes a start twice as fast."""
_MOST_TICKS = 1 << 29
"""Half of the largest time that a ghost can hold."""
_CLASS_BITS, _USES_BITS = 7, 4
_FOLLOWS = 1 << _USES_BITS
"""Bit of the column of uses: the block belongs to a chain."""


class GhostTable(NamedTuple):
    """A ghost table of `room` words, saved at `ticks`: the words that are not 0, and their positions `at`.

    `seed` is the seed of its fingerprints.
    """

    seed: int
    ticks: int
    room: int
    at: npt.NDArray[np.uint32]
    words: npt.NDArray[np.uint64]


class BlockHistory:
    """Columns by row: `ticks` of the last use plus 1 (0: unknown), and `kind`. 6 bytes a row, 8 a ghost."""

    def __init__(self, blocks: Blocks, ghosts: int, seed: int) -> None:
        self._blocks = blocks
        self._seed = seed
        self.ticks = zeros(blocks.capacity, np.uint32)
        self._uses = zeros(blocks.capacity, np.uint8)
        self.kind = zeros(blocks.capacity, np.uint8)
        self._ghosts = Ghosts(ghosts)
        self._epoch_ticks = 0

    @property
    def ram_bytes(self) -> int:
        """Bytes of the ghost table, and of the columns up to the last row in use."""
        return 6 * self._blocks.rows_touched + self._ghosts.ram_bytes()

    def ticks_at(self, now: float) -> int:
        """Returns core time as rows and ghosts keep it."""
        return self._epoch_ticks + int(now * TICKS_A_S)

    # -- changes

    def record(self, rows: Rows, classes: Ints, uses: npt.NDArray[np.generic], now: float) -> None:
        """Sets the class and the number of uses of rows that are used now. Priorities stay."""
        self.kind[rows] = self.kind[rows] & HIGH_PRIORITY | classes.astype(np.uint8)
        self._uses[rows] = self._uses[rows] & _FOLLOWS | uses.astype(np.uint8)
        self.ticks[rows] = self.ticks_at(now) + 1

    def follow(self, rows: Rows, chain: int, now: float) -> None:
        """Gives new rows the class and the uses of the chain (a row) that they belong to."""
        self._uses[rows] = _FOLLOWS
        of = np.full(len(rows), chain)
        self.record(rows, self.classes(of), self.uses(of), now)

    def set_priority(self, rows: Rows, high: bool) -> None:
        """Marks blocks that a client asks to keep longer than others, or removes the mark."""
        self.kind[rows] = self.kind[rows] & CLASS_MASK | (HIGH_PRIORITY if high else 0)

    def leave(self, rows: Rows) -> None:
        """Turns the histories of rows that are about to be given back into ghosts.

        Those that follow a chain leave none: they follow it again when they return.
        """
        rows = rows[self.ticks[rows] > 0]
        if len(rows):
            self._add_ghosts(rows[~self.follows(rows)])
            self.ticks[rows] = 0
            self.kind[rows] = 0
            self._uses[rows] = 0

    def _add_ghosts(self, rows: Rows) -> None:
        past = self.ticks[rows].astype(np.uint64) << np.uint64(_CLASS_BITS + _USES_BITS)
        past |= self.uses(rows).astype(np.uint64) << np.uint64(_CLASS_BITS)
        past |= (self.kind[rows] & CLASS_MASK).astype(np.uint64)
        self._ghosts.put(fingerprints(self._blocks, rows, self._seed), past)

    def recall(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Restores the histories of rows from their ghosts. Returns which rows had one."""
        known = np.zeros(len(rows), np.bool_)
        for first in range(0, len(rows), _RECALLED_AT_ONCE):
            some = rows[first : first + _RECALLED_AT_ONCE]
            past = self._ghosts.take(fingerprints(self._blocks, some, self._seed))
            found = known[first : first + _RECALLED_AT_ONCE] = past >= 0
            back = some[found]
            self.ticks[back], self._uses[back], self.kind[back] = _split(past[found])
        return known

    # -- questions

    def is_known(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which rows have a history."""
        known: npt.NDArray[np.bool_] = self.ticks[rows] > 0
        return known

    def kinds(self, rows: Rows) -> Ints:
        """Returns the class of each row, with the bit HIGH_PRIORITY."""
        return self.kind[rows].astype(np.int64)

    def classes(self, rows: Rows) -> Ints:
        """Returns the class of each row."""
        return self.kinds(rows) & CLASS_MASK

    def uses(self, rows: Rows) -> Ints:
        """Returns how often each row was used, the first storing included, up to 15."""
        return self._uses[rows].astype(np.int64) & MOST_USES

    def follows(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which rows belong to a chain."""
        follows: npt.NDArray[np.bool_] = self._uses[rows] >= _FOLLOWS
        return follows

    def last_used(self, rows: Rows) -> Floats:
        """Returns when each row was last used, in core time (seconds)."""
        return self._seconds(self.ticks[rows])

    def interval(self, row: int) -> int:
        """Returns the interval of a row's class; 0 if it is unknown, or if there is no row (-1)."""
        return interval_of(int(self.kind[row]) & CLASS_MASK) if row >= 0 and self.ticks[row] > 0 else 0

    def ghost(self, words: npt.NDArray[np.uint64], namespace: int) -> tuple[Ints, Ints, Floats] | None:
        """Returns (class, uses, last use) of a key's ghost, as arrays of one; None if there is none."""
        name = fingerprints_of(words[None, :], np.array([namespace], np.uint64), self._seed)
        past = self._ghosts.peek(name)
        if past[0] < 0:
            return None
        ticks, uses, number = _split(past)
        return number, uses, self._seconds(ticks)

    def _seconds(self, ticks: npt.NDArray[np.uint32] | Ints) -> Floats:
        return (ticks.astype(np.float64) - 1 - self._epoch_ticks) / TICKS_A_S

    # -- from one process to the next

    def save(self, now: float) -> GhostTable:
        """Turns all histories into ghosts and returns the ghost table. Passes over all rows."""
        rows = np.flatnonzero(self.ticks[: self._blocks.rows_touched])
        for first in range(0, len(rows), _NOTED_AT_ONCE):
            self._add_ghosts(rows[first : first + _NOTED_AT_ONCE])
        return GhostTable(self._seed, self.ticks_at(now), *self._ghosts.dump())

    def load(self, saved: GhostTable, elapsed_s: float, now: float) -> None:
        """Continues from a table saved `elapsed_s` ago; ignores one of another size, or of many years."""
        ticks = saved.ticks + max(0, int(elapsed_s * TICKS_A_S))
        if ticks < _MOST_TICKS and self._ghosts.load(saved.room, saved.at, saved.words):
            self._seed = saved.seed
            self._epoch_ticks = ticks - int(now * TICKS_A_S)


def _split(past: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns (ticks, uses, class) of ghosts' values."""
    return past >> (_CLASS_BITS + _USES_BITS), past >> _CLASS_BITS & MOST_USES, past & CLASS_MASK
