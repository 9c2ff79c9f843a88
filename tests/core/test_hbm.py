"""Pools of GPU memory: what is served from them, what comes and goes, whose it is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.policy import POLICIES
from kvstore.core.policy.admission import Rule
from kvstore.core.queues.device_queue import DEMAND, FENCED
from kvstore.types import ALIGN, Tier
from tests.core.world import World, joined, payload


def world(dram: int = 2, nvme: int = 8, hbm: int | tuple[int, ...] = 2, **more: object) -> World:
    w = World(dram, nvme, hbm=hbm, **more)  # type: ignore[arg-type]
    w.open(1)
    return w


def chain(name: str, n: int = 4) -> list[bytes]:
    return [b"%s%d" % (name.encode(), i) for i in range(n)]


def held(w: World, key: bytes, namespace: int = 1) -> list[int]:
    """Which tiers hold a block."""
    row = w.p.residency.index.find_one(namespace, key)
    return [t for t in range(len(w.p.residency.tiers)) if row >= 0 and w.p.residency.blocks.slot[t, row] >= 0]


def values(keys: list[bytes], namespace: int = 1) -> list[bytes]:
    return [payload(namespace, key) for key in keys]


def routes(w: World) -> list[tuple[int, int]]:
    """From where to where copies are under way."""
    return sorted((copy.source, copy.target) for copy in w.copies.values())


def answer(w: World, request: int) -> ac.Grant:
    grant = w.answers[request]
    assert isinstance(grant, ac.Grant), grant
    return grant


def put_in_nvme_alone(w: World, name: str) -> list[bytes]:
    """Stores a chain, and others after it until DRAM has none of it."""
    keys = chain(name)
    assert w.put(0, 1, keys) == 4
    w.finish_all()
    n = 0
    while any(0 in held(w, key) for key in keys):
        w.put(0, 1, chain(f"{name}-{n}-"))
        w.finish_all()
        n += 1
    assert [held(w, key) for key in keys] == [[1]] * 4
    return keys


# -- where it comes from


def test_a_block_of_dram_is_promoted_into_a_pool() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    assert w.acquire(0, 1, keys, at=gpu) is None
    assert routes(w) == [(0, gpu)]
    first = w.last_request
    w.finish_all()
    grant = answer(w, first)
    assert w.tier_of(grant) == gpu
    assert grant.slots["tier"].tolist() == [Tier.DRAM] * 4, "that is where they were found"
    assert w.read(1, keys, grant) == values(keys)
    again = w.acquire(0, 1, keys, at=gpu)
    assert isinstance(again, ac.Grant)
    assert w.tier_of(again) == gpu
    assert again.slots["tier"].tolist() == [Tier.HBM] * 4
    assert not w.copies
    assert w.p.view.counters["hit_blocks_hbm0"] == w.p.view.counters["hit_blocks_dram"] == 4
    assert w.p.view.counters["promoted_blocks"] == 4
    assert (grant.sources.tolist(), again.sources.tolist()) == ([0] * 4, [gpu] * 4)
    w.settle()


def test_a_block_of_nvme_is_loaded_directly_into_a_pool() -> None:
    w = world()
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    used = w.used(0)
    assert w.acquire(0, 1, keys, at=gpu) is None
    assert routes(w) == [(1, gpu)]
    request = w.last_request
    assert w.used(0) == used
    w.finish_all()
    assert w.used(0) == used, "no slot of DRAM was taken"
    assert w.read(1, keys, answer(w, request)) == values(keys)
    assert answer(w, request).slots["tier"].tolist() == [Tier.NVME] * 4
    assert [held(w, key) for key in keys] == [[1, gpu]] * 4
    w.settle()


def test_a_block_of_one_pool_is_copied_into_another() -> None:
    w = world(hbm=(2, 2), nvme=0)
    one, two = w.pools
    keys = chain("a")
    assert w.put(0, 1, keys, at=one) == 4
    assert w.acquire(0, 1, keys, at=two) is None
    assert routes(w) == [(one, two)]
    request = w.last_request
    w.finish_all()
    assert w.tier_of(answer(w, request)) == two
    assert w.read(1, keys, answer(w, request)) == values(keys)
    assert [held(w, key) for key in keys] == [[one, two]] * 4
    assert w.p.view.counters["hit_blocks_hbm0"] == 4
    w.settle()


def test_where_a_block_was_found_is_from_where_it_was_copied() -> None:
    w = world(hbm=(2, 2))
    one, two = w.pools
    keys = chain("a")
    w.put(0, 1, keys, at=one)
    w.finish_all()
    assert [held(w, key) for key in keys] == [[1, one]] * 4
    assert w.acquire(0, 1, keys, at=two) is None
    assert routes(w) == [(one, two)]
    request = w.last_request
    w.finish_all()
    assert answer(w, request).slots["tier"].tolist() == [Tier.HBM] * 4
    assert w.p.view.counters["hit_blocks_hbm0"] == 4
    w.settle()


def test_a_chain_may_come_from_everywhere_at_once() -> None:
    w = world(nvme=8, hbm=(2, 2), dram=2, write_policy="on_evict")
    one, two = w.pools
    assert w.put(0, 1, [b"a0"], at=one) == 1
    assert w.put(0, 1, [b"a1"], b"a0", at=two) == 1
    assert w.put(0, 1, [b"a2"], b"a1") == 1
    w.send(ev.Flush())
    keys = chain("a", 3)
    assert w.acquire(0, 1, keys, at=two) is None
    request = w.last_request
    w.finish_all()
    assert answer(w, request).slots["tier"].tolist() == [Tier.HBM, Tier.HBM, Tier.DRAM]
    assert w.read(1, keys, answer(w, request)) == values(keys)
    w.settle()


def test_a_block_of_a_pool_is_copied_to_dram_on_request() -> None:
    w = world(nvme=0)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    assert w.acquire(0, 1, keys) is None
    assert routes(w) == [(gpu, 0)]
    request = w.last_request
    w.finish_all()
    assert w.tier_of(answer(w, request)) == 0
    assert w.read(1, keys, answer(w, request)) == values(keys)
    assert [held(w, key) for key in keys] == [[0, gpu]] * 4
    w.settle()


# -- several who want the same


def test_waiters_for_dram_and_for_a_pool_get_separate_copies() -> None:
    w = world()
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    assert w.acquire(0, 1, keys) is None
    at_dram = w.last_request
    assert w.acquire(1, 1, keys, at=gpu) is None
    at_gpu = w.last_request
    assert routes(w) == [(1, 0), (1, gpu)]
    w.finish(next(n for n, copy in w.copies.items() if copy.target == gpu), [])
    assert at_dram not in w.answers, "a copy in a pool is none in DRAM"
    assert w.tier_of(answer(w, at_gpu)) == gpu
    w.finish_all()
    assert w.tier_of(answer(w, at_dram)) == 0
    for request in (at_dram, at_gpu):
        assert w.read(1, keys, answer(w, request)) == values(keys)
    assert [held(w, key) for key in keys] == [[0, 1, gpu]] * 4
    w.settle()


def test_the_copy_into_dram_may_end_first_too() -> None:
    w = world()
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    assert w.acquire(1, 1, keys, at=gpu) is None
    at_gpu = w.last_request
    assert w.acquire(0, 1, keys) is None
    at_dram = w.last_request
    w.finish(next(n for n, copy in w.copies.items() if copy.target == 0), [])
    assert at_gpu not in w.answers
    assert w.tier_of(answer(w, at_dram)) == 0
    w.finish_all()
    assert w.tier_of(answer(w, at_gpu)) == gpu
    assert w.read(1, keys, answer(w, at_gpu)) == values(keys)
    w.settle()


def test_a_failed_copy_to_one_tier_affects_no_waiter_of_another() -> None:
    w = world()
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    assert w.acquire(1, 1, keys, at=gpu) is None
    at_gpu = w.last_request
    assert w.acquire(0, 1, keys) is None
    at_dram = w.last_request
    w.finish(next(n for n, copy in w.copies.items() if copy.target == gpu), [ev.FAILED] * 4)
    assert not answer(w, at_gpu).lease
    assert at_dram not in w.answers
    w.finish_all()
    assert w.read(1, keys, answer(w, at_dram)) == values(keys)
    w.settle()


def test_three_requests_for_one_pool_share_a_copy() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    requests = []
    for client in range(3):
        assert w.acquire(client, 1, keys, at=gpu) is None
        requests.append(w.last_request)
    assert routes(w) == [(0, gpu)]
    w.finish_all()
    for request in requests:
        assert w.read(1, keys, answer(w, request)) == values(keys)
    assert w.p.view.counters["promoted_blocks"] == 4
    assert w.used(gpu) == 4 * ALIGN
    w.settle()


def test_two_requests_for_dram_share_a_copy_from_a_pool() -> None:
    w = world(nvme=0)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    requests = []
    for client in range(2):
        assert w.acquire(client, 1, keys) is None
        requests.append(w.last_request)
    assert routes(w) == [(gpu, 0)]
    w.finish_all()
    for request in requests:
        assert w.read(1, keys, answer(w, request)) == values(keys)
    assert w.used(0) == 4 * ALIGN
    w.settle()


def test_a_bad_copy_of_a_pool_is_found_on_its_way_to_another_tier() -> None:
    w = world(nvme=0, hbm=(2, 2))
    one, two = w.pools
    keys = chain("a", 2)
    w.put(0, 1, keys, at=one)
    w.get(1, keys, at=two)
    row = w.p.residency.index.find_one(1, keys[1])
    slots = w.p.residency.blocks.slot[one, [row]].astype(np.int64)
    w.rot(w.places(one, w.p.residency.where(one, slots))[0])
    assert w.get(1, keys) == values(keys[:1])
    assert held(w, keys[1]) == [two], "the other copy is good"
    assert w.get(1, keys) == values(keys)
    w.settle()


def test_a_write_down_from_dram_frees_nothing_in_a_pool() -> None:
    w = world(hbm=1, dram=4)
    gpu, keys = w.pools[0], chain("a", 4)
    w.p.residency.tiers[1].device.state = FENCED
    w.put(0, 1, keys)
    assert w.get(1, keys, at=gpu) == values(keys)
    w.send(ev.SetDevice(1, "serving"))
    w.send(ev.Flush())
    assert routes(w) == [(0, 1)]
    assert isinstance(w.acquire(0, 1, keys, at=gpu), ac.Grant)
    room = w.reserve(0, 1, chain("b", 2), at=gpu)
    assert isinstance(room, ac.Reserved)
    assert w.tier_of(room) == 0, "all of the pool is in use"
    w.finish_all()
    assert [held(w, key) for key in keys] == [[0, 1, gpu]] * 4, "DRAM needed no room"
    w.settle()


def test_prefetch_brings_blocks_into_a_pool_once() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a", 2)
    w.put(0, 1, keys)
    w.finish_all()
    for _ in range(2):
        got = w.ask(ev.Prefetch(0, 1, joined(keys), tier=gpu))
        assert isinstance(got, ac.Answer)
        assert got.value == 2
    assert routes(w) == [(0, gpu)]
    w.finish_all()
    assert w.tier_of(w.acquire(0, 1, keys, at=gpu)) == gpu  # type: ignore[arg-type]
    w.settle()


# -- writes


def test_a_block_committed_in_a_pool_is_written_directly_to_nvme() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    room = w.reserve(0, 1, keys, at=gpu)
    assert isinstance(room, ac.Reserved)
    assert w.tier_of(room) == gpu
    assert w.commit(0, room, w.fill(1, keys, room)) == 4
    assert routes(w) == [(gpu, 1)]
    assert w.used(0) == 0
    w.finish_all()
    assert [held(w, key) for key in keys] == [[1, gpu]] * 4
    grant = w.acquire(0, 1, keys, at=gpu)
    assert isinstance(grant, ac.Grant)
    assert w.read(1, keys, grant) == values(keys)
    assert w.used(0) == 0
    w.settle()


def test_a_restart_finds_the_recorded_blocks() -> None:
    w = world(write_policy="write_through")
    gpu = w.pools[0]
    w.put(0, 1, chain("a"), at=gpu)
    w.finish_all()
    w.put(0, 1, chain("b"), at=gpu)
    w.restart(handover=True)
    assert [held(w, key) for key in chain("a")] == [[1]] * 4
    assert w.lookup(1, chain("b")) == 0
    assert w.used(gpu) == 0
    assert w.get(1, chain("a"), at=gpu) == values(chain("a"))
    w.settle()


def test_an_aborted_reservation_frees_its_slots_in_the_pool() -> None:
    w = world()
    gpu = w.pools[0]
    for how in ("abort", "lost"):
        room = w.reserve(3, 1, chain("a"), at=gpu)
        assert isinstance(room, ac.Reserved)
        assert (w.used(gpu), w.used(0)) == (4 * ALIGN, 0)
        w.send(ev.Abort(3, room.lease) if how == "abort" else ev.ClientLost(3))
        assert w.used(gpu) == 0
    w.settle()


def test_on_a_node_without_nvme_a_pool_evicts_into_dram() -> None:
    w = world(nvme=0, hbm=1, dram=4)
    gpu = w.pools[0]
    first, second = chain("a"), chain("b")
    assert w.put(0, 1, first, at=gpu) == 4
    assert w.reserve(0, 1, second, wait=1.0, at=gpu) is not None, "DRAM has room"
    assert routes(w) == [(gpu, 0)], "what made no room in time is on its way all the same"
    w.finish_all()
    assert [held(w, key) for key in first] == [[0]] * 4
    assert w.get(1, first) == values(first)
    assert w.p.view.counters["dropped_blocks"] == 0
    w.send(ev.ClientLost(0))
    assert w.put(0, 1, second, at=gpu) == 4
    assert w.get(1, second, at=gpu) == values(second)
    w.settle()


def test_with_nvme_a_pool_evicts_past_dram() -> None:
    w = world(hbm=1, dram=4, write_policy="on_evict")
    gpu = w.pools[0]
    assert w.put(0, 1, chain("a"), at=gpu) == 4
    w.put(0, 1, chain("b"), at=gpu)
    assert (gpu, 1) in routes(w)
    w.finish_all()
    assert [held(w, key) for key in chain("a")] == [[1]] * 4
    w.settle()


def test_a_stop_writes_blocks_that_only_a_pool_holds() -> None:
    w = world(write_policy="on_evict", hbm=(2, 2))
    one, two = w.pools
    keys = chain("a", 6)
    assert w.put(0, 1, keys[:2], at=one) == 2
    assert w.put(0, 1, keys[2:4], keys[1], at=two) == 2
    assert w.put(0, 1, keys[4:], keys[3]) == 2
    assert not w.copies
    w.send(ev.Flush())
    while w.copies:
        w.finish_all()
        w.send(ev.Tick())
    w.restart()
    assert [held(w, key) for key in keys] == [[1]] * 6
    assert w.get(1, keys) == values(keys)
    w.settle()


def test_write_through_of_a_chain_in_several_tiers_of_memory_writes_each_block_once() -> None:
    w = world(hbm=(2, 2))
    one, two = w.pools
    keys = chain("a", 6)
    device = w.p.residency.tiers[1].device
    device.state = FENCED
    w.put(0, 1, keys[:2], at=one)
    w.put(0, 1, keys[2:4], keys[1], at=two)
    w.put(0, 1, keys[4:], keys[3])
    w.send(ev.SetDevice(1, "serving"))
    w.send(ev.Flush())
    assert routes(w) == [(0, 1), (one, 1), (two, 1)]
    w.finish_all()
    assert w.p.view.counters["written_blocks"] == 6
    assert len(w.records) == 6
    w.settle()


# -- where it can't be served from


def test_a_chain_larger_than_a_pool_is_served_from_dram() -> None:
    w = world(hbm=1)
    gpu, keys = w.pools[0], chain("b", 2)
    w.put(0, 1, chain("a", 3), at=gpu)
    w.finish_all()
    lease = w.acquire(0, 1, chain("a", 3), at=gpu)
    assert isinstance(lease, ac.Grant)
    w.put(0, 1, keys)
    w.finish_all()
    grant = w.acquire(1, 1, keys, at=gpu)
    assert isinstance(grant, ac.Grant), "what DRAM has need not be waited for"
    assert w.tier_of(grant) == 0
    assert w.read(1, keys, grant) == values(keys)
    assert w.p.view.counters["hbm_full_requests"] == 1
    assert not w.copies, "no half of it fills the pool"
    w.send(ev.Release(0, lease.lease))
    assert w.get(1, keys, at=gpu) == values(keys)
    assert [held(w, key) for key in keys] == [[0, 1, gpu]] * 2
    assert w.p.view.counters["hbm_full_requests"] == 1
    w.settle()


def test_blocks_dropped_while_a_pool_makes_room_are_not_served_from_dram() -> None:
    w = world(hbm=1, admission=Rule("reuse", 1.0), write_policy="on_evict")
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys[:3])
    w.put(0, 1, keys[3:], keys[2], at=gpu)
    w.put(0, 1, chain("y", 3), at=gpu)
    assert isinstance(w.acquire(1, 1, chain("y", 3), at=gpu), ac.Grant)
    device = w.p.residency.tiers[gpu].device
    device._bandwidth = device._best = 100 * ALIGN
    device._measured_at = w.now
    # Two come in time, for which there is one slot, once the last block of the chain has made way.
    grant = w.acquire(0, 1, keys, wait=0.025, at=gpu)
    assert isinstance(grant, ac.Grant)
    assert w.tier_of(grant) == 0
    assert w.read(1, keys, grant) == values(keys[:3])
    assert w.lookup(1, keys) == 3
    w.settle()


def test_room_for_new_blocks_is_found_in_dram_where_a_pool_has_none() -> None:
    w = world(hbm=1)
    gpu = w.pools[0]
    w.put(0, 1, chain("a", 3), at=gpu)
    w.finish_all()
    assert isinstance(w.acquire(0, 1, chain("a", 3), at=gpu), ac.Grant)
    room = w.reserve(0, 1, chain("b", 2), at=gpu)
    assert isinstance(room, ac.Reserved)
    assert w.tier_of(room) == 0
    assert room.status.tolist() == [ac.GRANTED] * 2
    assert w.commit(0, room, w.fill(1, chain("b", 2), room)) == 2
    w.settle()


def test_a_block_that_does_not_fit_into_an_extent_of_the_pool() -> None:
    w = World(2, 4, hbm=4, hbm_slots=1)
    w.open(1, 5000)
    gpu, keys = w.pools[0], chain("a", 2)
    assert w.put(0, 1, keys, at=gpu) == 2
    assert [held(w, key)[0] for key in keys] == [0, 0]
    w.finish_all()
    grant = w.acquire(0, 1, keys, at=gpu)
    assert isinstance(grant, ac.Grant)
    assert w.tier_of(grant) == 0
    assert w.used(gpu) == 0
    assert not w.p.view.counters["hbm_full_requests"], "the pool is not even asked"
    assert w.lookup(1, keys, at=gpu) == 2
    w.settle()


def test_a_reader_of_another_tenant_is_served_from_dram() -> None:
    w = World(4, 8, hbm=2)
    w.open(1, tenant=1)
    gpu, keys = w.pools[0], chain("a")
    assert w.put(0, 1, keys, at=gpu) == 4
    w.finish_all()
    w.publish(1, 70_000)
    assert w.acquire(1, 1, keys, tenant=9, at=gpu) is None
    assert routes(w) == [(gpu, 0)]
    request = w.last_request
    w.finish_all()
    assert w.tier_of(answer(w, request)) == 0
    assert w.read(1, keys, answer(w, request)) == values(keys)
    own = w.acquire(2, 1, keys, at=gpu)
    assert isinstance(own, ac.Grant)
    assert w.tier_of(own) == gpu
    assert w.whose[gpu, int(own.where.extent[0])] == 1, "nobody else may map it"
    w.settle()


def test_a_reservation_is_in_the_pool_of_the_namespaces_tenant() -> None:
    w = World(4, 8, hbm=2)
    w.open(1, tenant=1)
    w.publish(1, 70_000)
    gpu, keys = w.pools[0], chain("a")
    assert w.put(0, 1, keys, at=gpu) == 4
    assert [held(w, key) for key in keys] == [[gpu]] * 4
    assert {w.whose[place] for place in w.whose if place[0] == gpu} == {1}
    w.settle()


def test_of_a_fenced_pool_nothing_is_served_until_it_serves_again() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.finish_all()
    w.send(ev.SetDevice(gpu, FENCED))
    assert w.get(1, keys, at=gpu) == values(keys)
    assert w.p.view.counters["hit_blocks_nvme"] == 4
    w.send(ev.SetDevice(gpu, "serving"))
    grant = w.acquire(0, 1, keys, at=gpu)
    assert isinstance(grant, ac.Grant)
    assert w.tier_of(grant) == gpu
    w.settle()


def test_a_draining_pool_demotes_its_only_copies() -> None:
    w = world(write_policy="on_evict")
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    w.put(0, 1, [b"c"])
    assert w.get(1, [b"c"], at=gpu) == values([b"c"])
    held_by = w.acquire(1, 1, [b"c"], at=gpu)
    assert isinstance(held_by, ac.Grant)
    w.leave(gpu)
    grant = w.acquire(0, 1, [b"c"], at=gpu)
    assert isinstance(grant, ac.Grant)
    assert w.tier_of(grant) == 0, "nobody is served from there any more"
    w.send(ev.Release(0, grant.lease))
    w.send(ev.Release(1, held_by.lease))
    w.pass_time(20)
    assert w.left == [gpu]
    assert [held(w, key) for key in keys] == [[1]] * 4
    assert w.get(1, keys, at=gpu) == values(keys)
    w.settle()


# -- pins


def test_a_pin_keeps_a_block_in_a_pool_only_where_nothing_else_has_it() -> None:
    w = world(hbm=1, dram=4, nvme=8, write_policy="on_evict")
    gpu, keys = w.pools[0], chain("a", 2)
    w.put(0, 1, keys, at=gpu)
    pinned = w.ask(ev.Pin(0, 1, joined(keys), w.now + 100))
    assert isinstance(pinned, ac.Answer)
    assert pinned.value == 2
    room = w.reserve(0, 1, chain("b"), at=gpu)
    assert isinstance(room, ac.Reserved)
    assert w.tier_of(room) == 0, "the pool's are the only copies"
    w.send(ev.Abort(0, room.lease))
    assert w.get(1, keys) == values(keys)
    assert [held(w, key) for key in keys] == [[0, gpu]] * 2
    assert w.put(0, 1, chain("b"), at=gpu) == 4
    assert [held(w, key) for key in keys] == [[0]] * 2, "DRAM has them now"
    assert [held(w, key) for key in chain("b")] == [[gpu]] * 4
    w.settle()


def test_how_much_may_be_pinned_does_not_depend_on_the_size_of_a_pool() -> None:
    w = world(hbm=1, dram=4, nvme=8)
    w.put(0, 1, chain("a", 6))
    pinned = w.ask(ev.Pin(0, 1, joined(chain("a", 6)), w.now + 100))
    assert isinstance(pinned, ac.Answer)
    assert pinned.value == 6
    w.settle()


# -- what is given up while copies run


def test_a_block_invalidated_during_its_copy_is_dropped() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    assert w.acquire(0, 1, keys, at=gpu) is None
    request = w.last_request
    assert w.invalidate(1, keys[2:]) == 2
    w.finish_all()
    assert w.read(1, keys, answer(w, request)) == values(keys[:2])
    assert w.lookup(1, keys) == 2
    assert w.put(0, 1, keys[2:], keys[1], salt=5) == 2
    assert w.get(1, keys, at=gpu) == [*values(keys[:2]), *(payload(1, key, 5) for key in keys[2:])]
    w.settle()


def test_a_row_that_is_used_again_gets_nothing_of_the_copy_of_the_block_before() -> None:
    w = world(nvme=0)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    assert w.acquire(0, 1, keys, at=gpu) is None
    request = w.last_request
    w.invalidate(1, keys)
    assert not answer(w, request).lease
    assert w.put(0, 1, chain("b")) == 4
    w.finish_all()
    assert [held(w, key) for key in chain("b")] == [[0]] * 4
    assert w.used(gpu) == 0
    w.settle()


def test_publishing_ends_no_copy_into_a_pool() -> None:
    w = World(4, 8, hbm=2)
    w.open(1, tenant=1)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    while any(0 in held(w, key) for key in keys):
        w.put(0, 1, chain(f"b{w.last_request}-"))
        w.finish_all()
    assert w.acquire(0, 1, keys, wait=100.0, at=gpu) is None
    at_gpu = w.last_request
    assert w.acquire(0, 1, keys, wait=100.0) is None
    at_dram = w.last_request
    assert routes(w) == [(1, 0), (1, gpu)]
    w.publish(1, 70_000)
    assert not answer(w, at_dram).lease, "it may go where others look"
    w.finish_all()
    assert w.tier_of(answer(w, at_gpu)) == gpu
    assert w.read(1, keys, answer(w, at_gpu)) == values(keys)
    w.settle()


def test_publishing_keeps_blocks_under_a_copy_into_a_pool() -> None:
    w = World(4, 8, hbm=2)
    w.open(1, tenant=1)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    assert w.acquire(0, 1, keys, wait=100.0, at=gpu) is None
    request = w.last_request
    w.publish(1, 70_000)
    assert not answer(w, request).lease, "its source makes way, and it is told at once"
    w.finish_all()
    assert w.get(1, keys, at=gpu) == values(keys)
    w.settle()


def test_a_copy_into_a_pool_out_of_a_slot_that_publishing_leaves_does_not_arrive() -> None:
    w = World(4, 0, hbm=2)
    w.open(1, tenant=1)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.publish(1, 70_000)
    assert routes(w) == [(0, 0)]
    [move] = w.copies
    assert w.acquire(0, 1, keys, wait=100.0, at=gpu) is None
    request = w.last_request
    assert routes(w) == [(0, 0), (0, gpu)]
    w.finish(move, [])
    assert not answer(w, request).lease
    w.finish_all()
    assert w.used(gpu) == 0
    assert w.get(1, keys, at=gpu) == values(keys)
    w.settle()


def test_publishing_waits_for_write_backs_from_a_pool() -> None:
    w = World(4, 8, hbm=2)
    w.open(1, tenant=1)
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys, at=gpu)
    down = next(iter(w.copies))
    w.acquire(0, 1, keys, wait=0.0)
    w.finish(next(n for n in w.copies if n != down), [])
    assert [held(w, key) for key in keys] == [[0, gpu]] * 4
    w.publish(1, 70_000)
    w.pass_time(1)
    assert w.get(1, keys, tenant=9) == values(keys), "nothing stays where others may not look"
    w.settle()


# -- bad copies


def rot(w: World, grant: ac.Grant, which: int) -> None:
    w.rot(w.places(w.tier_of(grant), grant.where)[which])


def test_a_bad_copy_in_a_pool_is_given_up_and_no_other() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    w.get(1, keys, at=gpu)
    grant = w.acquire(0, 1, keys, at=gpu)
    assert isinstance(grant, ac.Grant)
    rot(w, grant, 1)
    assert w.read(1, keys, grant)[1] is None
    assert w.ask(ev.Suspect(0, 1, joined(keys), gpu)) is None
    request = w.last_request
    [(number, probe)] = w.probes.items()
    assert probe.tier == gpu
    w.probe(number)
    told = w.answers[request]
    assert isinstance(told, ac.Answer)
    assert told.value == 1
    assert [held(w, key) for key in keys] == [[0, 1, gpu], [0, 1], [0, 1, gpu], [0, 1, gpu]]
    w.send(ev.Release(0, grant.lease))
    assert w.get(1, keys, at=gpu) == values(keys)
    again = w.acquire(0, 1, keys, at=gpu)
    assert isinstance(again, ac.Grant)
    assert again.where.place[1] != grant.where.place[1], "its slot is used no more"
    w.settle()


def test_a_suspicion_of_one_tiers_copy_is_not_about_another() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a", 2)
    w.put(0, 1, keys, at=gpu)
    w.finish_all()
    told = w.ask(ev.Suspect(0, 1, joined(keys)))
    assert isinstance(told, ac.Answer), "DRAM has none"
    assert told.value == 0
    assert not w.probes
    w.settle()


def test_a_bad_copy_in_a_pool_ends_no_copy_of_a_good_one() -> None:
    w = world(hbm=(2, 2))
    one, two = w.pools
    keys = chain("a", 1)
    w.p.residency.tiers[1].device.state = FENCED
    w.put(0, 1, keys)
    w.get(1, keys, at=one)
    w.send(ev.SetDevice(1, "serving"))
    w.send(ev.Flush())
    assert w.acquire(0, 1, keys, at=two) is None
    request = w.last_request
    assert routes(w) == [(0, 1), (0, two)]
    row = w.p.residency.index.find_one(1, keys[0])
    slots = w.p.residency.blocks.slot[one, [row]].astype(np.int64)
    w.rot(w.places(one, w.p.residency.where(one, slots))[0])
    w.ask(ev.Suspect(0, 1, joined(keys), one))
    w.probe(next(iter(w.probes)))
    w.finish_all()
    assert held(w, keys[0]) == [0, 1, two]
    assert w.read(1, keys, answer(w, request)) == values(keys)
    w.settle()


def test_waiters_for_another_tier_learn_of_a_bad_block_at_once() -> None:
    w = world()
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    assert w.acquire(0, 1, keys, wait=100.0, at=gpu) is None
    at_gpu = w.last_request
    assert w.acquire(0, 1, keys, wait=100.0) is None
    at_dram = w.last_request
    w.finish(next(n for n, copy in w.copies.items() if copy.target == 0), [ev.CORRUPT] * 4)
    assert not answer(w, at_dram).lease
    assert not answer(w, at_gpu).lease
    w.finish_all()
    assert w.p.residency.blocks.state.max() <= 2
    assert w.lookup(1, keys) == 0
    w.settle()


def test_more_suspicion_than_a_pool_can_look_at_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a", 2)
    w.put(0, 1, keys, at=gpu)
    w.finish_all()
    monkeypatch.setattr("kvstore.core.queues.device_queue._WAITING_BYTES", ALIGN)
    monkeypatch.setattr(w.p.residency.tiers[gpu].device.queue, "_limit", ALIGN)
    told = w.ask(ev.Suspect(0, 1, joined(keys), gpu))
    assert isinstance(told, ac.Answer)
    assert told.value == 0
    w.settle()


# -- quotas


def test_two_tenants_share_a_pool_by_their_quotas() -> None:
    w = World(8, 16, hbm=4)
    w.open(1, tenant=1)
    w.open(2, tenant=2)
    gpu = w.pools[0]
    free = (0, None)
    w.tenant(1, free, free, (2, None))
    w.tenant(2, free, free, (0, 2))
    for i in range(4):
        w.put(0, 2, chain(f"b{i}-"), at=gpu)
        w.finish_all()
    assert w.used(gpu, 2) == 2 * 4 * ALIGN, "its limit"
    assert w.extents(gpu)[1:3] == [0, 2]
    for i in range(4):
        assert w.put(0, 1, chain(f"a{i}-"), at=gpu) == 4
        w.finish_all()
        w.pass_time(1)
    assert w.extents(gpu)[1:3] == [3, 1], "its floor, and half of the rest"
    w.tenant(1, free, free, (0, None))
    for i in range(4, 8):
        w.put(0, 2, chain(f"b{i}-"), at=gpu)
        w.pass_time(1)
    assert w.extents(gpu)[1:3] == [2, 2]
    w.tenant(2, free, free, (0, 1))
    w.pass_time(5)
    assert w.used(gpu, 2) <= 4 * ALIGN
    assert w.used(0, 2) + w.used(1, 2) >= 16 * ALIGN, "a limit of the pool is none of DRAM or NVMe"
    w.settle()


def test_a_tenant_that_may_have_nothing_of_a_pool_is_served_from_dram() -> None:
    w = World(4, 8, hbm=2)
    w.open(1, tenant=1)
    gpu = w.pools[0]
    w.tenant(1, (0, None), (0, None), (0, 0))
    assert w.put(0, 1, chain("a"), at=gpu) == 4
    w.finish_all()
    assert w.get(1, chain("a"), at=gpu) == values(chain("a"))
    assert w.used(gpu) == 0
    w.settle()


def test_forgetting_a_tenant_takes_its_leases_and_rooms_in_a_pool() -> None:
    w = World(4, 8, hbm=2)
    w.open(1, tenant=1)
    w.open(2, tenant=2)
    gpu = w.pools[0]
    w.put(0, 1, chain("a", 2), at=gpu)
    w.put(0, 2, chain("b", 2), at=gpu)
    w.finish_all()
    assert isinstance(w.acquire(0, 1, chain("a", 2), at=gpu), ac.Grant)
    assert isinstance(w.acquire(0, 2, chain("b", 2), at=gpu), ac.Grant)
    assert isinstance(w.reserve(0, 1, chain("c", 2), at=gpu), ac.Reserved)
    assert w.ask(ev.ForgetTenant(0, 1)) is None
    request = w.last_request
    w.pass_time(2)
    assert request in w.answers
    assert w.used(gpu, 1) == 0
    assert 1 not in w.whose.values()
    assert len(w.p.leases.leases) == 1, "the other one's lease goes on"
    w.settle()


# -- what it takes


def test_a_lookup_counts_blocks_worth_loading_into_a_pool() -> None:
    w = world(dram=4, hbm=4)
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    w.put(0, 1, chain("b"))
    w.finish_all()
    slow, fast = w.p.residency.tiers[1].device, w.p.residency.tiers[gpu].device
    slow._bandwidth = slow._best = 100 * ALIGN
    slow._measured_at = fast._measured_at = w.now
    fast._bandwidth = fast._best = 1000 * ALIGN
    assert w.lookup(1, keys, at=gpu, deadline=w.now + 0.0251) == 2, "two come within 25 ms"
    assert w.lookup(1, chain("b"), at=gpu, deadline=w.now + 0.0025) == 1, "DRAM is read at the pool's pace"
    assert w.lookup(1, chain("b"), deadline=w.now + 0.0025) == 4, "in DRAM it is already"
    assert w.lookup(1, keys, at=gpu, recompute_s=0.001) == 0
    w.get(1, keys, at=gpu)
    assert w.lookup(1, keys, at=gpu, recompute_s=0.001) == 4, "a hit there"
    assert w.lookup(1, keys, recompute_s=0.002) == 4, "and it comes from there fast enough"
    w.settle()


def test_blocks_already_loading_into_a_pool_cost_nothing() -> None:
    w = world()
    gpu = w.pools[0]
    keys = put_in_nvme_alone(w, "a")
    device = w.p.residency.tiers[1].device
    device._bandwidth = device._best = 100 * ALIGN
    device._measured_at = w.now
    assert w.lookup(1, keys, at=gpu, recompute_s=0.001) == 0
    assert w.acquire(0, 1, keys, at=gpu) is None
    assert w.lookup(1, keys, at=gpu, recompute_s=0.001) == 4
    assert w.lookup(1, keys, recompute_s=0.001) == 0, "for DRAM nothing is under way"
    w.settle()


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "lru"])
def test_another_policy_takes_over_in_a_pool_too(name: str) -> None:
    w = world(hbm=(2, 2), dram=4)
    one, two = w.pools
    for i, at in enumerate((one, two, 0)):
        w.put(0, 1, chain(f"c{i}-"), at=at)
    w.finish_all()
    w.send(ev.SetPolicy(name))
    w.put(0, 1, chain("d"), at=one)
    w.pass_time(1)
    assert w.p.policy_migration.pools_left == 0
    assert {type(p).__name__.lower() for t in w.p.residency.tiers for p in t.policies.values()} == {name}
    for i in range(3, 8):
        w.put(0, 1, chain(f"c{i}-"), at=two)
        w.finish_all()
        w.get(1, chain(f"c{i - 3}-"), at=one)
    assert w.used(two) <= 8 * ALIGN
    w.settle()


def test_copies_wait_for_the_pool_and_not_for_dram() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    device = w.p.residency.tiers[gpu].device
    device.bytes_moving[DEMAND], device.moving = 1 << 40, 1
    assert w.acquire(0, 1, keys, wait=1e5, at=gpu) is None
    assert not w.copies
    assert device.queue.waiting(DEMAND) == 4 * ALIGN
    device.bytes_moving[DEMAND], device.moving = 0, 0
    w.send(ev.Tick())
    assert routes(w) == [(0, gpu)]
    w.settle()


def test_a_waiter_for_a_pool_is_answered_at_its_deadline() -> None:
    w = world()
    gpu, keys = w.pools[0], chain("a")
    w.put(0, 1, keys)
    w.finish_all()
    assert w.acquire(0, 1, keys, wait=0.01, at=gpu) is None
    request = w.last_request
    w.now += 0.02
    w.send(ev.Tick())
    assert not answer(w, request).lease
    w.finish_all()
    assert w.used(gpu) == 4 * ALIGN
    assert math.isinf(w.p.copies.wakes_at())
    w.settle()


def test_events_are_not_changed_when_dram_serves_instead_of_a_pool() -> None:
    w = world(hbm=1)
    gpu, keys = w.pools[0], chain("a", 6)
    w.put(0, 1, keys)
    get = ev.Acquire(0, 0, 1, joined(keys), w.now, tier=gpu)
    grant = w.ask(get)
    assert isinstance(grant, ac.Grant)
    assert (w.tier_of(grant), get.tier) == (0, gpu)
    put = ev.Reserve(0, 0, 1, joined(chain("b", 6)), b"", w.now, gpu)
    room = w.ask(put)
    assert isinstance(room, ac.Reserved)
    assert put.tier == gpu
    w.send(ev.Abort(0, room.lease))
    w.send(ev.Release(0, grant.lease))
    w.settle()
