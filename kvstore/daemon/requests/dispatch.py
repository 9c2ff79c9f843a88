"""Runs messages of peers: by type of message, the role that may send it and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.daemon.requests import administration, blocks
from kvstore.daemon.requests.event_table import EVENTS
from kvstore.daemon.requests.mapping import map_extent, map_presence
from kvstore.daemon.requests.namespaces import NoKeysError, NothingStoredError, answer_miss, open_namespace
from kvstore.daemon.requests.session import DeniedError, Session
from kvstore.daemon.tenancy.auth import Role
from kvstore.daemon.tenancy.deletion import refusal
from kvstore.errors import MisuseError, RemoteProtocolError
from kvstore.wire import messages as m

Handler = Callable[[Session, Any], None]

_TO_THE_CORE: dict[type, Handler] = {
    m.Lookup: blocks.lookup,
    m.Contains: blocks.contains,
    m.Acquire: blocks.acquire,
    m.Release: blocks.release,
    m.Abort: blocks.tell_core,
    m.Prefetch: blocks.prefetch,
    m.Suspect: blocks.suspect,
    m.Reserve: blocks.reserve,
}
"""Requests of `EVENTS` that need more than `ask_core`."""

_HANDLERS: dict[type, tuple[Role, Handler]] = {
    **{q: (row.role, _TO_THE_CORE.get(q, blocks.ask_core)) for q, row in EVENTS.items()},
    blocks.WokenAcquire: (Role.READ, blocks.acquire_woken),
    m.Map: (Role.READ, map_extent),
    m.MapPresence: (Role.READ, map_presence),
    m.LookedUp: (Role.READ, blocks.looked_up),
    m.BlocksRead: (Role.READ, blocks.blocks_read),
    m.Invalidate: (Role.WRITE, blocks.invalidate),
    m.HandOff: (Role.WRITE, blocks.hand_off),
    m.Open: (Role.READ, open_namespace),
    m.Publish: (Role.ADMIN, administration.publish),
    m.Forget: (Role.ADMIN, administration.forget),
    m.DeleteTenant: (Role.ADMIN, administration.delete_tenant),
    m.Ping: (Role.READ, administration.ping),
    m.TraceContext: (Role.READ, administration.trace_context),
    m.Status: (Role.READ, administration.status),
    m.Control: (Role.READ, administration.control),
    m.RecordStart: (Role.READ, administration.start_recording),
    m.RecordRead: (Role.READ, administration.read_recording),
}
"""By type of message: the lowest role that may send it, and the function that runs it."""


def run_request(session: Session, message: Any) -> None:
    """Runs one message of a peer. Raises RemoteProtocolError for a message that peers do not send."""
    known = _HANDLERS.get(type(message))
    if known is None:
        raise RemoteProtocolError(f"{type(message).__name__} is not for the daemon")
    role, handler = known
    try:
        if session.principal.role < role:
            session.check_role(role)
        handler(session, message)
    except (DeniedError, MisuseError) as error:
        session.deny(getattr(message, "id", 0), error.message, error.hint)
    except NothingStoredError as error:
        answer_miss(session, message, error.namespace)
    except NoKeysError:
        _run_with_keys(session, message)


def _run_with_keys(session: Session, message: Any) -> None:
    """Makes the missing data keys of the tenant, then runs the request again."""

    def ended(error: Exception | None) -> None:
        if session.ended:
            return
        try:
            if error is None:
                run_request(session, message)
        except Exception as failure:
            error = failure
        if error is not None:
            refused = refusal(message.id, error)
            session.deny(message.id, refused.why, refused.hint)

    session.services.data_keys.make(session.principal.name, ended)
