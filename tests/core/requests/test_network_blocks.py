"""What is offered to the network, once each; what comes from there, and leases that are no use."""

from __future__ import annotations

import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.policy.admission import Rule
from tests.core.world import World, joined

CHAIN = [b"a", b"b", b"c", b"d"]


def offered(w: World) -> list[bytes]:
    """What the last event had offered."""
    found = [action.identity for action in w.actions if isinstance(action, ac.OfferBlocks)]
    return [identity.key(i) for identity in found for i in range(len(identity))]


def shared(rule: Rule | None = None, nvme: int = 0) -> World:
    w = World(4, nvme)
    w.open(1)
    w.send(ev.SetSharing(rule or Rule()))
    return w


def put(w: World, keys: list[bytes] = CHAIN, loading: bool = False) -> list[bytes]:
    """Stores a chain; what is offered because of that."""
    room = w.ask(ev.Reserve(0, 1, 1, joined(keys), b"", 0.0, loading=loading))
    assert isinstance(room, ac.Reserved), room
    w.commit(1, room, w.fill(1, keys, room))
    return offered(w)


def use(w: World, keys: list[bytes] = CHAIN, no_touch: bool = False) -> list[bytes]:
    """Reads a chain; what is offered then, which is when the next event comes."""
    grant = w.ask(ev.Acquire(0, 1, 1, joined(keys), 0.0, no_touch=no_touch))
    assert isinstance(grant, ac.Grant), grant
    w.send(ev.Release(1, grant.lease))
    return offered(w)


def test_a_block_is_offered_when_it_is_stored_and_never_again() -> None:
    w = shared()
    assert put(w) == CHAIN
    assert use(w) == use(w) == []


def test_a_block_stored_again_is_offered_again() -> None:
    w = shared()
    put(w)
    w.invalidate(1, CHAIN)
    assert put(w) == CHAIN


def test_nothing_is_offered_before_it_is_shared_nor_after() -> None:
    w = World(4, 0)
    w.open(1)
    assert put(w) == []
    w.send(ev.SetSharing(Rule()))
    assert use(w) == CHAIN, "what is there already, when it is used"
    w.send(ev.SetSharing(None))
    assert put(w, [b"x"]) == use(w) == []


def test_resumed_sharing_offers_used_blocks_again() -> None:
    w = shared()
    put(w)
    w.send(ev.SetSharing(None))
    w.send(ev.SetSharing(Rule()))
    assert use(w, CHAIN[:2]) == CHAIN[:2]


def test_with_twice_blocks_are_offered_at_their_second_use() -> None:
    w = shared(Rule("twice"))
    assert put(w) == []
    assert use(w, CHAIN[:3]) == CHAIN[:3]
    assert use(w) == CHAIN[3:]


def test_downloaded_blocks_are_not_offered() -> None:
    w = shared()
    assert put(w, loading=True) == []
    assert use(w) == []
    assert w.get(1, CHAIN) != []


def test_blocks_that_end_are_not_offered() -> None:
    w = shared()
    w.open(1, ttl_s=60.0)
    assert put(w) == []


@pytest.mark.parametrize("nvme", [0, 4])
def test_a_quiet_lease_is_no_use(nvme: int) -> None:
    w = shared(Rule("twice"), nvme)
    put(w)
    w.finish_all()
    before = dict(w.p.view.counters)
    assert use(w, no_touch=True) == use(w, no_touch=True) == []
    assert dict(w.p.view.counters) == before
    assert use(w) == CHAIN


def test_downloaded_blocks_are_not_weighed() -> None:
    """Somebody wants it: it is let in where a put would be refused as worth less."""
    w = World(2, 0, policy="hazard", slots=16, max_blocks=4096)
    w.open(1)
    for turn in range(200):
        keys = [b"%03d" % (turn % 3), b"x%02d" % (turn % 3)]
        w.put(1, 1, keys)
        w.get(1, keys)
    refused = loaded = 0
    for turn in range(900):
        key = b"n%04d" % turn
        w.put(1, 1, [key])
    refused = w.p.view.counters["refused_blocks"]
    assert refused > 0, "puts are weighed by now"
    for turn in range(20):
        key = b"l%04d" % turn
        room = w.ask(ev.Reserve(0, 1, 1, joined([key]), b"", 0.0, loading=True))
        assert isinstance(room, ac.Reserved), room
        loaded += w.commit(1, room, w.fill(1, [key], room)) if room.lease else 0
    assert loaded == 20
    assert w.p.view.counters["refused_blocks"] == refused


def test_the_view_has_the_stored_length_and_the_parents_of_a_chain() -> None:
    w = shared()
    put(w)
    assert w.p.view.stored(1, joined(CHAIN)) == 4
    assert w.p.view.stored(1, joined([b"a", b"x", b"c"])) == 1
    assert w.p.view.stored(2, joined(CHAIN)) == 0
    assert w.p.view.parents(1, joined([b"a", b"c", b"x"])) == [b"", b"b", b""]
