"""Requests about blocks: reads, waits, reservations, hand-off, invalidation.

With a network tier, reads are sent to it, and it asks the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.daemon.requests.block_waits import KEYS_BYTES
from kvstore.daemon.requests.event_table import EVENTS
from kvstore.daemon.requests.namespaces import AbsentError, find
from kvstore.daemon.requests.session import DeniedError, Session
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.wire import messages as m

_WAITS = 64
"""The most calls of one connection that wait for blocks."""


def ask_core(session: Session, q: Any) -> None:
    """Sends a request to the core, which answers it. For requests of `EVENTS` that need nothing else."""
    row = EVENTS[type(q)]
    namespace = find(session, q, row.own).number if row.in_namespace else 0
    session.services.core.ask(session, q.id, row.build(q, session, namespace))


def tell_core(session: Session, q: m.Abort | m.Release) -> None:
    """Sends a message to the core that has no answer."""
    session.services.core.handle(EVENTS[type(q)].build(q, session, 0))


def _named(session: Session, q: Any) -> tuple[NamespaceEntry, Any]:
    """Returns the namespace of a request, and the request's event."""
    row = EVENTS[type(q)]
    namespace = find(session, q, row.own)
    return namespace, row.build(q, session, namespace.number)


def lookup(session: Session, q: m.Lookup) -> None:
    """Answers with the length of the stored prefix."""
    services, (namespace, event) = session.services, _named(session, q)
    services.recorder.looked_up(session.number, q.id, namespace, q.key_bytes, q.keys)
    session.prompts.asked(q, namespace)
    if services.network is None:
        services.core.ask(session, q.id, event)
    else:
        until = session.deadline(q.timeout_s)
        services.network.requests.lookup(session, q.id, event, namespace, until, session.trace(q.id))


def looked_up(session: Session, q: m.LookedUp) -> None:
    """Counts lookups that a presence table has answered."""
    namespace = session.namespaces.at(q.namespace)
    if namespace is not None:
        tiers = len(session.services.core.view.tiers)
        found = np.frombuffer(q.found, "<u4")[:tiers].tolist()
        session.prompts.looked_up(namespace, q.asks, found)


def blocks_read(session: Session, q: m.BlocksRead) -> None:
    """Counts blocks that were read without a request, as a use of them."""
    services, namespace = session.services, session.namespaces.at(q.namespace)
    if namespace is None or not services.catalog.may_read(session.principal, namespace):
        return
    keys = Keys(q.keys, q.key_bytes)
    _check_count(session, keys)
    session.prompts.delivered(namespace, q.blocks)
    services.core.handle(ev.BlocksRead(namespace.number, keys, q.blocks))


def contains(session: Session, q: m.Contains) -> None:
    """Answers which keys are stored."""
    services, (namespace, event) = session.services, _named(session, q)
    if services.network is None:
        services.core.ask(session, q.id, event)
    else:
        services.network.requests.contains(session, q.id, event, namespace, session.deadline(q.timeout_s))


@dataclass(slots=True)
class WokenAcquire:
    """An Acquire after its wait for the first block. The scheduler counts its keys as those of an Acquire."""

    q: m.Acquire
    event: ev.Acquire
    namespace: NamespaceEntry
    keys: bytes
    key_bytes: int


def acquire(session: Session, q: m.Acquire) -> None:
    """Leases the stored prefix. With `q.wait_s`, waits for its first block."""
    services, (namespace, event) = session.services, _named(session, q)
    _check_count(session, event.keys)
    stored = services.core.view.stored
    waits = q.wait_s > 0 and event.keys.n and not stored(namespace.number, event.keys.take(0, 1))
    if waits:
        _check_waits(session, q)
    services.recorder.acquired(session.number, q.id, namespace, q.key_bytes, q.keys)
    session.prompts.asked(q, namespace)
    if waits:
        _wait(session, q, event, namespace)
    else:
        _acquire_now(session, q, event, namespace)


def _check_waits(session: Session, q: m.Acquire) -> None:
    """Raises DeniedError if too many calls wait for blocks."""
    waits, tenant = session.services.waits, session.principal.tenant
    most = session.services.config().limits.queued_requests
    if len(session.waits) >= _WAITS:
        raise DeniedError(f"{_WAITS} calls of this connection wait for blocks", "wait for fewer at once")
    if waits.count(tenant) >= most:
        hint = "wait for fewer at once, or raise limits.queued_requests"
        raise DeniedError(f"{most} calls of this tenant wait for blocks", hint)
    key_bytes = waits.nbytes(tenant) + len(q.keys)
    if key_bytes > KEYS_BYTES:
        raise DeniedError(
            f"keys of this tenant that are waited for would take {key_bytes} bytes, at most {KEYS_BYTES}",
            "wait for fewer at once, or name fewer keys",
        )


def _wait(session: Session, q: m.Acquire, event: ev.Acquire, namespace: NamespaceEntry) -> None:
    """Runs the request when its first block is stored on this node or the network, or when the wait ends."""

    def woken() -> None:
        if not session.ended:
            session.waits.discard(wait)
            session.enqueue(WokenAcquire(q, event, namespace, q.keys, q.key_bytes))

    wait = session.services.waits.add(namespace, event.keys, event.tenant, q.wait_s, woken)
    session.waits.add(wait)


def acquire_woken(session: Session, woken: WokenAcquire) -> None:
    """Leases the stored prefix after the wait. A namespace that was deleted meanwhile is not opened again."""
    q, event, namespace = woken.q, woken.event, woken.namespace
    if not namespace.number or not session.services.catalog.may_read(session.principal, namespace):
        absent = AbsentError()
        session.deny(q.id, absent.message, absent.hint)
        return
    event.namespace = namespace.number
    if (trace := session.trace(q.id)) is not None:
        trace.mark("wait")
        trace.last = "copies"
    _acquire_now(session, q, event, namespace)


def _acquire_now(session: Session, q: m.Acquire, event: ev.Acquire, namespace: NamespaceEntry) -> None:
    services = session.services
    if services.network is None:
        services.core.ask(session, q.id, event)
    else:
        trace = session.trace(q.id)
        services.network.requests.acquire(session, q.id, event, namespace, q.wait_s > 0, trace)


def release(session: Session, q: m.Release) -> None:
    """Ends a lease."""
    session.prompts.released(q)
    tell_core(session, q)


def prefetch(session: Session, q: m.Prefetch) -> None:
    """Copies the stored prefix to memory. Answers with the number of its blocks that are or will be there."""
    services, (namespace, event) = session.services, _named(session, q)
    if services.network is None:
        services.core.ask(session, q.id, event)
    else:
        services.network.requests.prefetch(session, q.id, event, namespace)


def suspect(session: Session, q: m.Suspect) -> None:
    """Lets the core verify blocks. Only a request with a number is answered."""
    event = _named(session, q)[1]
    if q.id:
        session.services.core.ask(session, q.id, event)
    else:
        session.services.core.handle(event)


def reserve(session: Session, q: m.Reserve) -> None:
    """Reserves slots for keys that are not stored, and keeps the blocks' tokens for KV events."""
    services, (namespace, event) = session.services, _named(session, q)
    if q.tokens and not services.kv_events.add_tokens(namespace, event.keys, q.tokens):
        raise DeniedError(f"{len(q.tokens) // 4} tokens for {event.keys.n} blocks", "see Layout.block_tokens")
    if services.network is None:
        services.core.ask(session, q.id, event)
    else:
        services.network.requests.reserve(session, q.id, event, namespace)


def invalidate(session: Session, q: m.Invalidate) -> None:
    """Makes blocks misses. Answers when this is durable, also on the network."""
    namespace = find(session, q, own=True)
    session.services.deletion.invalidate(session, q.id, namespace, Keys(q.keys, q.key_bytes))


def hand_off(session: Session, q: m.HandOff) -> None:
    """Uploads the stored prefix. Answers with the number of leading blocks that the network has."""
    namespace, network = find(session, q, own=True), session.services.network
    if network is None:
        raise DeniedError("there is no network tier", "set network.url")
    keys = Keys(q.keys, q.key_bytes)
    _check_count(session, keys)
    until = session.deadline(q.timeout_s)
    network.requests.hand_off(session, q.id, namespace, keys, session.principal.tenant, until)


def _check_count(session: Session, keys: Keys) -> None:
    """Raises DeniedError for more keys than one call may have."""
    most = session.services.core.view.limits.batch_keys
    if keys.n > most:
        raise DeniedError(f"{keys.n} keys in one call", f"at most {most} keys a call (limits.batch_keys)")
