"""The namespace and the keys of a call, and the flows that all calls on keys share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvstore.client.calls.call import Call, Exchange, Flow, Work
from kvstore.client.gpu import open_extent
from kvstore.client.prompts import Prompts
from kvstore.client.slots import Slots
from kvstore.errors import DeniedError, MisuseError
from kvstore.types import HBM_EXTENTS, SLOT_RECORD, Key, Layout, check_keys
from kvstore.wire import messages as m

KINDS_SINCE = 10
"""The version of the wire that introduced independent namespaces."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A namespace as callers name it: a layout, its owner ("": the caller's tenant), and its TTL in seconds.

    `ttl_s` 0: the TTL of the tenant's configuration. `prompts`: the open prompts of the client.
    """

    layout: Layout
    owner: str = ""
    ttl_s: float = 0.0
    prompts: Prompts = field(default_factory=Prompts, compare=False, repr=False)

    @property
    def name(self) -> object:
        """Identifies the namespace among those of the client."""
        return self.layout, self.owner

    @property
    def key(self) -> tuple[int, str, float]:
        """Identifies the namespace on a connection.

        By identity: hashing the eight fields of a layout costs more than the rest of opening it again.
        """
        return id(self.layout), self.owner, self.ttl_s

    def open_message(self) -> m.Open:
        """Returns the request that opens the namespace."""
        return m.Open(0, self.layout.to_map(), self.owner, self.ttl_s)


class Chain:
    """Keys of one call in order: `keys` as passed by the caller, `joined` as sent.

    Each key has `key_bytes` bytes. Raises MisuseError for keys that are empty, too long or not of one length.
    """

    __slots__ = ("joined", "key_bytes", "keys")

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys
        self.joined, self.key_bytes = check_keys(keys)

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, start: int, count: int) -> Chain:
        """Returns at most `count` keys from `start` on, without a second check."""
        if not start and count >= len(self.keys):
            return self
        part = Chain.__new__(Chain)
        part.keys = self.keys[start : start + count]
        part.key_bytes = self.key_bytes
        part.joined = self.joined[start * self.key_bytes : (start + count) * self.key_bytes]
        return part


def open_namespace(exchange: Exchange, scope: Scope) -> Flow[tuple[int, bytes]]:
    """Returns (number, fingerprint) of the namespace on this connection. Opens it on first use."""
    layout, protocol = scope.layout, exchange.protocol
    opened = protocol.namespace(scope.key)
    if opened is None:
        check_kind(exchange, layout)
        answer = checked((yield scope.open_message()))
        opened = protocol.opened(scope.key, (answer.namespace, answer.fingerprint, layout))
    return opened[:2]


def check_kind(exchange: Exchange, layout: Layout) -> None:
    """Raises DeniedError if the daemon does not know independent namespaces: it would see a chain."""
    if layout.independent:
        check_version(exchange, KINDS_SINCE, "independent namespaces")


def check_version(exchange: Exchange, since: int, what: str) -> None:
    """Raises DeniedError unless the daemon speaks version `since` of the wire, which introduced `what`."""
    version = exchange.protocol.version
    if version < since:
        hint = f"upgrade the daemon: it speaks version {version} of the wire, this needs {since}"
        raise DeniedError(f"the daemon does not know {what}", hint)


def count(exchange: Exchange, scope: Scope, make: Callable[..., Any], chain: Chain, *more: Any) -> Flow[int]:
    """Sends a request about keys in batches; returns the sum of the answers.

    `make` is the class of the message, `more` its fields after the keys.
    """
    namespace, _ = yield from open_namespace(exchange, scope)
    total, batch = 0, exchange.protocol.batch_keys
    for at in range(0, len(chain), batch):
        part = chain.part(at, batch)
        total += value_of((yield make(0, namespace, part.key_bytes, part.joined, *more)))
    return total


def map_slots(exchange: Exchange, answer: Any, layout: Layout, writable: bool) -> Flow[Slots]:
    """Returns the granted slots of an answer, mapped."""
    # The upper half of a record's first field, read as 32-bit numbers.
    numbers = set(np.frombuffer(answer.slots, "<u4")[1 :: SLOT_RECORD.itemsize // 4].tolist())
    extents = yield from map_extents(exchange, numbers, writable)
    return Slots(extents, answer.slots, answer.slot_bytes, layout.block_bytes)


def map_extents(exchange: Exchange, numbers: set[int], writable: bool) -> Flow[dict[int, Any]]:
    """Returns mapped extents by number. Requests those that are not mapped yet. Raises DeniedError."""
    maps = exchange.protocol.maps
    mapped: dict[int, Any] = {}
    for extent in numbers:
        known = maps.get(extent, writable)
        if known is None:
            reply = checked((yield m.Map(0, extent, writable)))
            if extent < HBM_EXTENTS:
                known = maps.add(extent, writable, exchange.connection.take_descriptor(), reply.extent_bytes)
            else:
                known = yield Work(partial(open_extent, maps, extent, reply))
        mapped[extent] = known
    return mapped


def checked(answer: Any) -> Any:
    """Returns the answer. Raises DeniedError if the daemon refuses."""
    if isinstance(answer, m.Denied):
        raise DeniedError(answer.why, answer.hint)
    if isinstance(answer, m.Busy):
        raise DeniedError(answer.why, f"try again in {answer.retry_s:.3g} s")
    return answer


def value_of(answer: Any) -> int:
    """Returns the number in an answer. Raises DeniedError if the daemon refuses."""
    return int(checked(answer).value)


class Caller(Protocol):
    """The part of a client that the calls of its namespaces use. `base` imports this module."""

    deadline_s: float
    recompute_tokens_per_s: float

    def _perform(self, call: Call[Any]) -> Any:
        """Makes a call; returns its result, or a coroutine of it."""

    def answer(self, value: Any) -> Any:
        """Returns a result that needs no daemon: the value, or a coroutine of it."""


class Scoped:
    """Base of the calls on one namespace."""

    def __init__(self, client: Caller, scope: Scope) -> None:
        self.layout = scope.layout
        self._scope = scope
        self._client = client
        self._perform = client._perform


def scope_of(namespace: object, client: object) -> Scope:
    """Returns the scope of a namespace. Raises MisuseError if it is not one of this client."""
    if not isinstance(namespace, Scoped) or namespace._client is not client:
        raise MisuseError("a namespace of another client", "make all with `namespace` of this client")
    return namespace._scope
