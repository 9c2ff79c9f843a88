"""Prints results: as JSON, or as tables in which a field's name determines its unit and number format.

Also shows progress, on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvstore.config import format_size
from kvstore.errors import printable

_PIPED_COLUMNS = 200


def show(values: Any, as_json: bool, render: Callable[[], RenderableType]) -> None:
    """Prints values as JSON, or rendered. Output to a pipe has no colours and wide lines."""
    if as_json:
        typer.echo(json.dumps(values))
        return
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(width=_PIPED_COLUMNS if piped else None).print(render())


def table(columns: Iterable[str], rows: Iterable[Iterable[RenderableType]] = ()) -> Table:
    """Returns a table in the style of all commands."""
    made = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        made.add_row(*row)
    return made


def tier_table(tiers: list[dict[str, Any]]) -> Table:
    """Returns a table with one row per tier and a bar of its usage."""
    columns = list(dict.fromkeys(key for tier in tiers for key in tier))
    made = table(["full", *map(words, columns)])
    made.collapse_padding = True
    for tier in tiers:
        limit_bytes, used_bytes = tier.get("limit_bytes", 0), tier.get("used_bytes", 0)
        bar = ProgressBar(total=max(1, limit_bytes), completed=used_bytes, width=8)
        made.add_row(bar, *(cell(key, tier.get(key)) for key in columns))
    return made


def pairs(title: str, values: dict[str, Any]) -> Table:
    """Returns a table with one row per field."""
    return table((title, "value"), ((words(name), cell(name, value)) for name, value in values.items()))


def words(name: str) -> str:
    """Returns a field name as words, without its unit."""
    if name.endswith("_per_s"):
        return name.removesuffix("_per_s").replace("_", " ").replace("gib", "GiB") + "/s"
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def plain(text: str) -> str:
    """Returns untrusted text with terminal control characters and table markup escaped."""
    return escape(printable(text))


def cell(name: str, value: Any) -> str:
    """Returns a value as text, formatted by the unit in its field name."""
    if isinstance(value, dict):
        return plain(", ".join(f"{key} {item}" for key, item in value.items())) or "none"
    if isinstance(value, list | tuple):
        return plain(", ".join(map(str, value))) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return "-" if value is None else plain(str(value))
    if "bytes" in name.split("_"):
        return format_size(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"{1000 * value:.2f} ms" if value < 1 else f"{value:,.1f} s"
    if name.endswith("_ratio"):
        return percent(value)
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def percent(ratio: float | None, decimals: int = 2) -> str:
    """Returns a ratio as a percentage; `-` for None."""
    return "-" if ratio is None else f"{100 * ratio:.{decimals}f} %"


def size(nbytes: int | None) -> str:
    """Returns bytes as text; `-` for None."""
    return "-" if nbytes is None else format_size(nbytes)


def progress_bar(*columns: ProgressColumn, hidden: bool) -> Progress:
    """Returns a bar with these columns between the bar and the remaining time. It disappears at the end."""
    left, right = (TextColumn("{task.description}"), BarColumn()), TimeRemainingColumn()
    return Progress(*left, *columns, right, console=Console(stderr=True), transient=True, disable=hidden)
