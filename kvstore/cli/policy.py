"""Commands about the eviction policy: show it, change it."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from kvstore.cli.shared import completion
from kvstore.cli.shared.changes import DryRunOption, change
from kvstore.cli.shared.commands import Commands
from kvstore.cli.shared.options import DaemonOptions
from kvstore.cli.shared.output import pairs
from kvstore.core.policy import POLICIES, find

app = Commands(help="Show or change the eviction policy.")


@app.command("show")
def show_policy(*, daemon: DaemonOptions) -> None:
    """Show the active eviction policy and all built-in ones.

    Example: kvstore policy show
    """
    values = {"policy": daemon.ask("status")["policy"], "policies": list(POLICIES)}
    daemon.show(values, lambda: pairs("policy", values))


@app.command("set")
def set_policy(
    name: Annotated[
        str,
        Argument(
            help="Name of a built-in policy, or the module:Class in the configuration file.",
            autocompletion=completion.policies,
        ),
    ],
    *,
    dry_run: DryRunOption = False,
    daemon: DaemonOptions,
) -> None:
    """Change the eviction policy, now and after restarts.

    Example: kvstore policy set arc
    """
    if ":" not in name:
        find(name)
    change(daemon, {"policy": {"eviction": name}}, dry_run)
