"""What every bench shares: interleaved rounds, results, and an eye on who else uses the machine.

A figure alone says little, because the machine drifts: each round takes one sample of every contestant, ours
first or last by turns, and only ratios within a round are compared. A round in which other processes used
more than a tenth of a core is discarded and counted.
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

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10

OTHERS_SHARE = 0.10
"""More than this share of one core used by others spoils a round."""

MIN_ROUNDS = 5
_PATIENCE = 2.0  # times the seconds asked for, if too many rounds were spoilt

PROCESSES = multiprocessing.get_context("forkserver")
"""Makes processes that have numpy and the client loaded already: they start at once, and alike."""
PROCESSES.set_forkserver_preload(["numpy", "kvstore", "bench.harness"])

Sample = Callable[[int], float]
"""Takes one sample in the round of that number and returns its figure, in the unit of the bench."""


_Sizes = TypeVar("_Sizes")

Doing = Callable[[str, float | None], None]
"""Shows what goes on, and how much of it is done."""


class Unable(Exception):
    """This machine lacks what a bench measures; says what."""


class NotDone(Exception):
    """The work that a bench timed did not happen, so its figure would be a lie."""


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
        """Whether the figures are within the bound."""
        figure = value if self.of == "value" else ratio
        if figure is None:
            return False
        return figure >= self.bound if self.sign == ">=" else figure <= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


@dataclass(slots=True)
class Result:
    """One line of output. `extra` holds further figures of the same measurement, by name with unit."""

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
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.target.is_met(self.value, self.ratio)

    def to_map(self) -> dict[str, Any]:
        """Plain values for JSON."""
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
    """Floats to four significant digits; everything else, and what is within, as it is."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


@dataclass(slots=True)
class Rounds:
    """The figures of the rounds that count: one tuple a round, one figure a contestant, ours first."""

    figures: list[tuple[float, ...]]
    discarded: int
    noisy: bool

    def median(self, contestant: int) -> float:
        """The middle figure of one contestant."""
        return statistics.median(figures[contestant] for figures in self.figures)

    def ratio(self, reference: int) -> float:
        """The middle of the ratios of ours to a reference, each taken within a round."""
        return statistics.median(figures[0] / figures[reference] for figures in self.figures)

    def result(
        self, name: str, unit: str, target: Target | None = None, contestant: int = 1, **extra: Any
    ) -> Result:
        """The line that these rounds make of ours and one contestant, the reference."""
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
    """What one bench is given: time, a folder on the disk to measure, and a progress display.

    In a smoke run sizes are the smallest, one round is enough, and no figure means anything.
    """

    def __init__(
        self, seconds: float, folder: Path, show: Doing = lambda what, share: None, smoke: bool = False
    ) -> None:
        self.seconds = seconds
        self.folder = folder
        self.smoke = smoke
        self._show = show

    def pick(self, full: _Sizes, smoke: _Sizes) -> _Sizes:
        """The sizes of this run."""
        return smoke if self.smoke else full

    def doing(self, what: str, share: float | None = None) -> None:
        """Shows what goes on, and how much of it is done (None: nobody knows)."""
        self._show(what, share)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary folder on the disk to measure, gone afterwards."""
        with tempfile.TemporaryDirectory(prefix=".kvstore-bench-", dir=self.folder) as name:
            yield Path(name)

    def interleave(self, what: str, contestants: Sequence[Sample], share: float = 1.0) -> Rounds:
        """Samples all contestants in turn, for `share` of the seconds, ours (the first) before the others
        in even rounds and behind them in odd ones. A first round only warms up.
        """
        seconds, least = self.seconds * share, self.pick(MIN_ROUNDS, 1)
        for sample in contestants:
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
            # Better a figure that says so itself than none.
            return Rounds(kept + spoilt, 0, noisy=True)
        return Rounds(kept, len(spoilt), noisy=False)


class Neighbours:
    """Whether processes that are not ours, nor our descendants, nor the kernel's, get in the way.

    Reads every process's CPU clock, exact to the nanosecond where /proc/stat counts in ticks of 10 ms; time
    that the hypervisor stole is known in ticks only. Processes that come and go between two looks are missed.
    """

    def __init__(self) -> None:
        self._kind: dict[int, bool] = {}
        self._before: dict[int, float] = {}
        self._stolen_s = 0.0
        self._at_s = 0.0
        self.start()

    def start(self) -> None:
        """From here on."""
        self._before, self._stolen_s, self._at_s = self._clocks(), _stolen_s(), time.monotonic()

    def disturbed(self) -> bool:
        """Whether others used more than their share since `start`."""
        now = self._clocks()
        used_s = sum(max(0.0, clock - self._before.get(pid, 0.0)) for pid, clock in now.items())
        allowed_s = OTHERS_SHARE * (time.monotonic() - self._at_s)
        return used_s > allowed_s or _stolen_s() - self._stolen_s > allowed_s

    def _clocks(self) -> dict[int, float]:
        """CPU seconds of every process that is none of ours."""
        clocks = {}
        for name in os.listdir("/proc"):
            if name.isdecimal() and not self._is_ours(int(name)):
                try:
                    # How the kernel numbers the CPU clock of a process: see clock_getcpuclockid(3).
                    clocks[int(name)] = time.clock_gettime((~int(name) << 3) | 2)
                except OSError:
                    continue
        return clocks

    def _is_ours(self, pid: int) -> bool:
        """Whether a process is this one, descends from it, or is a thread of the kernel's."""
        known = self._kind.get(pid)
        if known is None:
            parent, kernel = _ancestry(pid)
            known = kernel or pid == os.getpid() or (parent > 1 and self._is_ours(parent))
            self._kind[pid] = known
        return known


def _ancestry(pid: int) -> tuple[int, bool]:
    """(parent, whether the kernel runs it) of a process; (0, True) if it is gone."""
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
    """The value below which that share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def like_the_daemon() -> Iterator[None]:
    """Python's threads take turns as often as they do in the daemon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def progress_display(what: str) -> Iterator[Doing]:
    """A line about a bench on stderr, if that is a terminal."""
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
