"""Hints change who goes first, where nobody else's chain goes; look-ahead loads what surely follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.policy.lru import LRU
from tests.core.world import World, joined

CHAIN = [b"a", b"b", b"c", b"d"]


class Heard:
    """What policies and the history of reuse were told, as keys."""

    def __init__(self, w: World) -> None:
        self._w = w
        self.cooled: list[tuple[bytes, ...]] = []
        self.hints: list[tuple[Any, ...]] = []

    def keys(self, rows: np.ndarray) -> tuple[bytes, ...]:
        return tuple(self._w.p.residency.blocks.key(row) for row in rows.tolist())

    def hint(self, rows: np.ndarray, next_use_s: float | None, closed: bool, priority: int) -> None:
        self.hints.append((self.keys(rows), next_use_s, closed, priority))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    w = World(4, 4)
    w.open(1)
    told = Heard(w)

    def cool(self: LRU, rows: np.ndarray) -> None:
        told.cooled.append(told.keys(rows))

    monkeypatch.setattr(LRU, "cool", cool, raising=False)
    monkeypatch.setattr(w.p.residency, "reuse", told, raising=False)
    return told


def hint(w: World, keys: list[bytes], **more: Any) -> int:
    answer = w.ask(ev.Hint(0, 1, joined(keys), **more))
    assert isinstance(answer, ac.Answer), answer
    return answer.value


# -- hints


def test_what_is_learnt_from_use_hears_of_the_stored_prefix(heard: Heard) -> None:
    w = heard._w
    w.put(0, 1, CHAIN)
    assert hint(w, [*CHAIN[:2], b"x"], next_use_s=3.5, priority=1) == 2
    assert hint(w, [b"x"], closed=True) == 0
    assert heard.hints == [((b"a", b"b"), 3.5, False, 1)]
    assert heard.cooled == []


@pytest.mark.parametrize("more", [{"closed": True}, {"priority": -1}])
def test_the_end_that_is_nobody_elses_is_cooled(heard: Heard, more: dict[str, Any]) -> None:
    w = heard._w
    w.put(0, 1, CHAIN)
    w.put(0, 1, [b"x"], parent=b"b")
    assert hint(w, CHAIN, **more) == 4
    # In DRAM only: nothing has been written down yet.
    assert heard.cooled == [(b"c", b"d")]
    w.finish_all()
    hint(w, CHAIN, **more)
    assert heard.cooled[1:] == [(b"c", b"d"), (b"c", b"d")]


def test_a_chain_that_goes_on_is_not_cooled(heard: Heard) -> None:
    w = heard._w
    w.put(0, 1, CHAIN)
    assert hint(w, CHAIN[:3], closed=True) == 3
    assert heard.cooled == []


def test_the_last_part_of_a_long_chain_speaks_for_all_of_it(heard: Heard) -> None:
    w = heard._w
    w.put(0, 1, CHAIN)
    assert hint(w, CHAIN[2:], closed=True) == 2
    assert heard.cooled == [tuple(CHAIN)]


def test_hints_about_unknown_namespaces_are_refused(heard: Heard) -> None:
    assert isinstance(heard._w.ask(ev.Hint(0, 9, joined(CHAIN))), ac.Deny)


def test_hints_need_nobody_who_listens() -> None:
    w = World(4)
    w.open(1)
    w.put(0, 1, CHAIN)
    assert hint(w, CHAIN, closed=True, next_use_s=1.0) == 4
    assert w.get(1, CHAIN) == [b"1/0/" + key for key in CHAIN]


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
    for action in r.out:
        w._run(action)
    r.out.clear()
    assert (r.blocks.slot[0, rows] < 0).all()
    return w


def coming(w: World) -> list[bytes]:
    return [c.identity.key(i) for c in w.copies.values() if c.target == 0 for i in range(len(c.identity))]


def urgent(w: World) -> list[bytes]:
    urgent = [c for c in w.copies.values() if c.urgent]
    return [c.identity.key(i) for c in urgent for i in range(len(c.identity))]


def test_what_follows_a_promoted_chain_comes_too_behind_it() -> None:
    w = below(4)
    assert w.acquire(0, 1, LONG[:3]) is None
    assert urgent(w) == LONG[:3]
    assert coming(w) == LONG[:7]
    w.finish_all()
    grant = w.acquire(0, 1, LONG[:7], wait=0.0)
    assert isinstance(grant, ac.Grant)
    assert len(grant.where) == 7
    assert w.p.counters["ahead_blocks"] == 4


def test_it_is_off_unless_it_is_asked_for() -> None:
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


def test_what_is_there_or_on_its_way_is_not_loaded_again() -> None:
    w = below(4)
    w.acquire(0, 1, LONG[:3])
    w.acquire(1, 1, LONG[:5])
    assert coming(w) == LONG[:7]
    w.finish_all()
    w.acquire(2, 1, LONG[:8])
    # What is asked for comes first, then what follows.
    assert coming(w) == LONG[7:12]


def test_it_takes_an_eighth_of_the_tier_and_what_is_beyond_is_dropped() -> None:
    w = below(9, slots=16)
    w.acquire(0, 1, LONG[:1])
    assert coming(w) == LONG[:3]
    assert (w.p.counters["ahead_blocks"], w.p.counters["dropped_prefetch_blocks"]) == (2, 7)


def test_a_tier_that_is_full_of_what_is_in_use_drops_it() -> None:
    w = below(4, slots=16)
    others = [b"u%02d" % i for i in range(15)]
    assert w.put(0, 1, others) == 15
    w.finish_all()
    w.acquire(1, 1, others)
    w.acquire(0, 1, LONG[:1])
    assert coming(w) == LONG[:1]
    assert (w.p.counters["ahead_blocks"], w.p.counters["dropped_prefetch_blocks"]) == (0, 4)


def test_another_tenants_reader_does_not_look_ahead() -> None:
    w = below(4)
    w.acquire(0, 1, LONG[:3], tenant=5)
    assert coming(w) == LONG[:3]
