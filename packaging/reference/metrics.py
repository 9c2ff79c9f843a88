"""Every metric of `/metrics`, from the tables of `kvstore.admin.metrics`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvstore.admin.metrics import LABELS, families
from reference.text import cell

_UNITS = {
    "bytes_per_second": "bytes/s",
    "bytes_per_day": "bytes/day",
    "bytes": "bytes",
    "seconds": "s",
    "blocks": "blocks",
    "tokens": "tokens",
    "ratio": "0 to 1",
}
"""Units by the end of a metric's name. Other metrics are numbers."""


def page() -> Iterator[str]:
    """Yields the page: labels, then the metrics of each type."""
    yield "# All metrics\n\nGenerated from the code. [REST, metrics, health](../rest.md#hit-ratio) defines"
    yield "the hit ratio. A histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and `NAME_count`."
    yield "Metrics of tiers that are not configured have no rows.\n"
    yield "\n## Labels\n\n| label | meaning |\n|---|---|"
    for label, meaning in LABELS.items():
        yield f"| `{label}` | {cell(meaning)} |"
    for kind in ("gauge", "counter", "histogram"):
        yield f"\n## {kind.capitalize()}s\n\n| metric | meaning |\n|---|---|"
        for family in sorted(families(), key=lambda family: family.name):
            if family.kind == kind:
                labels = ", ".join(f"`{label}`" for label in family.labels)
                facts = {"unit": _unit(family.name), "labels": labels}
                shown = [f"<span class=fact>*{name}:* {said}</span>" for name, said in facts.items() if said]
                yield f"| `{family.name}` | {' '.join([cell(family.about), *shown])} |"


def missing() -> Iterator[str]:
    """Yields the metrics without a help text and the labels without a meaning."""
    for family in families():
        if not family.about:
            yield f"{family.name} has no help text: add it to its table in kvstore/admin/metrics.py"
        for label in family.labels:
            if not LABELS.get(label):
                yield f"the label {label} of {family.name} has no meaning: add it to LABELS"


def _unit(name: str) -> str:
    """Returns the unit of a metric. By convention, its name ends with it."""
    name = name.removesuffix("_total")
    return next((unit for end, unit in _UNITS.items() if re.search(rf"_{end}$", name)), "")
