"""Pages of records of blocks on NVMe, by numpy: twins of `records.c` and `record_pages.c`, rows, checks.

A page is a pair (key, value). Layout: `kvstore.tiers.nvme.records`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.native.mixing import MIX

Page: TypeAlias = tuple[Any, Any]
"""The key and the value of a page, as buffers."""
Columns: TypeAlias = tuple[npt.NDArray[Any], ...]

NUMBERS = [("ns", "<u4"), ("length", "<u4"), ("version", "<u8"), ("checksum", "<u8"), ("stored_at", "<f8")]
FIXED = [*NUMBERS, ("check", "<u8"), ("key_bytes", "u1"), ("parent_bytes", "u1"), ("zeros", "u1", 6)]
CHECKED = ("ns", "extent", "index", "version", "length", "checksum", "stored_at")
"""The numbers that a check covers, in this order."""
SLOT_BITS = 5
PAGE_SLOTS = 1 << SLOT_BITS
_KEY_WORDS, _NUMBER_BYTES = 8, 4
_MOST_KEY_BYTES = 8 * _KEY_WORDS
FACTORS = np.arange(1, 26, dtype=np.uint64) * np.uint64(MIX) | np.uint64(1)
_AT_ONCE = 1 << 8  # pages: about 1 MB, which stays in the cache of a core


def record_row(width: int) -> np.dtype[np.void]:
    """Returns the row of a page whose longest key has `width` bytes."""
    return np.dtype([*FIXED, ("key", "u1", (width,)), ("parent", "u1", (width,))])


WIDTHS = {PAGE_SLOTS * record_row(width).itemsize: width for width in range(8, 8 * _KEY_WORDS + 1, 8)}
"""The width of keys, by the bytes of a page."""


def record_checks(
    keys: npt.NDArray[np.uint8],
    parents: npt.NDArray[np.uint8],
    numbers: Sequence[npt.NDArray[Any]],
    *sizes: npt.NDArray[np.uint8],
) -> npt.NDArray[np.uint64]:
    """Returns the check of each record: of keys and parents padded with zeros, numbers, sizes of keys."""
    mixed: npt.NDArray[np.uint64] = keys.view("<u8") @ FACTORS[: keys.shape[1] // 8]
    mixed += parents.view("<u8") @ FACTORS[_KEY_WORDS : _KEY_WORDS + parents.shape[1] // 8]
    for column, factor in zip((*numbers, *sizes), FACTORS[2 * _KEY_WORDS :], strict=False):
        as_words = column.view(np.uint64) if column.dtype == np.float64 else column.astype(np.uint64)
        mixed += as_words * factor
    mixed ^= mixed >> np.uint64(32)
    mixed *= FACTORS[0]
    return mixed


def padded_keys(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Returns keys with shape (n, 64), padded with zeros."""
    raw = b"".join([key.ljust(_MOST_KEY_BYTES, b"\0") for key in keys])
    return np.frombuffer(raw, np.uint8).reshape(len(keys), _MOST_KEY_BYTES)


def fill_rows(
    rows: npt.NDArray[np.void],
    keys: npt.NDArray[np.uint8],
    key_bytes: npt.NDArray[np.uint8],
    parents: npt.NDArray[np.uint8],
    parent_bytes: npt.NDArray[np.uint8],
    numbers: dict[str, npt.NDArray[Any]],
) -> None:
    """Writes records to rows of zeros. Keys have one width, padded with zeros. `numbers`: of `CHECKED`."""
    for name, _ in NUMBERS:
        rows[name] = numbers[name]
    rows["key"][:, : keys.shape[1]], rows["parent"][:, : parents.shape[1]] = keys, parents
    rows["key_bytes"], rows["parent_bytes"] = key_bytes, parent_bytes
    rows["check"] = record_checks(keys, parents, [numbers[name] for name in CHECKED], key_bytes, parent_bytes)


def records_pack(
    keys: list[bytes], parents: list[bytes], numbers: Columns, rows: npt.NDArray[np.void]
) -> None:
    """Writes records to rows with keys of 64 bytes. `numbers`: columns in the order of `CHECKED`.

    ValueError if lengths differ, or if a key is empty or, like a parent, too long.
    """
    n = len(keys)
    if {len(parents), len(rows), *map(len, numbers)} != {n} or len(numbers) != len(CHECKED):
        raise ValueError(f"columns of several lengths, for {n} records")
    sizes = [np.fromiter(map(len, some), np.int64, n) for some in (keys, parents)]
    wrong = [size for size in sizes[0].tolist() if not size]
    wrong += [size for size in np.concatenate(sizes).tolist() if size > _MOST_KEY_BYTES]
    if wrong:
        raise ValueError(f"a key of {wrong[0]} bytes, which must have 1 to 64")
    rows[:] = np.zeros((), rows.dtype)
    named = dict(zip(CHECKED, numbers, strict=True))
    own, above = (size.astype(np.uint8) for size in sizes)
    fill_rows(rows, padded_keys(keys), own, padded_keys(parents), above, named)


def records_pages(
    numbers: npt.NDArray[np.uint64],
    old: list[bytes | None],
    changes: list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.void]]],
) -> list[bytes | None]:
    """Returns pages with the last record of each place. None: it has no record left.

    `numbers`: places without the bits of the slot, ascending. `old`: their pages; None, or what is no page:
    nothing is kept. `changes`: places, and rows as `records_pack` makes them. ValueError for a place of no
    page, and if lengths differ.
    """
    if len(old) != len(numbers):
        raise ValueError(f"there must be {len(numbers)} pages before")
    for places, rows in changes:
        if len(places) != len(rows):
            raise ValueError(f"rows that are not those of {len(places)} places")
    places = np.concatenate([np.empty(0, np.uint64), *(each for each, _ in changes)])
    rows = np.concatenate([np.empty(0, record_row(_MOST_KEY_BYTES)), *(each for _, each in changes)])
    at_page = np.searchsorted(numbers, places >> np.uint64(SLOT_BITS))
    found = np.append(numbers, ~np.uint64(0))[at_page] == places >> np.uint64(SLOT_BITS)
    if not found.all():
        raise ValueError(f"place {places[found.argmin()]} is of no page")
    longest = np.maximum(rows["key_bytes"], rows["parent_bytes"]).astype(np.int64)
    if longest.max(initial=0) > _MOST_KEY_BYTES:
        raise ValueError(f"a key of {-(-longest.max() // 8) * 8} bytes, which must have 1 to 64")
    before = np.array([WIDTHS.get(len(page), 0) if page is not None else 0 for page in old], np.int64)
    widths = np.maximum(before, 8)
    np.maximum.at(widths, at_page, -(-longest // 8) * 8)
    at_slot = (places & np.uint64(PAGE_SLOTS - 1)).astype(np.int64)
    values: list[bytes | None] = [None] * len(numbers)
    for width in np.unique(widths).tolist():
        which = np.flatnonzero(widths == width)
        pages = _joined([old[i] for i in which.tolist()], before[which], width)
        some = np.flatnonzero(widths[at_page] == width)
        pages[np.searchsorted(which, at_page[some]), at_slot[some]] = _with_width(rows[some], width)
        left: list[int] = pages["key_bytes"].max(axis=1).tolist()
        raw, nbytes = pages.tobytes(), pages[0].nbytes
        for n, i in enumerate(which.tolist()):
            values[i] = raw[n * nbytes : (n + 1) * nbytes] if left[n] else None
    return values


def _joined(pages: list[bytes | None], widths: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.void]:
    """Returns the rows of pages as an array (n, 32) with keys of `width` bytes. A width of 0: no rows yet."""
    joined = np.zeros((len(pages), PAGE_SLOTS), record_row(width))
    for each in np.unique(widths[widths > 0]).tolist():
        which = np.flatnonzero(widths == each)
        raw = b"".join(pages[i] or b"" for i in which.tolist())
        joined[which] = _with_width(np.frombuffer(raw, record_row(each)), width).reshape(-1, PAGE_SLOTS)
    return joined


def _with_width(rows: npt.NDArray[np.void], width: int) -> npt.NDArray[np.void]:
    """Returns rows with keys of `width` bytes."""
    own = rows.dtype["key"].itemsize
    if own == width:
        return rows
    found = np.zeros(len(rows), record_row(width))
    for name, *_ in FIXED:
        found[name] = rows[name]
    for name in ("key", "parent"):
        found[name][:, : min(own, width)] = rows[name][:, : min(own, width)]
    return found


def records_find(
    pages: list[Page],
    rows: npt.NDArray[np.int64],
    stored_at: npt.NDArray[np.float64],
    version: npt.NDArray[np.uint64],
) -> tuple[int, int, list[int], list[int]]:
    """Writes number (page * 32 + slot), time and version of each valid record, in the order of pages.

    Returns how many there are, the bytes of the longest keys, the numbers of damaged pages, and the places of
    damaged records. The columns have room for 32 rows a page. ValueError if they have not.
    """
    if not len(rows) == len(stored_at) == len(version) >= PAGE_SLOTS * len(pages):
        raise ValueError(f"no room for the rows of {len(pages)} pages")
    widths = np.array([_width(*page) for page in pages], np.int64)
    found: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    bad: list[int] = []
    for width, some in _in_parts(widths):
        table, extent, index = _decoded(pages, some, width)
        good = _valid(table, extent, index, width)
        number = (some[:, None] * PAGE_SLOTS + np.arange(PAGE_SLOTS)).reshape(-1)
        which = number[good]
        found.append(which)
        rows[which], stored_at[which] = which, table["stored_at"][good]
        version[which] = table["version"][good]
        lost = ~good & table.view(np.uint64).reshape(len(table), -1).any(axis=1)
        bad += (extent[lost].astype(np.uint64) << np.uint64(32) | index[lost]).tolist()
    which = np.sort(np.concatenate(found))
    for column in (rows, stored_at, version):
        column[: len(which)] = column[which]
    return len(which), max(8, int(widths.max(initial=0))), np.flatnonzero(widths == 0).tolist(), bad


def records_take(pages: list[Page], rows: npt.NDArray[np.int64], width: int, columns: Columns) -> None:
    """Writes the records of these numbers to the columns of `kvstore.tiers.nvme.records.Blocks`.

    Keys are padded with zeros to `width` bytes. IndexError for a number of no page.
    """
    widths = np.array([_width(*page) for page in pages], np.int64)
    ns, keys, key_bytes, parents, parent_bytes, extent, index, version, length, checksum, stored_at = columns
    number = rows >> SLOT_BITS
    wrong = (number < 0) | (number >= len(pages))
    wrong[~wrong] = (widths[number[~wrong]] == 0) | (widths[number[~wrong]] > width)
    if wrong.any():
        raise IndexError(f"row {rows[wrong.argmax()]} of {len(pages)} pages")
    of_row = widths[number]
    for own in np.unique(of_row).tolist():
        some, to = np.flatnonzero(widths == own), np.flatnonzero(of_row == own)
        table, extents, indices = _decoded(pages, some, own)
        at = np.searchsorted(some, number[to]) * PAGE_SLOTS + (rows[to] & (PAGE_SLOTS - 1))
        extent[to], index[to] = extents[at], indices[at]
        numbers = (ns, "ns"), (version, "version"), (length, "length"), (checksum, "checksum")
        sizes = (key_bytes, "key_bytes"), (parent_bytes, "parent_bytes")
        for column, name in (*numbers, (stored_at, "stored_at"), *sizes):
            column[to] = table[name][at]
        for column, name in ((keys, "key"), (parents, "parent")):
            column[to] = 0
            column[to, :own] = table[name][at]


def _width(key: Any, value: Any) -> int:
    """Returns the bytes of a page's keys; 0 if the page is damaged."""
    if len(key) != 2 * _NUMBER_BYTES or int.from_bytes(key[_NUMBER_BYTES:], "big") >> (32 - SLOT_BITS):
        return 0
    return WIDTHS.get(len(value), 0)


def _in_parts(widths: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yields a width of keys with the numbers of some pages that have it."""
    for width in np.unique(widths[widths > 0]).tolist():
        mine = np.flatnonzero(widths == width)
        for first in range(0, len(mine), _AT_ONCE):
            yield width, mine[first : first + _AT_ONCE]


def _decoded(
    pages: list[Page], some: npt.NDArray[np.int64], width: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Returns the rows of some pages, and the extent and the index of each."""
    keys, values = zip(*(pages[i] for i in some.tolist()), strict=True)
    table = np.frombuffer(b"".join(values), record_row(width))
    page = np.repeat(np.frombuffer(b"".join(keys), ">u4").reshape(-1, 2), PAGE_SLOTS, axis=0)
    index = page[:, 1].astype(np.uint32) * np.uint32(PAGE_SLOTS)
    index += np.tile(np.arange(PAGE_SLOTS, dtype=np.uint32), len(values))
    return table, page[:, 0].astype(np.uint32), index


def _valid(
    table: npt.NDArray[np.void], extent: npt.NDArray[np.uint32], index: npt.NDArray[np.uint32], width: int
) -> npt.NDArray[np.bool_]:
    keys, parents = (np.ascontiguousarray(table[name]) for name in ("key", "parent"))
    numbers = {name: np.ascontiguousarray(table[name]) for name, _ in NUMBERS}
    numbers |= {"extent": extent, "index": index}
    sizes = table["key_bytes"], table["parent_bytes"]
    found = record_checks(keys, parents, [numbers[name] for name in CHECKED], *sizes)
    good: npt.NDArray[np.bool_] = (found == table["check"]) & (table["parent_bytes"] <= width)
    return good & (table["key_bytes"] > 0) & (table["key_bytes"] <= width)
