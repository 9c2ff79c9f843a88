"""The harness of all benches: interleaved rounds, results, and detection of other load on the machine.

The speed of a machine drifts, so single figures are not comparable. Each round takes one sample of every
contestant, ours alternately first and last, and only ratios within a round are compared. A round in which
other processes used more than a tenth of a core is discarded and counted.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10

OTHERS_SHARE = 0.10
"""Rounds in which other processes use more than this share of one core are discarded."""

MIN_ROUNDS = 5
_PATIENCE = 2.0  # times the measuring time, if too many rounds were discarded

PROCESSES = multiprocessing.get_context("forkserver")
"""Starts processes with numpy and the client already loaded, so that all start at the same speed."""
PROCESSES.set_forkserver_preload(["numpy", "kvstore", "bench.harness"])

Sample = Callable[[int], float]
"""Takes one sample in the round of this number. Returns its figure in the unit of the bench."""


_Sizes = TypeVar("_Sizes")

Doing = Callable[[str, float | None], None]
"""Shows the current step and the fraction done."""


class Unable(Exception):
    """This machine lacks a requirement of a bench. The message names it."""


class NotDone(Exception):
    """The timed work was not done, so the figure would be wrong."""


def expect(got: object, wanted: object, what: str) -> None:
    """Raises NotDone unless `got` equals `wanted`."""
    if got != wanted:
        raise NotDone(f"{what}: {got}, not {wanted}")


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the ratio, or on the value itself."""

    sign: Literal[">=", "<="]
    bound: float
    of: Literal["ratio", "value"] = "ratio"

    def is_met(self, value: float, ratio: float | None) -> bool:
        """Returns whether the figures are within the bound."""
        figure = value if self.of == "value" else ratio
        if figure is None:
            return False
        return figure >= self.bound if self.sign == ">=" else figure <= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


@dataclass(slots=True)
class Result:
    """One row of output. `extra`: further figures of the same measurement, by name with unit."""

    name: str
    value: float
    unit: str
    reference: float | None
    ratio: float | None
    runs: int
    discarded: int = 0
    noisy: bool = False
    target: Target | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        return None if self.target is None else self.target.is_met(self.value, self.ratio)

    def to_map(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {
            "name": self.name,
            "value": rounded(self.value),
            "unit": self.unit,
            "reference": rounded(self.reference),
            "ratio": rounded(self.ratio),
            "runs": self.runs,
            "discarded": self.discarded,
            "noisy": self.noisy,
            "target": None if self.target is None else str(self.target),
            "met": self.met,
            **{name: rounded(value) for name, value in self.extra.items()},
        }


def rounded(value: Any) -> Any:
    """Returns a value with all floats rounded to four significant digits, also in nested maps."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


@dataclass(slots=True)
class Rounds:
    """The figures of valid rounds: one tuple per round with one figure per contestant, ours first."""

    figures: list[tuple[float, ...]]
    discarded: int
    noisy: bool

    def median(self, contestant: int) -> float:
        """Returns the median figure of one contestant."""
        return statistics.median(figures[contestant] for figures in self.figures)

    def ratio(self, reference: int) -> float:
        """Returns the median of the ratios of ours to a reference, each within one round."""
        return statistics.median(figures[0] / figures[reference] for figures in self.figures)

    def result(
        self, name: str, unit: str, target: Target | None = None, contestant: int = 1, **extra: Any
    ) -> Result:
        """Returns the row of ours compared with one contestant, the reference."""
        return Result(
            name,
            self.median(0),
            unit,
            self.median(contestant),
            self.ratio(contestant),
            len(self.figures),
            self.discarded,
            self.noisy,
            target,
            extra,
        )


class Bench:
    """The environment of one bench: measuring time, a folder on the measured disk, a progress display.

    A smoke run has the smallest sizes and one round; its figures mean nothing.
    """

    def __init__(
        self, seconds: float, folder: Path, show: Doing = lambda what, share: None, smoke: bool = False
    ) -> None:
        self.seconds = seconds
        self.folder = folder
        self.smoke = smoke
        self._show = show

    def pick(self, full: _Sizes, smoke: _Sizes) -> _Sizes:
        """Returns the sizes of this run."""
        return smoke if self.smoke else full

    def doing(self, what: str, share: float | None = None) -> None:
        """Shows the current step and the fraction done; None: unknown."""
        self._show(what, share)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yields a temporary folder on the measured disk. Removes it at the end."""
        with tempfile.TemporaryDirectory(prefix=".kvstore-bench-", dir=self.folder) as name:
            yield Path(name)

    def interleave(self, what: str, contestants: Sequence[Sample], share: float = 1.0) -> Rounds:
        """Samples all contestants in turns, for a fraction `share` of the measuring time.

        Ours (the first) runs before the others in even rounds and after them in odd ones. The first round is
        a warm-up and does not count; a smoke run has none.
        """
        seconds, least = self.seconds * share, self.pick(MIN_ROUNDS, 1)
        for sample in self.pick(contestants, ()):
            sample(0)
        neighbours = Neighbours()
        kept: list[tuple[float, ...]] = []
        spoilt: list[tuple[float, ...]] = []
        started = time.monotonic()
        number = 0
        while True:
            passed = time.monotonic() - started
            if number and passed >= seconds and (len(kept) >= least or passed >= _PATIENCE * seconds):
                break
            self.doing(what, min(1.0, passed / seconds))
            number += 1
            neighbours.start()
            order = range(len(contestants)) if number % 2 else range(len(contestants) - 1, -1, -1)
            figures = {i: contestants[i](number) for i in order}
            row = tuple(figures[i] for i in range(len(contestants)))
            (spoilt if neighbours.disturbed() else kept).append(row)
        if len(kept) < least:
            # A figure that is marked as noisy is better than none.
            return Rounds(kept + spoilt, 0, noisy=True)
        return Rounds(kept, len(spoilt), noisy=False)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process. Raises OSError if it has ended."""
    # The id of the CPU clock of a process, see clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)


class Neighbours:
    """Detects CPU use by other processes: not this one, its descendants or the kernel.

    Reads the CPU clock of every process, which has nanoseconds; /proc/stat counts ticks of 10 ms. Time that
    the hypervisor stole is known in ticks only. Processes that start and end between two reads are missed.
    """

    def __init__(self) -> None:
        self._kind: dict[int, bool] = {}
        self._before: dict[int, float] = {}
        self._stolen_s = 0.0
        self._at_s = 0.0
        self.start()

    def start(self) -> None:
        """Starts an observation."""
        self._before, self._stolen_s, self._at_s = self._clocks(), _stolen_s(), time.monotonic()

    def disturbed(self) -> bool:
        """Returns whether other processes used more than their share since `start`."""
        now = self._clocks()
        used_s = sum(max(0.0, clock - self._before.get(pid, 0.0)) for pid, clock in now.items())
        allowed_s = OTHERS_SHARE * (time.monotonic() - self._at_s)
        return used_s > allowed_s or _stolen_s() - self._stolen_s > allowed_s

    def _clocks(self) -> dict[int, float]:
        """Returns the CPU seconds of every other process."""
        clocks = {}
        for name in os.listdir("/proc"):
            if name.isdecimal() and not self._is_ours(int(name)):
                try:
                    clocks[int(name)] = cpu_seconds(int(name))
                except OSError:
                    continue
        return clocks

    def _is_ours(self, pid: int) -> bool:
        """Returns whether a process is this one, a descendant of it, or a kernel thread."""
        known = self._kind.get(pid)
        if known is None:
            parent, kernel = _ancestry(pid)
            known = kernel or pid == os.getpid() or (parent > 1 and self._is_ours(parent))
            self._kind[pid] = known
        return known


def _ancestry(pid: int) -> tuple[int, bool]:
    """Returns the parent of a process and whether it is a kernel thread; (0, True) if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, True
    return int(fields[1]), bool(int(fields[6]) & 0x00200000)


def _stolen_s() -> float:
    with open("/proc/stat", "rb") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which this share of the samples lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def like_the_daemon() -> Iterator[None]:
    """Sets the switch interval of Python threads to that of the daemon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def progress_display(what: str) -> Iterator[Doing]:
    """Shows the progress of a bench on stderr, if that is a terminal."""
    # Not in the environments of other stores, whose clients use this module.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None, what="starting")

        def show(what: str, share: float | None) -> None:
            total = None if share is None else 1.0
            progress.update(task, what=what, total=total, completed=share or 0.0)

        yield show
