"""Slots: the one allocator of every tier. An extent is given to one slot size and cut into equal slots.

Slots carry flat numbers within their tier. A slot is in use while a row owns it or somebody refers to it
(a lease, a reservation, a copy under way), and free otherwise: so a dropped block's slot is never reused
under a reader. Free space is counted here, never stored.

Not covered: what the bytes are, and where they physically are; the shell knows that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import Picked, Rows
from kvstore.types import SLOT_RECORD, Geometry

Slots = Rows


@dataclass(slots=True)
class SlotClass:
    """All extents of one slot size: which ones, and a stack of their free slots."""

    slot_bytes: int
    extents: list[int] = field(default_factory=list)
    total: int = 0
    free: int = 0
    stack: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def push(self, slots: Slots) -> None:
        """Slots that became free."""
        end = self.free + len(slots)
        self.stack[self.free : end] = slots
        self.free = end

    def pop(self, n: int) -> Slots:
        """Up to n free slots, those freed last first."""
        n = min(n, self.free)
        self.free -= n
        return self.stack[self.free : self.free + n][::-1].astype(np.int64)


class Extents:
    """Extents of `extent_bytes` up to `limit_bytes`. `max_slots` bounds the columns.

    `record` has for each slot what a client is told of it; `tier` is the number that goes into it.
    `slotless` counts how often an extent could not be cut for want of columns: blocks far below 16 KiB.
    """

    def __init__(self, limit_bytes: int, extent_bytes: int, table: bool, max_slots: int, tier: int) -> None:
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.table = table
        # Zero pages at full length, of which `owner`, `refs` and `record` show what is in use: nothing is
        # ever copied to make room for more.
        self._columns = (
            np.zeros(max_slots, np.int32),
            np.zeros(max_slots, np.int32),
            np.zeros(max_slots, SLOT_RECORD),
        )
        self._max_slots = max_slots
        self._show(0)
        self._tier = tier
        self._base: dict[int, int] = {}
        self._ranges: list[tuple[int, int]] = []
        self.unassigned: list[int] = []
        self.ready: set[int] = set()
        self.classes: dict[int, SlotClass] = {}
        self.retired: set[int] = set()
        self.slotless = 0

    # -- extents

    def add(self, extent: int) -> None:
        """An extent has become usable. Raises AssertionError beyond the limit: never exceed."""
        assert extent not in self.ready
        self.ready.add(extent)
        assert len(self.ready) * self.extent_bytes <= self.limit_bytes
        self.unassigned.append(extent)
        self.unassigned.sort(reverse=True)

    def slots_of(self, extent: int) -> Slots:
        """The flat numbers of an assigned extent's slots."""
        base = self._base[extent]
        return np.arange(base, base + self.geometry(int(self._class_of(extent))).slots)

    def geometry(self, slot_bytes: int) -> Geometry:
        """How an extent of this tier is cut for a slot size."""
        return Geometry(self.extent_bytes, slot_bytes, self.table)

    def most_slots(self, slot_bytes: int) -> int:
        """How many slots of a size there are if all extents are given to it."""
        return self.limit_bytes // self.extent_bytes * self.geometry(slot_bytes).slots

    def _class_of(self, extent: int) -> int:
        return next(size for size, c in self.classes.items() if extent in c.extents)

    def assign(self, slot_bytes: int, extent: int | None = None) -> int | None:
        """Gives an unassigned extent (or the one named) to a slot size; None when there is none."""
        slots = self.geometry(slot_bytes).slots
        if extent is None:
            if not self.unassigned or not slots:
                return None
            extent = self.unassigned[-1]
        base = self._range(slots)
        if base is None:
            self.slotless += 1
            return None
        self.unassigned.remove(extent)
        self._base[extent] = base
        numbers = np.arange(base, base + slots)
        self.place[numbers] = np.arange(slots, dtype=np.uint64) | np.uint64(extent << 32)
        self.record["tier"][numbers] = self._tier
        if slot_bytes not in self.classes:
            self.classes[slot_bytes] = SlotClass(slot_bytes, stack=np.zeros(self._max_slots, np.int32))
        pool = self.classes[slot_bytes]
        pool.extents.append(extent)
        pool.total += slots
        # Highest first: the stack then hands slots out in ascending order, so that a batch lies in a row.
        pool.push(numbers[::-1])
        return extent

    def withdraw(self, extent: int) -> None:
        """Takes an extent whose slots are all free away from its slot size."""
        size = self._class_of(extent)
        numbers = self.slots_of(extent)
        assert (self.owner[numbers] < 0).all()
        assert not self.refs[numbers].any()
        pool = self.classes[size]
        stack = pool.stack[: pool.free]
        kept = stack[self.place[stack] >> np.uint64(32) != extent]
        pool.stack[: len(kept)] = kept
        pool.free = len(kept)
        pool.extents.remove(extent)
        pool.total -= len(numbers)
        if not pool.extents:
            del self.classes[size]
        self._ranges.append((int(numbers[0]), len(numbers)))
        del self._base[extent]
        self.unassigned.append(extent)

    def _range(self, count: int) -> int | None:
        for i, (base, length) in enumerate(self._ranges):
            if length >= count:
                del self._ranges[i]
                if length > count:
                    self._ranges.append((base + count, length - count))
                return base
        base, end = len(self.owner), len(self.owner) + count
        if end > self._max_slots:
            return None
        self._show(end)
        self.owner[base:end] = -1
        return base

    def _show(self, end: int) -> None:
        owner, refs, record = self._columns
        self.owner, self.refs, self.record = owner[:end], refs[:end], record[:end]

    @property
    def place(self) -> npt.NDArray[np.uint64]:
        """Where each slot is: extent << 32 | index within it."""
        return self.record["place"]

    @property
    def version(self) -> npt.NDArray[np.uint32]:
        """How often each slot has been given out."""
        return self.record["version"]

    # -- slots

    def free(self, slot_bytes: int) -> int:
        """Free slots of a size, not counting unassigned extents."""
        pool = self.classes.get(slot_bytes)
        return pool.free if pool else 0

    def take(self, slot_bytes: int, n: int) -> Slots:
        """Up to n free slots, each with one reference and a new version; the taker owns that reference."""
        slots = self.classes[slot_bytes].pop(n)
        self.refs[slots] = 1
        self.version[slots] += 1
        return slots

    def hold(self, slots: Picked) -> None:
        """One more reference on each (slots distinct)."""
        self.refs[slots] += 1

    def release(self, slots: Picked) -> None:
        """One reference less on each (slots distinct); those that nobody owns become free."""
        self.refs[slots] -= 1
        if isinstance(slots, slice):
            # Owned all of them, as nearly always: nothing to do, and nothing to spell out.
            if self.owner[slots].min() >= 0:
                return
            slots = np.arange(slots.start, slots.stop)
        self._free_unused(slots)

    def own(self, slots: Slots, rows: Slots, checksums: npt.NDArray[np.uint64]) -> None:
        """From now on the rows own these slots, whose bytes have these checksums."""
        self.owner[slots] = rows
        self.record["checksum"][slots] = checksums

    def disown(self, slots: Slots) -> None:
        """Nobody owns these slots any longer; those without references become free."""
        self.owner[slots] = -1
        self._free_unused(slots)

    def retire(self, slots: Slots) -> None:
        """Quarantine: disowned, and never handed out again by this run."""
        self.owner[slots] = -1
        self.refs[slots] += 1
        self.retired.update(slots.tolist())

    def _free_unused(self, slots: Slots) -> None:
        if not len(slots) or self.owner[slots].min() >= 0:
            return
        unused = slots[(self.refs[slots] == 0) & (self.owner[slots] < 0)]
        if len(unused):
            self.classes[self.class_size(unused)].push(unused)

    def class_size(self, slots: npt.NDArray[np.signedinteger]) -> int:
        """The slot size of slots that share one."""
        if len(self.classes) == 1:
            return next(iter(self.classes))
        return self._class_of(int(self.place[slots[0]]) >> 32)

    def are_of(self, slot_bytes: int, slots: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.bool_]:
        """Which of these slots have this size."""
        if len(self.classes) == 1:
            return np.ones(len(slots), np.bool_)
        extents = (self.place[slots] >> np.uint64(32)).astype(np.int64)
        return np.isin(extents, self.classes[slot_bytes].extents)

    def has(self, extents: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Which of these extents are assigned to a slot size."""
        return np.isin(extents, list(self._base))

    def slots_at(self, extents: Slots, indexes: Slots) -> Slots:
        """The flat numbers of slots, from extents that are assigned and indexes within them."""
        bases = np.zeros(max(self._base, default=0) + 1, np.int64)
        bases[list(self._base)] = list(self._base.values())
        return bases[extents] + indexes

    def claim(
        self, slot_bytes: int, slots: Slots, rows: Slots, versions: Slots, checksums: npt.NDArray[np.uint64]
    ) -> None:
        """Start-up: these free slots turn out to be owned."""
        pool = self.classes[slot_bytes]
        self.own(slots, rows, checksums)
        self.version[slots] = versions
        stack = pool.stack[: pool.free]
        kept = stack[self.owner[stack] < 0]
        pool.stack[: len(kept)] = kept
        pool.free = len(kept)

    # -- counting

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all usable extents; never above the limit."""
        return len(self.ready) * self.extent_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        return sum((c.total - c.free) * c.slot_bytes for c in self.classes.values())

    def ram_bytes(self) -> int:
        """Bytes of the columns and stacks."""
        columns = self.owner.nbytes + self.refs.nbytes + self.record.nbytes
        return columns + sum(c.stack.itemsize * c.total for c in self.classes.values())
