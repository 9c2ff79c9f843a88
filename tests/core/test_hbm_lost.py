"""A pool of GPU memory that is lost: what is served from below, what is a miss, who is told what."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.types import ALIGN
from tests.core.test_hbm import answer, chain, held, put_in_nvme_alone, routes, values, world
from tests.core.world import World, joined, payload


def commit_what_was_written(w: World, room: ac.Reserved, n: int) -> int:
    return w.commit(0, room, np.arange(n, dtype=np.uint64))


# -- blocks


def test_blocks_only_in_a_lost_pool_are_misses() -> None:
    w = world(write_policy="on_evict")
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.lose(gpu)
    assert w.lookup(1, keys) == w.lookup(1, keys, at=gpu) == 0
    assert w.get(1, keys, at=gpu) == []
    assert w.p.residency.blocks.used == 0
    w.pass_time(1)
    assert w.left == [gpu]
    decided = w.p.residency.decisions.of(joined(keys).words[0], joined(keys).size)[1]
    assert [(d.what, d.tier) for d in decided] == [(DecisionKind.LOST, gpu)]
    w.settle()


def test_blocks_of_a_lost_pool_are_served_from_other_tiers() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.finish_all()
    w.put(0, 1, chain("b", 2))
    w.finish_all()
    w.get(1, chain("b", 2), at=gpu)
    w.lose(gpu)
    assert [held(w, key) for key in keys] == [[1]] * 4
    assert [held(w, key) for key in chain("b", 2)] == [[0, 1]] * 2
    assert w.lookup(1, keys, at=gpu) == 4
    assert w.get(1, keys, at=gpu) == values(keys)
    grant = w.acquire(0, 1, chain("b", 2), at=gpu)
    assert isinstance(grant, ac.Grant)
    assert w.tier_of(grant) == 0
    assert w.put(0, 1, chain("c", 2), at=gpu) == 2
    assert held(w, b"c0") == [0]
    w.settle()


def test_a_lost_block_with_children_elsewhere_is_a_hole_that_a_put_fills() -> None:
    w = world(write_policy="on_evict")
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys[:2], at=gpu)
    w.put(0, 1, keys[2:], keys[1])
    w.lose(gpu)
    assert w.p.residency.gaps.holes[1] == 2
    assert w.lookup(1, keys) == 0
    assert w.put(0, 1, keys[:2]) == 2
    assert w.p.residency.gaps.holes[1] == 0
    assert w.get(1, keys) == values(keys)
    w.settle()


def test_a_lost_pool_is_unreadable_at_once_and_forgotten_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.reconfiguration.hotplug._LOST_AT_ONCE", 1)
    w = world(write_policy="on_evict", dram=1)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.put(0, 1, chain("b"))
    w.lose(gpu)
    assert [gpu in held(w, key) for key in keys] == [False, True, True, True]
    assert w.lookup(1, keys) == 0
    assert w.get(1, keys) == []
    assert w.left == []
    assert w.pass_time(1) > 3
    assert w.p.residency.blocks.used == 4
    assert w.left == [gpu]
    assert w.get(1, chain("b")) == values(chain("b"))
    w.settle()


def test_a_copy_that_is_lost_is_none_when_room_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.reconfiguration.hotplug._LOST_AT_ONCE", 1)
    w = world(write_policy="on_evict", dram=1)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, [b"x"])
    w.invalidate(1, [b"x"])
    w.put(0, 1, keys)
    w.get(1, keys, at=gpu)
    assert [held(w, key) for key in keys] == [[0, gpu]] * 4
    w.lose(gpu)
    assert gpu in held(w, keys[3])
    assert w.put(0, 1, chain("b")) == 0
    assert routes(w) == [(0, 1)], "not given up as if the pool had it"
    w.pass_time(1)
    assert w.get(1, keys) == values(keys)
    w.settle()


def test_nothing_is_written_down_from_a_lost_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.reconfiguration.hotplug._LOST_AT_ONCE", 1)
    w = world(write_policy="on_evict")
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.lose(gpu)
    assert gpu in held(w, keys[3])
    w.send(ev.Flush())
    assert not w.copies
    w.pass_time(1)
    assert w.p.residency.blocks.used == 0
    w.settle()


@pytest.mark.parametrize("again", [False, True])
def test_a_lost_pool_loses_its_extents_despite_floors_and_pins(again: bool) -> None:
    w = World(4, 8, hbm=3)
    w.open(1, tenant=1)
    gpu, keys = w.pools[0], chain("a")
    w.tenant(1, (0, None), (0, None), (2, None))
    w.put(0, 1, keys, at=gpu)
    w.finish_all()
    w.ask(ev.Pin(0, 1, joined(keys), w.now + 100))
    w.lose(gpu)
    if again:
        w.send(w.tenants[1])
    w.pass_time(1)
    assert w.left == [gpu]
    assert w.extents(gpu)[1] == 0
    assert w.get(1, keys) == values(keys)
    w.settle()


def test_after_a_loss_the_node_is_as_one_without_the_pool() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    w.lose(gpu)
    w.pass_time(60)
    assert not w.p.residency.topology.out_of_reach
    found = w.ask(ev.Lookup(0, 1, joined(keys)))
    assert isinstance(found, ac.Found)
    assert (found.value, found.gaps) == (4, False)
    assert w.p.next_wakeup() is None
    w.lose(gpu)
    assert w.left == [gpu], "it can't be lost twice"
    w.settle()


def test_a_pool_that_was_draining_may_be_lost_too() -> None:
    w = world(write_policy="on_evict")
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    grant = w.acquire(0, 1, keys, at=gpu)
    assert isinstance(grant, ac.Grant)
    w.leave(gpu)
    w.lose(gpu)
    assert w.lookup(1, keys) == 0
    w.send(ev.Release(0, grant.lease))
    w.pass_time(20)
    assert w.left == [gpu]
    w.settle()


def test_of_two_pools_one_may_be_lost() -> None:
    w = world(hbm=(2, 2), nvme=0)
    one, two = w.pools
    w.put(0, 1, chain("a"), at=one)
    w.put(0, 1, chain("b"), at=two)
    w.lose(one)
    assert w.lookup(1, chain("a")) == 0
    grant = w.acquire(0, 1, chain("b"), at=two)
    assert isinstance(grant, ac.Grant)
    assert w.tier_of(grant) == two
    assert w.read(1, chain("b"), grant) == values(chain("b"))
    w.settle()


# -- who waits


def test_waiters_at_a_lost_pool_are_served_from_dram() -> None:
    w = world()
    gpu = w.pools[0]
    below = put_in_nvme_alone(w, "a")
    assert w.acquire(0, 1, below, wait=100.0, at=gpu) is None
    first = w.last_request
    w.put(0, 1, chain("d", 2))
    assert w.acquire(1, 1, chain("d", 2), wait=100.0, at=gpu) is None
    second = w.last_request
    w.lose(gpu)
    assert w.tier_of(answer(w, second)) == 0
    assert w.read(1, chain("d", 2), answer(w, second)) == values(chain("d", 2))
    assert first not in w.answers
    w.finish_all()
    assert w.read(1, below, answer(w, first)) == values(below)
    assert w.used(gpu) == 0
    assert w.p.view.counters["hit_blocks_nvme"] == 4
    w.settle()


def test_waiters_for_blocks_only_in_a_lost_pool_are_answered_at_once() -> None:
    w = world(write_policy="on_evict", hbm=(2, 2))
    one, two = w.pools
    keys = chain("a", 3)
    w.put(0, 1, keys[:1])
    w.put(0, 1, keys[1:], keys[0], at=one)
    requests = []
    for at in (0, two):
        assert w.acquire(0, 1, keys, wait=100.0, at=at) is None
        requests.append(w.last_request)
    w.lose(one)
    w.finish_all()
    for request in requests:
        assert w.read(1, keys, answer(w, request)) == values(keys[:1])
    # Their rows are others' now, and nobody waits for those.
    assert w.put(0, 1, chain("b", 2)) == 2
    w.settle()


def test_waiters_for_a_copy_from_a_lost_pool_get_another_copy() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.finish_all()
    assert w.acquire(0, 1, keys, wait=100.0) is None
    request = w.last_request
    assert routes(w) == [(gpu, 0)]
    w.lose(gpu)
    assert routes(w) == [(1, 0), (gpu, 0)]
    w.finish_all()
    assert w.read(1, keys, answer(w, request)) == values(keys)
    w.settle()


def test_waiters_at_a_lost_pool_are_answered_at_their_deadline() -> None:
    w = world()
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    assert w.acquire(0, 1, keys, wait=0.05, at=gpu) is None
    request = w.last_request
    w.lose(gpu)
    w.now += 0.1
    w.send(ev.Tick())
    assert not answer(w, request).lease
    w.settle()


# -- copies, leases, reservations


def test_blocks_that_arrive_just_before_a_loss_are_not_readable() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    assert w.acquire(0, 1, keys, wait=0.0, at=gpu) is not None
    [transfer] = w.copies
    done = w.move(transfer, [])
    assert done.tolist() == [ev.OK] * 4
    w.lose(gpu)
    w.send(ev.CopyDone(transfer, done))
    assert [held(w, key) for key in keys] == [[0, 1]] * 4
    assert w.used(gpu) == 0
    w.settle()


def test_a_write_from_a_lost_pool_leaves_no_record_of_lost_blocks() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    [transfer] = w.copies
    done = w.move(transfer, [])
    w.lose(gpu)
    assert not w.records
    w.send(ev.CopyDone(transfer, done))
    assert w.used(1) == 0
    assert w.lookup(1, keys) == 0
    w.settle()


def test_writes_queued_from_a_lost_pool_use_dram_copies() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    assert routes(w) == [(gpu, 1)]
    w.acquire(0, 1, keys, wait=0.0)
    w.finish(next(n for n, copy in w.copies.items() if copy.target == 0), [])
    w.lose(gpu)
    w.finish_all()
    assert [held(w, key) for key in keys] == [[0, 1]] * 4
    assert len(w.records) == 4
    w.settle()


def test_copies_that_wait_their_turn_are_never_begun() -> None:
    w = world()
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    for state in w.p.residency.tiers[1:]:
        state.device.bytes_moving[0], state.device.moving = 1 << 40, 1
    w.put(0, 1, chain("b"))
    w.send(ev.Prefetch(0, 1, joined(keys), tier=gpu))
    w.send(ev.Prefetch(0, 1, joined(chain("b")), tier=gpu))
    assert {(t.source, t.target) for t in w.p.copies.under_way.values()} >= {(1, gpu), (0, gpu)}
    w.lose(gpu)
    for state in w.p.residency.tiers[1:]:
        state.device.bytes_moving[0], state.device.moving = 0, 0
    w.send(ev.Tick())
    assert gpu not in {copy.target for copy in w.copies.values()}
    w.finish_all()
    w.settle()


def test_copies_that_fail_with_a_pool_close_no_other_device() -> None:
    w = world(nvme=40, dram=1, hbm=20, slots=1)
    gpu = w.pools[0]
    for i in range(13):
        assert w.put(0, 1, [b"a%02d" % i]) == 1
        w.finish_all()
    for i in range(12):
        w.send(ev.Prefetch(0, 1, joined([b"a%02d" % i]), tier=gpu))
    assert routes(w) == [(1, gpu)] * 12
    w.lose(gpu)
    w.finish_all()
    device = w.p.residency.tiers[1].device
    assert device.readable
    assert not device.reads.failures
    assert w.get(1, [b"a00"]) == values([b"a00"])
    w.settle()


def test_blocks_reserved_in_a_lost_pool_are_not_stored() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    room = w.reserve(0, 1, keys, at=gpu)
    assert isinstance(room, ac.Reserved)
    w.lose(gpu)
    w.pass_time(1)
    assert w.left == [], "somebody still writes there"
    assert w.reserve(1, 1, keys).status.tolist() == [ac.PENDING] * 4  # type: ignore[union-attr]
    assert commit_what_was_written(w, room, 4) == 0
    assert w.p.residency.blocks.used == 0
    w.pass_time(20)
    assert w.left == [gpu]
    assert w.put(0, 1, keys, at=gpu) == 4
    assert w.get(1, keys) == values(keys)
    w.settle()


def test_a_lease_on_a_lost_pool_keeps_its_slots_until_it_ends() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.finish_all()
    grant = w.acquire(0, 1, keys, at=gpu)
    assert isinstance(grant, ac.Grant)
    w.lose(gpu)
    w.pass_time(30)
    assert w.used(gpu) == 4 * ALIGN
    assert w.left == []
    assert w.read(1, keys, grant) == [None] * 4, "a reader that verifies notices"
    assert w.ask(ev.Suspect(0, 1, joined(keys), gpu)) is not None, "there is nothing left to look at"
    assert w.get(1, keys, at=gpu) == values(keys)
    w.send(ev.Release(0, grant.lease))
    w.pass_time(30)
    assert w.used(gpu) == 0
    assert w.left == [gpu]
    w.settle()


def test_a_look_at_a_pool_that_is_lost_meanwhile_is_answered() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.finish_all()
    assert w.ask(ev.Suspect(0, 1, joined(keys), gpu)) is None
    begun = w.last_request
    device = w.p.residency.tiers[gpu].device
    device.bytes_moving[3] = 1 << 40
    assert w.ask(ev.Suspect(0, 1, joined(keys), gpu)) is None
    queued = w.last_request
    assert len(w.probes) == 1
    w.lose(gpu)
    w.probe(next(iter(w.probes)))
    device.bytes_moving[3] = 0
    w.send(ev.Tick())
    for request in (begun, queued):
        told = w.answers[request]
        assert isinstance(told, ac.Answer)
        assert told.value == 0
    assert [held(w, key) for key in keys] == [[1]] * 4
    w.settle()


def test_extents_that_are_made_anew_or_come_when_a_pool_is_lost() -> None:
    w = world(hbm=2, nvme=8)
    gpu = w.pools[0]
    w.put(0, 1, chain("a"), at=gpu)
    w.finish_all()
    w.resize(gpu, 4)
    assert [want.tier for want in w.wanted] == [gpu]
    w.lose(gpu)
    w.pass_time(5)
    assert w.left == [gpu]
    assert w.get(1, chain("a"), at=gpu) == [payload(1, key) for key in chain("a")]
    w.settle()


def test_a_restart_after_a_loss_is_one_without_the_pool() -> None:
    w = world(hbm=(1, 2))
    w.put(0, 1, chain("a"), at=w.pools[0])
    w.put(0, 1, chain("b"), at=w.pools[1])
    w.finish_all()
    w.lose(w.pools[0])
    w.restart()
    assert len(w.pools) == 1
    assert w.get(1, chain("a"), at=w.pools[0]) == values(chain("a"))
    w.settle()
