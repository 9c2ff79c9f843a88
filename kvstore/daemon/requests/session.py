"""The session of a greeted peer: its principal, its open namespaces, and its answers.

Not covered here: the socket (`server`) and the requests (`dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvstore.core import actions as ac
from kvstore.core.requests.leases import number_on_connection
from kvstore.daemon.operator.namespaces import named
from kvstore.daemon.requests.block_waits import Wait
from kvstore.daemon.requests.prompts import Prompts
from kvstore.daemon.requests.services import Services
from kvstore.daemon.tenancy.auth import Principal, Role
from kvstore.daemon.tenancy.namespaces import Numbering
from kvstore.daemon.tracing.request_traces import ConnectionTraces, RequestTrace
from kvstore.errors import KVStoreError
from kvstore.wire import messages as m

LONGEST_S = 86400.0
"""The longest deadline of a request, and the longest time that a block stays pinned."""


class DeniedError(KVStoreError):
    """A request is refused. The connection stays open."""


class Outbox(Protocol):
    """The sending half of a connection: `kvstore.daemon.server.outbox`. Avoids an import circle."""

    number: int

    @property
    def waiting_bytes(self) -> int:
        """The bytes that the peer has not read yet."""

    def send(self, message: Any) -> None:
        """Sends a message."""

    def send_with_descriptor(self, message: m.Mapped | m.MappedPresence, fd: int) -> None:
        """Sends a message with a descriptor. Allowed only while `waiting_bytes` is 0."""


class Process(Protocol):
    """The peer's process: `kvstore.daemon.server.peer_credentials.Peer`. Avoids an import circle."""

    @property
    def uid(self) -> int: ...

    def pidfd(self) -> int:
        """Returns a descriptor that the caller closes. Raises OSError."""


class Session:
    """The state of one greeted peer, which is the requester of its requests."""

    def __init__(
        self,
        outbox: Outbox,
        process: Process,
        principal: Principal,
        services: Services,
        enqueue: Callable[[Any], None],
        traces: ConnectionTraces | None = None,
    ) -> None:
        """`enqueue` schedules a message as if the peer had sent it. `traces`: None if none are exported."""
        self.outbox = outbox
        self.send = outbox.send
        self.number = outbox.number
        self.process = process
        self.principal = principal
        self.services = services
        self.enqueue = enqueue
        self.traces = traces
        self.namespaces = Numbering(m.NAMESPACES)
        self.prompts = Prompts(services.hits, principal.tenant)
        self.waits: set[Wait] = set()
        self.ended = False

    def end(self) -> None:
        """Cancels the peer's waits and requests: the connection is lost."""
        self.ended = True
        for wait in self.waits:
            self.services.waits.cancel(wait)
        self.prompts.leave()
        self.services.core.pending.forget(self)
        if self.services.network is not None:
            self.services.network.tasks.cancel(self)

    # -- answers

    def answer(self, request: int, action: ac.Reply) -> None:
        """Sends the message of an answer. See `runtime.ports.Requester`."""
        recorder = self.services.recorder
        # While requests are recorded, clients look up all keys of a long prompt instead of every n-th.
        gaps = isinstance(action, ac.Found) and (action.gaps or recorder.running)
        self.prompts.answered(request, action, gaps)
        if isinstance(action, ac.Grant):
            recorder.answered(self.number, request, len(action.slots))
            lease = number_on_connection(action.lease)
            slots, stored = action.slots.tobytes(), action.stored.blocks
            self.send(m.Granted(request, lease, action.slot_bytes, slots, stored))
        elif isinstance(action, ac.Found):
            recorder.answered(self.number, request, action.value)
            self.send(m.Found(request, action.value, gaps, action.stored.blocks))
        elif isinstance(action, ac.Presence):
            self.send(m.Presence(request, action.mask.tobytes()))
        elif isinstance(action, ac.Answer):
            self.send(m.Value(request, action.value))
        elif isinstance(action, ac.Reserved):
            slots, status = action.slots.tobytes(), action.status.tobytes()
            lease = number_on_connection(action.lease)
            self.send(m.Reserved(request, lease, action.slot_bytes, slots, status, action.why))
        elif isinstance(action, ac.Explained):
            services = self.services
            explained = named(action, services.authenticator, services.namespaces)
            self.send(m.Explained(request, explained))
        elif action.retry_s > 0:
            self.send(m.Busy(request, action.retry_s, action.why))
        else:
            self.send(m.Denied(request, action.why, action.hint))

    def deny(self, request: int, why: str, hint: str) -> None:
        """Refuses a request. Request 0 has no answer."""
        if request:
            self.send(m.Denied(request, why, hint))

    def trace(self, request: int) -> RequestTrace | None:
        """Returns the trace of an unanswered request, None if it is not traced."""
        return self.traces.of(request) if self.traces is not None else None

    # -- values for events

    def deadline(self, timeout_s: float) -> float:
        """Returns the event loop's time in `timeout_s` seconds, at most in a day."""
        return self.services.core.now() + min(max(timeout_s, 0.0), LONGEST_S)

    def memory_tier(self, device: str) -> int:
        """Returns the tier number of a GPU's pool or of DRAM. Readers get DRAM, as GPU memory is writable."""
        return self.services.tiers.pool_on(device if self.principal.role >= Role.WRITE else "")

    def check_role(self, role: Role) -> None:
        """Raises DeniedError for a peer of a lower role."""
        mine = self.principal.role
        if mine < role:
            raise DeniedError(
                f"this peer's role is {mine.name.lower()}, this needs {role.name.lower()}",
                "ask the operator of the daemon for another role",
            )
