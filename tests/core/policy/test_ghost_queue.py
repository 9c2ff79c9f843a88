"""The ghosts of one pool: how many count, and that pools share a table fairly."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.policy.ghost_queue import GhostQueue
from tests.core.policy.pool import Tier

ROWS = 20_000


def leave(past: GhostQueue, which: int, start: int, stop: int, batch: int = 50) -> None:
    for first in range(start, stop, batch):
        past.note(which, np.arange(first, min(first + batch, stop)))


def test_an_empty_ghost_queue_has_no_entry() -> None:
    assert GhostQueue(Tier(10).context()).recall(np.arange(3), (5, 5)).tolist() == [-1, -1, -1]


def test_a_ghost_is_recalled_once_and_by_its_list() -> None:
    past = GhostQueue(Tier(100, ghosts=1024).context())
    past.note(0, np.array([3, 4]))
    past.note(1, np.array([5]))
    assert past.recall(np.array([5, 4, 9]), (10, 10)).tolist() == [1, 0, -1]
    assert past.recall(np.array([5, 4, 3]), (10, 10)).tolist() == [-1, -1, 0]
    assert past.gone == [2, 1]


@pytest.mark.parametrize("n", [0, 1, 30, 300, 3000])
def test_the_last_of_each_list_count_and_no_others(n: int) -> None:
    past = GhostQueue(Tier(ROWS, ghosts=8 * ROWS).context())
    for first in range(0, ROWS, 100):
        past.recall(np.array([], np.int64), (n, n // 2))
        past.note(0, np.arange(first, first + 70))
        past.note(1, np.arange(first + 70, first + 100))
    came = past.recall(np.arange(ROWS), (n, n // 2))
    rows = np.arange(ROWS)
    for which, last in ((0, n), (1, n // 2)):
        mine = rows[(rows % 100 < 70) == (which == 0)]
        found = rows[came == which]
        assert set(found.tolist()) <= set(mine.tolist())
        assert abs(len(found) - last) <= last // 10
        if len(found) > 1:
            assert np.isin(mine[-(last - last // 10) :], found).all()


def test_a_pool_that_evicts_little_keeps_its_latest_ghosts_beside_one_that_evicted_much_before() -> None:
    tier = Tier(ROWS, ghosts=2048)
    busy, quiet = GhostQueue(tier.context()), GhostQueue(tier.context())
    leave(busy, 0, 0, 15_000)
    leave(quiet, 0, 15_000, 15_200)
    assert np.count_nonzero(quiet.recall(np.arange(15_000, 15_200), (200, 0)) == 0) > 190
