"""Commands about quotas of tenants: show usage against floors and limits, change them."""

from __future__ import annotations

from typing import Annotated, Any

from rich import box
from rich.progress_bar import ProgressBar
from rich.table import Table
from typer import Argument, Option

from kvstore.cli.shared import completion
from kvstore.cli.shared.changes import DryRunOption, change
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import DaemonOptions, named, pages
from kvstore.config import format_size, parse_size
from kvstore.errors import MisuseError
from kvstore.types import check_tenant

app = Commands(no_args_is_help=True, help="Show or change quotas of tenants.")

_NONE = "none"
_BAR_COLUMNS = 16

TenantArgument = Annotated[
    str, Argument(metavar="TENANT", help="Name of the tenant.", autocompletion=completion.tenants)
]


def _size(help_text: str) -> Any:
    return Option(metavar="SIZE", help=help_text)


@app.command("list")
def list_quotas(*, daemon: DaemonOptions) -> None:
    """List the usage of every tenant in each tier, with its floor and limit.

    Example: kvstore quota list
    """
    with daemon.client() as client:
        tiers = client.control("status")["tiers"]
        tenants = list(pages(client, "tenants", "name"))
    daemon.show({"tenants": tenants}, lambda: _table(tenants, tiers))


@app.command("show")
def show_quota(tenant: TenantArgument, *, daemon: DaemonOptions) -> None:
    """Show the usage of one tenant in each tier, with its floor and limit.

    Example: kvstore quota show chat
    """
    with daemon.client() as client:
        tiers = client.control("status")["tiers"]
        found = client.control("tenant", name=tenant)
    daemon.show(found, lambda: _table([found], tiers))


@app.command("set")
def set_quota(
    tenant: TenantArgument,
    *,
    dram_limit: Annotated[str, _size("Hard limit in DRAM; none: no limit.")] = "",
    dram_floor: Annotated[str, _size("Guaranteed bytes in DRAM.")] = "",
    nvme_limit: Annotated[str, _size("Hard limit in NVMe.")] = "",
    nvme_floor: Annotated[str, _size("Guaranteed bytes in NVMe.")] = "",
    hbm_limit: Annotated[str, _size("Hard limit in each GPU's pool.")] = "",
    hbm_floor: Annotated[str, _size("Guaranteed bytes in each GPU's pool.")] = "",
    share: Annotated[float | None, Option(help="Weight when tenants compete for room or bandwidth.")] = None,
    dry_run: DryRunOption = False,
    daemon: DaemonOptions,
) -> None:
    """Change a tenant's quota, now and after restarts. Blocks above a new limit are evicted.

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
    change(daemon, patch_of(tenant, sizes, share), dry_run)


def patch_of(tenant: str, sizes: dict[str, str], share: float | None) -> dict[str, Any]:
    """Returns the merge patch of these options. Raises MisuseError for invalid sizes or without options."""
    changed: dict[str, Any] = {} if share is None else {"share": share}
    for option, text in sizes.items():
        if text:
            tier, name = option.removeprefix("--").split("-")
            size = None if text == _NONE else named(option, parse_size, text)
            changed.setdefault(tier, {})[name] = size
    if not changed:
        raise MisuseError("no option was given", f"give one of {', '.join(sizes)}, --share")
    return {"tenants": {check_tenant(tenant): changed}}


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
