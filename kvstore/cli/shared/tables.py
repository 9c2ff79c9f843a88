"""Renders values as tables. Field names determine units and number formats."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvstore.config import format_size
from kvstore.errors import printable


def tier_table(tiers: list[dict[str, Any]]) -> Table:
    """Returns a table with one row per tier and a bar of its usage."""
    columns = list(dict.fromkeys(key for tier in tiers for key in tier))
    table = Table("full", *map(words, columns), box=box.SIMPLE_HEAD)
    table.collapse_padding = True
    for tier in tiers:
        limit_bytes, used_bytes = tier.get("limit_bytes", 0), tier.get("used_bytes", 0)
        bar = ProgressBar(total=max(1, limit_bytes), completed=used_bytes, width=8)
        table.add_row(bar, *(cell(key, tier.get(key)) for key in columns))
    return table


def pairs(title: str, values: dict[str, Any]) -> Table:
    """Returns a table with one row per name."""
    table = Table(title, "value", box=box.SIMPLE_HEAD)
    for name, value in values.items():
        table.add_row(words(name), cell(name, value))
    return table


def words(name: str) -> str:
    """Returns a field name as words, without its unit."""
    if name.endswith("_per_s"):
        return name.removesuffix("_per_s").replace("_", " ").replace("gib", "GiB") + "/s"
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def plain(text: str) -> str:
    """Returns untrusted text with terminal control characters and table markup escaped."""
    return escape(printable(text))


def cell(name: str, value: Any) -> str:
    """Returns a value as text, formatted by the unit in its name."""
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
        return f"{100 * value:.2f} %"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
