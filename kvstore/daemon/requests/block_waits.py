"""Calls that wait for a block. They are woken when the block is stored or the wait ends.

A network backend reports no new blocks. So one task checks periodically which blocks exist there, 32 blocks
at a time, fairly by tenant.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, Namespaces

LONGEST_S = 60.0
"""The longest wait of a call."""

KEYS_BYTES = 16 << 20
"""The most bytes of keys of a tenant's waiting calls."""

_ASK_EVERY_S = 0.05
_ASKED_AT_ONCE = 32


@dataclass(slots=True, eq=False)
class Wait:
    """One call that waits for a block. `number`: the namespace's number when the wait began."""

    namespace: NamespaceEntry
    number: int
    key: bytes
    tenant: int
    nbytes: int
    wake: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


class Waits:
    """The waiting calls of one daemon."""

    def __init__(self, core: Executor, namespaces: Namespaces, network: NetworkTier | None) -> None:
        self._core = core
        self._loop = core.loop
        self._namespaces = namespaces
        self._network = network
        self._by_number: dict[int, dict[bytes, set[Wait]]] = {}
        # In the order of existence checks.
        self._by_tenant: dict[int, dict[Wait, None]] = {}
        self._nbytes: Counter[int] = Counter()
        self._asking = False

    def count(self, tenant: int) -> int:
        """Returns the number of a tenant's waiting calls."""
        return len(self._by_tenant.get(tenant, ()))

    def nbytes(self, tenant: int) -> int:
        """Returns the bytes of keys of a tenant's waiting calls."""
        return self._nbytes[tenant]

    def add(
        self, namespace: NamespaceEntry, keys: Keys, tenant: int, wait_s: float, wake: Callable[[], None]
    ) -> Wait:
        """Calls `wake` once: when the first block is stored, or the wait ends, at most after `wait_s` s."""
        key, nbytes = keys[0], len(keys.raw)
        wait = Wait(namespace, namespace.number, key, tenant, nbytes, wake)
        self._nbytes[tenant] += nbytes
        wait.timer = self._loop.call_later(min(wait_s, LONGEST_S), self._wake, wait)
        self._by_number.setdefault(wait.number, {}).setdefault(key, set()).add(wait)
        self._by_tenant.setdefault(tenant, {})[wait] = None
        self._core.handle(ev.Watch(key))
        self._namespaces.use(namespace)
        if self._network is not None and not self._asking:
            self._asking = True
            self._network.tasks.start(self._ask_network())
        return wait

    def cancel(self, wait: Wait) -> None:
        """Ends a wait without waking its call. Has no effect on a call that is being woken."""
        if wait not in self._by_tenant.get(wait.tenant, ()):
            return
        assert wait.timer is not None
        wait.timer.cancel()
        waits = self._by_number[wait.number]
        waits[wait.key].remove(wait)
        if not waits[wait.key]:
            del waits[wait.key]
        if not waits:
            del self._by_number[wait.number]
        self._nbytes[wait.tenant] -= wait.nbytes
        del self._by_tenant[wait.tenant][wait]
        if not self._by_tenant[wait.tenant]:
            del self._by_tenant[wait.tenant]
        self._core.handle(ev.Unwatch(wait.key))
        self._namespaces.drop(wait.namespace)

    def blocks_arrived(self, action: ac.BlocksArrived) -> None:
        """Wakes the calls that wait for these blocks."""
        for i, number in enumerate(action.identity.namespace.tolist()):
            for wait in list(self._by_number.get(number, {}).get(action.identity.key(i), ())):
                self._wake(wait)

    def recheck(self) -> None:
        """Wakes calls whose block is stored: a device can be read again."""
        for wait in [wait for waits in self._by_tenant.values() for wait in waits]:
            if self._core.view.stored(wait.number, Keys(wait.key, len(wait.key))):
                self._wake(wait)

    def end(self, number: int, but: int = -1) -> None:
        """Wakes the calls that wait for blocks of a namespace, except those of tenant `but`."""
        waits = self._by_number.get(number, {})
        for wait in [wait for some in waits.values() for wait in some if wait.tenant != but]:
            self._wake(wait)

    def _wake(self, wait: Wait) -> None:
        self.cancel(wait)
        # Later, because the actions of the current event are not all executed yet.
        self._loop.call_soon(wait.wake)

    async def _ask_network(self) -> None:
        """Wakes calls whose block is on the network. Ends when no call waits."""
        network = self._network
        assert network is not None
        try:
            while self._by_tenant:
                some = [wait for wait in self._next_asked() if network.eligibility.serves(wait.namespace)]
                there = await network.existence.has([(wait.namespace, wait.key) for wait in some])
                for wait, found in zip(some, there, strict=True):
                    if found and wait in self._by_tenant.get(wait.tenant, ()):
                        self._wake(wait)
                await asyncio.sleep(_ASK_EVERY_S)
        finally:
            self._asking = False

    def _next_asked(self) -> list[Wait]:
        """Returns the next waits to check, the same number for each tenant. Moves them to the end."""
        asked: list[Wait] = []
        for tenant in list(self._by_tenant)[:_ASKED_AT_ONCE]:
            waits = self._by_tenant.pop(tenant)
            for wait in list(waits)[: max(1, _ASKED_AT_ONCE // (len(self._by_tenant) + 1))]:
                waits[wait] = waits.pop(wait)
                asked.append(wait)
            self._by_tenant[tenant] = waits
        return asked
