"""Queues that share segments, against lists."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.policy import queue as module
from kvstore.core.policy.queue import Queue, Segments

ROWS, QUEUES = 41, 4


class Both:
    """Some queues, and a list of rows for each."""

    def __init__(self, capacity: int = ROWS, queues: int = QUEUES) -> None:
        self.segments = Segments(np.zeros(capacity, np.int32))
        self.queues = [Queue(self.segments) for _ in range(queues)]
        self.lists: list[list[int]] = [[] for _ in range(queues)]

    def do(self, what: str, which: int, rows: list[int]) -> None:
        if what == "absorb":
            younger = rows[0] % len(self.queues) if rows else 0
            if younger != which:
                self.queues[which].absorb(self.queues[younger])
                self.lists[which] += self.lists[younger]
                self.lists[younger] = []
            return
        for mine in self.lists:
            mine[:] = [row for row in mine if row not in rows]
        some = np.array(rows, np.int64)
        if what == "append":
            self.queues[which].append(some)
            self.lists[which] += rows
        elif what == "prepend":
            self.queues[which].prepend(some)
            self.lists[which][:0] = rows
        else:
            self.segments.forget(some)

    def check(self, n: int = ROWS) -> None:
        whose = {q.number: mine for q, mine in zip(self.queues, self.lists, strict=True)}
        for queue, mine in zip(self.queues, self.lists, strict=True):
            got = queue.head(n).tolist()
            assert got == mine[: len(got)]
            assert bool(got) == bool(mine and n)
            assert len(queue) == len(mine)
        everything = np.arange(len(self.segments.stamps))
        numbers = self.segments.queues_of(everything).tolist()
        for row, number in enumerate(numbers):
            assert row in whose[number] if number else not any(row in mine for mine in self.lists)
        known = [row for row in everything.tolist() if numbers[row]]
        assert self.segments.known(everything).tolist() == known
        assert self.segments.lengths(np.array(list(whose))).tolist() == [len(m) for m in self.lists]

    def drain(self) -> None:
        for which, queue in enumerate(self.queues):
            while len(queue):
                got = queue.head(5).tolist()
                assert got
                assert got == self.lists[which][: len(got)]
                self.do("forget", which, got)
            assert queue.head(5).tolist() == []


def small(patch: pytest.MonkeyPatch, bits: int) -> None:
    """Segments of so few entries that a few rows fill many."""
    patch.setattr(module, "_BITS", bits)
    patch.setattr(module, "_SEGMENT", 1 << bits)
    patch.setattr(module, "_FIRST", min(1 << bits, 4))
    patch.setattr(module, "_WINDOW", 4)
    patch.setattr(module, "_WINDOWS", 2)
    patch.setattr(module, "_OVERHEAD", 0)


_rows = st.lists(st.integers(0, ROWS - 1), max_size=20, unique=True)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "prepend", "forget", "absorb"]),
        st.integers(0, QUEUES - 1),
        _rows,
    ),
    max_size=60,
)


@given(_steps, st.sampled_from([1, 3, 4, 12]))
@settings(max_examples=200)
def test_equal_lists(steps: list[tuple[str, int, list[int]]], bits: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if bits < 12:
            small(patch, bits)
        both = Both()
        for what, which, rows in steps:
            both.do(what, which, rows)
            both.check(7)
        both.drain()


@pytest.mark.parametrize("bits", [3, 5])
def test_thin_segments_are_merged_and_their_numbers_used_again(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, bits)
    dice = np.random.default_rng(bits)
    both = Both(300, 3)
    whats = ["append", "append", "append", "prepend", "forget", "absorb"]
    for _ in range(1500):
        rows = dice.permutation(300)[: dice.integers(0, 40)].tolist()
        both.do(str(dice.choice(whats)), int(dice.integers(0, 3)), rows)
        both.check(int(dice.integers(0, 30)))
    assert len(both.segments._all) < 4 * 300 // (1 << bits) + 30
    both.drain()


def test_thousands_of_queues_of_few_rows_take_few_bytes() -> None:
    segments = Segments(np.zeros(100_000, np.int32))
    queues = [Queue(segments) for _ in range(5000)]
    dice = np.random.default_rng(1)
    for _ in range(3):
        for i, queue in enumerate(queues):
            queue.append(dice.permutation(np.arange(20 * i, 20 * i + 20)))
    assert [len(q) for q in queues] == [20] * 5000
    assert sum(q.ram_bytes() for q in queues) < 5000 * 1024
    assert all(sorted(q.head(30).tolist()) == list(range(20 * i, 20 * i + 20)) for i, q in enumerate(queues))


def test_rows_moved_to_another_queue_take_no_memory() -> None:
    segments = Segments(np.zeros(100_000, np.int32))
    one, other = Queue(segments), Queue(segments)
    everything = np.arange(100_000)
    one.append(everything)
    other.append(everything[::-1])
    assert (len(one), len(other)) == (0, 100_000)
    assert one.ram_bytes() < 5 * module._SEGMENT
    assert one.head(3).tolist() == []
    assert other.head(3).tolist() == [99_999, 99_998, 99_997]


def test_the_segments_of_a_dropped_queue_are_freed_without_the_garbage_collector() -> None:
    segments = Segments(np.zeros(100_000, np.int32))
    queue = Queue(segments)
    queue.append(np.arange(100_000))
    entries = [weakref.ref(each.entries) for each in queue._chain()]
    assert len(entries) > 20
    gc.disable()
    try:
        del queue, segments
        assert not any(each() is not None for each in entries)
    finally:
        gc.enable()


def test_a_log_that_is_mostly_stale_still_offers_and_stays_small() -> None:
    segments = Segments(np.zeros(100_000, np.int32))
    queue, dice = Queue(segments), np.random.default_rng(1)
    queue.append(np.arange(100_000))
    for _ in range(2000):
        queue.append(dice.integers(0, 781) * 128 + np.arange(128))
    assert len(queue) == 100_000
    assert queue.ram_bytes() < 100_000 * 4 * 3
    assert len(queue.head(128)) == 128
