"""Calls that are about no namespace: deletion of models and tenants, explanations, operator commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.client.calls.call import Call, Exchange, Flow, call
from kvstore.client.calls.chain import Chain
from kvstore.client.calls.scope import checked, value_of
from kvstore.client.checks import check_deadline, check_names, check_owner
from kvstore.types import EXPLAIN_KEYS, Key, check_tenant
from kvstore.wire import messages as m


class ClientCalls:
    """The calls of a client that are about no namespace."""

    @call
    def invalidate(self, model: str = "", revision: str = "") -> Call[int]:
        """Deletes the tenant's namespaces of this model and revision ("": any); returns how many blocks.

        Needs the role admin. Returns 0 also if the daemon is away or refuses (unless strict).
        """
        check_names(model, revision)
        return Call(lambda exchange: forget_all(exchange, model, revision), miss=int)

    @call
    def delete_tenant(self, name: str, deadline_s: float = 60.0) -> Call[int]:
        """Deletes all blocks of a tenant; returns how many.

        For admins of the tenant, and for operators. Raises DeniedError or UnavailableError if it fails.
        """
        name = check_tenant(name)
        return Call(lambda exchange: delete_tenant(exchange, name), check_deadline(deadline_s))

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
        return Call(status)

    @call
    def control(self, /, call: str, **arguments: Any) -> Call[dict[str, Any]]:
        """Runs an operator command (`kvstore/daemon/operator/commands.py` lists them) and returns its answer.

        Raises DeniedError if the command is refused, UnavailableError if the daemon does not answer.
        """
        return Call(lambda exchange: control(exchange, call, arguments))

    @call
    def ping(self) -> Call[None]:
        """Makes an empty round trip. Raises UnavailableError if the daemon does not answer."""
        return Call(ping)


def forget_all(exchange: Exchange, model: str, revision: str) -> Flow[int]:
    """Deletes the tenant's namespaces of this model and revision, "" for any; how many blocks."""
    return value_of((yield m.Forget(0, 0, model, revision)))


def delete_tenant(exchange: Exchange, name: str) -> Flow[int]:
    """Deletes all blocks of a tenant; how many."""
    return value_of((yield m.DeleteTenant(0, name)))


def explain(exchange: Exchange, tenant: str, model: str, chain: Chain) -> Flow[list[dict[str, Any]]]:
    """The state of keys: a map per key and namespace."""
    blocks: list[dict[str, Any]] = []
    for at in range(0, len(chain), EXPLAIN_KEYS):
        part = chain.part(at, EXPLAIN_KEYS)
        blocks += checked((yield m.Explain(0, tenant, model, part.key_bytes, part.joined))).blocks
    return blocks


def status(exchange: Exchange) -> Flow[dict[str, Any]]:
    """The daemon's state."""
    state: dict[str, Any] = checked((yield m.Status(0))).status
    return state


def control(exchange: Exchange, name: str, arguments: dict[str, Any]) -> Flow[dict[str, Any]]:
    """The answer to an operator command."""
    answer = checked((yield m.Control(0, name, arguments)))
    return answer.status if isinstance(answer, m.Report) else {"value": answer.value}


def ping(exchange: Exchange) -> Flow[None]:
    """An empty round trip."""
    checked((yield m.Ping(0)))
