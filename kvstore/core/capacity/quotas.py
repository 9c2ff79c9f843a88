"""Quotas of tenants in each tier, and the choice of the tenant that gives an extent to another.

A tenant holds whole extents. Unassigned extents are reserved for floors that are not reached yet. Above the
floors, extents are assigned in the order of requests. When all are assigned, one at a time moves from the
tenant that is most above its share to one that would be less above its own: weighted max-min fairness.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

UNLIMITED = 1 << 62
_IDLE_AFTER_S = 60.0
_DEFAULTS = {"extents": 0, "fitted": 0, "used": 0, "floor": 0, "limit": UNLIMITED, "share": 1, "seen": 0}


class SlotPool(NamedTuple):
    """The slots of one size that a tenant has for one domain.

    A domain is a set of tenants that may map the same extents. The domain of the owner alone has its number.
    """

    tenant: int
    domain: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Quota:
    """Bytes of one tier for one tenant: at least `floor` once reached, at most `limit`.

    The bytes above the floors are divided among the tenants that need them, by `share`.
    """

    floor: int = 0
    limit: int = UNLIMITED
    share: float = 1.0


@dataclass(slots=True)
class Holdings:
    """The quotas and the use of one tier, a column each, by tenant number. Floors are in extents.

    `fitted` has the bytes of all slots, `used` of the slots in use. `seen`: the last activity of the tenant,
    in s. `unmet`: extents that all floors together still lack.
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
        """Sets a quota. The floor is rounded up to whole extents."""
        self._reach(tenant)
        self.unmet -= self._lacks(tenant)
        self.floor[tenant] = -(-quota.floor // self.extent_bytes)
        self.limit[tenant] = quota.limit
        self.share[tenant] = quota.share
        self.unmet += self._lacks(tenant)

    def drop_floors(self) -> None:
        """Sets all floors to 0."""
        self.floor[:] = 0
        self.unmet = 0

    def of(self, tenant: int) -> tuple[int, Quota]:
        """Returns the used bytes and the quota of a tenant. The floor is in whole extents."""
        self._reach(tenant)
        floor = int(self.floor[tenant]) * self.extent_bytes
        return int(self.used[tenant]), Quota(floor, int(self.limit[tenant]), float(self.share[tenant]))

    def held(self, tenant: int) -> int:
        """Returns the bytes of a tenant's extents."""
        self._reach(tenant)
        return int(self.extents[tenant]) * self.extent_bytes

    def fair_bytes(self, tenant: int, capacity_bytes: int) -> int:
        """Returns the bytes that a tenant can have while all tenants with extents need more."""
        self._reach(tenant)
        there = self.extents > 0
        there[tenant] = True
        floor = self.floor * self.extent_bytes
        spare = max(0, capacity_bytes - int(floor.sum()))
        fair = int(floor[tenant]) + int(spare * self.share[tenant] / self.share[there].sum())
        return min(fair, int(self.limit[tenant]))

    def add_extents(self, tenant: int, n: int) -> None:
        """Adds n extents to those of a tenant. n may be negative."""
        self._reach(tenant)
        self.unmet -= self._lacks(tenant)
        self.extents[tenant] += n
        self.unmet += self._lacks(tenant)

    def mark_active(self, tenant: int, now: float) -> None:
        """Records activity of a tenant."""
        self._reach(tenant)
        self.seen[tenant] = now

    def room(self, tenant: int) -> int:
        """Returns the bytes that a tenant may use in addition."""
        self._reach(tenant)
        return max(0, int(self.limit[tenant] - self.used[tenant]))

    def limit_of(self, tenant: int) -> int:
        """Returns the limit of a tenant in bytes."""
        self._reach(tenant)
        return int(self.limit[tenant])

    def over(self, tenant: int) -> int:
        """Returns the bytes that a tenant uses above its limit, which was lowered."""
        return max(0, int(self.used[tenant] - self.limit[tenant]))

    def may_grow(self, tenant: int) -> bool:
        """Returns whether the limit of a tenant allows another extent."""
        self._reach(tenant)
        return bool(self.extents[tenant] * self.extent_bytes < self.limit[tenant])

    def may_hold_one_more(self, tenant: int, unassigned: int) -> bool:
        """Returns whether a tenant may get one of the unassigned extents, given its limit and all floors."""
        if not self.may_grow(tenant):
            return False
        return bool(unassigned > self.unmet or (unassigned and self._lacks(tenant)))

    def is_at_floor(self, tenant: int) -> bool:
        """Returns whether a tenant has no extent above its floor."""
        self._reach(tenant)
        return bool(self.extents[tenant] <= self.floor[tenant])

    def above_floor(self, tenant: int) -> int:
        """Returns the bytes that a tenant uses above its floor."""
        self._reach(tenant)
        return max(0, int(self.used[tenant] - self.floor[tenant] * self.extent_bytes))

    def above_floors(self) -> list[int]:
        """Returns the tenants with extents above their floors, those with most extents per share first."""
        over = (self.extents - self.floor) / self.share
        first: list[int] = np.argsort(-over, kind="stable").tolist()
        return first[: int((over > 0).sum())]

    def giver(self, taker: int, now: float) -> int | None:
        """Returns the tenant that gives an extent to `taker`; None if none should. See `giver`."""
        if not self.may_grow(taker):
            return None
        idle = self.fitted - self.used >= 2 * self.extent_bytes
        idle |= self.seen + _IDLE_AFTER_S < now
        return giver(taker, self.extents, self.floor, self.share, idle)

    def _lacks(self, tenant: int) -> int:
        return max(0, int(self.floor[tenant] - self.extents[tenant]))

    def _reach(self, tenant: int) -> None:
        """Widens the columns to a tenant's number."""
        more = tenant + 1 - len(self.extents)
        if more > 0:
            more = max(more, len(self.extents))
            for name, value in _DEFAULTS.items():
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.full(more, value, column.dtype))))


def giver(
    taker: int,
    held: npt.NDArray[np.int64],
    floor: npt.NDArray[np.int64],
    share: npt.NDArray[np.float64],
    idle: npt.NDArray[np.bool_],
) -> int | None:
    """Returns the tenant that gives an extent to `taker`; None if none should.

    No tenant falls below its floor. The giver is the tenant that remains most above its share, in extents
    above the floor per share. It must remain at least as far above as the taker will be, so no extent moves
    back at once. An `idle` tenant, which has unused extents or was inactive for 60 s, gives to any taker. A
    taker below its floor takes from any tenant.
    """
    left = (held - 1 - floor) / share
    left[taker] = -1.0
    left[held <= floor] = -1.0
    most = int(left.argmax())
    if left[most] >= 0 and left[most] >= (held[taker] + 1 - floor[taker]) / share[taker]:
        return most
    spare = np.flatnonzero(idle & (left >= 0))
    return int(spare[left[spare].argmax()]) if len(spare) else None
