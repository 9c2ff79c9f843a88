"""Commands about namespaces: which are open, who may read them, and the end of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvstore.cli.shared import completion
from kvstore.cli.shared.options import (
    CHANGING_S,
    DEFAULT_SOCKET,
    JsonOption,
    SocketOption,
    YesOption,
    asking,
    confirm,
    pages,
    show,
)
from kvstore.cli.shared.tables import cell, pairs

app = typer.Typer(no_args_is_help=True, help="List namespaces, publish one, forget one.")

NamespaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="Its id, from `kvstore ns list`.", autocompletion=completion.namespaces
    ),
]


@app.command("list")
def list_namespaces(
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    tenant: Annotated[str, typer.Option(help="Only this tenant's.", autocompletion=completion.tenants)] = "",
    as_json: JsonOption = False,
) -> None:
    """Show the namespaces that clients have opened: whose they are, and of which model.

    Example: kvstore ns list --tenant chat
    """
    with asking(socket) as client:
        found = list(pages(client, "namespaces", "number", tenant=tenant))
    show({"namespaces": found}, as_json, lambda: _many(found))


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
def show_namespace(
    id: NamespaceArgument, *, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False
) -> None:
    """Show one namespace, with its layout.

    Example: kvstore ns show 156dc0aeb7a10bca91a0111fbfe736c4
    """
    with asking(socket) as client:
        _print(client.control("namespace", id=id), as_json)


def _print(found: dict[str, Any], as_json: bool) -> None:
    layout = found["layout"] or {}
    rest = {name: value for name, value in found.items() if name not in ("layout", *layout)}
    show(found, as_json, lambda: pairs("namespace", rest | {"ttl_s": found["ttl_s"] or None} | layout))


@app.command()
def publish(
    id: NamespaceArgument,
    tenants: Annotated[
        list[str], typer.Argument(metavar="TENANT...", help="Who.", autocompletion=completion.tenants)
    ],
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Let these tenants, and no others, read a namespace.

    Example: kvstore ns publish 156dc0aeb7a10bca91a0111fbfe736c4 batch
    """
    _publish(socket, id, tenants, as_json)


@app.command()
def unpublish(
    id: NamespaceArgument, *, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False
) -> None:
    """Let no other tenant read a namespace any more.

    Example: kvstore ns unpublish 156dc0aeb7a10bca91a0111fbfe736c4
    """
    _publish(socket, id, [], as_json)


def _publish(socket: str, id: str, tenants: list[str], as_json: bool) -> None:
    with asking(socket, CHANGING_S) as client:
        client.control("publish", namespace=id, tenants=tenants, instead_of=None)
        _print(client.control("namespace", id=id), as_json)


@app.command()
def forget(
    id: NamespaceArgument,
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete all blocks of a namespace, on every tier. It stays open.

    Example: kvstore ns forget 156dc0aeb7a10bca91a0111fbfe736c4 --yes
    """
    confirm(yes, f"this deletes all blocks of namespace {id!r:.80}")
    with asking(socket, CHANGING_S) as client:
        deleted = client.control("forget", namespace=id)["value"]
    show({"namespace": id, "deleted_blocks": deleted}, as_json, lambda: f"{deleted} blocks deleted")
