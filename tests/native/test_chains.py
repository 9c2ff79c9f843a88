"""Walks up chains of rows: C and numpy find the same; rows that are not in the table."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvstore.native import portable_chains

try:
    from kvstore.native import _native
except ImportError:
    pytest.skip("the C extension was not built: no compiler, or no Python.h", allow_module_level=True)

ROWS = 4000


def table(dice: random.Random) -> np.ndarray:
    """Parents of rows: chains whose runs of consecutive rows have several lengths."""
    parent, row, ends = np.full(ROWS, -1, np.int32), 0, [-1]
    while row < ROWS:
        n = min(dice.choice([1, 2, 31, 32, 33, 40, 255, 256, 257, 900]), ROWS - row)
        parent[row] = dice.choice(ends[-8:])
        parent[row + 1 : row + n] = np.arange(row, row + n - 1)
        row += n
        ends.append(row - 1)
    # Rows are reused in any order.
    order = np.arange(ROWS, dtype=np.int32)
    if dice.random() < 0.3:
        np.random.default_rng(dice.randrange(1 << 32)).shuffle(order)
    moved = np.full(ROWS, -1, np.int32)
    moved[order] = np.where(parent >= 0, order[parent], -1)
    return moved


@pytest.mark.parametrize("seed", range(30))
def test_both_walk_the_same_way(seed: int) -> None:
    dice = random.Random(seed)
    parent = table(dice)
    for _ in range(60):
        row, room, budget = dice.randrange(-1, ROWS), dice.choice([1, 7, ROWS]), dice.randrange(40)
        chain = []
        while row >= 0:
            chain.append(row)
            row = int(parent[row])
        start = chain[0] if chain else -1
        jumps = sum(above != below - 1 for below, above in pairwise(chain))
        left = budget - 1 - jumps - len(chain) // 256
        wanted = ((chain[-1], left) if left >= 0 else (-1, 0)) if chain else (-1, budget)
        for module in (_native, portable_chains):
            out = np.full(room, -7)
            n = module.chain_above(parent, start, out)
            assert out[:n].tolist() == chain[:room]
            assert (out[n:] == -7).all()
            assert module.chain_root(parent, start, budget) == wanted


@pytest.mark.parametrize("module", [_native, portable_chains])
def test_rows_beyond_the_table_are_refused(module: Any) -> None:
    parent = np.array([-1, 0, 99], np.int32)
    for row in (3, 1 << 40, 2):
        with pytest.raises(IndexError, match=r"row \d+ of 3"):
            module.chain_above(parent, row, np.zeros(9, np.int64))
        with pytest.raises(IndexError, match=r"row \d+ of 3"):
            module.chain_root(parent, row, 1000)
