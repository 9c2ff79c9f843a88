"""Start-up recovery of an NVMe folder: usable records become blocks, the others are deleted.

No slab is read here. The checksum of a block is verified when the block is read.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.events import Restore
from kvstore.errors import TierError
from kvstore.tiers.nvme.encryption import TenantKeys
from kvstore.tiers.nvme.journal import Journal, Loaded, Namespace
from kvstore.tiers.nvme.records import Blocks, mapped
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.types import slot_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """Namespaces by number, slot size and tenant of each extent, and blocks, latest first.

    `stored_at` is the time of each block, `latest` the largest time on record (s since 1970).
    """

    namespaces: dict[int, Namespace]
    slot_bytes: dict[int, int]
    owners: dict[int, str]
    restore: Restore
    stored_at: npt.NDArray[np.float64]
    latest: float


def recover(journal: Journal, slabs: Slabs, count: int, keys: TenantKeys) -> Recovered:
    """Opens the slabs of the `count` lowest extents on record and returns their contents.

    Deletes, with a warning, the other extents, records without a usable slot, and encrypted blocks without a
    data key. If a tenant's encryption was turned on or off, deletes all of its blocks, durably.
    """
    loaded = journal.load()
    if len(loaded.damaged):
        _log.error("%d records are damaged: their blocks are lost", len(loaded.damaged))
    if len(loaded.damaged) or loaded.suspect:
        journal.renew(loaded)
    if keys.changed:
        loaded = _without(journal, slabs, loaded, keys.changed)
        keys.settle()
    sizes = _open_slabs(slabs, loaded.extents, count)
    slot_sizes = {extent: loaded.extents[extent] for extent in sizes}
    owners = {extent: loaded.owners[extent] for extent in sizes}
    usable = _fits(loaded.blocks, loaded.namespaces, slot_sizes, sizes)
    _forget(journal, loaded.blocks, ~usable, "their slabs are gone or beyond the limit")
    keyless = usable & np.isin(loaded.blocks.ns, _without_key(loaded, keys))
    _forget(journal, loaded.blocks, keyless, "they are encrypted and their tenant's data key is gone")
    usable &= ~keyless
    strays = usable & strangers(loaded)
    _forget(journal, loaded.blocks, strays, "they lie in another tenant's extents")
    usable &= ~strays
    old = loaded.blocks.superseded(usable)
    _forget(journal, loaded.blocks, old, "later records have the same blocks")
    usable &= ~old
    for extent in set(loaded.extents) - set(slot_sizes):
        slabs.remove(extent)
        journal.delete_extent(extent)
    latest = float(loaded.blocks.stored_at.max(initial=0.0))
    restore, stored_at = _restore(loaded.blocks, usable), loaded.blocks.stored_at[usable]
    return Recovered(loaded.namespaces, slot_sizes, owners, restore, stored_at, latest)


def _without(journal: Journal, slabs: Slabs, loaded: Loaded, tenants: Set[str]) -> Loaded:
    """Deletes the blocks and slabs of tenants. Slabs hold bytes of evicted blocks too."""
    blocks = loaded.blocks
    theirs = [n for n, namespace in loaded.namespaces.items() if namespace.tenant in tenants]
    gone = np.isin(blocks.ns, theirs)
    _forget(journal, blocks, gone, f"encryption of {', '.join(sorted(tenants))} was turned on or off")
    for extent in [extent for extent, owner in loaded.owners.items() if owner in tenants]:
        slabs.remove(extent)
        journal.delete_extent(extent)
    journal.drain()
    return journal.load()


def _without_key(loaded: Loaded, keys: TenantKeys) -> list[int]:
    """Returns encrypted namespaces whose data key is gone."""
    return [n for n, s in loaded.namespaces.items() if s.encrypted and not keys.has_key(s.tenant)]


def _open_slabs(slabs: Slabs, extents: dict[int, int], count: int) -> dict[int, int]:
    """Opens slabs on record. Returns the size in bytes that each had."""
    sizes: dict[int, int] = {}
    for extent in slabs.stored():
        if extent in extents and len(sizes) < count:
            try:
                sizes[extent] = slabs.open_existing(extent)
            except TierError as error:
                _log.error("extent %d: %s", extent, error)
    return sizes


def _fits(
    blocks: Blocks, namespaces: dict[int, Namespace], slot_sizes: dict[int, int], sizes: dict[int, int]
) -> npt.NDArray[np.bool_]:
    """Returns which records name an existing slot of their namespace's size."""
    payloads = {n: namespace.layout["block_bytes"] for n, namespace in namespaces.items()}
    wanted = mapped(blocks.ns, {n: slot_bytes(namespace.stored_bytes) for n, namespace in namespaces.items()})
    found = mapped(blocks.extent, slot_sizes)
    fits: npt.NDArray[np.bool_] = (found == wanted) & (found > 0)
    fits &= blocks.length == mapped(blocks.ns, payloads)
    return fits & ((blocks.index.astype(np.int64) + 1) * found <= mapped(blocks.extent, sizes))


def strangers(loaded: Loaded) -> npt.NDArray[np.bool_]:
    """Returns which records place a block of one tenant in an extent of another."""
    tenants = {
        name: i for i, name in enumerate({namespace.tenant for namespace in loaded.namespaces.values()})
    }
    theirs = {n: tenants[namespace.tenant] for n, namespace in loaded.namespaces.items()}
    owners = {extent: tenants.get(owner, -1) for extent, owner in loaded.owners.items()}
    tenant = mapped(loaded.blocks.ns, theirs, absent=-1)
    strange: npt.NDArray[np.bool_] = tenant != mapped(loaded.blocks.extent, owners, absent=-1)
    return strange & (tenant >= 0)


def _forget(journal: Journal, blocks: Blocks, which: npt.NDArray[np.bool_], why: str) -> None:
    if which.any():
        _log.warning("%d blocks are forgotten: %s", which.sum(), why)
        journal.delete(blocks.places[which])


def _restore(blocks: Blocks, usable: npt.NDArray[np.bool_]) -> Restore:
    """Returns the usable records as an event."""
    everything = Restore(
        1,
        blocks.ns,
        blocks.keys,
        blocks.key_bytes,
        blocks.parents,
        blocks.parent_bytes,
        blocks.extent,
        blocks.index,
        blocks.version,
        blocks.checksum,
        np.full(len(blocks), np.inf),
    )
    return everything.only(usable)
