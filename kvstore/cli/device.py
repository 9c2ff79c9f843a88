"""Commands about the devices of tiers: what waits for them, what is written to them, what they are to do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from kvstore.cli.common import DEFAULT_SOCKET, JsonOption, SocketOption, asking, show
from kvstore.cli.tables import cell, pairs
from kvstore.cli.tier import TierArgument
from kvstore.config import format_size

app = typer.Typer(no_args_is_help=True, help="Look at the devices of tiers, fence or drain one.")


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
