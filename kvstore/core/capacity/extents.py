"""The extents of one tier: the unit of allocation to tenants. An assigned extent is cut into equal slots.

Not covered: slots (`slot_table`), quotas (`quotas`), and the memory or files of extents.
"""

from __future__ import annotations

from kvstore.core.capacity.quotas import Holdings, SlotPool
from kvstore.core.capacity.slot_table import SlotTable
from kvstore.types import Geometry

GROWS = 4
"""A tier can grow to this multiple of its size at the start: flat slot numbers are reserved for it."""


class Extents:
    """Extents of `extent_bytes` up to `limit_bytes`, which have at most `max_slots` slots together.

    `ready` extents can be used: they are `unassigned`, `promised` to a tenant but not cut yet, or assigned to
    a pool, with slots in `slots`. `renewing` has extents that are being reallocated, and the tenant of each
    (-1: none); some of them are `removing` instead. After the limit was lowered, `bound_bytes` is higher than
    the limit until enough extents are removed. No extent has more than its part of `max_slots`, so small
    blocks of one tenant cannot use up the slots of others.
    """

    def __init__(self, limit_bytes: int, extent_bytes: int, table: bool, max_slots: int, tier: int) -> None:
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.table = table
        extents = max(1, limit_bytes // extent_bytes)
        self.bound_bytes = limit_bytes
        self.most_bytes = GROWS * extents * extent_bytes
        self._most_in_one = max(1, max_slots // extents)
        self._tier = tier
        self.holdings = Holdings(extent_bytes)
        self.slots = self._no_slots(extents)
        self.unassigned: list[int] = []
        self.promised: dict[int, list[int]] = {}
        self.ready: set[int] = set()
        self.renewing: dict[int, int] = {}
        self.removing: set[int] = set()

    def forget_slots(self) -> SlotTable:
        """Replaces the slots by a table without any, and returns it. No extent may be left."""
        assert not self.total, "slots are in use"
        self.slots = self._no_slots(self.most_bytes // GROWS // self.extent_bytes)
        return self.slots

    def _no_slots(self, extents: int) -> SlotTable:
        # Twice the most that can be in use: the n gaps between n - 1 extents are together longer than n
        # extents, so one of the gaps has room for another extent.
        return SlotTable(2 * GROWS * extents * self._most_in_one, self._tier, self.holdings)

    # -- existence

    def add(self, extent: int, replaces: int = -1) -> None:
        """Adds a usable extent. It belongs to the tenant of the renewed extent that it replaces."""
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
        """Forgets an extent that could not be renewed, or is removed."""
        self.removing.discard(extent)
        tenant = self.renewing.pop(extent)
        if tenant >= 0:
            self.holdings.add_extents(tenant, -1)

    def renew(self, extent: int, tenant: int) -> None:
        """Begins to reallocate an unassigned extent for a tenant (-1: none)."""
        self.unassigned.remove(extent)
        self.ready.discard(extent)
        self.renewing[extent] = tenant
        if tenant >= 0:
            self.holdings.add_extents(tenant, 1)

    def remove(self, extent: int) -> None:
        """Begins to remove an unassigned extent."""
        self.renew(extent, -1)
        self.removing.add(extent)

    def set_limit(self, limit_bytes: int) -> None:
        """Sets the limit. Extents beyond it exist until they are removed."""
        assert not limit_bytes or self.extent_bytes <= limit_bytes <= max(self.most_bytes, self.limit_bytes)
        self.limit_bytes = limit_bytes
        self.bound_bytes = max(self.bound_bytes, limit_bytes)

    @property
    def total(self) -> int:
        """Extents that take memory or disk, usable or not."""
        return len(self.ready) + len(self.renewing)

    @property
    def surplus(self) -> int:
        """Extents beyond the limit, without those that are being removed."""
        return max(0, self.total - len(self.removing) - self.limit_bytes // self.extent_bytes)

    @property
    def lacking(self) -> int:
        """Extents that the limit allows in addition."""
        return max(0, self.limit_bytes // self.extent_bytes - self.total)

    # -- assignment

    def assign(self, pool: SlotPool, extent: int | None = None) -> int | None:
        """Assigns an extent that the pool's tenant may have (or the given one) to a pool. None if none.

        None also while the tier has more extents than its limit allows.
        """
        slots = self.slots_in(pool.slot_bytes)
        own = self.promised.get(pool.tenant, [])
        if extent is None:
            allowed = own or self.holdings.may_hold_one_more(pool.tenant, len(self.unassigned))
            if self.surplus or not slots or not allowed:
                return None
            extent = own[-1] if own else self.unassigned[-1]
        if extent in own:
            own.remove(extent)
        else:
            self.unassigned.remove(extent)
            self.holdings.add_extents(pool.tenant, 1)
        self.slots.add(extent, pool, slots)
        return extent

    def withdraw(self, extent: int) -> None:
        """Withdraws a closed extent without used slots from its pool. It becomes unassigned."""
        tenant = self.slots.classes.of_extent(extent).pool.tenant
        self.slots.remove(extent)
        self.unassigned.append(extent)
        self.holdings.add_extents(tenant, -1)

    # -- sizes

    def geometry(self, slot_bytes: int) -> Geometry:
        """Returns how an extent of this tier is cut for a slot size."""
        return Geometry(self.extent_bytes, slot_bytes, self.table)

    def slots_in(self, slot_bytes: int) -> int:
        """Returns the number of slots of a size in one extent; 0 if not even one fits."""
        return min(self.geometry(slot_bytes).slots, self._most_in_one)

    def most_slots(self, slot_bytes: int) -> int:
        """Returns the number of slots of a size if all extents are cut to it."""
        return self.limit_bytes // self.extent_bytes * self.slots_in(slot_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all usable extents. Above the limit only for a while after it was lowered."""
        return len(self.ready) * self.extent_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        return int(self.holdings.used.sum())
