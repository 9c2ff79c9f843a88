"""Builds core events from wire messages, by one table.

A field of an event comes from `_SOURCES`, or is copied from the message's field of the same name. A new
request about blocks is a message, an event and a row of `EVENTS`. It is sent to the core, which answers it,
unless `requests` names another function.

Not covered: answers, which `session` turns into messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.requests.leases import lease_number
from kvstore.daemon.operator.namespaces import namespaces_for
from kvstore.daemon.server.session import Session
from kvstore.daemon.tenancy.auth import Role
from kvstore.wire import messages as m

Source = Callable[[Any, Session, int], Any]
"""Returns a field of an event, from a message, its session and the number of its namespace."""

_SOURCES: Mapping[str, Source] = {
    "request": lambda q, session, namespace: 0,  # the core's own number, which `Core.ask` sets
    "client": lambda q, session, namespace: session.number,
    "namespace": lambda q, session, namespace: namespace,
    "keys": lambda q, session, namespace: Keys(q.keys, q.key_bytes),
    "tenant": lambda q, session, namespace: session.principal.tenant,
    "deadline": lambda q, session, namespace: session.deadline(q.timeout_s),
    "until": lambda q, session, namespace: session.deadline(q.ttl_s),
    "at": lambda q, session, namespace: session.memory_tier(q.device),
    "lease": lambda q, session, namespace: lease_number(session.number, q.lease),
    "checksums": lambda q, session, namespace: np.frombuffer(q.checksums, "<u8"),
    "written": lambda q, session, namespace: np.frombuffer(q.written, np.uint8) != 0,
}


class Row:
    """One request: the peers that may send it, and how its event is built.

    With `own`, the namespace must be the peer's own; else a published one is allowed too.
    """

    def __init__(self, role: Role, message: type, event: type, own: bool = False, **sources: Source) -> None:
        """`sources` replace those of `_SOURCES`. Fields of the event without a source keep their default."""
        self.role = role
        self.message = message
        self.event = event
        self.own = own
        names = [f.name for f in fields(event)]
        copied = {f.name: _copied(f.name) for f in fields(message)}
        known = {**copied, **_SOURCES, **sources}
        self.in_namespace = "namespace" in names
        self._sources = [known[name] for name in names if name in known]
        assert all(name in known for name in names[: len(self._sources)]), f"{event}: a field has no source"

    def build(self, q: Any, session: Session, namespace: int = 0) -> Any:
        """Returns the event of a message. `namespace` is the core's number of its namespace."""
        return self.event(*[source(q, session, namespace) for source in self._sources])


def _copied(name: str) -> Source:
    get = attrgetter(name)
    return lambda q, session, namespace: get(q)


def _deadline_of_lookup(q: m.Lookup, session: Session, namespace: int) -> float:
    """Without `recompute_s`, stored blocks count however long they take to load."""
    return session.deadline(q.timeout_s) if q.recompute_s else math.inf


def _next_use_s(q: m.Hint, session: Session, namespace: int) -> float | None:
    return q.next_use_s if q.expected else None


def _priority(q: m.Hint, session: Session, namespace: int) -> int:
    return q.priority - m.NORMAL


def _explained_namespaces(q: m.Explain, session: Session, namespace: int) -> tuple[int, ...]:
    return namespaces_for(
        session.principal, session.services.authenticator, session.services.namespaces, q.tenant, q.model
    )


EVENTS: Mapping[type, Row] = {
    row.message: row
    for row in (
        Row(Role.READ, m.Lookup, ev.Lookup, deadline=_deadline_of_lookup),
        Row(Role.READ, m.Acquire, ev.Acquire),
        Row(Role.READ, m.Release, ev.Release),
        Row(Role.READ, m.Abort, ev.Abort),
        Row(Role.READ, m.Prefetch, ev.Prefetch),
        Row(Role.READ, m.Suspect, ev.Suspect),
        Row(Role.READ, m.Explain, ev.Explain, namespaces=_explained_namespaces),
        Row(Role.WRITE, m.Reserve, ev.Reserve, own=True),
        Row(Role.WRITE, m.Commit, ev.Commit),
        Row(Role.WRITE, m.Pin, ev.Pin, own=True),
        Row(Role.WRITE, m.Unpin, ev.Unpin, own=True),
        Row(Role.WRITE, m.Hint, ev.Hint, own=True, next_use_s=_next_use_s, priority=_priority),
    )
}
