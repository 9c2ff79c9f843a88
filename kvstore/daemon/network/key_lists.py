"""Lists of deleted keys: how keys are added on this node, and how the network gets the list.

Of each key, a list has the epoch. Lists are merged: the later epoch of a key counts. So nodes that write
different lists, at whatever times, end with one. See `epochs` for how a node applies the list of another one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from kvstore.daemon.network.epoch_objects import Epoch, EpochObjects, digest, merged, pack
from kvstore.daemon.network.names import ZERO, block_name, key_list_name, next_epoch
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name, Outcome

MOST_KEYS = 8192
"""The most keys of a namespace that are deleted on all nodes before its epoch changes."""

_ATTEMPTS = 8
"""How often a list is written while other nodes write others, or while the backend keeps an earlier epoch."""


class KeyLists:
    """Adds deleted keys to the lists of namespaces, and writes lists."""

    def __init__(
        self, objects: EpochObjects, random_bits: Callable[[int], int], clock: Callable[[], float]
    ) -> None:
        """`random_bits` returns a number of that many random bits, `clock` Unix time in s."""
        self._objects = objects
        self._random_bits = random_bits
        self._clock = clock
        self._writing: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)

    def add(self, namespace: NamespaceEntry, keys: Collection[bytes]) -> bool:
        """Gives deleted keys an epoch of their own. Returns False if the list has no room: nothing changes.

        This node has deleted their blocks. `publish` tells the other nodes.
        """
        known = namespace.key_epochs
        if namespace.epoch is None or len(known.keys() | keys) > MOST_KEYS:
            return False
        epoch = next_epoch(max((namespace.epoch, *known.values())), self._clock(), self._random_bits(64))
        set_keys(namespace, {**known, **dict.fromkeys(keys, epoch)})
        return True

    async def publish(self, namespace: NamespaceEntry) -> bool:
        """Writes the epoch and the deleted keys of a namespace, with those that the network has.

        Returns whether the network has all of them.
        """
        objects, fingerprint = self._objects, namespace.fingerprint
        async with self._writing[fingerprint]:
            for _ in range(_ATTEMPTS):
                [(outcome, found)] = await objects.read([fingerprint])
                epoch = namespace.epoch
                if outcome not in (Outcome.OK, Outcome.MISSING) or epoch is None:
                    return False
                if found.value > epoch:
                    return False  # the comparison changes the epoch, and keeps the keys
                outcome, listed = await objects.read_keys(fingerprint, found.keys)
                if outcome == Outcome.FAILED:
                    return False
                packed = pack(merged(listed if found.value == epoch else {}, namespace.key_epochs))
                whole = Epoch(epoch, digest(packed))
                if found == whole and outcome == Outcome.OK:
                    return True
                if not await objects.write_keys(fingerprint, packed):
                    return False
                written = await objects.write(fingerprint, whole, found)
                if written and found.keys not in (b"", whole.keys):
                    await objects.delete([key_list_name(fingerprint, found.keys)])
        return False

    async def remove(self, namespace: NamespaceEntry, keys: bytes) -> None:
        """Removes the list with this digest from the network, because it cannot be read."""
        fingerprint, epoch = namespace.fingerprint, namespace.epoch or ZERO
        async with self._writing[fingerprint]:
            await self._objects.delete([key_list_name(fingerprint, keys)])
            await self._objects.write(fingerprint, Epoch(epoch), Epoch(epoch, keys))


def set_keys(namespace: NamespaceEntry, key_epochs: Mapping[bytes, bytes]) -> None:
    """Sets the deleted keys of a namespace and their epochs."""
    namespace.key_epochs, namespace.keys_digest = key_epochs, digest(pack(key_epochs))


def names_of_keys(namespaces: Iterable[NamespaceEntry]) -> Iterator[Name]:
    """Yields the names of lists of deleted keys, and of the blocks that were stored since."""
    for namespace in namespaces:
        if namespace.key_epochs:
            yield key_list_name(namespace.fingerprint, namespace.keys_digest)
            yield from (block_name(namespace, key) for key in namespace.key_epochs)
