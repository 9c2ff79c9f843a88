"""Records of blocks on NVMe, and their bytes: one row a slot, 32 neighbouring slots a page.

    key     extent u32 big-endian | number of the page in its extent u32 big-endian
    value   32 rows, each: namespace id u32 | length u32 | version u64 | checksum u64 | stored_at f64
            | check u64 | bytes of the key u8 | bytes of the parent's key u8 | 6 zeros | key | parent's key

Numbers are little-endian. All keys of a page are padded with zeros to one width, a multiple of 8 bytes. The
row of a slot without a block is zeros; a root has an empty parent. `check` covers all other fields and
the slot, so a record that a device altered or misplaced is invalid. It is a sum of products, which numpy
computes for a million records at once.

A put usually gets neighbouring slots, so it changes few pages. A page with keys of 32 bytes fits one of LMDB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvstore.core.actions import places
from kvstore.errors import MisuseError
from kvstore.native import records_find, records_pack, records_pages, records_take
from kvstore.native.portable_records import CHECKED, FACTORS, PAGE_SLOTS, SLOT_BITS, fill_rows, record_row
from kvstore.types import MAX_KEY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column: TypeAlias = Sequence[float] | NDArray[Any]

Places: TypeAlias = "NDArray[np.uint64]"
"""Slots: see `kvstore.core.actions.places`."""

ID = struct.Struct(">I")
_PAGE_BITS = 32 - SLOT_BITS
_PAGE_KEY = struct.Struct(">II")
_MOST_NUMBERS = 1 << 20  # of namespaces or extents; more is damage
ROW = record_row(MAX_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class SlotRecords:
    """New records of slots, in the order in which they were made. A row of zeros deletes a record."""

    places: Places
    rows: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.places)


def deletions(places: Places) -> SlotRecords:
    """Returns the deletion of the records of slots."""
    return SlotRecords(places.astype(np.uint64), np.zeros(len(places), ROW))


def merged(records: Sequence[SlotRecords]) -> SlotRecords:
    """Returns the last record of each slot, in the order of the slots."""
    places = np.concatenate([np.empty(0, np.uint64), *(each.places for each in records)])
    rows = np.concatenate([np.empty(0, ROW), *(each.rows for each in records)])
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = ordered[1:] != ordered[:-1]
    return SlotRecords(ordered[last], rows[order[last]])


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Blocks to record, as columns of one length.

    `ns` has namespace ids, `length` bytes of payloads, `stored_at` s since 1970. A root has an empty parent.
    """

    ns: Column
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    extent: Column
    index: Column
    version: Column
    length: Column
    checksum: Column
    stored_at: Column

    def __len__(self) -> int:
        return len(self.keys)

    def pack(self) -> SlotRecords:
        """Returns the records. MisuseError if lengths differ or a value is too large."""
        rows = np.empty(len(self.keys), ROW)
        try:
            numbers = {name: np.ascontiguousarray(getattr(self, name), _DTYPES[name]) for name in CHECKED}
            records_pack(list(self.keys), list(self.parents), tuple(numbers.values()), rows)
        except (OverflowError, ValueError, TypeError) as error:
            raise MisuseError(f"records that cannot be packed: {error}") from error
        return SlotRecords(places(numbers["extent"], numbers["index"]), rows)


def packed(
    keys: NDArray[np.uint8],
    key_bytes: NDArray[np.uint8],
    parents: NDArray[np.uint8],
    parent_bytes: NDArray[np.uint8],
    numbers: dict[str, NDArray[Any]],
) -> SlotRecords:
    """Returns records of blocks. Keys have one width, padded with zeros. `numbers`: the other columns."""
    rows = np.zeros(len(keys), ROW)
    fill_rows(rows, keys, key_bytes, parents, parent_bytes, numbers)
    return SlotRecords(places(numbers["extent"], numbers["index"]), rows)


# -- pages


def rewritten(
    page_of: Callable[[bytes], bytes | None], changes: Sequence[SlotRecords]
) -> list[tuple[bytes, bytes | None]]:
    """Returns the pages that differ after changes, by key and in its order. None: the page is empty.

    `page_of` returns the present page of a key.
    """
    changed = np.unique(np.concatenate([np.empty(0, np.uint64), *(each.places for each in changes)]))
    if not len(changed):
        return []
    number = changed >> np.uint64(SLOT_BITS)
    first = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    keys, slots = _page_keys(number[first]), np.diff(first, append=len(number)).tolist()
    # A page of which all slots change need not be read.
    old = [page_of(key) if n < PAGE_SLOTS else None for key, n in zip(keys, slots, strict=True)]
    values = records_pages(number[first], old, [(each.places, each.rows) for each in changes])
    return list(zip(keys, values, strict=True))


def _page_keys(numbers: Places) -> list[bytes]:
    """Returns the keys of pages: `numbers` are places without the bits of the slot."""
    columns = numbers >> np.uint64(_PAGE_BITS), numbers & np.uint64((1 << _PAGE_BITS) - 1)
    raw = np.stack(columns, axis=1).astype(">u4").tobytes()
    return [raw[i : i + _PAGE_KEY.size] for i in range(0, len(raw), _PAGE_KEY.size)]


@dataclass(frozen=True, slots=True)
class Blocks:
    """All records as numpy columns of one length, latest first; of one age, highest version first.

    `keys` and `parents` have the width of the longest ones, a multiple of 8, padded with zeros. Numbers are
    in the machine's byte order.
    """

    ns: NDArray[np.uint32]
    keys: NDArray[np.uint8]
    key_bytes: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    parent_bytes: NDArray[np.uint8]
    extent: NDArray[np.uint32]
    index: NDArray[np.uint32]
    version: NDArray[np.uint64]
    length: NDArray[np.uint32]
    checksum: NDArray[np.uint64]
    stored_at: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ns)

    @property
    def places(self) -> Places:
        """The slot of each block."""
        return places(self.extent, self.index)

    def pack(self) -> SlotRecords:
        """Returns the records, in the order of their slots."""
        order = np.argsort(self.places)
        own = {name: getattr(self, name)[order] for name in _DTYPES}
        numbers = {name: own[name] for name in CHECKED}
        return packed(own["keys"], own["key_bytes"], own["parents"], own["parent_bytes"], numbers)

    def key(self, i: int) -> bytes:
        """Returns the key of block i."""
        padded: bytes = self.keys[i].tobytes()
        return padded[: self.key_bytes[i]]

    def superseded(self, usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns which usable records have a block that a later usable record has in another slot."""
        hashes = self.keys.view("<u8") @ FACTORS[: self.keys.shape[1] // 8]
        hashes += self.key_bytes * FACTORS[8] + self.ns * FACTORS[9]
        # Values are sorted several times as fast as their indices, and seldom are two alike.
        ordered = np.sort(hashes[usable])
        alike = ordered[1:][ordered[1:] == ordered[:-1]]
        old = np.zeros(len(self), np.bool_)
        later: set[tuple[int, bytes]] = set()
        for i in np.flatnonzero(usable & np.isin(hashes, alike)).tolist() if len(alike) else ():
            block = int(self.ns[i]), self.key(i)
            old[i] = block in later
            later.add(block)
        return old


_KEYS = "keys", "parents"
_DTYPES: dict[str, Any] = {
    "ns": np.uint32,
    "keys": np.uint8,
    "key_bytes": np.uint8,
    "parents": np.uint8,
    "parent_bytes": np.uint8,
    "extent": np.uint32,
    "index": np.uint32,
    "version": np.uint64,
    "length": np.uint32,
    "checksum": np.uint64,
    "stored_at": np.float64,
}


@dataclass(slots=True)
class Damaged:
    """What cannot be decoded: keys of whole pages, places of single records, keys in other tables."""

    pages: list[bytes] = field(default_factory=list)
    places: Places = field(default_factory=lambda: np.empty(0, np.uint64))
    others: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.pages) + len(self.places) + len(self.others)


def unpack(pages: Iterable[tuple[Any, Any]]) -> tuple[Blocks, Damaged]:
    """Returns the blocks of pages, pairs of buffers, and what is damaged."""
    pairs = list(pages)
    room = len(pairs) * PAGE_SLOTS
    rows, stored_at, version = np.empty(room, np.int64), np.empty(room), np.empty(room, np.uint64)
    n, width, bad_pages, bad_places = records_find(pairs, rows, stored_at, version)
    latest_first = rows[_by_age(stored_at[:n], version[:n])[::-1]]
    columns = {name: np.empty((n, width) if name in _KEYS else n, dtype) for name, dtype in _DTYPES.items()}
    records_take(pairs, latest_first, width, tuple(columns.values()))
    damaged = Damaged([bytes(pairs[i][0]) for i in bad_pages], np.array(bad_places, np.uint64))
    return Blocks(**columns), damaged


def _by_age(stored_at: NDArray[np.float64], version: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the order of records by age, the oldest first; of one age, the lowest version first."""
    order = np.argsort(stored_at, kind="stable")
    ordered = stored_at[order]
    # Versions are only sorted where they count: it takes as long again.
    return np.lexsort((version, stored_at)) if (ordered[1:] == ordered[:-1]).any() else order


def mapped(
    column: NDArray[np.unsignedinteger[Any]], values: dict[int, int], absent: int = 0
) -> NDArray[np.int64]:
    """Returns the value of each number of a column, `absent` if it has none."""
    known = {n: value for n, value in values.items() if n < _MOST_NUMBERS}
    table = np.full(max(known, default=0) + 2, absent, np.int64)
    table[list(known)] = list(known.values())
    found: NDArray[np.int64] = table[np.minimum(column, len(table) - 1)]
    return found


assert [each.name for each in fields(Blocks)] == list(_DTYPES)
