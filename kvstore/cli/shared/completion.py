"""Shell completion of names that a running daemon knows. Returns nothing if the daemon answers too slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from kvstore import Client
from kvstore.cli.shared.options import DEFAULT_SOCKET, pages, url_of
from kvstore.core.policy import POLICIES
from kvstore.daemon.operator.event_log import KINDS
from kvstore.errors import KVStoreError

_DEADLINE_S = 0.3


def tenants(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names of tenants."""
    return _known(ctx, incomplete, lambda c: (row["name"] for row in pages(c, "tenants", "name")))


def namespaces(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes ids of open namespaces."""
    return _known(ctx, incomplete, lambda c: (row["id"] for row in pages(c, "namespaces", "number")))


def tiers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names of tiers."""
    return _known(ctx, incomplete, lambda c: (row["name"] for row in c.control("status")["tiers"]))


def policies(incomplete: str) -> list[str]:
    """Completes names of built-in eviction policies."""
    return [name for name in POLICIES if name.startswith(incomplete)]


def kinds(incomplete: str) -> list[str]:
    """Completes the last name of a comma-separated list of event kinds."""
    *before, last = incomplete.split(",")
    return [",".join([*before, kind]) for kind in KINDS if kind.startswith(last)]


def _known(ctx: typer.Context, incomplete: str, names: Callable[[Client], Iterable[str]]) -> list[str]:
    socket = ctx.params.get("socket") or DEFAULT_SOCKET
    try:
        with Client(url_of(socket), deadline_s=_DEADLINE_S, strict=True) as client:
            return [name for name in names(client) if name.startswith(incomplete)]
    except KVStoreError:
        return []
