"""Belady's bound compared with all possible choices of a cache."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.lab.belady import Bound
from kvstore.lab.workload import Workload
from tests.lab.small import prompts_of, workload


def best_hits(load: Workload, capacity: int) -> int:
    """Returns the most hits over all possible contents after each request."""
    best = {frozenset[int](): 0}
    for blocks in prompts_of(load):
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            found = next((i for i, block in enumerate(blocks) if block not in kept), len(blocks))
            pool = sorted(kept | set(blocks))
            for choice in combinations(pool, min(capacity, len(pool))):
                chosen = frozenset(choice)
                after[chosen] = max(after.get(chosen, 0), hits + found)
        best = after
    return max(best.values())


@given(st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=9), st.integers(1, 4))
def test_the_bound_equals_the_best_of_all_choices(prompts: list[list[int]], capacity: int) -> None:
    load = workload(prompts)
    assert Bound(load).hits(capacity) == best_hits(load, capacity)


def test_the_block_with_the_latest_next_use_is_not_kept() -> None:
    # LRU would have no hits here: it always drops the next block.
    load = workload([[1], [2], [3]] * 5)
    assert Bound(load).hits(2) == 8
    assert Bound(load).hits(3) == 12


def test_empty_prompts_have_no_hits() -> None:
    assert Bound(workload([[], []])).hits(5) == 0
