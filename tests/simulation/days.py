"""`python -m tests.simulation.days --hours H --seed S`: days of one daemon, and whether what it keeps grows.

The world of `run`, with its faults and its oracle, but spread over days and without a crash: one life is to
become old. What the daemon keeps is looked at every simulated hour: its Python objects, and the bytes that
the core counts. Exit code 1 if a property fails or something grows.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import types
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

from kvstore.daemon.operator import event_log
from tests.simulation.clients import Engine
from tests.simulation.run import Violation, World
from tests.simulation.seams import in_simulation
from tests.soak.samples import slope

_HOUR_S = 3600.0
_WARM_UP = 1 / 3
SLACK = 0.15
"""The share of its mean that a figure may grow by after the warm-up: policies, and what is under way, differ.

Of some 1,400 objects. An object that each deleted namespace leaves behind is as much within three days.
"""
_FEW_ENTRIES = 8
_NO_PARTS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


@dataclass
class Report:
    """What came of some days. `objects` and `core_bytes`: of each hour; `by_type`: of the first and last."""

    violation: str = ""
    objects: list[int] = field(default_factory=list)
    core_bytes: list[int] = field(default_factory=list)
    by_type: list[Counter[str]] = field(default_factory=list)
    steps: int = 0
    operations: int = 0
    hits: int = 0

    def grown(self) -> dict[str, float]:
        """Returns how much each figure grew after the warm-up, by a line through it, over its mean."""
        shares = {}
        for name, values in (("objects", self.objects), ("core_bytes", self.core_bytes)):
            rest = values[int(len(values) * _WARM_UP) :]
            hours = list(range(len(rest)))
            shares[name] = slope(hours, rest) * len(rest) * len(rest) / max(1, sum(rest))
        return shares

    @property
    def failures(self) -> list[str]:
        """Returns what is wrong, in words."""
        grew = [f"{name} grew by {share:.1%}" for name, share in self.grown().items() if share > SLACK]
        if grew and self.by_type:
            more = self.by_type[-1] - self.by_type[len(self.by_type) // 3]
            grew.append("most: " + ", ".join(f"{name} {n:+}" for name, n in more.most_common(6)))
        return [self.violation] * bool(self.violation) + grew


class _OldWorld(World):
    """A world in which one daemon lives for hours. `an_hour`: what each of two engines does in one."""

    audit_every = 2000

    def __init__(self, seed: int, hours: float, an_hour: float) -> None:
        super().__init__(seed, one_device=True)
        self.report = Report()
        self._hours, self._pace_s = hours, _HOUR_S / an_hour
        self.setup.scrub_bytes_per_s = 0

    def run(self) -> None:
        self.begin()
        self.engines = [Engine(self, number) for number in range(2)]
        for engine in self.engines:
            engine.pace_s = self._pace_s
        first = self.loop.now
        assert self.life is not None
        # A log that fills up is no growth.
        self.life.daemon.event_log._max_entries = _FEW_ENTRIES
        for hour in range(1, int(self._hours) + 1):
            while self.loop.now < first + hour * _HOUR_S and self.step():
                pass
            self._look()
        self.ending = True
        over = [task.done for engine in self.engines for task in engine.tasks]
        self.go_on(lambda: all(done() for done in over), _HOUR_S * 24, "an engine does not end")
        self.come_to_rest()

    def _look(self) -> None:
        assert self.life is not None
        by_type = kept_by(self.life.daemon, self.life.server)
        residency = self.life.daemon.placement.residency
        self.report.by_type.append(by_type)
        self.report.objects.append(by_type.total())
        self.report.core_bytes.append(residency.ram_bytes() - residency.decisions.ram_bytes())


def kept_by(*roots: object) -> Counter[str]:
    """Returns how many objects of each type are reachable from these, without those of tests."""
    gc.collect()
    by_type: Counter[str] = Counter()
    seen, waiting = set[int](), list[object](roots)
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if id(each) in seen or isinstance(each, _NO_PARTS) or kind.__module__.startswith("tests."):
            continue
        seen.add(id(each))
        by_type[f"{kind.__module__}.{kind.__qualname__}"] += 1
        waiting += gc.get_referents(each)
    return by_type


def live(seed: int, hours: float, an_hour: float = 300.0) -> Report:
    """Lets a daemon live for so many simulated hours, with `an_hour` operations of each of two engines."""
    world = _OldWorld(seed, hours, an_hour)
    few = mock.patch.object(event_log, "_MOST_CLOSED", _FEW_ENTRIES)
    with few, in_simulation(world):
        try:
            world.run()
        except Violation as error:
            world.report.violation = str(error)
        finally:
            world.close()
    world.report.steps, world.report.hits = world.loop.steps, world.counts["hits"]
    world.report.operations = world.operations.total()
    return world.report


def main() -> int:
    """Lives for days, and says what came of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.days")
    parser.add_argument("--hours", type=float, default=72)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--an-hour", type=float, default=300.0, help="operations of each of two engines")
    args = parser.parse_args()
    began = time.monotonic()
    report = live(args.seed, args.hours, args.an_hour)
    took = time.monotonic() - began
    print(
        f"{args.hours:g} simulated hours of seed {args.seed}: {report.operations:,} operations, "
        f"{report.hits:,} hits, {report.steps:,} events in {took:.0f} s, {took / args.hours:.1f} s an hour"
    )
    for name, values in (("objects", report.objects), ("core_bytes", report.core_bytes)):
        print(f"  {name}: {', '.join(f'{n:,}' for n in values[:: max(1, len(values) // 8)])}")
    print(
        "  " + ", ".join(f"{name} {share:+.1%} after the warm-up" for name, share in report.grown().items())
    )
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
