"""The `kvstore` command.

Lives here: one file per group of commands; `shared/` has what several commands use, `lab/` the lab's.
May be imported from here: `app`. Commands may import every other package, slow ones inside functions, so that
the command starts quickly.

Exit codes: 0 success, 1 a check failed or nothing was found, 2 an error, printed with its hint. `fsck` also
exits with 3: problems were found and all of them repaired.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer import Option

from kvstore.cli import blocks, bundle, device, events, ns, operate, policy, tenant, tier, top
from kvstore.cli.lab import commands, fleet, live, record, trace
from kvstore.cli.shared.commands import Commands

PANELS: dict[str, dict[str, Commands | Callable[..., Any]]] = {
    "Run": {
        "serve": operate.serve,
        "supervise": operate.supervise,
        "admin": operate.admin,
        "config": operate.config_app,
        "demo": live.demo,
    },
    "Look": {
        "status": operate.status,
        "top": top.top,
        "events": events.events,
        "tier": tier.app,
        "ns": ns.app,
    },
    "Change": {
        "tenant": tenant.app,
        "quota": tenant.quota_app,
        "policy": policy.app,
        "device": device.app,
        "blocks": blocks.app,
        "pin": blocks.pin_app,
    },
    "Investigate": {
        "why": blocks.why,
        "doctor": operate.doctor,
        "bundle": bundle.bundle,
        "fsck": operate.fsck,
        "trace": trace.app,
    },
    "Plan": {
        "lab": commands.app,
        "replay": live.replay,
    },
}
"""All commands in the order of `kvstore --help`, by the panel in which they stand there."""

app = Commands(
    pretty_exceptions_enable=False, epilog="`kvstore COMMAND --help` describes a command, with an example."
)
for panel, entries in PANELS.items():
    for name, entry in entries.items():
        # typer lists commands before groups. A command in a group without a name keeps its place.
        if isinstance(entry, Commands):
            app.add_typer(entry, name=name, rich_help_panel=panel)
        else:
            single = Commands()
            single.command(name, rich_help_panel=panel)(entry)
            app.add_typer(single)
commands.app.command()(fleet.fleet)
commands.app.command()(record.record)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvstore {version('kvstore')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """A KV-cache offload daemon for LLM inference."""
