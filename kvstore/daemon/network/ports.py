"""What the network tier uses of the rest of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.tenancy.namespaces import NamespaceEntry


class Requester(Protocol):
    """The sender of a request, usually a connection."""

    def answer(self, request: int, action: Any) -> None:
        """Receives the only answer to the request of this number."""


class Core(Protocol):
    """The placement core. All calls are made on the event loop's thread."""

    def ask(self, requester: Requester, request: int, event: Any, /) -> None:
        """Sends a request to the core. The answer goes to `requester.answer`."""

    def handle(self, event: ev.Event, /) -> None:
        """Sends an event that has no answer."""


class BlockView(Protocol):
    """Read-only questions about the blocks that this node has."""

    def in_memory(self, namespace: int, keys: Keys, tier: int, /) -> bool:
        """Returns whether all keys are known to be in this memory tier. False may also mean unknown."""

    def stored(self, namespace: int, keys: Keys, /) -> int:
        """Returns how many leading keys can be read on this node. Does not count as a use of the blocks."""

    def parents(self, namespace: int, keys: Keys, /) -> list[bytes]:
        """Returns the parent key of each key, empty for roots and for unknown keys."""


class SlotMemory(Protocol):
    """The DRAM tier's memory."""

    def slots(self, where: ac.Where, /) -> list[memoryview]:
        """Returns writable views of whole slots."""


class NamespaceTable(Protocol):
    """The daemon's open namespaces."""

    def at(self, number: int, /) -> NamespaceEntry | None:
        """Returns the namespace that has this number now."""

    def use(self, namespace: NamespaceEntry, /) -> None:
        """Keeps a namespace open until `drop`."""

    def drop(self, namespace: NamespaceEntry, /) -> None:
        """Undoes one `use`."""


class EventLog(Protocol):
    """The operators' event log."""

    def add(self, what: str, *, detail: str) -> None:
        """Adds an entry with the current time."""


Post = Callable[..., None]
"""Calls a function with arguments on the event loop's thread. Any thread may post."""
