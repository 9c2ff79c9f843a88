"""Reads the records of formats 2 to 4, which had one value a block.

    key     namespace id u32 big-endian | the block's key, 1 to 64 bytes
    value   extent u32 | index u32 | version u64 | length u32 | checksum u64 | stored_at f64 | check u64
            | parent's key

Values are little-endian and packed. `check` covers all other fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from kvstore.native.portable_records import CHECKED, padded_keys, record_checks
from kvstore.tiers.nvme.records import ID, SlotRecords, deletions, merged, packed
from kvstore.types import MAX_KEY_BYTES

_NUMBERS = [("extent", "<u4"), ("index", "<u4"), ("version", "<u8"), ("length", "<u4")]
_NUMBERS += [("checksum", "<u8"), ("stored_at", "<f8")]
_FIXED = np.dtype([*_NUMBERS, ("check", "<u8")])
_CHUNK = 1 << 16


def read(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[SlotRecords, int]:
    """Returns the latest record of each slot, in the order of slots, and how many records are damaged."""
    rest, damaged = iter(pairs), 0
    found = [deletions(np.empty(0, np.uint64))]
    while chunk := list(islice(rest, _CHUNK)):
        some = [(k, v) for k, v in chunk if _is_possible(len(k) - ID.size, len(v) - _FIXED.itemsize)]
        records, good = _unpacked([k for k, _ in some], [v for _, v in some])
        found.append(SlotRecords(records.places[good], records.rows[good]))
        damaged += len(chunk) - int(good.sum())
    places, rows = (np.concatenate([getattr(each, name) for each in found]) for name in ("places", "rows"))
    order = np.lexsort((rows["version"], rows["stored_at"]))
    return merged([SlotRecords(places[order], rows[order])]), damaged


def _is_possible(key_bytes: int, parent_bytes: int) -> bool:
    return 0 < key_bytes <= MAX_KEY_BYTES and 0 <= parent_bytes <= MAX_KEY_BYTES


def _unpacked(keys: list[bytes], values: list[bytes]) -> tuple[SlotRecords, Any]:
    """Returns records, and which of them are valid."""
    fixed = np.frombuffer(b"".join([value[: _FIXED.itemsize] for value in values]), _FIXED)
    ns = np.frombuffer(b"".join([key[: ID.size] for key in keys]), ">u4").astype(np.uint32)
    names, parents = [key[ID.size :] for key in keys], [value[_FIXED.itemsize :] for value in values]
    sizes = [np.array([*map(len, some)], np.uint8) for some in (names, parents)]
    numbers = {name: fixed[name] for name, _ in _NUMBERS} | {"ns": ns}
    numbers = {name: np.ascontiguousarray(column) for name, column in numbers.items()}
    words, above = padded_keys(names), padded_keys(parents)
    good = record_checks(words, above, [numbers[name] for name in CHECKED]) == fixed["check"]
    return packed(words, sizes[0], above, sizes[1], numbers), good
