"""What a soak has seen, and what of it breaks a promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bench.harness import quantile
from tests.soak.samples import LEAST_S, Growth, growths, warm_up_s

_SLOWER = 3.0
"""The p99 of gets late in a life, over the one after its warm-up, that is no noise."""
_LEAST_GETS = 200


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, with which dice, how many lives of the daemon, and steps/s of each engine."""

    seconds: float
    seed: int
    lives: int
    rate: float

    def life_s(self, number: int) -> float:
        """Returns the seconds of a life. The first has half of the time: slow growth takes long to show."""
        if not number:
            return self.seconds / min(self.lives, 2)
        return self.seconds / 2 / (self.lives - 1)


@dataclass(slots=True)
class Life:
    """The samples of a daemon from its start to its end; `gets`: seconds and milliseconds of each get."""

    times_s: list[float] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    gets: list[tuple[float, float]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def slower(self) -> float:
        """Returns the p99 of gets in the last third after the warm-up, over that of the first third."""
        first, last = (self.times_s[0], self.times_s[-1]) if self.times_s else (0.0, 0.0)
        begins = first + warm_up_s(last - first)
        third = (last - begins) / 3
        early = [ms for at, ms in self.gets if begins <= at < begins + third]
        late = [ms for at, ms in self.gets if at >= last - third]
        if last - first < LEAST_S or min(len(early), len(late)) < _LEAST_GETS:
            return 1.0
        return quantile(late, 0.99) / max(1.0, quantile(early, 0.99))

    def p99s_ms(self) -> list[float]:
        """Returns the p99 of gets in each eighth of the gets."""
        step = max(1, -(-len(self.gets) // 8))
        parts = [self.gets[at : at + step] for at in range(0, len(self.gets), step)]
        return [quantile([ms for _, ms in part], 0.99) for part in parts]


@dataclass(slots=True)
class Outcome:
    """What was seen. `done`: by the operator. `failures`: each broken promise in words."""

    plan: Plan
    lives: list[Life] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Adds what grew, what became slower, and what did not happen."""
        if not self.counts["hits"]:
            self.failures.append("no engine has had a hit")
        for number, life in enumerate(self.lives, 1):
            for growth in growths(life.times_s, life.samples):
                if growth.is_leak:
                    self.failures.append(f"life {number}: {_words(growth)}")
            if (slower := life.slower()) > _SLOWER:
                self.failures.append(f"life {number}: the p99 of gets became {slower:.1f} times as long")
            if max((each["presence_tables"] - each["namespaces"] for each in life.samples), default=0) > 0:
                self.failures.append(f"life {number}: more presence tables than namespaces")
            if bad := life.counters.get("quarantined_blocks"):
                self.failures.append(f"life {number}: {bad} blocks did not prove their records")

    def text(self) -> str:
        """Returns a report for people."""
        plan = self.plan
        lines = [f"soak: {plan.seconds / 3600:.2f} h, seed {plan.seed}, {len(self.lives)} lives"]
        lines += [f"  {name:<44}{count:>12,}" for name, count in sorted(self.counts.items())]
        lines += [f"  operator: {name:<34}{count:>12,}" for name, count in sorted(self.done.items())]
        for number, life in enumerate(self.lives, 1):
            lines += [f"  life {number}: {_words(each)}" for each in growths(life.times_s, life.samples)]
            p99s = " ".join(f"{ms:.0f}" for ms in life.p99s_ms())
            lines.append(f"  life {number}: p99 of gets, late over early: {life.slower():.2f}; ms: {p99s}")
        lines += [f"FAILED: {text}" for text in self.failures]
        return "\n".join([*lines, *([] if self.failures else ["nothing was wrong, and nothing grew"])])


def _words(growth: Growth) -> str:
    within = f"{growth.least:+.1f} to {growth.most:+.1f}"
    an_hour = f"{growth.per_hour:+.1f} an hour, 95 %: {within}, {growth.samples} samples"
    return f"{growth.figure} grew by {growth.grown:+.2f} ({an_hour})"
