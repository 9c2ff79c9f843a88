"""What the core says of a block: where it is, what keeps it, what was decided about it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.block_table import Blocks
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.insight.explain import MOST_NAMESPACES
from kvstore.core.requests.leases import Limits
from kvstore.core.residency.decision_log import CAPACITY, EVERY_TIER, Decision, DecisionKind, Decisions
from kvstore.core.reuse.reuse import Reuse
from kvstore.types import EXPLAIN_KEYS
from tests.core.world import World, joined


def world(dram: int = 2, nvme: int = 0, **more: Any) -> World:
    w = World(dram, nvme, **more)
    w.open(1)
    return w


def explained(w: World, keys: list[bytes], *namespaces: int) -> list[dict[str, Any]]:
    answer = w.ask(ev.Explain(0, namespaces or (1,), joined(keys)))
    assert isinstance(answer, ac.Explained), answer
    return answer.blocks


def one(w: World, key: bytes) -> dict[str, Any]:
    [block] = explained(w, [key])
    return block


def decided(w: World, key: bytes) -> list[tuple[str, str]]:
    """What was decided about a key and in which tier, newest first."""
    return [(d["what"], d["tier"]) for b in explained(w, [key]) for d in b["decisions"]]


# -- what there is


def test_a_live_block_has_its_tiers_and_children() -> None:
    w = world(nvme=2)
    w.put(0, 1, [b"a", b"b", b"c"])
    w.finish_all()
    a, b = one(w, b"a"), one(w, b"b")
    assert (a["key"], a["namespace"], a["state"]) == (b"a", 1, "live")
    assert [(c["tier"], c["users"], c["policy"]) for c in a["copies"]] == [
        ("dram", 0, "lru"),
        ("nvme", 0, "lru"),
    ]
    places = [(i, c["extent"], c["slot"]) for i, c in enumerate(a["copies"])]
    assert places == [(0, *w_place(w, 0, b"a")), (1, *w_place(w, 1, b"a"))]
    assert (a["parent"], a["parent_state"], a["children"]) == (b"", "", 1)
    assert (b["parent"], b["parent_state"], b["children"]) == (b"a", "live", 1)
    assert (a["pinned_s"], a["expires_s"], a["moving"], a["decisions"]) == (None, None, [], [])


def w_place(w: World, tier: int, key: bytes) -> tuple[int, int]:
    """Where the world has a block's bytes on record."""
    if tier:
        return w.records[1, key].place[1:]
    [place] = [p for p, h in w.headers.items() if (h.namespace, h.key) == (1, key)]
    return place[1:]


def test_a_block_in_use_pinned_moving_or_mortal_says_so() -> None:
    w = World(2, 2)
    w.open(1, ttl_s=50.0)
    w.put(0, 1, [b"a"])
    assert one(w, b"a")["moving"] == ["down"]
    w.ask(ev.Pin(0, 1, joined([b"a"]), w.now + 9.0))
    w.acquire(0, 1, [b"a"])
    a = one(w, b"a")
    # The lease, and the copy that is on its way down.
    assert a["copies"][0]["users"] == 2
    assert 8.9 < a["pinned_s"] <= 9.0
    assert 49.9 < a["expires_s"] <= 50.0


def test_blocks_that_are_written_lost_or_over_say_so() -> None:
    w = world()
    w.reserve(0, 1, [b"a"])
    assert one(w, b"a")["state"] == "being written"
    w.put(1, 1, [b"p", b"q"])
    w.invalidate(1, [b"p"])
    assert one(w, b"p")["state"] == "hole"
    assert (one(w, b"q")["parent"], one(w, b"q")["parent_state"]) == (b"p", "hole")


def test_unknown_keys_are_left_out() -> None:
    w = world()
    w.open(2)
    w.put(0, 1, [b"a"])
    assert explained(w, [b"zz", b"xx"]) == []
    assert [(b["key"], b["namespace"]) for b in explained(w, [b"x", b"a"], 1, 2)] == [(b"a", 1)]
    assert explained(w, [b"a"], 2) == []
    w.invalidate(1, [b"a"])
    assert explained(w, [b"a"], 2) == []
    assert explained(w, [b"a"], 7) == []


def test_too_much_at_a_time_is_refused() -> None:
    w = world()
    many = [b"%03d" % i for i in range(EXPLAIN_KEYS + 1)]
    assert explained(w, many[:-1]) == []
    for keys, namespaces in ((many, (1,)), (many[:1], tuple(range(MOST_NAMESPACES + 1)))):
        denied = w.ask(ev.Explain(0, namespaces, joined(keys)))
        assert isinstance(denied, ac.Deny)
        assert "name tenant or model" in denied.hint


def test_uses_and_the_policys_view_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(dram=1, slots=2, policy="hazard")
    w.put(0, 1, [b"a"])
    w.now += 15.0
    assert w.get(1, [b"a"])
    w.now += 2.0
    a = one(w, b"a")
    assert (a["uses"], a["class"]) == (2, "used 2 or 3 times, up to 25 s apart, stored with many others")
    assert 1.8 < a["last_used_s"] < 2.3
    assert a["copies"][0]["policy"] == "hazard"
    assert a["copies"][0]["says"].startswith(a["class"])
    w.put(0, 1, [b"b", b"c"])
    [dropped] = one(w, b"a")["decisions"]
    assert (dropped["what"], dropped["class"]) == ("dropped", a["class"])
    assert dropped["score"] > 0


# -- what was decided


def test_a_leaf_that_made_way_was_dropped() -> None:
    w = world(dram=1)
    w.put(0, 1, [b"a"])
    w.now += 5.0
    w.put(0, 1, [b"b", b"c", b"d", b"e"])
    gone = one(w, b"a")
    assert gone["state"] == "not stored"
    assert "copies" not in gone
    [decision] = gone["decisions"]
    assert decision == {**decision, "what": "dropped", "tier": "dram"}
    assert decision["class"] == "used once, stored with many others"
    assert decision["score"] > 0
    assert 0 < decision["ago_s"] < 1.0


def test_a_copy_that_another_tier_has_too_was_evicted() -> None:
    w = world(dram=1, nvme=4)
    w.put(0, 1, [b"a"])
    w.finish_all()
    w.put(0, 1, [b"b", b"c", b"d", b"e"])
    assert decided(w, b"a") == [("evicted", "dram")]
    assert [c["tier"] for c in one(w, b"a")["copies"]] == ["nvme"]


def test_an_only_copy_that_was_written_down_first_was_demoted() -> None:
    w = world(dram=1, nvme=4, write_policy="on_evict")
    w.put(0, 1, [b"a", b"b", b"c", b"d"])
    w.reserve(1, 1, [b"e"], wait=9.0)
    assert decided(w, b"d") == []
    w.finish_all()
    assert decided(w, b"d") == [("demoted", "dram")]


def test_keys_without_room_were_denied() -> None:
    w = world(dram=1)
    w.put(0, 1, [b"a", b"b", b"c"])
    w.acquire(0, 1, [b"a", b"b", b"c"])
    room = w.reserve(1, 1, [b"x", b"y", b"z"])
    assert isinstance(room, ac.Reserved)
    assert room.status.tolist() == [ac.GRANTED, ac.DENIED, ac.DENIED]
    assert [decided(w, key) for key in (b"x", b"y", b"z")] == [[], [("denied", "dram")], [("denied", "dram")]]


def test_invalidated_expired_and_quarantined_blocks_are_distinguished() -> None:
    w = World(2, 0)
    w.open(1, ttl_s=50.0)
    w.put(0, 1, [b"a"])
    w.put(0, 1, [b"b"])
    w.put(0, 1, [b"c"])
    w.invalidate(1, [b"a"])
    w.ask(ev.Suspect(0, 1, joined([b"b"])))
    [place] = [p for p, h in w.headers.items() if h.key == b"b"]
    w.rot(place)
    w.probe(next(iter(w.probes)))
    w.pass_time(60.0)
    assert [decided(w, key) for key in (b"a", b"b", b"c")] == [
        [("invalidated", "")],
        [("quarantined", "dram")],
        [("expired", "")],
    ]


def test_refused_writes_are_recorded_as_unwritten() -> None:
    w = world(dram=2, nvme=1, nvme_slots=1)
    w.put(0, 1, [b"a"])
    w.finish_all()
    w.p.residency.pins.pin(w.p.residency.namespaces[1], np.array([0]), w.now + 99.0)
    w.put(0, 1, [b"b"])
    w.finish_all()
    assert decided(w, b"b") == [("unwritten", "nvme")]


# -- the ring


def rows_of(n: int, capacity: int = 16) -> tuple[Decisions, np.ndarray, Keys]:
    blocks = Blocks(2 * n, 1)
    keys = Keys(b"".join(b"%08d" % i for i in range(n)), 8)
    rows = blocks.take(3, keys, np.arange(n))
    return Decisions(blocks, Reuse(blocks, 64, 7), capacity), rows, keys


def test_the_newest_decisions_come_first_and_the_oldest_make_way() -> None:
    ring, rows, keys = rows_of(8)
    for now in range(5):
        ring.record(DecisionKind.EVICTED if now % 2 else DecisionKind.DEMOTED, 0, rows[:4], float(now))
    assert len(ring) == 16
    assert [(d.what, d.at) for d in ring.of(keys.words[0], 8).get(3, [])] == [
        (DecisionKind.DEMOTED, 4.0),
        (DecisionKind.EVICTED, 3.0),
        (DecisionKind.DEMOTED, 2.0),
        (DecisionKind.EVICTED, 1.0),
    ]
    assert list(ring.of(keys.words[0], 8)) == [3]
    ring.record(DecisionKind.EXPIRED, EVERY_TIER, rows, 9.0)
    ring.record(DecisionKind.EXPIRED, EVERY_TIER, rows[:7], 10.0)
    assert [d.at for d in ring.of(keys.words[0], 8).get(3, [])] == [10.0, 9.0]
    assert ring.of(keys.words[7], 8).get(3, []) == [Decision(DecisionKind.EXPIRED, None, 9.0, None, 0)]


def test_a_batch_longer_than_the_ring_leaves_its_end() -> None:
    ring, rows, keys = rows_of(40)
    ring.record(DecisionKind.DROPPED, 0, rows[:5], 1.0)
    ring.record(DecisionKind.DROPPED, 0, rows, 2.0)
    assert [i for i in range(40) if ring.of(keys.words[i], 8).get(3, [])] == list(range(24, 40))


def test_decisions_after_a_record_are_paged() -> None:
    ring, rows, keys = rows_of(40)
    ring.record(DecisionKind.DROPPED, 0, rows[:5], 1.0)
    ring.record_keys(DecisionKind.DENIED, 0, 7, keys, np.arange(40) == 20, 2.0)
    first, seen = ring.after(0, 4)
    assert ([n.place for n in first], seen) == ([0, 1, 2, 3], 4)
    rest, seen = ring.after(seen, 4)
    assert [(n.place, n.namespace, n.key, n.decision.what) for n in rest] == [
        (4, 3, keys[4], DecisionKind.DROPPED),
        (5, 7, keys[20], DecisionKind.DENIED),
    ]
    assert seen == 6
    assert ring.after(seen, 4) == ([], 6)
    assert [n.place for n in ring.after(0, 64, [DecisionKind.DENIED])[0]] == [5]
    assert [n.place for n in ring.after(0, 64, (), [3])[0]] == [0, 1, 2, 3, 4]
    assert ring.after(0, 64, [DecisionKind.DENIED], [3]) == ([], 6)
    ring.record(DecisionKind.EVICTED, 0, rows[:13], 3.0)
    over, seen = ring.after(0, 64)
    more, end = ring.after(seen, 64)
    assert [n.place for n in [*over, *more]] == list(range(3, 19))
    assert (over[0].key, end, ring.after(end, 64)) == (keys[3], 19, ([], 19))


def test_a_short_key_after_a_long_one_in_the_ring_is_whole() -> None:
    blocks = Blocks(8, 1)
    ring = Decisions(blocks, Reuse(blocks, 8, 7), capacity=1)
    for key in (b"l" * 64, b"short", b"m" * 64):
        ring.record_keys(DecisionKind.DENIED, 0, 1, Keys(key, len(key)), np.ones(1, bool), 0.0)
        [noted] = ring.after(0, 1)[0]
        assert noted.key == key
        words = Keys(key, len(key)).words[0]
        assert list(ring.of(words, len(key))) == [1]
        assert not ring.of(words[:1], 4)


def test_a_page_of_a_full_ring_is_found_at_once() -> None:
    ring, rows, _ = rows_of(64, CAPACITY)
    for i in range(CAPACITY // 64):
        ring.record(DecisionKind.EVICTED, 0, rows, float(i))
    place, pages, took = 0, 0, []
    while place < ring.written:
        start = time.perf_counter()
        found, place = ring.after(place, 64, [DecisionKind.DENIED], [3])
        took.append(time.perf_counter() - start)
        assert not found
        pages += 1
    assert pages == 16
    assert min(took) < 0.001


def test_a_full_ring_is_small_and_looked_through_at_once() -> None:
    blocks = Blocks(64, 1)
    keys = Keys(b"".join(b"%032d" % i for i in range(64)), 32)
    rows = blocks.take(3, keys, np.arange(64))
    ring = Decisions(blocks, Reuse(blocks, 64, 7))
    for i in range(CAPACITY // 64 + 1):
        ring.record(DecisionKind.EVICTED, 0, rows, float(i))
    assert ring.ram_bytes() == 82 * CAPACITY < 6 << 20
    took = []
    for _ in range(20):
        start = time.perf_counter()
        assert len(ring.of(keys.words[0], 32)[3]) == 8
        took.append(time.perf_counter() - start)
    assert min(took) < 0.001


def test_a_long_chain_of_decisions_does_not_end_the_core() -> None:
    w = world(dram=1, max_blocks=64, limits=Limits())
    for i in range(200):
        w.put(0, 1, [b"%03d" % i])
    assert decided(w, b"100") == [("dropped", "dram")]
