"""Commands about blocks by key: explain, prefetch, invalidate, pin."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Argument, Option

from kvstore.cli.ns import NamespaceArgument
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.keys import batches
from kvstore.cli.shared.options import CHANGE_DEADLINE_S, DaemonOptions, YesOption, confirm, named
from kvstore.cli.why import why
from kvstore.config import parse_duration
from kvstore.errors import MisuseError

app = Commands(no_args_is_help=True, help="Explain, prefetch or invalidate blocks.")
pin_app = Commands(no_args_is_help=True, help="Pin blocks, so that they are not evicted for some time.")

KeysArgument = Annotated[
    list[str], Argument(metavar="KEY...", help="Keys in hex, or files with one key per line.")
]

app.command("show")(why)


@app.command()
def prefetch(id: NamespaceArgument, keys: KeysArgument, *, daemon: DaemonOptions) -> None:
    """Load the start of a chain into DRAM, as far as there is room.

    Exit codes: 0 some blocks are or will be in DRAM, 1 none, 2 an error.

    Example: kvstore blocks prefetch 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c...
    """
    _apply("prefetch", "are or will be in DRAM", daemon, id, keys)


@app.command()
def invalidate(
    id: NamespaceArgument, keys: KeysArgument, *, yes: YesOption = False, daemon: DaemonOptions
) -> None:
    """Invalidate blocks on every tier. Blocks that continue them are misses until they are stored again.

    Exit codes: 0 some blocks were stored, 1 none, 2 an error.

    Example: kvstore blocks invalidate 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c... --yes
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
    """Pin blocks for some time: they are not evicted.

    Exit codes: 0 some blocks are pinned, 1 none, 2 an error.

    Example: kvstore pin add 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c... --for 1h
    """
    seconds = named("--for", parse_duration, duration)
    if not 0 < seconds <= 86400:
        raise MisuseError(f"--for is {duration}", "more than 0, at most 1d")
    _apply("pin", "pinned", daemon, id, keys, ttl_s=seconds)


@pin_app.command("remove")
def remove_pin(id: NamespaceArgument, keys: KeysArgument, *, daemon: DaemonOptions) -> None:
    """Remove the pins of blocks.

    Exit codes: 0 some blocks were pinned, 1 none, 2 an error.

    Example: kvstore pin remove 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c...
    """
    _apply("unpin", "unpinned", daemon, id, keys)


def _apply(call: str, done: str, daemon: DaemonOptions, id: str, texts: list[str], **arguments: Any) -> None:
    """Sends keys to an operator command and prints how many blocks it affected. Exits with 1 if none."""
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
