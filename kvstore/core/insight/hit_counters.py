"""Hit ratios: what prompts asked for, what of it was found, and what was delivered to engines.

Of the blocks of all prompts that were asked for:

    requested   all whole blocks of the prompt, counted once, at the first question for it. The last, partial
                block cannot be cached and is not counted.
    found       those that were stored when they were asked for, by the tier in which they were
    delivered   those that an engine got, by the tier in which they were found
    missed      those that were not found

The hit ratio is found / requested, the delivered ratio delivered / requested. Found blocks that were not
delivered are counted by reason: not_worth_loading (computing them again is faster), too_late (not loaded by
the deadline), corrupt (wrong bytes). The rest was not fetched: the engine had it, or asked for less. A block
that a later request gets after all counts as delivered too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

REQUESTED, FOUND, DELIVERED, MISSED = "requested", "found", "delivered", "missed"
NOT_WORTH_LOADING, TOO_LATE, CORRUPT = "not_worth_loading", "too_late", "corrupt"
REASONS = (NOT_WORTH_LOADING, TOO_LATE, CORRUPT)
"""Why found blocks were not delivered."""

ALL_TIERS, NETWORK = -2, -1
"""Numbers that stand for no tier in particular, and for blocks that other nodes have."""

Column = tuple[str, int]
"""What is counted, and the number of the tier."""


MOST = (1 << 63) - 1
"""Sums stop there: larger numbers fit into no message."""


class Amount(NamedTuple):
    """Sums since the start. Tokens are 0 for layouts that do not say how many a block has."""

    blocks: int = 0
    tokens: int = 0
    nbytes: int = 0

    def plus(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(self.blocks + other.blocks, self.tokens + other.tokens, self.nbytes + other.nbytes)


class HitCounters:
    """Sums by tenant (who asked) and column. They never decrease."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[Column, list[int]]] = {}

    def count(self, tenant: int, column: Column, blocks: int, block_tokens: int, block_bytes: int) -> None:
        """Adds blocks of one size."""
        sums = self._sums.setdefault(tenant, {}).setdefault(column, [0, 0, 0])
        for i, amount in enumerate((blocks, blocks * block_tokens, blocks * block_bytes)):
            sums[i] = min(sums[i] + amount, MOST)

    def of(self, tenant: int) -> dict[Column, Amount]:
        """The sums of a tenant."""
        columns = self._sums.get(tenant, {})
        self._count_missed(columns)
        return {column: Amount(*sums) for column, sums in columns.items()}

    def _count_missed(self, columns: dict[Column, list[int]]) -> None:
        """Brings what was missed up to date. Of a prompt that is being asked for, more may yet be found."""
        found = [sums for (what, _), sums in columns.items() if what == FOUND]
        missed = columns.setdefault((MISSED, ALL_TIERS), [0, 0, 0])
        for i, requested in enumerate(columns.get((REQUESTED, ALL_TIERS), missed)):
            missed[i] = max(missed[i], requested - sum(sums[i] for sums in found))

    def __iter__(self) -> Iterator[int]:
        return iter(self._sums)


def spread(by_tier: Mapping[int, int], blocks: int) -> Counter[int]:
    """So many blocks, distributed over tiers in the same proportions."""
    total = sum(by_tier.values())
    if not total or not blocks or total == blocks:
        return Counter(by_tier) if blocks else Counter()
    out = Counter({tier: n * blocks // total for tier, n in by_tier.items()})
    out[max(by_tier, key=lambda tier: by_tier[tier])] += blocks - out.total()
    return out
