"""Prints results: as JSON, or as tables in which a field's name determines its unit and number format.

Also shows progress, on standard error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable
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

_PIPED_COLUMNS = 10_000
_TIER_BAR_COLUMNS = 8


def decorated(stderr: bool = False) -> bool:
    """Returns whether the output may have colours, boxes and bars: on a terminal, without NO_COLOR."""
    return Console(stderr=stderr).is_terminal and not os.environ.get("NO_COLOR")


def console(stderr: bool = False) -> Console:
    """Returns a console. It has no colours in a pipe and with NO_COLOR. Lines in a pipe are not wrapped."""
    made = Console(stderr=stderr, color_system="auto" if decorated(stderr) else None)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PIPED_COLUMNS
    return made


def show(values: Any, as_json: bool, render: Callable[[], RenderableType]) -> None:
    """Prints values as JSON, or rendered."""
    if as_json:
        typer.echo(json.dumps(values))
    elif decorated():
        console().print(render())
    else:
        made = console()
        with made.capture() as text:
            made.print(render())
        typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[RenderableType]] = (),
    whole: Collection[str] = (),
) -> Table:
    """Returns a table in the style of all commands: with a line below its head, but not in a pipe.

    Cells that are too long for the terminal continue on the next line, except in the columns `whole`.
    """
    pretty = decorated()
    made = Table(box=box.SIMPLE_HEAD if pretty else None, pad_edge=pretty, collapse_padding=pretty)
    for name in columns:
        made.add_column(name, overflow="fold", no_wrap=name in whole)
    for row in rows:
        made.add_row(*row)
    return made


def tier_table(tiers: list[dict[str, Any]]) -> Table:
    """Returns a table with one row per tier and, on a terminal, a bar of its usage."""
    columns = list(dict.fromkeys(key for tier in tiers for key in tier))
    made = table([*(["full"] if decorated() else ()), *map(words, columns)])
    for tier in tiers:
        bars = usage_bars(tier.get("used_bytes", 0), tier.get("limit_bytes", 0), _TIER_BAR_COLUMNS)
        made.add_row(*bars, *(cell(key, tier.get(key)) for key in columns))
    return made


def usage_bars(used_bytes: int, limit_bytes: int, width: int) -> list[ProgressBar]:
    """Returns one bar of this width in columns, or none where output has no bars."""
    bar = ProgressBar(total=max(1, limit_bytes), completed=used_bytes, width=width)
    return [bar] if decorated() else []


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
        return ", ".join(_item(str(key), item) for key, item in value.items()) or "none"
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


def _item(name: str, value: Any) -> str:
    """Returns an item of a dict as text."""
    text = cell(name, value)
    return f"{plain(words(name))} ({text})" if isinstance(value, dict) else f"{plain(words(name))} {text}"


def percent(ratio: float | None, decimals: int = 2) -> str:
    """Returns a ratio as a percentage; `-` for None."""
    return "-" if ratio is None else f"{100 * ratio:.{decimals}f} %"


def size(nbytes: int | None) -> str:
    """Returns bytes as text; `-` for None."""
    return "-" if nbytes is None else format_size(nbytes)


def progress_bar(*columns: ProgressColumn, hidden: bool) -> Progress:
    """Returns a bar with these columns between the bar and the remaining time. It disappears at the end."""
    left, right = (TextColumn("{task.description}"), BarColumn()), TimeRemainingColumn()
    return Progress(*left, *columns, right, console=console(stderr=True), transient=True, disable=hidden)
