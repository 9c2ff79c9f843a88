"""Namespaces of a connection: opens them, finds them by number, reopens them after the core has closed them.

The existence of another tenant's namespace is not revealed to a peer that may not read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.core import actions as ac
from kvstore.daemon.requests.session import DeniedError, Session
from kvstore.daemon.tenancy.auth import Role
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.errors import KVStoreError, MisuseError
from kvstore.types import SLOT_RECORD, Layout, slot_bytes
from kvstore.wire import messages as m


class AbsentError(DeniedError):
    """There is no such namespace, or the peer may not read it."""

    def __init__(self) -> None:
        super().__init__(
            "there is no such namespace, or it is not published to this tenant",
            "its owner publishes it; then open it again",
        )


class NoKeysError(KVStoreError):
    """The tenant lacks data keys, without which its namespace cannot be opened."""


class NothingStoredError(KVStoreError):
    """A reader names its own namespace, which no writer has opened. All of its blocks are misses."""

    def __init__(self, namespace: NamespaceEntry) -> None:
        super().__init__("nothing is stored in this namespace")
        self.namespace = namespace


def open_namespace(session: Session, q: m.Open) -> None:
    """Opens a namespace of the peer's tenant, or one that `q.owner` has published to it."""
    who, catalog = session.principal, session.services.catalog
    try:
        layout = Layout(**q.layout)
    except (MisuseError, TypeError) as error:
        raise DeniedError(f"the layout makes no sense: {error}") from None
    owner = "" if q.owner == who.name else q.owner
    if not owner:
        _check_keys(session)
    # Only writers set the lifetime of blocks.
    ttl_s = q.ttl_s if who.role >= Role.WRITE and not owner else 0.0
    namespace, answer = catalog.open(who, layout, owner, ttl_s)
    if namespace is not None:
        session.send(m.Opened(q.id, session.namespaces.number_of(namespace), namespace.fingerprint))
    elif owner:
        raise AbsentError
    else:
        session.answer(q.id, answer)


def find(session: Session, q: Any, own: bool = False) -> NamespaceEntry:
    """Returns the namespace of a request. With `own`, refuses another tenant's namespace.

    Raises DeniedError, NoKeysError or NothingStoredError.
    """
    who, namespace = session.principal, session.namespaces.at(q.namespace)
    if namespace is None:
        raise DeniedError(f"unknown namespace {q.namespace}", "open the namespace on this connection first")
    if namespace.tenant == who.tenant:
        return namespace if namespace.number else _reopened(session, q, namespace)
    if not namespace.number or not session.services.catalog.may_read(who, namespace):
        raise AbsentError
    if own:
        raise DeniedError("this namespace is another tenant's", "it can be read, and not be changed")
    return namespace


def _reopened(session: Session, q: Any, namespace: NamespaceEntry) -> NamespaceEntry:
    """Reopens a namespace that the core has closed, or that was deleted."""
    assert namespace.layout is not None
    services = session.services
    again = services.namespaces.find(namespace.tenant, namespace.fingerprint)
    if again is None or not again.number:
        _check_keys(session)
        # Waiting for a block needs an open namespace.
        waits = isinstance(q, m.Acquire) and q.wait_s > 0
        again, answer = services.catalog.open(session.principal, namespace.layout, "", namespace.ttl_s, waits)
        if isinstance(answer, ac.Deny):
            raise DeniedError(answer.why, answer.hint)
        assert again is not None
        if not again.number:
            raise NothingStoredError(namespace)
    session.namespaces.set(q.namespace, again)
    return again


def _check_keys(session: Session) -> None:
    if not session.services.data_keys.exist(session.principal.name):
        raise NoKeysError("data keys are being made")


def answer_miss(session: Session, q: Any, namespace: NamespaceEntry) -> None:
    """Answers a request about a namespace in which nothing is stored."""
    if isinstance(q, m.Lookup | m.Acquire):
        session.prompts.asked(q, namespace)
    if isinstance(q, m.Lookup):
        session.answer(q.id, ac.Found(q.id, 0, gaps=False))
    elif isinstance(q, m.Contains):
        session.answer(q.id, ac.Presence(q.id, np.zeros(len(q.keys) // q.key_bytes, np.bool_)))
    elif isinstance(q, m.Acquire):
        nothing = np.empty(0, SLOT_RECORD)
        session.answer(q.id, ac.Grant(q.id, 0, slot_bytes(namespace.block_bytes), nothing))
    elif q.id:
        session.answer(q.id, ac.Answer(q.id, 0))
