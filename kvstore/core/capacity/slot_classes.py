"""The slot classes of one tier: the extents of each slot pool, and their ranges of flat slot numbers."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Rows
from kvstore.core.capacity.quotas import SlotPool

Slots = Rows

WITHIN_TIER = (1 << 24) - 1
"""The bits of an extent's number that are unique within its tier. Higher bits may name the tier."""


@dataclass(slots=True)
class SlotClass:
    """All extents of one pool, with `slots` slots each. `stack` has the free ones of all `total` slots."""

    pool: SlotPool
    number: int
    slots: int
    extents: list[int] = field(default_factory=list)
    total: int = 0
    free: int = 0
    stack: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def widen(self, more: int) -> None:
        """Makes room for more slots."""
        self.total += more
        if self.total > len(self.stack):
            wider = np.zeros(max(self.total, 2 * len(self.stack)), np.int32)
            wider[: self.free] = self.stack[: self.free]
            self.stack = wider

    def push(self, slots: Slots) -> None:
        """Adds free slots."""
        end = self.free + len(slots)
        self.stack[self.free : end] = slots
        self.free = end

    def pop(self, n: int) -> Slots:
        """Removes up to n free slots, the latest freed. Returns them in ascending order: in long runs."""
        n = min(n, self.free)
        self.free -= n
        return np.sort(self.stack[self.free : self.free + n]).astype(np.int64)

    def keep_free(self, which: npt.NDArray[np.bool_]) -> None:
        """Removes all other slots from the free ones."""
        kept = self.stack[: self.free][which]
        self.free = len(kept)
        self.stack[: self.free] = kept


class SlotClasses(dict[SlotPool, SlotClass]):
    """The classes that have extents, by pool. Each extent has consecutive flat slot numbers below `length`.

    `by_number` has the same classes by their own numbers; `number_at` has the class number of each extent.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.by_number: dict[int, SlotClass] = {}
        self.number_at = np.zeros(0, np.int32)
        self._by_tenant: dict[int, list[SlotClass]] = {}
        self._base: dict[int, int] = {}
        self._gaps: list[tuple[int, int]] = [(0, length)]
        self._last_number = 0

    def add(self, extent: int, pool: SlotPool, slots: int) -> slice:
        """Adds an extent with so many slots to the class of a pool. Returns the numbers of its slots."""
        if pool not in self:
            self._last_number += 1
            self[pool] = self.by_number[self._last_number] = SlotClass(pool, self._last_number, slots)
            self._by_tenant.setdefault(pool.tenant, []).append(self[pool])
        members = self[pool]
        members.extents.append(extent)
        members.widen(slots)
        within, length = extent & WITHIN_TIER, len(self.number_at)
        if within >= length:
            more = np.zeros(max(within + 1, 2 * length) - length, np.int32)
            self.number_at = np.concatenate((self.number_at, more))
        self.number_at[within] = members.number
        self._base[extent] = self._take_range(slots)
        return self.span(extent)

    def remove(self, extent: int) -> None:
        """Removes an extent from its class, and the class after its last extent."""
        members = self.of_extent(extent)
        members.extents.remove(extent)
        members.total -= members.slots
        if not members.extents:
            del self[members.pool], self.by_number[members.number]
            self._by_tenant[members.pool.tenant].remove(members)
        self._give_range_back(self._base.pop(extent), members.slots)
        self.number_at[extent & WITHIN_TIER] = 0

    def of_extent(self, extent: int) -> SlotClass:
        """Returns the class of an extent that has one."""
        return self.by_number[int(self.number_at[extent & WITHIN_TIER])]

    def of_tenant(self, tenant: int) -> list[SlotClass]:
        """Returns the classes of a tenant's pools."""
        return list(self._by_tenant.get(tenant, ()))

    def pool_at(self, extent: int) -> SlotPool | None:
        """Returns the pool of an extent. None if it has no pool, or there is no such extent."""
        return self.of_extent(extent).pool if extent in self._base else None

    def span(self, extent: int) -> slice:
        """Returns the flat numbers of an assigned extent's slots."""
        base = self._base[extent]
        return slice(base, base + self.of_extent(extent).slots)

    def slots_of(self, extent: int) -> Slots:
        """Returns the same as an array."""
        span = self.span(extent)
        return np.arange(span.start, span.stop)

    def all_slots_of(self, members: SlotClass) -> Slots:
        """Returns the flat numbers of the slots of a class, in the order of its extents."""
        bases = np.array([self._base[extent] for extent in members.extents], np.int64)
        return (bases[:, None] + np.arange(members.slots)).ravel()

    def has(self, extents: npt.NDArray[np.uint32], indexes: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Returns which of these places are slots of assigned extents."""
        last = np.zeros(max(self._base, default=0) + 1, np.int64)
        last[list(self._base)] = [self.of_extent(extent).slots for extent in self._base]
        inside = np.minimum(extents, len(last) - 1)
        there: npt.NDArray[np.bool_] = (extents < len(last)) & (indexes < last[inside])
        return there

    def slots_at(self, extents: Slots, indexes: Slots) -> Slots:
        """Returns the flat numbers of slots, from assigned extents and indexes within them."""
        bases = np.zeros(max(self._base, default=0) + 1, np.int64)
        bases[list(self._base)] = list(self._base.values())
        return bases[extents] + indexes

    def tenants_of(self, extents: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Returns the tenants of assigned extents."""
        tenants = np.zeros(max(self._base, default=0) + 1, np.int64)
        tenants[list(self._base)] = [self.of_extent(extent).pool.tenant for extent in self._base]
        held: npt.NDArray[np.int64] = tenants[extents]
        return held

    def _take_range(self, count: int) -> int:
        """Takes the lowest free range of flat numbers. Returns its first one."""
        i = next(i for i, (_, length) in enumerate(self._gaps) if length >= count)
        base, length = self._gaps.pop(i)
        if length > count:
            self._gaps.insert(i, (base + count, length - count))
        return base

    def _give_range_back(self, base: int, length: int) -> None:
        """Frees a range. Merges it with the gaps beside it."""
        for start, count in list(self._gaps):
            if start + count == base or base + length == start:
                self._gaps.remove((start, count))
                base, length = min(base, start), length + count
        bisect.insort(self._gaps, (base, length))
