"""Policies from papers against themselves block by block, in lists and dictionaries."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.policy import make
from tests.core.policy.pool import Tier

ROWS = 63
DEAR = 40
"""Rows below this one are of a namespace that takes three times as long to compute."""


class PlainARC:
    def __init__(self) -> None:
        self.kinds: list[list[int]] = [[], []]
        self.ghosts: list[list[int | None]] = [[], []]
        self.target = 0.0

    def rows(self) -> set[int]:
        return {row for kind in self.kinds for row in kind}

    def touch(self, rows: list[int]) -> None:
        for row in reversed(rows):
            for kind in self.kinds:
                if row in kind:
                    kind.remove(row)
            self.kinds[1].append(row)

    def start_batch(self) -> None:
        pass

    def victim(self) -> int:
        once, often = self.kinds
        which = 0 if once and (len(once) > int(self.target) or not often) else 1
        row = self.kinds[which].pop(0)
        self.ghosts[which].append(row)
        return row

    def insert(self, rows: list[int]) -> None:
        capacity = len(self.rows())
        once = min(len(self.ghosts[0]), capacity - len(self.kinds[0]))
        often = min(len(self.ghosts[1]), capacity - once)
        last = [set(g[len(g) - n :]) for g, n in zip(self.ghosts, (once, often), strict=True)]
        back = [len(set(rows) & some) for some in last]
        if back[0]:
            self.target = min(capacity, self.target + back[0] * max(1.0, often / once))
        if back[1]:
            self.target = max(0.0, self.target - back[1] * max(1.0, once / often))
        for row in reversed(rows):
            self.kinds[row in last[0] | last[1]].append(row)
        self.ghosts = [[None if row in rows else row for row in g] for g in self.ghosts]


class PlainS3FIFO:
    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.uses: dict[int, int] = {}
        self.ghosts: list[int | None] = []
        self.total = 0

    def rows(self) -> set[int]:
        return {*self.small, *self.main}

    def touch(self, rows: list[int]) -> None:
        for row in rows:
            self.uses[row] = min(self.uses[row] + 1, 3)

    def start_batch(self) -> None:
        self.total = len(self.rows())

    def victim(self) -> int:
        while True:
            if len(self.small) * 10 >= self.total or not self.main:
                row = self.small.pop(0)
                if not self.uses[row]:
                    self.ghosts.append(row)
                    return row
                self.uses[row] = 0
            else:
                row = self.main.pop(0)
                if not self.uses[row]:
                    return row
                self.uses[row] -= 1
            self.main.append(row)

    def insert(self, rows: list[int]) -> None:
        n = len(self.rows())
        last = set(self.ghosts[max(len(self.ghosts) - n, 0) :])
        for row in reversed(rows):
            (self.main if row in last else self.small).append(row)
            self.uses[row] = 0
        self.ghosts = [None if row in rows else row for row in self.ghosts]


class PlainSIEVE:
    def __init__(self) -> None:
        self.order: list[int] = []
        self.visited: set[int] = set()
        self.hand = 0

    def rows(self) -> set[int]:
        return set(self.order)

    def touch(self, rows: list[int]) -> None:
        self.visited |= set(rows)

    def start_batch(self) -> None:
        pass

    def victim(self) -> int:
        while True:
            self.hand = self.hand if self.hand < len(self.order) else 0
            row = self.order[self.hand]
            if row not in self.visited:
                return self.order.pop(self.hand)
            self.visited.remove(row)
            self.hand += 1

    def insert(self, rows: list[int]) -> None:
        self.hand = self.hand if self.hand < len(self.order) else 0
        self.order += rows[::-1]


class PlainLFUDA:
    dear = 1

    def __init__(self) -> None:
        self.priority: OrderedDict[int, int] = OrderedDict()
        self.uses: dict[int, int] = {}
        self.age = 0

    def rows(self) -> set[int]:
        return set(self.priority)

    def touch(self, rows: list[int]) -> None:
        for row in reversed(rows):
            self.uses[row] = min(self.uses[row] + 1, 15)
            self.priority[row] = self.age + self.uses[row] * (self.dear if row < DEAR else 1)
            self.priority.move_to_end(row)

    def start_batch(self) -> None:
        self.age = min(self.priority.values())

    def victim(self) -> int:
        row = min(self.priority, key=lambda r: self.priority[r])
        del self.priority[row]
        return row

    def insert(self, rows: list[int]) -> None:
        self.uses.update(dict.fromkeys(rows, 0))
        self.touch(rows)


class PlainGDSF(PlainLFUDA):
    dear = 3


PLAIN = {"arc": PlainARC, "s3fifo": PlainS3FIFO, "sieve": PlainSIEVE, "lfuda": PlainLFUDA, "gdsf": PlainGDSF}


class Both:
    """A cache of some blocks under a policy and under its plain self; row i hangs on row (i - 1) // 2."""

    def __init__(self, name: str, capacity: int) -> None:
        tier = Tier(ROWS)
        tier.blocks.namespace[DEAR:] = 2
        tier.recompute_s[1:3] = 3e-3, 1e-3
        self.policy, self.plain = make(name, tier.context()), PLAIN[name]()
        self.policy.insert(np.array([ROWS - 1]), 0.0)  # so that the cheapest is known from the start
        self.plain.insert([ROWS - 1])
        self.capacity = capacity
        self.evicted = 0

    def ask(self, row: int) -> None:
        """A request for the chain that ends with a row."""
        chain = [row]
        while chain[0]:
            chain.insert(0, (chain[0] - 1) // 2)
        known = self.plain.rows()
        hits, misses = [r for r in chain if r in known], [r for r in chain if r not in known]
        self.policy.touch(np.array(hits, np.int64), 0.0)
        self.plain.touch(hits)
        short = len(known) + len(misses) - self.capacity
        while short > 0:
            got = self.policy.coldest(short, 0.0)
            self.plain.start_batch()
            assert got.tolist() == [self.plain.victim() for _ in range(len(got))]
            assert 0 < len(got) <= short
            self.policy.remove(got)
            short -= len(got)
            self.evicted += len(got)
        self.policy.insert(np.array(misses, np.int64), 0.0)
        self.plain.insert(misses)
        assert len(self.policy) == len(self.plain.rows())


@pytest.mark.parametrize("name", PLAIN)
@given(
    capacity=st.integers(6, 40), rows=st.lists(st.integers(0, ROWS - 1), max_size=150), seed=st.integers(0, 9)
)
@settings(max_examples=100)
def test_the_same_blocks_leave(name: str, capacity: int, rows: list[int], seed: int) -> None:
    both = Both(name, capacity)
    # Hypothesis finds the corner; a long run of requests, some rows far more often than others, wears it in.
    dice = np.random.default_rng(seed)
    for row in [*rows, *(dice.zipf(1.3, 150) * 5 % ROWS).tolist(), *dice.integers(0, ROWS, 80).tolist()]:
        both.ask(row)
    assert both.evicted > 30


class TextbookARC:
    """The paper's figure 4, one block at a time."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def ask(self, x: int) -> bool:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:
            t1.pop(x, None)
            t2.pop(x, None)
            t2[x] = None
            return True
        if x in b1:
            self.p = min(self.c, self.p + max(1.0, len(b2) / len(b1)))
            self.replace(x)
            del b1[x]
            t2[x] = None
        elif x in b2:
            self.p = max(0.0, self.p - max(1.0, len(b1) / len(b2)))
            self.replace(x)
            del b2[x]
            t2[x] = None
        else:
            if len(t1) + len(b1) == self.c:
                if len(t1) < self.c:
                    b1.popitem(last=False)
                    self.replace(x)
                else:
                    t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= self.c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * self.c:
                    b2.popitem(last=False)
                self.replace(x)
            t1[x] = None
        return False

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("capacity", [100, 400])
def test_arc_hits_as_often_as_the_textbook_says(capacity: int, seed: int) -> None:
    """Single blocks: a working set that moves, loops over more than fits, and a heavy tail."""
    dice = np.random.default_rng(seed)
    asked: list[int] = []
    for phase in range(6):
        asked += ((dice.zipf(1.2, 4000) + 150 * phase) % 2000).tolist()
        asked += list(range(2000, 2000 + capacity * 3 // 2)) * 2
    textbook, ours = TextbookARC(capacity), make("arc", Tier(4000).context())
    known, hits = set[int](), [0, 0]
    for x in asked:
        hits[0] += textbook.ask(x)
        if x in known:
            hits[1] += 1
            ours.touch(np.array([x]), 0.0)
            continue
        if len(known) == capacity:
            gone = ours.coldest(1, 0.0)
            ours.remove(gone)
            known -= set(gone.tolist())
        ours.insert(np.array([x]), 0.0)
        known.add(x)
    assert hits[0] > len(asked) // 10
    assert abs(hits[1] - hits[0]) < 0.01 * hits[0]
