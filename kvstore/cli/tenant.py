"""Commands about tenants: make a token, list usage, delete blocks."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from kvstore import Client
from kvstore.cli.shared import completion
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import DaemonOptions, JsonOption, YesOption, confirm, named, url_of
from kvstore.config import format_size, parse_duration
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import MisuseError
from kvstore.types import check_tenant

app = Commands(no_args_is_help=True, help="Make tokens, list tenants, delete a tenant's blocks.")

_LONGEST_DAYS = 36500

TenantArgument = Annotated[str, Argument(help="Name of the tenant.", autocompletion=completion.tenants)]


@app.command()
def token(
    name: TenantArgument,
    *,
    role: Annotated[Literal["read", "write", "admin"], Option(help="Role of the holders.")] = "write",
    expires: Annotated[
        str, Option(metavar="TIME", help="Lifetime of the token: 90d, 12h [default: unlimited].")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Make a token for a tenant. Prints the token once, and the lines to add to the configuration.

    Example: kvstore tenant token team-a --role write --expires 90d
    """
    check_tenant(name)
    secret = new_token(secrets.token_bytes(32))
    entry = {"hash": f"sha256:{hash_of(secret).hex()}", "role": role}
    until = _until(expires)
    if as_json:
        shown: dict[str, Any] = {"tenant": name, "token": secret, **entry}
        typer.echo(json.dumps(shown | {"expires": until or None}))
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
    """List the usage and quotas of every tenant in each tier. Members see only their own tenant.

    Example: kvstore tenant list --socket /run/kvstore/kvstore.sock
    """
    with Client(url_of(daemon.socket)) as client:
        tenants = list(client.status().get("tenants", ()))
    if daemon.as_json:
        typer.echo(json.dumps({"tenants": tenants}))
        return
    table = Table("tenant", "share", "tier", "used", "floor", "limit", box=box.SIMPLE_HEAD)
    for tenant in tenants:
        name, share = tenant["name"], f"{tenant.get('share', 1.0):g}"
        for tier in tenant["tiers"]:
            sizes = (_size(tier.get(key)) for key in ("used_bytes", "floor_bytes", "limit_bytes"))
            table.add_row(name, share, tier["name"], *sizes)
            name = share = ""
    Console().print(table)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_size(nbytes)


@app.command()
def delete(name: TenantArgument, *, yes: YesOption = False, daemon: DaemonOptions) -> None:
    """Delete all blocks of a tenant on every tier. Its members and tokens stay in the configuration.

    Example: kvstore tenant delete team-a --yes
    """
    check_tenant(name)
    confirm(yes, f"this deletes all blocks of tenant {name}")
    with Client(url_of(daemon.socket)) as client:
        deleted = client.delete_tenant(name)
    daemon.show({"tenant": name, "deleted_blocks": deleted}, lambda: f"{name}: {deleted} blocks deleted")
