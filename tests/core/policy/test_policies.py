"""What every eviction policy promises placement."""

from __future__ import annotations

import sys
import time
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.policy import POLICIES, find, make
from kvstore.core.policy.lru import LRU
from kvstore.errors import MisuseError
from tests.core.policy.pool import Tier, Told


def array(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def fill(policy: Told, *rows: int) -> None:
    policy.insert(array(*rows), 0.0)


def offered(policy: Told, n: int) -> list[int]:
    return policy.coldest(n).tolist()


def all_in_order(policy: Told) -> list[int]:
    """Takes one after another until nothing is left."""
    out: list[int] = []
    while len(policy):
        rows = offered(policy, 1)
        assert len(rows) == 1
        policy.remove(array(*rows))
        out += rows
    assert offered(policy, 3) == []
    return out


_rows = st.lists(st.integers(0, 60), max_size=20, unique=True)
_steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["insert", "insert", "touch", "touch", "remove", "defer", "refresh", "cool", "evict"]
        ),
        _rows,
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", POLICIES)
class TestEveryPolicy:
    @given(steps=_steps)
    @settings(max_examples=60)
    def test_only_inserted_rows_are_offered(self, name: str, steps: list[tuple[str, list[int]]]) -> None:
        policy, known, now = Tier(61).told(name), set[int](), 0.0
        for what, rows in steps:
            now += 1.0
            if what == "insert":
                policy.insert(array(*rows), now)
                known |= set(rows)
            elif what == "touch":
                policy.touch(array(*rows), now)
            elif what == "evict":
                gone = policy.coldest(len(rows), now)
                policy.remove(gone)
                assert set(gone.tolist()) <= known
                known -= set(gone.tolist())
            else:
                getattr(policy, what)(array(*rows))
                known -= set(rows) if what == "remove" else set()
            assert len(policy) == len(known)
            for n in (1, 7, 70):
                got = policy.coldest(n, now).tolist()
                assert len(got) == len(set(got)) <= n
                assert set(got) <= known
                assert bool(got) == bool(known)
        assert sorted(all_in_order(policy)) == sorted(known)

    def test_a_chain_leaves_from_its_tail(self, name: str) -> None:
        policy = Tier(10).told(name)
        fill(policy, 3, 1, 4)
        assert offered(policy, 3) == [4, 1, 3]
        assert offered(policy, 3) == [4, 1, 3]

    def test_used_rows_are_kept_longer(self, name: str) -> None:
        policy = Tier(100).told(name)
        fill(policy, *range(100))
        for _ in range(2):
            policy.touch(array(*range(90, 100)), 1.0)
        assert not set(all_in_order(policy)[:80]) & set(range(90, 100))

    def test_deferred_rows_do_not_block_others(self, name: str) -> None:
        policy = Tier(100).told(name)
        fill(policy, *range(100))
        policy.touch(array(*range(20)), 1.0)
        busy = set(range(70, 100))
        free: set[int] = set()
        for _ in range(20):
            rows = offered(policy, 20)
            free |= set(rows) - busy
            policy.defer(array(*(row for row in rows if row in busy)))
        assert free

    @pytest.mark.parametrize("used", [True, False])
    def test_a_kind_of_which_all_is_in_use_does_not_keep_the_others(self, name: str, used: bool) -> None:
        policy = Tier(1000).told(name)
        fill(policy, *range(1000))
        policy.touch(array(*range(300)), 1.0)
        busy = set(range(300)) if used else set(range(300, 1000))
        looked = freed = 0
        while freed < 1000 - len(busy):
            rows = offered(policy, 64)
            looked += len(rows)
            idle = [row for row in rows if row not in busy]
            freed += len(idle)
            policy.remove(array(*idle))
            policy.defer(array(*(row for row in rows if row in busy)))
            assert looked < 4000
        assert len(policy) == len(busy)

    def test_cool_rows_go_first_until_they_are_used(self, name: str) -> None:
        policy = Tier(200).told(name)
        fill(policy, *range(100))
        policy.touch(array(*range(100)), 1.0)
        policy.cool(array(5, 6, 7, 150))
        assert offered(policy, 3) == [7, 6, 5]
        policy.touch(array(5), 2.0)
        assert offered(policy, 2) == [7, 6]
        assert offered(policy, 3)[2] != 5
        assert len(policy) == 100

    def test_deferred_cool_rows_are_cool_no_more(self, name: str) -> None:
        policy = Tier(100).told(name)
        fill(policy, *range(100))
        policy.cool(array(5))
        policy.defer(array(5))
        assert offered(policy, 1) != [5]

    def test_a_removed_row_is_inserted_as_new(self, name: str) -> None:
        """Even if a ghost of it is around."""
        policy = Tier(100).told(name)
        for _ in range(5):
            fill(policy, *range(50))
            policy.touch(array(*range(10)), 1.0)
            policy.remove(array(*range(50)))
            policy.remove(array(*range(50)))
            assert len(policy) == 0
        fill(policy, *range(50))
        assert sorted(all_in_order(policy)) == list(range(50))

    def test_ram_is_bounded(self, name: str) -> None:
        n = 100_000
        tier = Tier(n)
        policy, dice = tier.told(name), np.random.default_rng(1)
        for start in range(0, n, 100):
            policy.insert(np.arange(start, start + 100), 0.0)
        for i in range(3000):
            start = int(dice.zipf(1.2)) * 100 % n
            policy.touch(np.arange(start, start + 100), float(i))
            gone = policy.coldest(64, float(i))
            policy.remove(gone)
            policy.insert(gone, float(i))
        assert len(policy) == n
        assert policy.ram_bytes() < 14 * n
        assert tier.segments.bytes_a_row <= 6

    def test_thousands_of_small_pools_share_segments(self, name: str) -> None:
        pools, each = 2000, 20
        tier = Tier(pools * each)
        policies = [tier.told(name) for _ in range(pools)]
        for _ in range(2):
            for i, policy in enumerate(policies):
                rows = np.arange(each * i, each * (i + 1))
                policy.insert(rows, 0.0)
                policy.touch(rows[:5], 0.0)
        assert sum(p.ram_bytes() for p in policies) < pools * 5 * 1024
        for i, policy in enumerate(policies[::50]):
            assert sorted(all_in_order(policy)) == list(range(each * 50 * i, each * (50 * i + 1)))

    def test_no_batch_takes_long(self, name: str) -> None:
        """In CPU time, at 200 k rows of which half are used: what costs a pass over all of them shows."""
        n, batch = 200_000, 128
        tier = Tier(n)
        policy, dice, longest_s = tier.told(name), np.random.default_rng(1), 0.0
        for start in range(0, n, batch):
            policy.insert(np.arange(start, min(start + batch, n)), 0.0)
        for start in range(0, n // 2, batch):
            policy.touch(np.arange(start, start + batch), 1.0)
        for _ in range(300):
            rows = np.sort(dice.choice(n, batch, replace=False))
            tier.reuse.used(rows, 0, 2.0)
            calls = (
                lambda: policy.coldest(batch, 2.0),
                lambda rows=rows: policy.policy.touch(rows, 2.0),
                lambda rows=rows: policy.defer(rows),
            )
            for call in calls:
                took = []
                for _ in range(2):  # the better of two, so that it is ours
                    start_s = time.thread_time()
                    call()
                    took.append(time.thread_time() - start_s)
                longest_s = max(longest_s, min(took))
        assert longest_s < 0.01


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.follows_children])
class TestThoseThatFollowChildren:
    """With others it is placement that sees to it that leaves go first."""

    def test_parents_are_evicted_after_their_children(self, name: str) -> None:
        dice = np.random.default_rng(1)
        policy = Tier(40).told(name)
        chain = list(range(40))
        fill(policy, *chain)
        for _ in range(30):
            policy.touch(array(*chain[: dice.integers(1, 40)]), 1.0)
        assert all_in_order(policy) == chain[::-1]

    def test_a_parent_stays_as_long_as_a_child_that_came_later(self, name: str) -> None:
        policy = Tier(100).told(name)
        fill(policy, 0)
        for child in range(1, 100):
            fill(policy, child)
            policy.refresh(array(0, child))
        assert all_in_order(policy)[-1] == 0


class OutOfTree(LRU):
    """Found by `module:Class`."""


def test_a_class_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("policy_of_somebody")
    module.Mine = OutOfTree  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "policy_of_somebody", module)
    assert isinstance(make("policy_of_somebody:Mine", Tier(4).context()), OutOfTree)


@pytest.mark.parametrize(
    "name",
    ["", "fifo", "no_such_module:Mine", "kvstore.core.policy:Nothing", "kvstore.core.policy:__doc__", ":"],
)
def test_an_unknown_name_says_which_there_are(name: str) -> None:
    with pytest.raises(MisuseError, match="lru, arc, s3fifo" if "__doc__" not in name else "not a class"):
        find(name)
