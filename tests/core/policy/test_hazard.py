"""The hazard policy: against a look-up a block, and against LRU; what it sets aside; its slices."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core import events as ev
from kvstore.core.policy.hazard import Hazard
from kvstore.core.reuse.curves import span_of
from tests.core.policy.pool import Tier, Told
from tests.core.world import World

BLUR, SPAN_S = 0.15, 1.0


def array(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def slices(policy: Told) -> int:
    hazard = policy.policy
    assert isinstance(hazard, Hazard)
    return int((hazard._slices.kind >= 0).sum())


def chain(tier: Tier, *rows: int) -> None:
    """Each is the parent of the next one."""
    tier.blocks.parent[list(rows)] = [-1, *rows[:-1]]
    tier.blocks.children[list(rows)] = [1] * (len(rows) - 1) + [0]


def leave(tier: Tier, policy: Told, rows: np.ndarray) -> None:
    """As in a placement: policies hear of it first."""
    policy.remove(rows)
    parents = tier.blocks.parent[rows].astype(np.int64)
    np.subtract.at(tier.blocks.children, parents[parents >= 0], 1)
    tier.blocks.parent[rows] = -1


# -- who goes


def bounds(tier: Tier, rows: np.ndarray, now: float) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest density of each row, at its age or up to a slice's width more."""
    reuse = tier.reuse
    kinds, last = reuse.history.kinds(rows), reuse.history.last_used(rows)
    wide = np.maximum(SPAN_S, BLUR * (now - last))
    first, end = span_of(now - last), span_of(now - last + wide)
    tries = []
    for span in range(int(first.min()), int(end.max()) + 1):
        density = reuse.curves(0).density[kinds & 127, np.clip(span, first, end)]
        tries.append(np.where(kinds & 128, 4 * density, density))
    return np.min(tries, axis=0), np.max(tries, axis=0)


@pytest.mark.parametrize("seed", range(2))
def test_those_that_earn_least_go_first(seed: int) -> None:
    """By a look-up a block, up to what a slice blurs. Some come back as a clock does, most never."""
    n = 400
    tier, dice = Tier(n), np.random.default_rng(seed)
    policy, now, held, compared = tier.told("hazard"), 0.0, set[int](), 0
    regulars = np.arange(40)
    for step in range(1000):
        now += float(dice.choice([0.0, 0.25, 1.0, 2.0]))
        fresh = [row for row in range(40, n) if row not in held]
        rows = np.sort(dice.choice(fresh, min(len(fresh), int(dice.integers(1, 8))), replace=False))
        policy.insert(rows, now)
        held |= set(rows.tolist())
        if step % 12 == 0:
            there = regulars[[row in held for row in regulars.tolist()]]
            policy.touch(there, now)
            back = np.setdiff1d(regulars, there)
            policy.insert(back, now)
            held |= set(back.tolist())
        if step % 7 == 0:
            tier.reuse.history.set_priority(rows[:1], True)
            tier.reuse.hinted(rows[1:3], 0, float(dice.choice([5.0, 100.0])), now)
            policy.policy.touch(rows, now)
        while len(held) > n - 20:
            going = policy.coldest(int(dice.integers(1, 12)), now)
            kept = np.array(sorted(held - set(going.tolist())))
            assert set(going.tolist()) <= held
            lowest, _ = bounds(tier, going, now)
            _, highest = bounds(tier, kept, now)
            assert lowest.max() <= highest.min() * (1 + 1e-6)
            compared += len(np.unique(np.concatenate((lowest, highest)))) > 10
            leave(tier, policy, going)
            held -= set(going.tolist())
        assert len(policy) == len(held)
    assert compared > 100, "densities differ"
    assert len(held & set(range(40))) > 30, "regulars are still there"


def test_of_one_slice_tails_go_first_and_of_two_alike_the_older() -> None:
    tier = Tier(20)
    policy = tier.told("hazard")
    policy.insert(array(3, 4, 5), 0.0)
    policy.insert(array(6, 7, 8), 0.5)
    assert policy.coldest(5, 1.0).tolist() == [5, 4, 3, 8, 7]
    tier = Tier(20)
    policy = tier.told("hazard")
    tier.reuse.curves(0).density[:] = 1.0
    for row in (2, 4, 5, 7):
        policy.insert(array(row), 10.0 * row)
    assert policy.coldest(4, 100.0).tolist() == [2, 4, 5, 7]


def test_untouched_ancestors_keep_their_place() -> None:
    tier = Tier(20)
    policy = tier.told("hazard")
    policy.insert(array(0, 1, 3), 0.0)
    policy.insert(array(2), 50.0)
    assert policy.coldest(4, 60.0).tolist() == [3, 1, 0, 2]
    tier.reuse.used(array(3), 0, 60.0)
    policy.policy.touch(array(0, 3), 60.0)
    assert policy.coldest(4, 60.0).tolist() == [1, 0, 2, 3]


def test_high_priority_blocks_are_kept_longer() -> None:
    tier = Tier(20)
    policy = tier.told("hazard")
    policy.insert(array(0, 1, 2), 0.0)
    tier.reuse.history.set_priority(array(2), True)
    policy.touch(array(0, 1, 2), 0.1)
    assert policy.coldest(3, 5.0).tolist() == [1, 0, 2]


def test_children_in_a_lower_tier_do_not_keep_their_parent() -> None:
    tier = Tier(20)
    policy = tier.told("hazard")
    chain(tier, 0, 1, 2, 3)
    policy.insert(array(0, 1, 2), 0.0)
    assert policy.coldest(9, 10.0).tolist() == [2, 1, 0], "3 is in a lower tier: 2 may go all the same"


def test_no_block_is_evicted_for_one_that_earns_no_more() -> None:
    tier = Tier(20)
    policy = tier.told("hazard")
    chain(tier, 0, 1, 2)
    chain(tier, 3, 4)
    policy.insert(array(0, 1, 2), 0.0)
    policy.insert(array(3, 4), 90.0)
    tier.reuse.history.set_priority(array(0), True)
    rows = array(0, 2, 4)
    first, old, recent = tier.reuse.density(
        0, tier.reuse.history.kinds(rows), tier.reuse.history.last_used(rows), 100.0
    ).tolist()
    assert old < first < recent
    assert policy.coldest(9, 100.0).tolist() == [2, 1, 0, 4, 3]
    assert policy.coldest(9, 100.0, below=old).tolist() == []
    assert policy.coldest(9, 100.0, below=first).tolist() == [2, 1], "0 is worth more than what is below it"
    assert policy.coldest(9, 100.0, below=recent).tolist() == [2, 1, 0]
    policy.policy.cool(array(4))
    assert policy.coldest(9, 100.0, below=old).tolist() == [4], "it will not be used again"


def test_cooled_blocks_are_evicted_before_the_least_earning_ones() -> None:
    tier = Tier(50)
    policy = tier.told("hazard")
    policy.insert(np.arange(20), 0.0)
    policy.insert(np.arange(20, 40), 1000.0)
    policy.cool(array(30, 31, 45))
    policy.cool(array(35))
    assert policy.coldest(4, 1000.0).tolist() == [35, 31, 30, 19]
    assert len(policy) == 40
    policy.remove(array(31))
    policy.touch(array(35), 1001.0)
    assert policy.coldest(2, 1001.0).tolist() == [30, 19]
    assert len(policy) == 39


# -- set aside


def test_parents_come_back_when_their_last_child_has_gone() -> None:
    tier = Tier(300)
    policy = tier.told("hazard")
    chain(tier, 0, 1, 2)
    tier.blocks.parent[3], tier.blocks.children[1] = 1, 2
    policy.insert(array(0, 1, 2, 3), 0.0)
    policy.insert(np.arange(100, 200), 50.0)
    policy.coldest(1, 100.0)
    policy.defer(array(1, 0), parents=True)
    assert set(policy.coldest(150, 100.0).tolist()) == {2, 3, *range(100, 200)}
    assert len(policy) == 104
    leave(tier, policy, array(3))
    assert policy.coldest(1, 100.0).tolist() == [1], "it may be its last one here"
    policy.defer(array(1), parents=True)
    assert policy.coldest(5, 100.0).tolist() == [2, 1, 0, 199, 198], "each right behind its last child"
    assert policy.coldest(2, 100.0).tolist() == [2, 1]
    leave(tier, policy, array(2))
    assert policy.coldest(2, 100.0).tolist() == [1, 0]
    leave(tier, policy, array(1, 0))
    assert len(policy) == 100


def test_parents_that_were_not_set_aside_are_offered_once_and_where_they_are() -> None:
    tier = Tier(20)
    policy = tier.told("hazard")
    chain(tier, 0, 1)
    chain(tier, 2, 3, 4)
    policy.insert(array(2, 3, 4), 0.0)
    policy.insert(array(0, 1), 50.0)
    policy.coldest(1, 60.0)
    policy.defer(array(0), parents=True)
    policy.touch(array(2), 60.0)
    assert policy.coldest(10, 60.0).tolist() == [4, 3, 1, 0, 2]


def test_a_chain_is_offered_from_its_end_and_as_far_as_it_earns_no_more_than_others() -> None:
    tier = Tier(40)
    policy = tier.told("hazard")
    chain(tier, 0, 1, 2, 3)
    chain(tier, 10, 11, 12)
    policy.insert(array(0, 1, 2, 3), 0.0)
    policy.insert(array(10, 11, 12), 50.0)
    density = tier.reuse.curves(0).density
    density[:] = 1.0
    density[:, span_of(np.array([100.0, 50.0]))] = 0.3, 0.5
    assert policy.coldest(5, 100.0).tolist() == [3, 2, 1, 0, 12]
    tier.reuse.history.kind[1] = 20
    density[20] = 0.7
    assert policy.coldest(10, 100.0).tolist() == [3, 2, 12, 11, 10, 1, 0], "never before its child"
    policy.defer(array(3))
    assert policy.coldest(10, 100.1).tolist() == [12, 11, 10]


def test_a_chain_that_is_stored_in_pieces_is_offered_from_its_end() -> None:
    tier = Tier(40)
    policy = tier.told("hazard")
    chain(tier, *range(12))
    for first in (0, 4, 8):
        policy.insert(np.arange(first, first + 4), 0.0)
    assert policy.coldest(6, 1.0).tolist() == [11, 10, 9, 8, 7, 6]
    leave(tier, policy, np.arange(8, 12)[::-1])
    assert policy.coldest(6, 1.0).tolist() == [7, 6, 5, 4, 3, 2]


def test_a_chain_that_is_continued_in_another_pool_stays_where_it_is() -> None:
    """As after a change of a namespace's slots: pools of a tier share their queues' numbers."""
    tier = Tier(40)
    one, other = tier.told("hazard"), tier.told("hazard")
    chain(tier, *range(8))
    one.insert(np.arange(4), 0.0)
    other.insert(np.arange(4, 8), 0.0)
    assert (len(one), len(other)) == (4, 4)
    assert one.coldest(4, 1.0).tolist() == [3, 2, 1, 0]


def test_rows_that_are_given_anew_are_not_taken_for_those_that_left() -> None:
    tier = Tier(40)
    policy = tier.told("hazard")
    chain(tier, 0, 1, 2)
    policy.insert(array(0, 1, 2), 0.0)
    policy.insert(array(30), 0.0)
    leave(tier, policy, array(2, 1, 0))
    chain(tier, 5, 1, 0, 2)
    policy.insert(array(5, 1, 0, 2), 1.0)
    hazard = policy.policy
    assert isinstance(hazard, Hazard)
    policy.coldest(1, 2.0)
    assert len(hazard._parents) == 3
    assert policy.coldest(5, 2.0).tolist() == [30, 2, 0, 1, 5]


def test_deferred_parents_are_offered_again_after_seconds() -> None:
    """Their copies are in another tier, of which this policy does not hear."""
    tier = Tier(300)
    policy = tier.told("hazard")
    chain(tier, 0, 1)
    policy.insert(array(0), 0.0)
    policy.insert(np.arange(100, 200), 50.0)
    policy.coldest(1, 100.0)
    policy.defer(array(0), parents=True)
    tier.blocks.children[0] = 0
    assert policy.coldest(1, 100.1).tolist() != [0]
    assert policy.coldest(1, 111.0).tolist() == [0]


def test_parents_in_use_do_not_wait_for_children_that_went_before_them() -> None:
    """Their copies here went while the parents were read, so that none is left whose going would say so."""
    world = World(dram=1, nvme=4, policy="hazard")
    world.open(1)
    chain = [b"a", b"b", b"c", b"d"]
    assert world.put(0, 1, chain) == 4
    world.pass_time(1)
    read = world.acquire(1, 1, chain[:3])
    assert world.put(0, 1, [b"instead of d"]) == 1
    world.pass_time(1)
    other = world.acquire(2, 1, [b"instead of d"])
    assert world.put(0, 1, [b"no room"]) == 0, "all is in use"
    for client, lease in ((1, read), (2, other)):
        world.send(ev.Release(client, lease.lease))
    world.pass_time(1)
    assert world.put(0, 1, [b"1", b"2", b"3", b"4"]) == 4


def test_deferred_parents_are_offered_if_nothing_else_is_left() -> None:
    tier = Tier(20)
    policy = tier.told("hazard")
    chain(tier, 0, 1, 2)
    policy.insert(array(0, 1), 0.0)
    policy.insert(array(5), 1.0)
    policy.defer(array(1), parents=True)
    assert policy.coldest(5, 2.0).tolist() == [5]
    leave(tier, policy, array(5))
    assert set(policy.coldest(5, 2.0).tolist()) == {0, 1}


def test_busy_ones_come_back_after_a_moment() -> None:
    tier = Tier(300)
    policy = tier.told("hazard")
    policy.insert(np.arange(10), 0.0)
    policy.insert(np.arange(100, 200), 50.0)
    policy.coldest(1, 100.0)
    policy.defer(array(9, 8))
    policy.coldest(1, 100.0)
    policy.defer(array(7, 250))
    assert policy.coldest(2, 100.1).tolist() == [6, 5]
    assert 7 not in policy.coldest(150, 100.2)
    assert set(policy.coldest(10, 100.5).tolist()) == set(range(10))
    assert len(policy) == 110


def test_where_all_is_set_aside_it_is_offered_all_the_same() -> None:
    tier = Tier(20)
    policy = tier.told("hazard")
    chain(tier, 0, 1)
    policy.insert(array(0, 1, 5), 0.0)
    for _ in range(3):
        rows = policy.coldest(5, 1.0)
        assert sorted(rows.tolist()) == [0, 1, 5]
        policy.defer(rows)
    assert len(policy) == 3


@pytest.mark.parametrize("seed", range(3))
def test_leaf_first_a_chain_leaves_from_its_tail_in_few_looks(seed: int) -> None:
    """Whatever was used how often: with what a placement does about parents."""
    tier, dice = Tier(300), np.random.default_rng(seed)
    policy, rows = tier.told("hazard"), np.arange(300)
    chain(tier, *rows.tolist())
    policy.insert(rows, 0.0)
    for i in range(30):
        policy.touch(rows[: dice.integers(1, 300)], float(10 * i))
    left: list[int] = []
    looked = 0
    while len(policy):
        some = policy.coldest(16, 300.0)
        looked += len(some)
        leaves = some[tier.blocks.children[some] == 0][:1]
        policy.defer(np.setdiff1d(some, leaves), parents=True)
        leave(tier, policy, leaves)
        left += leaves.tolist()
        assert looked < 20 * 300
    assert left == rows[::-1].tolist()


@pytest.mark.parametrize("used_s", [20.0, 100.0, 170.0])
def test_an_inserted_block_is_ordered_by_its_own_age(used_s: float) -> None:
    """However few slices there are of its class, and wherever: it earns what its own age says."""
    tier = Tier(20)
    policy = tier.told("hazard")
    density = tier.reuse.curves(0).density
    density[:] = 1.0
    density[:, span_of(np.array([10.0, 200.0 - used_s]))] = 0.7, 0.5
    times = {2: 50.0, 3: 120.0, 4: 190.0}
    for row, now in sorted({**times, 9: used_s}.items(), key=lambda item: item[1]):
        policy.insert(array(row), now)
    policy.coldest(1, 200.0)
    policy.defer(array(9))
    assert 9 not in policy.coldest(20, 200.1)
    assert policy.coldest(1, 200.5).tolist() == [9]


def test_rows_of_all_ages_that_come_at_once_are_apart() -> None:
    tier = Tier(100)
    policy, rows = tier.told("hazard"), np.arange(80)
    for row in rows.tolist():
        tier.reuse.stored(array(row), 0, 2.0 * row)
    policy.policy.insert(rows, 200.0)
    tier.reuse.curves(0).density[:] = np.arange(40)
    order = policy.coldest(80, 200.0)
    density = span_of(200.0 - tier.reuse.history.last_used(order))
    assert (np.diff(density) >= -1).all(), "up to a slice's width"
    assert slices(policy) >= 10, "of 42 to 200 s, each a seventh longer than the one before"


# -- slices


def test_slices_are_joined_as_they_age() -> None:
    n, most, policy_of = 1000, 0, Tier(1000, ghosts=8)
    policy = policy_of.told("hazard")
    for i in range(n // 2):
        policy.insert(array(2 * i, 2 * i + 1), 2.0 * i)
        policy.coldest(1)
    for i in range(n // 2, 2 * n):
        gone = policy.coldest(2, 2.0 * i)
        leave(policy_of, policy, gone)
        policy.insert(gone, 2.0 * i)
        most = max(most, slices(policy))
        assert len(policy) == n
    assert most < 150, "of 500 times at which some came"
    hazard = policy.policy
    assert isinstance(hazard, Hazard)
    assert len(hazard._slices._queues) <= 256
    assert sorted(policy.coldest(n).tolist()) == list(range(n)), "none got lost"


# -- in a placement


def hits(policy: str) -> tuple[int, int]:
    """(hits, look-ups) of four chains that come back every 10 s, beside twice as much that never does."""
    w = World(dram=1, nvme=0, slots=64, policy=policy, max_blocks=128)
    w.open(1)
    regulars = [[b"r%dk%04d" % (i, k) for k in range(4)] for i in range(4)]
    found = asked = 0
    for second in range(160):
        w.now = float(second)
        w.put(0, 1, [b"o-%05d" % (6 * second + k) for k in range(6)])
        if second % 10 < 4:
            keys = regulars[second % 10]
            there = len(w.get(1, keys))
            if second >= 60:
                found, asked = found + there, asked + len(keys)
            w.put(0, 1, keys)
    return found, asked


def test_returning_blocks_are_kept_where_lru_evicts_them() -> None:
    (lru, asked), (hazard, _) = hits("lru"), hits("hazard")
    assert asked == 160
    assert lru < asked / 10
    assert hazard > 0.8 * asked


def test_a_favoured_block_is_explained_by_its_class() -> None:
    tier = Tier(4)
    policy = tier.told("hazard")
    policy.insert(array(0, 1), 0.0)
    tier.reuse.history.set_priority(array(1), True)
    hazard = policy.policy
    assert isinstance(hazard, Hazard)
    plain, favoured = hazard.explain(array(0, 1), 1.0)
    assert plain.split(":")[0] == favoured.split(":")[0] == "used once, stored with many others"


def test_a_pool_that_evicts_nothing_has_few_slices() -> None:
    tier = Tier(100)
    policy = tier.told("hazard")
    policy.insert(array(*range(100)), 0.0)
    for second in range(3000):
        policy.touch(array(second % 100), 2.0 * second)
    hazard = policy.policy
    assert isinstance(hazard, Hazard)
    assert len(hazard._slices._queues) <= 512
    assert sorted(policy.coldest(100).tolist()) == list(range(100)), "none got lost"
