"""Commands about tiers: their contents and state."""

from __future__ import annotations

from typing import Annotated, Any

from rich.table import Table
from typer import Argument

from kvstore.cli.shared import completion
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import DaemonOptions
from kvstore.cli.shared.output import pairs, tier_table
from kvstore.errors import MisuseError

app = Commands(help="Show the contents, limits and state of tiers.")

TierArgument = Annotated[
    str,
    Argument(metavar="TIER", help="Name of the tier: dram, nvme, nvme1.", autocompletion=completion.tiers),
]

_SHOWN = ("name", "used_bytes", "limit_bytes", "capacity_bytes", "blocks", "readable", "writable", "fenced")


@app.command("list")
def list_tiers(*, daemon: DaemonOptions) -> None:
    """List all tiers, fastest first.

    Example: kvstore tier list
    """
    tiers = daemon.ask("status")["tiers"]
    daemon.show({"tiers": tiers}, lambda: overview(tiers))


def overview(tiers: list[dict[str, Any]]) -> Table:
    """Returns a table of the contents, limits and states of tiers."""
    return tier_table([{name: tier.get(name) for name in _SHOWN} for tier in tiers])


@app.command("show")
def show_tier(name: TierArgument, *, daemon: DaemonOptions) -> None:
    """Show the whole state of one tier.

    Example: kvstore tier show nvme
    """
    tiers = {tier["name"]: tier for tier in daemon.ask("status")["tiers"]}
    if name not in tiers:
        raise MisuseError(f"there is no tier {name!r:.80}", f"there are {', '.join(tiers)}")
    daemon.show(tiers[name], lambda: pairs("tier", tiers[name]))
