"""Commands about blocks by key: explain, prefetch, invalidate, pin."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from typer import Argument, Option

from kvstore import Client
from kvstore.cli.ns import NamespaceArgument, TenantFilter
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.keys import batches, keys_of
from kvstore.cli.shared.options import CHANGE_DEADLINE_S, DaemonOptions, YesOption, confirm, named, url_of
from kvstore.cli.shared.output import cell, plain, table
from kvstore.config import parse_duration
from kvstore.errors import MisuseError

app = Commands(help="Explain, prefetch or invalidate blocks.")
pin_app = Commands(help="Protect blocks from eviction for some time.")

_COLUMNS = ("key", "tenant", "model", "state", "where", "children", "pinned", "last")

KeysArgument = Annotated[
    list[str], Argument(metavar="KEY", help="Keys in hex, or files with one key per line.")
]


@app.command("show")
def why(
    what: Annotated[str, Argument(metavar="KEY|FILE", help="A key in hex, or a file with one key per line.")],
    *,
    tenant: TenantFilter = "",
    model: Annotated[str, Option(help="Only namespaces of this model.")] = "",
    daemon: DaemonOptions,
) -> None:
    """Explain where a block is, and why it was evicted or refused.

    Shows copies, pins, and the latest decisions about each block.

    Exit codes: 0 the daemon knows a key, 1 it knows none, 2 an error.

    Example: kvstore why 3f7a0c9e
    """
    keys = keys_of(what)
    with Client(url_of(daemon.socket), deadline_s=10.0) as client:
        known = [_in_hex(block) for block in client.explain(keys, tenant, model)]
    if known or daemon.as_json:
        tables = map(_one, known) if len(keys) == 1 else [table(_COLUMNS, map(_row, known), whole=("key",))]
        daemon.show({"keys": len(keys), "blocks": known}, lambda: Group(*tables))
    else:
        typer.echo("unknown key" if len(keys) == 1 else "unknown keys", err=True)
    if not known:
        raise typer.Exit(1)


def _in_hex(block: dict[str, Any]) -> dict[str, Any]:
    """Returns the block with its keys in hex."""
    return block | {name: block[name].hex() for name in ("key", "parent") if name in block}


def _one(block: dict[str, Any]) -> Table:
    """Returns a table about one block."""
    shown = table(("block", ""))
    for name in ("key", "tenant", "model", "revision", "shard", "state"):
        if block[name]:
            shown.add_row(name, plain(str(block[name])))
    for copy in block.get("copies", ()):
        says = f", {copy['says']}" if copy["says"] else ""
        where = f"extent {copy['extent']}, slot {copy['slot']}, {copy['users']} users"
        shown.add_row(copy["tier"], plain(f"{where}; policy {copy['policy']}{says}"))
    if "children" in block:
        parent = "none: the start of a chain"
        if block["parent"]:
            parent = f"{block['parent']} ({block['parent_state']})"
        shown.add_row("parent", parent)
        shown.add_row("children", str(block["children"]))
        shown.add_row("moving", ", ".join(block["moving"]) or "no")
        shown.add_row("pinned", _duration(block["pinned_s"]))
        expires = "never" if block["expires_s"] is None else f"in {_duration(block['expires_s'])}"
        shown.add_row("expires", expires)
    if block.get("uses"):
        shown.add_row("use", f"{block['class']}; last {_duration(block['last_used_s'])} ago")
    for decision in block["decisions"]:
        shown.add_row(*_decision(decision))
    return shown


def _decision(decision: dict[str, Any]) -> tuple[str, str]:
    parts = [f"{_duration(decision['ago_s'])} ago" + (f" ({decision['tier']})" if decision["tier"] else "")]
    if decision["score"] is not None:
        parts.append(f"{decision['score']:.3g} uses/s expected")
    return decision["what"], ", ".join([*parts, *filter(None, [decision["class"]])])


def _row(block: dict[str, Any]) -> list[str]:
    """Returns a block as cells of `_COLUMNS`."""
    where = ", ".join(f"{c['tier']} {c['extent']}:{c['slot']}" for c in block.get("copies", ()))
    pinned = "yes" if block.get("pinned_s") is not None else ""
    last = " ".join(_decision(block["decisions"][0])).split(", ")[0] if block["decisions"] else ""
    names = (plain(block[name]) for name in ("tenant", "model", "state"))
    return [block["key"][:16], *names, where, str(block.get("children", "")), pinned, last]


def _duration(seconds: float | None) -> str:
    return "no" if seconds is None else cell("time_s", float(seconds))


@app.command()
def prefetch(id: NamespaceArgument, keys: KeysArgument, *, daemon: DaemonOptions) -> None:
    """Load the start of a chain into DRAM, as far as there is room.

    Exit codes: 0 some blocks are or will be in DRAM, 1 none, 2 an error.

    Example: kvstore blocks prefetch 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c9e
    """
    _apply("prefetch", "are or will be in DRAM", daemon, id, keys)


@app.command()
def invalidate(
    id: NamespaceArgument, keys: KeysArgument, *, yes: YesOption = False, daemon: DaemonOptions
) -> None:
    """Invalidate blocks on every tier.

    Blocks that continue an invalidated block are misses until it is stored again.

    Exit codes: 0 some blocks were stored, 1 none, 2 an error.

    Example: kvstore blocks invalidate 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c9e --yes
    """
    confirm(yes, f"this invalidates blocks of namespace {id!r:.80}")
    _apply("invalidate", "invalidated", daemon, id, keys)


@pin_app.command("add")
def add_pin(
    id: NamespaceArgument,
    keys: KeysArgument,
    *,
    duration: Annotated[str, Option("--for", metavar="TIME", help="Duration of the pin, at most 1d.")] = "1h",
    daemon: DaemonOptions,
) -> None:
    """Protect blocks from eviction for some time.

    Exit codes: 0 some blocks are pinned, 1 none, 2 an error.

    Example: kvstore pin add 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c9e --for 1h
    """
    seconds = named("--for", parse_duration, duration)
    if not 0 < seconds <= 86400:
        raise MisuseError(f"--for is {duration}", "more than 0, at most 1d")
    _apply("pin", "pinned", daemon, id, keys, ttl_s=seconds)


@pin_app.command("remove")
def remove_pin(id: NamespaceArgument, keys: KeysArgument, *, daemon: DaemonOptions) -> None:
    """Remove the pins of blocks.

    Exit codes: 0 some blocks were pinned, 1 none, 2 an error.

    Example: kvstore pin remove 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c9e
    """
    _apply("unpin", "unpinned", daemon, id, keys)


def _apply(call: str, done: str, daemon: DaemonOptions, id: str, texts: list[str], **arguments: Any) -> None:
    """Sends keys to an operator command and prints the number of affected blocks. Exits with 1 if none."""
    parts = list(batches(texts))
    asked = sum(len(raw) // size for raw, size in parts)
    with daemon.client(CHANGE_DEADLINE_S) as client:
        changed = sum(
            client.control(call, namespace=id, keys=raw, key_bytes=size, **arguments)["value"]
            for raw, size in parts
        )
    values = {"namespace": id, "keys": asked, "blocks": changed}
    daemon.show(values, lambda: f"{changed} of {asked} blocks {done}")
    if not changed:
        raise typer.Exit(1)
