"""All calls on one namespace: those of `reads` and `writes`, and those that manage stored blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.client.calls.call import Call, Exchange, Flow, call
from kvstore.client.calls.chain import Chain
from kvstore.client.calls.reads import ReadCalls
from kvstore.client.calls.scope import Scope, checked, count, open_namespace, value_of
from kvstore.client.calls.writes import WriteCalls
from kvstore.client.checks import check_device, check_hint, check_readers, check_ttl
from kvstore.types import Key
from kvstore.wire import messages as m


class NamespaceCalls(ReadCalls, WriteCalls):
    """The blocks of one layout. Calls raise MisuseError for bad arguments, and nothing else unless strict.

    `keys` are one chain in prompt order: each block's parent is the one before it.
    """

    @call
    def prefetch(self, keys: Sequence[Key], device: int | str | None = None) -> Call[int]:
        """Starts loading the stored prefix into DRAM; returns how many blocks are there or on their way.

        With `device`, into the daemon's pool on that GPU, if it has one.
        """
        gpu = check_device(device)
        return self._count(m.Prefetch, keys, "" if gpu is None else gpu.uuid)

    @call
    def pin(self, keys: Sequence[Key], ttl_s: float) -> Call[int]:
        """Protects the stored prefix from eviction for `ttl_s`; returns how many blocks are pinned."""
        return self._count(m.Pin, keys, check_ttl(ttl_s))

    @call
    def unpin(self, keys: Sequence[Key]) -> Call[int]:
        """Undoes `pin`; returns how many blocks were pinned."""
        return self._count(m.Unpin, keys)

    @call
    def hint(
        self, keys: Sequence[Key], *, next_use_s: float | None = None, closed: bool = False, priority: int = 0
    ) -> Call[int]:
        """Describes the expected use of the stored prefix; returns how many blocks that is. Advice only.

        `next_use_s`: seconds until the next use, None if unknown. `closed`: the session is over. `priority`:
        -1, 0 or 1. Blocks of this chain alone are evicted sooner if it is closed or its priority is -1.
        """
        return self._count(m.Hint, keys, *check_hint(next_use_s, closed, priority))

    @call
    def invalidate(self, keys: Sequence[Key] | None = None) -> Call[int]:
        """Deletes the blocks of these keys; returns how many. None: the whole namespace, for admins."""
        if keys is None:
            return Call(lambda exchange: forget(exchange, self._scope), miss=int)
        return self._count(m.Invalidate, keys)

    @call
    def publish(self, tenants: Sequence[str]) -> Call[bool]:
        """Lets these tenants, and no others, read the namespace. An empty list revokes it. For admins.

        Returns whether it is done: False if the daemon is away or refuses (unless strict).
        """
        readers = check_readers(tenants)
        return Call(lambda exchange: publish(exchange, self._scope, readers), miss=bool)

    def _count(self, message: type, keys: Sequence[Key], *more: Any) -> Call[int]:
        chain = Chain(keys)
        return Call(lambda exchange: count(exchange, self._scope, message, chain, *more), miss=int)


def publish(exchange: Exchange, scope: Scope, tenants: Sequence[str]) -> Flow[bool]:
    """Lets these tenants, and no others, read a namespace."""
    namespace, _ = yield from open_namespace(exchange, scope)
    checked((yield m.Publish(0, namespace, tuple(tenants))))
    return True


def forget(exchange: Exchange, scope: Scope) -> Flow[int]:
    """Deletes a namespace; how many blocks."""
    namespace, _ = yield from open_namespace(exchange, scope)
    return value_of((yield m.Forget(0, namespace, "", "")))
