"""The layouts of shared memory, NVMe folders and network objects, from their definitions in the code."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from kvstore import arena
from kvstore.tiers import ownership
from kvstore.tiers.network import objects
from kvstore.tiers.nvme import records, store
from kvstore.tiers.nvme.generations import MOST_COMMITTED, MOST_PREPARED, NAME_BYTES
from kvstore.types import HEADER_BYTES, LABEL_BYTES, MAX_KEY_BYTES, SLOT_RECORD
from reference.text import cell

_Field = tuple[int, str, str]
"""Offset in bytes, name and type of a field."""

_C_TYPES = {"I": "u32", "Q": "u64", "B": "u8", "d": "f64", "s": "bytes", "x": "zeros"}

_MEANINGS = {
    "slot grant": {
        "place": "extent << 32 | index of the slot",
        "checksum": "XXH3 of the payload",
        "version": "version of the slot",
        "tier": "number of the tier that holds the slot",
    },
    "extent label": {
        "magic": f"{arena.MAGIC:#x}, `KVSLOT02`",
        "number": "number of the extent",
        "slot_bytes": "size of its slots; the ownership table has the valid size",
    },
    "slot header": {
        "magic": "as in the label",
        "version": "version of the block in the slot; 0: not readable. It is written last",
        "namespace": "fingerprint of the namespace",
        "key": "key, padded with zeros",
        "parent": "key of the previous block of the chain, padded with zeros",
        "key_bytes": "length of the key",
        "parent_bytes": "length of the parent's key; 0: first block of a chain, or an independent block",
        "length": "bytes of payload",
        "checksum": "XXH3 of the payload, seeded with XXH3 of namespace, key and length",
        "last": "last version of the slot",
        "stamp": "order of blocks by time; a parent has a higher stamp than its child",
        "expires": "seconds since 1970; 0: never",
    },
    "ownership row": {
        "number": "number of the extent; the magic number in the first row",
        "slot_bytes": "size of slots; 0: no extent, 1: not assigned, 2: being cut and unusable",
        "owner": "domain of tenants that may map the extent",
    },
    "record of a block": {
        "ns": "number of the namespace",
        "length": "bytes of payload",
        "version": "version of the block",
        "checksum": "XXH3 of the payload, as in the slot header",
        "stored_at": "time of the put, seconds since 1970",
        "check": "check of all other fields, and of extent and index of the slot",
        "key_bytes": "length of the key",
        "parent_bytes": "length of the parent's key; 0 without a parent",
        "zeros": "unused",
        "key": "key, padded with zeros",
        "parent": "key of the previous block of the chain, padded with zeros",
    },
    "object header": {
        "magic": "`KVOBJECT`",
        "format": "format of the object",
        "length": "bytes of payload",
        "namespace": "fingerprint of the namespace",
        "key_bytes": "length of the key",
        "parent_bytes": "length of the parent's key",
        "zero": "unused",
        "key": "key, padded with zeros",
        "parent": "key of the previous block of the chain, padded with zeros",
        "checksum": "XXH3 of the payload, as in the slot header",
        "stored_at": "time of the write by the writer's clock, seconds since 1970",
    },
}
"""The meaning of each field. The fields, their order and their types come from the code."""


def page() -> Iterator[str]:
    """Yields the page: memory, then NVMe, then network objects."""
    yield f"""# On-disk and shared formats

Generated from the code. Numbers are little-endian unless stated. [Durability and
layouts](../explained/tiers.md) has the order of writes that makes crashes safe.

## Extents in memory
An extent is a memfd: a label of {LABEL_BYTES:,} bytes, a table of headers of {HEADER_BYTES} bytes per slot,
and slots at multiples of 4,096 bytes. Another layout of label or header has another magic number; extents
with an unknown one start empty.

### Label
"""
    yield from offsets("extent label")
    yield "\n### Slot header\n"
    yield from offsets("slot header")
    yield "\n### Ownership table\nThe table is a memfd that no client can map. It has one row per extent.\n"
    yield from offsets("ownership row")
    yield f"""
## NVMe folder
| path | contents |
|---|---|
| `lock` | lock of the daemon that uses the folder; its process id |
| `slabs/000012.slab` | one extent: slots from offset 0, without headers, at full size |
| `records/` | LMDB environment of format {store.FORMAT} |
| `keys/TENANT.key` | data key of an encrypted tenant, wrapped by the master key |
| `learned.npz` | state of the eviction policy at the last orderly stop; ignored if unreadable |

LMDB has the tables {", ".join(f"`{table}`" for table in store.TABLES)}. The key of `namespaces` and
`extents` is a number (u32, big-endian). The key of `slots` is the number of an extent and the number of a
page in it (both u32, big-endian); a page has the records of {records.PAGE_SLOTS} neighbouring slots.
`namespaces` has MessagePack arrays: tenant, layout, fingerprint,
encrypted, readers, TTL in seconds. A layout is a map of the fields of `Layout`; a chain has no `kind`.
`extents` has the slot size (u64) and the name of the tenant.

`meta` has `format` and `extent_bytes` (u64), and `generations`: the number of committed names (u64), then
names of {NAME_BYTES} bytes: at most {MOST_COMMITTED:,} committed ones, the newest last, then at most
{MOST_PREPARED} prepared ones. Formats 2 and 3 have a number (u64) under `generation` instead.

### Record of a block
The record of a slot without a block is zeros. All keys of a page are padded to one width, a multiple of
8 bytes. The offsets below are those of a width of {MAX_KEY_BYTES}.
"""
    yield from offsets("record of a block")
    yield f"""
## Objects of the network tier
The path of an object is `{objects.ROOT}/NAMESPACE/HASH/KEY` in lower-case hexadecimal. HASH is one byte of
a hash of the key. The payload follows a header of {objects.HEADER_BYTES} bytes, in files at offset 4,096.
After the fields, the header has a check (u64, XXH3 of the fields) and zeros.
"""
    yield from offsets("object header")


def offsets(structure: str) -> Iterator[str]:
    """Yields the table of a structure's fields."""
    yield "| field | offset | type | meaning |\n|---|---|---|---|"
    for at, name, kind in _STRUCTURES[structure]:
        yield f"| `{name}` | {at} | {kind} | {cell(_MEANINGS[structure].get(name, ''))} |"


def missing() -> Iterator[str]:
    """Yields the fields without a meaning, and meanings without a field."""
    for structure, described in _STRUCTURES.items():
        names = [name for _, name, _ in described]
        for name in names:
            if not _MEANINGS[structure].get(name):
                yield f"{structure}: {name} has no meaning: add it in packaging/reference/formats.py"
        for name in set(_MEANINGS[structure]) - set(names):
            yield f"{structure}: there is no field {name}: remove it in packaging/reference/formats.py"


def _of_array(kind: np.dtype) -> list[_Field]:
    """Returns the fields of a structured array."""
    fields: list[_Field] = []
    for name in kind.names or ():
        inner, at = kind.fields[name][:2]  # type: ignore[index]
        words = {"u": "u", "f": "f"}[inner.base.kind] + str(8 * inner.base.itemsize)
        fields.append((at, name, f"{inner.itemsize} bytes" if inner.shape else words))
    return fields


def _of_struct(layout: dict[str, str]) -> list[_Field]:
    """Returns the fields of a packed structure, by the formats of `struct`."""
    fields: list[_Field] = []
    at = 0
    for name, code in layout.items():
        size, kind = struct.calcsize(f"<{code}"), _C_TYPES[code[-1]]
        fields.append((at, name, f"{size} {kind}" if code[-1] in "sx" else kind))
        at += size
    return fields


_STRUCTURES = {
    "slot grant": _of_array(SLOT_RECORD),
    "extent label": _of_array(arena.LABEL),
    "slot header": _of_array(arena.HEADER),
    "ownership row": _of_array(ownership.ROW),
    "record of a block": _of_array(records.ROW),
    "object header": _of_struct(objects.FIELDS),
}
