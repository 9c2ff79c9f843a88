"""Which namespaces and blocks may be read from the network and written to it.

Namespaces with a TTL and encrypted tenants stay on the node, because objects have neither a TTL nor a key.
Objects and namespaces are excluded from the start of their deletion until the backend has confirmed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name

Target = Name | bytes
"""What a deletion is about: one object, or a namespace's fingerprint for all of its objects."""


class Eligibility:
    """Answers whether blocks may use the network.

    `deletions` counts the running deletions of each target. `to_retry` has targets whose deletion failed.
    """

    def __init__(self, executor: BackendExecutor, encrypts: Callable[[int], bool]) -> None:
        """`encrypts` returns whether a tenant's blocks are encrypted at rest."""
        self.deletions: Counter[Target] = Counter()
        self.to_retry: set[Target] = set()
        self._executor = executor
        self._encrypts = encrypts

    def shares(self, namespace: NamespaceEntry) -> bool:
        """Returns whether a namespace's blocks may be on the network at all."""
        return not namespace.ttl_s and not self._encrypts(namespace.tenant)

    def serves(self, namespace: NamespaceEntry) -> bool:
        """Returns whether a namespace's blocks can be read and written on the network now."""
        usable = self._executor.usable and namespace.number > 0
        return usable and not self.deletes(namespace.fingerprint) and self.shares(namespace)

    def deletes(self, target: Target) -> bool:
        """Returns whether the deletion of a target is not confirmed."""
        return target in self.deletions or target in self.to_retry
