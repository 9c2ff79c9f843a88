"""Another eviction policy while blocks come and go: what it starts from, and that nothing is lost."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.columns import zeros
from kvstore.core import events as ev
from kvstore.core.policy import POLICIES, Policy, make
from kvstore.core.policy.migrating import MigratingPolicy
from kvstore.core.policy.queue import Segments
from kvstore.errors import MisuseError
from tests.core.policy.pool import Tier, Told
from tests.core.world import World, payload

ROWS = 61


class Switched:
    """A policy that is on its way to become another, in a tier of its own."""

    def __init__(self, old: str, new: str) -> None:
        self.tier = Tier(ROWS)
        self.told = self.tier.told(old)
        self._new = new

    def begin(self) -> MigratingPolicy:
        self.tier.segments = Segments(zeros(ROWS, np.int32))
        new = make(self._new, self.tier.context())
        policy = MigratingPolicy(self.told.policy, new, zeros(ROWS, np.uint32), 1)
        self.told.policy = policy
        return policy


def array(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def leave_in_turn(policy: Told) -> list[int]:
    out: list[int] = []
    while len(policy):
        rows = policy.coldest(1)
        assert len(rows) == 1, "something is known, and nothing offered"
        policy.remove(rows)
        out += rows.tolist()
    return out


_rows = st.lists(st.integers(0, ROWS - 1), max_size=12, unique=True)
_few = st.lists(st.integers(0, 9), max_size=4, unique=True)
_kinds = ["insert", "insert", "touch", "touch", "remove", "defer", "refresh", "move", "move"]
_steps = st.lists(st.tuples(st.sampled_from(_kinds), _rows), max_size=60)
_steps_of_few = st.lists(st.tuples(st.sampled_from(_kinds), _few), max_size=40)


def do(policy: Told, kind: str, rows: list[int], now: float) -> None:
    if kind == "insert":
        policy.insert(array(*rows), now)
    elif kind == "touch":
        policy.touch(array(*rows), now)
    else:
        getattr(policy, kind)(array(*rows))


@given(before=_steps_of_few, during=_steps_of_few)
@settings(max_examples=300)
def test_migrating_from_lru_to_lru_changes_nothing(before: list, during: list) -> None:
    """Whatever is stored, used, or in the way meanwhile."""
    switched, plain = Switched("lru", "lru"), Tier(ROWS).told("lru")
    steps = [step for step in before if step[0] != "move"]
    for i, (kind, rows) in enumerate(steps):
        do(switched.told, kind, rows, float(i))
        do(plain, kind, rows, float(i))
    policy = switched.begin()
    policy._returns = 10_000
    for i, (kind, rows) in enumerate(during, len(before)):
        if kind == "move":
            policy.go_on(len(rows), float(i))
        else:
            do(switched.told, kind, rows, float(i))
            do(plain, kind, rows, float(i))
        assert switched.told.coldest(5).tolist() == plain.coldest(5).tolist()
    while policy.left:
        policy.go_on(7, 100.0)
    switched.told.policy = policy.new
    assert leave_in_turn(switched.told) == leave_in_turn(plain)


@pytest.mark.parametrize("new", POLICIES)
@pytest.mark.parametrize("old", POLICIES)
class TestEveryPair:
    @given(before=_steps, during=_steps)
    @settings(max_examples=8)
    def test_the_new_policy_has_exactly_the_blocks_of_the_old_one(
        self, old: str, new: str, before: list, during: list
    ) -> None:
        switched, known, policy = Switched(old, new), set(), None
        for i, (kind, rows) in enumerate([*before, ("begin", []), *during]):
            if kind == "begin":
                policy = switched.begin()
            elif kind == "move":
                moved = policy.go_on(len(rows) + 1, float(i)) if policy is not None else None
                assert moved != 0 or not policy or not policy.left, "it gets nowhere"
            else:
                do(switched.told, kind, rows, float(i))
                known |= set(rows) if kind == "insert" else set()
                known -= set(rows) if kind == "remove" else set()
            assert len(switched.told) == len(known)
            assert set(switched.told.coldest(ROWS).tolist()) <= known
        assert policy is not None
        steps = 0
        while policy.left:
            policy.go_on(5, 200.0)
            steps += 1
            assert steps < 2 * ROWS, "it does not end"
        switched.told.policy = policy.new
        assert sorted(leave_in_turn(switched.told)) == sorted(known)

    def test_a_migration_ends_while_all_blocks_are_in_use(self, old: str, new: str) -> None:
        switched = Switched(old, new)
        switched.told.insert(np.arange(ROWS), 0.0)
        policy, steps = switched.begin(), 0
        while policy.left:
            policy.go_on(4, 1.0 + steps)
            switched.told.touch(np.arange(ROWS), 1.0 + steps)
            switched.told.defer(switched.told.coldest(3), parents=True)
            steps += 1
            assert steps < 50 * ROWS, "it never ends"
        assert len(policy.new) == ROWS


@pytest.mark.parametrize("new", ["lru", "arc", "s3fifo", "lfuda", "gdsf", "sieve"])
@pytest.mark.parametrize("old", ["lru", "arc", "lfuda"])
def test_a_migration_keeps_the_order_of_eviction(old: str, new: str) -> None:
    switched, plain = Switched(old, new), Tier(ROWS).told(old)
    for policy in (switched.told, plain):
        for start in range(0, 60, 6):
            policy.insert(np.arange(start, start + 6), float(start))
        for start in (18, 0, 42):
            policy.touch(np.arange(start, start + 6), 100.0 + start)
    moving = switched.begin()
    while moving.left:
        moving.go_on(7, 200.0)
    switched.told.policy = moving.new
    assert leave_in_turn(switched.told) == leave_in_turn(plain)


def test_blocks_in_use_do_not_stop_the_eviction_of_others() -> None:
    """At the end of a switch, too, when nothing goes back any more."""
    switched = Switched("lru", "lru")
    switched.told.insert(np.arange(40), 0.0)
    policy = switched.begin()
    policy.go_on(20, 1.0)
    policy._returns = 0
    seen: set[int] = set()
    for _ in range(8):
        rows = switched.told.coldest(8)
        seen |= set(rows.tolist())
        switched.told.defer(rows)
    assert seen == set(range(40))


# -- a whole placement


def world(**more: object) -> World:
    w = World(4, 4, slots=7, max_blocks=512, **more)  # type: ignore[arg-type]
    for namespace in (1, 2):
        w.open(namespace, 100 * namespace, tenant=namespace - 1)
    return w


def keys(name: str, n: int = 5) -> list[bytes]:
    return [b"%s%03d" % (name.encode(), i) for i in range(n)]


@pytest.mark.parametrize("new", [name for name in POLICIES if name != "lru"])
def test_all_pools_migrate_and_no_block_moves(new: str) -> None:
    w = world()
    for namespace in (1, 2):
        w.put(0, namespace, keys("a"))
    w.finish_all()
    w.send(ev.SetPolicy(new))
    w.put(0, 1, keys("b"))
    w.pass_time(1)
    kinds = {type(p) for state in w.p.residency.tiers for p in state.policies.values()}
    assert kinds == {POLICIES[new]}
    assert (w.p.policy_migration.name, w.p.policy_migration.pools_left, w.p.policy_migration.wakes_at()) == (
        new,
        0,
        float("inf"),
    )
    for namespace, name in ((1, "a"), (1, "b"), (2, "a")):
        assert w.get(namespace, keys(name)) == [payload(namespace, key) for key in keys(name)]
    w.settle()


def test_the_latest_requested_policy_wins() -> None:
    w = world()
    w.put(0, 1, keys("a"))
    for name in ("arc", "sieve", "lru", "hazard", "lfuda"):
        w.send(ev.SetPolicy(name))
    assert w.p.policy_migration.name == "arc"
    w.pass_time(1)
    assert w.p.policy_migration.name == w.p.policy_migration.wanted == "lfuda"
    assert {type(p) for p in w.p.residency.tiers[0].policies.values()} == {POLICIES["lfuda"]}


class _NoPolicy:
    def __init__(self, context: object) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("best", "no eviction policy 'best'"),
        ("os:nothing", "nothing"),
        ("collections:OrderedDict", "cannot be made"),
        (f"{__name__}:_NoPolicy", "has no follows_children, weighs, insert"),
    ],
)
def test_an_invalid_policy_changes_nothing(name: str, why: str) -> None:
    w = world()
    w.put(0, 1, keys("a"))
    before = [dict(state.policies) for state in w.p.residency.tiers]
    with pytest.raises(MisuseError, match=why):
        w.send(ev.SetPolicy(name))
    assert [dict(state.policies) for state in w.p.residency.tiers] == before
    assert (w.p.policy_migration.name, w.p.policy_migration.wanted) == ("lru", "lru")
    assert all(state.old_generation is None for state in w.p.residency.tiers)


@pytest.mark.parametrize("name", POLICIES)
def test_the_old_policies_memory_is_given_back_without_the_garbage_collector(name: str) -> None:
    w = world(policy=name)
    for i in range(12):
        w.put(0, 1, keys(f"{i}-"))
        w.finish_all()
        w.now += 2  # rows of different ages are in different slices
        w.get(1, keys(f"{i}-"))
    old: list[weakref.ref] = []
    for tier in w.p.residency.tiers:
        [policy] = tier.policies.values()
        generation = tier.generation
        old += [weakref.ref(policy), weakref.ref(generation.segments)]
        old += [weakref.ref(generation.ghosts)] if generation.ghosts else []
    del policy, generation
    w.send(ev.SetPolicy("arc" if name == "lru" else "lru"))
    gc.disable()
    try:
        assert all(ref() is not None for ref in old), "still at work"
        w.pass_time(1)
        assert not any(ref() for ref in old)
    finally:
        gc.enable()


def test_a_step_moves_a_bounded_number_of_rows() -> None:
    w = World(8, 0, slots=100, max_blocks=1024)
    w.open(1)
    for i in range(6):
        w.put(0, 1, keys(f"{i}-", 100))
    [pool] = w.p.residency.tiers[0].policies
    w.p.policy_migration.rows_at_once = 64
    w.send(ev.SetPolicy("hazard"))
    left = [600]
    while w.p.policy_migration.pools_left:
        w.now = max(w.now, w.p.next_wakeup() or 0.0)
        w.send(ev.Tick())
        policy: Policy = w.p.residency.tiers[0].policies[pool]
        left.append(policy.left if isinstance(policy, MigratingPolicy) else 0)
    steps = -np.diff(left)
    assert 0 < steps.max() <= 64
    assert len(steps) >= 5
