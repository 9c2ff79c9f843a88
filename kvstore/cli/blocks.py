"""Commands about blocks by their keys: looking at them, bringing them up, forgetting them, keeping them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvstore.cli.ns import NamespaceArgument
from kvstore.cli.shared.keys import batches
from kvstore.cli.shared.options import (
    CHANGING_S,
    DEFAULT_SOCKET,
    JsonOption,
    SocketOption,
    YesOption,
    asking,
    confirm,
    named,
    show,
)
from kvstore.cli.why import why
from kvstore.config import parse_duration
from kvstore.errors import MisuseError

app = typer.Typer(no_args_is_help=True, help="Look at blocks, bring them up, forget them.")
pin_app = typer.Typer(no_args_is_help=True, help="Keep blocks for some time, whatever else needs room.")

KeysArgument = Annotated[
    list[str], typer.Argument(metavar="KEY...", help="Keys in hex, or files with a key a line.")
]

app.command("show")(why)


@app.command()
def prefetch(
    id: NamespaceArgument,
    keys: KeysArgument,
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Bring the start of a chain up into DRAM, as far as there is room.

    Exit codes: 0 some blocks are or will be there, 1 none, 2 an error.

    Example: kvstore blocks prefetch 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c...
    """
    _about("prefetch", "are or will be in DRAM", socket, id, keys, as_json)


@app.command()
def invalidate(
    id: NamespaceArgument,
    keys: KeysArgument,
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Forget blocks, on every tier. What continues them is a miss until they are stored again.

    Exit codes: 0 some were there, 1 none, 2 an error.

    Example: kvstore blocks invalidate 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c... --yes
    """
    confirm(yes, f"this forgets blocks of namespace {id!r:.80}")
    _about("invalidate", "forgotten", socket, id, keys, as_json)


@pin_app.command("add")
def add_pin(
    id: NamespaceArgument,
    keys: KeysArgument,
    *,
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="How long, at most 1d.")] = "1h",
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Keep blocks where they are for some time.

    Exit codes: 0 some are kept, 1 none, 2 an error.

    Example: kvstore pin add 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c... --for 1h
    """
    seconds = named("--for", parse_duration, duration)
    if not 0 < seconds <= 86400:
        raise MisuseError(f"--for is {duration}", "more than 0, and at most 1d")
    _about("pin", "pinned", socket, id, keys, as_json, ttl_s=seconds)


@pin_app.command("remove")
def remove_pin(
    id: NamespaceArgument,
    keys: KeysArgument,
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Keep blocks no longer than others.

    Exit codes: 0 some were pinned, 1 none, 2 an error.

    Example: kvstore pin remove 156dc0aeb7a10bca91a0111fbfe736c4 3f7a0c...
    """
    _about("unpin", "not pinned any more", socket, id, keys, as_json)


def _about(call: str, done: str, socket: str, id: str, what: list[str], as_json: bool, **more: Any) -> None:
    """Asks for blocks and says how many it was about. Exits with 1 if it was about none."""
    parts = list(batches(what))
    asked = sum(len(raw) // size for raw, size in parts)
    with asking(socket, CHANGING_S) as client:
        changed = sum(
            client.control(call, namespace=id, keys=raw, key_bytes=size, **more)["value"]
            for raw, size in parts
        )
    values = {"namespace": id, "keys": asked, "blocks": changed}
    show(values, as_json, lambda: f"{changed} of {asked} blocks {done}")
    if not changed:
        raise typer.Exit(1)
