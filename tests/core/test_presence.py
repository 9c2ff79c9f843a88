"""Presence tables in the core. `World` compares them with the readable rows and with answers to requests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore import native
from kvstore.columns import zeros
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.queues.device_queue import FENCED, SERVING
from kvstore.core.residency import presence
from kvstore.types import PRESENCE_NOT_READY, PRESENCE_READY, PRESENCE_RETIRED
from tests.core.world import World

KEYS = [b"key%02d" % i for i in range(12)]


def table_of(w: World, namespace: int = 1) -> presence.PresenceTable:
    return w.p.residency.presence.tables[namespace]


def state_of(w: World) -> int:
    return int(table_of(w).words[0])


def filled(w: World) -> None:
    """Takes the steps that fill all tables."""
    while w.p.residency.presence.wakes_at() < math.inf:
        w.now = max(w.now, w.p.residency.presence.wakes_at())
        w.send(ev.Tick())


def world(**how: object) -> World:
    w = World(2, 4, **how)  # type: ignore[arg-type]
    w.open(1, 100)
    return w


def test_a_table_is_filled_in_steps_while_blocks_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_SCANNED_AT_ONCE", 3)
    monkeypatch.setattr(presence, "_ADDED_AT_ONCE", 2)
    w = world(slots=16)
    w.put(1, 1, KEYS[:6])
    w.send(ev.RetirePresence(1))
    w.put(1, 1, KEYS[6:8], KEYS[5])
    assert state_of(w) == PRESENCE_NOT_READY
    w.invalidate(1, KEYS[:3])
    w.put(1, 1, KEYS[:1])
    filled(w)
    assert state_of(w) == PRESENCE_READY
    before = w.found_in_tables
    assert (w.lookup(1, KEYS), sum(w.contains(1, KEYS))) == (1, 6)
    assert w.lookup(1, KEYS[3:6]) == 3
    assert w.found_in_tables > before or native.presence is None, "readers need the C extension"


def test_a_table_says_whether_blocks_may_be_stored_behind_missing_ones() -> None:
    w = world(slots=16)
    w.open(2, 100, independent=True)

    def gapless(namespace: int = 1) -> bool:
        return bool(table_of(w, namespace).words[2])

    def begin(keys: list[bytes], parent: bytes) -> tuple[ac.Reserved, np.ndarray]:
        room = w.reserve(1, 1, keys, parent)
        assert isinstance(room, ac.Reserved)
        return room, w.fill(1, keys, room)

    w.put(1, 1, KEYS[:3])
    w.put(1, 2, KEYS[:3])
    filled(w)
    assert (gapless(), gapless(2)) == (True, False), "independent blocks have no parents"
    first = begin(KEYS[3:5], KEYS[2])
    assert gapless(), "its parent is stored"
    second = begin(KEYS[5:7], KEYS[4])
    assert not gapless(), "its parent is being written"
    w.commit(1, *second)
    assert (gapless(), w.lookup(1, KEYS)) == (False, 3)
    w.commit(1, *first)
    assert (gapless(), w.lookup(1, KEYS)) == (True, 7)
    w.invalidate(1, KEYS[1:2])
    assert (gapless(), w.lookup(1, KEYS)) == (False, 1)
    gaps, said = w.p.residency.gaps, list[bool]()
    tell = gaps.on_change

    def told(number: int) -> None:
        tell(number)
        said.append(gapless())

    gaps.on_change = told
    again = begin(KEYS[1:2], KEYS[0])
    assert said == [False, False], "readers see a moment without gaps"
    assert (gapless(), w.lookup(1, KEYS)) == (False, 1)
    w.commit(1, *again)
    assert (gapless(), w.lookup(1, KEYS)) == (True, 7)


def test_a_table_answers_nothing_while_a_device_is_out_of_reach() -> None:
    w = world()
    w.put(1, 1, KEYS[:4])
    filled(w)
    assert state_of(w) == PRESENCE_READY
    w.send(ev.SetDevice(1, FENCED))
    assert state_of(w) == PRESENCE_NOT_READY
    w.send(ev.SetDevice(1, SERVING))
    assert state_of(w) == PRESENCE_READY


def test_other_tenants_do_not_see_blocks_that_they_may_not_map_yet() -> None:
    w = world(slots=8)
    w.put(1, 1, KEYS[:4])
    w.publish(1, 70000)
    w.put(1, 1, KEYS[4:6], KEYS[3])
    filled(w)
    before = w.found_in_tables
    assert (w.lookup(1, KEYS[:6]), w.lookup(1, KEYS[:6], tenant=1)) == (6, 0)
    assert w.contains(1, KEYS[:6], tenant=1)[:4] == [False] * 4
    assert w.found_in_tables > before or native.presence is None, "readers need the C extension"
    w.finish_all()
    w.move_extents()
    while w.copies:
        w.finish_all()
        w.send(ev.Tick())
    filled(w)
    assert w.lookup(1, KEYS[:6], tenant=1) == 6


def test_a_full_table_is_replaced_by_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_LEAST_BUCKETS", 1)
    w = world(slots=8)
    w.put(1, 1, KEYS[:2])
    filled(w)
    first, room_for = table_of(w), w.p.residency.presence.bytes_for
    assert first.cells.size == 8
    assert room_for(1) == presence.table_bytes(2)
    w.put(1, 1, KEYS[2:8], KEYS[1])
    assert int(first.words[0]) == PRESENCE_RETIRED
    filled(w)
    assert table_of(w).cells.size >= 16
    assert room_for(1) == presence.table_bytes(16), "there is room to grow on"
    assert w.lookup(1, KEYS) == 8


@pytest.mark.parametrize(
    "event",
    [
        ev.Forget(0, (1,)),
        ev.OpenNamespace(0, 1, 100, ttl_s=5.0),
        ev.Publish(0, 1, 70000),
        ev.RetirePresence(1),
    ],
    ids=["deleted", "TTL", "published", "by the daemon"],
)
def test_a_table_is_retired_once_it_could_be_wrong(event: ev.Event) -> None:
    w = world()
    w.put(1, 1, KEYS[:4])
    filled(w)
    table = table_of(w)
    retired = [a for a in w.p.handle(event, w.now) if isinstance(a, ac.PresenceRetired)]
    assert retired == [ac.PresenceRetired(1)]
    assert int(table.words[0]) == PRESENCE_RETIRED
    words = zeros(presence.table_bytes(0) // 8, np.uint64)
    again = w.p.handle(ev.SharePresence(1, words, 7), w.now)
    has_none = isinstance(event, ev.Forget | ev.OpenNamespace)
    assert [a for a in again if isinstance(a, ac.PresenceRetired)] == [ac.PresenceRetired(1)] * has_none


def test_memory_of_a_table_is_bounded_and_counted() -> None:
    assert presence.table_bytes(1 << 20) <= 32 * (1 << 20) + 64
    w = world()
    w.put(1, 1, KEYS[:1])
    assert w.p.residency.ram_bytes() > table_of(w).words.nbytes
    before = w.p.residency.ram_bytes()
    w.p.residency.presence.retire(1)
    assert before - w.p.residency.ram_bytes() == presence.table_bytes(0)
