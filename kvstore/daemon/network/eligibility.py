"""Which namespaces and blocks may be read from the network and written to it, and when.

A namespace waits for its epoch first: without it, its objects have no names (see `names`).
Namespaces with a TTL and encrypted tenants stay on the node, because objects have neither a TTL nor a key.
Objects and namespaces are excluded from the start of their deletion until the backend has confirmed it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name

Target = Name | bytes
"""What a deletion is about: one object, or a namespace's fingerprint for all of its objects."""


class Eligibility:
    """Answers whether blocks may use the network.

    `deletions` counts the running deletions of each target. `to_retry` has targets whose deletion failed.
    `unreadable` has fingerprints of namespaces whose epoch could not be read lately. Nobody waits for these.
    """

    def __init__(self, executor: BackendExecutor, encrypts: Callable[[int], bool]) -> None:
        """`encrypts` returns whether a tenant's blocks are encrypted at rest."""
        self.deletions: Counter[Target] = Counter()
        self.to_retry: set[Target] = set()
        self.unreadable: set[bytes] = set()
        self.ask_epochs: Callable[[], None] = lambda: None
        """Called to have unknown epochs read now."""
        self._executor = executor
        self._encrypts = encrypts
        self._waiting: dict[NamespaceEntry, asyncio.Future[None]] = {}

    def shares(self, namespace: NamespaceEntry) -> bool:
        """Returns whether a namespace's blocks may be on the network at all."""
        return not namespace.ttl_s and not self._encrypts(namespace.tenant)

    def serves(self, namespace: NamespaceEntry) -> bool:
        """Returns whether a namespace's blocks can be read and written on the network now."""
        usable = self._executor.usable and namespace.number > 0
        return usable and not self.deletes(namespace.fingerprint) and self.shares(namespace)

    def awaits_epoch(self, namespace: NamespaceEntry) -> bool:
        """Returns whether a namespace's epoch is unknown, and is going to be read now."""
        if namespace.epoch is not None or namespace.fingerprint in self.unreadable:
            return False
        reads = (self._executor.usable or not self._executor.checked) and namespace.number > 0
        return reads and not self.deletes(namespace.fingerprint) and self.shares(namespace)

    async def knows_epoch(self, namespace: NamespaceEntry, within_s: float) -> bool:
        """Returns whether the epoch of a namespace is known. Waits at most `within_s` for a read of it."""
        if within_s > 0 and self.awaits_epoch(namespace):
            waiting = self._waiting.get(namespace)
            if waiting is None:
                waiting = self._waiting[namespace] = asyncio.get_running_loop().create_future()
            self.ask_epochs()
            await asyncio.wait((waiting,), timeout=within_s)
        return namespace.epoch is not None

    def end_waits(self, namespaces: Iterable[NamespaceEntry]) -> None:
        """Ends waits for the epochs of these namespaces and closed ones, unless they are still to be read."""
        closed = [namespace for namespace in self._waiting if not namespace.number]
        for namespace in (*namespaces, *closed):
            waiting = self._waiting.get(namespace)
            reads = self.awaits_epoch(namespace) or namespace.fingerprint in self.deletions
            if waiting is not None and not reads:
                del self._waiting[namespace]
                waiting.set_result(None)

    def deletes(self, target: Target) -> bool:
        """Returns whether the deletion of a target is not confirmed."""
        return target in self.deletions or target in self.to_retry
