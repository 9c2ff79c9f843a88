"""Ghosts against a dictionary, and what a full table forgets."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.columns import zeros
from kvstore.core.reuse.ghosts import Ghosts, fingerprints
from tests.core.policy.pool import Tier

NAMES = fingerprints(Tier(5000).blocks, np.arange(5000), 1)


def names(*numbers: int) -> np.ndarray:
    return NAMES[np.array(numbers, np.int64)]


def values(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


_some = st.lists(st.integers(0, 60), max_size=12, unique=True)


@given(st.lists(st.tuples(st.sampled_from(["put", "take", "peek"]), _some), max_size=40))
@settings(max_examples=60)
def test_equals_a_dictionary_while_there_is_room(steps: list[tuple[str, list[int]]]) -> None:
    ghosts, oracle, clock = Ghosts(4096), dict[int, int](), 0
    for what, some in steps:
        clock += 1
        if what == "put":
            noted = [(clock * 100 + i) << 20 for i in range(len(some))]
            ghosts.put(names(*some), values(*noted))
            oracle.update(zip(some, noted, strict=True))
            continue
        got = getattr(ghosts, what)(names(*some)).tolist()
        assert got == [oracle.get(name, -1) for name in some]
        if what == "take":
            for name in some:
                oracle.pop(name, None)


def test_a_full_bucket_forgets_its_lowest_values() -> None:
    ghosts = Ghosts(8)
    ghosts.put(names(*range(8)), values(*range(100, 108)))
    ghosts.put(names(8, 9), values(200, 201))
    got = ghosts.peek(names(*range(10)))
    assert np.count_nonzero(got < 0) == 2
    assert sorted(got[got >= 0].tolist()) == [102, 103, 104, 105, 106, 107, 200, 201]


def test_a_batch_for_one_bucket_fills_all_its_ways() -> None:
    ghosts = Ghosts(8)
    ghosts.put(names(*range(8)), values(*range(1, 9)))
    assert ghosts.peek(names(*range(8))).tolist() == list(range(1, 9))


def test_value_zero_and_the_highest_are_values_like_any_other() -> None:
    ghosts = Ghosts(64)
    ghosts.put(names(1, 2), values(0, (1 << 41) - 1))
    assert ghosts.take(names(1, 2, 3)).tolist() == [0, (1 << 41) - 1, -1]
    assert ghosts.take(names(1, 2, 3)).tolist() == [-1, -1, -1]


def test_a_name_twice_in_a_batch_is_noted_once() -> None:
    ghosts = Ghosts(64)
    ghosts.put(names(1, 1), values(5, 5))
    assert ghosts.take(names(1)).tolist() == [5]
    assert ghosts.peek(names(1)).tolist() == [-1]


def test_the_table_keeps_most_entries_in_eight_bytes_each() -> None:
    ghosts = Ghosts(4096)
    for start in range(0, 4096, 128):
        ghosts.put(names(*range(start, start + 128)), values(*range(start, start + 128)))
    assert ghosts.ram_bytes() == 4096 * 8
    assert np.count_nonzero(ghosts.peek(NAMES[:4096]) >= 0) > 0.8 * 4096


def test_fingerprints_differ_by_key_by_namespace_and_by_seed() -> None:
    tier = Tier(1000)
    rows = np.arange(1000)
    one, other = fingerprints(tier.blocks, rows, 1), fingerprints(tier.blocks, rows, 2)
    tier.blocks.namespace[:] = 7
    third = fingerprints(tier.blocks, rows, 1)
    assert len({*one.tolist(), *other.tolist(), *third.tolist()}) == 3000
    bits = np.unpackbits(one.view(np.uint8)).reshape(1000, 64).mean(axis=0)
    assert bits.min() > 0.4
    assert bits.max() < 0.6


def test_columns_that_are_only_read_take_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    column = zeros(16 << 20, np.uint64)
    assert not column.any()
    assert resident() - before < 16 << 20
    column[::512] = 1
    assert resident() - before > 100 << 20
