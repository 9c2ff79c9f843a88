"""The slots of one tier: their owners, references and free lists, a column each.

A slot is in use while a row owns it, or a lease, a reservation or a copy refers to it. So the slot of a
dropped block is not reused while a reader uses it.

Not covered: which extent belongs to which tenant (`extents`), and the bytes of slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.columns import distinct, zeros
from kvstore.core.blocks.block_table import Picked, Rows
from kvstore.core.capacity.quotas import Holdings, SlotPool
from kvstore.core.capacity.slot_classes import WITHIN_TIER, SlotClass, SlotClasses, Slots
from kvstore.types import SLOT_RECORD


class SlotTable:
    """The slots of a tier's assigned extents, by flat number, up to `length`.

    `record` has for each slot what clients are told of it; `tier` is the number in it. Of the record, `place`
    is extent << 32 | index, and `version` counts how often the slot was taken. No slot of a `closed` extent
    is taken. `retired` slots are not used again.
    """

    def __init__(self, length: int, tier: int, holdings: Holdings) -> None:
        # Zero pages at full length. `_show` extends the part in use, so nothing is copied to grow.
        self._columns = (
            zeros(length, np.int32),
            zeros(length, np.int32),
            zeros(length * SLOT_RECORD.itemsize, np.uint8).view(SLOT_RECORD),
        )
        self._show(0)
        self._tier = tier
        self._holdings = holdings
        self.classes = SlotClasses(length)
        self.closed: set[int] = set()
        self.retired: set[int] = set()

    def _show(self, end: int) -> None:
        owner, refs, record = self._columns
        self.owner, self.refs, self.record = owner[:end], refs[:end], record[:end]
        self.place: npt.NDArray[np.uint64] = self.record["place"]
        self.version: npt.NDArray[np.uint32] = self.record["version"]

    # -- extents

    def add(self, extent: int, pool: SlotPool, slots: int) -> None:
        """Adds the free slots of an extent to a pool."""
        span = self.classes.add(extent, pool, slots)
        shown = len(self.owner)
        if span.stop > shown:
            self._show(span.stop)
            self.owner[shown:] = -1
        numbers = np.arange(span.start, span.stop)
        self.place[numbers] = np.arange(slots, dtype=np.uint64) | np.uint64(extent << 32)
        self.record["tier"][numbers] = self._tier
        self._holdings.fitted[pool.tenant] += slots * pool.slot_bytes
        # Highest first: batches are taken from the end and so lie in ascending slots.
        self.classes[pool].push(numbers[::-1])

    def close(self, extent: int) -> None:
        """Stops handing out slots of an extent, which is to be withdrawn."""
        self.closed.add(extent)
        members, span = self.classes.of_extent(extent), self.classes.span(extent)
        stack = members.stack[: members.free]
        members.keep_free((stack < span.start) | (stack >= span.stop))

    def reopen(self, extent: int) -> None:
        """Undoes `close`."""
        self.closed.discard(extent)
        numbers = self.classes.slots_of(extent)
        unused = (self.owner[numbers] < 0) & (self.refs[numbers] == 0)
        self.classes.of_extent(extent).push(numbers[unused])

    def remove(self, extent: int) -> None:
        """Removes a closed extent without used slots. Its retired slots are forgotten."""
        pool, span = self.classes.of_extent(extent).pool, self.classes.span(extent)
        gone = self._retired_in(span)
        self.retired.difference_update(gone)
        self.refs[gone] -= 1
        self._holdings.used[pool.tenant] -= len(gone) * pool.slot_bytes
        assert (self.owner[span] < 0).all()
        assert not self.refs[span].any()
        self.closed.remove(extent)
        self._holdings.fitted[pool.tenant] -= (span.stop - span.start) * pool.slot_bytes
        self.classes.remove(extent)

    def rows_of(self, extent: int) -> Rows:
        """Returns the rows that own slots of an assigned extent."""
        owner = self.owner[self.classes.span(extent)]
        return owner[owner >= 0].astype(np.int64)

    def is_referred(self, extent: int) -> bool:
        """Returns whether slots of an extent have references. The one of a retired slot does not count."""
        span = self.classes.span(extent)
        only_retired = int((self.refs[self._retired_in(span)] == 1).sum()) if self.retired else 0
        return int(np.count_nonzero(self.refs[span])) > only_retired

    def is_used(self, extent: int) -> bool:
        """Returns whether slots of an extent have owners or references."""
        return bool(self.owner[self.classes.span(extent)].max() >= 0) or self.is_referred(extent)

    def _retired_in(self, span: slice) -> list[int]:
        return [slot for slot in self.retired if span.start <= slot < span.stop]

    # -- slots

    def free(self, pool: SlotPool) -> int:
        """Returns the number of free slots of a pool."""
        members = self.classes.get(pool)
        return members.free if members else 0

    def take(self, pool: SlotPool, n: int) -> Slots:
        """Takes up to n free slots. Each gets a new version and one reference, which the caller owns."""
        slots = self.classes[pool].pop(n)
        self._holdings.used[pool.tenant] += len(slots) * pool.slot_bytes
        self.refs[slots] = 1
        self.version[slots] += 1
        return slots

    def hold(self, slots: Picked) -> None:
        """Adds a reference to each slot (distinct)."""
        self.refs[slots] += 1

    def release(self, slots: Picked) -> None:
        """Removes a reference from each slot (distinct). Slots without an owner become free."""
        self.refs[slots] -= 1
        if isinstance(slots, slice):
            # In nearly all cases every slot has an owner, and nothing is left to do.
            if self.owner[slots].min() >= 0:
                return
            slots = np.arange(slots.start, slots.stop)
        self._free_unused(slots)

    def own(self, slots: Slots, rows: Slots, checksums: npt.NDArray[np.uint64]) -> None:
        """Makes rows the owners of slots, whose bytes have these checksums."""
        self.owner[slots] = rows
        self.record["checksum"][slots] = checksums

    def disown(self, slots: Slots) -> None:
        """Removes the owners of slots. Slots without references become free."""
        self.owner[slots] = -1
        self._free_unused(slots)

    def retire(self, slots: Slots) -> None:
        """Removes the owners of slots, which are not taken again while their extent exists."""
        self.owner[slots] = -1
        self.refs[slots] += 1
        self.retired.update(slots.tolist())

    def _free_unused(self, slots: Slots) -> None:
        if not len(slots) or self.owner[slots].min() >= 0:
            return
        unused = slots[(self.refs[slots] == 0) & (self.owner[slots] < 0)]
        for members, some in self.by_class(unused):
            self._holdings.used[members.pool.tenant] -= len(some) * members.pool.slot_bytes
            members.push(some[~np.isin(self._extents(some), list(self.closed))] if self.closed else some)

    def claim(self, slots: Slots, rows: Slots, versions: Slots, checksums: npt.NDArray[np.uint64]) -> None:
        """Makes rows the owners of free slots, at start-up."""
        self.own(slots, rows, checksums)
        self.version[slots] = versions
        for members, _ in self.by_class(slots):
            before = members.free
            members.keep_free(self.owner[members.stack[:before]] < 0)
            self._holdings.used[members.pool.tenant] += (before - members.free) * members.pool.slot_bytes

    # -- pools of slots

    def by_class(self, slots: Slots) -> Iterator[tuple[SlotClass, Slots]]:
        """Yields the classes of slots, mostly one, each with its slots."""
        if len(self.classes) == 1:
            if len(slots):
                yield next(iter(self.classes.values())), slots
            return
        numbers = self._class_numbers(slots)
        if len(numbers) and (numbers == numbers[0]).all():
            yield self.classes.by_number[int(numbers[0])], slots
            return
        for number in distinct(numbers):
            yield self.classes.by_number[number], slots[numbers == number]

    def pool_of(self, slot: int) -> SlotPool:
        """Returns the pool of one slot."""
        return self.classes.of_extent(int(self.place[slot]) >> 32).pool

    def are_of(self, pool: SlotPool, slots: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.bool_]:
        """Returns which slots are in a pool."""
        if pool not in self.classes:
            return np.zeros(len(slots), np.bool_)
        if len(self.classes) == 1:
            return np.ones(len(slots), np.bool_)
        same: npt.NDArray[np.bool_] = self._class_numbers(slots) == self.classes[pool].number
        return same

    def _extents(self, slots: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.int64]:
        extents: npt.NDArray[np.int64] = (self.place[slots] >> np.uint64(32)).astype(np.int64)
        return extents

    def _class_numbers(self, slots: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.int32]:
        numbers: npt.NDArray[np.int32] = self.classes.number_at[self._extents(slots) & WITHIN_TIER]
        return numbers

    def ram_bytes(self) -> int:
        """Returns the bytes of the columns and stacks."""
        columns = self.owner.nbytes + self.refs.nbytes + self.record.nbytes
        return columns + sum(c.stack.itemsize * c.total for c in self.classes.values())
