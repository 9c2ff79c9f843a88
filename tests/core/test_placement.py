"""What placement answers and does, event by event."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.placement import Limits
from kvstore.core.policy import POLICIES
from kvstore.types import ALIGN
from tests.core.world import World, joined, payload

STATUS = {ac.GRANTED: "granted", ac.PRESENT: "present", ac.PENDING: "pending", ac.DENIED: "denied"}
TIERS = ("dram", "nvme")


def told(w: World) -> list[tuple[object, ...]]:
    """The last event's actions as plain values, but for what is told of blocks: see test_told."""
    return [_plain(action) for action in w.actions if not isinstance(action, ac.CopyReport)]


def _plain(a: ac.Action) -> tuple[object, ...]:
    if isinstance(a, ac.Reserved):
        return ("room", *(STATUS[s] for s in a.status.tolist()))
    if isinstance(a, ac.Grant):
        return ("grant", len(a.where), a.slots["tier"].tolist())
    if isinstance(a, ac.Answer):
        return ("answer", a.value)
    if isinstance(a, ac.Deny):
        return ("deny", a.why)
    if isinstance(a, ac.NamespaceClosed):
        return ("closed", a.namespace)
    if isinstance(a, ac.FormatExtent):
        return ("format", TIERS[a.tier], a.extent, a.slot_bytes)
    keys = [a.identity.key(i) for i in range(len(a.identity))]
    if isinstance(a, ac.Copy):
        return ("copy", TIERS[a.source], TIERS[a.target], *keys)
    if isinstance(a, ac.WriteHeader | ac.Drop | ac.Probe):
        return (type(a).__name__.lower(), TIERS[a.tier], *keys)
    raise AssertionError(a)


def world(dram: int = 2, nvme: int = 0, **more: object) -> World:
    w = World(dram, nvme, **more)  # type: ignore[arg-type]
    w.open(1)
    return w


def full_of(w: World, n: int, prefix: bytes = b"r") -> list[bytes]:
    """Puts n blocks that are no chain, waiting for each to be written down."""
    keys = [prefix + b"%02d" % i for i in range(n)]
    for key in keys:
        assert w.put(0, 1, [key]) == 1
        w.finish_all()
    return keys


def room_of(action: ac.Action | None) -> ac.Reserved:
    assert isinstance(action, ac.Reserved), action
    return action


def grant_of(action: ac.Action | None) -> ac.Grant:
    assert isinstance(action, ac.Grant), action
    return action


def answer_of(action: ac.Action | None) -> int:
    assert isinstance(action, ac.Answer), action
    return action.value


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fails a test that would never end."""

    def late(*_: object) -> None:
        raise AssertionError(f"still busy after {seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


# -- storing and reading


def test_reserve_grants_slots_and_commit_makes_them_readable() -> None:
    w = world()
    room = room_of(w.reserve(0, 1, [b"a", b"b"]))
    assert told(w) == [("format", "dram", 0, ALIGN), ("room", "granted", "granted")]
    assert w.lookup(1, [b"a", b"b"]) == 0
    assert w.commit(0, room, w.fill(1, [b"a", b"b"], room)) == 2
    assert told(w) == [("writeheader", "dram", b"a", b"b"), ("answer", 2)]
    assert w.lookup(1, [b"a", b"b", b"c"]) == 2
    assert w.get(1, [b"a", b"b", b"c"]) == [payload(1, b"a"), payload(1, b"b")]


def test_acquire_grants_the_prefix_and_its_checksums() -> None:
    w = world()
    w.put(0, 1, [b"a", b"b"])
    grant = grant_of(w.acquire(0, 1, [b"a", b"b", b"x", b"b"]))
    assert told(w) == [("grant", 2, [1, 1])]
    assert grant.lease
    assert w.read(1, [b"a", b"b"], grant) == [payload(1, b"a"), payload(1, b"b")]


def test_a_miss_is_a_grant_of_nothing() -> None:
    w = world()
    grant = grant_of(w.acquire(0, 1, [b"x"]))
    assert (grant.lease, len(grant.where)) == (0, 0)
    assert told(w) == [("grant", 0, [])]


def test_another_namespace_is_another_block() -> None:
    w = world()
    w.open(2)
    w.put(0, 1, [b"a"])
    assert w.get(2, [b"a"]) == []
    w.put(0, 2, [b"a"])
    assert w.get(2, [b"a"]) == [payload(2, b"a")]
    assert w.get(1, [b"a"]) == [payload(1, b"a")]


def test_keys_that_differ_in_trailing_zeros_are_different() -> None:
    w = world()
    for key in (b"a", b"a\0", b"a\0\0\0\0\0\0\0", b"a" + bytes(63)):
        assert w.get(1, [key]) == []
        assert w.put(0, 1, [key]) == 1
    for key in (b"a", b"a\0", b"a\0\0\0\0\0\0\0", b"a" + bytes(63)):
        assert w.get(1, [key]) == [payload(1, key)]


def test_stored_blocks_are_not_granted_again() -> None:
    w = world()
    w.put(0, 1, [b"a"])
    w.reserve(0, 1, [b"a", b"b"])
    assert told(w) == [("room", "present", "granted")]
    w.reserve(1, 1, [b"a", b"b", b"c"])
    assert told(w) == [("room", "present", "pending", "granted")]


def test_two_writers_of_one_key_are_one() -> None:
    w = world()
    mine = room_of(w.reserve(0, 1, [b"a"]))
    theirs = room_of(w.reserve(1, 1, [b"a"]))
    assert theirs.lease == 0
    assert told(w) == [("room", "pending")]
    assert w.commit(0, mine, w.fill(1, [b"a"], mine)) == 1
    assert w.get(1, [b"a"]) == [payload(1, b"a")]


def test_a_reservation_with_nothing_to_write_is_no_lease() -> None:
    w = world()
    w.put(0, 1, [b"a"])
    room = room_of(w.reserve(0, 1, [b"a"]))
    assert room.lease == 0
    assert not w.p.leases.reservations


def test_a_key_twice_in_one_reservation_is_refused() -> None:
    w = world()
    w.reserve(0, 1, [b"a", b"b", b"a"])
    assert told(w) == [("deny", "a key occurs twice in one call")]


def test_a_chain_starts_at_a_root_or_at_a_stored_parent() -> None:
    w = world()
    w.reserve(0, 1, [b"c"], b"b")
    assert told(w) == [("deny", "the parent is not stored")]
    w.put(0, 1, [b"a", b"b"])
    assert w.put(0, 1, [b"c"], b"b") == 1
    assert w.lookup(1, [b"a", b"b", b"c"]) == 3


def test_a_parent_may_still_be_in_the_making() -> None:
    w = world()
    first = room_of(w.reserve(0, 1, [b"a"]))
    second = room_of(w.reserve(1, 1, [b"b"], b"a"))
    assert w.commit(0, first, w.fill(1, [b"a"], first)) == 1
    assert w.commit(1, second, w.fill(1, [b"b"], second)) == 1
    assert len(w.get(1, [b"a", b"b"])) == 2


def test_blocks_left_unwritten_are_given_up() -> None:
    w = world()
    room = room_of(w.reserve(0, 1, [b"a", b"b", b"c"]))
    assert w.commit(0, room, w.fill(1, [b"a", b"b", b"c"], room), [True, False, True]) == 2
    assert w.lookup(1, [b"a", b"b", b"c"]) == 1
    assert w.get(1, [b"c"]) == [payload(1, b"c")]
    w.settle()


def test_an_aborted_reservation_leaves_nothing() -> None:
    w = world()
    room = room_of(w.reserve(0, 1, [b"a", b"b"]))
    assert w.used() == 2 * ALIGN
    w.send(ev.Abort(0, room.lease))
    assert w.used() == 0
    assert w.get(1, [b"a"]) == []
    assert w.p.residency.blocks.used == 0


def test_a_commit_of_the_wrong_length_is_refused_and_frees_the_slots() -> None:
    w = world()
    room = room_of(w.reserve(0, 1, [b"a", b"b"]))
    w.ask(ev.Commit(0, 0, room.lease, np.zeros(1, np.uint64), np.ones(1, np.bool_)))
    assert told(w) == [("deny", "1 checksums for 2 blocks")]
    assert w.used() == 0


def test_only_the_reserving_client_commits_and_only_once() -> None:
    w = world()
    room = room_of(w.reserve(0, 1, [b"a"]))
    sums = w.fill(1, [b"a"], room)
    w.ask(ev.Commit(0, 1, room.lease, sums, np.ones(1, np.bool_)))
    assert told(w) == [("deny", f"no reservation {room.lease}")]
    assert w.commit(0, room, sums) == 1
    w.ask(ev.Commit(0, 0, room.lease, sums, np.ones(1, np.bool_)))
    assert told(w) == [("deny", f"no reservation {room.lease}")]


def test_a_lease_ends_only_by_its_owner() -> None:
    w = world(dram=1)
    keys = full_of(w, 4)
    grant = grant_of(w.acquire(0, 1, keys[:1]))
    w.send(ev.Release(1, grant.lease))
    assert w.p.leases.leases
    w.send(ev.Release(0, grant.lease))
    assert not w.p.leases.leases
    w.send(ev.Release(0, grant.lease))


def test_an_unknown_namespace_is_named() -> None:
    w = world()
    for event in (
        ev.Lookup(0, 9, joined([b"a"])),
        ev.Contains(0, 9, joined([b"a"])),
        ev.Acquire(0, 0, 9, joined([b"a"]), 1.0),
        ev.Reserve(0, 0, 9, joined([b"a"]), b"", 1.0),
        ev.Prefetch(0, 9, joined([b"a"])),
        ev.Pin(0, 9, joined([b"a"]), 1.0),
        ev.Unpin(0, 9, joined([b"a"])),
        ev.Invalidate(0, 9, joined([b"a"])),
    ):
        w.ask(event)
        assert told(w) == [("deny", "unknown namespace 9")]


def test_a_block_larger_than_an_extent_is_refused_at_once() -> None:
    w = world()
    w.ask(ev.OpenNamespace(0, 2, 10**6))
    [(kind, why)] = told(w)
    assert kind == "deny"
    assert "1000000 bytes does not fit" in str(why)


def test_no_keys_are_no_trouble() -> None:
    w = world()
    none = Keys(b"", 1)
    assert answer_of(w.ask(ev.Lookup(0, 1, none))) == 0
    assert len(grant_of(w.ask(ev.Acquire(0, 0, 1, none, 1.0))).where) == 0
    assert room_of(w.ask(ev.Reserve(0, 0, 1, none, b"", 1.0))).lease == 0
    assert answer_of(w.ask(ev.Prefetch(0, 1, none))) == 0
    assert answer_of(w.ask(ev.Invalidate(0, 1, none))) == 0


def test_a_key_twice_in_an_acquire_holds_its_slot_once() -> None:
    w = world()
    w.put(0, 1, [b"a"])
    grant = w.acquire(0, 1, [b"a", b"a"])
    w.invalidate(1, [b"a"])
    if isinstance(grant, ac.Grant) and grant.lease:
        w.send(ev.Release(0, grant.lease))
    w.settle()
    assert w.used() == 0


def test_a_key_twice_in_an_acquire_or_prefetch_is_promoted_once() -> None:
    for event in (
        ev.Acquire(0, 0, 1, joined([b"r00", b"r00"]), 1e9),
        ev.Prefetch(0, 1, joined([b"r00", b"r00"])),
    ):
        w = world(dram=1, nvme=4)
        full_of(w, 8)
        w.ask(event)
        w.finish_all()
        w.settle()


# -- limits


def test_batches_over_the_limit_are_refused_by_number() -> None:
    w = world(limits=Limits(batch_keys=2))
    for event in (
        ev.Lookup(0, 1, joined([b"a", b"b", b"c"])),
        ev.Reserve(0, 0, 1, joined([b"a", b"b", b"c"]), b"", 1.0),
        ev.Acquire(0, 0, 1, joined([b"a", b"b", b"c"]), 1.0),
    ):
        w.ask(event)
        assert told(w) == [("deny", "3 keys in one call")]


def test_leases_and_reservations_of_a_client_are_limited() -> None:
    w = world(limits=Limits(leases_per_client=2))
    w.put(0, 1, [b"a", b"b"])
    first = grant_of(w.acquire(0, 1, [b"a"]))
    w.reserve(0, 1, [b"c"])
    w.acquire(0, 1, [b"a"])
    assert told(w) == [("deny", "too many leases")]
    w.reserve(0, 1, [b"d"])
    assert told(w) == [("deny", "too many leases")]
    assert grant_of(w.acquire(1, 1, [b"a"])).lease
    w.send(ev.Release(0, first.lease))
    assert grant_of(w.acquire(0, 1, [b"a"])).lease
    w.settle()


def test_namespaces_are_limited() -> None:
    w = world(limits=Limits(namespaces=2))
    w.open(2)
    w.put(0, 1, [b"a"])
    w.put(0, 2, [b"a"])
    w.ask(ev.OpenNamespace(0, 3, 100))
    assert told(w) == [("deny", "2 namespaces are open, and all are in use")]
    w.open(2)


@pytest.mark.parametrize("nvme", [0, 2])
def test_usage_never_exceeds_the_limit(nvme: int) -> None:
    w = world(dram=2, nvme=nvme)
    for i in range(60):
        w.put(0, 1, [b"%02d" % i])
        if i % 3 == 0:
            w.finish_all()
        for state in w.p.residency.tiers:
            assert state.extents.used_bytes <= state.extents.limit_bytes
            assert state.extents.capacity_bytes <= state.extents.limit_bytes


# -- making room


def test_the_least_recently_used_block_is_evicted_first() -> None:
    w = world(dram=1)
    keys = full_of(w, 4)
    w.get(1, keys[:1])
    w.reserve(0, 1, [b"new"])
    assert told(w) == [("drop", "dram", keys[1]), ("room", "granted")]


def test_a_chain_is_evicted_from_its_tail() -> None:
    w = world(dram=1)
    w.put(0, 1, [b"a", b"b", b"c", b"d"])
    w.reserve(0, 1, [b"x", b"y"])
    assert told(w) == [("drop", "dram", b"d", b"c"), ("room", "granted", "granted")]
    assert w.lookup(1, [b"a", b"b", b"c", b"d"]) == 2


def test_a_parent_stays_while_its_child_is_read() -> None:
    w = world(dram=1)
    w.put(0, 1, [b"a", b"b", b"c"])
    w.put(0, 1, [b"x"])
    grant_of(w.acquire(0, 1, [b"a", b"b", b"c"]))
    w.reserve(1, 1, [b"y", b"z"])
    assert told(w) == [("drop", "dram", b"x"), ("room", "granted", "denied")]


def test_leased_blocks_are_not_evicted_and_denial_says_why() -> None:
    w = world(dram=1)
    keys = full_of(w, 4)
    leases = [grant_of(w.acquire(0, 1, [key])).lease for key in keys]
    room = room_of(w.reserve(1, 1, [b"new"]))
    assert told(w) == [("room", "denied")]
    assert room.why == "no room"
    w.send(ev.Release(0, leases[2]))
    w.reserve(1, 1, [b"new"])
    assert told(w) == [("drop", "dram", keys[2]), ("room", "granted")]


def test_a_chain_does_not_evict_its_own_parents() -> None:
    w = world(dram=1)
    w.put(0, 1, [b"a", b"b", b"c", b"d"])
    w.reserve(0, 1, [b"e", b"f"], b"d")
    assert told(w) == [("room", "denied", "denied")]
    assert w.lookup(1, [b"a", b"b", b"c", b"d"]) == 4


def test_part_of_a_chain_is_stored_where_all_does_not_fit() -> None:
    w = world(dram=1)
    keys = [b"%d" % i for i in range(6)]
    room = room_of(w.reserve(0, 1, keys))
    assert told(w)[-1] == ("room", *["granted"] * 4, "denied", "denied")
    w.commit(0, room, w.fill(1, keys, room))
    assert w.lookup(1, keys) == 4


def test_a_reservation_is_never_evicted() -> None:
    w = world(dram=1)
    w.reserve(0, 1, [b"a", b"b", b"c", b"d"])
    w.reserve(1, 1, [b"x"])
    assert told(w) == [("room", "denied")]


def test_pins_keep_blocks_until_their_time() -> None:
    w = world(dram=1)
    keys = full_of(w, 4)
    until = w.now + 10
    assert answer_of(w.ask(ev.Pin(0, 1, joined(keys[:1]), until))) == 1
    assert w.p.next_wakeup() == until
    w.put(0, 1, [b"n1"])
    assert w.get(1, keys[:1]) == [payload(1, keys[0])]
    w.now = until
    w.send(ev.Tick())
    assert w.p.next_wakeup() is None
    for i in range(4):
        w.put(0, 1, [b"x%d" % i])
    assert w.get(1, keys[:1]) == []


def test_a_pin_can_be_undone_and_lasts_as_long_as_the_longest_asked() -> None:
    w = world(dram=1)
    keys = full_of(w, 4)
    w.ask(ev.Pin(0, 1, joined(keys[:1]), w.now + 100))
    w.ask(ev.Pin(0, 1, joined(keys[:1]), w.now + 1))
    w.pass_time(2)
    assert w.p.next_wakeup() == pytest.approx(100, abs=1)
    assert answer_of(w.ask(ev.Unpin(0, 1, joined(keys[:1])))) == 1
    assert answer_of(w.ask(ev.Unpin(0, 1, joined(keys[:1])))) == 0
    assert w.p.next_wakeup() is None


def test_pins_leave_half_the_tier_free_to_move() -> None:
    w = world(dram=2)
    keys = full_of(w, 8)
    pinned = sum(answer_of(w.ask(ev.Pin(0, 1, joined([k]), w.now + 99))) for k in keys)
    assert 1 <= pinned <= 5
    assert w.put(0, 1, [b"x", b"y"]) == 2


def test_pins_end_when_they_were_said_to_in_steps_that_others_hardly_notice() -> None:
    w = world(dram=2, nvme=8)
    keys = [b"k%d" % i for i in range(8)]
    for key in keys:
        assert w.put(0, 1, [key]) == 1
    for i, key in enumerate(keys):
        w.ask(ev.Pin(0, 1, joined([key]), w.now + 1 + i / 1000))
    r = w.p.residency
    pinned = len(r.pins.ends)
    assert pinned > 1
    ticks = w.pass_time(0.9)
    assert len(r.pins.ends) == pinned
    ticks = w.pass_time(0.3)
    assert not r.pins.ends
    assert not r.pins.pinned_bytes[0]
    assert ticks <= 3
    assert w.p.next_wakeup() is None


def test_pinned_blocks_can_be_invalidated() -> None:
    w = world()
    w.put(0, 1, [b"a"])
    w.ask(ev.Pin(0, 1, joined([b"a"]), w.now + 99))
    assert w.invalidate(1, [b"a"]) == 1
    assert w.p.next_wakeup() is None
    assert w.get(1, [b"a"]) == []


def test_two_slot_sizes_share_the_extents() -> None:
    w = World(4, 0)
    w.open(1, 100)
    w.open(2, 2 * ALIGN)
    full_of(w, 16)
    w.reserve(0, 2, [b"big"])
    dropped, formatted, answer = told(w)
    assert dropped[:2] == ("drop", "dram")
    assert len(dropped) == 2 + 4
    assert (formatted[0], formatted[3]) == ("format", 2 * ALIGN)
    assert answer == ("room", "granted")


def test_a_slot_size_takes_over_no_more_than_an_even_share() -> None:
    w = World(4, 0)
    w.open(1, 100)
    w.open(2, 2 * ALIGN)
    full_of(w, 16)
    for i in range(10):
        w.put(0, 2, [b"%d" % i])
    extents = {p.slot_bytes: len(c.extents) for p, c in w.p.residency.tiers[0].slots.classes.items()}
    assert extents == {ALIGN: 2, 2 * ALIGN: 2}
    for i in range(10):
        w.put(0, 1, [b"n%02d" % i])
    extents = {p.slot_bytes: len(c.extents) for p, c in w.p.residency.tiers[0].slots.classes.items()}
    assert extents == {ALIGN: 2, 2 * ALIGN: 2}


def test_an_extent_in_use_is_not_taken_over() -> None:
    w = World(1, 0)
    w.open(1, 100)
    w.open(2, 2 * ALIGN)
    keys = full_of(w, 4)
    grant = grant_of(w.acquire(0, 1, keys[:1]))
    w.reserve(1, 2, [b"big"])
    assert told(w) == [("room", "denied")]
    w.send(ev.Release(0, grant.lease))
    w.reserve(1, 2, [b"big"])
    assert told(w)[-1] == ("room", "granted")


def test_extents_that_come_later_let_the_waiting_go_on() -> None:
    w = world(dram=1)
    w.p.residency.tiers[0].growing = True
    full_of(w, 4)
    for key in (b"r00", b"r01", b"r02", b"r03"):
        w.acquire(0, 1, [key])
    assert w.reserve(1, 1, [b"new"], wait=1.0) is None
    waiting = w.last_request
    w.send(ev.Release(0, 2**32))
    assert waiting not in w.answers
    w.send(ev.ExtentsEnd(0))
    assert told(w) == [("room", "denied")]


@pytest.mark.parametrize("late", ["invalidated", "of the wrong length"])
def test_a_commit_that_frees_slots_lets_the_waiting_go_on(late: str) -> None:
    w = world(dram=1)
    room = room_of(w.reserve(0, 1, [b"a", b"b", b"c", b"d"]))
    if late == "invalidated":
        w.invalidate(1, [b"c", b"d"])
    # Somebody waits only while more room may come.
    w.p.residency.tiers[0].growing = True
    assert w.reserve(1, 1, [b"x", b"y"], wait=1.0) is None
    waiting = w.last_request
    n = 4 if late == "invalidated" else 3
    event = ev.Commit(0, 0, room.lease, np.arange(n, dtype=np.uint64), np.ones(n, np.bool_))
    w.ask(event)
    assert room_of(w.answers.get(waiting)).status.tolist() == [ac.GRANTED, ac.GRANTED]


def test_new_blocks_find_a_row_even_when_all_rows_are_taken() -> None:
    w = world(dram=1, nvme=4, max_blocks=16)
    stored = []
    for i in range(24):
        stored.append(w.put(0, 1, [b"%02d" % i]))
        w.finish_all()
    assert stored == [1] * 24


def test_a_lower_tier_without_room_does_not_stop_eviction() -> None:
    w = world(dram=1, nvme=4, nvme_gets=0)
    assert [w.put(0, 1, [b"%d" % i]) for i in range(9)] == [1] * 9


def test_room_is_found_when_the_lower_tier_has_only_parents() -> None:
    w = World(dram=1, nvme=1)
    w.open(1)
    chain = [b"k%d" % i for i in range(8)]
    assert w.put(0, 1, chain[:4]) == 4
    w.finish_all()
    assert w.put(0, 1, chain[4:], parent=chain[3]) == 4
    w.finish_all()
    assert w.put(0, 1, [b"other"]) == 1
    assert w.lookup(1, chain) == 7


def test_blocks_too_large_for_the_lower_tier_can_be_evicted() -> None:
    w = World(1, 4, slots=12, nvme_slots=2)
    w.open(1, 3 * ALIGN)
    assert [w.put(0, 1, [b"%d" % i]) for i in range(9)] == [1] * 9


# -- copies between tiers


def test_write_through_copies_down_after_every_commit() -> None:
    w = world(nvme=4)
    w.put(0, 1, [b"a", b"b"])
    assert told(w) == [
        ("writeheader", "dram", b"a", b"b"),
        ("answer", 2),
        ("format", "nvme", 0, ALIGN),
        ("copy", "dram", "nvme", b"a", b"b"),
    ]
    [copy] = w.copies.values()
    assert copy.parents == [b"", b"a"]
    w.finish_all()
    assert told(w) == []
    assert w.used(1) == 2 * ALIGN


def test_a_reused_row_is_recorded_with_its_new_size() -> None:
    w = World(dram=4, nvme=8)
    w.open(1)
    w.open(3, 5000)
    busy = [b"b%d" % i for i in range(4)]
    for key in busy:
        w.put(0, 1, [key])
    assert len(w.copies) == 4
    w.put(0, 1, [b"x0", b"x1"])
    w.invalidate(1, [b"x1"])
    w.put(0, 3, [b"other"])
    while w.copies:
        for copy in w.copies.values():
            sizes = {1: ALIGN, 3: 2 * ALIGN}
            cut = {w.kept[1][extent] for extent in copy.target_where.extent.tolist()}
            assert {sizes[n] for n in copy.identity.namespace.tolist()} == cut
        w.finish(next(iter(w.copies)), [])
    w.restart()
    assert w.lookup(1, [b"x0"]) == w.lookup(3, [b"other"]) == 1


def test_on_evict_writes_only_evicted_blocks() -> None:
    w = world(dram=1, nvme=4, write_policy="on_evict")
    keys = full_of(w, 4)
    assert w.used(1) == 0
    assert w.reserve(0, 1, [b"new"], wait=1.0) is None
    assert ("copy", "dram", "nvme", keys[0]) in told(w)
    waiting = w.last_request
    w.finish_all()
    assert isinstance(w.answers[waiting], ac.Reserved)
    assert ("drop", "dram", keys[0]) in told(w)
    assert w.get(1, keys[:1]) == [payload(1, keys[0])]


def test_a_block_is_dropped_from_dram_at_once_when_nvme_has_it() -> None:
    w = world(dram=1, nvme=4)
    keys = full_of(w, 4)
    w.reserve(0, 1, [b"new"])
    assert told(w) == [("drop", "dram", keys[0]), ("room", "granted")]
    assert w.lookup(1, keys[:1]) == 1


def test_a_hit_below_is_promoted_and_the_lower_copy_kept() -> None:
    w = world(dram=1, nvme=4)
    keys = full_of(w, 8)
    assert w.acquire(0, 1, keys[:1]) is None
    assert ("copy", "nvme", "dram", keys[0]) in told(w)
    asked = w.last_request
    w.finish_all()
    assert told(w) == [("writeheader", "dram", keys[0]), ("grant", 1, [2])]
    assert w.read(1, keys[:1], grant_of(w.answers[asked])) == [payload(1, keys[0])]
    assert (1, keys[0]) in w.records


def test_a_promotion_is_joined_not_repeated() -> None:
    w = world(dram=1, nvme=4)
    keys = full_of(w, 8)
    assert w.acquire(0, 1, keys[:1]) is None
    first = w.last_request
    assert w.acquire(1, 1, keys[:1]) is None
    assert told(w) == []
    second = w.last_request
    assert len(w.copies) == 1
    w.finish_all()
    assert len(grant_of(w.answers[first]).where) == len(grant_of(w.answers[second]).where) == 1


def test_the_deadline_cuts_the_prefix() -> None:
    w = world(dram=2, nvme=4)
    w.put(0, 1, [b"a", b"b", b"c"])
    w.finish_all()
    full_of(w, 8)
    w.get(1, [b"a"])
    assert w.lookup(1, [b"a", b"b", b"c"]) == 3
    assert w.acquire(0, 1, [b"a", b"b", b"c"], wait=0.5) is None
    asked = w.last_request
    w.now += 0.6
    w.send(ev.Tick())
    assert told(w) == [("grant", 1, [1])]
    w.finish_all()
    assert len(grant_of(w.answers[asked]).where) == 1
    assert len(w.get(1, [b"a", b"b", b"c"])) == 3


def test_a_deadline_that_has_passed_waits_for_nothing() -> None:
    w = world(dram=1, nvme=4)
    keys = full_of(w, 8)
    grant = grant_of(w.acquire(0, 1, keys[:1], wait=0.0))
    assert len(grant.where) == 0
    w.finish_all()
    assert len(grant_of(w.acquire(0, 1, keys[:1], wait=0.0)).where) == 1


def test_copies_may_end_out_of_order() -> None:
    w = world(dram=2, nvme=4)
    for key in (b"a", b"b", b"c"):
        w.put(0, 1, [key])
    for transfer in sorted(w.copies, reverse=True):
        w.finish(transfer, [])
    w.settle()
    w.restart()
    assert [w.get(1, [key]) for key in (b"a", b"b", b"c")] == [[payload(1, k)] for k in (b"a", b"b", b"c")]


def test_a_copy_that_failed_does_not_become_readable() -> None:
    w = world(dram=1, nvme=4)
    w.put(0, 1, [b"a"])
    w.finish(next(iter(w.copies)), [ev.FAILED])
    assert w.used(1) == 0
    assert w.p.view.counters["failed_blocks"] == 1
    w.restart()
    assert w.get(1, [b"a"]) == []


def test_a_promotion_that_failed_is_a_miss_and_can_be_tried_again() -> None:
    w = world(dram=1, nvme=4)
    keys = full_of(w, 8)
    assert w.acquire(0, 1, keys[:1]) is None
    w.finish(next(iter(w.copies)), [ev.FAILED])
    assert told(w) == [("grant", 0, [])]
    assert w.get(1, keys[:1]) == [payload(1, keys[0])]


def test_a_corrupt_block_on_nvme_is_quarantined_and_a_miss() -> None:
    w = world(dram=1, nvme=4)
    keys = full_of(w, 8)
    w.rot(w.records[1, keys[0]].place)
    assert w.acquire(0, 1, keys[:1]) is None
    w.finish_all()
    assert ("drop", "nvme", keys[0]) in told(w)
    assert told(w)[-1] == ("grant", 0, [])
    assert w.p.view.counters["quarantined_blocks"] == 1
    assert len(w.p.residency.tiers[1].slots.retired) == 1
    assert w.lookup(1, keys[:1]) == 0
    assert w.put(0, 1, keys[:1]) == 1


def test_quarantine_in_dram_falls_back_to_the_lower_copy() -> None:
    w = world(dram=1, nvme=4)
    w.put(0, 1, [b"a"])
    w.finish_all()
    grant = grant_of(w.acquire(0, 1, [b"a"]))
    w.rot(w.places(0, grant.where)[0])
    w.send(ev.Suspect(0, 1, joined([b"a"])))
    assert told(w) == [("probe", "dram", b"a")]
    w.probe(next(iter(w.probes)))
    assert told(w) == [("drop", "dram", b"a")]
    w.send(ev.Release(0, grant.lease))
    assert w.get(1, [b"a"]) == [payload(1, b"a")]
    assert w.p.residency.tiers[0].slots.retired


def test_a_quarantined_slot_is_not_used_again() -> None:
    w = world(dram=1)
    w.put(0, 1, [b"a"])
    w.rot((0, 0, 0))
    w.send(ev.Suspect(0, 1, joined([b"a"])))
    w.probe(next(iter(w.probes)))
    keys = [b"%d" % i for i in range(4)]
    room = room_of(w.reserve(0, 1, keys))
    assert told(w)[-1] == ("room", "granted", "granted", "granted", "denied")
    assert (0, 0, 0) not in w.places(0, room.where)


def test_a_false_alarm_changes_nothing() -> None:
    w = world()
    w.put(0, 1, [b"a"])
    w.send(ev.Suspect(0, 1, joined([b"a", b"x"])))
    w.probe(next(iter(w.probes)))
    assert told(w) == []
    assert w.get(1, [b"a"]) == [payload(1, b"a")]


def test_a_device_that_keeps_failing_is_left_alone_for_a_while() -> None:
    w = world(dram=2, nvme=4)
    for i in range(8):
        w.put(0, 1, [b"%d" % i])
        while w.copies:
            w.finish(next(iter(w.copies)), [ev.FAILED] * 8)
    assert w.p.residency.tiers[1].device.writes.opened_until > w.now
    assert w.put(0, 1, [b"x"]) == 1
    assert not w.copies
    wake = w.p.next_wakeup()
    assert wake is not None
    w.now = wake
    w.send(ev.Tick())
    assert w.reserve(0, 1, [b"y"], wait=1.0) is None
    assert [action[0] for action in told(w)] == ["copy"]


def test_a_request_that_waits_for_demotions_starts_no_more() -> None:
    w = world(dram=30, nvme=8, write_policy="on_evict")
    w.open(2)
    for i in range(60):
        w.put(0, 1, [b"a%d" % i])
        w.put(0, 2, [b"b%d" % i])
    assert w.reserve(0, 1, [b"n%d" % i for i in range(4)], wait=1.0) is None
    waiting = w.last_request
    assert sorted(len(copy.identity) for copy in w.copies.values()) == [2, 2], "of one namespace each"
    w.finish(next(iter(w.copies)), [])
    assert [len(copy.identity) for copy in w.copies.values()] == [2]
    w.finish_all()
    assert room_of(w.answers[waiting]).status.tolist() == [ac.GRANTED] * 4
    assert w.p.view.counters["written_blocks"] == 4


def test_dram_evicts_leaves_while_the_device_is_closed() -> None:
    w = world(dram=1, nvme=4)
    w.p.residency.tiers[1].device.writes.opened_until = 1e9
    assert [w.put(0, 1, [b"%d" % i]) for i in range(8)] == [1] * 8


def test_prefetch_starts_promotions_without_a_waiter() -> None:
    w = world(dram=2, nvme=4)
    keys = full_of(w, 12)
    assert answer_of(w.ask(ev.Prefetch(0, 1, joined(keys[:1])))) == 1
    assert ("copy", "nvme", "dram", keys[0]) in told(w)
    assert answer_of(w.ask(ev.Prefetch(0, 1, joined(keys[:1])))) == 1
    assert len(w.copies) == 1
    w.finish_all()
    assert len(grant_of(w.acquire(0, 1, keys[:1], wait=0.0)).where) == 1


def test_prefetch_takes_a_small_part_of_the_tier() -> None:
    w = world(dram=4, nvme=16)
    chain = [b"c%02d" % i for i in range(16)]
    w.put(0, 1, chain)
    w.finish_all()
    full_of(w, 16)
    assert answer_of(w.ask(ev.Prefetch(0, 1, joined(chain)))) == 2
    assert sum(len(copy.identity) for copy in w.copies.values()) == 2


# -- going away


def test_invalidated_blocks_are_misses_everywhere() -> None:
    w = world(dram=1, nvme=4)
    w.put(0, 1, [b"a", b"b"])
    w.finish_all()
    assert w.invalidate(1, [b"a", b"b"]) == 2
    assert told(w) == [("drop", "dram", b"a", b"b"), ("drop", "nvme", b"a", b"b"), ("answer", 2)]
    assert w.get(1, [b"a"]) == []
    assert not w.records
    assert w.p.residency.blocks.used == 0


def test_a_reader_keeps_its_slot_when_the_block_is_invalidated() -> None:
    w = world(dram=1)
    full_of(w, 4)
    grant = grant_of(w.acquire(0, 1, [b"r00"]))
    [place] = w.places(0, grant.where)
    w.invalidate(1, [b"r00"])
    room = room_of(w.reserve(1, 1, [b"w", b"x", b"y", b"z"]))
    assert place not in w.places(0, room.where)
    assert w.bytes[place] == payload(1, b"r00")
    assert place not in w.headers
    w.send(ev.Release(0, grant.lease))
    assert w.used() == 3 * ALIGN


def test_a_block_invalidated_while_it_is_written_is_not_stored() -> None:
    w = world()
    room = room_of(w.reserve(0, 1, [b"a", b"b"]))
    assert w.invalidate(1, [b"a"]) == 0
    assert w.commit(0, room, w.fill(1, [b"a", b"b"], room)) == 1
    assert w.get(1, [b"a"]) == []
    assert w.get(1, [b"b"]) == [payload(1, b"b")]


def test_a_key_invalidated_while_written_can_be_reserved_by_another() -> None:
    w = world()
    mine = room_of(w.reserve(0, 1, [b"a"]))
    w.invalidate(1, [b"a"])
    theirs = room_of(w.reserve(1, 1, [b"a"]))
    assert theirs.lease
    assert w.commit(1, theirs, w.fill(1, [b"a"], theirs, salt=2)) == 1
    assert w.commit(0, mine, w.fill(1, [b"a"], mine, salt=1)) == 0
    assert w.get(1, [b"a"]) == [payload(1, b"a", 2)]


def test_a_block_invalidated_on_its_way_down_does_not_arrive() -> None:
    w = world(dram=1, nvme=4)
    w.put(0, 1, [b"a"])
    w.invalidate(1, [b"a"])
    assert ("drop", "nvme", b"a") in told(w)
    w.finish_all()
    assert told(w) == []
    assert not w.records
    assert w.used(0) == w.used(1) == 0


def test_a_block_invalidated_on_its_way_up_is_a_miss() -> None:
    w = world(dram=1, nvme=4)
    keys = full_of(w, 8)
    assert w.acquire(0, 1, keys[:1]) is None
    w.invalidate(1, keys[:1])
    assert ("grant", 0, []) in told(w)
    w.finish_all()
    assert w.get(1, keys[:1]) == []
    w.settle()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_put_again_while_its_old_copy_is_under_way_survives_a_restart(order: tuple[int, int]) -> None:
    w = world(dram=1, nvme=4)
    w.put(0, 1, [b"a"], salt=1)
    w.invalidate(1, [b"a"])
    w.put(0, 1, [b"a"], salt=2)
    for _ in order:
        if not w.copies:
            break
        copies = sorted(w.copies)
        w.finish(copies[order[0] % len(copies)], [])
    w.finish_all()
    w.restart()
    assert w.get(1, [b"a"]) == [payload(1, b"a", 2)]


def test_a_lost_parent_is_a_hole_until_it_is_stored_again() -> None:
    w = world()
    w.put(0, 1, [b"a", b"b", b"c"])
    w.invalidate(1, [b"b"])
    assert w.lookup(1, [b"a", b"b", b"c"]) == 1
    assert w.get(1, [b"a", b"b", b"c"]) == [payload(1, b"a")]
    room = room_of(w.reserve(0, 1, [b"a", b"b", b"c"]))
    assert told(w) == [("room", "present", "granted", "present")]
    w.commit(0, room, w.fill(1, [b"a", b"b", b"c"], room, salt=3))
    assert w.lookup(1, [b"a", b"b", b"c"]) == 3
    assert w.get(1, [b"a", b"b", b"c"]) == [payload(1, b"a"), payload(1, b"b", 3), payload(1, b"c")]


def test_a_hole_is_freed_with_its_last_child() -> None:
    w = world()
    w.put(0, 1, [b"a", b"b", b"c"])
    w.invalidate(1, [b"a", b"b"])
    assert w.p.residency.blocks.used == 3
    w.invalidate(1, [b"c"])
    assert w.p.residency.blocks.used == 0


def test_a_parent_lost_while_room_is_made_for_its_child_leaves_no_hole() -> None:
    w = World(1, 1, write_policy="on_evict")
    w.open(1)
    w.open(3, ALIGN + 1)
    w.put(0, 1, [b"a"])
    w.put(0, 3, [b"x"])
    w.finish_all()
    assert w.put(0, 3, [b"x"]) == 1
    w.reserve(0, 1, [b"b"], b"a")
    w.settle()
    assert not w.p.residency.gaps.holes[1]


def test_nothing_can_be_hung_on_a_hole() -> None:
    w = world()
    w.put(0, 1, [b"a", b"b"])
    w.invalidate(1, [b"a"])
    w.reserve(0, 1, [b"x"], b"a")
    assert told(w) == [("deny", "the parent is not stored")]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_named_backwards_is_used_once(policy: str) -> None:
    """Policies take distinct rows: to be told of one twice would make them count wrong."""
    w = world(dram=1, slots=4, policy=policy)
    w.put(0, 1, [b"a", b"b", b"c"])
    for keys in ([b"b", b"a"], [b"c", b"x", b"a"], [b"c", b"y", b"b"]):
        room = room_of(w.reserve(0, 1, keys, b"a"))
        if room.lease:
            w.commit(0, room, w.fill(1, keys, room))
    w.put(0, 1, [b"z"])
    assert w.used() == 4 * ALIGN
    w.settle()


def test_look_ups_promise_nothing_while_a_parent_is_being_written() -> None:
    w = world()
    w.reserve(0, 1, [b"a"])
    w.put(1, 1, [b"b"], b"a")
    assert w.lookup(1, [b"a", b"b"]) == 0
    w = world()
    w.put(0, 1, [b"a", b"b"])
    w.invalidate(1, [b"a"])
    w.reserve(0, 1, [b"a"])
    assert w.lookup(1, [b"a", b"b"]) == 0


def test_a_chain_cannot_be_its_own_ancestor() -> None:
    w = world()
    w.put(0, 1, [b"a", b"b"])
    w.invalidate(1, [b"a"])
    with within(5):
        w.put(0, 1, [b"a"], b"b")
        w.get(1, [b"b"])
        w.get(1, [b"a"])


def test_a_lost_client_frees_everything_at_once() -> None:
    w = world(dram=1, nvme=4)
    keys = full_of(w, 4)
    w.acquire(0, 1, keys[2:3])
    w.reserve(0, 1, [b"n1"])
    w.acquire(0, 1, keys[:1])
    w.reserve(0, 1, [b"n2", b"n3", b"n4"], wait=5.0)
    w.send(ev.ClientLost(0))
    assert not w.p.leases.leases
    assert not w.p.leases.reservations
    assert not w.p.leases.waiting
    assert not w.p.leases.stalled
    assert w.lookup(1, [b"n1"]) == 0
    assert w.put(1, 1, [b"w", b"x", b"y"]) == 3


def test_an_unfinished_put_of_a_lost_client_shows_nothing() -> None:
    w = world()
    room = room_of(w.reserve(0, 1, [b"a", b"b"]))
    w.fill(1, [b"a", b"b"], room)
    w.send(ev.ClientLost(0))
    assert w.used() == 0
    assert w.get(1, [b"a"]) == []
    assert w.put(1, 1, [b"a", b"b"]) == 2


# -- restarts


def test_recorded_blocks_are_restored() -> None:
    w = world(dram=2, nvme=4)
    w.put(0, 1, [b"a", b"b", b"c"])
    w.finish_all()
    w.put(0, 1, [b"d"], b"c")
    w.restart()
    assert w.lookup(1, [b"a", b"b", b"c", b"d"]) == 3
    assert w.get(1, [b"a", b"b", b"c", b"d"]) == [payload(1, k) for k in (b"a", b"b", b"c")]
    assert w.p.view.counters["restored_blocks_nvme"] == 3


def test_restored_chains_are_chains_again() -> None:
    w = world(dram=1, nvme=1)
    w.put(0, 1, [b"a", b"b", b"c", b"d"])
    w.finish_all()
    w.restart()
    assert w.put(0, 1, [b"x"]) == 1
    w.finish_all()
    assert w.lookup(1, [b"a", b"b", b"c", b"d"]) == 3


def test_restored_blocks_leave_oldest_first() -> None:
    w = world(dram=1, nvme=1)
    keys = full_of(w, 4)
    w.restart()
    w.put(0, 1, [b"x"])
    w.finish_all()
    assert [w.lookup(1, [k]) for k in keys] == [0, 1, 1, 1]


def test_restored_blocks_without_their_parents_wait_for_them() -> None:
    w = world(dram=2, nvme=4)
    w.put(0, 1, [b"a", b"b", b"c"])
    w.finish_all()
    del w.records[1, b"a"]
    w.restart()
    assert w.lookup(1, [b"a", b"b", b"c"]) == 0
    assert w.get(1, [b"a", b"b", b"c"]) == []
    room = room_of(w.reserve(0, 1, [b"a", b"b", b"c"]))
    assert told(w)[-1] == ("room", "granted", "present", "present")
    w.commit(0, room, w.fill(1, [b"a", b"b", b"c"], room))
    assert len(w.get(1, [b"a", b"b", b"c"])) == 3


def test_restore_takes_keys_and_parents_of_any_length() -> None:
    w = world(dram=1, nvme=4)
    w.put(0, 1, [b"a"])
    w.put(0, 1, [b"a\0\0"], b"a")
    w.put(0, 1, [b"b" * 64], b"a\0\0")
    w.finish_all()
    w.restart()
    for key in (b"a", b"a\0\0", b"b" * 64):
        assert w.get(1, [key]) == [payload(1, key)]
    w.invalidate(1, [b"a"])
    assert w.p.residency.blocks.used == 3


def test_fewer_rows_than_records_lose_some_and_start_all_the_same() -> None:
    w = world(dram=1, nvme=4, max_blocks=32)
    keys = full_of(w, 12)
    w.max_blocks = 8
    w.restart()
    assert sum(w.lookup(1, [key]) for key in keys) in range(1, 9)


def test_flush_writes_blocks_that_only_dram_has() -> None:
    w = world(dram=2, nvme=4, write_policy="on_evict")
    w.put(0, 1, [b"a", b"b"])
    w.put(0, 1, [b"c"])
    assert not w.copies
    w.send(ev.Flush())
    w.finish_all()
    w.restart()
    assert w.get(1, [b"a", b"b"]) == [payload(1, b"a"), payload(1, b"b")]
    assert w.get(1, [b"c"]) == [payload(1, b"c")]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_keys_that_are_no_chain_count_once_each(policy: str) -> None:
    w = world(policy=policy)
    w.put(0, 1, [b"a", b"b", b"c"])
    for _ in range(40):
        # The first one's ancestors are asked for too.
        assert w.get(1, [b"c", b"a", b"b"]) == [payload(1, b"c"), payload(1, b"a"), payload(1, b"b")]
    w.p.residency.settle()
    [known] = w.p.residency.tiers[0].policies.values()
    assert len(known) == 3
    w.p.check()


def test_a_chain_that_arrives_out_of_order_is_in_chain_order() -> None:
    w = World(2, 2, slots=7)
    w.open(1)
    keys = [b"a", b"b", b"c", b"d"]
    w.put(0, 1, keys)
    w.finish_all()
    r = w.p.residency
    rows = r.index.find(1, joined(keys))
    for some in (rows[::-1], rows[[2, 0, 1, 3]], rows[[3, 1]]):
        assert r.chains.with_ancestors(some).tolist() == rows.tolist()
        r.refresh(some, r.namespaces[1])
        r.settle()
        for tier, pool in enumerate(r.namespaces[1].pools):
            assert r.topology.policy(tier, pool).coldest(9, w.now).tolist() == rows[::-1].tolist()


def test_long_leases_on_the_coldest_blocks_do_not_stop_eviction() -> None:
    w = World(200, 0, slots=8, max_blocks=2048, limits=Limits(leases_per_client=4096))
    w.open(1)
    keys = [b"%04d" % i for i in range(1600)]
    held = []
    for key in keys:
        w.put(0, 1, [key])
        if len(held) < 1400:
            held.append(grant_of(w.acquire(1, 1, [key])))
    for i in range(100):
        new = [b"n%03d" % i]
        w.put(0, 1, new)
        assert w.lookup(1, new) == 1, f"put {i} is refused though 200 blocks are nobody's"
    for each in held:
        w.send(ev.Release(1, each.lease))
