"""Tenants: quotas, extents that change hands, publication, ends, and what others may not do to one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.capacity.quotas import Holdings, Quota, giver
from kvstore.core.placement import Limits
from kvstore.core.queues import device_queue
from kvstore.core.queues.device_queue import DEMAND, WRITE_BACK, DeviceQueue
from kvstore.types import ALIGN
from tests.core.world import World, joined, payload

A, B, C = 1, 2, 3
SHARED = 70_000
DRAM, NVME = 0, 1


@pytest.fixture(autouse=True)
def _tiny_copies_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are of one page here."""
    monkeypatch.setattr(device_queue, "MEASURED_BYTES", 1)


def world(*tenants: tuple[int, ...], dram: int = 4, nvme: int = 0, **more: object) -> World:
    """Namespace n of each tenant n, whose (floor, limit) in DRAM and NVMe are given, in extents."""
    w = World(dram, nvme, **more)  # type: ignore[arg-type]
    for number, *quota in tenants:
        pairs = [(quota[i], quota[i + 1]) for i in range(0, len(quota), 2)] or [(0, None)]
        w.tenant(number, *(pairs + [(0, None)] * (2 - len(pairs)))[: 2 if nvme else 1])
        w.open(number, tenant=number)
    return w


def fill(w: World, tenant: int, blocks: int, prefix: bytes = b"f") -> list[bytes]:
    """Puts single blocks, and lets what follows from that come to an end."""
    keys = [prefix + b"%03d" % i for i in range(blocks)]
    for key in keys:
        w.put(0, tenant, [key])
        w.pass_time(0.06)
    return keys


def kept(w: World, tenant: int, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if w.lookup(tenant, [key])]


def drops(actions: list[ac.Action]) -> list[tuple[int, int, bytes]]:
    """(tier, namespace, key) of what was dropped."""
    out = []
    for a in actions:
        if isinstance(a, ac.Drop):
            out += [(a.tier, int(a.identity.namespace[i]), a.identity.key(i)) for i in range(len(a.identity))]
    return out


# -- who gives


counts = st.integers(0, 12)
tenants = st.lists(st.tuples(counts, counts, st.sampled_from([0.5, 1.0, 3.0])), min_size=2, max_size=6)


def columns(rows: list[tuple[int, int, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    held, floor, share = zip(*rows, strict=True)
    return np.array(held), np.array(floor), np.array(share)


@given(tenants, st.data())
def test_no_tenant_loses_extents_below_its_floor_or_to_itself(
    rows: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    held, floor, share = columns(rows)
    idle = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    taker = data.draw(st.integers(0, len(rows) - 1))
    who = giver(taker, held, floor, share, idle)
    if who is not None:
        assert who != taker
        assert held[who] - 1 >= floor[who]


@given(tenants, st.data())
def test_an_extent_does_not_move_back_at_once(
    rows: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    held, floor, share = columns(rows)
    idle = np.zeros(len(rows), np.bool_)
    taker = data.draw(st.integers(0, len(rows) - 1))
    who = giver(taker, held, floor, share, idle)
    assume(who is not None)
    held[who] -= 1
    held[taker] += 1
    assert giver(who, held, floor, share, idle) != taker


@given(tenants, st.data())
def test_a_tenant_below_its_floor_gets_an_extent_if_another_is_above(
    rows: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    held, floor, share = columns(rows)
    taker = data.draw(st.integers(0, len(rows) - 1))
    assume(held[taker] < floor[taker])
    above = (held > floor).any()
    assert (giver(taker, held, floor, share, np.zeros(len(rows), np.bool_)) is not None) == above


@given(tenants, st.data())
def test_idle_tenants_give_when_no_other_would(
    rows: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    held, floor, share = columns(rows)
    taker, spare = data.draw(st.permutations(range(len(rows))))[:2]
    idle = np.zeros(len(rows), np.bool_)
    idle[spare] = True
    if held[spare] > floor[spare]:
        assert giver(taker, held, floor, share, idle) is not None


@given(tenants, st.data())
def test_moves_end_at_weighted_max_min(rows: list[tuple[int, int, float]], data: st.DataObject) -> None:
    held, floor, share = columns(rows)
    floor = np.minimum(floor, held)
    idle = np.zeros(len(rows), np.bool_)
    order = data.draw(st.permutations(range(len(rows))))
    for _ in range(1000):
        moves = [(t, g) for t in order if (g := giver(t, held, floor, share, idle)) is not None]
        if not moves:
            break
        taker, who = moves[0]
        held[taker] += 1
        held[who] -= 1
    else:
        raise AssertionError("extents move for ever")
    above = (held - floor) / share
    for one in range(len(rows)):
        for other in range(len(rows)):
            if held[one] > floor[one]:
                # Less than an extent apart: one more move would turn it round.
                assert above[one] - 1 / share[one] < above[other] + 1 / share[other]


def test_inactive_tenants_and_those_with_free_extents_give() -> None:
    h = Holdings(100)
    for tenant in (1, 2, 3):
        h.set(tenant, Quota())
        h.add_extents(tenant, 4)
        h.used[tenant] += 400
        h.fitted[tenant] += 400
        h.mark_active(tenant, 1000.0)
    assert h.giver(1, 1000.0) is None
    h.used[2] -= 200
    assert h.giver(1, 1000.0) == 2
    h.used[2] += 200
    h.mark_active(1, 1100.0)
    h.mark_active(2, 1100.0)
    assert h.giver(1, 1100.0) == 3


def test_bytes_that_no_slot_covers_are_not_free() -> None:
    h = Holdings(100)
    for tenant in (1, 2):
        h.set(tenant, Quota())
        h.add_extents(tenant, 8)
        h.fitted[tenant] += 8 * 70
        h.used[tenant] += 8 * 70
        h.mark_active(tenant, 1.0)
    assert h.giver(1, 1.0) is None


# -- floors and limits


def test_a_floor_is_available_at_once_when_others_filled_the_tier() -> None:
    w = world((A, 2, None), (B, 0, None))
    fill(w, B, 40)
    assert w.extents()[B] == 2
    assert w.put(0, A, [b"a"]) == 1
    assert w.put(0, A, [b"b", b"c", b"d", b"e"]) == 4
    assert w.extents()[A] == 2


@pytest.mark.parametrize("nvme", [0, 6])
def test_over_its_limit_a_tenant_evicts_its_own_only(nvme: int) -> None:
    w = world((A, 0, 1, 0, 2), (B, 0, None), nvme=nvme)
    theirs = fill(w, B, 6)
    keys = [b"a%02d" % i for i in range(20)]
    for key in keys:
        assert w.put(0, A, [key]) == 1
        assert not [d for d in drops(w.actions) if d[1] != A]
        w.pass_time(0.06)
        assert w.used(0, A) <= 4 * ALIGN
        assert w.extents()[A] <= 1
    assert kept(w, B, theirs) == theirs
    assert len(kept(w, A, keys)) == (8 if nvme else 4)


def test_a_limit_holds_for_leased_blocks_too() -> None:
    w = world((A, 0, 1), (B,))
    assert w.put(0, A, [b"a", b"b", b"c", b"d"]) == 4
    grant = w.acquire(1, A, [b"a", b"b", b"c", b"d"])
    assert isinstance(grant, ac.Grant)
    w.invalidate(A, [b"a", b"b", b"c", b"d"])
    assert w.put(0, A, [b"e"]) == 0
    assert w.used(0, A) == 4 * ALIGN
    w.send(ev.Release(1, grant.lease))
    assert w.put(0, A, [b"e"]) == 1


def test_a_limit_is_one_for_all_slot_sizes() -> None:
    w = world((A, 0, 2), (B,))
    w.open(11, 5000, A)
    small, large = [b"s%02d" % i for i in range(12)], [b"l%02d" % i for i in range(12)]
    for one, other in zip(small, large, strict=True):
        w.put(0, A, [one])
        w.pass_time(0.06)
        w.put(0, 11, [other])
        w.pass_time(0.06)
        assert w.extents()[A] <= 2
    assert kept(w, A, small)
    assert kept(w, 11, large)


def test_blocks_of_another_slot_size_are_evicted_for_room() -> None:
    """A limit that is no multiple of extents counts bytes, whatever the slots' size."""
    w = World(4, 0)
    extent = w.p.residency.tiers[0].extents.extent_bytes
    w.send(ev.SetTenant(A, (Quota(0, extent + ALIGN),)))
    w.open(1, tenant=A)
    w.open(2, 5000, A)
    fill(w, 1, 4)
    assert w.put(0, 2, [b"x"]) == 1
    assert w.used(0, A) <= extent + ALIGN


def test_rows_are_not_taken_from_a_tenant_at_its_floor() -> None:
    w = world((A, 1, None), (B, 0, None), dram=8, max_blocks=8)
    mine = fill(w, A, 4, b"a")
    for i in range(20):
        assert w.put(0, B, [b"b%02d" % i]) == 1
        assert kept(w, A, mine) == mine


def test_rows_are_taken_from_others_down_to_their_floors_only() -> None:
    w = world((A, 1, None), (B, 0, None), dram=8, max_blocks=12)
    mine = fill(w, A, 8, b"a")
    w.p.eviction.make_rows(12, B)
    assert kept(w, A, mine) == mine[2:]


def test_a_new_tenant_needs_no_quota() -> None:
    w = World(2, 2)
    w.open(9, tenant=9)
    w.put(0, 9, [b"x"])
    w.finish_all()
    assert w.get(9, [b"x"]) == [payload(9, b"x")]


# -- limits that are lowered


@pytest.mark.parametrize("nvme", [0, 6])
def test_a_lowered_limit_evicts_coldest_first_and_returns_extents(nvme: int) -> None:
    w = world((A, 0, 4, 0, 4), dram=4, nvme=nvme)
    keys = fill(w, A, 16)
    w.get(A, [keys[0]])
    w.tenant(A, (0, 1), *[(0, 1)] * bool(nvme))
    w.pass_time(5.0)
    assert w.used(0, A) <= 4 * ALIGN
    assert w.extents()[A] == 1
    left = kept(w, A, keys)
    assert len(left) >= 4
    assert set(left) <= {keys[0], *keys[-7:]}
    assert len(w.p.residency.tiers[0].extents.unassigned) == 3
    if nvme:
        assert w.extents(NVME)[A] == 1


def test_a_tenant_that_cannot_shrink_is_examined_rarely() -> None:
    w = world((A, 0, None))
    fill(w, A, 16)
    grants = [w.acquire(1, A, [b"f%03d" % i]) for i in range(8)]
    assert all(isinstance(g, ac.Grant) for g in grants)
    w.tenant(A, (0, 1))
    w.pass_time(1.0)
    assert w.used(0, A) == 8 * ALIGN
    assert w.pass_time(10.0) < 500
    for grant in grants:
        w.send(ev.Release(1, grant.lease))
    w.pass_time(2.0)
    assert w.used(0, A) <= 4 * ALIGN
    assert w.p.next_wakeup() is None


def test_steps_continue_during_many_other_events() -> None:
    w = world((A, 0, None))
    fill(w, A, 16)
    w.tenant(A, (0, 1))
    for _ in range(200):
        wake = w.p.next_wakeup()
        if wake is not None and wake <= w.now:
            w.send(ev.Tick())
        else:
            w.lookup(A, [b"x"])
    assert w.used(0, A) <= w.p.residency.tiers[0].extents.extent_bytes


# -- extents that change hands


def test_an_extent_is_renewed_before_another_tenant_gets_it() -> None:
    w = world((A, 0, None), (B, 0, None))
    fill(w, A, 16)
    before = set(w.kept[0])
    assert w.put(0, B, [b"b"]) == 0
    w.now += 1
    w.put(0, B, [b"b"])
    [renewal] = w.renewals
    assert w.put(0, B, [b"b"]) == 0
    new = w.renew()
    assert new not in before
    assert renewal.extent in before
    assert w.put(0, B, [b"b"]) == 1
    assert w.extents()[A:3] == [3, 1]


def test_a_renewed_extent_of_nvme_keeps_its_number() -> None:
    w = world((A,), (B,), dram=8, nvme=2)
    fill(w, A, 8)
    w.finish_all()
    w.put(0, B, [b"b"])
    w.pass_time(1)
    assert sorted(w.kept[1]) == [0, 1]
    assert w.extents(NVME)[A:3] == [1, 1]
    assert w.get(B, [b"b"]) == [payload(B, b"b")]


def test_blocks_of_an_emptied_extent_are_demoted() -> None:
    w = world((A,), (B,), nvme=8, write_policy="on_evict")
    keys = fill(w, A, 16)
    w.now += 1
    w.put(0, B, [b"b"])
    w.pass_time(1)
    assert w.extents()[B] == 1
    assert kept(w, A, keys) == keys
    assert w.get(A, keys[:1]) == [payload(A, keys[0])]


def test_fair_shares_are_reached_by_asking() -> None:
    w = world((A,), (B,), dram=6)
    fill(w, A, 24)
    fill(w, B, 60, b"b")
    fill(w, A, 60, b"a")
    assert w.extents()[A:3] == [3, 3]


def test_a_leased_slot_keeps_its_extent() -> None:
    w = world((A,), (B,), dram=1)
    keys = fill(w, A, 4)
    grant = w.acquire(1, A, keys[:1])
    assert isinstance(grant, ac.Grant)
    w.now += 1
    w.put(0, B, [b"b"])
    w.pass_time(1)
    assert w.extents()[A:3] == [1, 0]
    assert w.read(A, keys[:1], grant) == [payload(A, keys[0])]


def test_an_extent_that_is_not_empty_in_time_stays_in_its_pool() -> None:
    w = world((A,), (B,), dram=2, nvme=8, write_policy="on_evict")
    keys = fill(w, A, 8)
    w.now += 1
    w.reserve(1, B, [b"b"])
    [extent] = w.p.residency.tiers[0].slots.closed
    assert w.copies
    stays = {c.identity.key(0) for c in w.copies.values()}
    assert stays <= set(keys)
    until = w.now + 11
    ticks = 0
    while w.now < until:
        w.now = max(w.now, w.p.next_wakeup() or math.inf)
        w.send(ev.Tick())
        ticks += 1
    assert extent not in w.p.residency.tiers[0].slots.closed
    assert ticks < 1000, "what waits for others is not looked at all the time"
    w.settle()


def test_an_extent_that_cannot_be_renewed_is_lost_to_its_taker_only() -> None:
    w = world((A,), (B,))
    fill(w, A, 16)
    w.now += 1
    w.put(0, B, [b"b"])
    assert w.renewals
    w.renew(lost=True)
    assert w.extents()[A:3] == [3, 0]
    w.pass_time(1)
    w.now += 1
    w.put(0, B, [b"b"])
    w.pass_time(1)
    assert w.put(0, B, [b"b"]) == 1


def test_an_extent_promised_to_one_domain_is_not_cut_for_another_as_it_is() -> None:
    w = world((A, 0, 2), (B,), dram=2, nvme=8, write_policy="on_evict")
    w.open(11, 100, A)
    w.open(12, 5000, A)
    w.open(13, 100, A)
    w.publish(11, SHARED)
    w.publish(12, SHARED)
    for i in range(8):
        w.put(0, 11, [b"p%d" % i])
    w.now += 1
    # The larger slots of the same domain are to get an extent of the smaller ones, which empties later.
    w.reserve(1, 12, [b"x"])
    w.pass_time(1)
    # `Format` in World asserts the rest.
    for i in range(8):
        w.put(0, 13, [b"q%d" % i])
        w.pass_time(0.1)


def test_refused_tenants_do_not_delay_a_tenant_that_may_get_an_extent() -> None:
    w = world((A,), (B,), (C,), dram=4)
    fill(w, A, 8)
    fill(w, B, 8)
    w.tenant(C, (1, None))
    for i in range(400):
        w.now += 0.02
        w.put(0, A, [b"a%03d" % i])
        w.put(0, B, [b"b%03d" % i])
        if w.put(0, C, [b"c%03d" % i]):
            break
        while w.renewals:
            w.renew()
    assert i < 10
    assert w.extents()[C] == 1


# -- publication


def published(**more: object) -> World:
    w = world((A,), (B,), **more)
    assert w.put(0, A, [b"a", b"b", b"c"]) == 3
    return w


@pytest.mark.parametrize("nvme", [0, 4])
def test_published_blocks_are_readable_by_others_from_new_extents(nvme: int) -> None:
    w = published(nvme=nvme)
    w.finish_all()
    w.publish(A, SHARED)
    w.pass_time(1)
    assert w.get(A, [b"a", b"b", b"c"], tenant=B) == [payload(A, k) for k in (b"a", b"b", b"c")]
    assert w.get(A, [b"a", b"b", b"c"]) == [payload(A, k) for k in (b"a", b"b", b"c")]
    w.settle()


def test_blocks_that_are_not_relocated_yet_are_misses_for_others() -> None:
    w = published()
    w.publish(A, SHARED)
    assert w.copies
    assert w.lookup(A, [b"a"], tenant=B) == 0
    assert w.get(A, [b"a"]) == [payload(A, b"a")]
    grant = w.acquire(1, A, [b"a", b"b"], tenant=B)
    assert isinstance(grant, ac.Grant)
    assert w.lookup(A, [b"a"], tenant=B) == (1 if not w.copies else 0)


def test_unpublishing_relocates_blocks_away_from_readers() -> None:
    w = published()
    w.publish(A, SHARED)
    w.pass_time(1)
    w.publish(A, A)
    w.pass_time(1)
    assert w.get(A, [b"a"]) == [payload(A, b"a")]
    table = w.p.residency.tiers[0].slots
    slots = w.p.residency.blocks.slot[0, :3].astype(np.int64)
    assert {table.pool_of(s).domain for s in slots.tolist()} == {A}


def test_a_full_tier_publishes_when_extents_come() -> None:
    w = world((A,), (B,), dram=2)
    keys = fill(w, A, 8)
    w.now += 1
    w.publish(A, SHARED)
    w.pass_time(5)
    assert kept(w, A, keys)
    seen = [k for k in keys if w.lookup(A, [k], tenant=B)]
    assert seen


def test_written_blocks_leave_memory_and_come_back_in_the_new_domain() -> None:
    w = world((A,), (B,), nvme=8)
    keys = fill(w, A, 10)
    w.publish(A, SHARED)
    w.pass_time(1)
    for key in keys:
        assert w.get(A, [key], tenant=B) == [payload(A, key)]


def test_promotions_into_the_old_domain_never_arrive() -> None:
    w = world((A,), (B,), dram=1, nvme=8)
    keys = fill(w, A, 8)
    cold = next(k for k in keys if w.p.residency.blocks.slot[0, w.p.residency.index.find_one(A, k)] < 0)
    assert w.acquire(1, A, [cold], 5.0) is None
    mine = w.last_request
    w.publish(A, SHARED)
    w.pass_time(1)
    assert mine in w.answers
    assert w.acquire(1, A, [cold], 5.0, tenant=B) is None
    theirs = w.last_request
    w.pass_time(2)
    grant = w.answers[theirs]
    assert isinstance(grant, ac.Grant)
    assert w.read(A, [cold], grant) == [payload(A, cold)]
    w.settle()


def test_waiting_readers_are_answered_when_a_publication_ends() -> None:
    w = world((A,), (B,), dram=1, nvme=8)
    w.publish(A, SHARED)
    keys = fill(w, A, 8)
    w.pass_time(1)
    cold = next(k for k in keys if w.p.residency.blocks.slot[0, w.p.residency.index.find_one(A, k)] < 0)
    assert w.acquire(1, A, [cold], 5.0, tenant=B) is None
    theirs = w.last_request
    w.publish(A, A)
    answer = w.answers[theirs]
    assert isinstance(answer, ac.Grant)
    assert not len(answer.where)
    w.settle()


def test_waiting_readers_are_told_of_no_slot_in_memory_that_they_may_no_longer_map() -> None:
    w = world((A,), (B,), dram=1, nvme=8)
    w.publish(A, SHARED)
    keys = fill(w, A, 8)
    w.pass_time(1)
    r = w.p.residency
    there = {key: bool(r.blocks.slot[0, r.index.find_one(A, key)] >= 0) for key in keys}
    warm, cold = max(keys, key=there.__getitem__), min(keys, key=there.__getitem__)
    assert there[warm]
    assert not there[cold]
    assert w.acquire(1, A, [warm, cold], 5.0, tenant=B) is None
    theirs = w.last_request
    w.publish(A, A)
    answer = w.answers[theirs]
    assert isinstance(answer, ac.Grant)
    assert not len(answer.where), "the promotion that it waited for ended first"
    w.settle()


def test_stalled_requests_of_readers_end_too() -> None:
    w = world((A,), (B,), dram=1, nvme=8)
    w.publish(A, SHARED)
    keys = fill(w, A, 8)
    w.pass_time(1)
    r = w.p.residency
    there = [k for k in keys if r.blocks.slot[0, r.index.find_one(A, k)] >= 0]
    gone = [k for k in keys if k not in there]
    leases = [w.acquire(1, A, [k]) for k in there]
    w.reserve(2, A, [b"new"], wait=5.0)
    request = None
    if w.acquire(3, A, [gone[1]], 5.0, tenant=B) is None:
        request = w.last_request
    w.publish(A, A)
    assert request is None or request in w.answers
    assert leases
    w.settle()


def test_a_write_that_was_under_way_is_not_lost() -> None:
    w = world((A,), (B,), nvme=8)
    for i in range(6):
        assert w.put(0, A, [b"k%d" % i]) == 1
    w.publish(A, SHARED)
    w.pass_time(1)
    assert all((A, b"k%d" % i) in w.records for i in range(6))


def test_publication_waits_for_blocks_being_written() -> None:
    w = world((A,), (B,), nvme=8)
    keys = [b"k%d" % i for i in range(3)]
    for key in keys:
        assert w.put(0, A, [key]) == 1
    assert {(c.source, c.target) for c in w.copies.values()} == {(0, 1)}
    w.publish(A, SHARED)
    published = w.last_request
    for _ in range(20):
        w.now += 0.05
        w.send(ev.Tick())
        assert published not in w.answers
    w.pass_time(1)
    assert published in w.answers
    for key in keys:
        assert w.acquire(1, A, [key], 5.0, tenant=B) is None
        theirs = w.last_request
        w.pass_time(1)
        grant = w.answers[theirs]
        assert isinstance(grant, ac.Grant)
        assert w.read(A, [key], grant) == [payload(A, key)]


def test_blocks_committed_into_the_old_domain_are_relocated() -> None:
    w = world((A,), (B,))
    room = w.reserve(0, A, [b"a"])
    assert isinstance(room, ac.Reserved)
    w.publish(A, SHARED)
    w.commit(0, room, w.fill(A, [b"a"], room))
    w.pass_time(1)
    assert w.get(A, [b"a"], tenant=B) == [payload(A, b"a")]


# -- ends


def test_expired_blocks_are_misses_at_once_and_freed_soon() -> None:
    w = world((A,), nvme=4)
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a", b"b"])
    w.put(0, A, [b"a"])
    w.finish_all()
    ends = w.p.residency.blocks.expires.max()
    w.now = ends - 0.002
    assert w.lookup(11, [b"a", b"b"]) == 2
    w.now = ends
    assert w.lookup(11, [b"a", b"b"]) == 0
    assert w.get(11, [b"a", b"b"]) == []
    assert w.get(A, [b"a"]) == [payload(A, b"a")]
    w.pass_time(2)
    assert w.p.residency.blocks.used == 1
    assert (w.used(0), w.used(1)) == (ALIGN, ALIGN)


def test_a_block_stored_again_has_a_new_ttl() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a"])
    w.now = 5.0
    w.invalidate(11, [b"a"])
    w.put(0, 11, [b"a"])
    w.pass_time(7)
    assert w.lookup(11, [b"a"]) == 1
    w.pass_time(5)
    assert w.lookup(11, [b"a"]) == 0
    assert w.p.residency.blocks.used == 0


def expired(w: World) -> float:
    """Has the next end of a block pass, without anybody having been told so far."""
    w.now = float(w.p.leases.next_end)
    return w.now


def room_of(w: World, client: int, namespace: int, keys: list[bytes], parent: bytes = b"") -> ac.Reserved:
    room = w.reserve(client, namespace, keys, parent)
    assert isinstance(room, ac.Reserved), room
    return room


@pytest.mark.parametrize("nvme", [0, 4])
def test_an_expired_block_is_stored_again_before_it_is_freed(nvme: int) -> None:
    w = world((A,), nvme=nvme)
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a", b"b", b"c"])
    w.finish_all()
    expired(w)
    assert w.lookup(11, [b"a", b"b", b"c"]) == 0
    assert w.put(0, 11, [b"a", b"b", b"c"], salt=1) == 3
    assert w.lookup(11, [b"a", b"b", b"c"]) == 3
    w.finish_all()
    w.pass_time(9)
    assert w.get(11, [b"a", b"b", b"c"]) == [payload(11, key, 1) for key in (b"a", b"b", b"c")]
    assert w.p.view.counters["expired_blocks"] == 3
    w.pass_time(3)
    assert w.p.residency.blocks.used == 0
    w.settle()


def test_only_expired_blocks_of_a_chain_are_stored_again() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a", b"b"])
    w.now = 5.0
    w.put(0, 11, [b"c"], b"b")
    expired(w)
    room = room_of(w, 0, 11, [b"a", b"b", b"c"])
    assert room.status.tolist() == [ac.GRANTED, ac.GRANTED, ac.PRESENT]
    w.commit(0, room, w.fill(11, [b"a", b"b", b"c"], room, salt=1))
    assert w.get(11, [b"a", b"b", b"c"]) == [payload(11, b"a", 1), payload(11, b"b", 1), payload(11, b"c")]
    w.settle()


def test_an_expired_block_gets_no_children() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a"])
    expired(w)
    answer = w.reserve(0, 11, [b"b"], b"a")
    assert isinstance(answer, ac.Deny)
    assert answer.why == "the parent is not stored"
    assert w.p.residency.blocks.used == 0


def test_a_reader_keeps_an_expired_block_while_it_is_stored_again() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a"])
    w.ask(ev.Pin(0, 11, joined([b"a"]), 100.0))
    grant = w.acquire(1, 11, [b"a"])
    assert isinstance(grant, ac.Grant)
    [place] = w.places(0, grant.where)
    expired(w)
    assert w.put(0, 11, [b"a"], salt=1) == 1
    assert w.bytes[place] == payload(11, b"a"), "a slot was written under its reader"
    assert w.get(11, [b"a"]) == [payload(11, b"a", 1)]
    assert w.used() == 2 * ALIGN
    w.send(ev.Release(1, grant.lease))
    assert w.used() == ALIGN
    w.settle()


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_block_that_expires_during_its_copy_does_not_replace_a_newer_one(way: str) -> None:
    w = world((A,), nvme=4)
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a"])
    if way == "up":
        w.finish_all()
        w.p.residency.give_up(0, np.array([w.p.residency.index.find_one(11, b"a")]))
        assert w.acquire(1, 11, [b"a"], wait=100.0) is None
    waiting = w.last_request
    [first] = w.copies
    expired(w)
    assert w.put(0, 11, [b"a"], salt=1) == 1
    if way == "up":
        grant = w.answers[waiting]
        assert isinstance(grant, ac.Grant)
        assert not len(grant.where)
    w.finish(first, [])
    assert w.get(11, [b"a"]) == [payload(11, b"a", 1)]
    w.finish_all()
    w.restart()
    assert w.get(11, [b"a"]) == [payload(11, b"a", 1)]
    w.settle()


def test_reserved_blocks_do_not_expire() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a"])
    expired(w)
    first = room_of(w, 0, 11, [b"a"])
    assert room_of(w, 1, 11, [b"a"]).status.tolist() == [ac.PENDING]
    assert w.commit(0, first, w.fill(11, [b"a"], first, salt=1)) == 1
    assert w.get(11, [b"a"]) == [payload(11, b"a", 1)]


def test_reused_rows_do_not_inherit_an_expiry() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a"])
    w.invalidate(11, [b"a"])
    w.put(0, A, [b"x"])
    w.pass_time(20)
    assert w.lookup(A, [b"x"]) == 1


def test_a_filled_hole_has_a_new_expiry_or_none() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a", b"b"])
    w.invalidate(11, [b"a"])
    w.ask(ev.OpenNamespace(0, 11, 100, A, A, 0.0))
    w.put(0, 11, [b"a"])
    w.pass_time(20)
    assert w.lookup(11, [b"a", b"b"]) == 1


def test_old_blocks_expire_on_time_after_the_ttl_is_removed() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=10.0)
    w.put(0, 11, [b"a"])
    w.ask(ev.OpenNamespace(0, 11, 100, A, A, 0.0))
    w.now = 11.0
    assert w.lookup(11, [b"a"]) == 0
    assert w.get(11, [b"a"]) == []


def test_the_next_expiry_is_known_while_rows_are_reused() -> None:
    w = world((A,))
    w.open(11, tenant=A, ttl_s=1.0)
    for i in range(400):
        w.put(0, 11, [b"k"], salt=i)
        w.invalidate(11, [b"k"])
        w.pass_time(0.02)
    assert w.p.leases.next_end <= w.now + 1.0


# -- forgetting


def test_a_forgotten_namespace_is_a_miss_at_once_and_answered_when_nothing_is_left() -> None:
    w = world((A,), (B,), nvme=4)
    for i in range(5):
        w.put(0, A, [b"a%d" % i])
    w.put(0, B, [b"b"])
    assert w.copies
    assert w.ask(ev.Forget(0, (A,))) is None
    request = w.last_request
    answer = w.acquire(1, A, [b"a0"])
    assert isinstance(answer, ac.Deny)
    w.pass_time(1)
    answer = w.answers[request]
    assert isinstance(answer, ac.Answer)
    assert answer.value == 5
    assert not [who for who in w.records if who[0] == A]
    assert w.used(0, A) == w.used(1, A) == 0
    assert w.get(B, [b"b"]) == [payload(B, b"b")]
    w.open(A, tenant=A)
    assert w.get(A, [b"a0"]) == []
    assert w.put(0, A, [b"a0"]) == 1


def test_waiters_and_writers_of_a_deleted_namespace_are_answered() -> None:
    w = world((A,), dram=1, nvme=4)
    keys = fill(w, A, 8)
    r = w.p.residency
    cold = next(k for k in keys if r.blocks.slot[0, r.index.find_one(A, k)] < 0)
    assert w.acquire(1, A, [cold], 5.0) is None
    waits = w.last_request
    copies = list(w.copies)
    w.send(ev.Forget(99, (A,)))
    assert waits in w.answers
    for copy in copies:
        if copy in w.copies:
            w.finish(copy, [])
    answer = w.answers[waits]
    assert not isinstance(answer, ac.Grant) or not len(answer.where)
    w.settle()


def test_a_writer_of_a_forgotten_namespace_stores_nothing() -> None:
    w = world((A,))
    room = w.reserve(0, A, [b"a", b"b"])
    assert isinstance(room, ac.Reserved)
    w.send(ev.Forget(99, (A,)))
    sums = np.zeros(2, np.uint64)
    assert w.commit(0, room, sums) == 0
    w.pass_time(1)
    assert w.used() == 0
    assert A not in w.p.residency.namespaces


def test_deleting_a_namespace_twice_is_harmless() -> None:
    w = world((A,), nvme=4)
    w.put(0, A, [b"a"])
    assert w.ask(ev.Forget(0, (A,))) is None
    first = w.last_request
    assert w.ask(ev.Forget(0, (A,))) is None
    second = w.last_request
    w.ask(ev.ForgetTenant(0, A))
    third = w.last_request
    w.pass_time(1)
    assert {first, second, third} <= set(w.answers)


def test_a_deletion_keeps_blocks_that_are_stored_after_it() -> None:
    w = world((A,), nvme=4)
    w.put(0, A, [b"a"])
    w.send(ev.Forget(0, (A,)))
    w.send(ev.Forget(0, (A,)))
    while A in w.p.residency.namespaces:
        w.finish_all()
        w.now = w.p.next_wakeup() or w.now
        w.send(ev.Tick())
    w.open(A, tenant=A)
    w.put(0, A, [b"new"])
    w.pass_time(1)
    assert w.lookup(A, [b"new"]) == 1


def test_large_namespaces_are_deleted_in_steps() -> None:
    w = world((A,), dram=40, slots=64, max_blocks=6000)
    w.open(11, tenant=A)
    keys = [b"k%05d" % i for i in range(2200)]
    checks, w.p.check = w.p.check, lambda: None  # type: ignore[method-assign]
    for at in range(0, len(keys), 100):
        assert w.put(0, 11, keys[at : at + 100], keys[at - 1] if at else b"") == 100
    w.send(ev.Forget(99, (11,)))
    most = len(drops(w.actions))
    while 11 in w.p.residency.namespaces:
        w.now = w.p.next_wakeup() or math.inf
        w.send(ev.Tick())
        most = max(most, len(drops(w.actions)))
    checks()
    assert most <= 512
    assert w.p.residency.blocks.used == 0


@pytest.mark.parametrize("nvme", [0, 6])
def test_a_tenant_is_forgotten_when_its_extents_are_renewed(nvme: int) -> None:
    w = world((A, 1, None), (B,), dram=8, nvme=2 * nvme)
    w.open(11, 5000, A)
    w.publish(11, SHARED)
    fill(w, A, 5)
    fill(w, 11, 3)
    theirs = fill(w, B, 2)
    lease = w.acquire(1, A, [b"f000"])
    room = w.reserve(1, A, [b"half"])
    assert lease
    assert room
    assert w.ask(ev.ForgetTenant(0, A)) is None
    request = w.last_request
    while w.copies or (w.p.next_wakeup() or math.inf) < w.now + 1:
        w.finish_all()
        w.now = max(w.now, w.p.next_wakeup() or w.now)
        w.send(ev.Tick())
        if w.renewals and not w.copies:
            assert request not in w.answers
            break
    w.pass_time(1)
    assert request in w.answers
    assert w.extents()[A] == 0
    assert {d for (_, _), d in w.whose.items()} == {B}
    assert kept(w, B, theirs) == theirs
    w.tenant(A, (1, None), *[(0, None)] * bool(nvme))
    w.open(A, tenant=A)
    assert w.put(0, A, [b"a"]) == 1
    w.settle()


def test_copies_of_other_tenants_do_not_delay_a_deletion() -> None:
    w = world((A,), (B,), (C,), dram=8)
    fill(w, A, 4)
    fill(w, B, 28)
    w.now += 1
    w.put(0, C, [b"c"])
    assert w.renewals
    kept_back = w.renewals.pop()
    w.ask(ev.ForgetTenant(0, A))
    request = w.last_request
    w.pass_time(1)
    assert request in w.answers
    w.renewals.append(kept_back)
    w.settle()


# -- pins


def test_pinned_bytes_are_counted_by_tenant() -> None:
    w = world((A,), (B,), dram=8)
    w.tenant(A, (0, None), pin_bytes=2 * ALIGN)
    w.open(11, 5000, A)
    w.put(0, A, [b"a", b"b", b"c"])
    w.put(0, 11, [b"x"])
    w.put(0, B, [b"a", b"b", b"c"])

    def pin(namespace: int, keys: list[bytes], until: float) -> int:
        answer = w.ask(ev.Pin(0, namespace, joined(keys), until))
        assert isinstance(answer, ac.Answer)
        return answer.value

    assert pin(A, [b"a"], 10.0) == 1
    assert pin(11, [b"x"], 10.0) == 0
    assert pin(A, [b"a", b"b", b"c"], 20.0) == 2
    assert pin(B, [b"a", b"b", b"c"], 20.0) == 3
    w.invalidate(A, [b"b"])
    assert pin(A, [b"a"], 10.0) == 1
    w.pass_time(15)
    assert len(w.p.residency.pins.ends) == 4
    w.pass_time(10)
    assert not w.p.residency.pins.ends
    assert pin(11, [b"x"], 100.0) == 1


def test_at_most_half_of_the_limit_is_pinned() -> None:
    w = world((A, 0, 2), dram=8)
    fill(w, A, 8)
    n = 0
    for i in range(8):
        answer = w.ask(ev.Pin(0, A, joined([b"f%03d" % i]), 1000.0))
        assert isinstance(answer, ac.Answer)
        n += answer.value
    assert n * ALIGN <= w.p.residency.tiers[0].extents.extent_bytes
    assert w.put(0, A, [b"new"]) == 1


def test_a_pin_set_again_ends_later() -> None:
    w = world((A,))
    w.put(0, A, [b"a"])
    w.ask(ev.Pin(0, A, joined([b"a"]), 5.0))
    w.ask(ev.Pin(0, A, joined([b"a"]), 50.0))
    w.ask(ev.Pin(0, A, joined([b"a"]), 20.0))
    w.pass_time(30)
    assert w.p.residency.pins.ends
    w.pass_time(30)
    assert not w.p.residency.pins.ends


# -- is it worth it


def slow_world() -> tuple[World, list[bytes]]:
    """A chain of 8 of which NVMe has all and memory the first two; loads take 1 ms a block."""
    w = world((A,), (B,), dram=2, nvme=8, slots=8)
    keys = [b"w%d" % i for i in range(8)]
    assert w.put(0, A, keys) == 8
    w.finish_all()
    r = w.p.residency
    rows = r.index.find(A, joined(keys))
    r.give_up(0, rows[2:])
    device = r.tiers[1].device
    device._bandwidth = device._best = ALIGN / 0.001
    device._measured_at = w.now
    return w, keys


def test_lookups_and_gets_stop_where_loading_is_slower_than_recomputing() -> None:
    w, keys = slow_world()
    for recompute_s, n in ((0.0, 8), (0.002, 8), (0.0009, 2)):
        answer = w.ask(ev.Lookup(0, A, joined(keys), A, math.inf, recompute_s))
        assert isinstance(answer, ac.Found)
        assert answer.value == n
    grant = w.ask(ev.Acquire(0, 1, A, joined(keys), w.now + 9, A, 0.0009))
    assert isinstance(grant, ac.Grant)
    assert len(grant.where) == 2


def found_by(w: World, keys: list[bytes], recompute_s: float, step: int = 1, have: int = 0) -> int:
    """How many keys a lookup counts; checks that it counts the others as stored."""
    ask = ev.Lookup(0, A, joined(keys), A, math.inf, recompute_s, step=step, have=have)
    answer = w.ask(ask)
    assert isinstance(answer, ac.Found)
    assert answer.stored.blocks == len(keys)
    return answer.value


def test_a_chain_is_loaded_up_to_the_end_that_saves_most_time() -> None:
    w, keys = slow_world()
    # Two blocks in memory, two under way, then four that load slower than they are computed.
    assert w.ask(ev.Acquire(0, 1, A, joined(keys[:4]), w.now + 9, A)) is None
    assert found_by(w, keys, 0.0009) == 4, "what comes anyway costs nothing"
    device = w.p.residency.tiers[1].device
    device.bytes_moving[DEMAND] += 5 * ALIGN
    assert found_by(w, keys, 0.002) == 4, "four blocks save 8 ms, but take more with what is queued"
    assert found_by(w, keys, 0.005) == 8
    device.bytes_moving[DEMAND] -= 5 * ALIGN


def test_each_key_of_a_sample_stands_for_a_step_of_blocks() -> None:
    w, keys = slow_world()
    unworthy = w.p.residency.counters
    for recompute_s, n in ((0.002, 8), (0.0009, 2)):
        before = unworthy["not_worth_loading_blocks"]
        assert found_by(w, keys, recompute_s, step=100) == n
        assert unworthy["not_worth_loading_blocks"] - before == 100 * (8 - n)
    device = w.p.residency.tiers[1].device
    device.bytes_moving[DEMAND] += 100 * ALIGN
    assert found_by(w, keys, 0.002) == 2, "100 ms of waiting are too long for 8 blocks"
    assert found_by(w, keys, 0.002, step=100) == 8, "but not for 800"
    device.bytes_moving[DEMAND] -= 100 * ALIGN


def test_blocks_that_the_caller_has_are_neither_loaded_nor_saved_time() -> None:
    w, keys = slow_world()
    device = w.p.residency.tiers[1].device
    device.bytes_moving[DEMAND] += 3 * ALIGN
    assert found_by(w, keys, 0.002) == 8, "six blocks save 12 ms and take 9"
    assert found_by(w, keys, 0.002, have=6) == 6, "two save 4 ms and take 5"
    assert found_by(w, keys, 0.002, have=8) == 8
    device.bytes_moving[DEMAND] -= 3 * ALIGN


def test_only_blocks_that_arrive_by_the_deadline_are_loaded() -> None:
    w, keys = slow_world()
    answer = w.ask(ev.Lookup(0, A, joined(keys), A, w.now + 0.0045, 0.0))
    assert isinstance(answer, ac.Found)
    assert answer.value in (5, 6)
    assert w.ask(ev.Acquire(0, 1, A, joined(keys), w.now + 0.0045, A)) is None
    waits = w.last_request
    assert sum(len(c.identity) for c in w.copies.values()) in (3, 4)
    w.finish_all()
    answer = w.answers[waits]
    assert isinstance(answer, ac.Grant)
    assert len(answer.where) in (5, 6)


def test_queued_reads_delay_the_estimate() -> None:
    w, keys = slow_world()
    device = w.p.residency.tiers[1].device
    device.bytes_moving[DEMAND] += 3 * ALIGN
    answer = w.ask(ev.Lookup(0, A, joined(keys), A, w.now + 0.0045, 0.0))
    device.bytes_moving[DEMAND] -= 3 * ALIGN
    assert isinstance(answer, ac.Found)
    assert answer.value in (2, 3)


def test_an_estimate_that_was_wrong_recovers() -> None:
    w, keys = slow_world()
    device = w.p.residency.tiers[1].device
    device._bandwidth = 1.0
    device._best = 1e9
    ask = ev.Lookup(0, A, joined(keys), A, math.inf, 0.001)
    answer = w.ask(ask)
    assert isinstance(answer, ac.Found)
    assert answer.value == 2
    w.now += 300
    answer = w.ask(ev.Lookup(0, A, joined(keys), A, math.inf, 0.001))
    assert isinstance(answer, ac.Found)
    assert answer.value == 8


def test_a_device_that_was_never_fast_is_tried_again_after_minutes() -> None:
    w, keys = slow_world()
    assert found_by(w, keys, 0.0004) == 2
    w.now += 30
    assert found_by(w, keys, 0.0004) == 2
    w.now += 60
    assert found_by(w, keys, 0.0004) == 8


# -- devices


def failing(w: World, keys: list[bytes], result: int) -> None:
    """Reads of these keys from NVMe end like that."""
    for key in keys:
        if w.acquire(1, A, [key], 5.0) is None:
            while w.copies:
                w.finish(next(iter(w.copies)), [result] * 64)


def cold_keys(w: World) -> list[bytes]:
    r = w.p.residency
    keys = [b"f%03d" % i for i in range(24)]
    return [k for k in keys if (row := r.index.find_one(A, k)) >= 0 and r.blocks.slot[0, row] < 0]


def test_reads_that_keep_failing_close_the_tier_for_reading() -> None:
    w = world((A,), dram=1, nvme=8)
    fill(w, A, 24)
    cold = cold_keys(w)
    failing(w, cold[:8], ev.FAILED)
    assert not w.p.residency.tiers[1].device.readable
    assert w.lookup(A, [cold[9]]) == 0
    grant = w.acquire(1, A, [cold[9]], 5.0)
    assert isinstance(grant, ac.Grant)
    assert not len(grant.where)
    w.pass_time(31)
    assert w.lookup(A, [cold[9]]) == 1
    failing(w, cold[9:10], ev.FAILED)
    assert w.lookup(A, [cold[10]]) == 0, "half open: one failure closes it again"
    w.pass_time(31)
    assert w.get(A, [cold[10]]) == [payload(A, cold[10])]
    failing(w, cold[11:12], ev.FAILED)
    assert w.lookup(A, [cold[12]]) == 1


def test_bytes_that_a_tenant_got_wrong_do_not_close_the_tier_for_others() -> None:
    w = world((A,), (B,), dram=1, nvme=8)
    fill(w, A, 24)
    cold = cold_keys(w)
    failing(w, cold[:12], ev.CORRUPT)
    assert w.p.residency.tiers[1].device.readable


def test_demand_loads_start_before_write_backs() -> None:
    d = DeviceQueue()
    for i in range(40):
        assert d.queue.put(1, WRITE_BACK, 4 << 20, i)
    started = list(d.next(0.0))
    assert sum(n for _, _, n in started) == 64 << 20
    assert d.queue.put(2, DEMAND, 4 << 20, 100)
    assert [n for n, _, _ in d.next(0.0)] == [100]
    for number, kind, nbytes in started[:10]:
        d.ended(0.001 * number, kind, nbytes, nbytes)
    assert not [k for _, k, _ in d.next(1.0) if k == WRITE_BACK], "writes hold back while somebody waits"


def test_a_fenced_device_starts_nothing() -> None:
    d = DeviceQueue()
    d.queue.put(1, DEMAND, 100, 1)
    [(_, kind, nbytes)] = d.next(0.0)
    d.queue.put(1, DEMAND, 100, 2)
    list(d.next(0.0))
    assert d.step(5.0)
    d.queue.put(1, DEMAND, 100, 3)
    assert not list(d.next(5.0))
    d.ended(6.0, kind, nbytes, nbytes)
    assert [n for n, _, _ in d.next(6.0)] == [3]


def test_bytes_that_were_not_copied_do_not_count_as_bandwidth() -> None:
    d = DeviceQueue()
    d.queue.put(1, DEMAND, 1 << 20, 1)
    list(d.next(0.0))
    d.ended(1.0, DEMAND, 1 << 20, 1 << 20)
    assert d.bandwidth(1.0) == 1 << 20
    d.queue.put(1, DEMAND, 1 << 20, 2)
    d.queue.put(1, DEMAND, 1 << 20, 3)
    list(d.next(1.0))
    d.ended(2.0, DEMAND, 1 << 20, 0)
    d.ended(2.0, DEMAND, 1 << 20, 1 << 20)
    assert d.bandwidth(2.0) == 1 << 20


def test_copies_of_dropped_blocks_are_not_started() -> None:
    w = world((A,), dram=8, nvme=8)
    w.p.residency.tiers[1].device.fenced = True
    w.p.residency.tiers[1].device.moving = 1
    w.p.residency.tiers[1].device.fenced = False
    w.p.residency.tiers[1].device.bytes_moving[WRITE_BACK] = 64 << 20
    w.put(0, A, [b"a"])
    assert not w.copies
    assert w.p.copies.under_way
    w.invalidate(A, [b"a"])
    w.p.residency.tiers[1].device.bytes_moving[WRITE_BACK] = 0
    w.send(ev.Tick())
    assert not w.copies
    assert not w.p.copies.under_way
    assert w.used() == w.used(1) == 0
    w.p.residency.tiers[1].device.moving -= 1


def test_a_queue_full_of_sealed_blocks_takes_no_more() -> None:
    """Below, a block may be a page larger than above; the queue counts the larger size."""
    n = 520
    w = world((A,), dram=2, nvme=2, slots=1)
    device = w.p.residency.tiers[1].device
    size = 1 << 20
    w = World(n, n, slots=size // ALIGN + 2, max_blocks=4 * n)
    w.tenant(A, (0, None), (0, None))
    w.open(A, size, A, extra_bytes=100)
    keys = [b"q%04d" % i for i in range(n)]
    checks, w.p.check = w.p.check, lambda: None  # type: ignore[method-assign]
    for at in range(0, n, 10):
        w.put(0, A, keys[at : at + 10])
        w.finish_all()
    r = w.p.residency
    rows = np.flatnonzero(r.blocks.slot[1] >= 0)[: r.blocks.used]
    rows = rows[(r.blocks.state[rows] == 2) & (r.blocks.slot[0, rows] >= 0)]
    r.give_up(0, rows)
    w.p.residency.tiers[1].device.bytes_moving[DEMAND] = 8 << 20
    w.p.residency.tiers[1].device.moving = 1
    for at in range(0, n, 10):
        w.acquire(at, A, keys[at : at + 10], 100.0)
    w.p.residency.tiers[1].device.bytes_moving[DEMAND] = 0
    w.p.residency.tiers[1].device.moving -= 1
    checks()
    assert device


# -- turns


def test_a_tenant_evicts_its_own_blocks_while_others_keep_the_device_busy() -> None:
    """Nothing of A can go down: its part of NVMe holds parents only. Its leaves in memory make way."""
    w = world((A, 0, 1, 0, 1), (B,), dram=4, nvme=4)
    chain = [b"c%d" % i for i in range(8)]
    assert w.put(0, A, chain[:4]) == 4
    w.finish_all()
    w.put(0, A, chain[4:], chain[3])
    w.finish_all()
    w.put(0, B, [b"b"])
    assert w.copies, "the device is busy"
    assert w.put(0, A, [b"x"]) == 1


def test_a_node_without_a_lower_tier_has_no_backlog() -> None:
    w = world((A, 0, 2, 0, 0), (B,), dram=4, nvme=4)
    w.put(0, B, [b"b"])
    assert w.copies
    for i in range(20):
        w.put(0, A, [b"a%02d" % i])
    assert not w.p.transfers.backlog.get(A)


def test_stalled_requests_of_tenants_take_turns() -> None:
    w = world((A,), (B,), dram=1, nvme=4, limits=Limits(leases_per_client=64))
    stalled = w.p.leases.stalled
    for i in range(20):
        stalled.add(A, ev.Reserve(100 + i, 0, A, joined([b"a%d" % i]), b"", 1e9))
    stalled.add(B, ev.Reserve(200, 0, B, joined([b"b"]), b"", 1e9))
    assert [stalled.oldest(tenant) for tenant in stalled.tenants()] == [100, 200]
    assert [stalled.oldest(tenant) for tenant in stalled.tenants()] == [200, 100]
    stalled.add(A, stalled.pop(100))
    assert stalled.oldest(A) == 101
    assert stalled.count(A) == 20
    for n in [*range(100, 120), 200]:
        stalled.pop(n)


def test_too_many_waiting_requests_of_a_tenant_are_denied_with_a_delay() -> None:
    w = world((A,), (B,), dram=1, nvme=4, limits=Limits(leases_per_client=64, waiting_per_tenant=2))
    assert w.put(0, A, [b"a", b"b", b"c", b"d"]) == 4
    assert w.copies
    leases = [w.acquire(1, A, [k]) for k in (b"a", b"b", b"c", b"d")]
    assert leases
    for i in range(2):
        assert w.reserve(i, A, [b"x%d" % i], wait=5.0) is None
    answer = w.reserve(3, A, [b"y"], wait=5.0)
    assert isinstance(answer, ac.Deny)
    assert answer.retry_s > 0
    w.settle()


def test_deadlines_of_retried_requests_are_stored_once() -> None:
    w = world((A,), dram=1, nvme=4, limits=Limits(leases_per_client=64))
    assert w.put(0, A, [b"a", b"b", b"c", b"d"]) == 4
    assert [w.acquire(1, A, [k]) for k in (b"a", b"b", b"c", b"d")]
    assert w.reserve(0, A, [b"x"], wait=500.0) is None
    for _ in range(200):
        w.send(ev.Abort(5, 999))
    assert len(w.p.leases.deadlines) < 10
    w.settle()


# -- starts


def test_blocks_in_another_tenants_extent_are_not_restored() -> None:
    w = world((A,), (B,))
    w.put(0, A, [b"a"])
    w.put(0, B, [b"b"])
    place, header = next((p, h) for p, h in w.headers.items() if h.namespace == B)
    header.namespace, header.key = A, b"forged"
    w.restart(handover=True)
    assert w.lookup(A, [b"forged"]) == 0
    assert w.lookup(A, [b"a"]) == 1
    assert place


def test_a_limit_lowered_while_the_daemon_was_stopped_holds_after_a_start() -> None:
    w = world((A, 0, 4), dram=4)
    fill(w, A, 16)
    w.tenants[A] = ev.SetTenant(A, (Quota(0, w.p.residency.tiers[0].extents.extent_bytes),))
    w.restart(handover=True)
    w.pass_time(5)
    assert w.used(0, A) <= 4 * ALIGN
    assert w.extents()[A] == 1
