"""What the commands share: how errors end them, and options that several take."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from kvstore.config import Config
from kvstore.errors import KVStoreError, MisuseError

_T = TypeVar("_T")


class Group(TyperGroup):
    """Prints errors that kvstore raises on purpose in one line; all others are bugs and keep their trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as e:
            typer.echo(f"error: {e}", err=True)
            raise typer.Exit(2) from None


SocketOption = Annotated[
    str,
    typer.Option("--socket", envvar="KVSTORE_SOCKET", help="The daemon's socket, a path or a unix:// URL."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file [default: none].")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
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


def unwind_on_sigterm() -> None:
    """Ends by an exception, so that processes and folders of our own go too."""

    def end(_number: int, _frame: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
