"""The `kvstore` command. Exit codes: 0 fine, 1 a check failed, 2 an error that is printed with its hint.

`fsck` has one more: 3, problems were found and all of them repaired.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from typer.core import TyperGroup

from kvstore import Client
from kvstore import config as configuration
from kvstore.config import format_size, parse_duration, parse_size
from kvstore.errors import KVStoreError, MisuseError

_T = TypeVar("_T")


class _Group(TyperGroup):
    """Prints errors that kvstore raises on purpose in one line; all others are bugs and keep their trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as e:
            typer.echo(f"error: {e}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Check a configuration, or print one to start from.")
app.add_typer(config_app, name="config")

_DEFAULT = configuration.Config()
_Socket = Annotated[
    str,
    typer.Option("--socket", envvar="KVSTORE_SOCKET", help="The daemon's socket, a path or a unix:// URL."),
]
_Config = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file [default: none].")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_DEFAULT_SOCKET = str(_DEFAULT.daemon.socket)
_MOST_FINDINGS = 1000
_LEVELS = {"ok": "[green]ok", "warn": "[yellow]warn", "fail": "[red]fail"}


@app.callback()
def main() -> None:
    """A KV-cache offload daemon for LLM inference."""


@app.command()
def serve(config: _Config = None) -> None:
    """Run the daemon until SIGTERM or SIGINT; SIGHUP reads the configuration again."""
    # Here, because no other command needs the daemon's modules.
    from kvstore.daemon.main import run  # noqa: PLC0415

    raise typer.Exit(run(config))


@app.command()
def supervise(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file [default: none].")] = None,
) -> None:
    """Run the daemon where there is no systemd: restart it when it dies, and keep its DRAM meanwhile.

    SIGHUP is passed on, SIGUSR1 restarts the daemon, SIGTERM and SIGINT end both.
    """
    configuration.load(config)
    from kvstore.daemon.supervise import Supervisor  # noqa: PLC0415

    raise typer.Exit(Supervisor([] if config is None else ["-c", str(config)]).run())


@app.command()
def status(socket: _Socket = _DEFAULT_SOCKET, as_json: _Json = False) -> None:
    """Show what a running daemon holds and has done."""
    with Client(_url(socket)) as client:
        state = client.status()
    if as_json:
        typer.echo(json.dumps(state))
        return
    console = Console()
    console.print(_pairs("daemon", {k: v for k, v in state.items() if k not in ("tiers", "counters")}))
    console.print(_tier_table(list(state.get("tiers", ()))))
    console.print(_pairs("counter", state.get("counters", {})))


@app.command()
def fsck(
    folder: Annotated[Path | None, typer.Argument(help="The folder of an NVMe tier.")] = None,
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Instead: the TOML file that names it.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Delete bad records and orphan slabs.")] = False,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="The master key, to check encrypted blocks too.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Check a stopped daemon's NVMe folder: every record, slab and checksum.

    Exit codes: 0 clean, 1 problems found and left, 2 could not check, 3 problems found and all repaired.
    """
    from kvstore.tiers.nvme.fsck import fsck as check  # noqa: PLC0415
    from kvstore.tiers.nvme.keys import MasterKey  # noqa: PLC0415

    limit_bytes = None
    if (folder is None) == (config is None):
        raise MisuseError("fsck takes one folder", "kvstore fsck FOLDER, or kvstore fsck -c CONFIG")
    if folder is None:
        nvme = configuration.load(config).nvme
        if nvme.path is None:
            raise MisuseError(f"{config} names no nvme.path", "there is nothing to check")
        folder, limit_bytes = nvme.path, nvme.limit
    master = MasterKey.load(key_file)
    with _checking(hidden=as_json and not sys.stderr.isatty()) as bar:
        task = bar.add_task("fsck", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        report = check(folder, limit_bytes, repair, progress, master)
    counts = report.counts()
    found = sum(counts.values())
    summary = {
        "folder": str(folder),
        "extents": report.extents,
        "records": len(report.blocks) + len(report.damaged),
        "checked_bytes": report.checked_bytes,
        "encrypted_blocks_not_checked": report.unchecked,
        "problems": found,
        "repaired": found if report.repaired else 0,
    }
    if as_json:
        some = [{**asdict(f), "key": f.key.hex()} for f in islice(report.findings(), _MOST_FINDINGS)]
        typer.echo(json.dumps({**summary, "kinds": counts, "findings": some}))
    else:
        Console().print(_pairs("fsck", summary | {kind.value: n for kind, n in counts.items()}))
    if report.unchecked:
        typer.echo(f"{report.unchecked} encrypted blocks were not checked: give --key-file", err=True)
    if found:
        raise typer.Exit(3 if report.repaired else 1)


@app.command()
def doctor(config: _Config = None, as_json: _Json = False) -> None:
    """Check this machine against a configuration, and say what to do about what is not right.

    Exit codes: 0 nothing fails, 1 something does, 2 no such configuration.
    """
    from kvstore.daemon.doctor import FAIL, examine  # noqa: PLC0415

    lines = examine(configuration.load(config))
    if as_json:
        typer.echo(json.dumps({"lines": [asdict(line) for line in lines]}))
    else:
        table = Table("", "check", "found", "what to do", box=box.SIMPLE_HEAD)
        for line in lines:
            table.add_row(_LEVELS[line.level], line.name, escape(line.found), escape(line.advice))
        Console().print(table)
    if any(line.level == FAIL for line in lines):
        raise typer.Exit(1)


@config_app.command("check")
def config_check(file: Path) -> None:
    """Read FILE as the daemon would and say what is wrong with it."""
    configuration.load(file)
    typer.echo(f"{file}: ok")


@config_app.command("example")
def config_example() -> None:
    """Print a commented configuration with every key at its default."""
    typer.echo(configuration.example(), nl=False)


@app.command()
def demo() -> None:
    """Start a daemon, chat with it, kill it midway, and show what was served from where."""
    from kvstore.lab.demo import run  # noqa: PLC0415

    _unwind_on_sigterm()
    if not run(Console()):
        raise typer.Exit(1)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Chat requests or agent conversations, JSON lines or .zst.")],
    *,
    socket: _Socket = _DEFAULT_SOCKET,
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
    as_json: _Json = False,
) -> None:
    """Drive a daemon with a recorded trace and compare every byte that it serves."""
    from kvstore.lab import replay as lab  # noqa: PLC0415
    from kvstore.lab.served import ServedDaemon  # noqa: PLC0415
    from kvstore.lab.traces import Trace  # noqa: PLC0415

    if not serve and (dram or nvme or data):
        raise MisuseError("--dram, --nvme and --data are for a daemon of the replay's own", "add --serve")
    options = lab.Options(requests, concurrency, speed, _named("--block-bytes", parse_size, block_bytes))
    deadline_s = _named("--deadline", parse_duration, deadline)
    reader = Trace(trace)
    with ExitStack() as stack:
        url = _url(socket)
        if serve:
            _unwind_on_sigterm()
            url = stack.enter_context(ServedDaemon(_settings(dram, nvme, data))).url
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
        Console().print(_pairs("replay", {"trace": trace.name, **result.to_map()}))
    if result.wrong_blocks:
        raise typer.Exit(1)


def _settings(dram: str, nvme: str, data: Path | None) -> dict[str, dict[str, object]]:
    settings: dict[str, dict[str, object]] = {"dram": {}, "nvme": {}}
    if dram:
        settings["dram"]["limit"] = _named("--dram", parse_size, dram)
    if nvme:
        settings["nvme"]["limit"] = _named("--nvme", parse_size, nvme)
    if data:
        settings["nvme"]["path"] = data.absolute()
    if settings["nvme"].get("limit") == 0:
        if data:
            raise MisuseError("--nvme 0 leaves out the tier that --data is for", "drop one of the two")
        del settings["nvme"]
    return settings


def _named(option: str, parse: Callable[[object], _T], text: str) -> _T:
    try:
        return parse(text)
    except MisuseError as e:
        raise MisuseError(f"{option}: {e.message}", e.hint) from None


def _url(socket: str) -> str:
    return socket if "://" in socket else f"unix://{Path(socket).absolute()}"


def _unwind_on_sigterm() -> None:
    """Ends by an exception, so that a daemon of our own and its folder go too."""

    def end(_number: int, _frame: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


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


def _checking(hidden: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=hidden,
    )


def _tier_table(tiers: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for tier in tiers for key in tier))
    table = Table("full", *map(_words, columns), box=box.SIMPLE_HEAD)
    table.collapse_padding = True
    for tier in tiers:
        limit_bytes, used_bytes = tier.get("limit_bytes", 0), tier.get("used_bytes", 0)
        bar = ProgressBar(total=max(1, limit_bytes), completed=used_bytes, width=8)
        table.add_row(bar, *(_cell(key, tier.get(key)) for key in columns))
    return table


def _pairs(title: str, values: dict[str, Any]) -> Table:
    table = Table(title, "value", box=box.SIMPLE_HEAD)
    for name, value in values.items():
        table.add_row(_words(name), _cell(name, value))
    return table


def _words(name: str) -> str:
    if name.endswith("_per_s"):
        return name.removesuffix("_per_s").replace("_", " ").replace("gib", "GiB") + "/s"
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    """A value for people, by what its name says about its unit."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if "bytes" in name.split("_"):
        return format_size(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"{1000 * value:.2f} ms" if value < 1 else f"{value:,.1f} s"
    if name.endswith("_ratio"):
        return f"{100 * value:.2f} %"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
