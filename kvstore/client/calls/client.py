"""Calls on several namespaces or none: presence, deletion, explanations, operator commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.calls.call import Call, Exchange, Flow, R, call
from kvstore.client.calls.presence import contains_each
from kvstore.client.calls.reads import LookedUp, check_sample, lookup_all
from kvstore.client.calls.scope import Chain, Scoped, checked, scope_of, value_of
from kvstore.client.calls.writes import Put, put_each, wanted_of
from kvstore.client.checks import (
    check_deadline,
    check_device,
    check_estimate,
    check_names,
    check_owner,
    recompute_s,
)
from kvstore.client.estimates import Estimate, StoredPrefix
from kvstore.client.leases import NO_ANSWER, PutResult
from kvstore.types import EXPLAIN_KEYS, Key, check_tenant
from kvstore.wire import messages as m


class ClientCalls:
    """The calls of a client that are not of one namespace."""

    strict: bool
    recompute_tokens_per_s: float

    @call
    def lookup(
        self,
        chains: Sequence[tuple[Scoped, Sequence[Key], int | None, Estimate | None]],
        others: Sequence[tuple[Scoped, Sequence[Key]]] = (),
        deadline_s: float | None = None,
    ) -> Call[LookedUp]:
        """Looks up prompts in several namespaces, and asks others which keys they have, in one round trip.

        A chain is a namespace of this client, its keys, `prompt`, see the `lookup` of a namespace, and an
        estimate. The result has a StoredPrefix for each chain, and an array of bools for each of `others`,
        see `contains`. One more round trip is needed if a namespace is not open yet, and for chains of 512
        keys or more (beside `others`: of more keys than one request has). A namespace that the daemon refuses
        has no keys (raises DeniedError if strict).

        An Estimate is for engines that know their own speed (None: the speed of the client counts). The
        daemon estimates the load time from the bandwidth and the queue of each device, and finds the end that
        saves the most time. Where a sample of the keys is sent, that end is off by up to the square root of
        their number. With a daemon of version 10 of the wire or older, all stored blocks count.
        """
        speed = self.recompute_tokens_per_s
        asked = [
            (
                scope_of(namespace, self),
                keys,
                prompt,
                check_estimate(estimate) if estimate else Estimate(recompute_s(namespace.layout, speed)),
            )
            for namespace, keys, prompt, estimate in chains
        ]
        for namespace, keys, *_ in chains:
            check_sample(namespace.layout, keys)
        also = [(scope_of(namespace, self), Chain(keys)) for namespace, keys in others]

        def miss() -> LookedUp:
            return [StoredPrefix() for _ in asked], [np.zeros(len(chain), np.bool_) for _, chain in also]

        return Call(lambda exchange: lookup_all(exchange, asked, also, self.strict), deadline_s, miss)

    @call
    def put(self, puts: Sequence[Put], deadline_s: float | None = None) -> Call[list[PutResult]]:
        """Stores the blocks of several puts in two round trips, whatever their number. See `Put`.

        Slots of all are reserved before the first are filled: no block may need one of another put as its
        parent or chain. Each put is one reservation; keys beyond its limit count as denied. A put that the
        daemon refuses is denied in its result, which says why; the others are stored. An exception of a
        `fill` is raised, and no put is stored. The time of the fills does not count towards `deadline_s`.
        """
        asked = [
            (
                wanted_of(
                    self,
                    put.namespace,
                    put.keys,
                    put.parent,
                    check_device(put.device),
                    put.tokens,
                    put.chain,
                ),
                put.fill,
            )
            for put in puts
        ]

        def miss() -> list[PutResult]:
            return [PutResult(denied=len(put.keys), why=NO_ANSWER) for put in puts]

        return Call(lambda exchange: put_each(exchange, asked), deadline_s, miss)

    @call
    def contains(
        self, questions: Sequence[tuple[Scoped, Sequence[Key]]], deadline_s: float | None = None
    ) -> Call[list[npt.NDArray[np.bool_]]]:
        """Returns which keys are stored in several namespaces: one array of bools for each question.

        A question is a namespace of this client and its keys. All are sent before the first is answered: one
        round trip for up to 512 namespaces, one more if some are not open yet. A namespace that the daemon
        refuses has no keys (raises DeniedError if strict). See the `contains` of a namespace.
        """
        asked = [(scope_of(namespace, self), Chain(keys)) for namespace, keys in questions]

        def miss() -> list[npt.NDArray[np.bool_]]:
            return [np.zeros(len(chain), np.bool_) for _, chain in asked]

        return Call(lambda exchange: contains_each(exchange, asked, self.strict), deadline_s, miss)

    @call
    def invalidate(self, model: str = "", revision: str = "") -> Call[int]:
        """Deletes the tenant's namespaces of this model and revision ("": any); returns how many blocks.

        On all nodes of a network tier; the number is that of this node.
        Needs the role admin. Also returns 0 if the daemon is away or refuses (unless strict).
        """
        check_names(model, revision)
        return Call(ask(m.Forget(0, 0, model, revision), value_of), miss=int)

    @call
    def delete_tenant(self, name: str, deadline_s: float = 60.0) -> Call[int]:
        """Deletes all blocks of a tenant, on all nodes of a network tier; returns how many on this node.

        For admins of the tenant, and for operators. Raises DeniedError or UnavailableError if it fails.
        """
        return Call(ask(m.DeleteTenant(0, check_tenant(name)), value_of), check_deadline(deadline_s))

    @call
    def explain(self, keys: Sequence[Key], tenant: str = "", model: str = "") -> Call[list[dict[str, Any]]]:
        """Returns the state of keys and recent decisions about them: a map per key and namespace.

        Covers the tenant's own namespaces of this model ("": any); for operators those of `tenant` ("": all).
        Raises UnavailableError or DeniedError if the daemon does not answer.
        """
        chain = Chain(keys)
        check_names(model, "")
        owner = check_owner(tenant)
        return Call(lambda exchange: explain(exchange, owner, model, chain))

    @call
    def status(self) -> Call[dict[str, Any]]:
        """Returns the daemon's state. Raises UnavailableError if it does not answer."""
        return Call(ask(m.Status(0), lambda answer: answer.status))

    @call
    def control(self, /, call: str, **arguments: Any) -> Call[dict[str, Any]]:
        """Runs an operator command (`kvstore/daemon/operator/` defines them) and returns its answer.

        Raises DeniedError if the command is refused, UnavailableError if the daemon does not answer.
        """
        return Call(
            ask(
                m.Control(0, call, arguments),
                lambda answer: answer.status if isinstance(answer, m.Report) else {"value": answer.value},
            )
        )

    @call
    def ping(self) -> Call[None]:
        """Makes an empty round trip. Raises UnavailableError if the daemon does not answer."""
        return Call(ask(m.Ping(0), lambda _: None))


def ask(message: Any, result: Callable[[Any], R]) -> Callable[[Exchange], Flow[R]]:
    """Returns a flow that sends one request and converts its answer. The flow raises DeniedError."""

    def flow(exchange: Exchange) -> Flow[R]:
        return result(checked((yield message)))

    return flow


def explain(exchange: Exchange, tenant: str, model: str, chain: Chain) -> Flow[list[dict[str, Any]]]:
    """Returns the state of keys: a map per key and namespace."""
    blocks: list[dict[str, Any]] = []
    for at in range(0, len(chain), EXPLAIN_KEYS):
        part = chain.part(at, EXPLAIN_KEYS)
        blocks += checked((yield m.Explain(0, tenant, model, part.key_bytes, part.joined))).blocks
    return blocks
