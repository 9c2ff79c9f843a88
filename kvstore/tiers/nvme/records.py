"""Records of blocks on NVMe, and their bytes.

    key     namespace id u32 big-endian | the block's key, 1 to 64 bytes
    value   extent u32 | index u32 | version u64 | length u32 | checksum u64 | stored_at f64 | check u64
            | parent's key

Values are little-endian and packed; the parent's key runs to the end and is empty for a root. `check` covers
all other fields and the key, so a record that a device altered is invalid. It is a sum of products, which
numpy computes for a million records at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvstore.errors import MisuseError
from kvstore.types import MAX_KEY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column: TypeAlias = Sequence[float] | NDArray[Any]

ID = struct.Struct(">I")
_FACTORS = np.arange(1, 24, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
_MOST_NUMBERS = 1 << 20  # of namespaces or extents; more is damage
_CHUNK = 1 << 16  # records that exist as Python objects at one time while loading


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

    def pack(self) -> list[tuple[bytes, bytes]]:
        """Returns a (key, value) pair a record. MisuseError if lengths differ or a value is too large."""
        n = len(self.keys)
        try:
            numbers = [np.asarray(getattr(self, name), _DTYPES[name]) for name in _CHECKED_NUMBERS]
        except (OverflowError, ValueError, TypeError) as error:
            raise MisuseError(f"records that cannot be packed: {error}") from error
        if any(len(column) != n for column in (*numbers, self.parents)):
            raise MisuseError("records that cannot be packed: columns of several lengths")
        if not all(0 < len(key) <= MAX_KEY_BYTES for key in self.keys) or any(
            len(parent) > MAX_KEY_BYTES for parent in self.parents
        ):
            raise MisuseError("a record whose key or parent is too long or empty", "keys have 1 to 64 bytes")
        records = np.empty(n, RECORD)
        for (name, _), column in zip(_NUMBERS, numbers[1:], strict=True):
            records[name] = column
        records["check"] = _checks(_padded(self.keys), _padded(self.parents), numbers)
        ids, raw = numbers[0].astype(">u4").tobytes(), records.tobytes()
        return [
            (ids[4 * i : 4 * i + 4] + key, raw[_FIXED_BYTES * i : _FIXED_BYTES * (i + 1)] + parent)
            for i, (key, parent) in enumerate(zip(self.keys, self.parents, strict=True))
        ]


def _padded(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    raw = b"".join([key.ljust(MAX_KEY_BYTES, b"\0") for key in keys])
    return np.frombuffer(raw, np.uint8).reshape(len(keys), MAX_KEY_BYTES)


def _checks(
    keys: NDArray[np.uint8], parents: NDArray[np.uint8], numbers: Sequence[NDArray[Any]]
) -> NDArray[np.uint64]:
    """Returns the check of each record, from keys and parents padded with zeros, and its numbers."""
    words = MAX_KEY_BYTES // 8
    mixed: NDArray[np.uint64] = keys.view("<u8") @ _FACTORS[:words]
    mixed += parents.view("<u8") @ _FACTORS[words : 2 * words]
    for column, factor in zip(numbers, _FACTORS[2 * words :], strict=True):
        as_words = column.view(np.uint64) if column.dtype == np.float64 else column.astype(np.uint64)
        mixed += as_words * factor
    mixed ^= mixed >> np.uint64(32)
    mixed *= _FACTORS[0]
    return mixed


@dataclass(frozen=True, slots=True)
class Blocks:
    """All records as numpy columns of one length, oldest first; of one age, lowest version first.

    `keys` and `parents` have shape (n, 64), padded with zeros. Numbers are in the machine's byte order.
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


_DTYPES: dict[str, Any] = {
    "ns": np.uint32,
    "keys": (np.uint8, MAX_KEY_BYTES),
    "key_bytes": np.uint8,
    "parents": (np.uint8, MAX_KEY_BYTES),
    "parent_bytes": np.uint8,
    "extent": np.uint32,
    "index": np.uint32,
    "version": np.uint64,
    "length": np.uint32,
    "checksum": np.uint64,
    "stored_at": np.float64,
}
_NUMBERS = [("extent", "<u4"), ("index", "<u4"), ("version", "<u8"), ("length", "<u4")]
_NUMBERS += [("checksum", "<u8"), ("stored_at", "<f8")]
_CHECKED = [*_NUMBERS, ("check", "<u8")]
RECORD = np.dtype(_CHECKED)
"""The fields of a record before the parent's key."""
_FIXED_BYTES = RECORD.itemsize
_CHECKED_NUMBERS = ("ns", *(name for name, _ in _NUMBERS))


def unpack(pairs: Iterable[tuple[bytes, bytes]], count: int) -> tuple[Blocks, list[bytes]]:
    """Returns the columns of `count` (key, value) pairs, and the keys of invalid records.

    Pairs of equal lengths are read as one array: about 1 us a record.
    """
    columns = {name: np.zeros(count, dtype) for name, dtype in _DTYPES.items()}
    rest, at = iter(pairs), 0
    damaged: list[bytes] = []
    while chunk := list(islice(rest, _CHUNK)):
        for (key_bytes, value_bytes), (keys, values) in _by_length(chunk):
            size, parent_bytes = key_bytes - ID.size, value_bytes - _FIXED_BYTES
            if not 0 < size <= MAX_KEY_BYTES or not 0 <= parent_bytes <= MAX_KEY_BYTES:
                damaged += keys
                continue
            good = _fill(columns, at, keys, values, size, parent_bytes)
            damaged += [keys[i] for i in np.flatnonzero(~good).tolist()]
            at += int(good.sum())
    order = np.lexsort((columns["version"][:at], columns["stored_at"][:at]))
    return Blocks(**{name: column.take(order, axis=0) for name, column in columns.items()}), damaged


def _by_length(
    chunk: list[tuple[bytes, bytes]],
) -> Iterator[tuple[tuple[int, int], tuple[Sequence[bytes], Sequence[bytes]]]]:
    """Yields lengths of key and value, and the keys and values of these lengths."""
    keys, values = zip(*chunk, strict=True)
    lengths = np.array([*map(len, keys)]) << 32 | np.array([*map(len, values)])
    for each in np.unique(lengths).tolist():
        which = (lengths == each).tolist()
        yield divmod(each, 1 << 32), (list(compress(keys, which)), list(compress(values, which)))


def _fill(
    columns: dict[str, NDArray[Any]],
    at: int,
    keys: Sequence[bytes],
    values: Sequence[bytes],
    key_bytes: int,
    parent_bytes: int,
) -> NDArray[np.bool_]:
    """Fills rows from `at` on with the valid records. Returns which are valid."""
    key = np.frombuffer(b"".join(keys), [("ns", ">u4"), ("key", "u1", (key_bytes,))])
    value = np.frombuffer(b"".join(values), [*_CHECKED, ("parent", "u1", (parent_bytes,))])
    rows = slice(at, at + len(keys))
    columns["ns"][rows] = key["ns"]
    columns["keys"][rows, :key_bytes] = key["key"]
    columns["key_bytes"][rows] = key_bytes
    columns["parents"][rows, :parent_bytes] = value["parent"]
    columns["parent_bytes"][rows] = parent_bytes
    for name, _ in _NUMBERS:
        columns[name][rows] = value[name]
    numbers = [columns[name][rows] for name in _CHECKED_NUMBERS]
    good: NDArray[np.bool_] = (
        _checks(columns["keys"][rows], columns["parents"][rows], numbers) == value["check"]
    )
    if not good.all():
        for column in columns.values():
            column[at : at + int(good.sum())] = column[rows][good]
            column[at + int(good.sum()) : rows.stop] = 0
    return good


def mapped(
    column: NDArray[np.unsignedinteger[Any]], values: dict[int, int], absent: int = 0
) -> NDArray[np.int64]:
    """Returns the value of each number of a column, `absent` if it has none."""
    known = {n: value for n, value in values.items() if n < _MOST_NUMBERS}
    table = np.full(max(known, default=0) + 2, absent, np.int64)
    table[list(known)] = list(known.values())
    found: NDArray[np.int64] = table[np.minimum(column, len(table) - 1)]
    return found


assert [field.name for field in fields(Blocks)] == list(_DTYPES)
