"""Commands that drive a live daemon: the demo, and the replay of traces with real bytes."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvstore import Client
from kvstore.cli.shared.options import (
    DEFAULT_SOCKET,
    JsonOption,
    SocketOption,
    named,
    unwind_on_sigterm,
    url_of,
)
from kvstore.cli.shared.tables import pairs
from kvstore.config import parse_duration, parse_size
from kvstore.errors import MisuseError

app = typer.Typer()


@app.command()
def demo() -> None:
    """Start a daemon, chat with it, kill it midway, and show what was served from where.

    Example: kvstore demo
    """
    from kvstore.lab.demo import run  # noqa: PLC0415

    unwind_on_sigterm()
    if not run(Console()):
        raise typer.Exit(1)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Chat requests or agent conversations, JSON lines or .zst.")],
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    serve: Annotated[bool, typer.Option("--serve", help="Start a daemon for this replay.")] = False,
    requests: Annotated[int | None, typer.Option(help="Only the trace's first N requests.")] = None,
    concurrency: Annotated[int, typer.Option(help="Workers that share one client.")] = 4,
    speed: Annotated[float, typer.Option(help="1: the trace's clock, 2: twice as fast, 0: no waits.")] = 0,
    block_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Payload of a block.")] = "64KiB",
    deadline: Annotated[str, typer.Option(metavar="TIME", help="Longest wait for one call.")] = "5s",
    dram: Annotated[
        str, typer.Option(metavar="SIZE", help="With --serve: DRAM limit.", show_default="1GiB")
    ] = "",
    nvme: Annotated[
        str, typer.Option(metavar="SIZE", help="With --serve: NVMe limit, 0 for none.", show_default="8GiB")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --serve: NVMe folder, temporary without.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Drive a daemon with a recorded trace and compare every byte that it serves.

    Exit codes: 0 every byte was right, 1 some were not, 2 an error.

    Example: kvstore replay trace.jsonl --serve --dram 512MiB --nvme 3GiB
    """
    from kvstore.lab import replay as lab  # noqa: PLC0415
    from kvstore.lab.local_daemon import LocalDaemon  # noqa: PLC0415
    from kvstore.lab.traces import Trace  # noqa: PLC0415

    if not serve and (dram or nvme or data):
        raise MisuseError("--dram, --nvme and --data are for a daemon of the replay's own", "add --serve")
    options = lab.Options(requests, concurrency, speed, named("--block-bytes", parse_size, block_bytes))
    deadline_s = named("--deadline", parse_duration, deadline)
    reader = Trace(trace)
    with ExitStack() as stack:
        url = url_of(socket)
        if serve:
            unwind_on_sigterm()
            url = stack.enter_context(LocalDaemon(_settings(dram, nvme, data))).url
        client = stack.enter_context(Client(url, deadline_s=deadline_s))
        bar = stack.enter_context(_progress(hidden=as_json and not sys.stderr.isatty()))
        task = bar.add_task("replay", total=1.0, requests=0, hit=0.0)

        def progress(share: float, total: lab.Tally) -> None:
            hit = 100 * total.served / max(1, total.asked)
            bar.update(task, completed=share, requests=total.requests, hit=hit)

        result = lab.replay(client, reader, options, progress)
    if as_json:
        typer.echo(json.dumps(result.to_map()))
    else:
        Console().print(pairs("replay", {"trace": trace.name, **result.to_map()}))
    if result.wrong_blocks:
        raise typer.Exit(1)


def _settings(dram: str, nvme: str, data: Path | None) -> dict[str, dict[str, object]]:
    settings: dict[str, dict[str, object]] = {"dram": {}, "nvme": {}}
    if dram:
        settings["dram"]["limit"] = named("--dram", parse_size, dram)
    if nvme:
        settings["nvme"]["limit"] = named("--nvme", parse_size, nvme)
    if data:
        settings["nvme"]["path"] = data.absolute()
    if settings["nvme"].get("limit") == 0:
        if data:
            raise MisuseError("--nvme 0 leaves out the tier that --data is for", "drop one of the two")
        del settings["nvme"]
    return settings


def _progress(hidden: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[requests]} requests, {task.fields[hit]:.1f} % hits"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=hidden,
    )
