"""Commands about namespaces: list, show, publish, delete."""

from __future__ import annotations

from typing import Annotated, Any

from rich import box
from rich.table import Table
from typer import Argument, Option

from kvstore.cli.shared import completion
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import CHANGE_DEADLINE_S, DaemonOptions, YesOption, confirm, pages
from kvstore.cli.shared.tables import cell, pairs

app = Commands(no_args_is_help=True, help="List namespaces, publish or empty one.")

NamespaceArgument = Annotated[
    str,
    Argument(
        metavar="ID", help="Id of the namespace, see `kvstore ns list`.", autocompletion=completion.namespaces
    ),
]


@app.command("list")
def list_namespaces(
    *,
    tenant: Annotated[
        str, Option(help="Only namespaces of this tenant.", autocompletion=completion.tenants)
    ] = "",
    daemon: DaemonOptions,
) -> None:
    """List open namespaces with their tenants and models.

    Example: kvstore ns list --tenant chat
    """
    with daemon.client() as client:
        found = list(pages(client, "namespaces", "number", tenant=tenant))
    daemon.show({"namespaces": found}, lambda: _many(found))


def _many(found: list[dict[str, Any]]) -> Table:
    names = ("id", "tenant", "model", "revision", "shard", "block", "published to", "ttl")
    table = Table(*names, box=box.SIMPLE_HEAD)
    for row in found:
        layout = row["layout"] or {}
        of_model = (cell(name, layout.get(name, "")) for name in ("model", "revision", "shard"))
        block, readers = cell("block_bytes", row["block_bytes"]), ", ".join(row["published_to"])
        ttl = cell("ttl_s", row["ttl_s"]) if row["ttl_s"] else ""
        table.add_row(row["id"], row["tenant"], *of_model, block, readers, ttl)
    return table


@app.command("show")
def show_namespace(id: NamespaceArgument, *, daemon: DaemonOptions) -> None:
    """Show one namespace and its layout.

    Example: kvstore ns show 156dc0aeb7a10bca91a0111fbfe736c4
    """
    with daemon.client() as client:
        _print(client.control("namespace", id=id), daemon)


def _print(found: dict[str, Any], daemon: DaemonOptions) -> None:
    layout = found["layout"] or {}
    rest = {name: value for name, value in found.items() if name not in ("layout", *layout)}
    daemon.show(found, lambda: pairs("namespace", rest | {"ttl_s": found["ttl_s"] or None} | layout))


@app.command()
def publish(
    id: NamespaceArgument,
    tenants: Annotated[
        list[str],
        Argument(metavar="TENANT...", help="Tenants that may read it.", autocompletion=completion.tenants),
    ],
    *,
    daemon: DaemonOptions,
) -> None:
    """Publish a namespace to these tenants and to no others.

    Example: kvstore ns publish 156dc0aeb7a10bca91a0111fbfe736c4 batch
    """
    _publish(daemon, id, tenants)


@app.command()
def unpublish(id: NamespaceArgument, *, daemon: DaemonOptions) -> None:
    """Publish a namespace to no other tenant any more.

    Example: kvstore ns unpublish 156dc0aeb7a10bca91a0111fbfe736c4
    """
    _publish(daemon, id, [])


def _publish(daemon: DaemonOptions, id: str, tenants: list[str]) -> None:
    with daemon.client(CHANGE_DEADLINE_S) as client:
        client.control("publish", namespace=id, tenants=tenants, instead_of=None)
        _print(client.control("namespace", id=id), daemon)


@app.command()
def forget(id: NamespaceArgument, *, yes: YesOption = False, daemon: DaemonOptions) -> None:
    """Delete all blocks of a namespace on every tier. The namespace stays open.

    Example: kvstore ns forget 156dc0aeb7a10bca91a0111fbfe736c4 --yes
    """
    confirm(yes, f"this deletes all blocks of namespace {id!r:.80}")
    with daemon.client(CHANGE_DEADLINE_S) as client:
        deleted = client.control("forget", namespace=id)["value"]
    daemon.show({"namespace": id, "deleted_blocks": deleted}, lambda: f"{deleted} blocks deleted")
