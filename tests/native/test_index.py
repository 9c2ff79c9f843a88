"""Tables of the index: bad input. What they find is tested in `tests/core/blocks/test_index.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.types import MAX_KEY_BYTES

try:
    from kvstore.native._native import index_add, index_find, index_remove
except ImportError:
    pytest.skip("the C extension was not built: no compiler, or no Python.h", allow_module_level=True)

ROWS, WORDS = 16, MAX_KEY_BYTES // 8
INFO = 1 | 8 << 16


def parts(buckets: int = 2, words: int = ROWS * WORDS, factors: int = WORDS + 2) -> tuple[Any, ...]:
    infos = np.full(ROWS, INFO, np.uint32)
    columns = np.arange(words, dtype=np.uint64), infos, np.ones(factors, np.uint64)
    return np.zeros((buckets, 16), np.uint32), *columns


@pytest.mark.parametrize("change", [index_add, index_remove])
@pytest.mark.parametrize("row", [-1, ROWS, 1 << 40])
def test_a_row_that_does_not_exist_changes_nothing(change: Any, row: int) -> None:
    table = parts()
    with pytest.raises(IndexError, match=f"row {row} of {ROWS}"):
        change(table, np.array([3, row]))
    assert not table[0].any()


@pytest.mark.parametrize(
    "wrong", [{"buckets": 3}, {"buckets": 0}, {"words": ROWS * WORDS - 1}, {"factors": 9}, {"factors": 0}]
)
def test_columns_that_do_not_fit_together_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no table of the index"):
        index_add(parts(**wrong), np.array([1]))
    with pytest.raises(ValueError, match="no table of the index"):
        index_find(parts(**wrong), bytes(8), INFO, np.zeros(1, np.int64))


@pytest.mark.parametrize("size", [1, 7, 9, MAX_KEY_BYTES + 8])
def test_keys_that_are_no_words_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes of keys for 1 rows"):
        index_find(parts(), bytes(size), INFO, np.zeros(1, np.int64))


@pytest.mark.parametrize("wrong", [(), (1, 2, 3, 4), "abcd"])
def test_what_is_no_table_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, IndexError)):
        index_remove(wrong, np.array([1]))


def test_a_read_only_table_is_not_changed() -> None:
    table = parts()
    table[0].flags.writeable = False
    with pytest.raises((BufferError, ValueError), match="read-only"):
        index_add(table, np.array([1]))


def test_empty_batches_are_nothing() -> None:
    table, none = parts(), np.empty(0, np.int64)
    index_find(table, b"", INFO, none)
    assert index_add(table, none) == index_remove(table, none) == []


def test_rows_beyond_two_full_buckets_are_returned() -> None:
    table = parts(buckets=1)
    assert index_add(table, np.arange(10)) == [8, 9]
    assert index_remove(table, np.arange(7, 10)) == [1, 2]
    assert index_add(table, np.array([8])) == []
