"""Which keys are stored: the question about one namespace, and about several in one round trip.

A presence table answers without a request, as the daemon would. The daemon is asked where it has no table,
and where the network may have keys that the node does not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import native
from kvstore.arena import Mapping
from kvstore.client.calls.call import Exchange, Flow, Pipeline
from kvstore.client.calls.scope import Chain, Scope, check_kind, check_version, checked, open_namespace
from kvstore.client.presence_tables import ABSENT, PresenceTable
from kvstore.errors import DeniedError, RemoteProtocolError, TierError
from kvstore.types import Key
from kvstore.wire import messages as m

CONTAINS_SINCE = 9
"""The version of the wire that introduced Contains."""

NAMESPACES_AT_ONCE = m.NAMESPACES // 2
"""The most namespaces of one round trip: fewer than a connection has, so none is closed meanwhile."""

PRESENCE_SINCE = 12
"""The version of the wire that introduced presence tables."""

Mask = npt.NDArray[np.bool_]


def map_tables(exchange: Exchange, scopes: Iterable[Scope]) -> Flow[None]:
    """Maps the presence tables of open namespaces, as far as the daemon has some.

    A namespace that is not open on this connection is not asked about: most are looked up more than once.
    """
    protocol = exchange.protocol
    if native.presence is None or protocol.version < PRESENCE_SINCE:
        return
    for scope in scopes:
        opened = protocol.namespace(scope.key)
        if opened is None or not protocol.maps.presence.may_ask(opened[1]):
            continue
        answer = yield m.MapPresence(0, opened[0])
        fd = exchange.connection.take_descriptor()
        if fd < 0:
            continue
        try:
            mapping = Mapping(fd, answer.table_bytes, writable=False)
        except TierError:
            continue
        finally:
            os.close(fd)
        if answer.slot_bytes < scope.layout.block_bytes:
            raise RemoteProtocolError(
                f"blocks of {scope.layout.block_bytes} bytes in slots of {answer.slot_bytes}"
            )
        protocol.maps.presence.add(opened[1], _table(mapping, answer))


def _table(mapping: Mapping, answer: m.MappedPresence) -> PresenceTable:
    return PresenceTable(mapping, answer.foreign, answer.network, answer.slot_bytes)


def current_table(exchange: Exchange, fingerprint: bytes) -> PresenceTable | None:
    """Returns the table of a namespace if it may answer for the daemon.

    Raises ConnectionResetError if the connection has ended: tables of a daemon that is gone are not updated.
    """
    tables = exchange.protocol.maps.presence
    table = tables.get(fingerprint)
    if table is None or not tables.are_current:
        return None
    if exchange.connection.ended():
        raise ConnectionResetError("the daemon closed the connection")
    return table


def find_tiers(
    exchange: Exchange, fingerprint: bytes, keys: Sequence[Key], prefix_step: int = 0
) -> bytes | None:
    """Returns the tier of each key, or ABSENT, as the presence table has it; None: ask the daemon.

    With `prefix_step`, of the keys before the first absent one, see `PresenceTable.find_prefix`. Raises as
    `current_table` does.
    """
    table = current_table(exchange, fingerprint)
    if table is None:
        return None
    tiers = table.find_prefix(keys, prefix_step) if prefix_step else table.find(keys, leading=False)
    if tiers is not None and table.network and (len(tiers) < len(keys) or ABSENT in tiers):
        return None
    return tiers


def contains(exchange: Exchange, scope: Scope, chain: Chain) -> Flow[Mask]:
    """Returns which keys are stored. Raises DeniedError if the daemon is too old to be asked."""
    check_version(exchange, CONTAINS_SINCE, "`contains`")
    yield from map_tables(exchange, (scope,))
    namespace, fingerprint = yield from open_namespace(exchange, scope)
    if (tiers := find_tiers(exchange, fingerprint, chain.keys)) is not None:
        return _mask(tiers)
    masks = []
    for message in contains_messages(exchange, namespace, chain):
        masks.append(mask_of((yield message), message))
    return np.concatenate(masks) if masks else np.empty(0, np.bool_)


def _mask(tiers: bytes) -> Mask:
    mask: Mask = np.frombuffer(tiers, np.uint8) != ABSENT
    return mask


def contains_messages(exchange: Exchange, namespace: int, chain: Chain) -> Iterator[m.Contains]:
    """Yields the requests that ask which keys are stored, a batch each."""
    batch = exchange.protocol.batch_keys
    for at in range(0, len(chain), batch):
        part = chain.part(at, batch)
        yield m.Contains(0, namespace, part.key_bytes, part.joined, exchange.left_s())


def mask_of(answer: Any, message: m.Contains) -> Mask:
    """Returns which keys of a request are stored. Raises DeniedError if the daemon refuses."""
    mask: Mask = np.frombuffer(checked(answer).mask, np.uint8) != 0
    n = len(message.keys) // message.key_bytes
    if len(mask) != n:
        raise RemoteProtocolError(f"the presence of {len(mask)} keys instead of {n}")
    return mask


def contains_each(exchange: Exchange, asked: Sequence[tuple[Scope, Chain]], strict: bool) -> Flow[list[Mask]]:
    """As `contains_all`, for a call that asks nothing else: maps presence tables first."""
    yield from map_tables(exchange, (scope for scope, _ in asked))
    return (yield from contains_all(exchange, asked, strict))


def contains_all(exchange: Exchange, asked: Sequence[tuple[Scope, Chain]], strict: bool) -> Flow[list[Mask]]:
    """Returns which keys of each namespace are stored. Refused namespaces have none; `strict`: raise."""
    check_version(exchange, CONTAINS_SINCE, "`contains`")
    masks = []
    for at in range(0, len(asked), NAMESPACES_AT_ONCE):
        masks += yield from _contains_some(exchange, asked[at : at + NAMESPACES_AT_ONCE], strict)
    return masks


def _contains_some(
    exchange: Exchange, asked: Sequence[tuple[Scope, Chain]], strict: bool
) -> Flow[list[Mask]]:
    """Sends the questions of all namespaces before the first answer. Presence tables answer their part."""
    opened = yield from _open_all(exchange, [scope for scope, _ in asked], strict)
    messages, known = list[list[m.Contains]](), list[bytes | None]()
    for namespace, (_, chain) in zip(opened, asked, strict=True):
        known.append(find_tiers(exchange, namespace[1], chain.keys) if namespace is not None else None)
        asks = namespace is not None and known[-1] is None
        messages.append(list(contains_messages(exchange, namespace[0], chain)) if namespace and asks else [])
    together = [message for some in messages for message in some]
    answers = iter((yield Pipeline(together)) if together else ())
    masks = []
    for some, tiers, (_, chain) in zip(messages, known, asked, strict=True):
        mask, at = np.zeros(len(chain), np.bool_) if tiers is None else _mask(tiers), 0
        for message in some:
            n, answer = len(message.keys) // message.key_bytes, _accepted(next(answers), strict)
            if answer is not None:
                mask[at : at + n] = mask_of(answer, message)
            at += n
        masks.append(mask)
    return masks


def _open_all(
    exchange: Exchange, scopes: Sequence[Scope], strict: bool
) -> Flow[list[tuple[int, bytes] | None]]:
    """Returns number and fingerprint of each namespace; None: refused. Opens absent ones together."""
    protocol, numbers = exchange.protocol, dict[tuple[int, str, float], tuple[int, bytes] | None]()
    absent = []
    for scope in {scope.key: scope for scope in scopes}.values():
        known = protocol.namespace(scope.key)
        numbers[scope.key] = None if known is None else known[:2]
        if known is not None:
            continue
        if _is_known(exchange, scope, strict):
            absent.append(scope)
    answers = (yield Pipeline([scope.open_message() for scope in absent])) if absent else ()
    for scope, answer in zip(absent, answers, strict=True):
        opened = _accepted(answer, strict)
        if opened is not None:
            numbers[scope.key] = opened.namespace, opened.fingerprint
            protocol.opened(scope.key, (opened.namespace, opened.fingerprint, scope.layout))
    return [numbers[scope.key] for scope in scopes]


def _is_known(exchange: Exchange, scope: Scope, strict: bool) -> bool:
    """Returns whether the daemon knows the kind of a namespace. Raises DeniedError if not and `strict`."""
    try:
        check_kind(exchange, scope.layout)
    except DeniedError:
        if strict:
            raise
        return False
    return True


def _accepted(answer: Any, strict: bool) -> Any:
    """Returns an answer, None for a refusal. Raises DeniedError for a refusal if `strict`."""
    if not strict and isinstance(answer, m.Denied | m.Busy):
        return None
    return checked(answer)
