"""The command that tells what happened: what was decided about blocks, what became of the daemon."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer

from kvstore import Client
from kvstore.cli.shared import completion
from kvstore.cli.shared.options import DEFAULT_SOCKET, SocketOption, asking, named
from kvstore.config import parse_duration
from kvstore.errors import UnavailableError, printable

app = typer.Typer()

_EVERY_S = 0.5
_SHOWN = 100
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events; none of `what`: all kinds. Nothing from before `since` (Unix time, s)."""

    tenant: str
    what: tuple[str, ...]
    since: float


@app.command()
def events(
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    tenant: Annotated[str, typer.Option(help="Only of this tenant.", autocompletion=completion.tenants)] = "",
    what: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Only these, by commas.", autocompletion=completion.kinds),
    ] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="Only those of the last 5m, say.")] = "",
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, help="At most.", show_default="100, with --since all"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Tell what was decided about blocks and what happened to the daemon, newest last. For operators.

    With --follow it waits for a daemon that is away, and goes on with the next one.

    Example: kvstore events --follow --what dropped,refused
    """
    names = tuple(name.strip() for name in what.split(",")) if what else ()
    begin = time.time() - named("--since", parse_duration, since) if since else 0.0
    if lines is None and not since:
        lines = _SHOWN
    try:
        with asking(socket, _DEADLINE_S) as client:
            wanted = Wanted(tenant, names, begin)
            for event in _told(client, wanted, lines, follow):
                typer.echo(json.dumps(event) if as_json else line_of(event))
    except KeyboardInterrupt:
        if not follow:
            raise


def _told(client: Client, wanted: Wanted, lines: int | None, follow: bool) -> Iterator[dict[str, Any]]:
    """Events that there are, the latest `lines` of them (None: all), and those that come."""
    # Of all kinds, the latest are the last ones: no need to read the others.
    after = -lines if lines and wanted == Wanted("", (), 0.0) else 0
    last: deque[dict[str, Any]] = deque(maxlen=lines)
    for page in _pages(client, after, wanted):
        last.extend(page["events"])
    yield from last
    while follow:
        time.sleep(_EVERY_S)
        try:
            for news in _pages(client, page["next"], wanted, page["instance"]):
                if news["lost"]:
                    typer.echo(f"{news['lost']} events were overwritten before they were read", err=True)
                yield from news["events"]
                page = news
        except UnavailableError:
            typer.echo("the daemon does not answer, waiting for it", err=True)
            _wait_for(client)


def _pages(
    client: Client, after: int, wanted: Wanted, instance: str | None = None
) -> Iterator[dict[str, Any]]:
    """Pages up to the end, one at least; from the beginning if this is not that `instance` any more."""
    going = True
    while going:
        page = client.control("events", after=after, tenant=wanted.tenant, what=wanted.what)
        if instance not in (None, page["instance"]):
            typer.echo("the daemon has been started anew", err=True)
            after, instance = 0, page["instance"]
            continue
        going = page["next"] != after
        after = page["next"]
        yield page | {"events": [event for event in page["events"] if event["at_s"] >= wanted.since]}


def _wait_for(client: Client) -> None:
    while True:
        time.sleep(_EVERY_S)
        try:
            client.ping()
        except UnavailableError:
            continue
        return


def line_of(event: dict[str, Any]) -> str:
    """An event as a line of text."""
    at = datetime.fromtimestamp(event["at_s"]).astimezone()
    score = "" if event["score"] is None else f"{event['score']:.3g} uses/s expected"
    about = (event["tenant"], event["namespace"], event["key"], score, event["detail"])
    when = at.isoformat(sep=" ", timespec="milliseconds")
    line = " ".join([when, f"{event['what']:<11}", f"{event['tier']:<4}", *filter(None, about)])
    return printable(line).rstrip()
