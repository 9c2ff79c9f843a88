"""The allocator against a plain account of who has which slot."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.capacity.extents import Extents
from kvstore.core.capacity.quotas import SlotPool
from kvstore.types import ALIGN, Geometry

SMALL, LARGE = SlotPool(0, 0, ALIGN), SlotPool(0, 0, 3 * ALIGN)
EXTENT = 12 * ALIGN


def make(extents: int = 4, table: bool = False, max_slots: int = 1 << 12) -> Extents:
    made = Extents(extents * EXTENT, EXTENT, table, max_slots, tier=1)
    for number in range(extents):
        made.add(number)
    return made


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def checksums(n: int) -> np.ndarray:
    return np.zeros(n, np.uint64)


def own(extents: Extents, numbers: np.ndarray, rows: np.ndarray) -> None:
    extents.slots.own(numbers, rows, checksums(len(rows)))


def place(extents: Extents, number: int) -> tuple[int, int]:
    value = int(extents.slots.place[number])
    return value >> 32, value & 0xFFFFFFFF


def test_extents_are_given_out_lowest_first() -> None:
    e = make()
    assert [e.assign(SMALL), e.assign(LARGE), e.assign(SMALL)] == [0, 1, 2]
    assert (e.slots.free(SMALL), e.slots.free(LARGE)) == (24, 4)
    assert e.assign(SMALL) == 3
    assert e.assign(SMALL) is None


def test_slots_of_a_batch_lie_in_a_row() -> None:
    e = make()
    e.assign(SMALL)
    taken = e.slots.take(SMALL, 5)
    assert [place(e, s) for s in taken.tolist()] == [(0, i) for i in range(5)]
    assert e.slots.classes.slots_at(slots(0, 0), slots(1, 4)).tolist() == [taken[1], taken[4]]


def test_a_slot_has_a_new_version_whenever_it_is_taken() -> None:
    e = make()
    e.assign(SMALL)
    first = e.slots.take(SMALL, 1)
    version = int(e.slots.version[first][0])
    e.slots.release(first)
    again = e.slots.take(SMALL, 1)
    assert again.tolist() == first.tolist()
    assert int(e.slots.version[again][0]) == version + 1


def test_a_slot_without_owner_and_references_is_free() -> None:
    e = make()
    e.assign(SMALL)
    taken = e.slots.take(SMALL, 1)
    own(e, taken, slots(5))
    e.slots.release(taken)
    assert e.slots.free(SMALL) == 11
    e.slots.hold(taken)
    e.slots.disown(taken)
    assert e.slots.free(SMALL) == 11
    e.slots.release(taken)
    assert e.slots.free(SMALL) == 12


def test_a_retired_slot_is_never_free_again() -> None:
    e = make()
    e.assign(SMALL)
    taken = e.slots.take(SMALL, 1)
    own(e, taken, slots(5))
    e.slots.release(taken)
    e.slots.retire(taken)
    assert e.slots.free(SMALL) == 11
    assert e.used_bytes == ALIGN
    e.slots.hold(taken)
    e.slots.release(taken)
    assert e.slots.take(SMALL, 12).tolist() == [n for n in range(12) if n != taken[0]]


def test_an_empty_extent_can_change_its_slot_size() -> None:
    e = make(2)
    e.assign(SMALL)
    e.assign(SMALL)
    kept = e.slots.take(SMALL, 12)
    assert {place(e, s)[0] for s in kept.tolist()} == {0} or len(kept) == 12
    full = {place(e, s)[0] for s in kept.tolist()}
    [empty] = {0, 1} - full
    e.slots.close(empty)
    e.withdraw(empty)
    assert e.slots.free(SMALL) == 0
    assert e.assign(LARGE) == empty
    large = e.slots.take(LARGE, 9)
    assert [place(e, s) for s in large.tolist()] == [(empty, i) for i in range(4)]
    assert not set(large.tolist()) & set(kept.tolist())
    assert e.slots.pool_of(int(large[0])) == LARGE
    assert e.slots.pool_of(int(kept[0])) == SMALL


def test_extents_beyond_the_limit_break_an_invariant() -> None:
    e = make(2)
    with pytest.raises(AssertionError):
        e.add(2)
    with pytest.raises(AssertionError):
        make(2).add(1)


def test_a_block_larger_than_an_extent_gets_none() -> None:
    e = make()
    assert e.assign(SlotPool(0, 0, EXTENT + ALIGN)) is None
    assert e.assign(SlotPool(0, 0, EXTENT)) == 0


def test_slots_are_bounded_and_every_extent_has_its_part() -> None:
    e = make(4, max_slots=20)
    assert [e.assign(SMALL), e.assign(SMALL), e.assign(SMALL), e.assign(LARGE)] == [0, 1, 2, 3]
    assert (e.slots.free(SMALL), e.slots.free(LARGE)) == (15, 4)
    assert e.slots.classes.has(
        np.array([0, 0, 3, 9], np.uint32), np.array([4, 5, 3, 0], np.uint32)
    ).tolist() == [
        True,
        False,
        True,
        False,
    ]


@example([(0, 4), (1, 2), (2, 2), (3, 2), (0, 2)])  # three slots are free at each end, and six are wanted
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 3, 4, 5, 7, 12])), max_size=60))
def test_fragmentation_never_prevents_an_assignment(steps: list[tuple[int, int]]) -> None:
    e = make(4, max_slots=24)
    for extent, pages in steps:
        if extent not in e.unassigned:
            e.slots.close(extent)
            e.withdraw(extent)
        assert e.assign(SlotPool(0, 0, pages * ALIGN), extent) == extent
        spans = sorted(
            (e.slots.classes.span(i).start, e.slots.classes.span(i).stop)
            for i in range(4)
            if i not in e.unassigned
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_extents_with_high_numbers_take_no_more_memory() -> None:
    first = 8 << 24
    extents = Extents(4 * EXTENT, EXTENT, False, 1 << 12, tier=0)
    tracemalloc.start()
    for number in range(first, first + 4):
        extents.add(number)
        extents.assign((SMALL, LARGE)[number % 2])
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 1 << 20
    mine, others = extents.slots.take(SMALL, 13), extents.slots.take(LARGE, 5)
    assert {place(extents, slot)[0] for slot in mine} == {first, first + 2}
    assert {place(extents, slot)[0] for slot in others} == {first + 1, first + 3}
    assert {members.pool: len(some) for members, some in extents.slots.by_class(np.append(mine, others))} == {
        SMALL: 13,
        LARGE: 5,
    }
    assert extents.slots.are_of(LARGE, others).all()
    assert extents.slots.pool_of(int(others[0])) == LARGE
    extents.slots.release(mine)
    extents.slots.close(first)
    extents.withdraw(first)
    assert extents.slots.classes.pool_at(first) is None
    assert extents.slots.classes.pool_at(first + 1) == LARGE


def test_start_up_claims_slots_where_they_are() -> None:
    e = make()
    e.assign(SMALL, 2)
    numbers = e.slots.classes.slots_at(slots(2, 2), slots(3, 7))
    e.slots.claim(numbers, slots(10, 11), slots(40, 41), np.array([1, 2], np.uint64))
    assert e.slots.free(SMALL) == 10
    assert e.used_bytes == 2 * ALIGN
    taken = e.slots.take(SMALL, 12)
    assert not set(taken.tolist()) & set(numbers.tolist())
    assert e.slots.version[numbers].tolist() == [40, 41]
    assert e.slots.owner[numbers].tolist() == [10, 11]


@pytest.mark.parametrize("slot", [ALIGN, 3 * ALIGN, 5 * ALIGN])
@pytest.mark.parametrize("table", [False, True])
def test_slots_and_their_table_fit_into_the_extent(slot: int, table: bool) -> None:
    g = Geometry(EXTENT, slot, table)
    assert g.payload_offset + g.slots * slot <= EXTENT
    assert g.payload_offset % ALIGN == 0
    assert g.payload_offset >= 128 * g.slots * table
    assert g.payload_offset + (g.slots + 1) * slot > EXTENT - ALIGN * table


class Machine(RuleBasedStateMachine):
    """Takes, holds, owns, lets go; slot by slot in the plain account, in batches in the allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.e = make(3)
        self.refs: dict[int, int] = {}
        self.owner: dict[int, int] = {}
        self.retired: set[int] = set()
        self.assigned: dict[int, SlotPool] = {}
        self.rows = 0

    def in_use(self) -> set[int]:
        return {s for s in {*self.refs, *self.owner} if self.refs.get(s) or s in self.owner} | self.retired

    def some(self, which: int, among: set[int], n: int) -> list[int]:
        """Slots of one size, any order."""
        size = SMALL if which % 2 else LARGE
        mine = sorted(s for s in among if self.assigned[place(self.e, s)[0]] == size)
        return mine[which % (len(mine) + 1) :][:n]

    @rule(size=st.sampled_from([SMALL, LARGE]))
    def assign(self, size: SlotPool) -> None:
        extent = self.e.assign(size)
        assert (extent is None) == (len(self.assigned) == 3)
        if extent is not None:
            assert extent not in self.assigned
            self.assigned[extent] = size

    @rule(size=st.sampled_from([SMALL, LARGE]), n=st.integers(0, 15))
    def take(self, size: SlotPool, n: int) -> None:
        if size not in self.assigned.values():
            return
        free = self.e.slots.free(size)
        taken = self.e.slots.take(size, n).tolist()
        assert len(taken) == min(n, free)
        assert len(set(taken)) == len(taken)
        assert not set(taken) & self.in_use()
        assert all(self.assigned[place(self.e, s)[0]] == size for s in taken)
        self.refs.update(dict.fromkeys(taken, 1))

    @rule(which=st.integers(0, 99), n=st.integers(1, 9))
    def hold(self, which: int, n: int) -> None:
        some = self.some(which, {s for s in self.refs if self.refs[s]} | set(self.owner), n)
        self.e.slots.hold(slots(*some))
        for s in some:
            self.refs[s] = self.refs.get(s, 0) + 1

    @rule(which=st.integers(0, 99), n=st.integers(1, 9))
    def release(self, which: int, n: int) -> None:
        some = self.some(which, {s for s in self.refs if self.refs[s]}, n)
        self.e.slots.release(slots(*some))
        for s in some:
            self.refs[s] -= 1

    @rule(which=st.integers(0, 99), n=st.integers(1, 9))
    def own(self, which: int, n: int) -> None:
        some = self.some(which, {s for s in self.refs if self.refs[s]} - set(self.owner) - self.retired, n)
        rows = list(range(self.rows, self.rows + len(some)))
        self.rows += len(some)
        own(self.e, slots(*some), slots(*rows))
        self.owner.update(zip(some, rows, strict=True))

    @rule(which=st.integers(0, 99), n=st.integers(1, 9), forever=st.sampled_from([False, False, False, True]))
    def disown(self, which: int, n: int, forever: bool) -> None:
        some = self.some(which, set(self.owner), n)
        if forever:
            some = some[:1]
            self.retired.update(some)
            self.e.slots.retire(slots(*some))
        else:
            self.e.slots.disown(slots(*some))
        for s in some:
            del self.owner[s]

    @precondition(lambda self: self.assigned)
    @rule(which=st.integers(0, 9))
    def withdraw(self, which: int) -> None:
        extent = sorted(self.assigned)[which % len(self.assigned)]
        if not {place(self.e, s)[0] for s in self.in_use()} & {extent}:
            self.e.slots.close(extent)
            self.e.withdraw(extent)
            del self.assigned[extent]

    @invariant()
    def free_and_used_are_the_rest_of_each_other(self) -> None:
        used = self.in_use()
        sizes = [self.assigned[place(self.e, s)[0]] for s in used]
        for size in (SMALL, LARGE):
            total = sum(EXTENT // size.slot_bytes for s in self.assigned.values() if s == size)
            assert self.e.slots.free(size) == total - sizes.count(size)
        assert self.e.used_bytes == sum(size.slot_bytes for size in sizes)
        assert self.e.used_bytes <= self.e.capacity_bytes <= self.e.limit_bytes


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)
