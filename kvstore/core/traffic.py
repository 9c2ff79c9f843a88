"""What each tenant has asked for, and which tier had it: plain sums, for whoever wants to know."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import NamedTuple

from kvstore.core.tenants import Space

MISSED = -1


class Served(NamedTuple):
    """Sums since the start. Tokens are 0 for layouts that do not say how many a block has."""

    blocks: int
    tokens: int
    nbytes: int


class Traffic:
    """Blocks asked for by `acquire`, by asker and by number in `tiers`; of tier `MISSED` what none had."""

    def __init__(self, tiers: Sized) -> None:
        self._tiers = tiers
        self._sums: dict[int, list[list[int]]] = {}

    def count(self, tenant: int, tier: int, space: Space, blocks: int) -> None:
        """So many more of a namespace."""
        sums = self._sums.setdefault(tenant, [[0, 0, 0]])
        while len(sums) <= len(self._tiers):
            sums.append([0, 0, 0])
        sum_ = sums[tier + 1]
        sum_[0] += blocks
        sum_[1] += blocks * space.block_tokens
        sum_[2] += blocks * space.block_bytes

    def of(self, tenant: int) -> list[Served]:
        """A tenant's sums by tier, misses last."""
        missed, *hits = self._sums.get(tenant, [[0, 0, 0]])
        hits += [[0, 0, 0]] * (len(self._tiers) - len(hits))
        return [Served(*sums) for sums in (*hits, missed)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._sums)
