"""The network tier's asyncio tasks, and their requests to the placement core."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import Requester
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces

_log = logging.getLogger(__name__)

_TASKS_PER_REQUESTER = 256

CLIENT = -1
"""The network tier's client number in the core. No connection has this number."""

Copied = asyncio.Future[bool]
"""Ends with a block's copy. The result is whether the block is at the copy's target."""


class Callback:
    """A requester that passes its answer to a function."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    def answer(self, request: int, action: Any) -> None:
        """See `Requester`."""
        self._call(action)


async def ask(core: Executor, event: Any) -> Any:
    """Sends a request to the core and returns its answer."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(action: Any) -> None:
        if not answer.done():  # the task may have been cancelled
            answer.set_result(action)

    core.ask(Callback(answered), 0, event)
    return await answer


class Tasks:
    """Running tasks by requester. A namespace stays open while a task uses it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, namespaces: Namespaces) -> None:
        self._loop = loop
        self._namespaces = namespaces
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_requester: dict[Requester, set[asyncio.Task[None]]] = {}

    def start(
        self,
        work: Coroutine[Any, Any, None],
        namespace: NamespaceEntry | None = None,
        requester: Requester | None = None,
    ) -> None:
        """Starts a task. `cancel` ends a task that has a requester."""
        if namespace is not None:
            self._namespaces.use(namespace)
        task = self._loop.create_task(work)
        self._tasks.add(task)
        if requester is not None:
            self._by_requester.setdefault(requester, set()).add(task)
        task.add_done_callback(partial(self._ended, namespace, requester))

    def has_room(self, requester: Requester) -> bool:
        """Returns whether a requester may start another task."""
        return len(self._by_requester.get(requester, ())) < _TASKS_PER_REQUESTER

    def cancel(self, requester: Requester) -> None:
        """Cancels a requester's tasks. Copies that these tasks started continue."""
        for task in self._by_requester.pop(requester, ()):
            task.cancel()

    def cancel_all(self) -> None:
        """Cancels every task."""
        for task in list(self._tasks):
            task.cancel()

    def _ended(
        self, namespace: NamespaceEntry | None, requester: Requester | None, task: asyncio.Task[None]
    ) -> None:
        self._tasks.discard(task)
        if namespace is not None:
            self._namespaces.drop(namespace)
        if requester is not None and requester in self._by_requester:
            self._by_requester[requester].discard(task)
            if not self._by_requester[requester]:
                del self._by_requester[requester]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a network tier task failed", exc_info=error)
