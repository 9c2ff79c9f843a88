"""Commands about quotas: who has what against floors and limits, and other ones."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvstore.cli.shared import completion
from kvstore.cli.shared.changes import DryRunOption, change
from kvstore.cli.shared.options import DEFAULT_SOCKET, JsonOption, SocketOption, asking, named, pages, show
from kvstore.config import format_size, parse_size
from kvstore.errors import MisuseError
from kvstore.types import check_tenant

app = typer.Typer(no_args_is_help=True, help="Show quotas of tenants, change them.")

_NONE = "none"
_BAR_COLUMNS = 16

TenantArgument = Annotated[
    str, typer.Argument(metavar="TENANT", help="Its name.", autocompletion=completion.tenants)
]


def _size(what: str) -> Any:
    return typer.Option(metavar="SIZE", help=what)


@app.command("list")
def list_quotas(*, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False) -> None:
    """Show what every tenant has of each tier, against its floor and its limit.

    Example: kvstore quota list
    """
    with asking(socket) as client:
        tiers = client.control("status")["tiers"]
        tenants = list(pages(client, "tenants", "name"))
    show({"tenants": tenants}, as_json, lambda: _table(tenants, tiers))


@app.command("show")
def show_quota(
    tenant: TenantArgument, *, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False
) -> None:
    """Show what one tenant has of each tier, against its floor and its limit.

    Example: kvstore quota show chat
    """
    with asking(socket) as client:
        tiers = client.control("status")["tiers"]
        found = client.control("tenant", name=tenant)
    show(found, as_json, lambda: _table([found], tiers))


@app.command("set")
def set_quota(
    tenant: TenantArgument,
    *,
    dram_limit: Annotated[str, _size("Most that it may have of DRAM; none: no limit.")] = "",
    dram_floor: Annotated[str, _size("What is never taken from it.")] = "",
    nvme_limit: Annotated[str, _size("The same of NVMe.")] = "",
    nvme_floor: Annotated[str, _size("The same of NVMe.")] = "",
    hbm_limit: Annotated[str, _size("The same of each GPU's pool.")] = "",
    hbm_floor: Annotated[str, _size("The same of each GPU's pool.")] = "",
    share: Annotated[
        float | None, typer.Option(help="Its weight where tenants compete for room or bandwidth.")
    ] = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Change a tenant's quota, now and for later starts; what is over its new limit is evicted.

    Example: kvstore quota set chat --dram-limit 64GiB --share 2 --dry-run
    """
    sizes = {
        "--dram-limit": dram_limit,
        "--dram-floor": dram_floor,
        "--nvme-limit": nvme_limit,
        "--nvme-floor": nvme_floor,
        "--hbm-limit": hbm_limit,
        "--hbm-floor": hbm_floor,
    }
    change(socket, patch_of(tenant, sizes, share), dry_run, as_json)


def patch_of(tenant: str, sizes: dict[str, str], share: float | None) -> dict[str, Any]:
    """The change of the configuration that is meant. Raises MisuseError for none, and for what is no size."""
    asked: dict[str, Any] = {} if share is None else {"share": share}
    for option, text in sizes.items():
        if text:
            tier, name = option.removeprefix("--").split("-")
            size = None if text == _NONE else named(option, parse_size, text)
            asked.setdefault(tier, {})[name] = size
    if not asked:
        raise MisuseError("nothing was asked to change", f"one of {', '.join(sizes)}, --share")
    return {"tenants": {check_tenant(tenant): asked}}


def _table(tenants: list[dict[str, Any]], tiers: list[dict[str, Any]]) -> Table:
    whole = {tier["name"]: tier["limit_bytes"] for tier in tiers}
    table = Table("tenant", "share", "tier", "", "used", "floor", "limit", box=box.SIMPLE_HEAD)
    for tenant in tenants:
        name, share = tenant["name"], f"{tenant['share']:g}"
        for tier in tenant["tiers"]:
            limit, used = tier["limit_bytes"], tier["used_bytes"]
            most = whole[tier["name"]] if limit is None else limit
            bar = ProgressBar(total=max(1, most), completed=used, width=_BAR_COLUMNS)
            sizes = (
                format_size(used),
                format_size(tier["floor_bytes"]),
                "-" if limit is None else format_size(limit),
            )
            table.add_row(name, share, tier["name"], bar, *sizes)
            name = share = ""
    return table
