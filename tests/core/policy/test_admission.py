"""What a lower tier takes, that a write budget is kept, and used, and what is not worth a slot at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core.policy.admission import DAY_S, Admission, Rule
from kvstore.core.reuse.classes import describe
from kvstore.core.reuse.reuse import Reuse
from kvstore.types import ALIGN
from tests.core.policy.pool import Tier
from tests.core.world import World, joined

MIB = 1 << 20


def array(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


class Expected(Reuse):
    """Blocks of which one knows how likely they are used again: row / 100."""

    def __init__(self) -> None:
        super().__init__(Tier(101).blocks, 8, 1)

    def chance(self, rows: np.ndarray, tenant: int, now: float) -> np.ndarray:
        return (rows / 100).astype(np.float32)


# -- rules


def test_always_takes_all() -> None:
    admission = Admission(Rule(), Expected())
    assert admission.admits(np.arange(101), 0, 0.0).all()
    assert (admission.threshold, admission.refused) == (0.0, 0)
    admission.wrote(1 << 50, 0.0)
    assert admission.admits(array(0), 0, 0.0).all(), "no budget, no bound"
    assert admission.written == 1 << 50
    assert admission.admits(array(), 0, 0.0).tolist() == []


def test_twice_admits_blocks_used_again() -> None:
    reuse = Tier(20).reuse
    admission = Admission(Rule("twice"), reuse)
    reuse.stored(array(0, 1, 2), 0, 0.0)
    assert admission.admits(array(0, 1, 2), 0, 0.0).tolist() == [False] * 3
    reuse.used(array(1, 2), 0, 1.0)
    assert admission.admits(array(0, 1, 2), 0, 1.0).tolist() == [False, True, True]
    assert admission.refused == 4


def test_reuse_admits_likely_blocks() -> None:
    admission = Admission(Rule("reuse", threshold=0.3), Expected())
    assert admission.admits(array(90, 31, 29, 0), 0, 0.0).tolist() == [True, True, False, False]
    assert admission.threshold == 0.3
    assert admission.refused == 2
    assert Admission(Rule("always", threshold=0.3), Expected()).threshold == 0.0


def test_reuse_admits_what_earns_as_much_as_the_blocks_it_replaces() -> None:
    admission = Admission(Rule("reuse", threshold=0.0), Expected())
    admission._earnings = lambda rows, tenant, now: rows / 100  # type: ignore[method-assign]
    assert admission.admits(array(0, 90), 0, 0.0).all(), "none was evicted"
    admission.replaced(np.full(100, 40), 0, 10.0)
    assert admission.admits(array(39, 40, 90), 0, 10.0).tolist() == [False, True, True]
    assert admission.admits(array(39), 1, 10.0).all(), "of another tenant"
    assert admission.admits(array(19, 21), 0, 610.0).tolist() == [False, True], "none since 600 s"
    admission.replaced(np.full(50, 80), 0, 610.0)
    assert admission.admits(array(49, 51), 0, 610.0).tolist() == [False, True], "half of the price is new"
    admission.change(Rule("always"), 610.0)
    assert admission.admits(array(0), 0, 610.0).all()


@pytest.mark.parametrize("mode", ["reuse", "always"])
def test_evictions_from_the_lower_tier_alone_set_its_price(mode: str) -> None:
    w = world(Rule(mode, threshold=0.0), write_policy="on_evict", policy="hazard")  # type: ignore[arg-type]
    memory, nvme = (tier.admission for tier in w.p.residency.tiers)
    for i in range(100):
        w.now += 1.0
        w.put(0, 1, [b"x%02d" % i])
        w.finish_all()
        if i == 15:
            assert w.p.view.counters["written_blocks"] > 0
            assert not nvme._prices, "nothing was evicted from NVMe yet"
    assert not memory._prices
    prices = [price.earned for price in nvme._prices.values()]
    assert (len(prices) == 1 and prices[0] > 0) if mode == "reuse" else not prices
    w.settle()


def test_reuse_is_estimated_per_tenant() -> None:
    reuse = Tier(4000).reuse
    admission = Admission(Rule("reuse", threshold=0.3), reuse)
    for i in range(100):
        for tenant in (0, 1):
            rows = np.arange(20) + 20 * (2 * i % 90 + tenant)
            reuse.history.leave(rows)
            reuse._blocks.words[0, rows] += np.uint64(1 << 40)
            reuse.stored(rows, tenant, 10.0 * i)
            if tenant == 0:
                reuse.used(rows, tenant, 10.0 * i + 5)
    reuse.stored(np.arange(3900, 3940), 0, 1000.0)
    reuse.stored(np.arange(3940, 3980), 1, 1000.0)
    assert admission.admits(np.arange(3900, 3940), 0, 1001.0).all()
    assert not admission.admits(np.arange(3940, 3980), 1, 1001.0).any()


# -- a budget

Wanted = Callable[[float], int]
"""How many blocks there are to write at a time of a day, each half minute."""


def write(
    admission: Admission, wanted: Wanted, days: float, block: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """(when, how many bytes, mean chance of what was written)."""
    dice, chances = np.random.default_rng(2), list[float]()
    times = np.arange(0, days * DAY_S, 30.0)
    bytes_then = np.zeros(len(times))
    for i, now in enumerate(times.tolist()):
        rows = (100 * dice.random(wanted(now % DAY_S)) ** 3).astype(np.int64)
        taken = rows[admission.admits(rows, 0, now)]
        admission.wrote(len(taken) * block, now)
        bytes_then[i] = len(taken) * block
        chances += (taken / 100).tolist()
    return times, bytes_then, float(np.mean(chances))


def most_in_a_day(times: np.ndarray, written: np.ndarray) -> float:
    before = np.concatenate(([0.0], np.cumsum(written)))
    return float((before[np.searchsorted(times, times + DAY_S)] - before[:-1]).max())


WANTED: dict[str, Wanted] = {
    "steadily": lambda at: 40,
    "little more than allowed": lambda at: 12,
    "by day": lambda at: 80 if at < DAY_S / 2 else 12,
    "in bursts": lambda at: 200 if at % 3600 < 600 else 8,
}


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("mode", ["always", "reuse"])
def test_a_budget_is_never_exceeded_and_nearly_all_used(name: str, mode: str) -> None:
    day = 10 * 2880 * MIB
    admission = Admission(Rule(mode, 0.01, day), Expected())  # type: ignore[arg-type]
    times, written, chance = write(admission, WANTED[name], 4, MIB)
    batch = written.max()
    assert batch <= 0.01 * day
    assert most_in_a_day(times, written) <= 1.04 * day + batch, "what it began may be finished"
    assert admission.written == written.sum()
    for first in (DAY_S, 2 * DAY_S, 3 * DAY_S):
        used = written[(times >= first) & (times < first + DAY_S)].sum()
        assert used >= 0.9 * day
    assert chance >= (0.25 if name == "little more than allowed" else 0.3), "the best were chosen"


def told(written: dict[float, int], now: float, bytes_a_day: int, before: int = 0) -> Admission:
    """One that wrote so much at those hours, and gets another budget now."""
    admission = Admission(Rule("always", 0.0, before), Expected())
    for hour, nbytes in written.items():
        admission.wrote(nbytes, hour * 3600)
    admission.change(Rule("always", 0.0, bytes_a_day), now)
    return admission


def silent_for(admission: Admission, now: float) -> float:
    """Hours until something may be written again, in steps of a quarter."""
    for quarter in range(1, 400):
        if admission.admits(array(100), 0, now + 900.0 * quarter).any():
            return quarter / 4
    return float("inf")


@pytest.mark.parametrize(
    ("written", "hours"),
    [
        ({}, 0.25),
        ({20: 1000 * MIB}, 0.25),  # more than a day ago
        ({50: 12 * MIB}, 7.25),  # half a day's worth five hours ago, the last hour of which counts as now
        ({55: 12 * MIB}, 12.25),
        ({44: 6 * MIB, 50: 6 * MIB}, 1.25),
        ({54: 10_000 * MIB}, 24.25),  # whatever it was, a day without any is enough
    ],
)
def test_a_new_budget_counts_todays_writes(written: dict[float, int], hours: float) -> None:
    for before in (0, 500 * MIB):
        now = 55.9999 * 3600
        assert silent_for(told(written, now, 24 * MIB, before), now) == pytest.approx(hours, abs=0.26)


def test_a_change_of_budgets_keeps_the_lower_one_from_the_change_on() -> None:
    """Every day, the one in which it was changed included, as far as what was written before leaves room."""
    day = 10 * 2880 * MIB
    admission = Admission(Rule("always", 0.0, 3 * day), Expected())
    times, written, _ = write(admission, lambda at: 40, 1.5, MIB)
    admission.change(Rule("always", 0.0, day), 1.5 * DAY_S)
    dice, later = np.random.default_rng(5), np.arange(1.5 * DAY_S, 4 * DAY_S, 30.0)
    bytes_then = []
    for now in later.tolist():
        rows = dice.integers(0, 101, 40)
        taken = int(admission.admits(rows, 0, now).sum()) * MIB
        admission.wrote(taken, now)
        bytes_then.append(taken)
    more = np.array(bytes_then)
    assert most_in_a_day(later, more) <= 1.04 * day + 40 * MIB
    assert more[later >= 3 * DAY_S].sum() >= 0.9 * day
    both_times, both = np.concatenate((times, later)), np.concatenate((written, more))
    straddling = [both[(both_times >= s) & (both_times < s + DAY_S)].sum() for s in times[-2000::50]]
    before = [written[times >= s].sum() for s in times[-2000::50]]
    for total, already in zip(straddling, before, strict=True):
        assert total <= max(1.04 * day, already) + 40 * MIB


def test_without_a_budget_nothing_is_held_back_any_more() -> None:
    admission = told({1: 10 * MIB}, 7200.0, 0, before=1)
    assert not admission.spent
    assert admission.threshold == 0.0
    assert admission.admits(array(0), 0, 7201.0).all()


def test_another_rule_of_the_same_budget_leaves_its_account_alone() -> None:
    admission = Admission(Rule("always", 0.0, 24 * MIB), Expected())
    admission.admits(array(1), 0, 0.0)
    admission.admits(array(1), 0, 1800.0)
    left = admission._left
    assert left > 0
    admission.change(Rule("reuse", 0.6, 24 * MIB), 1800.0)
    assert admission._left == left
    assert admission.admits(array(70, 50), 0, 1800.0).tolist() == [True, False]


def test_daily_writes_are_counted_by_the_hour() -> None:
    admission = Admission(Rule(), Expected())
    for hour in range(40):
        admission.wrote(MIB, hour * 3600.0)
        admission.wrote(MIB, hour * 3600.0 + 1800)
    assert admission.written_in_a_day(39.75 * 3600) == 50 * MIB, "of the oldest hour all"
    assert admission.written_in_a_day(60.5 * 3600) == 2 * 4 * MIB
    assert admission.written_in_a_day(100 * 3600) == 0


def test_after_a_quiet_day_no_more_is_saved_up_than_the_slack() -> None:
    day = 10 * 2880 * MIB
    admission = Admission(Rule("always", 0.0, day), Expected())
    times, written, _ = write(admission, lambda at: 0 if 3600 < at < DAY_S - 3600 else 100, 3, MIB)
    assert most_in_a_day(times, written) <= 1.04 * day
    evening = (times >= DAY_S - 3600) & (times <= DAY_S)
    assert written[evening].sum() <= 0.04 * day + day / 24 + written.max()


def test_within_the_budget_every_block_is_admitted() -> None:
    day = 10 * 2880 * MIB
    admission = Admission(Rule("always", 0.0, day), Expected())
    _, written, _ = write(admission, lambda at: 5, 2, MIB)
    assert written.sum() >= 0.95 * 2 * 2880 * 5 * MIB
    assert admission.threshold == 0.0


def test_the_threshold_rises_while_there_is_much_and_falls_when_there_is_little() -> None:
    day = 10 * 2880 * MIB
    admission = Admission(Rule("always", 0.0, day), Expected())
    seen = []
    for now in range(0, 3 * 3600, 30):
        taken = admission.admits(np.arange(101), 0, float(now))
        admission.wrote(int(taken.sum()) * MIB, float(now))
        seen.append(admission.threshold)
    assert seen[-1] > 0.5
    assert max(seen) < 1.0, "what surely comes back is always welcome"
    for now in range(3 * 3600, 8 * 3600, 30):
        admission.admits(array(0), 0, float(now))
        seen.append(admission.threshold)
    assert seen[-1] == 0.0


# -- in a placement


def world(rule: Rule, **more: object) -> World:
    w = World(1, 4, slots=8, admission=rule, **more)  # type: ignore[arg-type]
    w.open(1)
    return w


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_refused_leaves_are_dropped_and_counted(policy: str) -> None:
    w = world(Rule("twice"), policy=policy)
    w.put(0, 1, [b"a", b"b"])
    assert not w.copies, "neither was used twice"
    assert w.p.view.counters["refused_blocks"] == 2
    w.now += 1.0
    assert len(w.get(1, [b"a", b"b"])) == 2
    for i in range(40):
        w.now += 1.0
        w.put(0, 1, [b"x%02d" % i])
        w.finish_all()
    assert w.used(1) == 2 * ALIGN
    assert len(w.get(1, [b"a", b"b"])) == 2, "from below"
    assert w.p.view.counters["written_blocks"] == 2
    counters = w.p.view.counters
    assert counters["dropped_blocks"] >= 30
    assert counters["refused_blocks"] == counters["stored_blocks"] + counters["dropped_blocks"]
    w.settle()


def admit_only(w: World, first: bytes) -> None:
    """Blocks whose keys begin like this."""
    blocks, admission = w.p.residency.blocks, w.p.residency.tiers[1].admission

    def admits(rows: np.ndarray, tenant: int, now: float) -> np.ndarray:
        return np.array([blocks.key(row).startswith(first) for row in rows.tolist()], np.bool_)

    admission.admits = admits  # type: ignore[method-assign]


@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
def test_ancestors_of_an_admitted_block_are_written_too(write_policy: str) -> None:
    w = world(Rule(), write_policy=write_policy)
    admit_only(w, b"y")
    w.put(0, 1, [b"n1", b"n2", b"y3", b"n4"])
    w.finish_all()
    assert w.used(1) == (3 * ALIGN if write_policy == "write_through" else 0)
    for i in range(20):
        w.put(0, 1, [b"x%d" % i])
        w.finish_all()
    assert w.get(1, [b"n1", b"n2", b"y3", b"n4"])[2:] != [], "n4 alone is gone"
    assert w.lookup(1, [b"n1", b"n2", b"y3", b"n4"]) == 3
    assert w.used(1) == 3 * ALIGN
    w.settle()


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
def test_a_budget_holds_for_any_puts(write_policy: str, policy: str) -> None:
    """One block a second is allowed, and each second brings a chain of up to five, some on others.

    Every one is asked for a second later: of blocks that never come back none would be written.
    """
    w = world(Rule("always", 0.0, int(DAY_S) * ALIGN), write_policy=write_policy, policy=policy)
    chains, seconds = [[b"s%03d" % i + b"k%d" % k for k in range(5)] for i in range(120)], 0.0
    for i, keys in enumerate(chains):
        w.now = seconds = float(i)
        w.get(1, chains[i - 1])
        w.put(0, 1, keys[: 2 + i % 4])
        w.finish_all()
        if i % 3 == 2:
            w.put(0, 1, [*chains[i - 1][:2], b"branch%d" % i][2:], chains[i - 1][1])
            w.finish_all()
    written = w.p.view.counters["written_bytes"] // ALIGN
    assert seconds / 4 < written <= seconds + 8, "and what was begun"
    assert w.p.view.counters["refused_blocks"] > 150
    w.settle()


def test_beyond_a_budget_no_ancestors_are_written() -> None:
    w = world(Rule("always", 0.0, int(DAY_S) * ALIGN), write_policy="on_evict")
    admission, i = w.p.residency.tiers[1].admission, 0
    admission._left, admission._next_step_s = 100.0 * ALIGN, np.inf
    chain = [b"chain%d" % k for k in range(6)]
    w.put(0, 1, chain)
    while w.p.view.counters["written_blocks"] == 0:
        w.put(0, 1, [b"other%03d" % (i := i + 1)])
        w.finish_all()
    written = w.p.view.counters["written_blocks"]
    assert written < 6
    admission.wrote(1000 * ALIGN, w.now)
    for _ in range(40):
        w.put(0, 1, [b"other%03d" % (i := i + 1)])
        w.finish_all()
    assert w.p.view.counters["written_blocks"] == written
    assert w.lookup(1, chain) == 0
    w.settle()


# -- worth a slot


def lessons(rounds: int = 150, **more: object) -> World:
    """One chain is used every other second; what else comes never comes again. All slots are taken."""
    w = World(1, slots=8, policy="hazard", **more)  # type: ignore[arg-type]
    w.open(1)
    for i in range(rounds):
        w.now += 2.0
        if len(w.get(1, OFTEN)) < len(OFTEN):
            w.put(0, 1, OFTEN)
        if i < 50 or i % 5 == 0:
            w.put(0, 1, [b"%03d-%d" % (i, k) for k in range(4)])
        w.finish_all()
    w.now += 1.0
    return w


OFTEN = [b"often%d" % k for k in range(8)]


def test_blocks_that_earn_less_than_stored_ones_are_refused() -> None:
    w = lessons(nvme=0)
    assert w.p.view.counters["refused_blocks"] > 50
    assert w.p.view.counters["denied_blocks"] == 0
    room = w.reserve(0, 1, [b"once%d" % k for k in range(4)])
    assert isinstance(room, ac.Reserved)
    assert (room.status.tolist(), room.lease) == ([ac.DENIED] * 4, 0)
    assert room.why == "worth less than what is stored"
    assert len(w.get(1, OFTEN)) == 8
    w.settle()


def test_nothing_is_refused_before_much_was_seen() -> None:
    w = lessons(rounds=40, nvme=0)
    assert w.p.view.counters["refused_blocks"] == 0
    assert w.put(0, 1, [b"once%d" % k for k in range(4)]) == 4
    w.settle()


def test_leased_blocks_leave_no_room_for_better_ones() -> None:
    w = lessons(nvme=0)
    w.acquire(0, 1, OFTEN)
    room = w.reserve(0, 1, [b"once"])
    assert isinstance(room, ac.Reserved)
    assert room.why == "no room"
    assert w.p.view.counters["denied_blocks"] == 1


def test_a_refused_block_is_worth_more_the_second_time() -> None:
    w = lessons(nvme=0)
    keys, reuse = [b"again%d" % k for k in range(4)], w.p.residency.reuse

    def promised(key: bytes) -> float:
        return reuse.density_if_stored(joined([key]).words[0], 1, -1, 4, 0, w.now)

    assert promised(keys[0]) == promised(b"new")
    assert w.put(0, 1, keys) == 0
    w.now += 2.0
    assert promised(keys[0]) > 2 * promised(b"new")
    assert w.put(0, 1, keys) == 0
    w.now += 20.0
    assert w.put(0, 1, keys) == 4, "what is stored was not used all that time"
    w.settle()


def test_a_refused_block_has_the_class_of_a_stored_one() -> None:
    w = lessons(nvme=0)
    reuse, seen = w.p.residency.reuse, list[str]()
    reuse.density_if_stored = lambda *asked: 0.0  # type: ignore[method-assign]
    leave = reuse.history.leave

    def note(rows: np.ndarray) -> None:
        seen.extend(map(describe, reuse.history.classes(rows).tolist()))
        leave(rows)

    reuse.history.leave = note  # type: ignore[method-assign]
    keys = [b"grows%d" % k for k in range(6)]
    assert w.put(0, 1, keys[:2]) == 0
    w.now += 20.0
    seen.clear()
    assert w.put(0, 1, keys) == 0
    begins = [text.split(", stored")[0] for text in seen]
    assert begins == ["used 2 or 3 times, up to 25 s apart"] * 2 + ["used once, up to 25 s apart"] * 4
    w.settle()


def test_nothing_is_refused_that_can_go_down_instead() -> None:
    w = lessons(nvme=4)
    assert w.p.view.counters["refused_blocks"] == 0
    assert w.put(0, 1, [b"once%d" % k for k in range(2)]) == 2
    w.settle()


def test_blocks_with_children_are_never_refused() -> None:
    w = lessons(nvme=0)
    w.invalidate(1, OFTEN[:1])
    w.put(0, 1, [b"takes its slot"])
    w.p.residency.reuse.density_if_stored = lambda *asked: 0.0  # type: ignore[method-assign]
    assert w.put(0, 1, [b"worth nothing"]) == 0
    assert w.lookup(1, OFTEN) == 0
    assert w.put(0, 1, OFTEN) == 1
    assert w.lookup(1, OFTEN) == 8
    w.settle()
