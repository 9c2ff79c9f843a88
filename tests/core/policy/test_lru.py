"""LRU against an OrderedDict, over many segments of its log."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.policy import queue as module
from kvstore.core.policy.lru import LRU
from tests.core.policy.pool import Tier


class Oracle:
    """The same order, oldest first, in a dictionary."""

    def __init__(self) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def insert(self, rows: list[int]) -> None:
        for row in reversed(rows):
            self.order[row] = None
            self.order.move_to_end(row)

    def touch(self, rows: list[int]) -> None:
        self.insert([row for row in rows if row in self.order])

    def remove(self, rows: list[int]) -> None:
        for row in rows:
            self.order.pop(row, None)

    def defer(self, rows: list[int]) -> None:
        self.insert([row for row in rows if row in self.order][::-1])

    def cool(self, rows: list[int]) -> None:
        for row in rows:
            if row in self.order:
                self.order.move_to_end(row, last=False)

    def coldest(self, n: int) -> list[int]:
        return list(self.order)[:n]


class Both:
    def __init__(self, capacity: int) -> None:
        self.lru, self.oracle = LRU(Tier(capacity).context()), Oracle()

    def do(self, what: str, rows: Iterable[int]) -> None:
        some = list(rows)
        now = (0.0,) if what in ("insert", "touch") else ()
        getattr(self.lru, what)(np.array(some, np.int64), *now)
        getattr(self.oracle, what)(some)
        assert len(self.lru) == len(self.oracle.order)

    def check(self, n: int) -> None:
        """`coldest` may give fewer than asked, but not none, and those it gives are the coldest."""
        got = self.lru.coldest(n, 0.0).tolist()
        assert got == self.oracle.coldest(len(got))
        assert bool(got) == bool(self.oracle.order and n)

    def drain(self) -> None:
        while self.oracle.order:
            got = self.lru.coldest(50, 0.0).tolist()
            assert got
            assert got == self.oracle.coldest(len(got))
            self.do("remove", got)
        assert self.lru.coldest(5, 0.0).tolist() == []


def test_an_empty_policy_offers_nothing() -> None:
    assert len(LRU(Tier(10).context())) == 0
    assert LRU(Tier(10).context()).coldest(3, 0.0).tolist() == []


def test_a_chain_leaves_from_its_tail() -> None:
    both = Both(10)
    both.do("insert", [3, 1, 4])
    assert both.lru.coldest(3, 0.0).tolist() == [4, 1, 3]
    both.do("insert", [5, 9])
    assert both.lru.coldest(5, 0.0).tolist() == [4, 1, 3, 9, 5]


def test_touched_rows_leave_last_and_unknown_ones_stay_unknown() -> None:
    both = Both(10)
    both.do("insert", [1, 2, 3])
    both.do("touch", [1, 2, 7])
    assert both.lru.coldest(9, 0.0).tolist() == [3, 2, 1]
    both.do("remove", [7, 2])
    assert both.lru.coldest(9, 0.0).tolist() == [3, 1]


def test_deferred_rows_keep_their_order_at_the_recent_end() -> None:
    both = Both(10)
    both.do("insert", [1, 2, 3, 4])
    both.do("defer", [4, 3, 8])
    assert both.lru.coldest(9, 0.0).tolist() == [2, 1, 4, 3]


def test_asking_changes_nothing() -> None:
    both = Both(10)
    both.do("insert", [1, 2, 3])
    assert both.lru.coldest(2, 0.0).tolist() == both.lru.coldest(2, 0.0).tolist() == [3, 2]


def test_inserting_again_is_a_touch() -> None:
    both = Both(10)
    both.do("insert", [1, 2, 3])
    both.do("insert", [3])
    assert both.lru.coldest(9, 0.0).tolist() == [2, 1, 3]


def test_row_zero_is_a_row_like_any_other() -> None:
    both = Both(4)
    both.do("insert", [0])
    both.check(1)
    both.do("remove", [0])
    both.check(1)
    both.do("insert", [1, 0])
    both.do("touch", [1])
    assert both.lru.coldest(4, 0.0).tolist() == [0, 1]


def test_a_log_that_was_touched_over_and_over_still_has_something_to_offer() -> None:
    n = 40 * module._SEGMENT
    both = Both(n)
    both.do("insert", range(n))
    both.do("touch", range(n))
    assert both.lru.coldest(1, 0.0).tolist() == [n - 1]


@pytest.mark.parametrize("bits", [2, 4])
def test_many_small_segments_stay_in_order(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BITS", bits)
    monkeypatch.setattr(module, "_SEGMENT", 1 << bits)
    dice = np.random.default_rng(bits)
    both = Both(300)
    for _ in range(400):
        what = dice.choice(["insert", "touch", "touch", "remove", "defer", "cool"])
        both.do(str(what), dice.permutation(300)[: dice.integers(0, 40)].tolist())
        both.check(int(dice.integers(0, 30)))
    both.drain()


def test_the_log_does_not_outgrow_its_rows() -> None:
    both = Both(3000)
    both.do("insert", range(3000))
    dice = np.random.default_rng(1)
    for _ in range(300):
        both.do("touch", dice.permutation(3000)[:700].tolist())
    assert both.lru.ram_bytes() < 4 * (3 * 3000 + 3 * module._SEGMENT)
    both.check(100)
    both.drain()


def test_rows_that_are_never_touched_stay_coldest_while_others_churn() -> None:
    both = Both(2000)
    both.do("insert", range(1000, 1100))
    both.do("insert", range(1000))
    for _ in range(100):
        both.do("touch", range(1000))
    both.check(100)
    assert sorted(both.lru.coldest(100, 0.0).tolist()) == list(range(1000, 1100))


_rows = st.lists(st.integers(0, 40), max_size=20, unique=True)
_steps = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "touch", "remove", "defer", "cool"]), _rows), max_size=60
)


@given(_steps, st.sampled_from([1, 3, 12]))
@settings(max_examples=80)
def test_equals_an_ordered_dictionary(steps: list[tuple[str, list[int]]], bits: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BITS", bits)
        patch.setattr(module, "_SEGMENT", 1 << bits)
        both = Both(41)
        for what, rows in steps:
            both.do(what, rows)
            both.check(7)
        both.drain()
