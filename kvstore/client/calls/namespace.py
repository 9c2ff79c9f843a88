"""All calls on one namespace: the calls of `reads` and `writes`, and the management of stored blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.client.calls.call import Call, Exchange, Flow, call
from kvstore.client.calls.reads import ReadCalls
from kvstore.client.calls.scope import Chain, Scope, checked, count, open_namespace, value_of
from kvstore.client.calls.writes import WriteCalls
from kvstore.client.checks import check_device, check_hint, check_pin_ttl, check_readers
from kvstore.types import Key
from kvstore.wire import messages as m


class NamespaceCalls(ReadCalls, WriteCalls):
    """The blocks of one layout. Calls raise only MisuseError (bad arguments), unless strict.

    `keys` are one chain in prompt order: the parent of each block is the one before it.
    """

    @call
    def prefetch(self, keys: Sequence[Key], device: int | str | None = None) -> Call[int]:
        """Starts loading the stored prefix into DRAM; returns how many blocks are there or being loaded.

        With `device`, loads into the daemon's pool on that GPU, if it has one.
        """
        gpu = check_device(device)
        return self._count(m.Prefetch, keys, "" if gpu is None else gpu.uuid)

    @call
    def pin(self, keys: Sequence[Key], ttl_s: float) -> Call[int]:
        """Protects the stored prefix from eviction for `ttl_s`; returns how many blocks are pinned."""
        return self._count(m.Pin, keys, check_pin_ttl(ttl_s))

    @call
    def unpin(self, keys: Sequence[Key]) -> Call[int]:
        """Removes pins; returns how many blocks were pinned."""
        return self._count(m.Unpin, keys)

    @call
    def hint(
        self, keys: Sequence[Key], *, next_use_s: float | None = None, closed: bool = False, priority: int = 0
    ) -> Call[int]:
        """Describes the expected use of the stored prefix; returns its number of blocks. Advice only.

        `next_use_s`: seconds until the next use, None if unknown. `closed`: the session is over. `priority`:
        -1, 0 or 1. Blocks only of this chain are evicted sooner if it is closed or its priority is -1.
        """
        return self._count(m.Hint, keys, *check_hint(next_use_s, closed, priority))

    @call
    def invalidate(self, keys: Sequence[Key] | None = None) -> Call[int]:
        """Deletes the blocks of these keys; returns how many on this node.

        None: the whole namespace, for admins; on all nodes of a network tier.
        """
        if keys is None:
            return Call(lambda exchange: forget(exchange, self._scope), miss=int)
        return self._count(m.Invalidate, keys)

    @call
    def publish(self, tenants: Sequence[str]) -> Call[bool]:
        """Lets only these tenants read the namespace; an empty list: no other tenant. For admins.

        Returns False if the daemon is away or refuses (unless strict).
        """
        readers = check_readers(tenants)
        return Call(lambda exchange: publish(exchange, self._scope, readers), miss=bool)

    def _count(self, message: type, keys: Sequence[Key], *more: Any) -> Call[int]:
        chain = Chain(keys)
        return Call(lambda exchange: count(exchange, self._scope, message, chain, *more), miss=int)


def publish(exchange: Exchange, scope: Scope, tenants: Sequence[str]) -> Flow[bool]:
    """Lets only these tenants read a namespace."""
    namespace, _ = yield from open_namespace(exchange, scope)
    checked((yield m.Publish(0, namespace, tuple(tenants))))
    return True


def forget(exchange: Exchange, scope: Scope) -> Flow[int]:
    """Deletes a namespace; returns how many blocks."""
    namespace, _ = yield from open_namespace(exchange, scope)
    return value_of((yield m.Forget(0, namespace, "", "")))
