"""Commands about tenants: make a token, list usage, delete blocks, show and change quotas."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from typer import Argument, Option

from kvstore import Client
from kvstore.cli.shared import completion
from kvstore.cli.shared.changes import DryRunOption, change
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import DaemonOptions, JsonOption, YesOption, confirm, named, pages, url_of
from kvstore.cli.shared.output import decorated, size, table, usage_bars
from kvstore.config import parse_duration, parse_size
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import MisuseError
from kvstore.types import check_tenant

app = Commands(help="List tenants, make tokens, delete the blocks of a tenant.")
quota_app = Commands(help="Show or change the floors, limits and shares of tenants.")

_LONGEST_DAYS = 36500
_BAR_COLUMNS = 16
_SIZES = ("used_bytes", "floor_bytes", "limit_bytes")

NameArgument = Annotated[str, Argument(help="Name of the tenant.", autocompletion=completion.tenants)]
TenantArgument = Annotated[
    str, Argument(metavar="TENANT", help="Name of the tenant.", autocompletion=completion.tenants)
]


@app.command()
def token(
    name: NameArgument,
    *,
    role: Annotated[Literal["read", "write", "admin"], Option(help="Role of the holders.")] = "write",
    expires: Annotated[
        str, Option(metavar="TIME", help="Lifetime of the token, such as 90d or 12h. Without it: unlimited.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Make a token for a tenant.

    Prints the token once, and the lines to add to the configuration.

    Example: kvstore tenant token team-a --role write --expires 90d
    """
    check_tenant(name)
    secret = new_token(secrets.token_bytes(32))
    entry = {"hash": f"sha256:{hash_of(secret).hex()}", "role": role}
    until = _until(expires)
    if as_json:
        typer.echo(json.dumps({"tenant": name, "token": secret, **entry, "expires": until or None}))
        return
    # TOML needs quotes around a name with a dot.
    part = f'"{name}"' if "." in name else name
    typer.echo(f"# token of {name}, not shown again; clients pass it in KVSTORE_TOKEN", err=True)
    typer.echo(secret)
    typer.echo("\n# add these lines to the configuration, then reload it (SIGHUP):", err=True)
    lines = [f"[[tenants.{part}.tokens]]", *(f'{key} = "{value}"' for key, value in entry.items())]
    typer.echo("\n".join([*lines, *([f"expires = {until}"] if until else [])]))


def _until(expires: str) -> str:
    """Returns the time of expiry in ISO 8601, empty for never."""
    if not expires:
        return ""
    seconds = named("--expires", parse_duration, expires)
    if not 0 < seconds <= _LONGEST_DAYS * 86400:
        raise MisuseError(f"--expires is {expires}", f"more than 0, at most {_LONGEST_DAYS}d")
    return f"{datetime.now(UTC) + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"


@app.command("list")
def list_tenants(daemon: DaemonOptions) -> None:
    """List the usage and quotas of every tenant in each tier.

    Members of a tenant see only their own tenant.

    Example: kvstore tenant list
    """
    with Client(url_of(daemon.socket)) as client:
        tenants = list(client.status().get("tenants", ()))
    daemon.show({"tenants": tenants}, lambda: _usage(tenants))


@app.command()
def delete(name: NameArgument, *, yes: YesOption = False, daemon: DaemonOptions) -> None:
    """Delete all blocks of a tenant on every tier.

    Its members and tokens stay in the configuration.

    Example: kvstore tenant delete team-a --yes
    """
    check_tenant(name)
    confirm(yes, f"this deletes all blocks of tenant {name}")
    with Client(url_of(daemon.socket)) as client:
        deleted = client.delete_tenant(name)
    daemon.show({"tenant": name, "deleted_blocks": deleted}, lambda: f"{name}: {deleted} blocks deleted")


@quota_app.command("list")
def list_quotas(*, daemon: DaemonOptions) -> None:
    """List the usage of every tenant in each tier, with its floor and limit.

    Example: kvstore quota list
    """
    with daemon.client() as client:
        tiers = client.control("status")["tiers"]
        tenants = list(pages(client, "tenants", "name"))
    daemon.show({"tenants": tenants}, lambda: _usage(tenants, _limits(tiers)))


@quota_app.command("show")
def show_quota(tenant: TenantArgument, *, daemon: DaemonOptions) -> None:
    """Show the usage of one tenant in each tier, with its floor and limit.

    Example: kvstore quota show chat
    """
    with daemon.client() as client:
        tiers = client.control("status")["tiers"]
        found = client.control("tenant", name=tenant)
    daemon.show(found, lambda: _usage([found], _limits(tiers)))


@quota_app.command("set")
def set_quota(
    tenant: TenantArgument,
    *,
    dram_limit: Annotated[str, Option(metavar="SIZE", help="Limit in DRAM; none: no limit.")] = "",
    dram_floor: Annotated[str, Option(metavar="SIZE", help="Guaranteed bytes in DRAM.")] = "",
    nvme_limit: Annotated[str, Option(metavar="SIZE", help="Limit in NVMe; none: no limit.")] = "",
    nvme_floor: Annotated[str, Option(metavar="SIZE", help="Guaranteed bytes in NVMe.")] = "",
    hbm_limit: Annotated[str, Option(metavar="SIZE", help="Limit in each GPU's pool; none: no limit.")] = "",
    hbm_floor: Annotated[str, Option(metavar="SIZE", help="Guaranteed bytes in each GPU's pool.")] = "",
    share: Annotated[float | None, Option(help="Weight when tenants compete for room or bandwidth.")] = None,
    dry_run: DryRunOption = False,
    daemon: DaemonOptions,
) -> None:
    """Change the quotas of a tenant, now and after restarts.

    Blocks above a new limit are evicted.

    Example: kvstore quota set chat --dram-limit 64GiB --share 2 --dry-run
    """
    sizes = {"--dram-limit": dram_limit, "--dram-floor": dram_floor}
    sizes |= {"--nvme-limit": nvme_limit, "--nvme-floor": nvme_floor}
    sizes |= {"--hbm-limit": hbm_limit, "--hbm-floor": hbm_floor}
    change(daemon, patch_of(tenant, sizes, share), dry_run)


def patch_of(tenant: str, sizes: dict[str, str], share: float | None) -> dict[str, Any]:
    """Returns the merge patch of these options. Raises MisuseError for invalid sizes or without options."""
    changed: dict[str, Any] = {} if share is None else {"share": share}
    for option, text in sizes.items():
        if text:
            tier, name = option.removeprefix("--").split("-")
            changed.setdefault(tier, {})[name] = None if text == "none" else named(option, parse_size, text)
    if not changed:
        raise MisuseError("no option was given", f"give one of {', '.join(sizes)}, --share")
    return {"tenants": {check_tenant(tenant): changed}}


def _limits(tiers: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the limits of tiers in bytes, by name."""
    return {tier["name"]: tier["limit_bytes"] for tier in tiers}


def _usage(tenants: list[dict[str, Any]], limits: Mapping[str, int] | None = None) -> Table:
    """Returns a table with one row per tenant and tier; with the limits of tiers, bars of the usage."""
    bars = limits is not None and decorated()
    shown = table(("tenant", "share", "tier", *([""] if bars else ()), "used", "floor", "limit"))
    for tenant in tenants:
        name, share = tenant["name"], f"{tenant.get('share', 1.0):g}"
        for tier in tenant["tiers"]:
            bar = []
            if limits is not None:
                limit = limits[tier["name"]] if tier["limit_bytes"] is None else tier["limit_bytes"]
                bar = usage_bars(tier["used_bytes"], limit, _BAR_COLUMNS)
            shown.add_row(name, share, tier["name"], *bar, *(size(tier.get(key)) for key in _SIZES))
            if decorated():
                name = share = ""
    return shown
