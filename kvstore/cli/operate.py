"""Commands that run a daemon, show its status, and check its requirements."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.progress import DownloadColumn, TaskProgressColumn
from rich.table import Table
from typer import Argument, Option

from kvstore import Client
from kvstore import config as configuration
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import ConfigOption, DaemonOptions, JsonOption, url_of
from kvstore.cli.shared.output import pairs, progress_bar, show, size, table
from kvstore.cli.tier import overview
from kvstore.errors import MisuseError
from kvstore.socket_paths import default_folder

if TYPE_CHECKING:
    from kvstore.tiers.nvme.key_files import MasterKey

config_app = Commands(help="Check a configuration, or print an example.")

_MOST_FINDINGS = 1000
_LEVELS = {"ok": "[green]ok", "warn": "[yellow]warn", "fail": "[red]fail"}


def serve(config: ConfigOption = None) -> None:
    """Run the daemon.

    SIGTERM and SIGINT end it. SIGHUP reloads the configuration.

    Without -c, the DRAM tier gets a quarter of the memory, and there is no NVMe tier.

    Example: kvstore serve -c /etc/kvstore/kvstore.toml
    """
    # No other command needs the daemon's modules, which are slow to import.
    from kvstore.daemon.main import run  # noqa: PLC0415

    raise typer.Exit(run(config))


def admin(config: ConfigOption = None) -> None:
    """Serve REST, metrics and the dashboard of the local daemon.

    SIGTERM and SIGINT end it. SIGHUP reloads tokens and rates.

    Example: kvstore admin -c /etc/kvstore/kvstore.toml
    """
    from kvstore.admin.main import run  # noqa: PLC0415

    raise typer.Exit(run(config))


def supervise(config: ConfigOption = None) -> None:
    """Run the daemon, and restart it with its DRAM when it dies.

    For machines without systemd. SIGUSR1 restarts the daemon, SIGHUP reloads its configuration, SIGTERM and
    SIGINT end both.

    Example: kvstore supervise -c kvstore.toml
    """
    log_format = configuration.load(config).daemon.log_format
    from kvstore.daemon.supervise import Supervisor  # noqa: PLC0415

    raise typer.Exit(Supervisor([] if config is None else ["-c", str(config)], log_format).run())


def status(daemon: DaemonOptions) -> None:
    """Show the state and the counters of a running daemon.

    Example: kvstore status --json
    """
    with Client(url_of(daemon.socket)) as client:
        state = client.status()
    daemon.show(state, lambda: Group(*_status_tables(state)))


def _status_tables(state: dict[str, Any]) -> Iterator[Table]:
    separate = ("tiers", "tenants", "counters", "network", "events", "tracing")
    yield pairs("daemon", {name: value for name, value in state.items() if name not in separate})
    yield overview(list(state.get("tiers", ())))
    if network := state.get("network"):
        yield pairs("network", network | network.pop("counters"))
    if events := state.get("events"):
        yield pairs("events", events)
    if tracing := state.get("tracing"):
        yield pairs("tracing", tracing)
    yield pairs("counter", state.get("counters", {}))


def fsck(
    folder: Annotated[Path | None, Argument(help="Folder of an NVMe tier.")] = None,
    *,
    config: Annotated[
        Path | None, Option("--config", "-c", help="Configuration file whose NVMe folders are checked.")
    ] = None,
    repair: Annotated[bool, Option("--repair", help="Delete bad records and orphaned slabs.")] = False,
    key_file: Annotated[
        Path | None, Option("--key-file", help="File of the master key, to check encrypted blocks too.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the NVMe folders of a stopped daemon, or repair them.

    Compares every record with its slab and verifies the checksum of every block. With --json, prints one
    object per folder.

    Exit codes: 0 no problems, 1 problems remain, 2 could not check, 3 all problems were repaired.

    Example: kvstore fsck -c /etc/kvstore/kvstore.toml
    """
    from kvstore.tiers.nvme.key_files import MasterKey  # noqa: PLC0415

    if (folder is None) == (config is None):
        raise MisuseError(
            "fsck needs a folder or a configuration", "kvstore fsck FOLDER, or kvstore fsck -c CONFIG"
        )
    folders: dict[Path, int | None] = {} if folder is None else {folder: None}
    if folder is None:
        loaded = configuration.load(config)
        if not loaded.nvme.paths:
            raise MisuseError(f"{config} sets no nvme.path", "there is nothing to check")
        folders = {path: loaded.nvme.limits[name] for name, path in loaded.nvme.paths.items()}
        key_file = key_file or loaded.encryption.key_file
    master = MasterKey.load(key_file)
    codes = [_check(path, limit, repair, master, as_json) for path, limit in folders.items()]
    if any(codes):
        raise typer.Exit(1 if 1 in codes else 3)


def _check(folder: Path, limit: int | None, repair: bool, master: MasterKey | None, as_json: bool) -> int:
    """Checks one folder and prints the result. Returns the exit code."""
    from kvstore.tiers.nvme.fsck import fsck as check  # noqa: PLC0415

    hidden = as_json and not sys.stderr.isatty()
    with progress_bar(TaskProgressColumn(), DownloadColumn(binary_units=True), hidden=hidden) as bar:
        task = bar.add_task("fsck", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        report = check(folder, limit, repair, progress, master)
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
    first = [{**asdict(f), "key": f.key.hex()} for f in islice(report.findings(), _MOST_FINDINGS)]
    values = {**summary, "kinds": counts, "findings": first}
    show(values, as_json, lambda: pairs("fsck", summary | {kind.value: n for kind, n in counts.items()}))
    if report.unchecked:
        typer.echo(f"{report.unchecked} encrypted blocks were not checked: pass --key-file", err=True)
    if not found:
        return 0
    return 3 if report.repaired else 1


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check this machine against a configuration, with remedies.

    Checks the kernel, packages, limits, huge pages, the socket, NVMe folders, GPUs and systemd.

    Exit codes: 0 no check failed, 1 a check failed, 2 the configuration is invalid.

    Example: kvstore doctor -c /etc/kvstore/kvstore.toml
    """
    from kvstore.daemon.doctor import FAIL, examine  # noqa: PLC0415

    chosen = (
        configuration.load(config) if config else configuration.choose(configuration.read_memory()).config()
    )
    lines = examine(chosen)
    rows = ((_LEVELS[line.level], line.name, escape(line.found), escape(line.advice)) for line in lines)
    values = {"lines": [asdict(line) for line in lines]}
    show(values, as_json, lambda: table(("", "check", "found", "what to do"), rows))
    if any(line.level == FAIL for line in lines):
        raise typer.Exit(1)


@config_app.command("check")
def config_check(
    file: Annotated[Path, Argument(help="Configuration file (TOML).")], as_json: JsonOption = False
) -> None:
    """Validate a configuration file as the daemon does.

    Example: kvstore config check kvstore.toml
    """
    from kvstore.daemon.operator.settings import LiveConfig  # noqa: PLC0415

    tenants = LiveConfig(file).config.tenants
    lines = [f"{file}: ok", *(f"tenant {name}: {_summary(tenant)}" for name, tenant in tenants.items())]
    typer.echo(json.dumps({"file": str(file), "tenants": list(tenants)}) if as_json else "\n".join(lines))


def _summary(tenant: configuration.Tenant) -> str:
    """Returns members, share and quotas of a tenant as text."""
    expired = sum(token.expires is not None and token.expires <= datetime.now(UTC) for token in tenant.tokens)
    members = f"{len(tenant.uids)} users, {len(tenant.gids)} groups, {len(tenant.tokens)} tokens"
    parts = [members + (f" ({expired} expired)" if expired else ""), f"share {tenant.share:g}"]
    for tier, quota in tenant.quotas.items():
        if tier == "hbm" and quota == configuration.TierQuota():
            continue  # without GPUs, this line would be noise
        limit = "all" if quota.limit is None else size(quota.limit)
        parts.append(f"{tier} from {size(quota.floor)} to {limit}")
    return ", ".join(parts)


@config_app.command("example")
def config_example() -> None:
    """Print a commented configuration file with every key at its default.

    Example: kvstore config example > kvstore.toml
    """
    typer.echo(configuration.example(default_folder()), nl=False)
