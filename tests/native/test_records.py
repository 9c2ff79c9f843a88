"""Pages of records: C and numpy make, find and take the same, also of damaged pages; bad input."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest

from kvstore.native import portable_records
from kvstore.tiers.nvme.records import PAGE_SLOTS, ROW, RecordBatch, rewritten

try:
    from kvstore.native import _native
except ImportError:
    pytest.skip("the C extension was not built: no compiler, or no Python.h", allow_module_level=True)

Pages = list[tuple[Any, Any]]

ITEMS = (4, 0, 1, 0, 1, 4, 4, 8, 4, 8, 8)
"""Bytes of an item of each column; 0: the width of keys."""
WIDTH = 64


def pages_of(dice: random.Random, n: int) -> Pages:
    """Pages with n blocks, whose keys have several lengths."""
    places = sorted(dice.sample(range(0, 40 * n, dice.choice([1, 3])), n))
    longest = dice.choice([1, 8, 20, 32, 33, 64])
    records = RecordBatch(
        [dice.randrange(1, 9) for _ in places],
        [dice.randbytes(dice.randrange(1, longest + 1)) for _ in places],
        [dice.randbytes(dice.randrange(longest + 1)) for _ in places],
        [place >> 8 for place in places],
        [place & 255 for place in places],
        [dice.randrange(1 << 64) for _ in places],
        [dice.randrange(1 << 32) for _ in places],
        [dice.randrange(1 << 64) for _ in places],
        [dice.choice([1.5, dice.uniform(-1e9, 1e9)]) for _ in places],
    )
    return [(key, page) for key, page in rewritten(lambda key: None, [records.pack()]) if page is not None]


def found(module: Any, pages: Pages) -> tuple[Any, ...]:
    room = PAGE_SLOTS * len(pages)
    columns = np.full(room, -1), np.full(room, -1.0), np.zeros(room, np.uint64)
    n, width, bad_pages, bad_places = module.records_find(pages, *columns)
    return (*(column[:n].tolist() for column in columns), width, bad_pages, sorted(bad_places))


def taken(module: Any, pages: Pages, rows: list[int], width: int = WIDTH) -> list[bytes]:
    n = len(rows)
    columns = tuple(np.full((n, item or width), 255, np.uint8) for item in ITEMS)
    kinds = ["<u4", "u1", "u1", "u1", "u1", "<u4", "<u4", "<u8", "<u4", "<u8", "<f8"]
    shaped = tuple(
        column if not item else column.view(kind).reshape(n)
        for column, item, kind in zip(columns, ITEMS, kinds, strict=True)
    )
    module.records_take(pages, np.array(rows, np.int64), width, shaped)
    return [column.tobytes() for column in columns]


@pytest.mark.parametrize("seed", range(40))
def test_both_find_and_take_the_same(seed: int) -> None:
    dice = random.Random(seed)
    pages = [page for _ in range(dice.randrange(1, 4)) for page in pages_of(dice, dice.randrange(1, 60))]
    total = sum(sum(map(any, np.frombuffer(page, np.uint8).reshape(PAGE_SLOTS, -1))) for _, page in pages)
    rows = found(_native, pages)[0]
    assert len(rows) == total, "no record is lost"
    for i in dice.sample(range(len(pages)), min(3, len(pages))):
        key, page = pages[i]
        match dice.randrange(4):
            case 0:
                page = bytearray(page)
                page[dice.randrange(len(page))] ^= 1 << dice.randrange(8)
            case 1:
                page = page[: dice.randrange(len(page))]
            case 2:
                key = dice.choice([b"", key[:7], key + b"0", struct.pack(">II", 1, 1 << 27 | 5)])
            case 3:
                key = memoryview(struct.pack(">II", 3, dice.randrange(1 << 27)))
        pages[i] = (key, memoryview(page))
    result = found(_native, pages)
    assert result == found(portable_records, pages)
    rows = result[0]
    dice.shuffle(rows)
    assert taken(_native, pages, rows) == taken(portable_records, pages, rows)


Change = tuple[Any, Any]


def packed(module: Any, dice: random.Random, slots: list[int], longest: int) -> Change:
    """The places of some slots, and their records."""
    n = len(slots)
    keys = [dice.randbytes(dice.randrange(1, longest + 1)) for _ in slots]
    parents = [dice.randbytes(dice.randrange(longest + 1)) for _ in slots]
    ns, length = (np.array([dice.randrange(1 << 32) for _ in slots], np.uint32) for _ in range(2))
    version, checksum = (np.array([dice.randrange(1 << 64) for _ in slots], np.uint64) for _ in range(2))
    extent, index = (np.array([slot >> shift & 255 for slot in slots], np.uint32) for shift in (8, 0))
    times = np.array([dice.uniform(-1e9, 1e9) for _ in slots])
    rows = np.full(n * ROW.itemsize, 255, np.uint8).view(ROW)
    module.records_pack(keys, parents, (ns, extent, index, version, length, checksum, times), rows)
    return extent.astype(np.uint64) << np.uint64(32) | index, rows


@pytest.mark.parametrize("seed", range(60))
def test_both_make_the_same_pages(seed: int) -> None:
    made = []
    for module in (_native, portable_records):
        dice, pages = random.Random(seed), dict[int, bytes | None]()
        for _ in range(4):
            changes = []
            for _ in range(dice.randrange(4)):
                slots = [dice.randrange(3) << 8 | dice.randrange(256) for _ in range(dice.randrange(60))]
                places, rows = packed(module, dice, slots, dice.choice([1, 8, 9, 32, 33, 64]))
                rows[[dice.random() < 0.3 for _ in slots]] = np.zeros((), ROW)
                changes.append((places, rows))
            numbers = sorted({place >> 5 for places, _ in changes for place in places.tolist()})
            old = [pages.get(number) for number in numbers]
            if old and dice.random() < 0.3:
                old[0] = dice.choice([None, b"", b"no page", bytes(PAGE_SLOTS * 176)])
            values = module.records_pages(np.array(numbers, np.uint64), old, changes)
            assert all(value is None or len(value) in portable_records.WIDTHS for value in values)
            pages |= dict(zip(numbers, values, strict=True))
        made.append(pages)
    assert made[0] == made[1]


@pytest.mark.parametrize("module", [_native, portable_records])
class TestBadRecords:
    NUMBERS = tuple(np.zeros(1, kind) for kind in ("<u4", "<u4", "<u4", "<u8", "<u4", "<u8", "<f8"))

    @pytest.mark.parametrize(
        ("key", "parent", "nbytes"), [(b"", b"", 0), (bytes(65), b"", 65), (b"k", bytes(300), 300)]
    )
    def test_keys_of_a_wrong_size_are_refused(
        self, module: Any, key: bytes, parent: bytes, nbytes: int
    ) -> None:
        with pytest.raises(ValueError, match=f"a key of {nbytes} bytes"):
            module.records_pack([key], [parent], self.NUMBERS, np.zeros(1, ROW))

    @pytest.mark.parametrize("wrong", range(9))
    def test_columns_of_several_lengths_are_refused(self, module: Any, wrong: int) -> None:
        columns = [*self.NUMBERS, [b""], np.zeros(1, ROW)]
        columns[wrong] = [b"", b""] if wrong == 7 else columns[wrong][:0]
        with pytest.raises(ValueError, match="columns of several lengths, for 1 records"):
            module.records_pack([b"k"], columns[7], tuple(columns[:7]), columns[8])
        with pytest.raises(ValueError, match="columns of several lengths, for 1 records"):
            module.records_pack([b"k"], [b""], self.NUMBERS[1:], np.zeros(1, ROW))

    def test_what_is_no_key_is_refused(self, module: Any) -> None:
        with pytest.raises((TypeError, AttributeError)):
            module.records_pack([1], [b""], self.NUMBERS, np.zeros(1, ROW))

    def test_places_of_no_page_are_refused(self, module: Any) -> None:
        numbers, change = np.array([2, 5], np.uint64), (np.array([70, 96], np.uint64), np.zeros(2, ROW))
        with pytest.raises(ValueError, match="place 96 is of no page"):
            module.records_pages(numbers, [None, None], [change])

    def test_another_number_of_pages_or_rows_is_refused(self, module: Any) -> None:
        numbers, places = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
        with pytest.raises(ValueError, match="there must be 1 pages before"):
            module.records_pages(numbers, [], [])
        with pytest.raises(ValueError, match="rows that are not those of 2 places"):
            module.records_pages(numbers, [None], [(places, np.zeros(1, ROW))])

    def test_rows_with_too_long_keys_are_refused(self, module: Any) -> None:
        rows = np.zeros(1, ROW)
        rows["parent_bytes"] = 65
        with pytest.raises(ValueError, match="a key of 72 bytes"):
            module.records_pages(np.zeros(1, np.uint64), [None], [(np.zeros(1, np.uint64), rows)])


@pytest.mark.parametrize("module", [_native, portable_records])
class TestBadInput:
    def test_no_pages_are_nothing(self, module: Any) -> None:
        assert found(module, []) == ([], [], [], 8, [], [])
        assert taken(module, [], []) == [b""] * len(ITEMS)

    def test_columns_without_room_are_refused(self, module: Any) -> None:
        pages = pages_of(random.Random(1), 5)
        room = PAGE_SLOTS * len(pages) - 1
        with pytest.raises(ValueError, match=f"no room for the rows of {len(pages)} pages"):
            module.records_find(pages, np.zeros(room, np.int64), np.zeros(room), np.zeros(room, np.uint64))

    @pytest.mark.parametrize("row", [-1, -(1 << 63), 32, 1 << 40, (1 << 63) - 1])
    def test_rows_of_no_page_are_refused(self, module: Any, row: int) -> None:
        pages = pages_of(random.Random(1), 1)
        good = found(module, pages)[0]
        with pytest.raises(IndexError, match=f"row {row} of 1 pages"):
            taken(module, pages, good + [row] * 20)

    def test_rows_of_a_damaged_page_are_refused(self, module: Any) -> None:
        with pytest.raises(IndexError, match="row 3 of 1 pages"):
            taken(module, [(b"12345678", b"no page")], [3])

    def test_columns_too_narrow_for_keys_are_refused(self, module: Any) -> None:
        key, page = bytes(8), bytes(PAGE_SLOTS * (48 + 2 * 32))
        with pytest.raises(IndexError, match="row 0 of 1 pages"):
            taken(module, [(key, page)], [0], width=24)


def test_columns_of_another_length_are_refused() -> None:
    pages = pages_of(random.Random(1), 1)
    columns = [np.zeros(item or WIDTH, np.uint8) for item in ITEMS]
    for i in range(len(ITEMS)):
        wrong = (*columns[:i], columns[i][1:], *columns[i + 1 :])
        with pytest.raises(ValueError, match=f"column {i} has {len(columns[i]) - 1} bytes for 1 rows"):
            _native.records_take(pages, np.zeros(1, np.int64), WIDTH, wrong)


@pytest.mark.parametrize("pages", [[1], [()], [(b"",)], [("a", "b")], [(b"12345678", 5)]])
def test_what_is_no_page_is_refused(pages: Any) -> None:
    with pytest.raises((TypeError, IndexError, SystemError)):
        _native.records_find(pages, np.zeros(32, np.int64), np.zeros(32), np.zeros(32, np.uint64))
