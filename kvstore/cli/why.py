"""The command that says what is known of blocks: where they are, what keeps them, why they went."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvstore import Client
from kvstore.cli.shared import completion
from kvstore.cli.shared.keys import keys_of
from kvstore.cli.shared.options import DEFAULT_SOCKET, JsonOption, SocketOption, url_of
from kvstore.cli.shared.tables import cell, plain

app = typer.Typer()


@app.command()
def why(
    what: Annotated[str, typer.Argument(metavar="KEY|FILE", help="A key in hex, or a file of keys.")],
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    tenant: Annotated[
        str, typer.Option(help="Only this tenant's namespaces.", autocompletion=completion.tenants)
    ] = "",
    model: Annotated[str, typer.Option(help="Only namespaces of this model.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Show where a block is, what keeps it, and when and why it was last evicted, refused or dropped.

    Exit codes: 0 something is known of it, 1 nothing is, 2 an error.

    Example: kvstore why 3f7a0c... --socket /run/kvstore/kvstore.sock
    """
    keys = keys_of(what)
    with Client(url_of(socket), deadline_s=10.0) as client:
        known = [_shown(block) for block in client.explain(keys, tenant, model)]
    if as_json:
        typer.echo(json.dumps({"keys": len(keys), "blocks": known}))
    elif len(keys) == 1:
        for block in known:
            Console().print(_one(block))
    elif known:
        Console().print(_many(known))
    if not known:
        if not as_json:
            typer.echo("nothing is known of it" if len(keys) == 1 else "nothing is known of them", err=True)
        raise typer.Exit(1)


def _shown(block: dict[str, Any]) -> dict[str, Any]:
    """The same with keys as text."""
    keys = {name: block[name].hex() for name in ("key", "parent") if name in block}
    return block | keys


def _one(block: dict[str, Any]) -> Table:
    """All that is known of a block."""
    table = Table("block", "", box=box.SIMPLE_HEAD)
    for name in ("key", "tenant", "model", "revision", "shard", "state"):
        if block[name]:
            table.add_row(name, plain(str(block[name])))
    for copy in block.get("copies", ()):
        says = f", {copy['says']}" if copy["says"] else ""
        where = f"extent {copy['extent']}, slot {copy['slot']}, {copy['users']} users"
        table.add_row(copy["tier"], plain(f"{where}; policy {copy['policy']}{says}"))
    if "children" in block:
        parent = (
            f"{block['parent']} ({block['parent_state']})"
            if block["parent"]
            else "none: the start of a chain"
        )
        table.add_row("parent", parent)
        table.add_row("children", str(block["children"]))
        table.add_row("moving", ", ".join(block["moving"]) or "no")
        table.add_row("pinned", _for(block["pinned_s"]))
        table.add_row("expires", "never" if block["expires_s"] is None else f"in {_for(block['expires_s'])}")
    if block.get("uses"):
        table.add_row("use", f"{block['class']}; last {_for(block['last_used_s'])} ago")
    for decision in block["decisions"]:
        table.add_row(*_decision(decision))
    return table


def _decision(decision: dict[str, Any]) -> tuple[str, str]:
    parts = [f"{_for(decision['ago_s'])} ago" + (f" ({decision['tier']})" if decision["tier"] else "")]
    if decision["score"] is not None:
        parts.append(f"{decision['score']:.3g} uses/s expected")
    return decision["what"], ", ".join([*parts, *filter(None, [decision["class"]])])


def _many(blocks: list[dict[str, Any]]) -> Table:
    """A line a block."""
    table = Table(
        "key", "tenant", "model", "state", "where", "children", "pinned", "last", box=box.SIMPLE_HEAD
    )
    for block in blocks:
        where = ", ".join(f"{c['tier']} {c['extent']}:{c['slot']}" for c in block.get("copies", ()))
        pinned = "yes" if block.get("pinned_s") is not None else ""
        last = " ".join(_decision(block["decisions"][0])).split(", ")[0] if block["decisions"] else ""
        children = str(block.get("children", ""))
        names = (plain(block[name]) for name in ("tenant", "model", "state"))
        table.add_row(f"{block['key'][:16]}", *names, where, children, pinned, last)
    return table


def _for(seconds: float | None) -> str:
    return "no" if seconds is None else cell("time_s", float(seconds))
