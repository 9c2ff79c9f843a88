"""Tenants: what each may have of every tier, and who gives way to whom. Pure decisions over plain numbers.

A tenant holds whole extents. Up to its floor they are its own: as many unassigned extents as floors still
want stay back for them. Above floors extents go to whoever asks first, and once all are given, one at a time,
from the tenant that is most over its share to one that would be less over it: weighted max-min fairness among
those who want more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

UNLIMITED = 1 << 62
_QUIET_AFTER_S = 60.0
_NOBODY = {"extents": 0, "fitted": 0, "used": 0, "floor": 0, "limit": UNLIMITED, "share": 1, "seen": 0}


class SlotPool(NamedTuple):
    """What an extent is cut for: whose it is, who may map it, how large its slots are.

    A domain is a set of tenants that may map the same extents: the owner's own number if that is only he.
    """

    tenant: int
    domain: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Quota:
    """One tenant's part of one tier, in bytes: never taken below `floor`, never above `limit`.

    What is between floors is divided by `share` among those who want it.
    """

    floor: int = 0
    limit: int = UNLIMITED
    share: float = 1.0


@dataclass(slots=True)
class Holdings:
    """What all tenants hold of one tier, a column each, by tenant number; extents and bytes.

    `fitted` are bytes of all their slots, `used` of those in use. `unmet` is how many extents all floors
    together still lack; `seen` when a tenant last did anything here.
    """

    extent_bytes: int
    extents: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    fitted: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    used: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    floor: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    limit: npt.NDArray[np.int64] = field(default_factory=lambda: np.full(1, UNLIMITED))
    share: npt.NDArray[np.float64] = field(default_factory=lambda: np.ones(1))
    seen: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    unmet: int = 0

    def set(self, tenant: int, quota: Quota) -> None:
        """From now on. A floor counts in whole extents, rounded up."""
        self._reach(tenant)
        self.unmet -= self._lacks(tenant)
        self.floor[tenant] = -(-quota.floor // self.extent_bytes)
        self.limit[tenant] = quota.limit
        self.share[tenant] = quota.share
        self.unmet += self._lacks(tenant)

    def drop_floors(self) -> None:
        """Nobody has one any more."""
        self.floor[:] = 0
        self.unmet = 0

    def of(self, tenant: int) -> tuple[int, Quota]:
        """Bytes in use by a tenant, and its quota, the floor in whole extents."""
        self._reach(tenant)
        floor = int(self.floor[tenant]) * self.extent_bytes
        return int(self.used[tenant]), Quota(floor, int(self.limit[tenant]), float(self.share[tenant]))

    def held(self, tenant: int) -> int:
        """Bytes of the extents that a tenant holds."""
        self._reach(tenant)
        return int(self.extents[tenant]) * self.extent_bytes

    def due(self, tenant: int, capacity_bytes: int) -> int:
        """Bytes that a tenant can have while all who have something want more."""
        self._reach(tenant)
        there = self.extents > 0
        there[tenant] = True
        floor = self.floor * self.extent_bytes
        spare = max(0, capacity_bytes - int(floor.sum()))
        due = int(floor[tenant]) + int(spare * self.share[tenant] / self.share[there].sum())
        return min(due, int(self.limit[tenant]))

    def hold(self, tenant: int, extents: int) -> None:
        """So many extents more (or less)."""
        self._reach(tenant)
        self.unmet -= self._lacks(tenant)
        self.extents[tenant] += extents
        self.unmet += self._lacks(tenant)

    def fit(self, tenant: int, nbytes: int) -> None:
        """So many bytes of slots more (or less) have been cut from its extents."""
        self.fitted[tenant] += nbytes

    def use(self, tenant: int, nbytes: int) -> None:
        """So many bytes of slots more (or less) are in use."""
        self.used[tenant] += nbytes

    def saw(self, tenant: int, now: float) -> None:
        """A tenant does something here."""
        self._reach(tenant)
        self.seen[tenant] = now

    def room(self, tenant: int) -> int:
        """Bytes that a tenant may use beyond what it does; never negative."""
        self._reach(tenant)
        return max(0, int(self.limit[tenant] - self.used[tenant]))

    def may_ever_use(self, tenant: int, nbytes: int) -> bool:
        """Whether the limit allows so many bytes at all."""
        self._reach(tenant)
        return bool(self.limit[tenant] >= nbytes)

    def most(self, tenant: int) -> int:
        """The limit of a tenant, in bytes."""
        self._reach(tenant)
        return int(self.limit[tenant])

    def over(self, tenant: int) -> int:
        """Bytes by which a tenant is over its limit, which was lowered."""
        return max(0, int(self.used[tenant] - self.limit[tenant]))

    def may_grow(self, tenant: int) -> bool:
        """Whether its limit allows a tenant another extent."""
        self._reach(tenant)
        return bool(self.extents[tenant] * self.extent_bytes < self.limit[tenant])

    def may_hold_one_more(self, tenant: int, unassigned: int) -> bool:
        """Whether one of the unassigned extents may be this tenant's: not over its limit, nor a floor's."""
        if not self.may_grow(tenant):
            return False
        return bool(unassigned > self.unmet or (unassigned and self._lacks(tenant)))

    def is_at_floor(self, tenant: int) -> bool:
        """Whether nothing may be taken from a tenant."""
        self._reach(tenant)
        return bool(self.extents[tenant] <= self.floor[tenant])

    def above_floor(self, tenant: int) -> int:
        """Bytes that a tenant uses beyond its floor."""
        self._reach(tenant)
        return max(0, int(self.used[tenant] - self.floor[tenant] * self.extent_bytes))

    def above_floors(self) -> list[int]:
        """Tenants with more than their floors, those first that have most beyond it for their share."""
        over = (self.extents - self.floor) / self.share
        first: list[int] = np.argsort(-over, kind="stable").tolist()
        return first[: int((over > 0).sum())]

    def giver(self, taker: int, now: float) -> int | None:
        """Who should give an extent to `taker`, who wants one: see `giver`."""
        if not self.may_grow(taker):
            return None
        idle = self.fitted - self.used >= 2 * self.extent_bytes
        idle |= self.seen + _QUIET_AFTER_S < now
        return giver(taker, self.extents, self.floor, self.share, idle)

    def _lacks(self, tenant: int) -> int:
        return max(0, int(self.floor[tenant] - self.extents[tenant]))

    def _reach(self, tenant: int) -> None:
        more = tenant + 1 - len(self.extents)
        if more > 0:
            more = max(more, len(self.extents))
            for name, value in _NOBODY.items():
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.full(more, value, column.dtype))))


def giver(
    taker: int,
    held: npt.NDArray[np.int64],
    floor: npt.NDArray[np.int64],
    share: npt.NDArray[np.float64],
    idle: npt.NDArray[np.bool_],
) -> int | None:
    """Which tenant should give an extent to `taker`, by what all of them hold; None if none should.

    Nobody goes below its floor. The giver is the one that stays most over its share, in extents above the
    floor a unit of share, and at least as much as the taker will be: so no extent ever comes straight back.
    Whoever is `idle`, has more than it uses or has been away, gives to anyone; who is below its floor takes
    from anyone.
    """
    left = (held - 1 - floor) / share
    left[taker] = -1.0
    left[held <= floor] = -1.0
    most = int(left.argmax())
    if left[most] >= 0 and left[most] >= (held[taker] + 1 - floor[taker]) / share[taker]:
        return most
    spare = np.flatnonzero(idle & (left >= 0))
    return int(spare[left[spare].argmax()]) if len(spare) else None
