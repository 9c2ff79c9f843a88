"""The format of objects in every backend: a path, and a header before the payload.

```
0      8        12       16           32           33             34   40       104        168
├ magic ─ format ─ length ─ namespace ─ key_bytes ─ parent_bytes ─ 0 ─ key 64 ─ parent 64 ─┤
168        176         184     192                        256
├ checksum ─ stored_at f64 ─ check u64 of all before ─ 0 ─┤ payload
```
`namespace` and `key` are the object's name. `checksum` is the same as in slots: xxh3 (64 bits) of the
payload, seeded with the namespace's fingerprint, key and length (`Object.seed`). Every path has the version
of the format, so that other versions never find these objects.
"""

from __future__ import annotations

import re
import struct
import time
from dataclasses import dataclass

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvstore.arena import Bytes, checksum
from kvstore.tiers.network.base import Name, Object, Outcome
from kvstore.types import MAX_KEY_BYTES

HEADER_BYTES = 256
ROOT = "kvstore-1"
"""The first part of every path, after the configured prefix: the version of names and headers."""

_MAGIC = b"KVOBJECT"
_FORMAT = 1
FIELDS = {
    "magic": "8s",
    "format": "I",
    "length": "I",
    "namespace": "16s",
    "key_bytes": "B",
    "parent_bytes": "B",
    "zero": "6x",
    "key": "64s",
    "parent": "64s",
    "checksum": "Q",
    "stored_at": "d",
}
"""The fields of a header, as `struct` writes them. A check (u64) of them follows, then zeros."""

_FIELDS = struct.Struct("<" + "".join(FIELDS.values()))
_CHECK = struct.Struct("<Q")
_PATH = re.compile(rf"{ROOT}/([0-9a-f]{{32}})/([0-9a-f]{{2}})/([0-9a-f]{{2,{2 * MAX_KEY_BYTES}}})")


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `stored_at`: Unix time (s) by the writer's clock, for information only."""

    name: Name
    parent: bytes
    length: int
    checksum: int
    stored_at: float


def folder(namespace: bytes) -> str:
    """Returns the folder of a namespace's objects."""
    return f"{ROOT}/{namespace.hex()}"


def path(name: Name) -> str:
    """Returns an object's path: the namespace's folder, one of 256 by a hash of the key, the key in hex.

    Paths are in lower case, so they do not collide on case-insensitive systems. At most 180 characters.
    """
    return f"{folder(name.namespace)}/{xxh3_64_hexdigest(name.key)[:2]}/{name.key.hex()}"


def name_of(path: str) -> Name | None:
    """Returns the name of a path, None if the path is foreign."""
    found = _PATH.fullmatch(path)
    if found is None or len(found[3]) % 2:
        return None
    name = Name(bytes.fromhex(found[1]), bytes.fromhex(found[3]))
    return name if xxh3_64_hexdigest(name.key)[:2] == found[2] else None


def header(thing: Object) -> bytes:
    """Returns the header of an object to write."""
    name = thing.name
    keys = len(name.key), len(thing.parent), name.key, thing.parent
    now = time.time()
    fields = _FIELDS.pack(_MAGIC, _FORMAT, thing.length, name.namespace, *keys, thing.checksum, now)
    return (fields + _CHECK.pack(xxh3_64_intdigest(fields))).ljust(HEADER_BYTES, b"\0")


def parse(raw: Bytes) -> Header | None:
    """Parses a header. Returns None if it is cut, altered or foreign."""
    if len(raw) < _FIELDS.size + _CHECK.size:
        return None
    fields = bytes(raw[: _FIELDS.size])
    magic, version, length, namespace, nk, np, key, parent, check, at = _FIELDS.unpack(fields)
    [proof] = _CHECK.unpack_from(raw, _FIELDS.size)
    if magic != _MAGIC or version != _FORMAT or proof != xxh3_64_intdigest(fields):
        return None
    if not 1 <= nk <= MAX_KEY_BYTES or np > MAX_KEY_BYTES:
        return None
    return Header(Name(namespace, key[:nk]), parent[:np], length, check, at)


def matches(found: Header | None, thing: Object) -> bool:
    """Returns whether a header belongs to the requested object."""
    return found is not None and found.name == thing.name and found.length == thing.length


def settle(thing: Object, raw: Bytes) -> Outcome:
    """Verifies an object in memory by its header, and sets its checksum and parent."""
    found = parse(raw)
    if found is None or not matches(found, thing):
        return Outcome.TORN
    if checksum(thing.memory[: thing.length], thing.seed()) != found.checksum:
        return Outcome.TORN
    thing.checksum, thing.parent = found.checksum, found.parent
    return Outcome.OK
