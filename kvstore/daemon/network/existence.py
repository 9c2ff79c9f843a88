"""Existence checks of objects on the network. Results are cached: 5 s for hits, 1 s for misses.

A check reads no payload. An object that exists may still turn out to be corrupt when it is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvstore.daemon.network.eligibility import Eligibility
from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.names import block_name
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name, Outcome

_HIT_TTL_S = 5.0
_MISS_TTL_S = 1.0
_MOST_CACHED = 1 << 16
_FIRST_PROBE_BLOCKS, _PROBE_GROWTH = 4, 8

RESERVE_S = 0.002
"""Time kept back from a request's deadline for its answer."""


class ExistenceChecks:
    """Asks the backend which objects exist, and caches the results by name.

    Objects that are being deleted do not exist.
    """

    def __init__(self, executor: BackendExecutor, eligibility: Eligibility, now: Callable[[], float]) -> None:
        """`now` returns the event loop's time (s)."""
        self._executor = executor
        self._eligibility = eligibility
        self._now = now
        self._cached: OrderedDict[Name, tuple[bool, float]] = OrderedDict()

    def note(self, names: Iterable[Name], exist: bool) -> None:
        """Caches results. Forgets the oldest ones: those that have expired, and any above the bound."""
        now, cached = self._now(), self._cached
        result = exist, now + (_HIT_TTL_S if exist else _MISS_TTL_S)
        for name in names:
            cached[name] = result
            cached.move_to_end(name)
        while cached and (len(cached) > _MOST_CACHED or next(iter(cached.values()))[1] < now):
            cached.popitem(last=False)

    def clear(self) -> None:
        """Drops all cached results."""
        self._cached.clear()

    async def prefix(
        self, namespace: NamespaceEntry, keys: Sequence[bytes], until: float, fresh: bool = False
    ) -> int:
        """Returns how many leading blocks exist, as far as known by `until`. `fresh` ignores cached misses.

        Most prefixes are short or long. So the first check is of few blocks, and each further one of more.
        """
        n, step = 0, _FIRST_PROBE_BLOCKS
        if not await self._has_names(namespace, until):
            return 0
        while n < len(keys):
            names = [block_name(namespace, key) for key in keys[n : n + step]]
            exist = await self.probe(names, until, fresh)
            if False in exist:
                return n + exist.index(False)
            n += len(exist)
            step *= _PROBE_GROWTH
        return n

    async def mask(self, namespace: NamespaceEntry, keys: Sequence[bytes], until: float) -> list[bool]:
        """Returns which blocks exist, as far as known by `until`."""
        if not await self._has_names(namespace, until):
            return [False] * len(keys)
        return await self.probe([block_name(namespace, key) for key in keys], until)

    async def has(self, blocks: Sequence[tuple[NamespaceEntry, bytes]]) -> list[bool]:
        """Returns which blocks exist now. Ignores cached misses."""
        until = self._now() + self._executor.timeout_s
        for namespace in {namespace: None for namespace, _ in blocks}:
            await self._has_names(namespace, until)
        named = [namespace.epoch is not None for namespace, _ in blocks]
        names = [block_name(*block) for block, known in zip(blocks, named, strict=True) if known]
        found = iter(await self.probe(names, until, fresh=True))
        return [known and next(found) for known in named]

    async def _has_names(self, namespace: NamespaceEntry, until: float) -> bool:
        return await self._eligibility.knows_epoch(namespace, until - RESERVE_S - self._now())

    async def probe(self, names: Sequence[Name], until: float, fresh: bool = False) -> list[bool]:
        """Returns which objects exist, as far as known by `until`. `fresh` ignores cached misses."""
        valid = (True,) if fresh else (True, False)
        unknown = [name for name, known in self._known(dict.fromkeys(names)) if known not in valid]
        within_s = min(until - RESERVE_S - self._now(), self._executor.timeout_s)
        if unknown and within_s > 0 and self._executor.usable:
            outcomes = await self._executor.call(partial(self._executor.backend.probe, unknown), within_s)
            for exist, outcome in ((True, Outcome.OK), (False, Outcome.MISSING)):
                self.note([n for n, o in zip(unknown, outcomes, strict=False) if o is outcome], exist)
        deletes = self._eligibility.deletes
        return [bool(known) and not deletes(name) for name, known in self._known(names)]

    def _known(self, names: Iterable[Name]) -> Iterator[tuple[Name, bool | None]]:
        """Yields each name with its cached result, None if there is no valid one."""
        now, cached = self._now(), self._cached
        for name in names:
            exists, until = cached.get(name, (False, 0.0))
            yield name, exists if now < until else None
