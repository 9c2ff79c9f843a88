"""Changes of the running configuration, and what came of them, for people."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group

from kvstore.cli.shared.options import CHANGING_S, asking, show
from kvstore.config import format_size

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would change, and be evicted.")]


def change(socket: str, patch: dict[str, Any], dry_run: bool, as_json: bool) -> None:
    """Has a daemon merge a patch into its configuration, and prints what that did or would do."""
    with asking(socket, CHANGING_S) as client:
        answer = client.control("change", patch=patch, dry_run=dry_run)
    show({**answer, "dry_run": dry_run}, as_json, lambda: Group(*lines(answer, dry_run)))


def lines(answer: dict[str, Any], dry_run: bool) -> list[str]:
    """What a daemon said to a change, a line each."""
    would, will = ("would be", "would be") if dry_run else ("is now", "will be")
    said = [f"{would}: {what}" for what in answer["changed"]] or ["nothing changes"]
    for row in answer["consequences"]:
        who, tier = row["tenant"], row["tier"]
        if row["evicted_bytes"]:
            said.append(f"{format_size(row['evicted_bytes'])} of {who} {will} evicted from {tier}")
        if row["claimed_bytes"]:
            said.append(f"{format_size(row['claimed_bytes'])} of {tier} {would} {who}'s, when it needs them")
    if answer["changed"] and not dry_run and not answer["kept"]:
        said.append("until the daemon ends: daemon.changes names no file that keeps it")
    return said
