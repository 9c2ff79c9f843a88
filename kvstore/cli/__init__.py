"""The `kvstore` command. Exit codes: 0 fine, 1 a check failed, 2 an error that is printed with its hint.

`fsck` has one more: 3, problems were found and all of them repaired.
"""

from __future__ import annotations

import typer

from kvstore.cli import lab, operate, play, record, tenant, top, why
from kvstore.cli.common import Group

app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(operate.app)
app.add_typer(tenant.app, name="tenant")
app.add_typer(play.app)
app.add_typer(lab.app, name="lab")
app.add_typer(why.app)
app.add_typer(top.app)
lab.app.command()(record.record)


@app.callback()
def main() -> None:
    """A KV-cache offload daemon for LLM inference."""
