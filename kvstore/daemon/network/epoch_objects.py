"""The objects of epochs: how a namespace's epoch and its deleted keys are read and written.

```
Name(EPOCHS, fingerprint)              epoch, 16 bytes; in the header's field for a parent: digest of the list
Name(KEY_LISTS, fingerprint + digest)  the list of deleted keys: epoch 16, length of the key 1, key; sorted
```
A list is an object of its own because it is read only if its digest has changed. Versions that do not know
lists ignore the digest.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from blake3 import blake3

from kvstore import arena
from kvstore.daemon.network.executor import BackendExecutor
from kvstore.daemon.network.names import EPOCH_BYTES, ZERO, epoch_name, key_list_name
from kvstore.tiers.network.base import Name, Object, Outcome
from kvstore.types import MAX_KEY_BYTES, slot_bytes

_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 16
_MOST_BYTES = 4 << 20


class Epoch(NamedTuple):
    """An epoch, and the digest of its list of deleted keys: with the list's length; empty without a list."""

    value: bytes
    keys: bytes = b""


def pack(key_epochs: Mapping[bytes, bytes]) -> bytes:
    """Returns the list of deleted keys: equal bytes for equal lists, empty without a key."""
    return b"".join(b"%b%c%b" % (key_epochs[key], len(key), key) for key in sorted(key_epochs))


def unpack(packed: bytes) -> dict[bytes, bytes] | None:
    """Returns the deleted keys of a list and their epochs. None: no list of `pack`."""
    key_epochs, at = {}, 0
    while at < len(packed):
        start = at + EPOCH_BYTES + 1
        end = start + packed[start - 1] if start <= len(packed) else start
        if not start < end <= min(len(packed), start + MAX_KEY_BYTES):
            return None
        key_epochs[packed[start:end]] = packed[at : at + EPOCH_BYTES]
        at = end
    return key_epochs


def digest(packed: bytes) -> bytes:
    """Returns the digest of a list of deleted keys, with its length."""
    return _LENGTH.pack(len(packed)) + blake3(packed).digest(length=_DIGEST_BYTES) if packed else b""


def merged(one: Mapping[bytes, bytes], other: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Returns the keys of two lists, each with its later epoch."""
    return {**one, **{key: max(epoch, one.get(key, b"")) for key, epoch in other.items()}}


class EpochObjects:
    """Reads and writes the objects of epochs. Calls of one executor."""

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor

    async def read(self, fingerprints: Sequence[bytes]) -> list[tuple[Outcome, Epoch]]:
        """Returns the outcome of each read, and the epoch: zero if it is missing, empty if unknown."""
        things = _objects([(epoch_name(each), EPOCH_BYTES) for each in fingerprints])
        found = []
        for thing, outcome in zip(things, await self._read(things), strict=True):
            missing = Epoch(ZERO if outcome == Outcome.MISSING else b"")
            read = Epoch(bytes(thing.memory[:EPOCH_BYTES]), thing.parent)
            found.append((outcome, read if outcome == Outcome.OK else missing))
        return found

    async def write(self, fingerprint: bytes, epoch: Epoch, before: Epoch) -> Epoch | None:
        """Writes an epoch where `before` was read. Returns what the network has then; None: an earlier one.

        None also if that is unknown. Another node may have written a later epoch, or another list of keys.
        """
        [thing] = _objects([(epoch_name(fingerprint), EPOCH_BYTES)])
        thing.memory[:EPOCH_BYTES] = epoch.value
        thing.parent = epoch.keys
        # A backend may keep an existing object: then it is deleted first.
        for replace in (False, True):
            if replace:
                await self.delete([thing.name])
            if not await self._write(thing):
                return None
            [(outcome, after)] = await self.read([fingerprint])
            if outcome == Outcome.FAILED:
                return None
            kept = after == before != epoch
            if outcome == Outcome.OK and after.value >= epoch.value and not kept:
                return after
        return None

    async def read_keys(self, fingerprint: bytes, keys: bytes) -> tuple[Outcome, dict[bytes, bytes]]:
        """Reads the list of deleted keys with this digest. Returns no keys unless the outcome is OK."""
        if not keys:
            return Outcome.OK, {}
        nbytes = int.from_bytes(keys[: _LENGTH.size], "little")
        if len(keys) != _LENGTH.size + _DIGEST_BYTES or not 0 < nbytes <= _MOST_BYTES:
            return Outcome.TORN, {}
        [thing] = things = _objects([(key_list_name(fingerprint, keys), nbytes)])
        [outcome] = await self._read(things)
        packed = bytes(thing.memory[:nbytes])
        key_epochs = unpack(packed) if outcome == Outcome.OK and digest(packed) == keys else None
        if key_epochs is None:
            return (Outcome.TORN if outcome == Outcome.OK else outcome), {}
        return outcome, key_epochs

    async def write_keys(self, fingerprint: bytes, packed: bytes) -> bool:
        """Writes a list of deleted keys. Returns whether the backend confirms it."""
        if not packed:
            return True
        [thing] = _objects([(key_list_name(fingerprint, digest(packed)), len(packed))])
        thing.memory[: len(packed)] = packed
        return await self._write(thing)

    async def delete(self, names: Sequence[Name]) -> None:
        """Deletes objects, if the backend does."""
        await self._executor.call(partial(self._executor.backend.delete, names), self._executor.timeout_s)

    async def _read(self, things: Sequence[Object]) -> Sequence[Outcome]:
        executor = self._executor
        outcomes = await executor.call(partial(executor.backend.read, things), executor.timeout_s)
        return outcomes or [Outcome.FAILED] * len(things)

    async def _write(self, thing: Object) -> bool:
        executor = self._executor
        thing.checksum = arena.checksum(thing.memory[: thing.length], thing.seed())
        write = partial(executor.backend.write, [thing])
        return list(await executor.call(write, executor.timeout_s)) == [Outcome.OK]


def _objects(named: Iterable[tuple[Name, int]]) -> list[Object]:
    """Returns objects of so many bytes each, in zeroed memory."""
    named = list(named)
    memory = memoryview(mmap.mmap(-1, sum(slot_bytes(nbytes) for _, nbytes in named)))
    objects, at = [], 0
    for name, nbytes in named:
        objects.append(Object(name, nbytes, memory[at : at + slot_bytes(nbytes)]))
        at += slot_bytes(nbytes)
    return objects
