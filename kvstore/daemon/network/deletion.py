"""Deletion of blocks and namespaces on this node and on the network.

While a deletion runs, its blocks are neither read from the network nor written to it. If the backend does not
confirm a deletion, the request fails and the node retries the deletion until it succeeds. The list of pending
deletions is lost with the process.

The deletion of a whole namespace writes a new epoch, so that other nodes delete their blocks too (see
`epochs`), and then deletes the objects of earlier epochs. A retry writes no second epoch. The deletion of
keys deletes their objects, and adds the keys to a list that other nodes read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvstore.core import actions as ac
from kvstore.daemon.network.eligibility import Eligibility, Target
from kvstore.daemon.network.epochs import Epochs
from kvstore.daemon.network.executor import HEALTH_CHECK_EVERY_S, BackendExecutor
from kvstore.daemon.network.existence import ExistenceChecks
from kvstore.daemon.network.key_lists import MOST_KEYS, names_of_keys
from kvstore.daemon.network.names import ZERO, block_name, name_prefix
from kvstore.daemon.network.tasks import Callback, Copied, Tasks
from kvstore.daemon.network.uploads import Uploads
from kvstore.daemon.runtime.ports import Requester
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name, Outcome

_log = logging.getLogger(__name__)

_OBJECTS_PER_CALL = 1000
_LIST_WITHIN_S = 60.0
_LIST_IS_FULL = f"deleted here and on the network, but other nodes are told of {MOST_KEYS} keys at most"


class Keyed(NamedTuple):
    """Keys of one namespace that are deleted."""

    namespace: NamespaceEntry
    keys: set[bytes]


@dataclass(slots=True, eq=False)
class Deletion:
    """Deletes objects, and retries deletions that failed.

    `_to_renew` counts the requests for which a namespace's new epoch is not written yet, `_old` has the
    epochs whose objects are still to be deleted. `_unnamed` has keys that cannot be deleted on the network
    while the epoch of their namespace is unknown. All three are by fingerprint.
    """

    _executor: BackendExecutor
    _eligibility: Eligibility
    _existence: ExistenceChecks
    _tasks: Tasks
    _uploads: Uploads
    _epochs: Epochs
    _to_renew: Counter[bytes] = field(init=False, default_factory=Counter)
    _old: dict[bytes, set[bytes]] = field(init=False, default_factory=dict)
    _unnamed: dict[bytes, set[bytes]] = field(init=False, default_factory=dict)

    @property
    def owed(self) -> int:
        """The deletions that failed and are retried."""
        return len(self._eligibility.to_retry) + sum(map(len, self._unnamed.values()))

    def delete(
        self,
        requester: Requester,
        request: int,
        namespaces: Sequence[NamespaceEntry],
        keys: Iterable[bytes] | None,
        delete_here: Callable[[Requester], None],
    ) -> None:
        """Deletes all blocks of `namespaces`, or `keys` of the only one, here and then on the network.

        `delete_here` deletes them on this node and answers the requester that it is given. The request is
        answered when both are done.
        """
        shared = [namespace for namespace in namespaces if self._eligibility.shares(namespace)]
        if not shared:
            delete_here(requester)
            return
        if keys is None:
            fingerprints = [namespace.fingerprint for namespace in shared]
            self._to_renew.update(fingerprints)
            self._start(requester, request, fingerprints, delete_here)
        elif shared[0].epoch is not None:
            self._start(requester, request, Keyed(shared[0], set(keys)), delete_here)
        else:
            keyed = Keyed(shared[0], set(keys))
            self._tasks.start(self._delete_unnamed(requester, request, keyed, delete_here), shared[0])

    async def _delete_unnamed(
        self, requester: Requester, request: int, keyed: Keyed, delete_here: Callable[[Requester], None]
    ) -> None:
        """Deletes blocks of a namespace whose epoch is unknown: on the network, once it is known."""
        if await self._eligibility.knows_epoch(keyed.namespace, self._executor.timeout_s):
            self._start(requester, request, keyed, delete_here)
            return
        self._unnamed.setdefault(keyed.namespace.fingerprint, set()).update(keyed.keys)

        def deleted_here(action: Any) -> None:
            requester.answer(request, action if isinstance(action, ac.Deny) else self._refusal(request))

        delete_here(Callback(deleted_here))

    def epoch_known(self, namespace: NamespaceEntry) -> None:
        """Has blocks deleted on the network that had no names before."""
        keys = self._unnamed.pop(namespace.fingerprint, None)
        if keys:
            self.retry_later([block_name(namespace, key) for key in keys])
            self._epochs.keys.add(namespace, keys)  # the comparison publishes them

    def _start(
        self,
        requester: Requester,
        request: int,
        what: list[bytes] | Keyed,
        delete_here: Callable[[Requester], None],
    ) -> None:
        """Deletes namespaces, by fingerprint, or keys: here, on the network, then on other nodes.

        The epoch of the keys' namespace is known.
        """
        keyed = what if isinstance(what, Keyed) else None
        targets: list[Target] = (
            [block_name(what.namespace, key) for key in what.keys] if isinstance(what, Keyed) else [*what]
        )
        self._eligibility.deletions.update(targets)
        # An upload that has started would write its object after the deletion.
        uploads = self._uploads.within(set(targets))

        def deleted_here(action: Any) -> None:
            if isinstance(action, ac.Deny):
                self._ended(targets)
                requester.answer(request, action)
                return
            # From now on, blocks of these keys have other names.
            listed = keyed is None or self._epochs.keys.add(keyed.namespace, keyed.keys)
            why = "" if listed else _LIST_IS_FULL
            self._tasks.start(self._delete(requester, request, action, targets, uploads, keyed, why))

        delete_here(Callback(deleted_here))

    async def _delete(
        self,
        requester: Requester,
        request: int,
        answer: Any,
        targets: Sequence[Target],
        uploads: list[Copied],
        keyed: Keyed | None,
        why: str,
    ) -> None:
        """Answers when targets are deleted on the network. `why` other nodes cannot be told of the keys."""
        if uploads:
            await asyncio.wait(uploads)
        deleted = await self._delete_there(targets)
        if not deleted:
            self.retry_later(targets)
        if not (deleted and (keyed is None or await self._epochs.keys.publish(keyed.namespace))):
            answer = self._refusal(request)
        elif why:
            answer = ac.Deny(request, why, "delete the whole namespace")
        self._ended(targets)
        requester.answer(request, answer)

    def _ended(self, targets: Iterable[Target]) -> None:
        self._eligibility.deletions -= Counter(targets)
        self._epochs.ask()  # an epoch that is unknown now was not read meanwhile

    def _refusal(self, request: int) -> ac.Deny:
        why = f"deleted here, but not on the network: {self._executor.problem or 'it did not answer'}"
        return ac.Deny(request, why, "this node retries the deletion and does not serve these blocks")

    def retry_later(self, targets: Sequence[Target]) -> None:
        """Has targets deleted on the network in the background, until the backend confirms it."""
        if targets and not self._eligibility.to_retry:
            self._tasks.start(self._retry())
        self._eligibility.to_retry.update(targets)

    async def _retry(self) -> None:
        while self._eligibility.to_retry:
            await asyncio.sleep(HEALTH_CHECK_EVERY_S)
            if self._executor.usable:
                targets = list(self._eligibility.to_retry)
                # Epochs that this deletion writes must not be compared before they are applied.
                self._eligibility.deletions.update(targets)
                try:
                    await self._delete_there(targets)
                finally:
                    self._ended(targets)

    async def _delete_there(self, targets: Sequence[Target]) -> bool:
        """Deletes targets on the network. Returns whether the backend confirmed all of them."""
        confirmed = await self._delete_objects([each for each in targets if isinstance(each, Name)])
        for target in targets:
            if isinstance(target, bytes):
                confirmed = await self._delete_namespace(target) and confirmed
        if confirmed:
            self._eligibility.to_retry.difference_update(targets)
        return confirmed

    async def _delete_objects(self, names: Sequence[Name]) -> bool:
        executor = self._executor
        for at in range(0, len(names), _OBJECTS_PER_CALL):
            batch = names[at : at + _OBJECTS_PER_CALL]
            outcomes = await executor.call(partial(executor.backend.delete, batch), executor.timeout_s)
            if list(outcomes) != [Outcome.OK] * len(batch):
                return False
            self._existence.note(batch, exist=False)
        return True

    async def _delete_namespace(self, fingerprint: bytes) -> bool:
        asked = self._to_renew[fingerprint]
        if asked:
            # Older daemons write objects of epoch zero, whatever the epoch is.
            earlier = self._epochs.known(fingerprint) | {ZERO}
            of_keys = list(names_of_keys(self._epochs.of(fingerprint)))
            renewal = await self._epochs.renew(fingerprint)
            if renewal is None and await self._delete_epochs(fingerprint, earlier):
                renewal = await self._epochs.renew(fingerprint)  # a full backend has room now
            if renewal is None:
                return False
            # A request that came meanwhile writes an epoch of its own.
            if self._to_renew[fingerprint] == asked:
                del self._to_renew[fingerprint]
            self._epochs.settle(fingerprint, renewal)
            self._old.setdefault(fingerprint, set()).update(earlier | {renewal.before} - {b""})
            if of_keys and not await self._delete_objects(of_keys):
                self.retry_later(of_keys)
        old = self._old.pop(fingerprint, set())
        if await self._delete_epochs(fingerprint, old):
            return True
        self._old.setdefault(fingerprint, set()).update(old)
        return False

    async def _delete_epochs(self, fingerprint: bytes, epochs: Iterable[bytes]) -> bool:
        """Deletes all objects of these epochs of a namespace."""
        for epoch in epochs:
            if not await self._delete_prefix(name_prefix(fingerprint, epoch)):
                return False
        return True

    async def _delete_prefix(self, prefix: bytes) -> bool:
        """Deletes all objects of a namespace and one epoch."""

        def list_names(ends: float) -> list[Name]:
            return [listed.name for listed in self._executor.backend.list(prefix, ends)]

        try:
            names = await self._executor.run(list_names, _LIST_WITHIN_S)
        except Exception as error:
            _log.warning("the objects of a namespace on the network cannot be listed: %s", error)
            return False
        return await self._delete_objects(names)
