"""Compares two reports: the hit ratios of equal policies and capacities, and the settings that differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvstore.lab.report import Point, Report


@dataclass(frozen=True, slots=True)
class Pair:
    """One policy at one capacity in both reports. None: the report lacks the pair."""

    policy: str
    capacity: str
    a: Point | None
    b: Point | None

    @property
    def points(self) -> float | None:
        """The hit ratio of b minus that of a, in percentage points."""
        return 100 * (self.b.hit_ratio - self.a.hit_ratio) if self.a and self.b else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The pairs, and in `differing` each trace property or setting with different values: (a's, b's)."""

    differing: dict[str, tuple[Any, Any]]
    pairs: list[Pair]

    def to_map(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        pairs = [{**asdict(pair), "points": pair.points} for pair in self.pairs]
        return {"differing": {name: list(both) for name, both in self.differing.items()}, "pairs": pairs}


def compare(a: Report, b: Report) -> Comparison:
    """Compares two reports. Pairs that both have come first, in the order of a."""
    told = [{**_flat("trace", asdict(r.trace)), **_flat("settings", asdict(r.settings))} for r in (a, b)]
    names = dict.fromkeys([*told[0], *told[1]])
    both = {name: (told[0].get(name), told[1].get(name)) for name in names}
    ours, theirs = ({(p.policy, p.capacity): p for p in r.points} for r in (a, b))
    keys = dict.fromkeys([*ours, *theirs])
    pairs = [Pair(*key, ours.get(key), theirs.get(key)) for key in keys]
    pairs.sort(key=lambda pair: pair.points is None)
    return Comparison({name: values for name, values in both.items() if values[0] != values[1]}, pairs)


def _flat(prefix: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Flattens nested maps; names are joined by dots."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        out |= _flat(f"{prefix}.{name}", value) if isinstance(value, dict) else {f"{prefix}.{name}": value}
    return out
