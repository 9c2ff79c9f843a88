"""Commands about devices of tiers: queues, writes, states, adding and removing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from kvstore.cli.shared import completion
from kvstore.cli.shared.changes import DryRunOption, change
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import DaemonOptions, named
from kvstore.cli.shared.output import cell, pairs, table
from kvstore.cli.tier import TierArgument
from kvstore.config import (
    device_patch,
    device_table,
    device_values,
    format_size,
    parse_size,
    parse_write_budget,
)
from kvstore.errors import MisuseError

app = Commands(help="Show, add, remove, drain or fence the devices of tiers.")

_COLUMNS = [
    "device",
    "state",
    "bandwidth",
    "queued",
    "moving",
    "admission",
    "written/day",
    "drive writes/day",
]

NewDeviceArgument = Annotated[
    str, Argument(metavar="NAME", help="Name of the new device: nvme for nvme.path; nvme1 for another one.")
]


@app.command("list")
def list_devices(*, daemon: DaemonOptions) -> None:
    """List the devices of tiers: state, queues and bytes written.

    Example: kvstore device list
    """
    devices = daemon.ask("devices")["devices"]
    daemon.show({"devices": devices}, lambda: table(_COLUMNS, map(_row, devices)))


@app.command("show")
def show_device(tier: TierArgument, *, daemon: DaemonOptions) -> None:
    """Show the queues and the admission of one device.

    Example: kvstore device show nvme
    """
    found = daemon.ask("device", name=tier)
    daemon.show(found, lambda: pairs("device", _flat(found)))


@app.command("set")
def set_device(
    tier: TierArgument,
    state: Annotated[
        Literal["serving", "draining", "fenced"],
        Argument(
            help="serving: reads and writes; draining: reads only; fenced: neither, its blocks are misses."
        ),
    ],
    *,
    daemon: DaemonOptions,
) -> None:
    """Set the state of a device until the next change or restart.

    Example: kvstore device set nvme draining
    """
    found = daemon.ask("set_device", name=tier, state=state, instead_of=None)
    daemon.show(found, lambda: pairs("device", _flat(found)))


@app.command("add")
def add_device(
    name: NewDeviceArgument,
    path: Annotated[Path, Argument(help="An empty folder on the device.")],
    *,
    limit: Annotated[str, Option(metavar="SIZE", help="Limit of the device.")] = "8GiB",
    write_budget: Annotated[
        str,
        Option(
            metavar="SIZE", help="Bytes written per day, or a multiple of the limit such as 1x; 0: unlimited."
        ),
    ] = "0",
    dry_run: DryRunOption = False,
    daemon: DaemonOptions,
) -> None:
    """Add a device to the NVMe tier, now and after restarts.

    Example: kvstore device add nvme1 /mnt/nvme1/kvstore --limit 2TiB --dry-run
    """
    budget = named("--write-budget", lambda text: parse_write_budget(text, 1) and text, write_budget)
    size = named("--limit", parse_size, limit)
    added = {"path": str(path.absolute()), "limit": size, "write_budget": budget}
    change(daemon, device_patch(name, added), dry_run)


@app.command("remove")
def remove_device(
    name: Annotated[
        str, Argument(metavar="NAME", help="Name of the device.", autocompletion=completion.tiers)
    ],
    *,
    dry_run: DryRunOption = False,
    daemon: DaemonOptions,
) -> None:
    """Remove a device from the NVMe tier, now and after restarts.

    The device serves reads until it is empty. Blocks that only this device stores are evicted. The last
    device cannot be removed.

    Example: kvstore device remove nvme1 --dry-run
    """
    if device_values(name, daemon.ask("settings", part=device_table(name))["value"]) is None:
        raise MisuseError(f"no device {name!r:.80} is configured", "`kvstore device list` lists the devices")
    change(daemon, device_patch(name, None), dry_run)


def _flat(device: dict[str, Any]) -> dict[str, Any]:
    """Returns the device without nested maps."""
    rest = {name: value for name, value in device.items() if not isinstance(value, dict)}
    for field in ("queued_bytes", "moving_bytes"):
        word = field.removesuffix("_bytes")
        rest |= {f"{word}_{name}_bytes": value for name, value in device[field].items()}
    admission = device["admission"]
    budget = format_size(admission["bytes_a_day"]) if admission["bytes_a_day"] else None
    return {**rest, **admission, "bytes_a_day": budget}


def _failures(device: dict[str, Any]) -> list[str]:
    """Returns what a device does not do although its state allows it."""
    reads, writes = device["state"] != "fenced", device["state"] == "serving"
    failing = {
        "hangs": device["hangs"],
        "reads fail": reads and not device["readable"],
        "writes fail": writes and not device["writable"],
    }
    return [name for name, fails in failing.items() if fails]


def _row(device: dict[str, Any]) -> list[str]:
    """Returns a device as cells of `_COLUMNS`."""
    admission = device["admission"]
    threshold = f" from {admission['threshold']:.2f}" if admission["threshold"] else ""
    return [
        device["name"],
        ", ".join([device["state"], *_failures(device)]),
        f"{format_size(device['bandwidth_bytes_per_s'])}/s",
        *(format_size(sum(device[field].values())) for field in ("queued_bytes", "moving_bytes")),
        admission["mode"] + threshold,
        format_size(device["written_in_a_day_bytes"]),
        cell("", device["drive_writes_a_day"]),
    ]
