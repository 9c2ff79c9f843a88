"""Who may ask about which namespaces, and what those are called for people."""

from __future__ import annotations

from typing import Any

from kvstore.core.actions import Explained
from kvstore.daemon.tenancy.auth import Principal
from kvstore.daemon.tenancy.tenancy import Tenancy


def namespaces_for(who: Principal, tenancy: Tenancy, tenant: str, model: str) -> tuple[int, ...]:
    """Numbers of the open namespaces that a peer asks about; of others than its own only for operators."""
    asked = tenancy.registry.number(tenant) if tenant else None
    if tenant and asked is None:
        return ()
    return tuple(
        space.number
        for space in tenancy.namespaces
        if space.number
        and (who.operator or space.tenant == who.tenant)
        and asked in (None, space.tenant)
        and (not model or (space.layout is not None and space.layout.model == model))
    )


def named(explained: Explained, tenancy: Tenancy) -> tuple[dict[str, Any], ...]:
    """The maps of an answer, with names instead of the namespace's number."""
    return tuple(_named(block, tenancy) for block in explained.blocks)


def _named(block: dict[str, Any], tenancy: Tenancy) -> dict[str, Any]:
    rest = {name: value for name, value in block.items() if name != "namespace"}
    space = tenancy.namespaces.at(block["namespace"])
    assert space is not None, "the answer comes before anything else happens"
    layout = space.layout
    return {
        "tenant": tenancy.registry.name(space.tenant),
        "model": layout.model if layout is not None else "",
        "revision": layout.revision if layout is not None else "",
        "shard": layout.shard if layout is not None else "",
        **rest,
    }
