"""Commands about the devices of tiers: what waits for them, what is written to them, what they are to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from kvstore.cli.shared import completion
from kvstore.cli.shared.changes import DryRunOption, change
from kvstore.cli.shared.options import DEFAULT_SOCKET, JsonOption, SocketOption, asking, named, show
from kvstore.cli.shared.tables import cell, pairs
from kvstore.cli.tier import TierArgument
from kvstore.config import format_size, parse_size, parse_write_budget
from kvstore.errors import MisuseError

app = typer.Typer(no_args_is_help=True, help="Look at the devices of tiers, fence, drain, add or remove one.")

NewDeviceArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="nvme, and what tells it apart: nvme1.")
]


@app.command("list")
def list_devices(*, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False) -> None:
    """Show the device of each tier: whether it works, what waits for it, how much is written.

    Example: kvstore device list
    """
    with asking(socket) as client:
        devices = list(client.control("devices")["devices"])
    show({"devices": devices}, as_json, lambda: _many(devices))


@app.command("show")
def show_device(
    tier: TierArgument, *, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False
) -> None:
    """Show one device: its queues by class, and what its admission lets in.

    Example: kvstore device show nvme
    """
    with asking(socket) as client:
        found = client.control("device", name=tier)
    show(found, as_json, lambda: pairs("device", _flat(found)))


@app.command("set")
def set_device(
    tier: TierArgument,
    state: Annotated[
        Literal["serving", "draining", "fenced"],
        typer.Argument(help="All; no more writes; nothing: what it has is a miss."),
    ],
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Have a device serve, drain or be fenced, until that is changed or the daemon starts again.

    Example: kvstore device set nvme draining
    """
    with asking(socket) as client:
        found = client.control("set_device", name=tier, state=state, instead_of=None)
    show(found, as_json, lambda: pairs("device", _flat(found)))


@app.command("add")
def add_device(
    name: NewDeviceArgument,
    path: Annotated[Path, typer.Argument(help="An empty folder on it.")],
    *,
    limit: Annotated[str, typer.Option(metavar="SIZE", help="Most that it may hold.")] = "8GiB",
    write_budget: Annotated[
        str, typer.Option(metavar="SIZE", help="Most written to it a day, or 1x: its limit; 0: no bound.")
    ] = "0",
    dry_run: DryRunOption = False,
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Add a device to the NVMe tier, now and for later starts.

    Example: kvstore device add nvme1 /mnt/nvme1/kvstore --limit 2TiB --dry-run
    """
    budget = named("--write-budget", lambda text: parse_write_budget(text, 1) and text, write_budget)
    size = named("--limit", parse_size, limit)
    added = {"path": str(path.absolute()), "limit": size, "write_budget": budget}
    change(socket, {"nvme": {"devices": {name: added}}}, dry_run, as_json)


@app.command("remove")
def remove_device(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name.", autocompletion=completion.tiers)],
    *,
    dry_run: DryRunOption = False,
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Remove a device from the NVMe tier: it is read until it is empty, and what only it has is evicted.

    Example: kvstore device remove nvme1 --dry-run
    """
    with asking(socket) as client:
        if client.control("settings", part=["nvme", "devices", name])["value"] is None:
            raise MisuseError(f"no device {name!r:.80} was added", "`kvstore device list` names them")
    change(socket, {"nvme": {"devices": {name: None}}}, dry_run, as_json)


def _flat(device: dict[str, Any]) -> dict[str, Any]:
    """The same without maps in it."""
    rest = {name: value for name, value in device.items() if not isinstance(value, dict)}
    for of in ("queued_bytes", "moving_bytes"):
        word = of.removesuffix("_bytes")
        rest |= {f"{word}_{name}_bytes": value for name, value in device[of].items()}
    admission = device["admission"]
    budget = format_size(admission["bytes_a_day"]) if admission["bytes_a_day"] else None
    return {**rest, **admission, "bytes_a_day": budget}


def _many(devices: list[dict[str, Any]]) -> Table:
    names = (
        "device of",
        "state",
        "bandwidth",
        "queued",
        "moving",
        "admission",
        "written in a day",
        "drive writes a day",
    )
    table = Table(*names, box=box.SIMPLE_HEAD)
    for device in devices:
        doing = [name for name in ("hangs", "readable", "writable") if device[name]]
        queued, moving = (sum(device[of].values()) for of in ("queued_bytes", "moving_bytes"))
        admission = device["admission"]
        sizes = (format_size(size) for size in (queued, moving))
        table.add_row(
            device["name"],
            ", ".join([device["state"], *doing]),
            f"{format_size(device['bandwidth_bytes_per_s'])}/s",
            *sizes,
            admission["mode"] + (f" from {admission['threshold']:.2f}" if admission["threshold"] else ""),
            format_size(device["written_in_a_day_bytes"]),
            cell("", device["drive_writes_a_day"]),
        )
    return table
