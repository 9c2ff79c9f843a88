"""Independent namespaces: every block is a root, from its put over eviction to recovery."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.policy import POLICIES
from tests.core.world import World, joined, payload

KEYS = [b"a", b"b", b"c", b"d"]


def world(dram: int = 2, nvme: int = 4, **more: object) -> World:
    w = World(dram, nvme, **more)  # type: ignore[arg-type]
    w.open(1, independent=True)
    return w


def stored(w: World, keys: list[bytes] = KEYS) -> str:
    """The keys that are stored."""
    there = w.contains(1, keys)
    return b"".join(key for key, is_stored in zip(keys, there, strict=True) if is_stored).decode()


def test_a_parent_is_refused_and_nothing_is_stored() -> None:
    w = world()
    w.put(0, 1, KEYS[:1])
    answer = w.reserve(0, 1, KEYS[1:], parent=KEYS[0])
    assert isinstance(answer, ac.Deny)
    assert answer.why == "blocks of an independent namespace have no parent"
    assert stored(w) == "a"


def test_blocks_of_one_put_are_not_each_others_parents() -> None:
    w = world()
    w.put(0, 1, KEYS)
    assert w.p.view.parents(1, joined(KEYS)) == [b""] * 4
    assert w.invalidate(1, [b"b"]) == 1
    assert w.p.residency.blocks.used == 3, "no hole is left"
    assert (stored(w), w.lookup(1, KEYS), w.lookup(1, KEYS[2:])) == ("acd", 1, 2)


def test_blocks_are_evicted_one_by_one_in_the_order_of_their_use() -> None:
    w = world(1, 0)
    for key in KEYS:
        w.put(0, 1, [key])
    w.get(1, [b"a"])
    w.get(1, [b"c"])
    for new, left in ((b"e", "acde"), (b"f", "acef"), (b"g", "cefg")):
        assert w.put(0, 1, [new]) == 1
        assert stored(w, [*KEYS, b"e", b"f", b"g"]) == left


@pytest.mark.parametrize("policy", list(POLICIES))
def test_no_policy_keeps_an_independent_block_for_its_neighbours(policy: str) -> None:
    w = world(1, 0, policy=policy)
    assert w.put(0, 1, KEYS) == 4
    with_first = w.acquire(0, 1, KEYS[:1])
    assert isinstance(with_first, ac.Grant)
    # The other three make room, though one of their put is in use.
    new = [b"e", b"f", b"g"]
    assert sum(w.put(0, 1, [key]) for key in new) == 3
    assert stored(w, [*KEYS, *new]) == "aefg"


def test_a_put_keeps_its_own_blocks_that_are_stored() -> None:
    w = world(1, 0)
    w.put(0, 1, KEYS)
    answer = w.reserve(0, 1, [b"x", b"a", b"y"])
    assert isinstance(answer, ac.Reserved)
    assert answer.status.tolist() == [ac.GRANTED, ac.PRESENT, ac.GRANTED]
    assert "a" in stored(w)


def test_pins_and_expiry_are_of_single_blocks() -> None:
    w = world(1, 0)
    w.put(0, 1, KEYS)
    assert isinstance(w.ask(ev.Pin(0, 1, joined([b"c"]), w.now + 60)), ac.Answer)
    for key in (b"e", b"f", b"g", b"h"):
        w.put(0, 1, [key])
    assert "c" in stored(w)
    w.open(1, independent=True, ttl_s=5.0)
    w.put(0, 1, [b"x"])
    w.pass_time(6.0)
    assert (stored(w, [b"x"]), stored(w, [b"c"])) == ("", "c")


def test_a_corrupt_block_is_lost_alone() -> None:
    w = world(2, 0)
    w.put(0, 1, KEYS)
    grant = w.acquire(0, 1, KEYS)
    assert isinstance(grant, ac.Grant)
    w.rot(w.places(0, grant.where)[1])
    w.send(ev.Suspect(0, 1, joined(KEYS[1:2])))
    for number in list(w.probes):
        w.probe(number)
    assert stored(w) == "acd"
    assert w.p.residency.blocks.used == 3


@pytest.mark.parametrize("handover", [False, True])
def test_blocks_survive_a_restart_without_parents(handover: bool) -> None:
    w = world()
    w.put(0, 1, KEYS)
    w.finish_all()
    # What clients may write into memory, and an older process into records, links nothing.
    for header in w.headers.values():
        header.parent = b"forged"
    for record in w.records.values():
        record.parent = b"forged"
    w.restart(handover)
    assert w.p.residency.blocks.used == 4
    assert w.p.view.parents(1, joined(KEYS)) == [b""] * 4
    assert w.get(1, [b"d", b"b"]) == [payload(1, b"d"), payload(1, b"b")]


def test_memory_that_does_not_tell_the_kind_loses_its_links_when_the_kind_is_known() -> None:
    w = world(nvme=0)
    w.put(0, 1, KEYS)
    for header, parent in zip(w.headers.values(), [b"gone", b"a", b"b", b"c"], strict=True):
        header.parent = parent
    w.opened[1].independent = False
    w.restart(handover=True)
    assert w.p.residency.blocks.used == 5, "a hole where the parent is missing"
    w.open(1, independent=True)
    assert w.p.residency.blocks.used == 4
    assert w.p.view.parents(1, joined(KEYS)) == [b""] * 4
    assert w.invalidate(1, [b"b"]) == 1
    assert stored(w) == "acd"


def test_a_hint_is_about_all_blocks_of_its_call() -> None:
    w = world(1, 0)
    w.put(0, 1, KEYS)
    w.ask(ev.Hint(0, 1, joined([b"a", b"c"]), closed=True))
    w.put(0, 1, [b"e", b"f"])
    assert stored(w, [*KEYS, b"e", b"f"]) == "bdef"


def test_a_lookup_says_that_stored_blocks_may_lie_behind_missing_ones() -> None:
    w = world()
    w.put(0, 1, KEYS[1:])
    answer = w.ask(ev.Lookup(0, 1, joined(KEYS)))
    assert isinstance(answer, ac.Found)
    assert (answer.value, answer.gaps) == (0, True)


def test_promoted_blocks_take_no_neighbours_with_them() -> None:
    w = world(1, 4, write_policy="on_evict")
    w.send(ev.Configure(prefetch_blocks=8))
    w.put(0, 1, KEYS)
    w.put(0, 1, [b"e", b"f", b"g", b"h"])
    w.finish_all()
    before = w.p.view.counters["ahead_blocks"]
    row = w.p.residency.index.find(1, joined(KEYS))
    gone = [key for key, r in zip(KEYS, row.tolist(), strict=True) if w.p.residency.blocks.slot[0, r] < 0]
    assert w.get(1, gone[:1]) == [payload(1, gone[0])]
    assert w.p.view.counters["ahead_blocks"] == before
    assert np.all(w.p.residency.blocks.parent[row] == -1)


# -- blocks that belong to a chain

CHAIN, STATES = 2, 1


def with_chain(dram: int = 2, **more: object) -> World:
    w = world(dram, 0, **more)
    w.open(CHAIN)
    return w


def test_a_block_of_a_chain_has_the_past_of_the_chain() -> None:
    w = with_chain()
    w.put(0, CHAIN, KEYS[:3])
    for _ in range(3):
        w.pass_time(20.0)
        w.get(CHAIN, KEYS[:2])
    w.put(0, STATES, [b"x", b"y"], of=(CHAIN, b"b"))
    w.put(0, STATES, [b"z"])
    residency = w.p.residency
    history = residency.reuse.history
    of_chain = residency.index.find(CHAIN, joined(KEYS[:3]))
    mine = residency.index.find(STATES, joined([b"x", b"y", b"z"]))
    assert history.classes(mine[:2]).tolist() == [history.classes(of_chain)[1]] * 2
    assert history.uses(mine).tolist() == [4, 4, 1]
    assert history.classes(mine)[2] not in history.classes(of_chain)
    w.pass_time(20.0)
    w.get(STATES, [b"x"])
    assert history.uses(mine).tolist() == [5, 4, 1], "from then on, its own uses count"


def test_a_block_whose_chain_is_not_stored_is_denied() -> None:
    w = with_chain()
    w.put(0, CHAIN, KEYS[:2])
    for of in ((CHAIN, b"c"), (3, b"a")):
        answer = w.reserve(0, STATES, [b"x"], of=of)
        assert isinstance(answer, ac.Deny)
        assert answer.why == "the chain of these blocks is not stored"
    answer = w.reserve(0, CHAIN, [b"c"], parent=b"b", of=(CHAIN, b"a"))
    assert isinstance(answer, ac.Deny)
    assert answer.why == "only independent blocks belong to a chain"
    room = w.reserve(0, CHAIN, [b"c"], parent=b"b")
    assert w.put(0, STATES, [b"x"], of=(CHAIN, b"c")) == 1, "its chain is being written"
    assert isinstance(room, ac.Reserved)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_put_keeps_the_block_that_it_belongs_to(policy: str) -> None:
    w = with_chain(1, policy=policy)
    w.put(0, CHAIN, KEYS)
    assert w.put(0, STATES, [b"x"], of=(CHAIN, b"d")) == 0, "the end of the chain is not evicted for it"
    assert w.lookup(CHAIN, KEYS) == 4
    assert w.put(0, STATES, [b"x"], of=(CHAIN, b"c")) == 1
    assert (w.lookup(CHAIN, KEYS), stored(w, [b"x"])) == (3, "x")


def test_a_new_block_is_weighed_like_its_chain() -> None:
    w = with_chain()
    w.put(0, CHAIN, KEYS[:2])
    reuse, words = w.p.residency.reuse, joined([b"x"]).words[0]
    chain = int(w.p.residency.index.find_one(CHAIN, b"b"))
    curves = reuse.curves(0)
    curves.joins = 1 << 20
    curves.density[:] = np.arange(len(curves.density), dtype=np.float32)[:, None]
    reuse.history.kind[chain] = 17
    assert reuse.density_if_stored(words, STATES, -1, 1, 0, w.now, chain) == 17
    assert reuse.density_if_stored(words, STATES, -1, 1, 0, w.now) != 17
