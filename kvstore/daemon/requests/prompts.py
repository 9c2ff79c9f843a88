"""Counts prompts on one connection: what was requested, found and delivered. See `core.insight.hit_counters`.

Clients say which of their requests is a prompt's first question, since only they know all of its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core import actions as ac
from kvstore.core.insight import hit_counters as hits
from kvstore.core.requests.leases import number_on_connection
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.wire import messages as m


@dataclass(slots=True)
class _Question:
    """A look-up or an acquire without an answer yet."""

    space: NamespaceEntry
    known: int
    step: int


@dataclass(slots=True)
class _Leased:
    """Blocks that an engine reads, and the tier in which each was found."""

    space: NamespaceEntry
    sources: npt.NDArray[np.int16]


class Prompts:
    """Questions and leases of one connection of a tenant."""

    def __init__(self, counters: hits.HitCounters, tenant: int) -> None:
        self._counters = counters
        self._tenant = tenant
        self._questions: dict[int, _Question] = {}
        self._leased: dict[int, _Leased] = {}

    def asked(self, q: m.Lookup | m.Acquire, space: NamespaceEntry) -> None:
        """A question has come."""
        self._count(space, hits.REQUESTED, {hits.ALL_TIERS: min(q.asks, m.MAX_PROMPT_BLOCKS)})
        step = min(max(q.step, 1), m.MAX_PROMPT_BLOCKS) if isinstance(q, m.Lookup) else 1
        self._questions[q.id] = _Question(space, q.known, step)

    def answered(self, request: int, action: object, gaps: bool = False) -> None:
        """Its answer goes out. With `gaps`, the client asks again for keys that stand for several blocks."""
        question = self._questions.pop(request, None)
        if question is None or not isinstance(action, ac.Found | ac.Grant):
            return
        space, stored = question.space, action.stored
        late = stored.late
        if question.step == 1 or not gaps:
            new = max(0, stored.blocks - question.known)
            self._count(space, hits.FOUND, hits.spread(stored.by_tier, new * question.step))
            unworthy = min(new, stored.unworthy) * question.step
            self._count(space, hits.NOT_WORTH_LOADING, {hits.ALL_TIERS: unworthy})
        self._count(space, hits.TOO_LATE, {hits.ALL_TIERS: late})
        if isinstance(action, ac.Grant) and action.lease:
            self._leased[number_on_connection(action.lease)] = _Leased(space, action.sources)

    def released(self, q: m.Release) -> None:
        """A lease has ended."""
        leased = self._leased.pop(q.lease, None)
        if leased is None:
            return
        n = len(leased.sources)
        unused = min(q.unused, n)
        tiers, counts = np.unique(leased.sources[: n - unused], return_counts=True)
        delivered = dict(zip(tiers.tolist(), counts.tolist(), strict=True))
        self._count(leased.space, hits.DELIVERED, delivered)
        self._count(leased.space, hits.CORRUPT, {hits.ALL_TIERS: min(q.corrupt, unused)})

    def leave(self) -> None:
        """The connection has ended, and its leases with it."""
        for lease in list(self._leased):
            self.released(m.Release(lease))
        self._questions.clear()

    def _count(self, space: NamespaceEntry, what: str, blocks_by_tier: Mapping[int, int]) -> None:
        tokens = space.layout.block_tokens if space.layout is not None else 0
        for tier, blocks in blocks_by_tier.items():
            if blocks:
                self._counters.count(self._tenant, (what, tier), blocks, tokens, space.block_bytes)
                space.hits[what, tier] += blocks
