"""The command that explains blocks: their copies, pins and latest decisions."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from kvstore import Client
from kvstore.cli.shared import completion
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.keys import keys_of
from kvstore.cli.shared.options import DaemonOptions, url_of
from kvstore.cli.shared.tables import cell, plain

app = Commands()


@app.command()
def why(
    what: Annotated[str, Argument(metavar="KEY|FILE", help="A key in hex, or a file with one key per line.")],
    *,
    tenant: Annotated[
        str, Option(help="Only namespaces of this tenant.", autocompletion=completion.tenants)
    ] = "",
    model: Annotated[str, Option(help="Only namespaces of this model.")] = "",
    daemon: DaemonOptions,
) -> None:
    """Explain blocks: copies, pins, and when and why a block was last evicted, refused or dropped.

    Exit codes: 0 the daemon knows a key, 1 it knows none, 2 an error.

    Example: kvstore why 3f7a0c... --socket /run/kvstore/kvstore.sock
    """
    keys = keys_of(what)
    with Client(url_of(daemon.socket), deadline_s=10.0) as client:
        known = [_in_hex(block) for block in client.explain(keys, tenant, model)]
    if daemon.as_json:
        typer.echo(json.dumps({"keys": len(keys), "blocks": known}))
    elif len(keys) == 1:
        for block in known:
            Console().print(_one(block))
    elif known:
        Console().print(_many(known))
    if not known:
        if not daemon.as_json:
            typer.echo("unknown key" if len(keys) == 1 else "unknown keys", err=True)
        raise typer.Exit(1)


def _in_hex(block: dict[str, Any]) -> dict[str, Any]:
    """Returns the block with its keys in hex."""
    keys = {name: block[name].hex() for name in ("key", "parent") if name in block}
    return block | keys


def _one(block: dict[str, Any]) -> Table:
    """Returns a table about one block."""
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
        table.add_row("pinned", _duration(block["pinned_s"]))
        expires = "never" if block["expires_s"] is None else f"in {_duration(block['expires_s'])}"
        table.add_row("expires", expires)
    if block.get("uses"):
        table.add_row("use", f"{block['class']}; last {_duration(block['last_used_s'])} ago")
    for decision in block["decisions"]:
        table.add_row(*_decision(decision))
    return table


def _decision(decision: dict[str, Any]) -> tuple[str, str]:
    parts = [f"{_duration(decision['ago_s'])} ago" + (f" ({decision['tier']})" if decision["tier"] else "")]
    if decision["score"] is not None:
        parts.append(f"{decision['score']:.3g} uses/s expected")
    return decision["what"], ", ".join([*parts, *filter(None, [decision["class"]])])


def _many(blocks: list[dict[str, Any]]) -> Table:
    """Returns a table with one row per block."""
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


def _duration(seconds: float | None) -> str:
    return "no" if seconds is None else cell("time_s", float(seconds))
