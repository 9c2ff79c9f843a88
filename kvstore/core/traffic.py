"""What each tenant has asked for, and which tier had it: plain sums, for whoever wants to know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvstore.core.tenants import Space


class Served(NamedTuple):
    """Sums since the start. Tokens are 0 for layouts that do not say how many a block has."""

    blocks: int
    tokens: int
    nbytes: int


class Traffic:
    """Blocks asked for by `acquire`, by asker and tier; what no tier had counts as of tier `tiers`."""

    def __init__(self, tiers: int) -> None:
        self._columns = tiers + 1
        self._sums: dict[int, list[list[int]]] = {}

    def count(self, tenant: int, tier: int, space: Space, blocks: int) -> None:
        """So many more of a namespace."""
        sums = self._sums.get(tenant)
        if sums is None:
            sums = self._sums[tenant] = [[0, 0, 0] for _ in range(self._columns)]
        sum_ = sums[tier]
        sum_[0] += blocks
        sum_[1] += blocks * space.block_tokens
        sum_[2] += blocks * space.block_bytes

    def of(self, tenant: int) -> list[Served]:
        """A tenant's sums by tier, misses last."""
        return [Served(*sums) for sums in self._sums.get(tenant, [[0, 0, 0]] * self._columns)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._sums)
