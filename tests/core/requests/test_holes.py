"""Chains with holes: what it costs to make holes, to fill them and to have them leave, counted in calls."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.placement import Placement
from kvstore.core.queues.device_queue import TierSpec
from kvstore.core.residency import chains
from kvstore.types import Tier
from tests.core.world import World, joined, payload

BATCH = 128
BLOCK_BYTES = 4096
EXTENT_BYTES = 64 << 20
LEAST = 2 * BATCH


class Node:
    """A placement that holds one chain of n blocks, and how many calls each of its steps took."""

    def __init__(self, n: int, hbm: bool = False) -> None:
        specs = [TierSpec(Tier.DRAM, EXTENT_BYTES, EXTENT_BYTES, True)]
        if hbm:
            specs += [TierSpec(tier, EXTENT_BYTES, EXTENT_BYTES, False) for tier in (Tier.NVME, Tier.HBM)]
        self.p = Placement(specs, max_blocks=1 << 16, policy="hazard", write_policy="on_evict")
        self.now = 0.0
        for tier in range(len(specs)):
            self.send(ev.ExtentReady(tier, tier << 24))
            self.send(ev.ExtentsEnd(tier))
        self.send(ev.OpenNamespace(1, 1, BLOCK_BYTES))
        self.n, self.keys = n, Keys(b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(n)), 32)

    def send(self, event: ev.Event) -> list[ac.Action]:
        self.now += 1e-4
        return self.p.handle(event, self.now)

    def put(self, at: int = 0) -> list[int]:
        """Stores the chain in batches; the calls of each Reserve."""
        calls, parent = [], b""
        for first in range(0, self.n, BATCH):
            keys = self.keys.take(first, first + BATCH)
            event = ev.Reserve(1, 1, 1, keys, parent, 0.0, at)
            calls.append(calls_of(lambda event=event: self.reserve(event)))  # type: ignore[misc]
            n = len(self.room.where)
            if n:
                self.send(ev.Commit(1, 1, self.room.lease, np.zeros(n, np.uint64), np.ones(n, np.bool_)))
            parent = keys[keys.n - 1]
        return calls

    def reserve(self, event: ev.Reserve) -> None:
        [self.room] = [a for a in self.send(event) if isinstance(a, ac.Reserved)]

    def invalidate(self, first: int, last: int) -> int:
        """How many calls it took."""
        return calls_of(lambda: self.send(ev.Invalidate(1, 1, self.keys.take(first, last))))

    @property
    def holes(self) -> int:
        return self.p.residency.gaps.holes[1]

    def prefix(self) -> int:
        return self.p.view.stored(1, self.keys)


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called meanwhile, of Python and of C."""
    n = 0

    def called(frame: object, event: str, arg: object) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return n


def test_a_chain_stored_again_over_holes_costs_no_more_than_its_first_store() -> None:
    node = Node(16 * BATCH)
    first = node.put()
    node.invalidate(0, node.n - 1)
    assert node.holes == node.n - 1
    again = node.put()
    assert node.prefix() == node.n
    assert node.holes == 0
    assert sum(again) <= 2 * sum(first)
    assert max(again) <= 2 * max(first), "one step makes up for the others"
    node.p.check()


@pytest.mark.parametrize("stays", [-1, 0.5], ids=["the end", "the middle"])
def test_dropping_the_inside_of_a_chain_is_linear(stays: float) -> None:
    calls = []
    for n in (LEAST, 8 * LEAST):
        node = Node(n)
        node.put()
        kept = n - 1 if stays < 0 else int(stays * n)
        calls.append(node.invalidate(0, kept) + node.invalidate(kept + 1, n))
        assert node.holes == kept
        assert node.p.residency.blocks.used == kept + 1
        node.p.check()
    assert calls[1] <= 2 * calls[0]


def test_a_lost_pool_is_forgotten_in_steps_that_do_not_grow_with_the_chain() -> None:
    node = Node(16 * BATCH, hbm=True)
    node.put(at=2)
    child = Keys(hashlib.sha256(b"child").digest(), 32)
    node.reserve(ev.Reserve(1, 1, 1, child, node.keys[node.n - 1], 0.0))
    node.send(ev.Commit(1, 1, node.room.lease, np.zeros(1, np.uint64), np.ones(1, np.bool_)))
    assert (node.p.residency.blocks.slot[2, : node.n] >= 0).all()
    calls = [calls_of(lambda: node.send(ev.LoseDevice(2)))]
    while node.p.residency.topology.losing:
        before = node.holes
        node.now += 1.0
        calls.append(calls_of(lambda: node.send(ev.Tick())))
        assert node.holes - before <= 512
    assert node.holes == node.n
    assert max(calls) <= 2000
    node.p.check()


def test_holes_that_lost_their_last_child_leave_step_by_step() -> None:
    node = Node(24 * BATCH)
    node.put()
    node.invalidate(0, node.n - 1)
    node.invalidate(node.n - 1, node.n)
    used = [node.p.residency.blocks.used]
    assert node.n // 2 < used[0] < node.n
    while used[-1]:
        node.p.check()
        wake = node.p.next_wakeup()
        assert wake is not None
        node.now = max(node.now, wake)
        node.send(ev.Tick())
        used.append(node.p.residency.blocks.used)
        assert 0 < used[-2] - used[-1] <= 1024
    assert node.holes == 0
    assert node.p.next_wakeup() is None
    node.p.check()


def test_holes_that_are_about_to_leave_can_be_filled() -> None:
    node = Node(24 * BATCH)
    node.put()
    node.invalidate(0, node.n - 1)
    node.invalidate(node.n - 1, node.n)
    assert node.p.residency.chains.childless
    node.put()
    assert node.prefix() == node.n
    node.p.check()
    node.now += 1.0
    node.send(ev.Tick())
    assert not node.p.residency.chains.childless
    assert node.prefix() == node.n
    assert node.p.residency.blocks.used == node.n
    node.p.check()


def test_a_namespace_is_forgotten_when_its_last_hole_has_left() -> None:
    node = Node(24 * BATCH)
    node.put()
    node.invalidate(0, node.n - 1)
    node.invalidate(node.n - 1, node.n)
    answers = node.send(ev.Forget(9, (1,)))
    while not any(isinstance(a, ac.Answer) and a.request == 9 for a in answers):
        wake = node.p.next_wakeup()
        assert wake is not None
        node.now = max(node.now, wake)
        answers = node.send(ev.Tick())
    assert node.p.residency.blocks.used == 0
    node.p.check()


@pytest.mark.parametrize("enough", [True, False])
def test_a_root_with_children_gets_a_parent_if_the_way_up_can_be_seen_in_one_step(
    enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = World(2, 0)
    w.open(1)
    w.put(0, 1, [b"a", b"b"])
    w.put(0, 1, [b"r", b"s"])
    w.invalidate(1, [b"r"])
    if not enough:
        monkeypatch.setattr(chains, "_MOST_RUNS", -1)
    assert w.put(0, 1, [b"r"], b"b") == 1
    assert w.p.view.parents(1, joined([b"r"])) == [b"b" if enough else b""]
    chain = [b"a", b"b", b"r", b"s"]
    assert w.get(1, chain) == [payload(1, key) for key in chain]
    w.settle()


def test_a_chain_is_no_ancestor_of_itself_by_way_of_a_new_block() -> None:
    w = World(2, 0)
    w.open(1)
    w.put(0, 1, [b"a", b"b"])
    w.invalidate(1, [b"a"])
    assert w.put(0, 1, [b"x", b"a"], b"b") == 2
    rows = w.p.residency.index.find_one(1, b"a"), w.p.residency.index.find_one(1, b"b")
    assert w.p.residency.chains.with_ancestors(np.array(rows[1:])).tolist() == list(rows)
    assert w.get(1, [b"a", b"b"]) == [payload(1, b"a"), payload(1, b"b")]
    w.settle()
