"""The C reader of presence tables, against tables that the core writes and an oracle in plain Python."""

from __future__ import annotations

import random
import sys
import threading
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.columns import zeros
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.residency import presence as module
from kvstore.core.residency.presence import PresenceTable, table_bytes
from kvstore.native import portable_presence, splitmix
from kvstore.types import MAX_KEY_BYTES, PRESENCE_NOT_READY, PRESENCE_READY, PRESENCE_RETIRED

try:
    from kvstore.native._native import places, presence, presence_set
except ImportError:
    pytest.skip("the C extension was not built: no compiler, or no Python.h", allow_module_level=True)

ABSENT = 0xFF
U64 = (1 << 64) - 1
KEY_LENGTHS = range(1, MAX_KEY_BYTES + 1)


@pytest.fixture(params=["native", "portable"], autouse=True)
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both implementations of the writer."""
    if request.param == "portable":
        monkeypatch.setattr(module, "presence_set", portable_presence.presence_set)


def table_of(rows: int = 0, seed: int = 7) -> PresenceTable:
    table = PresenceTable(None, zeros(table_bytes(rows) // 8, np.uint64), seed)  # type: ignore[arg-type]
    table.set_state(PRESENCE_READY)
    return table


def put(table: PresenceTable, keys: list[bytes], flags: int, there: bool = True) -> bool:
    padded, n = b"".join(key.ljust(MAX_KEY_BYTES, b"\0") for key in keys), len(keys)
    words = Keys(padded, MAX_KEY_BYTES).words
    places = np.array([place_of(key) for key in keys], np.uint64)
    return table.set(words, len(keys[0]), np.full(n, flags, np.uint64), np.full(n, there), places)


def place_of(key: bytes) -> int:
    return int.from_bytes(key[-5:], "little") + 1


def joined(keys: list[bytes]) -> bytes:
    """The places of keys, as `places` returns them."""
    return np.array([place_of(key) for key in keys], np.uint64).tobytes()


def some_keys(n: int, length: int, seed: int = 1) -> list[bytes]:
    dice = random.Random(seed)
    return list(dict.fromkeys(dice.randbytes(length) for _ in range(n)))


def oracle(memory: np.ndarray[Any, Any], key: bytes) -> int:
    """The flags of a key, by the layout as it is documented, without arrays."""
    *factors, size_factor = [f | 1 for f in splitmix(int(memory[1]), MAX_KEY_BYTES // 8 + 1)]

    def mixed(word: int) -> int:
        word = (word ^ word >> 32) * 0x9E3779B97F4A7C15 & U64
        return word ^ word >> 29

    words = [int.from_bytes(key[i : i + 8], "little") for i in range(0, len(key), 8)]
    products = [(word ^ word >> 32) * factor for word, factor in zip(words, factors, strict=False)]
    hashed = mixed(len(key) * size_factor + sum(products) & U64)
    mark, bucket = (hashed & ~0x1F) or 0x20, mixed(hashed)
    buckets = (memory.size // 8 - 1) // 2
    for half in (bucket >> 32, bucket & 0xFFFFFFFF):
        at = 8 * (1 + (half * buckets >> 32))
        for cell in memory[at : at + 8].tolist():
            if cell & ~0x1F == mark:
                return int(cell & 0x1F)
    return ABSENT


@pytest.mark.parametrize("length", KEY_LENGTHS)
def test_keys_of_every_length_are_found(length: int) -> None:
    table, keys = table_of(), some_keys(100, length)
    stored, others = keys[::2], keys[1::2]
    for i, key in enumerate(stored):
        put(table, [key], i % 32)
    put(table, stored[:3], 0, there=False)
    expected = bytes([*[ABSENT] * 3, *[i % 32 for i in range(3, len(stored))], *[ABSENT] * len(others)])
    asked = stored + others
    assert presence(table.words, asked, False) == expected
    assert bytes(oracle(table.words, key) for key in asked) == expected
    assert places(table.words, stored[3:]) == (expected[3 : len(stored)], joined(stored[3:]))
    assert places(table.words, stored) == (b"", b"")


def test_keys_that_differ_in_the_highest_bits_of_words_are_different() -> None:
    table, key = table_of(), bytearray(32)
    put(table, [bytes(key)], 1)
    for i, k in combinations(range(4), 2):
        other = bytearray(key)
        other[8 * i + 7], other[8 * k + 7] = 0x80, 0x80
        assert presence(table.words, [bytes(other)], False) == bytes([ABSENT])


def test_keys_of_different_lengths_are_different() -> None:
    table = table_of()
    put(table, [b"\0"], 1)
    assert [presence(table.words, [bytes(n)], False) for n in KEY_LENGTHS] == [b"\1"] + [b"\xff"] * 63


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 64, 65, 1000, 8192])
def test_a_prefix_ends_at_the_first_absent_key(n: int) -> None:
    keys = some_keys(n, 32)
    for missing in {0, n // 2, n - 1} & set(range(n)) | {n}:
        table = table_of(n)
        if present := [key for i, key in enumerate(keys) if i != missing]:
            assert put(table, present, 2)
        assert presence(table.words, keys, True) == bytes([2]) * missing
        assert presence(table.words, keys, False) == bytes(ABSENT if i == missing else 2 for i in range(n))
        assert places(table.words, keys) == (bytes([2]) * missing, joined(keys[:missing]))


def test_keys_at_any_address_are_read_to_their_end_only() -> None:
    table = table_of()
    for length in KEY_LENGTHS:
        key = random.Random(length).randbytes(length)
        put(table, [key], 1)
        for shift in range(9):
            copy = bytes(bytearray(shift) + key + b"x")[shift:-1]
            assert presence(table.words, [copy], True) == b"\1"


def test_a_table_that_is_not_ready_says_nothing() -> None:
    table, keys = table_of(), some_keys(10, 32)
    put(table, keys, 0)
    for state in (PRESENCE_NOT_READY, PRESENCE_RETIRED, 3, U64):
        table.set_state(state)
        assert presence(table.words, keys, True) is places(table.words, keys) is None
    table.set_state(PRESENCE_READY)
    assert presence(table.words, keys, True) == bytes(10)


def test_a_full_table_says_so_and_has_what_fits() -> None:
    table, keys = table_of(), some_keys(4096, 32)
    at = 0
    while put(table, keys[at : at + 64], 1):
        at += 64
    assert 0.5 * table.cells.size < at <= 0.65 * table.cells.size
    assert presence(table.words, keys[:at], True) == bytes([1]) * at


@pytest.mark.parametrize(
    ("memory", "keys", "error"),
    [
        (zeros(24, np.uint64), [b"k" * 8, b"k" * 9], ValueError),
        (zeros(24, np.uint64), [b""], ValueError),
        (zeros(24, np.uint64), [b"k" * 65], ValueError),
        (zeros(24, np.uint64), ["text"], TypeError),
        (zeros(24, np.uint64), [bytearray(b"k")], TypeError),
        (zeros(24, np.uint64), (b"k",), SystemError),
        (zeros(23, np.uint64), [b"k"], ValueError),
        (zeros(0, np.uint64), [b"k"], ValueError),
        (zeros(32, np.uint64)[1:], [b"k"], ValueError),
        (None, [b"k"], TypeError),
    ],
)
def test_what_makes_no_sense_is_refused(memory: Any, keys: Any, error: type) -> None:
    if memory is not None and memory.size:
        memory[0] = PRESENCE_READY
    with pytest.raises(error):
        presence(memory, keys, False)
    with pytest.raises(error):
        places(memory, keys)


changes_of_keys = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 31), st.booleans()), max_size=60)


@pytest.mark.parametrize(
    ("size", "words", "flags", "there", "places"),
    [
        (0, 8, 1, 1, 1),
        (65, 8, 1, 1, 1),
        (-1, 8, 1, 1, 1),
        (32, 7, 1, 1, 1),
        (32, 8, 2, 1, 1),
        (32, 8, 1, 2, 1),
        (32, 8, 1, 1, 0),
    ],
)
def test_columns_of_other_lengths_are_not_written(
    size: int, words: int, flags: int, there: int, places: int
) -> None:
    table = table_of()
    keys, flagged, placed = (np.ones(n, np.uint64) for n in (words, flags, places))
    with pytest.raises(ValueError, match="not a key, flags and a place"):
        presence_set(table.words, keys, size, flagged, np.ones(there, np.bool_), placed)
    assert not table.cells.any()


@pytest.mark.parametrize("length", [0, 16, 23])
def test_memory_that_is_no_table_is_not_written(length: int) -> None:
    memory, one = zeros(length, np.uint64), np.ones(1, np.uint64)
    with pytest.raises(ValueError, match="no presence table"):
        presence_set(memory, np.ones(8, np.uint64), 32, one, np.ones(1, np.bool_), one)
    assert not memory.any()


@given(changes_of_keys, st.integers(0, U64))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_reads_what_was_written_last(changes: list[tuple[int, int, bool]], seed: int) -> None:
    table, keys, wanted = table_of(seed=seed), some_keys(41, 13), dict[bytes, int]()
    for which, flags, there in changes:
        put(table, [keys[which]], flags, there)
        wanted.pop(keys[which], None)
        if there:
            wanted[keys[which]] = flags
        assert table.count == len(wanted)
    assert list(presence(table.words, keys, False)) == [wanted.get(key, ABSENT) for key in keys]


def test_readers_beside_the_writer_see_each_key_as_it_was_or_is() -> None:
    table, keys = table_of(2000), some_keys(2000, 32)
    stays, moves = keys[:1000], keys[1000:]
    put(table, stays, 0)
    wrong, over = list[bytes](), threading.Event()

    def read() -> None:
        while not over.is_set():
            wrong.extend(each for each in [presence(table.words, stays, True)] if each.strip(b"\0\2") != b"")
            wrong.extend(each for each in [presence(table.words, stays, True)] if len(each) != len(stays))

    reader, interval = threading.Thread(target=read), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns within a call
    reader.start()
    for _ in range(200):
        put(table, moves, 1)
        put(table, stays, 2)
        put(table, moves, 1, there=False)
        put(table, stays, 0)
    over.set()
    reader.join()
    sys.setswitchinterval(interval)
    assert not wrong
