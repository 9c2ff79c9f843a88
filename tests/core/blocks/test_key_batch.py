"""Keys of one request, of every length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.blocks.block_table import Blocks
from kvstore.core.blocks.key_batch import Keys
from kvstore.types import MAX_KEY_BYTES


@pytest.mark.parametrize("size", range(1, MAX_KEY_BYTES + 1))
def test_words_are_the_keys_padded_with_zeros(size: int) -> None:
    some = [bytes((7 * i + j) % 256 for j in range(size)) for i in range(5)]
    keys = Keys(b"".join(some), size)
    assert len(keys) == 5
    assert [keys[i] for i in range(5)] == some
    assert keys.words.shape == (5, -(-size // 8))
    for word, key in zip(keys.words, some, strict=True):
        assert word.tobytes() == key + bytes(-size % 8)
    assert [bytes(row) for row in keys.array] == some


@given(st.integers(1, 64), st.integers(0, 9), st.data())
def test_a_part_is_cut_out_of_the_whole(size: int, n: int, data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=n * size, max_size=n * size))
    keys = Keys(raw, size)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    part = keys.take(start, stop)
    assert part.raw == raw[start * size : stop * size]
    assert [part[i] for i in range(len(part))] == [keys[i] for i in range(start, stop)]


def test_no_keys_have_no_words() -> None:
    assert Keys(b"", 1).words.shape == (0, 1)
    assert Keys(b"", 32).words.shape == (0, 4)


@pytest.mark.parametrize("size", range(1, MAX_KEY_BYTES + 1))
def test_rows_give_keys_back_with_their_trailing_zeros(size: int) -> None:
    blocks = Blocks(8, 2)
    some = [b"a" + bytes(size - 1), bytes(size), b"\xff" * size]
    keys = Keys(b"".join(some), size)
    rows = blocks.take(3, keys, np.arange(3))
    assert [blocks.key(row) for row in rows.tolist()] == some


def test_a_short_key_in_a_used_row_leaves_nothing_of_the_long_one() -> None:
    blocks = Blocks(1, 1)
    blocks.give_back(blocks.take(1, Keys(b"x" * 64, 64), np.arange(1)))
    [row] = blocks.take(1, Keys(b"y", 1), np.arange(1)).tolist()
    assert blocks.key(row) == b"y"
    assert blocks.all_words(np.array([row])).tobytes() == b"y".ljust(64, b"\0")


def test_rows_are_bounded_and_come_back_in_order() -> None:
    blocks = Blocks(4, 1)
    keys = Keys(b"abcdef", 1)
    rows = blocks.take(1, keys, np.arange(6))
    assert rows.tolist() == [0, 1, 2, 3]
    assert blocks.used == 4
    assert blocks.take(1, keys, np.array([4])).tolist() == []
    blocks.give_back(rows[::-1])
    assert blocks.used == 0
    assert blocks.take(1, keys, np.array([2, 4, 5])).tolist() == [0, 1, 2]
    assert [blocks.key(r) for r in range(3)] == [b"c", b"e", b"f"]


def test_thousands_of_rows_come_and_go() -> None:
    blocks = Blocks(5000, 1)
    keys = Keys(np.arange(5000, dtype="<u4").tobytes(), 4)
    rows = blocks.take(1, keys, np.arange(5000))
    blocks.give_back(rows[::2])
    again = blocks.take(1, keys, np.arange(2000))
    assert len(again) == 2000
    assert len(np.unique(np.concatenate((again, rows[1::2])))) == 4500
    assert blocks.used == 4500


def test_keys_that_share_their_first_word_are_distinct() -> None:
    keys = [b"same-one" + bytes([i]) * 24 for i in range(4)]
    assert Keys(b"".join(keys), 32).distinct
    assert not Keys(b"".join([*keys, keys[1]]), 32).distinct
    assert Keys(b"", 32).distinct
