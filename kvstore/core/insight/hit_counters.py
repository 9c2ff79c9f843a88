"""Hit counters: blocks that prompts requested, found blocks, and blocks delivered to engines.

Of the blocks of all prompts:

    requested   all whole blocks of a prompt, counted once, at the first request for it. The last, partial
                block cannot be cached and is not counted.
    found       blocks that were stored at the request, by tier
    delivered   blocks that an engine got, by the tier in which they were found
    missed      blocks that were not found

The hit ratio is found / requested, the delivered ratio delivered / requested. Found blocks that were not
delivered are counted by reason: not_worth_loading (slower to load than to recompute), too_late (not loaded by
the deadline), corrupt (wrong checksum). The rest was not fetched: the engine had the blocks already, or asked
for fewer. A block that a later request gets counts as delivered too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

REQUESTED, FOUND, DELIVERED, MISSED = "requested", "found", "delivered", "missed"
NOT_WORTH_LOADING, TOO_LATE, CORRUPT = "not_worth_loading", "too_late", "corrupt"
REASONS = (NOT_WORTH_LOADING, TOO_LATE, CORRUPT)
"""The reasons why found blocks were not delivered."""

ALL_TIERS, NETWORK = -2, -1
"""Instead of a tier number: all tiers together; blocks of other nodes."""

Column = tuple[str, int]
"""A counter's name and tier number."""


MOST = (1 << 63) - 1
"""The largest sum that fits into a message. Sums stop there."""


class Amount(NamedTuple):
    """Sums since the start. Tokens are 0 for layouts without tokens per block."""

    blocks: int = 0
    tokens: int = 0
    nbytes: int = 0

    def plus(self, other: Amount) -> Amount:
        """Returns the sum of both."""
        return Amount(self.blocks + other.blocks, self.tokens + other.tokens, self.nbytes + other.nbytes)


class HitCounters:
    """Sums by tenant of the request and column. They never decrease."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[Column, list[int]]] = {}

    def count(self, tenant: int, column: Column, blocks: int, block_tokens: int, block_bytes: int) -> None:
        """Adds blocks of one size."""
        sums = self._sums.setdefault(tenant, {}).setdefault(column, [0, 0, 0])
        for i, amount in enumerate((blocks, blocks * block_tokens, blocks * block_bytes)):
            sums[i] = min(sums[i] + amount, MOST)

    def of(self, tenant: int) -> dict[Column, Amount]:
        """Returns the sums of a tenant."""
        columns = self._sums.get(tenant, {})
        self._count_missed(columns)
        return {column: Amount(*sums) for column, sums in columns.items()}

    def _count_missed(self, columns: dict[Column, list[int]]) -> None:
        """Updates the missed blocks. They never decrease, although more of a current prompt may be found."""
        found = [sums for (what, _), sums in columns.items() if what == FOUND]
        missed = columns.setdefault((MISSED, ALL_TIERS), [0, 0, 0])
        for i, requested in enumerate(columns.get((REQUESTED, ALL_TIERS), missed)):
            missed[i] = max(missed[i], requested - sum(sums[i] for sums in found))

    def __iter__(self) -> Iterator[int]:
        return iter(self._sums)


def spread(by_tier: Mapping[int, int], blocks: int) -> Counter[int]:
    """Returns a number of blocks, distributed over tiers in the same proportions."""
    total = sum(by_tier.values())
    if not total or not blocks or total == blocks:
        return Counter(by_tier) if blocks else Counter()
    out = Counter({tier: n * blocks // total for tier, n in by_tier.items()})
    out[max(by_tier, key=lambda tier: by_tier[tier])] += blocks - out.total()
    return out
