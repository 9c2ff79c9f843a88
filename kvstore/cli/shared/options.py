"""What the commands share: how errors end them, and options that several take."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from kvstore import Client
from kvstore.config import Config
from kvstore.errors import KVStoreError, MisuseError, printable

_T = TypeVar("_T")


class Group(TyperGroup):
    """Prints errors that kvstore raises on purpose in one line; all others are bugs and keep their trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as e:
            said = "\n".join(map(printable, str(e).splitlines()))
            typer.echo(f"error: {said}", err=True)
            raise typer.Exit(2) from None


SocketOption = Annotated[
    str,
    typer.Option("--socket", envvar="KVSTORE_SOCKET", help="The daemon's socket, a path or a unix:// URL."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file [default: none].")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
CHANGING_S = 60.0
"""How long a change may take: emptying a namespace, say."""

_PIPED_COLUMNS = 200
DEFAULT_SOCKET = str(Config().daemon.socket)


def url_of(socket: str) -> str:
    """The URL of a socket that was given as one, or as a path."""
    return socket if "://" in socket else f"unix://{Path(socket).absolute()}"


def named(option: str, parse: Callable[[str], _T], text: str) -> _T:
    """What an option's text means; MisuseError names the option."""
    try:
        return parse(text)
    except MisuseError as e:
        raise MisuseError(f"{option}: {e.message}", e.hint) from None


def asking(socket: str, deadline_s: float = 10.0) -> Client:
    """A client whose calls raise what is wrong."""
    return Client(url_of(socket), deadline_s=deadline_s, strict=True)


def pages(client: Client, call: str, by: str, **more: Any) -> Iterator[dict[str, Any]]:
    """All rows of what a daemon tells a page at a time; `by` names the field that pages go by."""
    page = client.control(call, **more)
    yield from page[call]
    while page["more"]:
        page = client.control(call, after=page[call][-1][by], **more)
        yield from page[call]


def confirm(yes: bool, what: str) -> None:
    """Raises MisuseError, which says what would be done, without --yes."""
    if not yes:
        raise MisuseError(what, "add --yes if that is what you want")


def show(values: Any, as_json: bool, drawn: Callable[[], RenderableType]) -> None:
    """Prints values as JSON, or as they are drawn: into a pipe without colours, in long lines."""
    if as_json:
        typer.echo(json.dumps(values))
        return
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(width=_PIPED_COLUMNS if piped else None).print(drawn())


def unwind_on_sigterm() -> None:
    """Ends by an exception, so that processes and folders of our own go too."""

    def end(_number: int, _frame: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
