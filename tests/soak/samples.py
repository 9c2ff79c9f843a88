"""What a daemon uses, by the second, and whether it grows."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WARM_UP, WARM_UP_S = 0.4, 600.0
"""The share of a daemon's life in which it may grow, at most so many seconds: index and statistics fill."""
_WINDOWS = 20
LEAST_S = 480.0
"""A shorter life says nothing: memory still grows in the first eight minutes."""

SLACK = {
    "anonymous_mib": 6.0, "shared_mib": 4.0, "descriptors": 6.0, "threads": 3.0, "records_mib": 4.0,
    "core_mib": 4.0, "leases": 8.0, "reservations": 8.0, "namespaces": 2.0,
}  # fmt: skip
"""Growth within the rest of a life that is noise, by figure. A leak of every request is far above."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How much a figure grew within a life without its warm-up, by a line through its samples.

    `least` and `most`: the bounds of its slope, an hour, to 95 %.
    """

    figure: str
    grown: float
    seconds: float
    samples: int
    least: float = 0.0
    most: float = 0.0

    @property
    def per_hour(self) -> float:
        """The growth in an hour."""
        return 3600 * self.grown / self.seconds

    @property
    def is_leak(self) -> bool:
        """Whether it grew by more than noise."""
        return self.grown > SLACK[self.figure]


def sample(pid: int, folder: Path, status: dict[str, object]) -> dict[str, float]:
    """Returns the figures of a daemon now. `folder`: of its data. Raises OSError if it has ended.

    Descriptors are counted without those of presence tables, which come and go: one a namespace at most.
    """
    lines = (line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    facts = {name: value.split() for name, value in lines}
    records = sum(file.stat().st_size for file in folder.glob("nvme*/records/data.mdb"))
    counted = {name: float(str(status[name])) for name in ("leases", "reservations", "namespaces")}
    opened = _open_files(pid)
    tables = sum("kvstore-presence" in name for name in opened)
    return {
        "anonymous_mib": int(facts["RssAnon"][0]) / 1024,
        "shared_mib": int(facts["RssShmem"][0]) / 1024,
        "threads": float(facts["Threads"][0]),
        "descriptors": float(len(opened) - tables),
        "presence_tables": float(tables),
        "records_mib": records / (1 << 20),
        "core_mib": float(str(status["core_ram_bytes"])) / (1 << 20),
        **counted,
    }


def _open_files(pid: int) -> list[str]:
    """Returns what each descriptor is open on."""
    names = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(str(each.readlink()))
    return names


def warm_up_s(life_s: float) -> float:
    """Returns the warm-up of a life of so many seconds."""
    return min(WARM_UP * life_s, WARM_UP_S)


def growths(times_s: Sequence[float], samples: Sequence[dict[str, float]]) -> list[Growth]:
    """Returns the growth of each figure within one life; nothing for a short one."""
    life_s = times_s[-1] - times_s[0] if times_s else 0.0
    if life_s < LEAST_S:
        return []
    first = bisect_left(times_s, times_s[0] + warm_up_s(life_s))
    times, rest = np.array(times_s[first:]), samples[first:]
    if len(rest) < 3:
        return []
    found = []
    for figure in SLACK:
        values = np.array([each[figure] for each in rest])
        span = float(times[-1] - times[0])
        found.append(Growth(figure, slope(times, values) * span, span, len(rest), *_bounds(times, values)))
    return found


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Returns the median of the slopes between samples (Theil-Sen): a few outliers do not change it."""
    step = max(1, len(times) // 400)
    x, y = np.array(times[::step]), np.array(values[::step])
    i, j = np.triu_indices(len(x), 1)
    return float(statistics.median(((y[j] - y[i]) / (x[j] - x[i])).tolist()))


def _bounds(times: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Returns the bounds of the slope to 95 %, an hour (Sen, 1968), by the medians of windows.

    Samples of one window are no independent ones: policies and quotas stay for a while.
    """
    parts = np.array_split(np.arange(len(times)), min(_WINDOWS, len(times)))
    x = np.array([np.median(times[part]) for part in parts])
    y = np.array([np.median(values[part]) for part in parts])
    i, j = np.triu_indices(n := len(x), 1)
    slopes = np.sort((y[j] - y[i]) / (x[j] - x[i])) * 3600
    off = 1.96 * float(np.sqrt(n * (n - 1) * (2 * n + 5) / 18))
    first, last = int((len(slopes) - off) / 2), int((len(slopes) + off) / 2)
    return float(slopes[max(first, 0)]), float(slopes[min(last, len(slopes) - 1)])
