"""What a run of the lab found, as plain data: written and read as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvstore.errors import KVStoreError

VERSION = 1


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What was replayed. `digest` names its requests and blocks, in order; two equal ones are one workload.

    `accesses` are the full blocks that all requests ask for, `unique_blocks` how many of them are different,
    `best_hit_ratio` what a cache with room for all of them serves.
    """

    name: str
    digest: str
    kind: str
    requests: int
    accesses: int
    unique_blocks: int
    input_tokens: int
    duration_s: float
    skipped_lines: int
    best_hit_ratio: float


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How it was replayed. `users` to `seed` are None where the trace has a clock of its own."""

    block_tokens: int
    block_bytes: int
    options: dict[str, str] = field(default_factory=dict)
    users: int | None = None
    gap_cap_s: float | None = None
    shared: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One policy with one capacity.

    `hit_ratio` is tokens served over all input tokens, `block_hit_ratio` blocks served over full blocks asked
    for, `share_by_tier` the parts of the served blocks that lay there. `written_per_served` is bytes written
    to each lower tier over bytes served, None if nothing was served. `drive_writes_per_day` is how often the
    NVMe tier's capacity was written in a day of the trace's time, None without NVMe or without time.
    """

    policy: str
    capacity: str
    blocks_by_tier: dict[str, int]
    bytes_by_tier: dict[str, int]
    hit_ratio: float
    block_hit_ratio: float
    hits_by_tier: dict[str, int]
    share_by_tier: dict[str, float]
    stored_blocks: int
    evicted_blocks: int
    denied_blocks: int
    written_bytes_by_tier: dict[str, int]
    written_per_served: dict[str, float] | None
    drive_writes_per_day: float | None
    wall_s: float
    accesses_per_s: float


@dataclass(frozen=True, slots=True)
class BoundPoint:
    """Belady's bound at one capacity, of all tiers together."""

    capacity: str
    blocks: int
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `version` is that of this format."""

    trace: TraceInfo
    settings: ReplaySettings
    points: list[Point]
    bounds: list[BoundPoint]
    version: int = VERSION

    def to_map(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return asdict(self)


def load(path: Path) -> Report:
    """Reads what `to_map` made. Raises KVStoreError for what is no report of this version."""
    try:
        text = path.read_bytes()
    except OSError as e:
        raise KVStoreError(f"cannot read {path}: {e.strerror}", "check the path") from None
    hint = "write one with `kvstore lab replay --json`"
    try:
        report = TypeAdapter(Report).validate_json(text)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise KVStoreError(f"{path} is no report: {where}: {first['msg']}", hint) from None
    if report.version != VERSION:
        raise KVStoreError(f"{path} is a report of version {report.version}, this is {VERSION}", hint)
    return report
