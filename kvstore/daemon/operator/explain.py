"""Selects the namespaces that an explain request covers, and names them in its answer."""

from __future__ import annotations

from typing import Any

from kvstore.core.actions import Explained
from kvstore.daemon.tenancy.auth import Authenticator, Principal
from kvstore.daemon.tenancy.namespaces import Namespaces


def namespaces_for(
    who: Principal, authenticator: Authenticator, namespaces: Namespaces, tenant: str, model: str
) -> tuple[int, ...]:
    """Returns the numbers of open namespaces of a tenant and a model, "" for any.

    Only operators get namespaces of other tenants than their own.
    """
    number = authenticator.number(tenant) if tenant else None
    if tenant and number is None:
        return ()
    return tuple(
        space.number
        for space in namespaces
        if space.number
        and (who.operator or space.tenant == who.tenant)
        and number in (None, space.tenant)
        and (not model or (space.layout is not None and space.layout.model == model))
    )


def named(
    explained: Explained, authenticator: Authenticator, namespaces: Namespaces
) -> tuple[dict[str, Any], ...]:
    """Returns the blocks of an answer with names instead of the namespace's number."""
    return tuple(_named(block, authenticator, namespaces) for block in explained.blocks)


def _named(block: dict[str, Any], authenticator: Authenticator, namespaces: Namespaces) -> dict[str, Any]:
    rest = {name: value for name, value in block.items() if name != "namespace"}
    space = namespaces.at(block["namespace"])
    assert space is not None, "the answer comes in the same turn of the event loop"
    layout = space.layout
    return {
        "tenant": authenticator.name(space.tenant),
        "model": layout.model if layout is not None else "",
        "revision": layout.revision if layout is not None else "",
        "shard": layout.shard if layout is not None else "",
        **rest,
    }
