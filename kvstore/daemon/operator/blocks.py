"""Operator commands about blocks: pinned, unpinned, prefetched, invalidated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.operator.command import Later, command
from kvstore.daemon.operator.namespaces import by_id
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.tenancy.deletion import Deletion
from kvstore.daemon.tenancy.namespaces import Namespaces
from kvstore.errors import MisuseError
from kvstore.types import MAX_KEY_BYTES

LONGEST_S = 86400.0
"""The longest time for which a request may wait or a pin may last."""


@dataclass(slots=True, eq=False)
class BlockCommands:
    """Sends requests about blocks to the core."""

    _core: Executor
    _namespaces: Namespaces
    _deletion: Deletion

    @command
    def pin(self, namespace: str, keys: bytes, key_bytes: int, ttl_s: float) -> Later:
        """Pins blocks for `ttl_s` seconds. Answers with their number."""
        return self._about(ev.Pin, namespace, keys, key_bytes, self._core.now() + _seconds(ttl_s))

    @command
    def unpin(self, namespace: str, keys: bytes, key_bytes: int) -> Later:
        """Unpins blocks. Answers with their number."""
        return self._about(ev.Unpin, namespace, keys, key_bytes)

    @command
    def prefetch(self, namespace: str, keys: bytes, key_bytes: int) -> Later:
        """Copies a prefix to DRAM as far as it fits. Answers with how many blocks are or will be there."""
        tenant = by_id(self._namespaces, namespace).tenant
        return self._about(ev.Prefetch, namespace, keys, key_bytes, tenant)

    @command
    def invalidate(self, namespace: str, keys: bytes, key_bytes: int) -> Later:
        """Makes blocks misses. Answers with their number when this is durable."""
        entry, batch = by_id(self._namespaces, namespace), _keys(keys, key_bytes)
        return lambda requester, request: self._deletion.invalidate(requester, request, entry, batch)

    def _about(
        self, event: Callable[..., Any], namespace: str, keys: bytes, key_bytes: int, *more: Any
    ) -> Later:
        made = event(0, by_id(self._namespaces, namespace).number, _keys(keys, key_bytes), *more)
        return lambda requester, request: self._core.ask(requester, request, made)


def _keys(keys: bytes, key_bytes: int) -> Keys:
    if not 1 <= key_bytes <= MAX_KEY_BYTES or len(keys) % key_bytes or not keys:
        raise MisuseError(f"{len(keys)} bytes of keys of {key_bytes}", f"1 to {MAX_KEY_BYTES} bytes each")
    return Keys(keys, key_bytes)


def _seconds(ttl_s: float) -> float:
    if not 0 < ttl_s <= LONGEST_S:
        raise MisuseError(f"ttl_s is {ttl_s:g}", f"more than 0, and at most {LONGEST_S:g}")
    return ttl_s
