"""Passes memory to peers that may map it: extents and presence tables, as descriptors or CUDA IPC handles."""

from __future__ import annotations

import os

from kvstore.daemon.requests.namespaces import NothingStoredError, find
from kvstore.daemon.requests.session import DeniedError, Session
from kvstore.daemon.tenancy.auth import Role
from kvstore.errors import TierError
from kvstore.types import HBM_EXTENTS
from kvstore.wire import messages as m


def map_extent(session: Session, q: m.Map) -> None:
    """Answers with an extent's descriptor or handle, if the peer may map it."""
    if q.writable or q.extent >= HBM_EXTENTS:
        session.check_role(Role.WRITE)
    catalog, who = session.services.catalog, session.principal
    absent = DeniedError(f"there is no extent {q.extent}")
    if not catalog.may_map(who, q.extent, q.writable):
        raise absent
    read_only = who.role < Role.WRITE or not catalog.may_map(who, q.extent, writable=True)
    if read_only and _is_privileged(session):
        raise DeniedError(
            "root, and the user that runs the daemon, can write to whatever memory they may read",
            "run what only reads as another user",
        )
    try:
        if q.extent < HBM_EXTENTS:
            _send_descriptor(session, q)
        else:
            _send_handle(session, q)
    except KeyError:
        raise absent from None


def map_presence(session: Session, q: m.MapPresence) -> None:
    """Answers with the descriptor of a presence table, if the peer may map it and it can answer lookups.

    A peer that could write to it gets none, unless it may write to the blocks too.
    """
    services, who = session.services, session.principal
    none = m.MappedPresence(q.id, 0, False, False, 0)
    try:
        namespace = find(session, q)
    except NothingStoredError:
        return session.send(none)
    foreign = namespace.tenant != who.tenant
    read_only = foreign or who.role < Role.WRITE
    # While requests are recorded, lookups must be requests.
    if (read_only and _is_privileged(session)) or services.recorder.running:
        return session.send(none)
    mapped = services.presence.descriptor(namespace)
    if mapped is None:
        return session.send(none)
    network = services.network is not None and services.network.eligibility.shares(namespace)
    fd, nbytes = mapped
    slot_bytes = services.core.view.slot_bytes(namespace.number)
    return _send_with(session, m.MappedPresence(q.id, nbytes, foreign, network, slot_bytes), fd)


def _is_privileged(session: Session) -> bool:
    """Returns whether the peer can write to whatever memory it may read."""
    return session.services.authenticator.is_privileged(session.process.uid)


def _send_descriptor(session: Session, q: m.Map) -> None:
    """Answers with a DRAM extent. Raises KeyError if there is no such extent."""
    dram = session.services.tiers.dram
    fd = dram.descriptor(q.extent, q.writable)
    _send_with(session, m.Mapped(q.id, dram.extent_bytes), fd)


def _send_with(session: Session, answer: m.Mapped | m.MappedPresence, fd: int) -> None:
    """Sends an answer with a descriptor, and closes the descriptor."""
    try:
        if session.outbox.waiting_bytes:
            hint = "read what was sent before asking for a descriptor"
            raise DeniedError("answers are waiting to be read", hint)
        session.outbox.send_with_descriptor(answer, fd)
    finally:
        os.close(fd)


def _send_handle(session: Session, q: m.Map) -> None:
    """Answers with a GPU extent. Raises KeyError if there is no such extent, DeniedError without CUDA IPC."""
    tiers = session.services.tiers
    tier = tiers.memory_of(q.extent)
    if tier is None:
        raise KeyError(q.extent)
    pool = tiers.pool_at(tier)
    try:
        handle = pool.handle(q.extent, session.process.pidfd())
    except (TierError, OSError) as error:
        raise DeniedError(f"this memory can't be shared: {error}", "ask for blocks in DRAM") from None
    session.send(m.MappedHbm(q.id, pool.extent_bytes, pool.gpu.uuid, handle))
