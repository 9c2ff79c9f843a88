"""The report of a lab run: plain data, written and read as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from kvstore.errors import KVStoreError

VERSION = 1


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """The trace. Two traces with the same `digest` have the same requests and blocks in the same order.

    `accesses`: full blocks of all requests. `unique_blocks`: distinct blocks. `best_hit_ratio`: the hit ratio
    of a cache that holds every block.
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
    """The settings of a replay. `model`: the hybrid model, "": full attention only.

    `users` to `seed` are None if the trace has its own clock.
    """

    block_tokens: int
    block_bytes: int
    options: dict[str, str] = field(default_factory=dict)
    model: str = ""
    users: int | None = None
    gap_cap_s: float | None = None
    shared: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """The result of one policy at one capacity.

    `hit_ratio`: tokens served / input tokens. `block_hit_ratio`: blocks served / full blocks requested.
    `share_by_tier`: fraction of the served blocks that each tier served. `written_per_served`: bytes written
    to each lower tier / bytes served; None if nothing was served. `drive_writes_per_day`: bytes written to
    NVMe per day of trace time / capacity of NVMe; None without NVMe or without trace time.
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
    """Belady's bound at one capacity, for the sum of all tiers."""

    capacity: str
    blocks: int
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class Report:
    """A lab run. `version`: the version of this format."""

    trace: TraceInfo
    settings: ReplaySettings
    points: list[Point]
    bounds: list[BoundPoint]
    version: int = VERSION

    @property
    def two_tiers(self) -> bool:
        """Whether any of the replayed nodes has NVMe."""
        return any(len(p.blocks_by_tier) > 1 for p in self.points)


def load(path: Path) -> Report:
    """Reads a report from JSON. Raises KVStoreError if the file is not a report of this version."""
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
        raise KVStoreError(f"{path} is not a report: {where}: {first['msg']}", hint) from None
    if report.version != VERSION:
        raise KVStoreError(f"{path} is a report of version {report.version}, this is {VERSION}", hint)
    return report
