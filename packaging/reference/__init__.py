"""Pages of the documentation site that are generated from the code, one module each.

A module has `page`, which yields the Markdown of its page, and `missing`, which yields a line for each item
of the code without documentation. Links are relative to the folder `reference/` of the site.
"""

from __future__ import annotations

from types import ModuleType

from reference import commands, configuration, errors, events, formats, metrics, python, rest, wire

PAGES: dict[str, ModuleType] = {
    "configuration": configuration,
    "commands": commands,
    "rest": rest,
    "metrics": metrics,
    "events": events,
    "errors": errors,
    "python": python,
    "wire": wire,
    "formats": formats,
}
"""The modules by the name of their page."""


def undocumented() -> list[str]:
    """Returns a line for each item of the code without documentation."""
    return [f"{name}: {line}" for name, module in PAGES.items() for line in module.missing()]
