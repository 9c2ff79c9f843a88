"""Slots: the one allocator of every tier. An extent is given to one pool (whose it is, who may map it, how
large its slots are) and cut into equal slots.

Slots carry flat numbers within their tier. A slot is in use while a row owns it or somebody refers to it
(a lease, a reservation, a copy under way), and free otherwise: so a dropped block's slot is never reused
under a reader. Free space is counted here, never stored.

Not covered: what the bytes are, and where they physically are; the shell knows that.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Picked, Rows
from kvstore.core.capacity.quotas import Holdings, SlotPool
from kvstore.types import SLOT_RECORD, Geometry

Slots = Rows

_WITHIN = (1 << 24) - 1
"""What tells the extents of one tier apart; the rest of a number may say which tier it is in."""

GROWS = 4
"""A tier may become so many times as large as it was at the start: numbers of slots are there for that."""


@dataclass(slots=True)
class SlotClass:
    """All extents of one pool: which ones, of `slots` slots each, and a stack of those that are free."""

    pool: SlotPool
    number: int
    slots: int
    extents: list[int] = field(default_factory=list)
    total: int = 0
    free: int = 0
    stack: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def widen(self, more: int) -> None:
        """So many slots more belong to it."""
        self.total += more
        if self.total > len(self.stack):
            wider = np.zeros(max(self.total, 2 * len(self.stack)), np.int32)
            wider[: self.free] = self.stack[: self.free]
            self.stack = wider

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
    """Extents of `extent_bytes` up to `limit_bytes`, which have no more than `max_slots` slots together.

    `promised` has extents that are a tenant's, but not cut yet; `renewing` those that are being made anew,
    and for whom (-1: nobody), some of them `removing`, for good; from those that are `leaving` nothing is
    handed out. `bound_bytes` is above the limit while those that it no longer allows are not gone yet.
    `record` has for each slot what a client is told of it; `tier` is the number that goes into it.
    No extent has more slots than its part of them, so that one tenant's tiny blocks do not keep others from
    cutting theirs.
    """

    def __init__(self, limit_bytes: int, extent_bytes: int, table: bool, max_slots: int, tier: int) -> None:
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.table = table
        extents = max(1, limit_bytes // extent_bytes)
        self.bound_bytes = limit_bytes
        self.most_bytes = GROWS * extents * extent_bytes
        self._most_in_one = max(1, max_slots // extents)
        # Zero pages at full length, of which `owner`, `refs` and `record` show what is in use: nothing is
        # ever copied to make room for more. Twice what can be in use: then the n gaps between n - 1 extents
        # are more than n extents long in all, and one of them has room for one more.
        length = 2 * GROWS * extents * self._most_in_one
        self._columns = (
            zeros(length, np.int32),
            zeros(length, np.int32),
            zeros(length * SLOT_RECORD.itemsize, np.uint8).view(SLOT_RECORD),
        )
        self._show(0)
        self._tier = tier
        self._base: dict[int, int] = {}
        self._gaps: list[tuple[int, int]] = [(0, length)]
        self.unassigned: list[int] = []
        self.promised: dict[int, list[int]] = {}
        self.ready: set[int] = set()
        self.renewing: dict[int, int] = {}
        self.removing: set[int] = set()
        self.leaving: set[int] = set()
        self.classes: dict[SlotPool, SlotClass] = {}
        self._numbered: dict[int, SlotClass] = {}
        self._by_tenant: dict[int, list[SlotClass]] = {}
        self._class_at = np.zeros(0, np.int32)
        self._class_numbers = 0
        self.holdings = Holdings(extent_bytes)
        self.retired: set[int] = set()

    # -- extents

    def add(self, extent: int, replaces: int = -1) -> None:
        """An extent has become usable. Raises AssertionError beyond the bound: never exceed."""
        assert extent not in self.ready
        tenant = self.renewing.pop(replaces, -1)
        self.ready.add(extent)
        assert self.total * self.extent_bytes <= self.bound_bytes
        if tenant >= 0:
            self.promised.setdefault(tenant, []).append(extent)
        else:
            self.unassigned.append(extent)
            self.unassigned.sort(reverse=True)

    def lose(self, extent: int) -> None:
        """An extent could not be made anew, or is removed."""
        self.removing.discard(extent)
        tenant = self.renewing.pop(extent)
        if tenant >= 0:
            self.holdings.hold(tenant, -1)

    def renew(self, extent: int, tenant: int) -> None:
        """An extent without a pool is being made anew, for a tenant, or for nobody (-1)."""
        self.unassigned.remove(extent)
        self.ready.discard(extent)
        self.renewing[extent] = tenant
        if tenant >= 0:
            self.holdings.hold(tenant, 1)

    def remove(self, extent: int) -> None:
        """An extent without a pool is being removed."""
        self.renew(extent, -1)
        self.removing.add(extent)

    def set_limit(self, limit_bytes: int) -> None:
        """From now on; what is beyond is still there."""
        assert not limit_bytes or self.extent_bytes <= limit_bytes <= max(self.most_bytes, self.limit_bytes)
        self.limit_bytes = limit_bytes
        self.bound_bytes = max(self.bound_bytes, limit_bytes)

    @property
    def total(self) -> int:
        """Extents that take memory or disk, whether they can be used or not."""
        return len(self.ready) + len(self.renewing)

    @property
    def surplus(self) -> int:
        """By how many extents, besides those that are being removed, the limit is exceeded."""
        return max(0, self.total - len(self.removing) - self.limit_bytes // self.extent_bytes)

    @property
    def lacking(self) -> int:
        """How many extents more the limit allows."""
        return max(0, self.limit_bytes // self.extent_bytes - self.total)

    def span(self, extent: int) -> slice:
        """The flat numbers of an assigned extent's slots."""
        base = self._base[extent]
        return slice(base, base + self.class_of(extent).slots)

    def slots_of(self, extent: int) -> Slots:
        """The same, spelt out."""
        span = self.span(extent)
        return np.arange(span.start, span.stop)

    def rows_of(self, extent: int) -> Rows:
        """The rows that own slots of an assigned extent."""
        owner = self.owner[self.span(extent)]
        return owner[owner >= 0].astype(np.int64)

    def classes_of(self, tenant: int) -> list[SlotClass]:
        """The classes of a tenant's pools."""
        return list(self._by_tenant.get(tenant, ()))

    def geometry(self, slot_bytes: int) -> Geometry:
        """How an extent of this tier is cut for a slot size."""
        return Geometry(self.extent_bytes, slot_bytes, self.table)

    def slots_in(self, slot_bytes: int) -> int:
        """How many slots of a size one extent has; 0 if not even one fits."""
        return min(self.geometry(slot_bytes).slots, self._most_in_one)

    def most_slots(self, slot_bytes: int) -> int:
        """How many slots of a size there are if all extents are given to it."""
        return self.limit_bytes // self.extent_bytes * self.slots_in(slot_bytes)

    def class_of(self, extent: int) -> SlotClass:
        """The class of an extent that has one."""
        return self._numbered[int(self._class_at[extent & _WITHIN])]

    def pool_at(self, extent: int) -> SlotPool | None:
        """The pool of an extent, None if it has none or there is no such extent."""
        return self.class_of(extent).pool if extent in self._base else None

    def assign(self, pool: SlotPool, extent: int | None = None) -> int | None:
        """Gives an extent that the pool's tenant may have (or the one named) to a pool; None if none.

        None while there are more than the limit allows, too.
        """
        slots = self.slots_in(pool.slot_bytes)
        own = self.promised.get(pool.tenant, [])
        if extent is None:
            if (
                self.surplus
                or not slots
                or not (own or self.holdings.may_hold_one_more(pool.tenant, len(self.unassigned)))
            ):
                return None
            extent = own[-1] if own else self.unassigned[-1]
        base = self._take_range(slots)
        if extent in own:
            own.remove(extent)
        else:
            self.unassigned.remove(extent)
            self.holdings.hold(pool.tenant, 1)
        self._base[extent] = base
        numbers = np.arange(base, base + slots)
        self.place[numbers] = np.arange(slots, dtype=np.uint64) | np.uint64(extent << 32)
        self.record["tier"][numbers] = self._tier
        if pool not in self.classes:
            self._class_numbers += 1
            members = SlotClass(pool, self._class_numbers, slots)
            self.classes[pool] = self._numbered[self._class_numbers] = members
            self._by_tenant.setdefault(pool.tenant, []).append(members)
        members = self.classes[pool]
        members.extents.append(extent)
        members.widen(slots)
        self.holdings.fit(pool.tenant, slots * pool.slot_bytes)
        within, length = extent & _WITHIN, len(self._class_at)
        if within >= length:
            more = np.zeros(max(within + 1, 2 * length) - length, np.int32)
            self._class_at = np.concatenate((self._class_at, more))
        self._class_at[within] = members.number
        # Highest first: the stack then hands slots out in ascending order, so that a batch lies in a row.
        members.push(numbers[::-1])
        return extent

    def leave(self, extent: int) -> None:
        """From now on no slot of this extent is handed out: it is about to be withdrawn."""
        self.leaving.add(extent)
        members = self.class_of(extent)
        stack, span = members.stack[: members.free], self.span(extent)
        kept = stack[(stack < span.start) | (stack >= span.stop)]
        members.stack[: len(kept)] = kept
        members.free = len(kept)

    def stay(self, extent: int) -> None:
        """Undoes `leave`."""
        self.leaving.discard(extent)
        numbers = self.slots_of(extent)
        self.class_of(extent).push(numbers[(self.owner[numbers] < 0) & (self.refs[numbers] == 0)])

    def withdraw(self, extent: int) -> None:
        """Takes an extent that is leaving, and nothing of which is in use, away from its pool."""
        members = self.class_of(extent)
        span, tenant = self.span(extent), members.pool.tenant
        gone = self._retired_in(span)
        self.retired.difference_update(gone)
        self.refs[gone] -= 1
        self.holdings.use(tenant, -len(gone) * members.pool.slot_bytes)
        assert (self.owner[span] < 0).all()
        assert not self.refs[span].any()
        self.leaving.remove(extent)
        members.extents.remove(extent)
        members.total -= members.slots
        self.holdings.fit(tenant, -members.slots * members.pool.slot_bytes)
        if not members.extents:
            del self.classes[members.pool], self._numbered[members.number]
            self._by_tenant[tenant].remove(members)
        self._give_range_back(span.start, members.slots)
        del self._base[extent]
        self._class_at[extent & _WITHIN] = 0
        self.unassigned.append(extent)
        self.holdings.hold(tenant, -1)

    def is_referred(self, extent: int) -> bool:
        """Whether somebody refers to slots of an extent; that a slot is retired does not count."""
        span = self.span(extent)
        return int(np.count_nonzero(self.refs[span])) > self._only_retired(span)

    def is_used(self, extent: int) -> bool:
        """Whether rows own slots of it, or somebody refers to them."""
        return bool(self.owner[self.span(extent)].max() >= 0) or self.is_referred(extent)

    def _retired_in(self, span: slice) -> list[int]:
        return [slot for slot in self.retired if span.start <= slot < span.stop]

    def _only_retired(self, span: slice) -> int:
        """How many slots have no other reference than that they are retired."""
        return int((self.refs[self._retired_in(span)] == 1).sum()) if self.retired else 0

    def _take_range(self, count: int) -> int:
        """The first flat number of so many in a row, the lowest that are free."""
        i = next(i for i, (_, length) in enumerate(self._gaps) if length >= count)
        base, length = self._gaps.pop(i)
        if length > count:
            self._gaps.insert(i, (base + count, length - count))
        shown, end = len(self.owner), base + count
        if end > shown:
            self._show(end)
            self.owner[shown:] = -1
        return base

    def _give_range_back(self, base: int, length: int) -> None:
        """Makes one gap of those that touch it."""
        for start, count in list(self._gaps):
            if start + count == base or base + length == start:
                self._gaps.remove((start, count))
                base, length = min(base, start), length + count
        bisect.insort(self._gaps, (base, length))

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

    def free(self, pool: SlotPool) -> int:
        """Free slots of a pool, not counting extents that are not cut."""
        members = self.classes.get(pool)
        return members.free if members else 0

    def take(self, pool: SlotPool, n: int) -> Slots:
        """Up to n free slots, each with one reference and a new version; the taker owns that reference."""
        slots = self.classes[pool].pop(n)
        self.holdings.use(pool.tenant, len(slots) * pool.slot_bytes)
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
        for members, some in self.by_class(unused):
            self.holdings.use(members.pool.tenant, -len(some) * members.pool.slot_bytes)
            members.push(self._staying(some))

    def _staying(self, slots: Slots) -> Slots:
        """Those of extents that are not leaving."""
        if not self.leaving:
            return slots
        extents = (self.place[slots] >> np.uint64(32)).astype(np.int64)
        return slots[~np.isin(extents, list(self.leaving))]

    def by_class(self, slots: Slots) -> Iterator[tuple[SlotClass, Slots]]:
        """The classes that slots belong to, mostly one, and which ones of them."""
        if len(self.classes) == 1:
            if len(slots):
                yield next(iter(self.classes.values())), slots
            return
        numbers = self._class_numbers_at(slots)
        if len(numbers) and (numbers == numbers[0]).all():
            yield self._numbered[int(numbers[0])], slots
            return
        for number in np.unique(numbers).tolist():
            yield self._numbered[number], slots[numbers == number]

    def pool_of(self, slot: int) -> SlotPool:
        """The pool of one slot."""
        return self.class_of(int(self.place[slot]) >> 32).pool

    def are_of(self, pool: SlotPool, slots: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.bool_]:
        """Which of these slots are in this pool."""
        if pool not in self.classes:
            return np.zeros(len(slots), np.bool_)
        if len(self.classes) == 1:
            return np.ones(len(slots), np.bool_)
        same: npt.NDArray[np.bool_] = self._class_numbers_at(slots) == self.classes[pool].number
        return same

    def _class_numbers_at(self, slots: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.int32]:
        extents = (self.place[slots] >> np.uint64(32)).astype(np.int64)
        numbers: npt.NDArray[np.int32] = self._class_at[extents & _WITHIN]
        return numbers

    def has(self, extents: npt.NDArray[np.uint32], indexes: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Which of these are slots of extents that belong to a pool."""
        last = np.zeros(max(self._base, default=0) + 1, np.int64)
        last[list(self._base)] = [self.class_of(extent).slots for extent in self._base]
        inside = np.minimum(extents, len(last) - 1)
        there: npt.NDArray[np.bool_] = (extents < len(last)) & (indexes < last[inside])
        return there

    def slots_at(self, extents: Slots, indexes: Slots) -> Slots:
        """The flat numbers of slots, from extents that are assigned and indexes within them."""
        bases = np.zeros(max(self._base, default=0) + 1, np.int64)
        bases[list(self._base)] = list(self._base.values())
        return bases[extents] + indexes

    def claim(self, slots: Slots, rows: Slots, versions: Slots, checksums: npt.NDArray[np.uint64]) -> None:
        """Start-up: these free slots turn out to be owned."""
        self.own(slots, rows, checksums)
        self.version[slots] = versions
        for members, _ in self.by_class(slots):
            stack = members.stack[: members.free]
            kept = stack[self.owner[stack] < 0]
            self.holdings.use(members.pool.tenant, (len(stack) - len(kept)) * members.pool.slot_bytes)
            members.stack[: len(kept)] = kept
            members.free = len(kept)

    # -- counting

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all usable extents; never above the limit, but for a while after it was lowered."""
        return len(self.ready) * self.extent_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        return int(self.holdings.used.sum())

    def ram_bytes(self) -> int:
        """Bytes of the columns and stacks."""
        columns = self.owner.nbytes + self.refs.nbytes + self.record.nbytes
        return columns + sum(c.stack.itemsize * c.total for c in self.classes.values())
