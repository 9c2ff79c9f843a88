"""The `kvstore` command.

Lives here: one file per group of commands; `shared/` has what several commands use, `lab/` the lab's.
May be imported from here: `app`. Commands may import every other package, slow ones inside functions, so that
the command starts quickly.

Exit codes: 0 success, 1 a check failed or nothing was found, 2 an error, printed with its hint. `fsck` also
exits with 3: problems were found and all of them repaired.
"""

from __future__ import annotations

import typer

from kvstore.cli import blocks, device, events, ns, operate, policy, tenant, tier, top
from kvstore.cli.lab import commands, live, record, trace
from kvstore.cli.shared.options import Group

app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(operate.app)
app.add_typer(tenant.app, name="tenant")
app.add_typer(tenant.quota_app, name="quota")
app.add_typer(ns.app, name="ns")
app.add_typer(blocks.app, name="blocks")
app.add_typer(blocks.pin_app, name="pin")
app.add_typer(tier.app, name="tier")
app.add_typer(device.app, name="device")
app.add_typer(policy.app, name="policy")
app.add_typer(trace.app, name="trace")
app.add_typer(events.app)
app.add_typer(live.app)
app.add_typer(commands.app, name="lab")
app.add_typer(top.app)
commands.app.command()(record.record)
operate.app.command()(blocks.why)


@app.callback()
def main() -> None:
    """A KV-cache offload daemon for LLM inference."""
