"""Deletion of blocks and namespaces on this node and on the network.

While a deletion runs, its blocks are neither read from the network nor written to it. If the backend does not
confirm a deletion, the request fails and the node retries the deletion until it succeeds. The list of pending
deletions is lost with the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.core import actions as ac
from kvstore.daemon.network.eligibility import Eligibility, Target
from kvstore.daemon.network.executor import HEALTH_CHECK_EVERY_S, BackendExecutor
from kvstore.daemon.network.existence import ExistenceChecks
from kvstore.daemon.network.tasks import Callback, Copied, Tasks
from kvstore.daemon.network.uploads import Uploads
from kvstore.daemon.runtime.ports import Requester
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name, Outcome

_log = logging.getLogger(__name__)

_OBJECTS_PER_CALL = 1000
_LIST_WITHIN_S = 60.0


@dataclass(slots=True, eq=False)
class Deletion:
    """Deletes objects, and retries deletions that failed."""

    _executor: BackendExecutor
    _eligibility: Eligibility
    _existence: ExistenceChecks
    _tasks: Tasks
    _uploads: Uploads

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
        targets: list[Target] = [namespace.fingerprint for namespace in shared]
        if keys is not None:
            targets = [Name(shared[0].fingerprint, key) for key in keys]
        self._eligibility.deletions.update(targets)
        # An upload that has started would write its object after the deletion.
        uploads = self._uploads.within(set(targets))

        def deleted_here(action: Any) -> None:
            if isinstance(action, ac.Deny):
                self._eligibility.deletions -= Counter(targets)
                requester.answer(request, action)
            else:
                self._tasks.start(self._delete(requester, request, action, targets, uploads))

        delete_here(Callback(deleted_here))

    async def _delete(
        self, requester: Requester, request: int, answer: Any, targets: list[Target], uploads: list[Copied]
    ) -> None:
        if uploads:
            await asyncio.wait(uploads)
        if not await self._delete_there(targets):
            self._retry_later(targets)
            why = f"deleted here, but not on the network: {self._executor.problem or 'it did not answer'}"
            answer = ac.Deny(request, why, "this node retries the deletion and does not serve these blocks")
        self._eligibility.deletions -= Counter(targets)
        requester.answer(request, answer)

    def _retry_later(self, targets: Sequence[Target]) -> None:
        if not self._eligibility.to_retry:
            self._tasks.start(self._retry())
        self._eligibility.to_retry.update(targets)

    async def _retry(self) -> None:
        while self._eligibility.to_retry:
            await asyncio.sleep(HEALTH_CHECK_EVERY_S)
            if self._executor.usable:
                await self._delete_there(list(self._eligibility.to_retry))

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
        def list_names(ends: float) -> list[Name]:
            return [listed.name for listed in self._executor.backend.list(fingerprint, ends)]

        try:
            names = await self._executor.run(list_names, _LIST_WITHIN_S)
        except Exception as error:
            _log.warning("the objects of a namespace on the network cannot be listed: %s", error)
            return False
        return await self._delete_objects(names)
