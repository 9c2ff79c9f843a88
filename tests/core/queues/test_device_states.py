"""Devices that an operator drains or fences: what is read, written, waited for, and what comes back."""

from __future__ import annotations

import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.queues.device_queue import DRAINING, FENCED, SERVING
from tests.core.world import World, joined, payload

A, B = [b"a0", b"a1", b"a2", b"a3"], [b"b0", b"b1", b"b2", b"b3"]


def world() -> World:
    """A is in NVMe only, B in DRAM and NVMe."""
    w = World(1, 4, slots=4)
    w.open(1)
    for keys in (A, B):
        w.put(0, 1, keys)
        w.finish_all()
    assert w.lookup(1, A) == w.lookup(1, B) == 4
    return w


def device(w: World):
    return w.p.residency.tiers[1].device


def test_a_fenced_device_is_neither_read_nor_written_until_it_serves_again() -> None:
    w = world()
    w.send(ev.SetDevice(1, FENCED))
    assert not device(w).readable
    assert not device(w).takes_writes
    assert (w.lookup(1, A), w.lookup(1, B)) == (0, 4)
    assert w.get(1, A) == []
    assert w.put(0, 1, [b"c0"]) == 1
    assert not w.copies
    w.send(ev.SetDevice(1, SERVING))
    assert w.get(1, A) == [payload(1, key) for key in A]
    w.settle()


def test_waiters_are_answered_when_their_device_is_fenced_and_its_queue_is_emptied() -> None:
    w = world()
    # Nothing starts, as while more than enough is under way.
    device(w).bytes_moving[0], device(w).moving = 1 << 40, 1
    assert w.acquire(0, 1, A, wait=1e5) is None
    asked = w.last_request
    device(w).bytes_moving[0], device(w).moving = 0, 0
    w.send(ev.SetDevice(1, FENCED))
    answer = w.answers[asked]
    assert isinstance(answer, ac.Grant)
    assert not answer.lease
    assert not w.p.copies.under_way
    assert not w.copies
    assert w.p.view.counters["called_off_blocks"] == 4
    assert not device(w).reads.failures, "it is not the device that failed"
    w.send(ev.SetDevice(1, SERVING))
    assert w.get(1, A) == [payload(1, key) for key in A]
    w.settle()


def test_copies_under_way_when_a_device_is_fenced_still_arrive() -> None:
    w = world()
    assert w.acquire(0, 1, A) is None
    asked = w.last_request
    assert w.copies
    w.send(ev.SetDevice(1, FENCED))
    w.finish_all()
    answer = w.answers[asked]
    assert isinstance(answer, ac.Grant)
    assert w.read(1, A, answer) == [payload(1, key) for key in A]
    w.settle()


def test_a_scrub_that_waits_for_a_fenced_device_is_over() -> None:
    w = world()
    device(w).bytes_moving[3], device(w).moving = 1 << 40, 1
    w.send(ev.Scrub(1, 4096))
    assert w.p.leases.probes
    device(w).bytes_moving[3], device(w).moving = 0, 0
    w.send(ev.SetDevice(1, FENCED))
    assert not w.p.leases.probes
    assert not w.probes
    assert not w.p.view.counters["quarantined_blocks"]
    w.send(ev.Scrub(1, 4096))
    assert not w.p.leases.probes
    w.settle()


@pytest.mark.parametrize("write_policy", ["write_through", "on_evict"])
def test_a_device_that_drains_is_read_and_not_written(write_policy: str) -> None:
    w = World(1, 4, slots=5, write_policy=write_policy)
    w.open(1)
    for keys in (A, B):
        for i, key in enumerate(keys):
            w.put(0, 1, [key], keys[i - 1] if i else b"")
            w.finish_all()
    assert w.lookup(1, A) == 4
    written = w.p.view.counters["written_blocks"]
    assert written
    w.send(ev.SetDevice(1, DRAINING))
    lease = w.acquire(1, 1, B[:1])
    assert isinstance(lease, ac.Grant)
    assert w.get(1, A) == [payload(1, key) for key in A], "promoted as ever"
    for i in range(6):
        w.put(0, 1, [b"c%d" % i])
        w.finish_all()
    assert w.p.view.counters["written_blocks"] == written
    assert w.lookup(1, A) == 4
    assert w.read(1, B[:1], lease) == [payload(1, B[0])]
    w.send(ev.SetDevice(1, SERVING))
    w.put(0, 1, [b"d0"])
    w.finish_all()
    for i in range(6):
        w.put(0, 1, [b"e%d" % i])
        w.finish_all()
    assert w.p.view.counters["written_blocks"] > written
    w.settle()


def test_many_queued_copies_are_cancelled_in_steps() -> None:
    w = World(16, 40, slots=64, max_blocks=8192)
    w.open(1)
    chains = [[b"%03d-%02d" % (i, k) for k in range(32)] for i in range(50)]
    for keys in chains:
        w.put(0, 1, keys)
        w.finish_all()
    r = w.p.residency
    low = [keys for keys in chains if r.blocks.slot[0, r.prefix(1, joined(keys))].max() < 0]
    assert len(low) > 12
    device(w).bytes_moving[0], device(w).moving = 1 << 40, 1
    for keys in low[:12]:
        w.acquire(0, 1, keys, wait=1e5)
    queued = len(w.p.copies.under_way)
    assert queued >= 12
    device(w).bytes_moving[0], device(w).moving = 0, 0
    w.send(ev.SetDevice(1, FENCED))
    assert len(w.p.copies.under_way) == queued - 8
    w.pass_time(0.1)
    assert not w.p.copies.under_way
    w.settle()
