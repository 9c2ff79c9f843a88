"""Presence tables: which keys of a namespace are stored, in memory that clients read without a request.

A table has one cell of 8 bytes for each readable block: a fingerprint of its key, and below it the tier that
would serve it. A key has two buckets of 8 cells. Readers take no locks: each change is one aligned store,
and no cell moves. Even a torn read would only be a miss, or make `acquire` find fewer blocks.

Each cell has a place beside it: where in DRAM the block is, if it is there. A place may be out of date. What
clients read there is proved by the block's checksum, as everywhere.

A table is filled in steps and then follows every change. One that is too full is retired, like the table of a
namespace that is deleted, published or gets a TTL. A client then asks for another table. The daemon provides
the memory: one line of 64 bytes (state, seed of the hash, whether the parents of all blocks in the table are
in it), the buckets, and as many lines of places. `native/presence.c` reads and writes it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvstore.columns import distinct
from kvstore.core.actions import PresenceRetired
from kvstore.core.blocks.block_table import LIVE, Blocks, Rows
from kvstore.core.jobs import Job
from kvstore.core.residency.gaps import Gaps
from kvstore.core.residency.namespace import Namespace, Namespaces
from kvstore.core.residency.outbox import Outbox
from kvstore.core.residency.topology import Topology
from kvstore.native import presence_set
from kvstore.types import (
    PRESENCE_HIDDEN,
    PRESENCE_NOT_READY,
    PRESENCE_READY,
    PRESENCE_RETIRED,
)

U64 = npt.NDArray[np.uint64]

_WAYS = 8
_LINE_BYTES = 64
_LEAST_BUCKETS = 512
_FULL = 0.65  # of all cells: up to here, there is room for every key
_SCANNED_AT_ONCE = 1 << 14
_ADDED_AT_ONCE = 1 << 9
_NEXT_STEP_S = 0.004  # a step takes a tenth of it: requests are not to wait for a table that is filled


def table_bytes(rows: int) -> int:
    """Returns the bytes of a table that is half full with this number of rows."""
    return _LINE_BYTES * (1 + 2 * max(_LEAST_BUCKETS, -(-2 * rows // _WAYS)))


class PresenceTable:
    """The table of one namespace. It has the rows below `row`, `count` of them."""

    def __init__(self, namespace: Namespace, words: U64, seed: int) -> None:
        """`words` are zeros, as many as `table_bytes` says."""
        self.namespace = namespace
        self.words = words
        self.cells, self.places = words[_WAYS:].reshape(2, -1, _WAYS)
        self.row = 0
        self.count = 0
        words[1] = seed

    def set_state(self, state: int) -> None:
        """Tells readers whether they may use the table."""
        self.words[0] = state

    def set(self, words: U64, size: int, flags: U64, there: npt.NDArray[np.bool_], places: U64) -> bool:
        """Adds keys, changes what is said of them, or removes those that are not `there`.

        `words`: keys of `size` bytes, padded to `MAX_KEY_BYTES`. Returns False if there is no room for some.
        """
        gained, room = presence_set(self.words, words, size, flags, there, places)
        self.count += gained
        return room and self.count <= _FULL * self.cells.size


class PresenceTables(Job):
    """The tables of a placement by namespace, each as the daemon asked for it. As a job, fills them."""

    def __init__(
        self, blocks: Blocks, namespaces: Namespaces, topology: Topology, outbox: Outbox, gaps: Gaps
    ) -> None:
        self.tables: dict[int, PresenceTable] = {}
        self.out_of_reach = False
        self._outgrown: set[int] = set()
        self._blocks = blocks
        self._namespaces = namespaces
        self._topology = topology
        self._outbox = outbox
        self._gaps = gaps
        gaps.on_change = self._look_at_gaps

    def bytes_for(self, number: int) -> int:
        """Returns the bytes of a new table of a namespace, 0 if none could answer for a request."""
        namespace = self._namespaces.get(number)
        if namespace is None or namespace.closed or namespace.has_ttl:
            return 0
        rows = int(self._blocks.rows_in[number])
        # A namespace that has outgrown a table grows on: filling tables must not take the time of its puts.
        return table_bytes(2 * rows if number in self._outgrown else rows)

    def share(self, number: int, words: U64, seed: int) -> None:
        """Makes the table of a namespace."""
        self.retire(number)
        if self.bytes_for(number):
            self.tables[number] = PresenceTable(self._namespaces[number], words, seed)
            self._look_at_gaps(number)
            self._next_step = min(self._next_step, self._outbox.now)
        else:
            self._outbox.actions.append(PresenceRetired(number))

    def retire(self, number: int) -> None:
        """Ends the table of a namespace, if it has one."""
        table = self.tables.pop(number, None)
        if table is not None:
            table.set_state(PRESENCE_RETIRED)
            self._outbox.actions.append(PresenceRetired(number))

    def changed(self, tier: int, rows: Rows) -> None:
        """Updates the tables: rows have gained or lost a copy in a tier."""
        if not self.tables:
            return
        if tier:
            rows = rows[self._blocks.slot[0, rows] < 0]  # whatever happens below DRAM, DRAM serves the others
        if not len(rows):
            return
        for namespace, some in self._namespaces.split(rows):
            table = self.tables.get(namespace.number)
            if table is not None:
                self._update(table, some[some < table.row])

    def _look_at_gaps(self, number: int) -> None:
        """Tells readers of a namespace whether a search of a prefix may skip keys."""
        table = self.tables.get(number)
        if table is not None:
            namespace = table.namespace
            gaps = namespace.independent or namespace.relocated or self._gaps.are_in(number)
            table.words[2] = not gaps

    def look_at_devices(self) -> None:
        """Suspends all tables while a device cannot be read: its blocks are misses."""
        if self.tables and self.out_of_reach != self._topology.out_of_reach:
            self.out_of_reach = not self.out_of_reach
            for table in self.tables.values():
                self._set_state(table)

    def _set_state(self, table: PresenceTable) -> None:
        filled = table.row >= self._blocks.capacity
        table.set_state(PRESENCE_READY if filled and not self.out_of_reach else PRESENCE_NOT_READY)

    def _update(self, table: PresenceTable, rows: Rows) -> None:
        blocks = self._blocks
        sizes = blocks.key_bytes[rows]
        flags, there, places = self.cells_of(table.namespace, rows)
        widths = distinct(sizes)
        for size in widths:
            some = slice(None) if len(widths) == 1 else sizes == size
            if not table.set(blocks.all_words(rows[some]), size, flags[some], there[some], places[some]):
                self._outgrown.add(table.namespace.number)
                return self.retire(table.namespace.number)
        return None

    def cells_of(self, namespace: Namespace, rows: Rows) -> tuple[U64, npt.NDArray[np.bool_], U64]:
        """Returns the flags of each row's cell, whether the row has one (it is readable), and its place.

        The flags are the number of the tier that serves the block to DRAM, and whether it is hidden: other
        tenants may not map its slot yet. The place is 0 without a slot in DRAM.
        """
        order = np.array([*self._topology.memory, *self._topology.persistent])
        held = self._blocks.slot[:, rows][order] >= 0
        there = held.any(axis=0) & (self._blocks.state[rows] == LIVE)
        flags = order[held.argmax(axis=0)].astype(np.uint64)
        slots, places = self._blocks.slot[0, rows], np.zeros(len(rows), np.uint64)
        places[slots >= 0] = self._topology.tiers[0].slots.place[slots[slots >= 0]]
        if namespace.relocated:
            own = self._topology.tiers[0].slots.are_of(namespace.pools[0], slots) | (slots < 0)
            flags[~own] |= np.uint64(PRESENCE_HIDDEN)
        return flags, there, places

    def _step(self, now: float) -> None:
        """Fills a table by some more rows."""
        if table := self._filling():
            self._fill(table)
        self._next_step = now + _NEXT_STEP_S if self._filling() else math.inf

    def _filling(self) -> PresenceTable | None:
        """Returns the first table that is not full yet."""
        return next((table for table in self.tables.values() if table.row < self._blocks.capacity), None)

    def _fill(self, table: PresenceTable) -> None:
        blocks, first = self._blocks, table.row
        last = min(first + _SCANNED_AT_ONCE, blocks.rows_touched)
        here = slice(first, last)
        mine = (blocks.namespace[here] == table.namespace.number) & (blocks.state[here] == LIVE)
        rows = first + np.flatnonzero(mine)
        if len(rows) > _ADDED_AT_ONCE:
            rows, last = rows[:_ADDED_AT_ONCE], int(rows[_ADDED_AT_ONCE])
        table.row = last
        self._update(table, rows)
        if last >= blocks.rows_touched and table.namespace.number in self.tables:
            table.row = blocks.capacity
            self._set_state(table)

    def ram_bytes(self) -> int:
        """Returns the bytes of all tables."""
        return sum(table.words.nbytes for table in self.tables.values())
