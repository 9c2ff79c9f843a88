"""Passes extents to peers that may map them: DRAM as a descriptor, GPU memory as a CUDA IPC handle."""

from __future__ import annotations

import os

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
    if read_only and session.services.authenticator.is_privileged(session.process.uid):
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


def _send_descriptor(session: Session, q: m.Map) -> None:
    """Answers with a DRAM extent. Raises KeyError if there is no such extent."""
    dram = session.services.tiers.dram
    fd = dram.descriptor(q.extent, q.writable)
    try:
        if session.outbox.waiting_bytes:
            hint = "read what was sent before asking for a descriptor"
            raise DeniedError("answers are waiting to be read", hint)
        session.outbox.send_with_descriptor(m.Mapped(q.id, dram.extent_bytes), fd)
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
