"""Which namespaces and blocks the network tier shares.

Namespaces with a TTL and encrypted tenants stay on the node, because objects have neither a TTL nor a key.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.pending_deletions import PendingDeletions
from kvstore.daemon.tenancy.namespaces import NamespaceEntry


class Eligibility:
    """Answers whether blocks may go to the network and come from it."""

    def __init__(
        self, executor: BackendExecutor, pending: PendingDeletions, encrypts: Callable[[int], bool]
    ) -> None:
        """`encrypts` returns whether a tenant's blocks are encrypted at rest."""
        self._executor = executor
        self._pending = pending
        self._encrypts = encrypts

    def shares(self, namespace: NamespaceEntry) -> bool:
        """Returns whether a namespace's blocks may be on the network at all."""
        return not namespace.ttl_s and not self._encrypts(namespace.tenant)

    def serves(self, namespace: NamespaceEntry) -> bool:
        """Returns whether a namespace's blocks can be read and written on the network now."""
        usable = self._executor.usable and namespace.number > 0
        return usable and namespace.fingerprint not in self._pending and self.shares(namespace)
