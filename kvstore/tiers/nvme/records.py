"""What the journal says of each block on NVMe, and its bytes.

    key     namespace id u32 big-endian | the block's key, 1 to 64 bytes
    value   extent u32 | index u32 | version u64 | length u32 | checksum u64 | stored_at f64 | parent's key

Values are little-endian and packed; the parent's key runs to the end and is empty for a root.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import MisuseError, TierError
from kvstore.types import MAX_KEY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

ID = struct.Struct(">I")
_VALUE = struct.Struct("<IIQIQd")
_CHUNK = 1 << 16  # records that exist as Python objects at one time while loading


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Blocks to record, as columns of one length. Lists of Python numbers pack fastest.

    `ns` is namespace ids; an empty parent declares a root; `length` is payload bytes; `stored_at` seconds.
    """

    ns: Sequence[int]
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    extent: Sequence[int]
    index: Sequence[int]
    version: Sequence[int]
    length: Sequence[int]
    checksum: Sequence[int]
    stored_at: Sequence[float]

    def __len__(self) -> int:
        return len(self.keys)

    def pack(self) -> list[tuple[bytes, bytes]]:
        """A (key, value) pair a record. MisuseError if columns differ in length or a value has no room."""
        pack_id, value = ID.pack, _VALUE.pack
        columns = (self.extent, self.index, self.version, self.length, self.checksum, self.stored_at)
        try:
            pairs = [
                (pack_id(ns) + key, value(*numbers) + parent)
                for ns, key, parent, *numbers in zip(self.ns, self.keys, self.parents, *columns, strict=True)
            ]
        except (struct.error, ValueError, TypeError) as error:
            raise MisuseError(f"records that cannot be packed: {error}") from error
        longest = ID.size + MAX_KEY_BYTES
        if any(not ID.size < len(key) <= longest or len(v) > _VALUE.size + 64 for key, v in pairs):
            raise MisuseError("a record whose key or parent is too long or empty", "keys have 1 to 64 bytes")
        return pairs


@dataclass(frozen=True, slots=True)
class Blocks:
    """All records as numpy columns of one length, oldest first; of one age, lowest version first.

    `keys` and `parents` have shape (n, 64), padded with zeros; `key_bytes` and `parent_bytes` say how many
    count. Numbers are in the machine's byte order.
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


def unpack(pairs: Iterable[tuple[bytes, bytes]], count: int) -> Blocks:
    """Columns from `count` (key, value) pairs, in any order. TierError for a pair that is no record.

    Pairs of equal lengths are joined and read as one array: about a microsecond a record.
    """
    columns = {name: np.zeros(count, dtype) for name, dtype in _DTYPES.items()}
    rest, at = iter(pairs), 0
    while chunk := list(islice(rest, _CHUNK)):
        groups: defaultdict[tuple[int, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        for pair in chunk:
            groups[len(pair[0]), len(pair[1])].append(pair)
        for (key_bytes, value_bytes), group in groups.items():
            _fill(columns, slice(at, at + len(group)), group, key_bytes - ID.size, value_bytes - _VALUE.size)
            at += len(group)
    order = np.lexsort((columns["version"], columns["stored_at"]))
    for name in columns:
        columns[name] = columns[name][order]
    return Blocks(**columns)


def _fill(
    columns: dict[str, NDArray[Any]],
    rows: slice,
    group: list[tuple[bytes, bytes]],
    key_bytes: int,
    parent_bytes: int,
) -> None:
    if not 0 < key_bytes <= MAX_KEY_BYTES or not 0 <= parent_bytes <= MAX_KEY_BYTES:
        raise TierError(f"{len(group)} records have a key of {key_bytes}, a parent of {parent_bytes} bytes")
    keys, values = zip(*group, strict=True)
    key = np.frombuffer(b"".join(keys), [("ns", ">u4"), ("key", "u1", (key_bytes,))])
    value = np.frombuffer(b"".join(values), [*_NUMBERS, ("parent", "u1", (parent_bytes,))])
    columns["ns"][rows] = key["ns"]
    columns["keys"][rows, :key_bytes] = key["key"]
    columns["key_bytes"][rows] = key_bytes
    columns["parents"][rows, :parent_bytes] = value["parent"]
    columns["parent_bytes"][rows] = parent_bytes
    for name, _ in _NUMBERS:
        columns[name][rows] = value[name]


assert [field.name for field in fields(Blocks)] == list(_DTYPES)
