"""Which keys are stored: the question about one namespace, and about several in one round trip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.calls.call import Exchange, Flow, Pipeline
from kvstore.client.calls.scope import Chain, Scope, check_kind, check_version, checked, open_namespace
from kvstore.errors import DeniedError, RemoteProtocolError
from kvstore.wire import messages as m

CONTAINS_SINCE = 9
"""The version of the wire that introduced Contains."""

NAMESPACES_AT_ONCE = m.NAMESPACES // 2
"""The most namespaces of one round trip: fewer than a connection has, so none is closed meanwhile."""

Mask = npt.NDArray[np.bool_]


def contains(exchange: Exchange, scope: Scope, chain: Chain) -> Flow[Mask]:
    """Returns which keys are stored. Raises DeniedError if the daemon is too old to be asked."""
    check_version(exchange, CONTAINS_SINCE, "`contains`")
    namespace, _ = yield from open_namespace(exchange, scope)
    masks = []
    for message in contains_messages(exchange, namespace, chain):
        masks.append(mask_of((yield message), message))
    return np.concatenate(masks) if masks else np.empty(0, np.bool_)


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
    """Sends the questions of all namespaces before the first answer."""
    numbers = yield from _open_all(exchange, [scope for scope, _ in asked], strict)
    messages = [
        [] if number is None else list(contains_messages(exchange, number, chain))
        for number, (_, chain) in zip(numbers, asked, strict=True)
    ]
    together = [message for some in messages for message in some]
    answers = iter((yield Pipeline(together)) if together else ())
    masks = []
    for some, (_, chain) in zip(messages, asked, strict=True):
        mask, at = np.zeros(len(chain), np.bool_), 0
        for message in some:
            n, answer = len(message.keys) // message.key_bytes, _accepted(next(answers), strict)
            if answer is not None:
                mask[at : at + n] = mask_of(answer, message)
            at += n
        masks.append(mask)
    return masks


def _open_all(exchange: Exchange, scopes: Sequence[Scope], strict: bool) -> Flow[list[int | None]]:
    """Returns the number of each namespace on this connection; None: refused. Opens the others together."""
    protocol, numbers = exchange.protocol, dict[tuple[int, str, float], int | None]()
    absent = []
    for scope in {scope.key: scope for scope in scopes}.values():
        known = protocol.namespace(scope.key)
        numbers[scope.key] = None if known is None else known[0]
        if known is not None:
            continue
        if _is_known(exchange, scope, strict):
            absent.append(scope)
    answers = (yield Pipeline([scope.open_message() for scope in absent])) if absent else ()
    for scope, answer in zip(absent, answers, strict=True):
        opened = _accepted(answer, strict)
        if opened is not None:
            numbers[scope.key] = opened.namespace
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
