"""The namespace that a call is about, and the flows that every call on keys shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvstore.client.calls.call import Exchange, Fetch, Flow, Work
from kvstore.client.calls.chain import Chain
from kvstore.client.gpu import open_extent
from kvstore.client.leases import Slots
from kvstore.client.prompts import Prompts
from kvstore.errors import DeniedError
from kvstore.types import HBM_EXTENTS, SLOT_RECORD, Layout
from kvstore.wire import messages as m


@dataclass(frozen=True, slots=True)
class Scope:
    """A namespace as callers name it: a layout, the tenant that owns it ("": the caller's), its TTL (s).

    `ttl_s` 0: as the tenant is configured. `prompts`: the open prompts of the client.
    """

    layout: Layout
    owner: str = ""
    ttl_s: float = 0.0
    prompts: Prompts = field(default_factory=Prompts, compare=False, repr=False)

    @property
    def name(self) -> object:
        """Identifies the namespace among those of the client."""
        return self.layout, self.owner


def open_namespace(exchange: Exchange, scope: Scope) -> Flow[tuple[int, bytes]]:
    """(number, fingerprint) of the namespace on this connection; opens it on first use."""
    layout, protocol = scope.layout, exchange.protocol
    # By identity: hashing the seven fields of a layout costs more than the rest of this step.
    name = id(layout), scope.owner, scope.ttl_s
    opened = protocol.namespace(name)
    if opened is None:
        answer = checked((yield m.Open(0, layout.to_map(), scope.owner, scope.ttl_s)))
        opened = protocol.opened(name, (answer.namespace, answer.fingerprint, layout))
    return opened[:2]


def count(exchange: Exchange, scope: Scope, make: Callable[..., Any], chain: Chain, *more: Any) -> Flow[int]:
    """Sends a request about keys, in batches; the sum of the numbers that answer them.

    `make` is the message's class, `more` its fields behind the keys.
    """
    namespace, _ = yield from open_namespace(exchange, scope)
    total, batch = 0, exchange.protocol.batch_keys
    for at in range(0, len(chain), batch):
        part = chain.part(at, batch)
        total += value_of((yield make(0, namespace, part.key_bytes, part.joined, *more)))
    return total


def map_slots(exchange: Exchange, answer: Any, layout: Layout, writable: bool) -> Flow[Slots]:
    """The slots that an answer grants, mapped. Extents that are not mapped yet are requested first."""
    maps = exchange.protocol.maps
    mapped: dict[int, Any] = {}
    # The upper half of a record's first field, read as 32-bit numbers.
    for extent in set(np.frombuffer(answer.slots, "<u4")[1 :: SLOT_RECORD.itemsize // 4].tolist()):
        known = maps.get(extent, writable)
        if known is None and extent < HBM_EXTENTS:
            reply, fd = yield Fetch(m.Map(0, extent, writable))
            known = maps.add(extent, writable, fd, checked(reply).extent_bytes)
        elif known is None:
            reply = checked((yield m.Map(0, extent, writable)))
            known = yield Work(partial(open_extent, maps, extent, reply))
        mapped[extent] = known
    return Slots(mapped, answer.slots, answer.slot_bytes, layout.block_bytes)


def checked(answer: Any) -> Any:
    """The answer itself. Raises DeniedError if the daemon refuses."""
    if isinstance(answer, m.Denied):
        raise DeniedError(answer.why, answer.hint)
    if isinstance(answer, m.Busy):
        raise DeniedError(answer.why, f"try again in {answer.retry_s:.3g} s")
    return answer


def value_of(answer: Any) -> int:
    """The number that an answer carries. Raises DeniedError if the daemon refuses."""
    return int(checked(answer).value)


class Caller(Protocol):
    """What the calls of a namespace use of their client."""

    deadline_s: float
    recompute_tokens_per_s: float

    def answer(self, value: Any) -> Any:
        """A result that needs no daemon: the value, or something to await."""


class Scoped:
    """Base of the calls on one namespace."""

    def __init__(self, client: Caller, scope: Scope) -> None:
        self.layout = scope.layout
        self._scope = scope
        self._client = client
