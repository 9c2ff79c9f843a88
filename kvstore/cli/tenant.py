"""Commands about tenants: a token for one, who has what, and the end of one."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvstore import Client
from kvstore.cli.shared import completion
from kvstore.cli.shared.options import DEFAULT_SOCKET, JsonOption, SocketOption, url_of
from kvstore.config import format_size, parse_duration
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import MisuseError
from kvstore.types import check_tenant

app = typer.Typer(no_args_is_help=True, help="Make a token, list tenants, delete one.")

_LONGEST_DAYS = 36500


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="The tenant.", autocompletion=completion.tenants)],
    *,
    role: Annotated[Literal["read", "write", "admin"], typer.Option(help="What holders may do.")] = "write",
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long it holds: 90d, 12h.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Make a token for a tenant and print it, once, with what to add to the configuration.

    Example: kvstore tenant token team-a --role write --expires 90d
    """
    check_tenant(name)
    made = new_token(secrets.token_bytes(32))
    entry = {"hash": f"sha256:{hash_of(made).hex()}", "role": role}
    until = _until(expires)
    if as_json:
        shown: dict[str, Any] = {"tenant": name, "token": made, **entry}
        typer.echo(json.dumps(shown | {"expires": until or None}))
        return
    # A name with a dot in it is one part of a key only in quotes.
    part = f'"{name}"' if "." in name else name
    typer.echo(f"# {name}'s token, shown only now: clients pass it in KVSTORE_TOKEN", err=True)
    typer.echo(made)
    typer.echo("\n# add this to the configuration, then reload (SIGHUP):", err=True)
    lines = [f"[[tenants.{part}.tokens]]", *(f'{key} = "{value}"' for key, value in entry.items())]
    typer.echo("\n".join([*lines, *([f"expires = {until}"] if until else [])]))


def _until(expires: str) -> str:
    """The moment so long from now, as TOML and JSON write it; "" for never."""
    if not expires:
        return ""
    try:
        seconds = parse_duration(expires)
    except MisuseError as error:
        raise MisuseError(f"--expires: {error.message}", error.hint) from None
    if not 0 < seconds <= _LONGEST_DAYS * 86400:
        raise MisuseError(f"--expires is {expires}", f"more than 0, and at most {_LONGEST_DAYS}d")
    return f"{datetime.now(UTC) + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"


@app.command("list")
def list_tenants(socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False) -> None:
    """Show what each tenant has of every tier, and what it may have. Members see their own tenant.

    Example: kvstore tenant list --socket /run/kvstore/kvstore.sock
    """
    with Client(url_of(socket)) as client:
        tenants = list(client.status().get("tenants", ()))
    if as_json:
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
def delete(
    name: Annotated[str, typer.Argument(help="The tenant.", autocompletion=completion.tenants)],
    *,
    socket: SocketOption = DEFAULT_SOCKET,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete all that a tenant has stored, on every tier. Its members and tokens stay in the configuration.

    Example: kvstore tenant delete team-a --yes
    """
    check_tenant(name)
    if not yes:
        raise MisuseError(f"this deletes all blocks of tenant {name}", "add --yes if that is what you want")
    with Client(url_of(socket)) as client:
        deleted = client.delete_tenant(name)
    summary = {"tenant": name, "deleted_blocks": deleted}
    typer.echo(json.dumps(summary) if as_json else f"{name}: {deleted} blocks deleted")
