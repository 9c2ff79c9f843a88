"""Requests whose answer includes blocks on the network: lookup, contains, acquire, prefetch, hand-off.

A request is answered from this node alone if all of its blocks are here, if the network does not serve its
namespace, or if its requester has too many network requests already. Otherwise a task checks which further
blocks exist on the network, downloads them if needed, and then answers. A request waits for network blocks
until its deadline. Blocks that are slower to load than to recompute are treated as misses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.insight.hit_counters import NETWORK
from kvstore.core.queues.device_queue import DEMAND, PREFETCH
from kvstore.core.transfers.worth import blocks_worth_loading
from kvstore.daemon.network.downloads import Downloads
from kvstore.daemon.network.eligibility import Eligibility
from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.existence import RESERVE_S, ExistenceChecks
from kvstore.daemon.network.tasks import Callback, Copied, Tasks, ask
from kvstore.daemon.network.uploads import Uploads
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import Requester, Trace
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.types import slot_bytes

Positions: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class NetworkRequests:
    """Answers requests from this node and the network. Times are in s of the event loop."""

    _core: Executor
    _executor: BackendExecutor
    _eligibility: Eligibility
    _existence: ExistenceChecks
    _tasks: Tasks
    _downloads: Downloads
    _uploads: Uploads

    def lookup(
        self,
        requester: Requester,
        request: int,
        event: ev.Lookup,
        namespace: NamespaceEntry,
        until: float,
        trace: Trace | None = None,
    ) -> None:
        """Answers how many leading blocks are here or on the network, as far as known by `until`."""

        def found(action: Any) -> None:
            # Behind blocks that are not worth loading from this node, none counts.
            missing = (
                isinstance(action, ac.Found) and action.value < event.keys.n and not action.stored.unworthy
            )
            if missing and self._may_start(requester, namespace):
                work = self._lookup(event, namespace, action, until, trace)
                self._start(requester, request, namespace, work)
            else:
                requester.answer(request, action)

        self._core.ask(Callback(found), request, event)

    async def _lookup(
        self,
        event: ev.Lookup,
        namespace: NamespaceEntry,
        found: ac.Found,
        until: float,
        trace: Trace | None = None,
    ) -> ac.Found:
        absent = self._absent(namespace, event.keys, found.value)
        existing = await self._existence.prefix(namespace, _keys_at(event.keys, absent), until)
        _mark(trace, "network.lookup")
        had = int(np.count_nonzero(absent[:existing] < event.have))
        n = had + self._worth_loading(event, namespace, existing - had, event.step)
        _add_network(found.stored, _leading_with(absent, existing, event.keys.n))
        worth = _leading_with(absent, n, event.keys.n)
        found.stored.unworthy = found.stored.blocks - worth
        return ac.Found(found.request, worth, found.gaps or existing > 0, found.stored)

    def contains(
        self, requester: Requester, request: int, event: ev.Contains, namespace: NamespaceEntry, until: float
    ) -> None:
        """Answers which keys are here or on the network, as far as known by `until`."""

        def present(action: Any) -> None:
            missing = isinstance(action, ac.Presence) and not action.mask.all()
            if missing and self._may_start(requester, namespace):
                self._start(requester, request, namespace, self._contains(event, namespace, action, until))
            else:
                requester.answer(request, action)

        self._core.ask(Callback(present), request, event)

    async def _contains(
        self, event: ev.Contains, namespace: NamespaceEntry, here: ac.Presence, until: float
    ) -> ac.Presence:
        absent = np.flatnonzero(~here.mask)
        here.mask[absent] = await self._existence.mask(namespace, _keys_at(event.keys, absent), until)
        return here

    def acquire(
        self,
        requester: Requester,
        request: int,
        event: ev.Acquire,
        namespace: NamespaceEntry,
        fresh: bool = False,
        trace: Trace | None = None,
    ) -> None:
        """Answers with a lease. Downloads the blocks that only the network has first, until the deadline.

        `fresh` ignores cached misses: another node is writing these blocks.
        """
        view, keys = self._core.view, event.keys
        if not view.in_memory(event.namespace, keys, event.tier):
            stored = view.stored(event.namespace, keys)
            if stored < keys.n and self._may_start(requester, namespace):
                work = self._acquire(event, namespace, stored, fresh, trace)
                self._start(requester, request, namespace, work)
                return
        self._core.ask(requester, request, event)

    async def _acquire(
        self,
        event: ev.Acquire,
        namespace: NamespaceEntry,
        stored: int,
        fresh: bool,
        trace: Trace | None = None,
    ) -> Any:
        keys, until = event.keys, event.deadline
        absent = self._absent(namespace, keys, stored)
        missing = _keys_at(keys, absent)
        existing = await self._existence.prefix(namespace, missing, until, fresh)
        _mark(trace, "network.lookup")
        n = self._worth_loading(event, namespace, existing)
        parent = keys[stored - 1] if stored else b""
        downloads = self._downloads.start(namespace, missing[:n], parent, event.tenant, DEMAND, until)
        await self._wait(downloads, until)
        _mark(trace, "network.download")
        loaded, late = _leading(downloads), sum(not download.done() for download in downloads)
        self._executor.counters["hit_blocks"] += loaded
        event.namespace = namespace.number  # the namespace may have been deleted meanwhile
        grant = await ask(self._core, event)
        if isinstance(grant, ac.Grant):
            _add_network(grant.stored, _leading_with(absent, existing, keys.n), loaded)
            grant.stored.unworthy += existing - n
            grant.stored.late += late
            grant.sources[absent[:loaded][absent[:loaded] < len(grant.sources)]] = NETWORK
        return grant

    def prefetch(
        self, requester: Requester, request: int, event: ev.Prefetch, namespace: NamespaceEntry
    ) -> None:
        """Answers how many leading blocks are here or on the network, and starts to download the latter."""

        def started(action: Any) -> None:
            missing = isinstance(action, ac.Answer) and action.value < event.keys.n
            if missing and self._eligibility.serves(namespace):
                self._start(requester, request, namespace, self._prefetch(event, namespace, action.value))
            else:
                requester.answer(request, action)

        self._core.ask(Callback(started), request, event)

    async def _prefetch(self, event: ev.Prefetch, namespace: NamespaceEntry, stored: int) -> ac.Answer:
        absent = self._absent(namespace, event.keys, stored)
        missing = _keys_at(event.keys, absent)
        n = await self._existence.prefix(namespace, missing, self._core.now() + self._executor.timeout_s)
        parent = event.keys[stored - 1] if stored else b""
        self._downloads.start(namespace, missing[:n], parent, event.tenant, PREFETCH, 0.0)
        return ac.Answer(event.request, _leading_with(absent, n, event.keys.n))

    def reserve(
        self, requester: Requester, request: int, event: ev.Reserve, namespace: NamespaceEntry
    ) -> None:
        """Reserves slots once the epoch of the namespace is known, if it can be read by the deadline.

        Blocks that are stored before may be older than the epoch, and would be deleted.
        """
        if self._eligibility.awaits_epoch(namespace) and self._tasks.has_room(requester):
            self._start(requester, request, namespace, self._reserve(event, namespace))
        else:
            self._core.ask(requester, request, event)

    async def _reserve(self, event: ev.Reserve, namespace: NamespaceEntry) -> Any:
        left_s = event.deadline - RESERVE_S - self._core.now()
        await self._eligibility.knows_epoch(namespace, min(left_s, self._executor.timeout_s))
        event.namespace = namespace.number  # its blocks may have been deleted meanwhile
        return await ask(self._core, event)

    def hand_off(
        self,
        requester: Requester,
        request: int,
        namespace: NamespaceEntry,
        keys: Keys,
        tenant: int,
        until: float,
    ) -> None:
        """Uploads the stored prefix. Answers by `until` how many leading blocks are on the network."""
        if self._eligibility.serves(namespace):
            self._start(requester, request, namespace, self._hand_off(namespace, keys, tenant, until))
            return
        problem = self._executor.problem
        why = problem or "blocks with a TTL and encrypted blocks stay on the node"
        hint = "see network in `kvstore status`" if problem else "hand off blocks of another namespace"
        requester.answer(request, ac.Deny(request, f"the blocks cannot be handed off: {why}", hint))

    async def _hand_off(self, namespace: NamespaceEntry, keys: Keys, tenant: int, until: float) -> ac.Answer:
        if not await self._eligibility.knows_epoch(namespace, until - RESERVE_S - self._core.now()):
            return ac.Answer(0, 0)
        stored = self._core.view.stored(namespace.number, keys)
        uploads = self._uploads.start(namespace, [keys[i] for i in range(stored)], tenant, DEMAND)
        await self._wait(uploads, until)
        return ac.Answer(0, _leading(uploads))

    def _absent(self, namespace: NamespaceEntry, keys: Keys, start: int) -> Positions:
        """Returns the positions of keys that this node does not have; `start` is the first of them.

        Of a chain, all from `start` on: blocks behind a missing one are downloaded with it.
        """
        positions = np.arange(start, keys.n)
        if namespace.independent:
            here = self._core.view.readable(namespace.number, keys)
            positions = positions[~here[start:] | (positions == start)]
        return positions

    def _may_start(self, requester: Requester, namespace: NamespaceEntry) -> bool:
        return self._eligibility.serves(namespace) and self._tasks.has_room(requester)

    def _start(
        self, requester: Requester, request: int, namespace: NamespaceEntry, work: Coroutine[Any, Any, Any]
    ) -> None:
        """Starts a task that answers a request with the result of `work`."""

        async def answer() -> None:
            requester.answer(request, await work)

        self._tasks.start(answer(), namespace, requester)

    async def _wait(self, copies: Sequence[Copied], until: float) -> None:
        for copy in copies:
            if not copy.done():  # those of one batch end together
                left_s = until - RESERVE_S - self._core.now()
                if left_s <= 0:
                    return
                await asyncio.wait((copy,), timeout=left_s)

    def _worth_loading(
        self, event: ev.Lookup | ev.Acquire, namespace: NamespaceEntry, n: int, step: int = 1
    ) -> int:
        """Returns how many of `n` keys to load: by the deadline, and as far as this saves the most time.

        Each key stands for `step` blocks.
        """
        now, device = self._core.now(), self._executor.device
        key_s = step * slot_bytes(namespace.block_bytes) / device.share_of(now, event.tenant)
        load_s = device.wait_s(now, event.tenant, 0) + np.arange(1, n + 1) * key_s
        return blocks_worth_loading(load_s, step * event.recompute_s, event.deadline - now)


def _mark(trace: Trace | None, phase: str) -> None:
    if trace is not None:
        trace.mark(phase)


def _keys_at(keys: Keys, positions: Positions) -> list[bytes]:
    return [keys[i] for i in positions.tolist()]


def _leading_with(absent: Positions, n: int, of: int) -> int:
    """Returns how many of `of` leading keys there are once the first n of the absent ones are there."""
    return int(absent[n]) if n < len(absent) else of


def _add_network(stored: ac.Stored, known: int, loaded: int = 0) -> None:
    """Counts the network's share of `known` leading blocks. `loaded` of them are in DRAM by now."""
    by_tier = stored.by_tier
    only_there = max(0, known - stored.blocks)
    loaded = min(loaded, by_tier.get(0, 0))
    if loaded:
        by_tier[0] -= loaded
    if loaded + only_there:
        by_tier[NETWORK] = loaded + only_there


def _leading(copies: Sequence[Copied]) -> int:
    """Returns how many leading copies have succeeded."""
    n = 0
    for copy in copies:
        if not (copy.done() and not copy.cancelled() and copy.result()):
            break
        n += 1
    return n
