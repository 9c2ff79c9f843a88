"""Commands about tiers: what each holds, and how it does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from kvstore.cli.shared import completion
from kvstore.cli.shared.options import DEFAULT_SOCKET, JsonOption, SocketOption, asking, show
from kvstore.cli.shared.tables import pairs, tier_table
from kvstore.errors import MisuseError

app = typer.Typer(no_args_is_help=True, help="Look at tiers.")

TierArgument = Annotated[
    str, typer.Argument(metavar="TIER", help="Its name: dram, nvme, nvme1.", autocompletion=completion.tiers)
]

_SHOWN = ("name", "used_bytes", "limit_bytes", "capacity_bytes", "blocks", "readable", "writable", "fenced")


@app.command("list")
def list_tiers(*, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False) -> None:
    """Show all tiers, the fastest first.

    Example: kvstore tier list
    """
    with asking(socket) as client:
        tiers = list(client.control("status")["tiers"])
    shown = [{name: tier[name] for name in _SHOWN} for tier in tiers]
    show({"tiers": tiers}, as_json, lambda: tier_table(shown))


@app.command("show")
def show_tier(
    name: TierArgument, *, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False
) -> None:
    """Show all that is known of one tier.

    Example: kvstore tier show nvme
    """
    with asking(socket) as client:
        found = one_of(client.control("status")["tiers"], "name", name)
    show(found, as_json, lambda: pairs("tier", found))


def one_of(rows: Iterable[dict[str, Any]], by: str, name: str) -> dict[str, Any]:
    """The row of a tier. Raises MisuseError if there is none."""
    known = {row[by]: row for row in rows}
    if name not in known:
        raise MisuseError(f"there is no tier {name!r:.80}", f"there are {', '.join(known)}")
    return known[name]
