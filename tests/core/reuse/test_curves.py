"""Curves against what was put into them, against cohorts in a list, and densities against plain loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.reuse import curves as module
from kvstore.core.reuse.curves import _WIDTHS, SPANS, ReuseCurves, span_of, tick


def array(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def span(age_s: float) -> int:
    return int(span_of(np.array([age_s]))[0])


def live(
    curves: ReuseCurves, comes_back: dict[int, float], seconds: int, after_s: float, rate: int = 20
) -> float:
    """Each second so many blocks join each class; part of them are used about `after_s` later, with jitter.

    Those join no class again. Returns when it ended.
    """
    dice = np.random.default_rng(1)
    due: dict[int, list[tuple[int, float]]] = {}
    for now in range(seconds):
        for kind, since in due.pop(now, []):
            curves.used(array(kind), np.array([since]), float(now))
        for kind, part in comes_back.items():
            curves.joined(np.full(rate, kind), float(now))
            for late in dice.uniform(0.9, 1.1, int(dice.binomial(rate, part))) * after_s:
                due.setdefault(now + max(1, round(late)), []).append((kind, float(now)))
    for _ in range(8):
        curves.learn()
    return float(seconds)


def test_spans_of_ages() -> None:
    ages = np.array([0.0, 0.99, 1.0, 1.34, 1.36, 1e3, 1e9])
    assert span_of(ages).tolist() == [0, 0, 1, 1, 2, 24, SPANS - 1]
    assert tick(1.99) == 1.875


@pytest.mark.parametrize("part", [0.2, 0.7])
def test_the_curve_that_was_put_in_is_found(part: float) -> None:
    curves = ReuseCurves((1, 1, 1))
    live(curves, {0: part}, 1500, 60.0)
    chance, density = curves.chance[0], curves.density[0]
    assert chance[span(0.0)] == pytest.approx(part, abs=0.04)
    assert chance[span(40.0)] == pytest.approx(part, abs=0.04)
    assert chance[span(100.0)] < 0.05
    peak = span(54.0)
    assert peak - 1 <= density.argmax() <= span(60.0)
    assert density[0] < density[peak - 3] < density[peak]
    assert density[span(95.0)] < density[peak] / 20
    assert density[0] == pytest.approx(part / (60 * part + (1 - part) * 66.8), rel=0.2), (
        "kept till after 66 s"
    )


def test_blocks_without_reuse_drop_to_nearly_zero() -> None:
    curves = ReuseCurves((1, 1, 1))
    at_first = curves.density[0].copy()
    live(curves, {0: 0.0}, 600, 60.0)
    assert curves.chance[0].max() < 0.02
    assert (curves.density[0, : span(60.0)] < at_first[: span(60.0)] / 20).all()


def test_a_class_of_which_little_is_known_leans_on_its_group() -> None:
    curves = ReuseCurves((2, 2, 1))
    now = live(curves, {0: 0.8, 2: 0.0}, 600, 30.0)
    curves.joined(array(1, 3), now)
    curves.learn()
    known, leans, other = curves.chance[0, 0], curves.chance[1, 0], curves.chance[3, 0]
    assert known > leans > 0.6
    assert other < 0.1
    # What it shows itself counts for more in the end.
    for _ in range(100):
        now += 1.0
        curves.joined(np.full(50, 1), now)
    curves.learn()
    assert curves.chance[1, 0] < 0.15


def test_old_observations_count_less() -> None:
    curves = ReuseCurves((1, 1, 1))
    half_life, n = module._HALF_LIFE, 4096
    curves.joined(np.zeros(half_life - 1, np.int64), 0.0)
    assert curves._reached[0, 0] == half_life - 1
    curves.joined(array(0), 0.0)
    assert curves._reached[0, 0] == half_life / 2
    now, highest = 0.0, 0.0
    for comes_back in [True] * 40 + [False] * 160:
        curves.joined(np.zeros(n, np.int64), now)
        if comes_back:
            curves.used(np.zeros(n, np.int64), np.full(n, now), now + 1.5)
        curves.learn()
        highest = max(highest, float(curves.chance[0, 0]))
        now += 3.0
    assert highest > 0.4
    assert curves.chance[0, 0] < highest / 3, "five half-lives later"


@pytest.mark.parametrize("level", [0, 1])
def test_blocks_that_join_at_once_are_one_piece_of_evidence(level: int) -> None:
    """Class 0 is never used, its group always. The fewer prompts its blocks came with, the more it leans."""
    leaning = []
    for at_once in (1, 10, 400):
        curves = ReuseCurves((2, 1, 1) if level else (1, 2, 1))
        for i in range(0, 400, at_once):
            curves.joined(np.zeros(at_once, np.int64), i / 100)
        for i in range(4000):
            curves.joined(array(1), 10.0 + i / 1000)
        curves.used(np.ones(4000, np.int64), 10.0 + np.arange(4000) / 1000, 16.0)
        for i in range(17, 120):
            curves.joined(array(1), float(i))
        curves.learn()
        leaning.append(float(curves.chance[0, 0]))
    apart, tens, at_once = leaning
    assert apart < 0.6 * tens
    assert tens < 0.6 * at_once


# -- against a plain model


@dataclass
class Cohort:
    start: float
    at: int
    waiting: Counter[int]


class Plain:
    """What curves count, cohort by cohort, span by span."""

    def __init__(self) -> None:
        self.cohorts: list[Cohort] = []
        self.used: Counter[tuple[int, int]] = Counter()
        self.reached: Counter[tuple[int, int]] = Counter()
        self.next_step = 0.0

    def ends(self, now: float) -> list[float]:
        return [c.start for c in self.cohorts[1:]] + [now]

    def step(self, now: float) -> None:
        if self.cohorts and now < self.next_step:
            return
        self.next_step = now + 1.0
        for cohort, end in zip(self.cohorts, self.ends(now), strict=False):
            while cohort.at < span(max(now - end, 0.0)):
                cohort.at += 1
                for kind, n in cohort.waiting.items():
                    self.reached[kind, cohort.at] += n
        if self.cohorts and now - self.cohorts[-1].start < 2.0:
            return
        ends = self.ends(now)
        for i, (one, other) in enumerate(zip(self.cohorts, self.cohorts[1:], strict=False)):
            if ends[i + 1] - one.start <= 0.15 * (now - ends[i + 1]) and one.at == other.at:
                one.waiting.update(other.waiting)
                del self.cohorts[i + 1]
                break
        self.cohorts.append(Cohort(now, 0, Counter()))

    def join(self, kinds: list[int], now: float) -> None:
        self.step(now)
        for kind in kinds:
            self.cohorts[-1].waiting[kind] += 1
            self.reached[kind, 0] += 1

    def use(self, kind: int, since: float, now: float) -> None:
        self.step(now)
        self.used[kind, span(now - since)] += 1
        for at in range(self.leave(kind, since) + 1, span(now - since) + 1):
            self.reached[kind, at] += 1

    def leave(self, kind: int, since: float) -> int:
        cohort = [c for c in self.cohorts if c.start <= since][-1]
        cohort.waiting[kind] -= 1
        return cohort.at


KINDS = 4
_waits = st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0, 20.0, 300.0, 40_000.0])
Act = tuple[float, str, list[int], int]
_acts = st.lists(
    st.tuples(
        _waits,
        st.sampled_from(["join", "join", "use", "leave"]),
        st.lists(st.integers(0, KINDS - 1), min_size=1, max_size=6),
        st.integers(0, 1000),
    ),
    max_size=60,
)


def follow(curves: ReuseCurves, acts: list[Act], plain: Plain | None = None) -> None:
    """Does all of this to curves; and to the plain model, then compares."""
    now, there = 0.0, list[tuple[int, float]]()
    exact: Counter[tuple[int, int]] = Counter()
    for wait, act, kinds, which in acts:
        now += wait
        if act == "join":
            curves.joined(array(*kinds), now)
            there += [(kind, now) for kind in kinds]
            if plain:
                plain.join(kinds, now)
            continue
        at = which % len(there) if there else 0
        some, there = there[at : at + len(kinds)], there[:at] + there[at + len(kinds) :]
        if not some:
            continue
        classes, since = array(*(k for k, _ in some)), np.array([s for _, s in some])
        if act == "use":
            curves.used(classes, since, now)
            exact.update((k, at) for k, s in some for at in range(span(now - s) + 1))
        else:
            curves.left(classes, since)
        for kind, began in some if plain else ():
            if act == "use":
                plain.use(kind, began, now)
            else:
                plain.leave(kind, began)
    if plain is None:
        return
    for kind in range(KINDS):
        for at in range(SPANS):
            assert curves._used[kind, at] == plain.used[kind, at]
            assert curves._reached[kind, at] == plain.reached[kind, at]
            assert curves._reached[kind, at] >= exact[kind, at], "what was used had reached its span"
    assert curves._waiting[: curves._cohorts].sum() == len(there)


@given(_acts)
@settings(max_examples=80)
def test_counts_are_those_of_a_plain_model(acts: list[Act]) -> None:
    follow(ReuseCurves((2, 2, 1)), acts, Plain())


def test_counts_are_those_of_a_plain_model_in_a_long_life() -> None:
    """Cohorts of all ages, of which neighbours are joined all the time."""
    dice, acts = np.random.default_rng(3), list[Act]()
    for _ in range(2500):
        act = str(dice.choice(["join", "join", "use", "leave"]))
        kinds = dice.integers(0, KINDS, int(dice.integers(1, 6))).tolist()
        acts.append((float(dice.choice([0.125, 1.0, 1.5, 2.0])), act, kinds, int(dice.integers(0, 1 << 30))))
    follow(ReuseCurves((2, 2, 1)), acts, Plain())


@given(_acts)
@settings(max_examples=40)
def test_density_is_the_best_end_and_chance_all_of_them(
    acts: list[Act],
) -> None:
    curves = ReuseCurves((2, 2, 1))
    follow(curves, acts)
    curves.learn()
    known = np.flatnonzero(curves._reached[:, 0])
    widths = _WIDTHS.tolist()
    seen = curves._reached.any(axis=0).tolist()
    for kind, hazards in zip(known.tolist(), curves._hazards(known).tolist(), strict=True):
        for first in range(SPANS):
            best, reach, hits, time = 0.0, 1.0, 0.0, 0.0
            still = 1.0
            for at in range(first, SPANS):
                hits += reach * hazards[at]
                time += reach * widths[at] * (1 - hazards[at] / 2)
                reach *= 1 - hazards[at]
                best = max(best, hits / time)
                still *= 1 - hazards[at] * seen[at]
            assert curves.density[kind, first] == pytest.approx(best, rel=1e-4)
            assert curves.chance[kind, first] == pytest.approx(1 - still, abs=1e-5)


# -- odd lives


def sound(curves: ReuseCurves) -> None:
    for _ in range(4):
        curves.learn()
    for values in (curves._used, curves._reached, curves._waiting[: curves._cohorts], curves.density):
        assert np.isfinite(values).all()
        assert (values >= 0).all()
    assert (curves.chance >= 0).all()
    assert (curves.chance <= 1).all()
    assert (curves.density > 0).all(), "nothing is for ever worth nothing"
    assert 0 < curves._cohorts <= len(curves._start)
    starts = curves._start[: curves._cohorts]
    assert (np.diff(starts) > 0).all()


@pytest.mark.parametrize("wait", [0.0, 0.1, 2.0, 30.0, 1e5])
def test_silence_and_time_that_stands_still(wait: float) -> None:
    curves, size, now, before = ReuseCurves((2, 1, 1)), 0, 5.0, []
    for i in range(400):
        curves.joined(array(0, 0, 1), now)
        before.append(now)
        if i >= 3:
            curves.used(array(0), np.array([tick(before[-3])]), now)
            curves.left(array(1), np.array([tick(before[-2])]))
        size = size or curves.ram_bytes
        now += wait
    assert curves.ram_bytes == size
    sound(curves)
    assert curves.joins == 1200


@pytest.mark.parametrize("cohorts", [3, 8])
def test_more_cohorts_than_there_is_room_for(cohorts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COHORTS", cohorts)
    curves, now = ReuseCurves((1, 1, 1)), 0.0
    for _ in range(200):
        curves.joined(np.zeros(10, np.int64), now)
        curves.used(np.zeros(4, np.int64), np.full(4, now), now + 2.0)
        now += 2.5
    sound(curves)
    assert curves._cohorts == cohorts
    assert curves._used.sum() == 800
    assert curves._waiting[:cohorts].sum() == 1200, "none got lost"
    assert curves.chance[0, 0] == pytest.approx(0.4, abs=0.1)


def test_uses_before_the_first_cohort_count_as_uses() -> None:
    curves = ReuseCurves((1, 1, 1))
    curves.used(array(0), np.array([-100.0]), 50.0)
    assert curves._used[0, span(150.0)] == 1
    curves.left(array(0), np.array([-100.0]))
    curves.joined(array(0), 50.0)
    sound(curves)


def test_curves_continue_from_saved_counts() -> None:
    first, dice = ReuseCurves((2, 1, 1)), np.random.default_rng(2)
    for i in range(300):
        first.joined(dice.integers(0, 2, 5), float(i))
        first.used(array(0), np.array([float(dice.integers(0, i + 1))]), float(i))
    counts = first.counts()
    second = ReuseCurves((2, 1, 1), counts)
    first._learn(np.arange(2))
    assert np.array_equal(second.density, first.density)
    assert counts.together.sum() > 1500, "blocks joined in fives"
    assert second.joins == 1500
    second.joined(array(0), 1000.0)
    assert first.counts().reached[0, 0] == counts.reached[0, 0], "a copy"
