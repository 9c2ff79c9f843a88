"""Restarts that keep memory, devices that hang, and blocks that are looked at in turn."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.requests import verification
from tests.core.world import World, joined, payload

KEYS = [b"a", b"b", b"c"]


def world(dram: int = 2, nvme: int = 4, **more: object) -> World:
    w = World(dram, nvme, **more)  # type: ignore[arg-type]
    w.open(1)
    return w


def tiers_of(w: World, key: bytes) -> list[int]:
    """Which tiers hold a block."""
    row = w.p.residency.index.find_one(1, key)
    return [t for t in range(len(w.p.residency.tiers)) if row >= 0 and w.p.residency.blocks.slot[t, row] >= 0]


# -- memory that is handed over


def test_inherited_memory_keeps_its_blocks() -> None:
    w = world(nvme=0)
    w.put(0, 1, KEYS)
    w.restart(handover=True)
    assert w.get(1, KEYS) == [payload(1, k) for k in KEYS]
    assert w.p.view.counters["restored_blocks_dram"] == 3
    # The chain hangs together: it goes leaf first, and its parents stay while children do.
    w.invalidate(1, [b"b"])
    assert w.lookup(1, KEYS) == 1
    assert w.p.residency.blocks.used == 3


def test_a_block_in_both_tiers_is_one_block() -> None:
    w = world()
    w.put(0, 1, KEYS)
    w.finish_all()
    w.restart(handover=True)
    assert [tiers_of(w, k) for k in KEYS] == [[0, 1]] * 3
    assert not w.copies, "nothing has to go down again"
    assert w.get(1, KEYS) == [payload(1, k) for k in KEYS]


def test_interrupted_write_backs_are_repeated_after_a_restart() -> None:
    w = world()
    w.put(0, 1, KEYS)
    w.restart(handover=True)
    assert [tiers_of(w, k) for k in KEYS] == [[0]] * 3
    w.finish_all()
    assert [tiers_of(w, k) for k in KEYS] == [[0, 1]] * 3
    w.restart()
    assert w.get(1, KEYS) == [payload(1, k) for k in KEYS]


def test_with_on_evict_restored_blocks_are_not_written_early() -> None:
    w = world(write_policy="on_evict")
    w.put(0, 1, KEYS)
    w.restart(handover=True)
    assert not w.copies


def test_a_parent_only_on_nvme_and_a_child_only_in_memory_find_each_other() -> None:
    w = world(write_policy="on_evict")
    w.put(0, 1, KEYS)
    w.send(ev.Flush())
    w.finish_all()
    for place, header in list(w.headers.items()):
        if header.key == b"a":
            del w.headers[place]
    w.records = {who: r for who, r in w.records.items() if who[1] == b"a"}
    w.restart(handover=True)
    assert [tiers_of(w, k) for k in KEYS] == [[1], [0], [0]]
    assert w.lookup(1, KEYS) == 3
    w.invalidate(1, [b"c", b"b", b"a"])
    assert w.p.residency.blocks.used == 0


def test_memory_is_right_where_the_records_are_late() -> None:
    """A block was invalidated and put again, and the crash came before the journal had heard of it."""
    w = world()
    w.put(0, 1, [b"a"], salt=1)
    w.finish_all()
    late = dict(w.records)
    w.invalidate(1, [b"a"])
    w.put(0, 1, [b"a"], salt=2)
    w.records = late
    w.restart(handover=True)
    assert w.get(1, [b"a"]) == [payload(1, b"a", 2)]
    w.finish_all()
    w.restart()
    assert w.get(1, [b"a"]) == [payload(1, b"a", 2)]


def test_versions_go_on_where_they_were() -> None:
    """Whoever still looks at a slot from before the restart must see that it is another's now."""
    w = world(dram=1, nvme=0)
    w.put(0, 1, KEYS)
    w.invalidate(1, KEYS)
    before = dict(w.versions)
    w.restart(handover=True)
    w.put(0, 1, [b"x", b"y", b"z"])
    for place, header in w.headers.items():
        assert header.version > before.get(place, 0)


# -- devices that hang


def test_a_hanging_device_is_fenced_alone() -> None:
    w = world(dram=1)
    keys = [b"%02d" % i for i in range(8)]
    for key in keys:
        w.put(0, 1, [key])
        w.finish_all()
    gone = [k for k in keys if tiers_of(w, k) == [1]]
    kept = [k for k in keys if 0 in tiers_of(w, k)]
    assert gone
    assert kept
    assert w.acquire(0, 1, gone[:1], wait=60) is None
    waiting = w.last_request
    wake = w.p.next_wakeup()
    assert wake is not None
    assert 4 < wake - w.now <= 5
    w.now = wake
    w.send(ev.Tick())
    assert w.p.view.counters["tier_fences"] == 1
    assert w.lookup(1, gone[:1]) == 0, "what cannot be had is a miss"
    assert isinstance(w.acquire(0, 1, gone[1:2], wait=60), ac.Grant), "and is one at once"
    assert w.get(1, kept[-1:]) == [payload(1, kept[-1])]
    # Room is made by dropping: nothing waits for the device.
    for i in range(6):
        assert w.put(0, 1, [b"new%d" % i]) == 1
    w.now += 60
    w.send(ev.Tick())
    assert waiting in w.answers, "its deadline has passed"
    w.finish_all()
    assert not w.p.residency.tiers[1].device.fenced
    assert w.get(1, gone[:1]) == [payload(1, gone[0])]
    w.settle()


def test_a_device_that_is_slow_is_not_fenced() -> None:
    w = world()
    for i in range(20):
        w.put(0, 1, [b"%02d" % i])
        w.now += 4
        w.send(ev.Tick())
        w.finish(next(iter(w.copies)), [])
        assert not w.p.residency.tiers[1].device.fenced


def test_an_idle_device_is_not_waited_for() -> None:
    w = world()
    w.put(0, 1, [b"a"])
    w.finish_all()
    assert w.p.next_wakeup() is None


# -- scrubbing


@pytest.mark.parametrize("tier", [0, 1])
def test_rot_is_found_before_anybody_asks(tier: int) -> None:
    w = world()
    w.put(0, 1, KEYS)
    w.finish_all()
    row = w.p.residency.index.find_one(1, b"b")
    slot = w.p.residency.blocks.slot[tier, [row]].astype(np.int64)
    [place] = w.places(tier, w.p.residency.where(tier, slot))
    w.rot(place)
    name = ("dram", "nvme")[tier]
    while not w.p.view.counters[f"scrub_passes_{name}"]:
        w.send(ev.Scrub(tier, 4096))
        for number in list(w.probes):
            w.probe(number)
    assert w.p.view.counters[f"scrubbed_blocks_{name}"] == 3
    assert w.p.view.counters["quarantined_blocks"] == 1
    assert tiers_of(w, b"b") == [1 - tier]
    assert w.get(1, KEYS) == [payload(1, k) for k in KEYS]


def test_a_probe_takes_as_many_blocks_as_it_may_of_one_size() -> None:
    w = world(dram=4, nvme=0)
    w.open(3, 5000)
    w.put(0, 1, KEYS)
    w.put(0, 3, [b"x", b"y"])
    seen = []
    while not w.p.view.counters["scrub_passes_dram"]:
        w.send(ev.Scrub(0, 6000))
        [probe] = w.probes.values()
        seen.append((probe.slot_bytes, len(probe.identity)))
        w.send(ev.Scrub(0, 8192))
        assert len(w.probes) == 1, "one at a time"
        w.probe(probe.probe)
    assert seen == [(4096, 2), (4096, 1), (8192, 1), (8192, 1)]


def test_a_probe_takes_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_SCRUB_BLOCKS", 2)
    w = world(dram=4, nvme=0)
    w.put(0, 1, KEYS)
    seen = []
    while not w.p.view.counters["scrub_passes_dram"]:
        w.send(ev.Scrub(0, 1 << 20))
        [probe] = w.probes.values()
        seen.append(len(probe.identity))
        w.probe(probe.probe)
    assert seen == [2, 1]


def test_a_block_that_could_not_be_read_is_not_bad() -> None:
    w = world()
    w.put(0, 1, [b"a"])
    w.finish_all()
    w.send(ev.Scrub(1, 4096))
    [number] = w.probes
    del w.probes[number]
    w.send(ev.ProbeDone(number, np.array([ev.FAILED], np.uint8)))
    assert tiers_of(w, b"a") == [0, 1]
    w.settle()


def test_waiters_of_a_bad_block_are_answered_at_once() -> None:
    w = world(dram=1)
    keys = [b"%02d" % i for i in range(8)]
    for key in keys:
        w.put(0, 1, [key])
        w.finish_all()
    [bad, *_] = [k for k in keys if tiers_of(w, k) == [1]]
    assert w.acquire(0, 1, [bad], wait=60) is None
    waiting = w.last_request
    while not any(probe.identity.key(0) == bad for probe in w.probes.values()):
        for number in list(w.probes):
            w.probe(number)
        w.send(ev.Scrub(1, 4096))
    w.send(ev.ProbeDone(next(iter(w.probes)), np.array([ev.CORRUPT], np.uint8)))
    w.probes.clear()
    answer = w.answers[waiting]
    assert isinstance(answer, ac.Grant)
    assert not answer.lease
    w.settle()


# -- suspicion


def test_suspect_is_answered_when_the_bad_copy_is_quarantined() -> None:
    w = world()
    w.put(0, 1, KEYS)
    w.finish_all()
    grant = w.acquire(0, 1, KEYS)
    assert isinstance(grant, ac.Grant)
    w.rot(w.places(0, grant.where)[1])
    assert w.ask(ev.Suspect(0, 1, joined([b"b", b"c"]))) is None
    request = w.last_request
    w.probe(next(iter(w.probes)))
    answer = w.answers[request]
    assert isinstance(answer, ac.Answer)
    assert answer.value == 1
    assert w.get(1, KEYS, client=1) == [payload(1, k) for k in KEYS]


def test_suspect_of_a_good_block_is_answered() -> None:
    w = world()
    answer = w.ask(ev.Suspect(0, 1, joined([b"a"])))
    assert isinstance(answer, ac.Answer)
    assert answer.value == 0


@pytest.mark.parametrize("policy", ["hazard", "s3fifo"])
def test_a_flush_writes_whole_chains(policy: str) -> None:
    """Memory is nearly as large as what is below: no block there has its parent up here only."""
    w, dice = world(dram=8, nvme=9, slots=16, policy=policy), np.random.default_rng(1)
    chains = [[b"%02d-%02d" % (i, k) for k in range(11)] for i in range(60)]
    for i, keys in enumerate(chains):
        w.now += 1.0
        w.put(0, 1, keys)
        w.finish_all()
        w.get(1, chains[int(dice.integers(0, i + 1))])
        w.finish_all()
    w.send(ev.Flush())
    w.finish_all()
    blocks = w.p.residency.blocks
    below = np.flatnonzero(blocks.slot[1, : blocks.rows_touched] >= 0)
    parents = blocks.parent[below]
    assert len(below) > 130
    assert (blocks.slot[1, parents[parents >= 0]] >= 0).all()
