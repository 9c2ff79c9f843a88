"""The command that prints events: decisions about blocks, and events of the daemon."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer
from typer import Option

from kvstore import Client
from kvstore.cli.shared import completion
from kvstore.cli.shared.options import DEFAULT_SOCKET, DaemonOptions, SocketOption, named
from kvstore.config import parse_duration
from kvstore.errors import UnavailableError, printable

_EVERY_S = 0.5
_SHOWN = 100
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects events: of a tenant, of some kinds (empty: all), and since a Unix time in seconds."""

    tenant: str
    what: tuple[str, ...]
    since: float


def events(
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    follow: Annotated[bool, Option("--follow", "-f", help="Print new events until Ctrl-C.")] = False,
    tenant: Annotated[
        str, Option(help="Only events of this tenant.", autocompletion=completion.tenants)
    ] = "",
    what: Annotated[
        str,
        Option(
            metavar="NAMES", help="Only these kinds, separated by commas.", autocompletion=completion.kinds
        ),
    ] = "",
    since: Annotated[str, Option(metavar="TIME", help="Only events of this time span, such as 5m.")] = "",
    lines: Annotated[
        int | None,
        Option(
            "--lines",
            "-n",
            min=0,
            help="Maximum number of past events. Without it: 100, or all with --since.",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print decisions about blocks and events of the daemon.

    The newest event is the last. Lines that are too long for the terminal have shorter keys and no namespace;
    in a pipe and with --json they are whole. With --follow, the command waits while the daemon is down and
    continues after its restart. For operators.

    Example: kvstore events --follow --what dropped,refused
    """
    names = tuple(name.strip() for name in what.split(",")) if what else ()
    since_s = time.time() - named("--since", parse_duration, since) if since else 0.0
    if lines is None and not since:
        lines = _SHOWN
    try:
        with DaemonOptions(socket).client(_DEADLINE_S) as client:
            for event in _events(client, Filter(tenant, names, since_s), lines, follow):
                typer.echo(json.dumps(event) if as_json else line_of(event, columns()))
    except KeyboardInterrupt:
        if not follow:
            raise


def _events(client: Client, wanted: Filter, lines: int | None, follow: bool) -> Iterator[dict[str, Any]]:
    """Yields the latest `lines` past events (None: all), then new ones if `follow`."""
    # Without a filter, the daemon can skip to the last `lines` events.
    after = -lines if lines and wanted == Filter("", (), 0.0) else 0
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
            typer.echo("the daemon does not answer: waiting for it", err=True)
            _wait_for(client)


def _pages(
    client: Client, after: int, wanted: Filter, instance: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yields at least one page, up to the end; starts over if the daemon's instance has changed."""
    more = True
    while more:
        page = client.control("events", after=after, tenant=wanted.tenant, what=wanted.what)
        if instance not in (None, page["instance"]):
            typer.echo("the daemon has restarted", err=True)
            after, instance = 0, page["instance"]
            continue
        more = page["next"] != after
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


def columns() -> int:
    """Returns the width of the terminal in columns, 0 for output to a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def line_of(event: dict[str, Any], width: int = 0) -> str:
    """Returns an event as a line of text, shortened towards `width` columns; 0: not shortened.

    Shortened lines have a time without year and zone, if necessary no namespace and a key of 16 digits.
    """
    at = datetime.fromtimestamp(event["at_s"]).astimezone()
    namespace, key = event["namespace"], event["key"]
    if not width:
        return _joined(event, at.isoformat(sep=" ", timespec="milliseconds"), namespace, key)
    when = f"{at:%m-%d %H:%M:%S}.{at.microsecond // 1000:03}"
    lines = [_joined(event, when, *parts) for parts in ((namespace, key), ("", key), ("", key[:16]))]
    return next((line for line in lines if len(line) <= width), lines[-1])


def _joined(event: dict[str, Any], when: str, namespace: str, key: str) -> str:
    score = "" if event["score"] is None else f"{event['score']:.3g} uses/s expected"
    details = (event["tenant"], namespace, key, score, event["detail"])
    line = " ".join([when, f"{event['what']:<11}", f"{event['tier']:<4}", *filter(None, details)])
    return printable(line).rstrip()
