"""Protocols of objects that `runtime` and `tenancy` use, and that rooms above them implement.

They prevent import circles. `kvstore.daemon.composition` passes the objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.config import Config
from kvstore.core import actions as ac
from kvstore.daemon.runtime.entry_kinds import EntryKind

Ended = Callable[[Exception | None], None]
"""Receives the error of something that has ended, None for success."""

CurrentConfig = Callable[[], Config]
"""Returns the configuration in use, which a reload replaces."""

Post = Callable[..., None]
"""Calls a function with arguments on the event loop's thread. Any thread may post."""


class Requester(Protocol):
    """The sender of a request, usually a connection."""

    def answer(self, request: int, action: ac.Reply, /) -> None:
        """Receives the only answer to the request of this number."""


class Trace(Protocol):
    """The trace of a request: `kvstore.daemon.tracing.request_traces`."""

    def mark(self, phase: str, /) -> None:
        """Ends a phase of the request, which began with the end of the one before."""


class EventLog(Protocol):
    """The operators' event log: `kvstore.daemon.operator.event_log`."""

    def add(
        self, what: EntryKind, *, tier: str = "", tenant: str = "", namespace: str = "", detail: str = ""
    ) -> None:
        """Adds an entry with the current time."""

    def closed(self, number: int, tenant: str, namespace: str, /) -> None:
        """Keeps the names of a closed namespace for entries about its number."""

    def opened(self, number: int, /) -> None:
        """Forgets the closed namespace that had this number."""


class Namespace(Protocol):
    """An entry of `NamespaceTable`."""

    ttl_s: float


class NamespaceTable(Protocol):
    """Namespaces by the core's numbers: `kvstore.daemon.tenancy.namespaces`. `lengths` are bytes."""

    fingerprints: dict[int, bytes]
    lengths: dict[int, int]

    def at(self, number: int, /) -> Namespace | None:
        """Returns the namespace that has this number now."""
