"""The memory of presence tables, which clients of a namespace map read-only.

A table is made when a client asks for one, in a memfd of its own. A retired table is emptied: clients that
still map it keep neither memory nor contents. See `kvstore.core.residency.presence`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.arena import Extent
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.errors import TierError
from kvstore.types import PRESENCE_RETIRED

_MOST_OF_A_TENANT = 64
_NEXT_S = 1.0
"""Least time (s) between two tables of a namespace: filling one takes a pass over all rows."""


@dataclass(slots=True, eq=False)
class _Table:
    tenant: int
    memory: Extent


class PresenceMemory:
    """The tables by number of the namespace. `random_bits`: see `Daemon`."""

    def __init__(self, core: Executor, random_bits: Callable[[int], int]) -> None:
        self._core = core
        self._random_bits = random_bits
        self._tables: dict[int, _Table] = {}
        self._not_before: dict[int, float] = {}
        core.on(ac.PresenceRetired, self._retired)

    def descriptor(self, namespace: NamespaceEntry) -> tuple[int, int] | None:
        """Returns a read-only descriptor of the table, which the caller closes, and its bytes; None: none."""
        number = namespace.number
        if number not in self._tables:
            self._make(namespace)
        table = self._tables.get(number)
        return None if table is None else (table.memory.readonly_fd(), table.memory.nbytes)

    def _make(self, namespace: NamespaceEntry) -> None:
        number, now = namespace.number, self._core.now()
        nbytes = self._core.view.presence_bytes(number)
        if not nbytes or now < self._not_before.get(number, 0.0):
            return
        self._not_before = {n: at for n, at in self._not_before.items() if at > now} | {number: now + _NEXT_S}
        own = [n for n, table in self._tables.items() if table.tenant == namespace.tenant]
        if len(own) >= _MOST_OF_A_TENANT:
            self.retire(own[0])
        try:
            memory = Extent.create("kvstore-presence", nbytes)
        except TierError:
            return
        self._tables[number] = _Table(namespace.tenant, memory)
        words = np.frombuffer(memory.view, np.uint64)
        self._core.handle(ev.SharePresence(number, words, self._random_bits(64)))

    def retire(self, number: int) -> None:
        """Ends the table of a namespace, if it has one."""
        if number in self._tables:
            self._core.handle(ev.RetirePresence(number))

    def retire_all(self) -> None:
        """Ends all tables: who may map them may have changed."""
        for number in list(self._tables):
            self.retire(number)

    def _retired(self, action: ac.PresenceRetired) -> None:
        table = self._tables.pop(action.namespace, None)
        if table is None:
            return
        try:
            table.memory.punch()
        finally:
            np.frombuffer(table.memory.view, np.uint64)[0] = PRESENCE_RETIRED
            table.memory.close()

    def close(self) -> None:
        """Ends all tables at the end of the daemon."""
        for number in list(self._tables):
            self._retired(ac.PresenceRetired(number))
