"""Counts the blocks of prompts that one connection requests, finds and reads.

Clients mark the first request of a prompt, because only they know all of its keys. The counters are in
`kvstore.core.insight.hit_counters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core import actions as ac
from kvstore.core.insight import hit_counters as hits
from kvstore.core.requests.leases import number_on_connection
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.wire import messages as m

_MOST_REPORTED = (1 << 32) - 1


@dataclass(slots=True)
class _Question:
    """A Lookup or Acquire without an answer yet."""

    namespace: NamespaceEntry
    known: int
    step: int


@dataclass(slots=True)
class _Leased:
    """The blocks of a lease, and the tier in which each was found."""

    namespace: NamespaceEntry
    sources: npt.NDArray[np.int16]


@dataclass(slots=True)
class Prompts:
    """Unanswered requests and leases of one connection of a tenant."""

    _counters: hits.HitCounters
    _tenant: int
    _questions: dict[int, _Question] = field(default_factory=dict)
    _leased: dict[int, _Leased] = field(default_factory=dict)

    def asked(self, q: m.Lookup | m.Acquire, namespace: NamespaceEntry) -> None:
        """Counts the requested blocks."""
        self._count(namespace, hits.REQUESTED, {hits.ALL_TIERS: min(q.asks, m.MAX_PROMPT_BLOCKS)})
        step = min(max(q.step, 1), m.MAX_PROMPT_BLOCKS) if isinstance(q, m.Lookup) else 1
        self._questions[q.id] = _Question(namespace, q.known, step)

    def answered(self, request: int, action: object, gaps: bool = False) -> None:
        """Counts the blocks in an answer. With `gaps`, clients repeat requests whose keys are every n-th."""
        question = self._questions.pop(request, None)
        if question is None or not isinstance(action, ac.Found | ac.Grant):
            return
        namespace, stored = question.namespace, action.stored
        if question.step == 1 or not gaps:
            new = max(0, stored.blocks - question.known)
            self._count(namespace, hits.FOUND, hits.spread(stored.by_tier, new * question.step))
            unworthy = min(new, stored.unworthy) * question.step
            self._count(namespace, hits.NOT_WORTH_LOADING, {hits.ALL_TIERS: unworthy})
        self._count(namespace, hits.TOO_LATE, {hits.ALL_TIERS: stored.late})
        if isinstance(action, ac.Grant) and action.lease:
            self._leased[number_on_connection(action.lease)] = _Leased(namespace, action.sources)

    def looked_up(self, namespace: NamespaceEntry, asks: int, found: Sequence[int]) -> None:
        """Counts lookups without a request: blocks that were requested, and found by number of the tier."""
        self._count(namespace, hits.REQUESTED, {hits.ALL_TIERS: min(asks, _MOST_REPORTED)})
        self._count(namespace, hits.FOUND, dict(enumerate(found)))

    def delivered(self, namespace: NamespaceEntry, blocks: int) -> None:
        """Counts blocks that were read from DRAM without a request."""
        self._count(namespace, hits.DELIVERED, {0: min(blocks, _MOST_REPORTED)})

    def released(self, q: m.Release) -> None:
        """Counts the blocks that were read under a lease."""
        leased = self._leased.pop(q.lease, None)
        if leased is None:
            return
        n = len(leased.sources)
        unused = min(q.unused, n)
        tiers, counts = np.unique(leased.sources[: n - unused], return_counts=True)
        delivered = dict(zip(tiers.tolist(), counts.tolist(), strict=True))
        self._count(leased.namespace, hits.DELIVERED, delivered)
        self._count(leased.namespace, hits.CORRUPT, {hits.ALL_TIERS: min(q.corrupt, unused)})

    def leave(self) -> None:
        """Counts the blocks of all leases: the connection has ended."""
        for lease in list(self._leased):
            self.released(m.Release(lease))
        self._questions.clear()

    def _count(self, namespace: NamespaceEntry, what: str, blocks_by_tier: Mapping[int, int]) -> None:
        tokens = namespace.layout.block_tokens if namespace.layout is not None else 0
        for tier, blocks in blocks_by_tier.items():
            if blocks:
                self._counters.count(self._tenant, (what, tier), blocks, tokens, namespace.block_bytes)
                namespace.hits[what, tier] += blocks
