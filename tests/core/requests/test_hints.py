"""Hints change who goes first, where nobody else's chain goes; look-ahead loads what surely follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.policy.hazard import Hazard
from kvstore.core.policy.lru import LRU
from kvstore.core.reuse.classes import HIGH_PRIORITY, describe
from tests.core.world import World, joined

CHAIN = [b"a", b"b", b"c", b"d"]


class Heard:
    """What policies were told, as keys, and what is expected of blocks since."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.cooled: list[tuple[bytes, ...]] = []

    def keys(self, rows: np.ndarray) -> tuple[bytes, ...]:
        return tuple(self.w.p.residency.blocks.key(row) for row in rows.tolist())

    def told(self, keys: list[bytes] = CHAIN) -> list[str]:
        """Class by class, what clients said of blocks; "" for those of which they said nothing."""
        r = self.w.p.residency
        classes = [describe(kind) for kind in r.reuse.history.classes(r.prefix(1, joined(keys))).tolist()]
        return [words.removeprefix("told: ") if words.startswith("told") else "" for words in classes]

    def favoured(self) -> list[bool]:
        r = self.w.p.residency
        return [
            bool(kind & HIGH_PRIORITY) for kind in r.reuse.history.kinds(r.prefix(1, joined(CHAIN))).tolist()
        ]


@pytest.fixture(params=["lru", "hazard"])
def heard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Heard:
    w = World(4, 4, policy=request.param)
    w.open(1)
    told, policy = Heard(w), {"lru": LRU, "hazard": Hazard}[request.param]
    cool = policy.cool

    def listen(self: Any, rows: np.ndarray) -> None:
        told.cooled.append(told.keys(rows))
        cool(self, rows)

    monkeypatch.setattr(policy, "cool", listen)
    return told


def hint(w: World, keys: list[bytes], **more: Any) -> int:
    answer = w.ask(ev.Hint(0, 1, joined(keys), **more))
    assert isinstance(answer, ac.Answer), answer
    return answer.value


# -- hints


def test_a_next_use_hint_counts_for_the_sessions_own_blocks(heard: Heard) -> None:
    w = heard.w
    w.put(0, 1, CHAIN)
    w.put(0, 1, [b"x"], parent=b"b")
    assert hint(w, [*CHAIN[:3], b"y"], next_use_s=45.0) == 3
    assert heard.told() == ["", "", "used again within 60 s", ""]
    assert hint(w, CHAIN, next_use_s=0.0) == 4
    assert heard.told() == ["", "", "used again within 10 s", "used again within 10 s"]
    assert heard.cooled == []


def test_blocks_of_a_closed_session_are_evicted_first(heard: Heard) -> None:
    w = heard.w
    w.put(0, 1, CHAIN)
    w.put(0, 1, [b"x"], parent=b"b")
    assert hint(w, CHAIN, closed=True, next_use_s=3.0) == 4
    assert heard.told() == ["", "", "not used again", "not used again"]
    assert heard.cooled == [(b"c", b"d")], "in DRAM only: nothing has been written down yet"
    w.finish_all()
    hint(w, CHAIN, priority=-1)
    assert heard.cooled[1:] == [(b"c", b"d"), (b"c", b"d")]


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_closed_blocks_are_evicted_before_older_ones(policy: str) -> None:
    w = World(1, 0, slots=4, policy=policy)
    w.open(1)
    w.put(0, 1, [b"o", b"p"])
    w.now += 5.0
    w.put(0, 1, [b"m", b"n"])
    hint(w, [b"m", b"n"], closed=True)
    w.now += 5.0
    w.put(0, 1, [b"r", b"s"])
    assert [w.lookup(1, keys) for keys in ([b"o", b"p"], [b"m", b"n"], [b"r", b"s"])] == [2, 0, 2]


def test_a_high_priority_holds_for_the_whole_prefix_and_a_lower_one_only_for_ones_own(heard: Heard) -> None:
    w = heard.w
    w.put(0, 1, CHAIN)
    w.put(0, 1, [b"x"], parent=b"b")
    hint(w, CHAIN, priority=1)
    assert heard.favoured() == [True] * 4
    hint(w, CHAIN, priority=0)
    assert heard.favoured() == [True, True, False, False]


def test_a_continued_chain_is_not_closed(heard: Heard) -> None:
    w = heard.w
    w.put(0, 1, CHAIN)
    assert hint(w, CHAIN[:3], closed=True) == 3
    assert (heard.cooled, heard.told()) == ([], [""] * 4)


def test_the_last_part_of_a_long_chain_speaks_for_all_of_it(heard: Heard) -> None:
    w = heard.w
    w.put(0, 1, CHAIN)
    assert hint(w, CHAIN[2:], closed=True) == 2
    assert heard.cooled == [tuple(CHAIN)]


def test_nothing_is_said_of_holes(heard: Heard) -> None:
    w = heard.w
    w.put(0, 1, CHAIN)
    w.invalidate(1, [b"b"])
    assert hint(w, CHAIN[2:], closed=True) == 2
    assert heard.cooled == [(b"c", b"d")]


def test_hints_for_missing_blocks_change_nothing(heard: Heard) -> None:
    assert isinstance(heard.w.ask(ev.Hint(0, 9, joined(CHAIN))), ac.Deny)
    assert hint(heard.w, CHAIN, closed=True, priority=-1) == 0
    assert heard.cooled == []


# -- look-ahead


LONG = [b"%02d" % i for i in range(12)]


def below(prefetch_blocks: int, slots: int = 96, branch: int | None = None) -> World:
    """A world whose chain `LONG` lies on NVMe only; `branch`: something else hangs on that block of it."""
    w = World(1, 4, slots=slots)
    w.p._reads.prefetch_blocks = prefetch_blocks
    w.open(1)
    w.put(0, 1, LONG)
    if branch is not None:
        w.put(0, 1, [b"xx"], parent=LONG[branch])
    w.finish_all()
    r = w.p.residency
    rows = np.flatnonzero((r.blocks.slot[0] >= 0) & (r.blocks.state > 0))
    r.give_up(0, rows)
    for action in r.outbox.actions:
        w._run(action)
    r.outbox.actions.clear()
    assert (r.blocks.slot[0, rows] < 0).all()
    return w


def coming(w: World) -> list[bytes]:
    return [c.identity.key(i) for c in w.copies.values() if c.target == 0 for i in range(len(c.identity))]


def urgent(w: World) -> list[bytes]:
    urgent = [c for c in w.copies.values() if c.urgent]
    return [c.identity.key(i) for c in urgent for i in range(len(c.identity))]


def test_blocks_behind_a_promoted_chain_are_prefetched() -> None:
    w = below(4)
    assert w.acquire(0, 1, LONG[:3]) is None
    assert urgent(w) == LONG[:3]
    assert coming(w) == LONG[:7]
    w.finish_all()
    grant = w.acquire(0, 1, LONG[:7], wait=0.0)
    assert isinstance(grant, ac.Grant)
    assert len(grant.where) == 7
    assert w.p.view.counters["ahead_blocks"] == 4


def test_prefetch_behind_chains_is_off_by_default() -> None:
    w = below(0)
    w.acquire(0, 1, LONG[:3])
    assert coming(w) == LONG[:3]


def test_a_branch_ends_it() -> None:
    w = below(9, branch=4)
    w.acquire(0, 1, LONG[:3])
    assert coming(w) == LONG[:5]
    w = below(9, branch=2)
    w.acquire(0, 1, LONG[:3])
    assert coming(w) == LONG[:3]


def test_a_key_that_is_not_stored_ends_it() -> None:
    w = below(9)
    w.acquire(0, 1, [*LONG[:3], b"yy"])
    assert coming(w) == LONG[:3]


def test_present_and_loading_blocks_are_not_loaded_again() -> None:
    w = below(4)
    w.acquire(0, 1, LONG[:3])
    w.acquire(1, 1, LONG[:5])
    assert coming(w) == LONG[:7]
    w.finish_all()
    w.acquire(2, 1, LONG[:8])
    # What is asked for comes first, then what follows.
    assert coming(w) == LONG[7:12]


def test_prefetch_takes_at_most_an_eighth_of_the_tier() -> None:
    w = below(9, slots=16)
    w.acquire(0, 1, LONG[:1])
    assert coming(w) == LONG[:3]
    assert (w.p.view.counters["ahead_blocks"], w.p.view.counters["dropped_prefetch_blocks"]) == (2, 7)


def test_a_tier_full_of_leased_blocks_drops_prefetches() -> None:
    w = below(4, slots=16)
    others = [b"u%02d" % i for i in range(15)]
    assert w.put(0, 1, others) == 15
    w.finish_all()
    w.acquire(1, 1, others)
    w.acquire(0, 1, LONG[:1])
    assert coming(w) == LONG[:1]
    assert (w.p.view.counters["ahead_blocks"], w.p.view.counters["dropped_prefetch_blocks"]) == (0, 4)


def test_another_tenants_reader_does_not_look_ahead() -> None:
    w = below(4)
    w.acquire(0, 1, LONG[:3], tenant=5)
    assert coming(w) == LONG[:3]
