"""Requests whose answer includes blocks on the network: lookup, acquire, prefetch and hand-off.

A request is answered from this node alone if all of its blocks are here, if the network does not serve its
namespace, or if its requester has too many network requests already. Otherwise a task checks which further
blocks exist on the network, downloads them if needed, and then answers. A request waits for network blocks
until its deadline. Blocks that are slower to load than to recompute are treated as misses.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.insight.hit_counters import NETWORK
from kvstore.core.transfers.devices import DEMAND, PREFETCH
from kvstore.daemon.network.core_requests import Callback
from kvstore.daemon.network.downloads import Downloads
from kvstore.daemon.network.eligibility import Eligibility
from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.existence import RESERVE_S, ExistenceChecks
from kvstore.daemon.network.ports import BlockView, Core, Requester
from kvstore.daemon.network.tasks import Tasks
from kvstore.daemon.network.uploads import Uploads
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.types import slot_bytes


class NetworkRequests:
    """Answers requests from this node and the network."""

    def __init__(
        self,
        *,
        core: Core,
        blocks: BlockView,
        executor: BackendExecutor,
        eligibility: Eligibility,
        existence: ExistenceChecks,
        tasks: Tasks,
        downloads: Downloads,
        uploads: Uploads,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        """`clock` returns s, as `until` and deadlines."""
        self._core = core
        self._blocks = blocks
        self._executor = executor
        self._eligibility = eligibility
        self._existence = existence
        self._tasks = tasks
        self._downloads = downloads
        self._uploads = uploads
        self._counters = counters
        self._clock = clock

    # -- lookup

    def lookup(
        self, requester: Requester, request: int, event: ev.Lookup, namespace: NamespaceEntry, until: float
    ) -> None:
        """Answers how many leading blocks are here or on the network, as far as known by `until`."""

        def found(action: Any) -> None:
            missing = isinstance(action, ac.Found) and action.value < event.keys.n
            if missing and self._may_start(requester, namespace):
                lookup = self._lookup(requester, request, event, namespace, action, until)
                self._tasks.start(lookup, namespace, requester)
            else:
                requester.answer(request, action)

        self._core.ask(Callback(found), request, event)

    async def _lookup(
        self,
        requester: Requester,
        request: int,
        event: ev.Lookup,
        namespace: NamespaceEntry,
        found: ac.Found,
        until: float,
    ) -> None:
        keys = [event.keys[i] for i in range(found.value, event.keys.n)]
        existing = await self._existence.prefix(namespace, keys, until)
        n = self._worth_loading(namespace, existing, event.tenant, until, event.recompute_s)
        _add_network(found.stored, found.value + existing)
        found.stored.unworthy = found.stored.blocks - found.value - n
        requester.answer(request, ac.Found(request, found.value + n, found.gaps or n > 0, found.stored))

    # -- acquire

    def acquire(
        self, requester: Requester, request: int, event: ev.Acquire, namespace: NamespaceEntry
    ) -> None:
        """Answers with a lease, after the blocks that only the network has were downloaded in time."""
        blocks, keys = self._blocks, event.keys
        if not blocks.in_memory(event.namespace, keys, event.at):
            stored = blocks.stored(event.namespace, keys)
            if stored < keys.n and self._may_start(requester, namespace):
                acquire = self._acquire(requester, request, event, namespace, stored)
                self._tasks.start(acquire, namespace, requester)
                return
        self._core.ask(requester, request, event)

    async def _acquire(
        self, requester: Requester, request: int, event: ev.Acquire, namespace: NamespaceEntry, stored: int
    ) -> None:
        keys, until = event.keys, event.deadline
        missing = [keys[i] for i in range(stored, keys.n)]
        existing = await self._existence.prefix(namespace, missing, until)
        n = self._worth_loading(namespace, existing, event.tenant, until, event.recompute_s)
        parent = keys[stored - 1] if stored else b""
        downloads = self._downloads.start(namespace, missing[:n], parent, event.tenant, DEMAND, until)
        await self._wait(downloads, until)
        loaded, late = _leading(downloads), sum(not download.done() for download in downloads)
        self._counters["hit_blocks"] += loaded

        def granted(action: Any) -> None:
            if isinstance(action, ac.Grant):
                _add_network(action.stored, stored + existing, loaded)
                action.stored.unworthy += existing - n
                action.stored.late += late
                action.sources[stored : stored + loaded] = NETWORK
            requester.answer(request, action)

        event.namespace = namespace.number  # the namespace may have been deleted meanwhile
        self._core.ask(Callback(granted), request, event)

    # -- prefetch

    def prefetch(
        self, requester: Requester, request: int, event: ev.Prefetch, namespace: NamespaceEntry
    ) -> None:
        """Answers how many leading blocks are here or on the network; the latter start to be downloaded."""

        def started(action: Any) -> None:
            missing = isinstance(action, ac.Answer) and action.value < event.keys.n
            if missing and self._eligibility.serves(namespace):
                prefetch = self._prefetch(requester, request, event, namespace, action.value)
                self._tasks.start(prefetch, namespace, requester)
            else:
                requester.answer(request, action)

        self._core.ask(Callback(started), request, event)

    async def _prefetch(
        self, requester: Requester, request: int, event: ev.Prefetch, namespace: NamespaceEntry, stored: int
    ) -> None:
        keys = [event.keys[i] for i in range(stored, event.keys.n)]
        n = await self._existence.prefix(namespace, keys, self._clock() + self._executor.timeout_s)
        parent = event.keys[stored - 1] if stored else b""
        self._downloads.start(namespace, keys[:n], parent, event.tenant, PREFETCH, 0.0)
        requester.answer(request, ac.Answer(request, stored + n))

    # -- hand-off

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
            hand_off = self._hand_off(requester, request, namespace, keys, tenant, until)
            self._tasks.start(hand_off, namespace, requester)
            return
        problem = self._executor.problem
        why = problem or "blocks with a TTL and encrypted blocks stay on the node"
        hint = "see network in `kvstore status`" if problem else "hand off blocks of another namespace"
        requester.answer(request, ac.Deny(request, f"the blocks cannot be handed off: {why}", hint))

    async def _hand_off(
        self,
        requester: Requester,
        request: int,
        namespace: NamespaceEntry,
        keys: Keys,
        tenant: int,
        until: float,
    ) -> None:
        stored = self._blocks.stored(namespace.number, keys)
        uploads = self._uploads.start(namespace, [keys[i] for i in range(stored)], tenant, DEMAND)
        await self._wait(uploads, until)
        requester.answer(request, ac.Answer(request, _leading(uploads)))

    # -- shared by these

    def _may_start(self, requester: Requester, namespace: NamespaceEntry) -> bool:
        return self._eligibility.serves(namespace) and self._tasks.has_room(requester)

    async def _wait(self, copies: Sequence[asyncio.Future[bool]], until: float) -> None:
        left_s = until - RESERVE_S - self._clock()
        if copies and left_s > 0:
            await asyncio.wait(set(copies), timeout=left_s)

    def _worth_loading(
        self, namespace: NamespaceEntry, n: int, tenant: int, until: float, recompute_s: float
    ) -> int:
        """Returns how many of `n` blocks load by `until`, and faster than they are recomputed.

        `recompute_s`: time to compute one block, 0 if unknown.
        """
        now, device = self._clock(), self._executor.device
        block_s = slot_bytes(namespace.block_bytes) / device.share_of(now, tenant)
        counts = np.arange(1, n + 1)
        load_s = device.wait_s(now, tenant, 0) + counts * block_s
        worth = load_s <= max(0.0, until - now)
        if recompute_s:
            worth &= load_s <= counts * recompute_s
        last = np.flatnonzero(worth)
        return int(last[-1]) + 1 if len(last) else 0


def _add_network(stored: ac.Stored, known: int, loaded: int = 0) -> None:
    """Counts the network's share of `known` leading blocks. `loaded` of them are in DRAM by now."""
    by_tier = stored.by_tier
    only_there = max(0, known - stored.blocks)
    loaded = min(loaded, by_tier.get(0, 0))
    if loaded:
        by_tier[0] -= loaded
    if loaded + only_there:
        by_tier[NETWORK] = loaded + only_there


def _leading(copies: Sequence[asyncio.Future[bool]]) -> int:
    """Returns how many leading copies have succeeded."""
    n = 0
    for copy in copies:
        if not (copy.done() and not copy.cancelled() and copy.result()):
            break
        n += 1
    return n
