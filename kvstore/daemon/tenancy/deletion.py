"""Deletion of blocks, namespaces and tenants: on this node, on the network, and durably.

A request is answered when a crash cannot bring the blocks back. The core removes the blocks step by step
(see `kvstore.core.requests.deletion`). Numbers of namespaces become available when nothing is left of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.ports import CurrentConfig, Ended, EventLog, Requester
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.daemon.tenancy.quotas import TenantQuotas
from kvstore.errors import TierError

_log = logging.getLogger(__name__)

_RETRY_S = 0.1


class NetworkDeletion(Protocol):
    """Deletion on the network tier."""

    def delete(
        self,
        requester: Requester,
        request: int,
        namespaces: Sequence[NamespaceEntry],
        keys: Sequence[bytes] | None,
        here: Callable[[Requester], None],
        /,
    ) -> None:
        """Lets `here` delete blocks on this node, deletes them on the network, then answers.

        Deletes `keys` of the only namespace, or all blocks of the namespaces if `keys` is None.
        """


class Deletion:
    """Deletes blocks, namespaces and tenants."""

    def __init__(
        self,
        durable: Durability,
        catalog: NamespaceCatalog,
        namespaces: Namespaces,
        authenticator: Authenticator,
        quotas: TenantQuotas,
        data_keys: DataKeys,
        event_log: EventLog,
        config: CurrentConfig,
        network: NetworkDeletion | None,
        discard_policy_state: Callable[[], None],
    ) -> None:
        """`discard_policy_state` deletes the saved reuse statistics, which name tenants."""
        self._durable = durable
        self._catalog = catalog
        self._namespaces = namespaces
        self._authenticator = authenticator
        self._quotas = quotas
        self._data_keys = data_keys
        self._event_log = event_log
        self._config = config
        self._network = network
        self._discard_policy_state = discard_policy_state
        self._pending: Counter[int] = Counter()

    def invalidate(self, requester: Requester, request: int, namespace: NamespaceEntry, keys: Keys) -> None:
        """Makes blocks misses. The answer comes when this survives a crash and holds on the network."""
        event = ev.Invalidate(0, namespace.number, keys)

        def here(then: Requester) -> None:
            self._durable.ask(then, request, event)

        if self._network is None:
            here(requester)
        else:
            self._network.delete(requester, request, [namespace], [keys[i] for i in range(keys.n)], here)

    def forget(self, requester: Requester, request: int, namespaces: Sequence[NamespaceEntry]) -> None:
        """Empties namespaces of one tenant. The answer comes when nothing is left, durably."""
        tenant = namespaces[0].tenant
        if self._is_busy(requester, request, tenant):
            return
        for namespace in namespaces:
            owner = self._authenticator.name(namespace.tenant)
            self._event_log.add("forgotten", tenant=owner, namespace=namespace.fingerprint.hex())
        numbers = self._close(tenant, namespaces)

        def deleted(ended: Ended) -> None:
            self._free(tenant, numbers)
            ended(None)

        def here(then: Requester) -> None:
            self._durable.ask(Then(then, deleted), request, ev.Forget(0, numbers))

        self._also_on_network(requester, request, namespaces, here)
        for namespace in namespaces:
            self._catalog.reopen(namespace)

    def delete(self, requester: Requester, request: int, name: str) -> None:
        """Deletes everything that a tenant has stored. The answer comes when this is durable.

        The tenant's members stay members.
        """
        tenant = self._authenticator.number(name)
        assert tenant is not None
        if self._is_busy(requester, request, tenant):
            return
        namespaces = self._namespaces.of(tenant)
        numbers = self._close(tenant, namespaces)
        for namespace in namespaces:
            self._namespaces.remove(namespace)
        self._event_log.add("deleted", tenant=name, detail=f"{len(namespaces)} namespaces")

        def deleted(ended: Ended) -> None:
            self._free(tenant, numbers)
            self._discard_policy_state()
            self._data_keys.erase(name, partial(self._erased, name, tenant, ended))

        def here(then: Requester) -> None:
            resume = partial(self._quotas.resume, name)
            self._durable.ask(Then(then, deleted, resume), request, ev.ForgetTenant(0, tenant))

        self._quotas.suspend(name)
        self._also_on_network(requester, request, namespaces, here)

    def _erased(self, name: str, tenant: int, ended: Ended, error: Exception | None) -> None:
        if error is None and self._data_keys.are_used_by(name) and self._namespaces.of(tenant):
            # Namespaces that were opened meanwhile are encrypted with the next key.
            self._data_keys.make(name, partial(self._record_again, tenant, ended))
        else:
            ended(error)

    def _record_again(self, tenant: int, ended: Ended, error: Exception | None) -> None:
        try:
            for namespace in self._namespaces.of(tenant) if error is None else ():
                self._catalog.record(namespace)
        except TierError as failure:
            error = failure
        ended(error)

    def _also_on_network(
        self,
        requester: Requester,
        request: int,
        namespaces: Sequence[NamespaceEntry],
        here: Callable[[Requester], None],
    ) -> None:
        if self._network is None or not namespaces:
            here(requester)
        else:
            self._network.delete(requester, request, namespaces, None, here)

    def _is_busy(self, requester: Requester, request: int, tenant: int) -> bool:
        """Defers a request of a tenant with many deletions under way: numbers are shared by all tenants."""
        most = self._config().limits.namespaces_per_tenant
        if self._pending[tenant] < most and not self._quotas.is_suspended(tenant):
            return False
        why = "namespaces of this tenant are being forgotten"
        requester.answer(request, ac.Deny(request, why, "", _RETRY_S))
        return True

    def _close(self, tenant: int, namespaces: Sequence[NamespaceEntry]) -> tuple[int, ...]:
        numbers = self._catalog.close(namespaces)
        self._pending[tenant] += len(numbers)
        return numbers

    def _free(self, tenant: int, numbers: Sequence[int]) -> None:
        self._pending[tenant] -= len(numbers)
        self._catalog.free(numbers)


def _nothing() -> None:
    pass


class Then:
    """A requester that does something before the answer goes on to another requester.

    Calls `then` with a function to call when that has ended. `at_last` is called in any case.
    """

    def __init__(
        self, requester: Requester, then: Callable[[Ended], None], at_last: Callable[[], None] = _nothing
    ) -> None:
        self._requester = requester
        self._then = then
        self._at_last = at_last

    def answer(self, request: int, action: ac.Reply) -> None:
        """See Requester."""

        def ended(error: Exception | None) -> None:
            at_last, self._at_last = self._at_last, _nothing
            at_last()
            self._requester.answer(request, action if error is None else refusal(request, error))

        try:
            self._then(ended)
        except Exception as error:
            ended(error)


def refusal(request: int, error: Exception) -> ac.Deny:
    """Returns the answer to a request that has failed with this error."""
    if isinstance(error, TierError):
        return ac.Deny(request, error.message, error.hint)
    _log.error("a request failed after its answer from the core", exc_info=error)
    return ac.Deny(request, "internal error", "see the daemon's log")
