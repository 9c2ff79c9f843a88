"""Commands that drive a live daemon: the demo, and trace replay with real bytes."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskProgressColumn, TextColumn
from typer import Option

from kvstore import Client
from kvstore.cli.lab.options import TraceArgument
from kvstore.cli.shared.options import DaemonOptions, named, unwind_on_sigterm, url_of
from kvstore.cli.shared.output import console, pairs, progress_bar
from kvstore.config import parse_duration, parse_size
from kvstore.errors import MisuseError


def demo(
    stay: Annotated[
        bool, Option("--stay", help="Keep the daemon and a dashboard running until Ctrl-C.")
    ] = False,
) -> None:
    """Show hits by tier, a crash without loss, limits and tenants.

    Starts a daemon in a temporary folder, replays chats, kills the daemon midway, and compares every byte.
    Takes less than a minute.

    Exit codes: 0 every promise was kept, 1 one was not, 2 an error.

    Example: kvstore demo
    """
    from kvstore.lab.demo.chats import run  # noqa: PLC0415
    from kvstore.lab.demo.report import WIDTH  # noqa: PLC0415

    unwind_on_sigterm()
    shown = console()
    shown.width = min(shown.width, WIDTH) if shown.is_terminal else WIDTH
    if not run(shown, _program(), stay):
        raise typer.Exit(1)


def _program() -> str:
    """Returns the words that start this program again: `kvstore` if that is in PATH, otherwise a path."""
    typed = Path(sys.argv[0]).absolute()
    if typed.name == "__main__.py":
        return f"{_quoted(Path(sys.executable))} -m kvstore"
    found = shutil.which(typed.name)
    if not typed.is_file() or (found is not None and Path(found).samefile(typed)):
        return typed.name
    return _quoted(typed)


def _quoted(path: Path) -> str:
    """Returns a path for a shell, relative to the current folder if it lies there."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def replay(
    trace: TraceArgument,
    *,
    serve: Annotated[bool, Option("--serve", help="Start a daemon for this replay.")] = False,
    requests: Annotated[int | None, Option(help="Replay only the first N requests of the trace.")] = None,
    concurrency: Annotated[int, Option(help="Number of workers, which share one client.")] = 4,
    speed: Annotated[float, Option(help="1: as recorded, 2: twice as fast, 0: without pauses.")] = 0,
    block_bytes: Annotated[str, Option(metavar="SIZE", help="Payload of a block.")] = "64KiB",
    deadline: Annotated[str, Option(metavar="TIME", help="Deadline of each call.")] = "5s",
    dram: Annotated[str, Option(metavar="SIZE", help="With --serve: DRAM limit. Without it: 1GiB.")] = "",
    nvme: Annotated[
        str, Option(metavar="SIZE", help="With --serve: NVMe limit; 0: no NVMe tier. Without it: 8GiB.")
    ] = "",
    data: Annotated[
        Path | None, Option(metavar="DIR", help="With --serve: NVMe folder. Without it: a temporary folder.")
    ] = None,
    daemon: DaemonOptions,
) -> None:
    """Replay a trace against a daemon and verify every byte.

    Exit codes: 0 all bytes are correct, 1 some are wrong, 2 an error.

    Example: kvstore replay trace.jsonl --serve --dram 512MiB --nvme 3GiB
    """
    from kvstore.lab import replay as lab  # noqa: PLC0415
    from kvstore.lab.local_daemon import LocalDaemon  # noqa: PLC0415
    from kvstore.lab.traces import Trace  # noqa: PLC0415

    if not serve and (dram or nvme or data):
        raise MisuseError("--dram, --nvme and --data belong to --serve", "add --serve")
    options = lab.Options(requests, concurrency, speed, named("--block-bytes", parse_size, block_bytes))
    deadline_s = named("--deadline", parse_duration, deadline)
    reader = Trace(trace)
    with ExitStack() as stack:
        url = url_of(daemon.socket)
        if serve:
            unwind_on_sigterm()
            url = stack.enter_context(LocalDaemon(_settings(dram, nvme, data))).url
        client = stack.enter_context(Client(url, deadline_s=deadline_s))
        hits = TextColumn("{task.fields[requests]} requests, {task.fields[hit]:.1f} % hits")
        hidden = daemon.as_json and not sys.stderr.isatty()
        bar = stack.enter_context(progress_bar(TaskProgressColumn(), hits, hidden=hidden))
        task = bar.add_task("replay", total=1.0, requests=0, hit=0.0)

        def progress(share: float, total: lab.Tally) -> None:
            hit = 100 * total.served / max(1, total.asked)
            bar.update(task, completed=share, requests=total.requests, hit=hit)

        result = lab.replay(client, reader, options, progress)
    values = asdict(result)
    daemon.show(values, lambda: pairs("replay", {"trace": trace.name, **values}))
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
            raise MisuseError("--nvme 0 and --data exclude each other", "omit one of them")
        del settings["nvme"]
    return settings
