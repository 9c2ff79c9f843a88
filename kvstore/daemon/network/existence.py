"""Existence checks of objects on the network. Results are cached: 5 s for hits, 1 s for misses.

A check reads no payload. An object that exists may still turn out to be corrupt when it is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.pending_deletions import PendingDeletions
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name, Outcome

_HIT_TTL_S = 5.0
_MISS_TTL_S = 1.0
_MOST_CACHED = 1 << 16
_FIRST_PROBE_BLOCKS, _PROBE_GROWTH = 4, 8

RESERVE_S = 0.002
"""Time kept back from a request's deadline for its answer."""


class ExistenceCache:
    """The results of the latest checks by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns s."""
        self._clock = clock
        self._cached: OrderedDict[Name, tuple[bool, float]] = OrderedDict()

    def get(self, name: Name) -> bool | None:
        """Returns whether an object exists, None if no valid result is cached."""
        cached = self._cached.get(name)
        return cached[0] if cached is not None and self._clock() < cached[1] else None

    def note(self, name: Name, exists: bool) -> None:
        """Caches a result."""
        self._cached[name] = exists, self._clock() + (_HIT_TTL_S if exists else _MISS_TTL_S)
        self._cached.move_to_end(name)
        if len(self._cached) > _MOST_CACHED:
            self._cached.popitem(last=False)

    def clear(self) -> None:
        """Drops all results."""
        self._cached.clear()


class ExistenceChecks:
    """Asks the backend which objects exist. Objects that are being deleted do not exist."""

    def __init__(
        self, executor: BackendExecutor, pending: PendingDeletions, clock: Callable[[], float]
    ) -> None:
        self.cache = ExistenceCache(clock)
        self._executor = executor
        self._pending = pending
        self._clock = clock

    async def prefix(self, namespace: NamespaceEntry, keys: Sequence[bytes], until: float) -> int:
        """Returns how many leading blocks exist, as far as known by `until`.

        Most prefixes are short or long. So the first check is of few blocks, and each further one of more.
        """
        n, step = 0, _FIRST_PROBE_BLOCKS
        while n < len(keys):
            names = [Name(namespace.fingerprint, key) for key in keys[n : n + step]]
            exist = await self.probe(names, until)
            if False in exist:
                return n + exist.index(False)
            n += len(exist)
            step *= _PROBE_GROWTH
        return n

    async def has(self, blocks: Sequence[tuple[NamespaceEntry, bytes]]) -> list[bool]:
        """Returns which blocks exist now. Ignores cached misses."""
        names = [Name(namespace.fingerprint, key) for namespace, key in blocks]
        return await self.probe(names, self._clock() + self._executor.timeout_s, fresh=True)

    async def probe(self, names: Sequence[Name], until: float, fresh: bool = False) -> list[bool]:
        """Returns which objects exist, as far as known by `until`. `fresh` ignores cached misses."""
        valid = (True,) if fresh else (True, False)
        unknown = [name for name in dict.fromkeys(names) if self.cache.get(name) not in valid]
        within_s = min(until - RESERVE_S - self._clock(), self._executor.timeout_s)
        if unknown and within_s > 0 and self._executor.usable:
            outcomes = await self._executor.call(partial(self._executor.backend.probe, unknown), within_s)
            for name, outcome in zip(unknown, outcomes, strict=False):
                if outcome in (Outcome.OK, Outcome.MISSING):
                    self.cache.note(name, outcome == Outcome.OK)
        return [bool(self.cache.get(name)) and name not in self._pending for name in names]
