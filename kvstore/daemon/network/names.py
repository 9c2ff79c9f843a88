"""The names of a namespace's objects on the network. All of this package's names of blocks are made here.

An object's name has 16 bytes for its namespace: the fingerprint in epoch zero, a digest of fingerprint and
epoch in others. So objects of an earlier epoch are never found (see `epochs`). A key that was deleted alone
has an epoch of its own, later than the namespace's.
"""

from __future__ import annotations

from functools import lru_cache

from blake3 import blake3

from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.tiers.network.base import Name

EPOCHS = b"kvstore-epochs-1"
"""Stands for the fingerprint in the names of epochs. No namespace has it, because fingerprints are hashes."""

KEY_LISTS = b"kvstore-keys-001"
"""Stands for the fingerprint in the names of lists of deleted keys."""

_COUNTER_BYTES = 8
EPOCH_BYTES = 2 * _COUNTER_BYTES
ZERO = bytes(EPOCH_BYTES)
"""The epoch of a namespace that was never deleted: the network has no object for it."""


def next_epoch(last: bytes, time_s: float, random: int) -> bytes:
    """Returns an epoch later than `last`. Epochs are compared as bytes. `time_s`: Unix time.

    The counter is a time in ms, so it is also later than an epoch that this node has not seen. The 64
    random bits tell the epochs of two nodes apart.
    """
    least = int.from_bytes(last[:_COUNTER_BYTES], "big") + 1
    counter = min(max(least, int(time_s * 1000)), (1 << 8 * _COUNTER_BYTES) - 1)
    return counter.to_bytes(_COUNTER_BYTES, "big") + random.to_bytes(_COUNTER_BYTES, "big")


def epoch_name(fingerprint: bytes) -> Name:
    """Returns the name of the object that holds a namespace's epoch."""
    return Name(EPOCHS, fingerprint)


def key_list_name(fingerprint: bytes, digest: bytes) -> Name:
    """Returns the name of a namespace's list of deleted keys with this digest."""
    return Name(KEY_LISTS, fingerprint + digest)


@lru_cache(maxsize=4096)
def name_prefix(fingerprint: bytes, epoch: bytes) -> bytes:
    """Returns the 16 bytes for a namespace in the names of its objects of one epoch."""
    if epoch == ZERO:
        return fingerprint
    return blake3(b"kvstore-epoch-1" + fingerprint + epoch).digest(length=16)


def block_name(namespace: NamespaceEntry, key: bytes) -> Name:
    """Returns the name of a block's object in the epoch of its key or namespace, which must be known."""
    assert namespace.epoch is not None, "the epoch of this namespace is unknown"
    epoch = namespace.key_epochs.get(key, namespace.epoch)
    return Name(name_prefix(namespace.fingerprint, epoch), key)


def is_name_of(namespace: NamespaceEntry, name: Name) -> bool:
    """Returns whether this is the name of a block of the namespace now."""
    return namespace.epoch is not None and block_name(namespace, name.key) == name
