"""What the rooms of the daemon use of each other, as Protocols of a few methods.

A room takes these as constructor arguments, so it depends on this file and not on the room behind. The
composition (`kvstore.daemon.composition`) decides which object fills which port.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvstore.config import Config
from kvstore.core import actions as ac
from kvstore.core import events as ev

Ended = Callable[[Exception | None], None]
"""Receives the error of something that has ended, None for success."""

CurrentConfig = Callable[[], Config]
"""Returns the configuration in use, which a reload replaces."""

Post = Callable[..., None]
"""Calls a function with arguments on the event loop's thread. Any thread may post."""


class Requester(Protocol):
    """The sender of a request, usually a connection."""

    def answer(
        self, request: int, action: ac.Grant | ac.Reserved | ac.Answer | ac.Explained | ac.Deny, /
    ) -> None:
        """Receives the only answer to the request of this number."""


class Core(Protocol):
    """The placement core and its clock. All calls are made on the event loop's thread."""

    def now(self) -> float:
        """Returns the event loop's time in seconds."""

    def handle(self, event: ev.Event, /) -> None:
        """Sends an event that has no answer. Has no effect once the daemon has stopped."""

    def ask(self, requester: Requester, request: int, event: Any, /) -> None:
        """Sends a request. Its answer goes to `requester`, at once or later."""

    def call(self, event: ev.OpenNamespace, /) -> ac.Answer | ac.Deny:
        """Sends a request that the core answers at once, and returns the answer."""


class DurableCore(Protocol):
    """Requests whose answer comes when their effect survives a crash."""

    def ask(self, requester: Requester, request: int, event: Any, /) -> None:
        """Sends a request. Its answer goes to `requester` when the effect is on all devices."""


class EventLog(Protocol):
    """The operators' event log."""

    def add(
        self, what: str, *, tier: str = "", tenant: str = "", namespace: str = "", detail: str = ""
    ) -> None:
        """Adds an entry with the current time."""

    def closed(self, number: int, tenant: str, namespace: str, /) -> None:
        """Keeps the names of a closed namespace for entries about its number."""

    def opened(self, number: int, /) -> None:
        """Forgets the closed namespace that had this number."""


class Problems(Protocol):
    """What is wrong with the daemon, for its status."""

    def report(self, problem: str, /) -> None:
        """Logs a problem and keeps it for the status."""


class Namespace(Protocol):
    """One namespace, as the runtime needs it."""

    ttl_s: float


class NamespaceTable(Protocol):
    """Namespaces by the core's numbers. `lengths` are bytes of a payload."""

    fingerprints: dict[int, bytes]
    lengths: dict[int, int]

    def at(self, number: int, /) -> Namespace | None:
        """Returns the namespace that has this number now."""


class Service(Protocol):
    """A part of the daemon that runs from its start to its stop."""

    def start(self) -> None:
        """Starts the part. Not called twice."""


class NetworkService(Service, Protocol):
    """The network tier's life."""

    async def close(self, within_s: float, /) -> None:
        """Ends calls under way and closes the backend. Waits at most `within_s` seconds."""


class Closing(Service, Protocol):
    """A part that ends at once."""

    def close(self) -> None:
        """Sends what waits, and ends."""
