"""Options that several commands take."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from rich.console import RenderableType
from typer import Option

from kvstore import Client
from kvstore.cli.shared.output import show
from kvstore.errors import MisuseError

_T = TypeVar("_T")


SocketOption = Annotated[
    str,
    Option(
        "--socket",
        envvar="KVSTORE_SOCKET",
        help="Socket of the daemon: a path or a unix:// URL. Without it: this user's daemon, or the node's.",
    ),
]
ConfigOption = Annotated[
    Path | None, Option("--config", "-c", help="Configuration file (TOML). Without it: defaults.")
]
YesOption = Annotated[bool, Option("--yes", help="Confirm that blocks are deleted.")]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]

CHANGE_DEADLINE_S = 60.0
"""Deadline of changes, such as the deletion of a namespace."""

DEFAULT_SOCKET = ""
"""The client finds the socket: see `kvstore.socket_paths`."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """`--socket` and `--json`: for commands that ask a daemon and print its answer."""

    socket: SocketOption = DEFAULT_SOCKET
    as_json: JsonOption = False

    def client(self, deadline_s: float = 10.0) -> Client:
        """Returns a client whose calls raise errors."""
        return Client(url_of(self.socket), deadline_s=deadline_s, strict=True)

    def ask(self, call: str, /, deadline_s: float = 10.0, **arguments: Any) -> dict[str, Any]:
        """Returns the daemon's answer to one operator command. Raises DeniedError, UnavailableError."""
        with self.client(deadline_s) as client:
            return client.control(call, **arguments)

    def show(self, values: Any, render: Callable[[], RenderableType]) -> None:
        """Prints values as JSON with `--json`, otherwise as rendered."""
        show(values, self.as_json, render)


def url_of(socket: str) -> str:
    """Returns the URL of a socket given as a URL or a path. Empty for the default one."""
    return socket if "://" in socket or not socket else f"unix://{Path(socket).absolute()}"


def named(option: str, parse: Callable[[str], _T], text: str) -> _T:
    """Parses the value of an option. Raises MisuseError that names the option."""
    try:
        return parse(text)
    except MisuseError as e:
        raise MisuseError(f"{option}: {e.message}", e.hint) from None


def pages(client: Client, call: str, by: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Yields all rows of a paged operator command. `by` is the field that pages are ordered by."""
    page = client.control(call, **arguments)
    yield from page[call]
    while page["more"]:
        page = client.control(call, after=page[call][-1][by], **arguments)
        yield from page[call]


def confirm(yes: bool, what: str) -> None:
    """Raises MisuseError that says what the command would do, unless `yes`."""
    if not yes:
        raise MisuseError(what, "add --yes to confirm")


def unwind_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that child processes and temporary folders are removed."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
