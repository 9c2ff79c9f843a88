"""How far a chain is worth loading."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.transfers.worth import blocks_worth_loading

Times = st.lists(st.integers(0, 50), max_size=20)


@given(Times, st.integers(1, 60), st.integers(0, 600) | st.just(math.inf))
def test_no_other_end_leaves_a_shorter_time(times: list[int], block: int, within: float) -> None:
    load = np.cumsum(np.array(times, float))
    n = blocks_worth_loading(load, block, within)

    def took(end: int) -> float:
        return (load[end - 1] if end else 0.0) + (len(times) - end) * block

    ends = [end for end in range(len(times) + 1) if not end or load[end - 1] <= within]
    assert took(n) == min(map(took, ends))
    assert n == max(end for end in ends if took(end) == took(n)), "the longest of equal ends"


@given(Times, st.integers(0, 600))
def test_without_a_speed_all_that_loads_in_time_counts(times: list[int], within: int) -> None:
    load = np.cumsum(np.array(times, float))
    assert blocks_worth_loading(load, 0.0, within) == sum(each <= within for each in load)


def test_a_slow_tail_is_left_out() -> None:
    load = np.array([0.1, 0.2, 0.3, 5.0, 10.0])
    assert blocks_worth_loading(load, 1.0, math.inf) == 3
    assert blocks_worth_loading(load, 1.0, 0.25) == 2
    assert blocks_worth_loading(load, 0.05, math.inf) == 0
