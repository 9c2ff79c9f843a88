"""Commands about namespaces: list, show, publish, delete."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Option

from kvstore.cli.shared import completion
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import CHANGE_DEADLINE_S, DaemonOptions, YesOption, confirm, pages
from kvstore.cli.shared.output import cell, pairs, table

app = Commands(help="List, show, publish or empty namespaces.")

_COLUMNS = ("id", "tenant", "model", "revision", "shard", "block", "published to", "ttl")

NamespaceArgument = Annotated[
    str,
    Argument(
        metavar="ID", help="Id of the namespace, see `kvstore ns list`.", autocompletion=completion.namespaces
    ),
]

TenantFilter = Annotated[
    str, Option(help="Only namespaces of this tenant.", autocompletion=completion.tenants)
]


@app.command("list")
def list_namespaces(
    *,
    tenant: TenantFilter = "",
    daemon: DaemonOptions,
) -> None:
    """List open namespaces with their tenants and models.

    Example: kvstore ns list --tenant chat
    """
    with daemon.client() as client:
        found = list(pages(client, "namespaces", "number", tenant=tenant))
    daemon.show({"namespaces": found}, lambda: table(_COLUMNS, map(_row, found), whole=("id",)))


def _row(namespace: dict[str, Any]) -> list[str]:
    """Returns a namespace as cells of `_COLUMNS`."""
    layout = namespace["layout"] or {}
    of_model = (cell(name, layout.get(name, "")) for name in ("model", "revision", "shard"))
    block, readers = cell("block_bytes", namespace["block_bytes"]), ", ".join(namespace["published_to"])
    ttl = cell("ttl_s", namespace["ttl_s"]) if namespace["ttl_s"] else ""
    return [namespace["id"], namespace["tenant"], *of_model, block, readers, ttl]


@app.command("show")
def show_namespace(id: NamespaceArgument, *, daemon: DaemonOptions) -> None:
    """Show one namespace and its layout.

    Example: kvstore ns show 156dc0aeb7a10bca91a0111fbfe736c4
    """
    _print(daemon.ask("namespace", id=id), daemon)


def _print(found: dict[str, Any], daemon: DaemonOptions) -> None:
    layout = found["layout"] or {}
    rest = {name: value for name, value in found.items() if name not in ("layout", *layout)}
    daemon.show(found, lambda: pairs("namespace", rest | {"ttl_s": found["ttl_s"] or None} | layout))


@app.command()
def publish(
    id: NamespaceArgument,
    tenants: Annotated[
        list[str],
        Argument(
            metavar="TENANT", help="Tenants that may read the namespace.", autocompletion=completion.tenants
        ),
    ],
    *,
    daemon: DaemonOptions,
) -> None:
    """Allow these tenants, and no others, to read a namespace.

    Example: kvstore ns publish 156dc0aeb7a10bca91a0111fbfe736c4 batch
    """
    _publish(daemon, id, tenants)


@app.command()
def unpublish(id: NamespaceArgument, *, daemon: DaemonOptions) -> None:
    """Allow no other tenant to read a namespace.

    Example: kvstore ns unpublish 156dc0aeb7a10bca91a0111fbfe736c4
    """
    _publish(daemon, id, [])


def _publish(daemon: DaemonOptions, id: str, tenants: list[str]) -> None:
    with daemon.client(CHANGE_DEADLINE_S) as client:
        client.control("publish", namespace=id, tenants=tenants, instead_of=None)
        _print(client.control("namespace", id=id), daemon)


@app.command()
def forget(id: NamespaceArgument, *, yes: YesOption = False, daemon: DaemonOptions) -> None:
    """Delete all blocks of a namespace on every tier.

    The namespace stays open.

    Example: kvstore ns forget 156dc0aeb7a10bca91a0111fbfe736c4 --yes
    """
    confirm(yes, f"this deletes all blocks of namespace {id!r:.80}")
    deleted = daemon.ask("forget", CHANGE_DEADLINE_S, namespace=id)["value"]
    daemon.show({"namespace": id, "deleted_blocks": deleted}, lambda: f"{deleted} blocks deleted")
