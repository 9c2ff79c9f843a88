"""Deletion of blocks, namespaces and tenants: on this node, on the network, and durably.

A request is answered when a crash cannot restore the blocks. The core removes blocks in steps (see
`kvstore.core.requests.deletion`). A namespace's number becomes available when its last block is removed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.ports import CurrentConfig, Ended, EventLog, Requester
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces
from kvstore.daemon.tenancy.quotas import TenantQuotas
from kvstore.errors import TierError

_log = logging.getLogger(__name__)

_RETRY_S = 0.1

DeleteHere = Callable[[Requester], None]
"""Deletes blocks on this node. Answers the requester that it is given."""

DeleteEverywhere = Callable[
    [Requester, int, Sequence[NamespaceEntry], Iterable[bytes] | None, DeleteHere], None
]
"""Deletes blocks here and on the network: these keys of the only namespace, or all blocks (None).

Answers when both are done.
"""


def delete_here_only(
    requester: Requester, request: int, namespaces: object, keys: object, delete_here: DeleteHere
) -> None:
    """Deletes blocks of a daemon without a network tier."""
    delete_here(requester)


@dataclass(slots=True, eq=False)
class Deletion:
    """Deletes blocks, namespaces and tenants.

    `_discard_policy_state` deletes the saved reuse statistics, which contain names of tenants.
    """

    _durable: Durability
    _catalog: NamespaceCatalog
    _namespaces: Namespaces
    _authenticator: Authenticator
    _quotas: TenantQuotas
    _data_keys: DataKeys
    _event_log: EventLog
    _config: CurrentConfig
    _delete_everywhere: DeleteEverywhere
    _discard_policy_state: Callable[[], None]
    _pending: Counter[int] = field(default_factory=Counter, init=False)

    def invalidate(self, requester: Requester, request: int, namespace: NamespaceEntry, keys: Keys) -> None:
        """Makes blocks misses, and answers when this survives a crash and applies to the network."""
        here = partial(self.invalidate_here, namespace=namespace, keys=keys, request=request)
        self._delete_everywhere(requester, request, [namespace], (keys[i] for i in range(keys.n)), here)

    def invalidate_here(
        self, requester: Requester, namespace: NamespaceEntry, keys: Keys, request: int = 0
    ) -> None:
        """Makes blocks misses on this node alone, and answers when this survives a crash."""
        self._durable.ask(requester, request, ev.Invalidate(0, namespace.number, keys))

    def forget(self, requester: Requester, request: int, namespaces: Sequence[NamespaceEntry]) -> None:
        """Empties namespaces of one tenant, and answers when nothing is left, durably."""
        tenant = namespaces[0].tenant
        if self._is_busy(requester, request, tenant):
            return
        for namespace in namespaces:
            owner = self._authenticator.name(tenant)
            self._event_log.add(EntryKind.FORGOTTEN, tenant=owner, namespace=namespace.fingerprint.hex())
        self._forget(requester, request, namespaces, self._delete_everywhere)

    def forget_here(self, requester: Requester, namespace: NamespaceEntry) -> None:
        """Empties a namespace on this node alone, and answers when nothing is left, durably."""
        if not self._is_busy(requester, 0, namespace.tenant):
            self._forget(requester, 0, [namespace], delete_here_only)

    def _forget(
        self,
        requester: Requester,
        request: int,
        namespaces: Sequence[NamespaceEntry],
        delete: DeleteEverywhere,
    ) -> None:
        tenant = namespaces[0].tenant
        numbers = self._close(tenant, namespaces)

        def deleted(ended: Ended) -> None:
            self._free(tenant, numbers)
            ended(None)

        def here(then: Requester) -> None:
            self._durable.ask(Then(then, deleted), request, ev.Forget(0, numbers))

        delete(requester, request, namespaces, None, here)
        for namespace in namespaces:
            self._catalog.reopen(namespace)

    def delete(self, requester: Requester, request: int, name: str) -> None:
        """Deletes all blocks of a tenant, and answers when this is durable. Its members remain."""
        tenant = self._authenticator.number(name)
        assert tenant is not None
        if self._is_busy(requester, request, tenant):
            return
        namespaces = self._namespaces.of(tenant)
        numbers = self._close(tenant, namespaces)
        for namespace in namespaces:
            self._namespaces.remove(namespace)
        self._event_log.add(EntryKind.DELETED, tenant=name, detail=f"{len(namespaces)} namespaces")

        def deleted(ended: Ended) -> None:
            self._free(tenant, numbers)
            self._discard_policy_state()
            self._data_keys.erase(name, partial(self._erased, name, tenant, ended))

        def here(then: Requester) -> None:
            resume = partial(self._quotas.resume, name)
            self._durable.ask(Then(then, deleted, resume), request, ev.ForgetTenant(0, tenant))

        self._quotas.suspend(name)
        self._delete_everywhere(requester, request, namespaces, None, here)

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

    def _is_busy(self, requester: Requester, request: int, tenant: int) -> bool:
        """Denies a request of a tenant with many deletions under way: all tenants share the numbers."""
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


@dataclass(slots=True, eq=False)
class Then:
    """A requester that runs `_then` before it passes the answer on to another requester.

    `_then` gets a function to call when it has ended. `_finally_do` is called before the answer in any case.
    """

    _requester: Requester
    _then: Callable[[Ended], None]
    _finally_do: Callable[[], None] | None = None

    def answer(self, request: int, action: ac.Reply) -> None:
        """See Requester."""

        def ended(error: Exception | None) -> None:
            finally_do, self._finally_do = self._finally_do, None
            if finally_do is not None:
                finally_do()
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
