"""Builds core events from wire messages, by one table.

A field of an event comes from `_SOURCES`, or is copied from the message's field of the same name. A new
request about blocks is a message, an event and a row of `EVENTS`. It is sent to the core, which answers it,
unless `dispatch` names another function.

Not covered: answers, which `session` turns into messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.requests.leases import lease_number
from kvstore.daemon.operator.namespaces import namespaces_for
from kvstore.daemon.requests.session import DeniedError, Session
from kvstore.daemon.tenancy.auth import Role
from kvstore.wire import messages as m

_SOURCES = {
    "request": "0",  # `Core.ask` sets the core's own number
    "client": "session.number",
    "namespace": "namespace",
    "keys": "Keys(q.keys, q.key_bytes)",
    "tenant": "session.principal.tenant",
    "deadline": "session.deadline(q.timeout_s)",
    "until": "session.deadline(q.ttl_s)",
    "tier": "session.memory_tier(q.device)",
    "lease": "lease_number(session.number, q.lease)",
    "checksums": "np.frombuffer(q.checksums, '<u8')",
    "written": "np.frombuffer(q.written, np.uint8) != 0",
}
"""Expressions for fields of events, over a message `q`, its `session` and the number of its `namespace`."""


def _explained(q: m.Explain, session: Session) -> tuple[int, ...]:
    services = session.services
    return namespaces_for(session.principal, services.authenticator, services.namespaces, q.tenant, q.model)


def _chain(q: m.Reserve, session: Session) -> int:
    """Returns the core's number of the chain that blocks belong to; 0: none, or it is not open in the core.

    Raises DeniedError for a namespace that is not a chain of the peer.
    """
    if not q.chain_key:
        return 0
    chain = session.namespaces.at(q.chain)
    if chain is None or chain.tenant != session.principal.tenant:
        raise DeniedError(f"{q.chain} is no chain of this tenant", "open it on this connection first")
    if chain.layout is not None and chain.layout.independent:
        raise DeniedError("independent blocks are no chain", "name a block of a chain namespace")
    return chain.number


_NAMES: dict[str, Any] = {
    "np": np,
    "math": math,
    "m": m,
    "Keys": Keys,
    "lease_number": lease_number,
    "explained": _explained,
    "chain": _chain,
}
"""What the expressions may use."""


class Row:
    """One request: the role that it needs, and how its event is built.

    With `own`, the namespace must be the peer's own; else a published one is allowed too.
    """

    def __init__(self, role: Role, message: type, event: type, own: bool = False, **sources: str) -> None:
        """`sources` replace those of `_SOURCES`. Fields of the event without a source keep their default."""
        self.role = role
        self.message = message
        self.own = own
        names = [f.name for f in fields(event)]
        self.in_namespace = "namespace" in names
        known = {f.name: f"q.{f.name}" for f in fields(message)} | _SOURCES | sources
        expressions = [known[name] for name in names if name in known]
        assert all(name in known for name in names[: len(expressions)]), f"{event}: a field has no source"
        # Compiled like the methods of a dataclass: a request costs no more than with code written by hand.
        arguments = ", ".join(expressions)
        build = eval(f"lambda q, session, namespace: event({arguments})", _NAMES | {"event": event})
        self.build: Callable[[Any, Session, int], Any] = build


# Without `recompute_s`, stored blocks count however long they take to load.
_DEADLINE = "session.deadline(q.load_s or q.timeout_s) if q.recompute_s else math.inf"
_STEP = "min(max(q.step, 1), m.MAX_PROMPT_BLOCKS)"
_NEXT_USE = "q.next_use_s if q.expected else None"
_PRIORITY = "q.priority - m.NORMAL"

EVENTS: Mapping[type, Row] = {
    row.message: row
    for row in (
        Row(Role.READ, m.Lookup, ev.Lookup, deadline=_DEADLINE, step=_STEP),
        Row(Role.READ, m.Contains, ev.Contains),
        Row(Role.READ, m.Acquire, ev.Acquire),
        Row(Role.READ, m.Release, ev.Release),
        Row(Role.READ, m.Abort, ev.Abort),
        Row(Role.READ, m.Prefetch, ev.Prefetch),
        Row(Role.READ, m.Suspect, ev.Suspect),
        Row(Role.READ, m.Explain, ev.Explain, namespaces="explained(q, session)"),
        Row(Role.WRITE, m.Reserve, ev.Reserve, own=True, chain="chain(q, session)"),
        Row(Role.WRITE, m.Commit, ev.Commit),
        Row(Role.WRITE, m.Pin, ev.Pin, own=True),
        Row(Role.WRITE, m.Unpin, ev.Unpin, own=True),
        Row(Role.WRITE, m.Hint, ev.Hint, own=True, next_use_s=_NEXT_USE, priority=_PRIORITY),
    )
}
