"""Changes the running configuration and prints the consequences."""

from __future__ import annotations

from typing import Annotated, Any

from rich.console import Group
from typer import Option

from kvstore.cli.shared.options import CHANGE_DEADLINE_S, DaemonOptions
from kvstore.config import format_size

DryRunOption = Annotated[
    bool, Option("--dry-run", help="Print the changes and what they would evict, and change nothing.")
]


def change(daemon: DaemonOptions, patch: dict[str, Any], dry_run: bool) -> None:
    """Applies a merge patch to the daemon's configuration, or tries it, and prints the consequences."""
    answer = daemon.ask("change", CHANGE_DEADLINE_S, patch=patch, dry_run=dry_run)
    daemon.show({**answer, "dry_run": dry_run}, lambda: Group(*lines(answer, dry_run)))


def lines(answer: dict[str, Any], dry_run: bool) -> list[str]:
    """Returns the daemon's answer to a change as lines of text."""
    verb, evicted_verb = ("would be", "would be") if dry_run else ("is now", "will be")
    text = [f"{verb}: {what}" for what in answer["changed"]] or ["nothing changes"]
    for row in answer["consequences"]:
        tenant, tier = row["tenant"], row["tier"]
        if row["evicted_bytes"]:
            text.append(f"{format_size(row['evicted_bytes'])} of {tenant} {evicted_verb} evicted from {tier}")
        if row["claimed_bytes"]:
            size = format_size(row["claimed_bytes"])
            text.append(f"{size} of {tier} {verb} reserved for {tenant}, taken from other tenants on demand")
    if answer["changed"] and not dry_run and not answer["kept"]:
        text.append("the change ends with the daemon: daemon.changes is not set")
    return text
