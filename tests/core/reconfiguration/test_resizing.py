"""Limits of tiers that change: what leaves, in which order, what stays, and what is never given out."""

from __future__ import annotations

import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from tests.core.world import World, joined, payload


def chain(name: str, n: int = 4) -> list[bytes]:
    return [b"%s%d" % (name.encode(), i) for i in range(n)]


def extents(w: World, tier: int = 0):
    return w.p.residency.tiers[tier].extents


def filled(dram: int, nvme: int, chains: int) -> World:
    """Chains of an extent each."""
    w = World(dram, nvme)
    w.open(1)
    for i in range(chains):
        assert w.put(0, 1, chain(f"c{i}-")) == 4
        w.finish_all()
    return w


def test_a_raised_limit_requests_extents_at_once() -> None:
    w = filled(1, 0, 1)
    w.resize(0, 3)
    assert [(wanted.tier, wanted.count) for wanted in w.wanted] == [(0, 2)]
    assert extents(w).capacity_bytes == extents(w).extent_bytes
    w.make()
    assert w.put(0, 1, chain("a", 8)) == 8
    assert w.get(1, chain("c0-")) == [payload(1, key) for key in chain("c0-")]
    w.pass_time(1)
    assert 0 not in w.p.resizing.shrinking
    w.settle()


@pytest.mark.parametrize("tier", [0, 1])
def test_above_a_new_limit_nothing_is_assigned_and_unassigned_extents_are_removed_first(tier: int) -> None:
    w = filled(4, 4, 1)
    w.resize(tier, 2)
    assert len(w.removals) == 2, "nobody had these"
    assert len(extents(w, tier).ready) == 2
    w.resize(tier, 1)
    assert len(w.removals) == 3
    for i in range(4):
        w.put(0, 1, chain(f"d{i}-"))
        w.finish_all()
        assert len(extents(w, tier).slots.classes[w.p.residency.namespaces[1].pools[tier]].extents) == 1
    w.pass_time(1)
    assert extents(w, tier).capacity_bytes == extents(w, tier).limit_bytes == extents(w, tier).bound_bytes
    w.settle()


def test_blocks_only_in_memory_are_demoted_before_their_extent_is_removed() -> None:
    w = World(4, 8, write_policy="on_evict")
    w.open(1)
    for i in range(4):
        w.put(0, 1, chain(f"c{i}-"))
    assert not w.records
    w.resize(0, 1)
    w.pass_time(1)
    assert extents(w).total == 1
    assert len(w.records) >= 12
    for i in range(4):
        assert w.get(1, chain(f"c{i}-")) == [payload(1, key) for key in chain(f"c{i}-")]
    w.settle()


def test_leased_or_pinned_blocks_delay_the_removal_of_their_extent() -> None:
    w = filled(4, 0, 4)
    leases = [w.acquire(1, 1, chain(f"c{i}-")) for i in range(4)]
    w.resize(0, 1)
    w.pass_time(30)
    assert extents(w).total == 4
    for i, lease in enumerate(leases):
        assert isinstance(lease, ac.Grant)
        assert w.read(1, chain(f"c{i}-"), lease) == [payload(1, key) for key in chain(f"c{i}-")]
    w.ask(ev.Pin(0, 1, joined(chain("c2-")[:2]), w.now + 100))
    assert len(w.p.residency.pins.ends) == 2
    for lease in leases:
        assert isinstance(lease, ac.Grant)
        w.send(ev.Release(1, lease.lease))
    w.pass_time(20)
    assert extents(w).total == 1
    assert [w.lookup(1, chain(f"c{i}-")) for i in range(4)] == [0, 0, 4, 0]
    w.settle()


def test_tenants_most_above_their_share_give_and_none_below_its_floor() -> None:
    w = World(6, 0)
    w.tenant(1, (2, None))
    w.tenant(2, (0, None))
    w.open(1, tenant=1)
    w.open(2, tenant=2)
    for i in range(2):
        w.put(0, 1, chain(f"a{i}-"))
    for i in range(4):
        w.put(0, 2, chain(f"b{i}-"))
    assert w.extents()[1:3] == [2, 4]
    w.resize(0, 3)
    w.pass_time(1)
    assert w.extents()[1:3] == [2, 1]
    assert w.lookup(1, chain("a0-")) == w.lookup(1, chain("a1-")) == 4
    w.settle()


def test_extents_are_reserved_for_unmet_floors() -> None:
    w = World(4, 0)
    w.tenant(1, (1, None))
    w.open(2, tenant=2)
    for i in range(3):
        w.put(0, 2, chain(f"b{i}-"))
    w.resize(0, 2)
    w.pass_time(1)
    assert (len(extents(w).unassigned), w.extents()[2]) == (1, 1)
    w.settle()


def test_an_extent_is_not_moved_while_the_tier_has_too_many() -> None:
    w = World(2, 0)
    w.open(1)
    w.open(2, block_bytes=8000)
    w.put(0, 1, chain("a", 8))
    lease = w.acquire(1, 1, chain("a", 8))
    w.put(0, 2, [b"x"])
    w.resize(0, 1)
    w.put(0, 2, [b"y"])
    assert isinstance(lease, ac.Grant)
    w.send(ev.Release(1, lease.lease))
    w.pass_time(1)
    assert extents(w).total == 1
    w.settle()


def test_raising_a_limit_during_a_removal_requests_the_extent_again() -> None:
    w = World(4, 0)
    w.open(1)
    w.resize(0, 1)
    assert len(w.removals) == 3
    w.resize(0, 3)
    assert not w.wanted, "they still take memory"
    w.remove()
    assert not w.wanted
    w.remove()
    assert [wanted.count for wanted in w.wanted] == [1]
    w.pass_time(1)
    assert extents(w).total == 3
    w.settle()


def test_a_second_raise_requests_its_extents_once_after_the_first() -> None:
    w = World(1, 0)
    w.resize(0, 2)
    w.resize(0, 4)
    assert [wanted.count for wanted in w.wanted] == [1]
    w.make()
    assert [wanted.count for wanted in w.wanted] == [2]
    w.make(all_of_them=False)
    assert not w.wanted, "there is no memory for the fourth"
    w.resize(0, 3)
    w.pass_time(1)
    assert extents(w).bound_bytes == extents(w).limit_bytes
    w.settle()


def test_a_lower_limit_removes_extents_that_are_still_being_made() -> None:
    w = World(1, 0)
    w.resize(0, 4)
    w.resize(0, 2)
    w.make()
    w.pass_time(1)
    assert extents(w).total == 2
    w.settle()


def test_blocks_as_small_as_they_get_fill_four_times_the_extents() -> None:
    w = World(2, 0, max_blocks=8)
    w.open(1)
    w.resize(0, 8)
    w.make()
    w.put(0, 1, chain("a", 8))
    assert len(extents(w).ready) == 8
    with pytest.raises(AssertionError):
        w.resize(0, 9)


def test_above_the_limit_not_even_floors_get_extents() -> None:
    w = World(3, 0)
    w.tenant(1, (1, None))
    w.open(1, tenant=1)
    w.open(2, tenant=2)
    w.put(0, 2, chain("b", 8))
    lease = w.acquire(1, 2, chain("b", 8))
    w.resize(0, 2)
    w.put(0, 1, chain("a"))
    assert (extents(w).total, w.extents()[1:3]) == (3, [0, 2])
    assert isinstance(lease, ac.Grant)
    w.send(ev.Release(1, lease.lease))
    w.pass_time(1)
    assert w.put(0, 1, chain("a")) == 4
    assert w.extents()[1:3] == [1, 1]
    w.settle()
