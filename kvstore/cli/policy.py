"""Commands about the eviction policy: which one decides, and another one."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.shared import completion
from kvstore.cli.shared.changes import DryRunOption, change
from kvstore.cli.shared.options import DEFAULT_SOCKET, JsonOption, SocketOption, asking, show
from kvstore.cli.shared.tables import pairs
from kvstore.core.policy import POLICIES, find

app = typer.Typer(no_args_is_help=True, help="Show who leaves a tier first, change that.")


@app.command("show")
def show_policy(*, socket: SocketOption = DEFAULT_SOCKET, as_json: JsonOption = False) -> None:
    """Show the policy that a daemon evicts by, and those that there are.

    Example: kvstore policy show
    """
    with asking(socket) as client:
        at_work = client.control("status")["policy"]
    values = {"policy": at_work, "policies": list(POLICIES)}
    show(values, as_json, lambda: pairs("policy", values))


@app.command("set")
def set_policy(
    name: Annotated[
        str,
        typer.Argument(
            help="Its name, or the module:Class that the file names.", autocompletion=completion.policies
        ),
    ],
    *,
    dry_run: DryRunOption = False,
    socket: SocketOption = DEFAULT_SOCKET,
    as_json: JsonOption = False,
) -> None:
    """Evict by another policy from now on, and after later starts.

    Example: kvstore policy set arc
    """
    if ":" not in name:
        find(name)
    change(socket, {"policy": {"eviction": name}}, dry_run, as_json)
