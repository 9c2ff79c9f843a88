"""How often a set of blocks fits in a tier."""

from __future__ import annotations

import pytest

from kvstore.tier_sizes import how_often
from kvstore.types import Geometry, extent_bytes

GIB = 1 << 30


def test_blocks_of_one_size_fill_all_slots() -> None:
    extent = extent_bytes(GIB)
    slots = GIB // extent * Geometry(extent, 2 << 20, table=True).slots
    assert how_often({2 << 20: 1}, GIB, memory=True) == slots
    assert how_often({2 << 20: 8}, GIB, memory=True) == slots // 8
    # Without headers, nothing is lost.
    assert how_often({2 << 20: 1}, GIB, memory=False) == GIB // (2 << 20)


def test_blocks_occupy_whole_slots() -> None:
    assert how_often({4097: 1}, GIB, memory=False) == how_often({8192: 1}, GIB, memory=False)


def test_sizes_share_the_extents() -> None:
    assert how_often({2 << 20: 1, 1 << 20: 2}, GIB, memory=False) == GIB // (4 << 20)


@pytest.mark.parametrize("limit", [GIB, 64 * GIB])
def test_a_block_larger_than_an_extent_never_fits(limit: int) -> None:
    assert how_often({extent_bytes(limit) + 1: 1, 4096: 1}, limit, memory=True) == 0


def test_a_tier_without_a_whole_extent_holds_nothing() -> None:
    assert how_often({4096: 1}, 1 << 20, memory=False) == 0
