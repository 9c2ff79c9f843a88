"""Fair turns: nothing lost, nothing idle, everyone's share, caps kept."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.queues.fair_queue import FairQueue

QUANTUM = 16
DEAREST = 16
WEIGHTS = (0.5, 1.0, 2.0, 3.5)
PLENTY = 1 << 60

costs = st.integers(1, DEAREST)
tenants = st.integers(0, 4)
kinds = st.integers(0, 2)
randoms = st.integers(0, 1 << 32).map(Random)


def fair(
    classes: tuple[float, ...] = (1.0,), limit: int = PLENTY, quantum: int = QUANTUM, saved: int = 16
) -> FairQueue[Any]:
    return FairQueue(classes, quantum, limit, saved)


@given(st.lists(st.tuples(st.booleans(), tenants, kinds, costs), max_size=200), st.integers(20, 60))
def test_items_are_taken_once_and_in_order(steps: list[tuple[bool, int, int, int]], limit: int) -> None:
    f = fair((4.0, 2.0, 1.0), limit)
    f.set(1, 0.5)
    f.set(2, 3.0)
    queued: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, (is_put, tenant, kind, cost) in enumerate(steps):
        if is_put:
            mine = queued.setdefault((tenant, kind), [])
            fits = not mine or sum(c for _, c in mine) + cost <= limit
            assert f.put(tenant, kind, cost, number) == fits
            if fits:
                mine.append((number, cost))
        else:
            taken = f.take(0.0)
            # Nobody is held back, so somebody goes whenever anything waits.
            assert (taken is None) == (not any(queued.values()))
            if taken is not None:
                assert queued[taken[0], taken[1]].pop(0) == (taken[3], taken[2])
        for k in range(3):
            waiting = {t: sum(c for _, c in q) for (t, of), q in queued.items() if of == k}
            assert f.waiting(k) == sum(waiting.values())
            assert all(f.waiting(k, t) == w for t, w in waiting.items())
            active = sum({1: 0.5, 2: 3.0}.get(t, 1.0) for t, w in waiting.items() if w)
            assert f.active(k) == pytest.approx(active)
    assert f.ready_at(0.0) == math.inf


def test_a_first_item_is_always_taken() -> None:
    f = fair(limit=10)
    assert f.put(0, 0, 1000, "huge")
    assert not f.put(0, 0, 1, "more")
    assert f.put(1, 0, 11, "another tenant's")


def served(f: FairQueue[Any], takes: int, refill: Callable[[int, int], int]) -> list[tuple[int, int, int]]:
    """(tenant, kind, cost) of so many takes; each is made up for by a put of cost `refill`."""
    out = []
    for _ in range(takes):
        taken = f.take(0.0)
        assert taken is not None
        tenant, kind, cost, _ = taken
        out.append((tenant, kind, cost))
        f.put(tenant, kind, refill(tenant, kind), None)
    return out


@given(
    st.lists(st.sampled_from(WEIGHTS), min_size=2, max_size=5),
    st.data(),
    randoms,
)
def test_shares_are_within_a_quantum_over_any_window(weights: list[float], data: Any, random: Random) -> None:
    f = fair()
    dear = [data.draw(costs) for _ in weights]
    for tenant, weight in enumerate(weights):
        f.set(tenant, weight)
        for _ in range(3):
            f.put(tenant, 0, random.randint(1, dear[tenant]), None)
    # Newcomers take their first turn before the round begins.
    served(f, 40 * len(weights), lambda t, _: random.randint(1, dear[t]))
    log = served(f, 200, lambda t, _: random.randint(1, dear[t]))
    for start in range(0, len(log), 7):
        got: Counter[int] = Counter()
        for tenant, _, cost in log[start:]:
            got[tenant] += cost
            for i, j in itertools.combinations(range(len(weights)), 2):
                apart = abs(got[i] / weights[i] - got[j] / weights[j])
                assert apart <= QUANTUM + dear[i] / weights[i] + dear[j] / weights[j]


@given(st.lists(st.sampled_from(WEIGHTS), min_size=2, max_size=4), randoms)
def test_classes_share_within_one_item_over_any_window(weights: list[float], random: Random) -> None:
    f = fair(tuple(weights))
    for kind in range(len(weights)):
        for tenant in range(2):
            f.put(tenant, kind, random.randint(1, DEAREST), None)
    log = served(f, 200, lambda _, __: random.randint(1, DEAREST))
    for start in range(0, len(log), 7):
        got: Counter[int] = Counter()
        for _, kind, cost in log[start:]:
            got[kind] += cost
            for i, j in itertools.combinations(range(len(weights)), 2):
                apart = abs(got[i] / weights[i] - got[j] / weights[j])
                assert apart <= DEAREST / weights[i] + DEAREST / weights[j] + 1e-9


@given(st.integers(1, 8), costs, st.lists(costs, min_size=1, max_size=8), randoms)
def test_a_sparse_tenant_waits_for_newcomers_before_it_only(
    backlogged: int, mine: int, others: list[int], random: Random
) -> None:
    f = fair()
    for tenant in range(backlogged):
        for _ in range(40):
            f.put(tenant, 0, random.randint(1, DEAREST), None)
    # Everyone has had a first turn, and is in the round.
    served(f, 40 * backlogged, lambda _, __: random.randint(1, DEAREST))
    for newcomer in range(100, 100 + len(others)):
        f.put(newcomer, 0, others[newcomer - 100], None)
    f.put(999, 0, mine, None)
    waited = 0
    while (taken := f.take(0.0)) is not None and taken[0] != 999:
        assert taken[0] >= 100
        waited += taken[2]
    assert waited == sum(others)


def test_a_tenant_is_a_newcomer_only_after_it_was_through_the_round() -> None:
    """Else one that always comes with a single item would go before everybody, always."""
    f = fair(quantum=4)
    got: Counter[int] = Counter()
    last = None
    for tenant in range(9):
        for _ in range(100):
            f.put(tenant, 0, 1, None)
    for _ in range(500):
        if last != 9 and not f.waiting(0, 9):
            f.put(9, 0, 1, None)
        taken = f.take(0.0)
        assert taken is not None
        last = taken[0]
        got[last] += 1
    assert got[9] <= got[0] + 4 + 2 * 1


def test_a_returning_tenant_gets_its_saved_share_at_once() -> None:
    f = fair(quantum=4, saved=40)
    for _ in range(200):
        f.put(0, 0, 1, None)
    f.put(1, 0, 1, None)
    assert f.take(0.0) is not None
    served(f, 100, lambda *_: 1)
    while f.waiting(0, 1):
        f.take(0.0)
    for _ in range(30):
        assert f.take(0.0) is not None
    for _ in range(60):
        f.put(1, 0, 1, None)
    order = [taken[0] for _ in range(60) if (taken := f.take(0.0))]
    # What the other got meanwhile, and then turns of a quantum.
    assert order[:30] == [1] * 30
    assert 0 in order[30:40]
    assert abs(order[40:].count(0) - order[40:].count(1)) <= 8


def test_no_more_is_saved_than_the_bound() -> None:
    f = fair(quantum=4, saved=40)
    for _ in range(2000):
        f.put(0, 0, 1, None)
    for _ in range(1000):
        f.take(0.0)
    for _ in range(100):
        f.put(1, 0, 1, None)
    order = [taken[0] for _ in range(60) if (taken := f.take(0.0))]
    assert order[:40] == [1] * 40
    assert 0 in order[40:48]


@given(st.integers(2, 6), randoms)
def test_many_short_tenants_leave_a_steady_tenant_its_share(n: int, random: Random) -> None:
    """Their savings do not add up to more than there was."""
    f = fair(quantum=4, saved=40)
    got: Counter[int] = Counter()
    for _ in range(3000):
        f.put(0, 0, 1, None)
    for _ in range(3000):
        for tenant in range(1, n):
            if not f.waiting(0, tenant) and random.random() < 0.7:
                f.put(tenant, 0, 1, None)
        taken = f.take(0.0)
        assert taken is not None
        got[taken[0]] += taken[2]
    assert got[0] >= 3000 / n - 40 * n


def test_newcomers_take_turns_among_themselves() -> None:
    f = fair(quantum=4, saved=40)
    for tenant in (0, 1):
        for _ in range(40):
            f.put(tenant, 0, 1, None)
    order = [taken[0] for _ in range(16) if (taken := f.take(0.0))]
    assert order.count(0) == order.count(1) == 8


def test_an_item_above_the_quantum_is_paid_before_the_next_turn() -> None:
    """Also by one that had nothing queued when its turn came."""
    f = fair(quantum=4)
    for _ in range(300):
        f.put(0, 0, 1, None)
    got: Counter[int] = Counter()
    for n in range(300):
        if n % 6 == 0 and not f.waiting(0, 1):
            f.put(1, 0, 16, None)
        taken = f.take(0.0)
        assert taken is not None
        got[taken[0]] += taken[2]
    assert got[1] <= got[0] + 4 + 2 * 16


@given(st.integers(2, 8), randoms)
def test_no_tenant_waits_longer_than_two_quanta_of_each_other(n: int, random: Random) -> None:
    f = fair()
    f.put(0, 0, 1, None)
    since = 0
    for _ in range(600):
        # The others come and go as they like; tenant 0 always has something.
        for tenant in range(1, n):
            if random.random() < 0.5:
                f.put(tenant, 0, random.randint(1, DEAREST), None)
        taken = f.take(0.0)
        assert taken is not None
        if taken[0] == 0:
            since = 0
            f.put(0, 0, random.randint(1, DEAREST), None)
        else:
            since += taken[2]
        assert since <= 2 * (n - 1) * (QUANTUM + DEAREST)


@given(
    st.floats(0.5, 50.0),
    st.floats(0.0, 40.0),
    st.lists(st.tuples(st.floats(0.0, 2.0), kinds, costs), min_size=1, max_size=60),
)
def test_a_cap_holds_over_any_window_and_bounds_the_wait(
    rate: float, burst: float, steps: list[tuple[float, int, int]]
) -> None:
    f = fair((4.0, 2.0, 1.0))
    f.set(7, 1.0, rate, burst)
    now, log = 0.0, [(0.0, 0)]
    for pause, kind, cost in steps:
        now += pause
        f.put(7, kind, cost, None)
        while (taken := f.take(now)) is not None:
            log.append((now, taken[2]))
        assert now < f.ready_at(now) < math.inf or not any(f.waiting(k) for k in range(3))
    woken = 0
    while (at := f.ready_at(now)) < math.inf:
        assert at >= now
        now, woken = at, woken + 1
        while (taken := f.take(now)) is not None:
            log.append((now, taken[2]))
    assert sum(cost for _, cost in log) == sum(cost for _, _, cost in steps)
    # What was held back in another class when the bucket was emptied is looked at once too often.
    assert woken <= 3 * len(steps)
    for i, j in itertools.combinations(range(1, len(log)), 2):
        used = sum(cost for _, cost in log[i : j + 1])
        assert used <= rate * (log[j][0] - log[i][0]) + max(burst, DEAREST) + 1e-6


def test_a_capped_tenant_delays_no_other() -> None:
    f = fair()
    f.set(0, 1.0, rate=1.0, burst=1.0)
    f.put(0, 0, 1, "first")
    f.put(0, 0, 1, "capped")
    f.put(1, 0, 1, "free")
    assert [t and t[3] for t in (f.take(0.0), f.take(0.0), f.take(0.0))] == ["first", "free", None]
    assert f.ready_at(0.25) == 1.0
    assert f.take(0.999) is None
    assert f.take(1.0) == (0, 0, 1, "capped")
    assert f.ready_at(1.0) == math.inf


def test_a_capped_tenant_reaches_its_cap_beside_a_greedy_one() -> None:
    """What it may have by its cap, below its share: it does not wait a round for every token."""
    f = fair(quantum=64)
    f.set(0, 1.0, rate=0.4, burst=1)
    for _ in range(2000):
        f.put(0, 0, 1, None)
        f.put(1, 0, 1, None)
    got = Counter(taken[0] for now in range(1000) if (taken := f.take(float(now))))
    # 64 at its cap, in 160 s, then at most 64 s for the other's quantum.
    assert got[0] >= 1000 * 64 / (160 + 64) - 64


def test_discarding_a_costly_item_lets_the_next_one_start_earlier() -> None:
    f = fair()
    f.set(0, 1.0, rate=1.0, burst=10.0)
    for item, cost in enumerate((10, 10, 1)):
        f.put(0, 0, cost, item)
    assert f.take(0.0) == (0, 0, 10, 0)
    assert f.take(0.0) is None
    assert f.ready_at(0.0) == 10.0
    assert f.discard(lambda item: item == 1) == [1]
    assert f.take(0.5) is None
    assert f.ready_at(0.5) == 1.0
    assert f.take(1.0) == (0, 0, 1, 2)


def test_a_changed_cap_counts_at_once() -> None:
    f = fair()
    f.set(0, 1.0, rate=0.001, burst=1.0)
    f.put(0, 0, 1, 1)
    f.put(0, 0, 1, 2)
    assert f.take(0.0) is not None
    assert f.take(0.0) is None
    f.set(0, 2.0)
    assert f.active(0) == 2.0
    assert f.take(0.0) == (0, 0, 1, 2)
    f.put(0, 0, 1, 3)
    f.forget(0)
    assert f.active(0) == 1.0
    assert f.take(0.0) == (0, 0, 1, 3)


def test_left_out_classes_do_not_catch_up() -> None:
    f = fair((1.0, 1.0))
    for _ in range(20):
        f.put(0, 0, 1, None)
        f.put(0, 1, 1, None)
    assert [t[1] for _ in range(10) if (t := f.take(0.0, [1]))] == [1] * 10
    assert f.take(0.0, []) is None
    both = Counter(t[1] for _ in range(10) if (t := f.take(0.0)))
    assert abs(both[0] - both[1]) <= 2


@given(st.lists(st.tuples(tenants, kinds, costs), max_size=40), st.integers(2, 5), st.booleans())
def test_discarded_items_leave_no_trace(puts: list[tuple[int, int, int]], modulus: int, capped: bool) -> None:
    f = fair((4.0, 2.0, 1.0))
    f.set(0, 1.0, rate=0.01 if capped else 0.0)
    f.put(0, 0, 1, -1)
    assert f.take(0.0) is not None
    for number, (tenant, kind, cost) in enumerate(puts):
        f.put(tenant, kind, cost, number)
    first = f.take(0.0)
    gone = [n for n in range(len(puts)) if n % modulus == 0]
    kept = {n: put for n, put in enumerate(puts) if n % modulus}
    if first is not None:
        gone = [n for n in gone if n != first[3]]
        kept.pop(first[3], None)
    assert sorted(f.discard(lambda n: n % modulus == 0)) == gone
    for kind in range(3):
        assert f.waiting(kind) == sum(c for _, k, c in kept.values() if k == kind)
        assert f.active(kind) == len({t for t, k, _ in kept.values() if k == kind})
    rest = []
    now = 0.0
    while now < math.inf:
        rest += [taken[3] for taken in iter(lambda: f.take(now), None)]  # noqa: B023 - used at once
        now = f.ready_at(now)
    assert sorted(rest) == sorted(kept)


def test_a_take_costs_the_same_with_a_thousand_tenants_as_with_ten() -> None:
    def lines(n: int) -> int:
        f = fair(quantum=4)
        for tenant in range(n):
            for _ in range(2):
                f.put(tenant, 0, 3, None)
        served(f, 3 * n, lambda _, __: 3)
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal count
            count += event == "line" and frame.f_code.co_filename.endswith("fair_queue.py")
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            served(f, 2000, lambda _, __: 3)
        finally:
            sys.settrace(before)
        return count

    assert lines(1000) < 1.2 * lines(10)
