"""Several devices in one tier: who gets what is written, what is read from where, those that come and go."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.block_table import LIVE
from kvstore.core.policy.admission import DAY_S, Rule
from kvstore.core.queues.device_queue import DEMAND, FENCED, SERVING, DeviceQueue
from kvstore.types import ALIGN, Tier
from tests.core.world import World, joined, payload


def chain(name: str, n: int = 4) -> list[bytes]:
    return [b"%s%d" % (name.encode(), i) for i in range(n)]


def put(w: World, name: str, n: int = 4) -> list[bytes]:
    """Stores a chain and has it written down."""
    keys = chain(name, n)
    assert w.put(0, 1, keys) == n
    w.finish_all()
    return keys


def held(w: World) -> list[int]:
    """How many blocks each device of NVMe has."""
    slot = w.p.residency.blocks.slot[1:]
    return [int(((column >= 0) & (w.p.residency.blocks.state == LIVE)).sum()) for column in slot]


def world(*devices: int, dram: int = 2, **more: object) -> World:
    w = World(dram, devices, **more)
    w.open(1)
    return w


def test_writes_are_divided_by_device_size_and_each_block_is_written_once() -> None:
    w = world(8, 8, 16, dram=4)
    for i in range(24):
        put(w, f"c{i}-")
    first, second, large = held(w)
    assert first + second + large == 96
    assert large == first + second == 2 * first
    for i in range(24):
        assert w.get(1, chain(f"c{i}-")) == [payload(1, key) for key in chain(f"c{i}-")]
    assert sorted(map(len, w.journals[1:])) == [24, 24, 48]
    w.settle()


def test_one_prompt_may_lie_on_several_devices_and_is_read_from_all() -> None:
    w = world(4, 4)
    keys = chain("a", 4)
    for at in range(4):
        assert w.put(0, 1, keys[at : at + 1], keys[at - 1] if at else b"") == 1
        w.finish_all()
    for name in ("b", "c"):
        put(w, name)
    assert held(w) == [6, 6]
    assert w.acquire(0, 1, keys) is None
    assert {copy.source for copy in w.copies.values()} == {1, 2}
    request = w.last_request
    w.finish_all()
    grant = w.answers[request]
    assert isinstance(grant, ac.Grant)
    assert grant.slots["tier"].tolist() == [Tier.NVME] * 4
    assert w.p.view.counters["hit_blocks_nvme"] == w.p.view.counters["hit_blocks_nvme2"] == 2
    assert sorted(grant.sources.tolist()) == [1, 1, 2, 2]
    assert grant.stored.by_tier == {1: 2, 2: 2}
    w.settle()


def test_a_fenced_device_does_not_stop_the_others() -> None:
    w = world(4, 4)
    a, b = put(w, "a"), put(w, "b")
    put(w, "c")
    put(w, "d")
    assert held(w) == [8, 8]
    w.send(ev.SetDevice(1, FENCED))
    assert sorted((w.lookup(1, a), w.lookup(1, b))) == [0, 4]
    there = a if w.lookup(1, a) else b
    assert w.get(1, there) == [payload(1, key) for key in there]
    put(w, "e")
    assert held(w) == [8, 12], "what is written goes where it can be"
    w.send(ev.SetDevice(1, SERVING))
    assert w.lookup(1, a) == w.lookup(1, b) == 4
    w.settle()


def test_a_full_queue_of_one_device_delays_no_read_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(4, 4)
    a, b = put(w, "a"), put(w, "b")
    put(w, "c")
    put(w, "d")
    monkeypatch.setattr(w.p.residency.tiers[1].device, "room", lambda tenant, kind: 0)
    here = a if w.p.residency.blocks.slot[1, w.p.residency.index.find(1, joined(a))[0]] >= 0 else b
    there = b if here is a else a
    assert w.get(1, there) == [payload(1, key) for key in there]
    assert w.get(1, here) == []


def test_devices_with_budget_get_the_writes_of_a_device_without() -> None:
    w = world(8, 8, admission=Rule("always", 0.0, int(DAY_S) * ALIGN))
    spent = w.p.residency.tiers[1].admission
    for i in range(200):
        put(w, f"c{i}-")
        if spent.spent:
            break
    assert spent.spent
    before = held(w)[1]
    w.p.residency.tiers[2].admission.change(Rule(), w.now)
    put(w, "z")
    assert held(w)[1] > before


def test_an_added_device_gets_its_part_and_exists_after_a_restart() -> None:
    w = world(4, dram=1)
    put(w, "a")
    w.add(8)
    assert [(wanted.tier, wanted.count) for wanted in w.wanted] == [(2, 8)]
    assert held(w) == [4, 0]
    w.move_extents()
    for i in range(12):
        put(w, f"c{i}-")
    assert held(w)[1] == 32, "twice as large, it gets twice as much"
    w.restart()
    assert held(w)[1] == 32
    assert w.get(1, chain("c11-")) == [payload(1, key) for key in chain("c11-")]
    w.settle()


def test_rows_have_no_slot_in_an_added_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.reconfiguration.hotplug._ROWS_AT_ONCE", 3)
    w = world(8, dram=4)
    keys = put(w, "a", 10)
    w.send(ev.AddDevice(w._device(4)))
    assert len(w.p.residency.tiers) == 2, "it takes several steps"
    put(w, "b", 6)
    w.pass_time(0.1)
    assert w.joined == [2]
    assert (w.p.residency.blocks.slot[2, : w.p.residency.blocks.rows_touched] == -1).all()
    assert w.get(1, keys) == [payload(1, key) for key in keys]


def test_a_removed_device_is_read_until_it_is_empty_and_not_written() -> None:
    w = world(4, 4)
    kept, going = put(w, "a"), put(w, "b")
    put(w, "c")
    put(w, "d")
    lease = w.get(1, going)
    assert lease == [payload(1, key) for key in going]
    grant = w.acquire(3, 1, kept)
    assert grant is None
    w.finish_all()
    w.leave(2)
    put(w, "e")
    assert all(copy.target != 2 for copy in w.copies.values())
    w.pass_time(2)
    assert w.left == [2]
    assert held(w)[1] == 0
    assert w.p.residency.tiers[2].gone
    for client in range(8):
        w.send(ev.ClientLost(client))
    assert w.get(1, kept) == [payload(1, key) for key in kept]
    w.restart()
    assert len(w.p.residency.tiers) == 2
    w.settle()


@pytest.mark.parametrize("policy", ["hazard", "arc"])
def test_a_removed_device_takes_no_memory(policy: str) -> None:
    w = world(8, 16, policy=policy)
    for name in "abcdefgh":
        put(w, name)
    w.finish_all()
    tiers = w.p.residency.tiers
    going = [weakref.ref(tiers[2].generation.segments), weakref.ref(tiers[2].slots)]
    going += [weakref.ref(each) for each in tiers[2].policies.values()]
    assert len(going) > 2, "it had no blocks"
    w.leave(2)
    # Its policies are in the middle of a change.
    w.p.policy_migration.rows_at_once = 1
    w.send(ev.SetPolicy("lru"))
    gc.disable()
    try:
        w.pass_time(4)
        assert w.left == [2]
        assert not any(each() for each in going)
    finally:
        gc.enable()
    w.send(ev.SetPolicy("s3fifo"))
    w.pass_time(4)
    assert w.p.policy_migration.pools_left == 0
    assert not tiers[2].policies
    put(w, "i")
    w.settle()


def test_pins_keep_a_device_until_they_end() -> None:
    w = world(4, 4, dram=4)
    for name in "abcd":
        put(w, name)
    pinned = [chain(name) for name in "abcd" if w.ask(ev.Pin(0, 1, joined(chain(name)), w.now + 30)).value]
    assert pinned
    w.leave(2)
    w.pass_time(10)
    blocks = w.p.residency.blocks
    assert (blocks.pinned & (blocks.slot[2] >= 0)).any()
    assert w.left == []
    w.pass_time(60)
    assert w.left == [2]
    w.settle()


def test_a_device_is_added_while_a_tenant_is_being_deleted() -> None:
    w = World(2, [4])
    w.tenant(3)
    w.open(1, tenant=3)
    assert w.put(0, 1, chain("a")) == 4
    assert w.ask(ev.ForgetTenant(0, 3)) is None, "what is on its way down keeps it"
    forgetting = w.last_request
    w.add(4)
    w.move_extents()
    w.finish_all()
    w.pass_time(2)
    assert forgetting in w.answers
    w.settle()


def test_added_devices_are_bounded_by_the_slot_columns() -> None:
    w = world(1, dram=1)
    for _ in range(w.p.hotplug.addable):
        w.add(1)
        w.move_extents()
    assert w.p.hotplug.addable == 0
    with pytest.raises(AssertionError):
        w.send(ev.AddDevice(w._device(1)))
    put(w, "a")
    assert w.p.residency.ram_bytes() > 0
    w.settle()


def moved(d: DeviceQueue, at: float, took: float, nbytes: int = 8 << 20) -> None:
    """The device moves bytes for so many seconds."""
    assert d.put(at, 1, DEMAND, nbytes, 1)
    [(_, kind, _)] = d.next(at)
    d.ended(at + took, kind, nbytes, nbytes)


def tried_after(d: DeviceQueue, now: float, wanted: float) -> float:
    """In how many seconds the device is believed to be that fast."""
    return next(s for s in range(100_000) if d.bandwidth(now + s) >= wanted)


def test_a_device_that_stays_slow_is_tried_less_and_less_often() -> None:
    d, now, pauses = DeviceQueue(), 0.0, []
    moved(d, now, 0.008)
    for _ in range(6):
        moved(d, now, 8.0)  # 1 MiB/s
        now += 8
        assert d.bandwidth(now) < 2 << 20
        pauses.append(tried_after(d, now, 64 << 20))
        now += pauses[-1]
    assert pauses[0] < 40
    assert pauses == sorted(pauses)
    assert 300 < pauses[-1] < 600
    # As soon as it is fast again, it is not believed to be slower for that.
    for _ in range(3):
        before = d.bandwidth(now)
        moved(d, now, 0.008)
        assert d.bandwidth(now + 0.008) >= before
        now += 5
    assert d.bandwidth(now) > 500 << 20


def test_a_slow_device_that_stays_busy_was_tried_once() -> None:
    d, copies = DeviceQueue(), 4
    moved(d, 0.0, 0.008)
    for number in range(copies):
        assert d.put(1.0, 1, DEMAND, 8 << 20, number)
    assert len(list(d.next(1.0))) == copies
    for number in range(copies):
        d.ended(17.0 + 16 * number, DEMAND, 8 << 20, 8 << 20)
    assert tried_after(d, 65.0, 64 << 20) < 40


def test_a_chain_over_two_devices_is_loaded_by_both_at_a_time() -> None:
    w = world(4, 4)
    keys = chain("a", 4)
    for at in range(4):
        w.put(0, 1, keys[at : at + 1], keys[at - 1] if at else b"")
        w.finish_all()
    for name in ("b", "c"):
        put(w, name)
    r, transfers = w.p.residency, w.p.transfers
    rows = r.index.find(1, joined(keys))
    for state in r.tiers[1:]:
        state.device._bandwidth = state.device._best = float(ALIGN)  # one block a second each
        state.device._measured_at = w.now
    ends = w.now + 2.5
    assert transfers.worth(r.namespaces[1], rows, 0, ends, 0.0) == 4
    r.tiers[2].device._bandwidth = r.tiers[2].device._best = ALIGN / 2
    assert transfers.worth(r.namespaces[1], rows, 0, ends, 0.0) == 3
