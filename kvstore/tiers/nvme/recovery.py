"""What a folder holds when a daemon starts: records that name a slot of theirs become blocks, others go.

Nothing is read from slabs here: whether a slot's bytes are right, its checksum says when it is read.
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
    """Namespaces by number, slot size and tenant of each extent, blocks (latest first).

    `stored_at` says when each of these was stored, `latest` when the latest ever was (s since 1970).
    """

    namespaces: dict[int, Namespace]
    formats: dict[int, int]
    owners: dict[int, str]
    restore: Restore
    stored_at: npt.NDArray[np.float64]
    latest: float


def recover(journal: Journal, slabs: Slabs, count: int, seals: TenantKeys | None = None) -> Recovered:
    """Opens the slabs of `count` extents on record, the lowest, and tells what is in them.

    Those beyond, records that name no slot of theirs, and sealed blocks without a data key are forgotten
    with a warning. So is all of a tenant that is to be encrypted from now on, or no longer; that is durable.
    """
    loaded = journal.load()
    if seals is not None and seals.turned:
        loaded = _without(journal, slabs, loaded, seals.turned)
        seals.settle()
    sizes = _open_slabs(slabs, loaded.extents, count)
    formats = {extent: loaded.extents[extent] for extent in sizes}
    owners = {extent: loaded.owners[extent] for extent in sizes}
    if loaded.damaged:
        _log.error("%d records are damaged: their blocks are lost", len(loaded.damaged))
        journal.forget(loaded.damaged)
    usable = _fits(loaded.blocks, loaded.namespaces, formats, sizes)
    _forget(journal, loaded.blocks, ~usable, "their slabs are gone or beyond the limit")
    noise = usable & np.isin(loaded.blocks.ns, _without_key(loaded, seals))
    _forget(journal, loaded.blocks, noise, "they are encrypted and their tenant's data key is gone")
    usable &= ~noise
    strays = usable & strangers(loaded)
    _forget(journal, loaded.blocks, strays, "they lie in another tenant's extents")
    usable &= ~strays
    for extent in set(loaded.extents) - set(formats):
        slabs.remove(extent)
        journal.delete_extent(extent)
    latest = float(loaded.blocks.stored_at.max(initial=0.0))
    restore, stored_at = _restore(loaded.blocks, usable), loaded.blocks.stored_at[::-1][usable[::-1]]
    return Recovered(loaded.namespaces, formats, owners, restore, stored_at, latest)


def _without(journal: Journal, slabs: Slabs, loaded: Loaded, tenants: Set[str]) -> Loaded:
    """What is left without these tenants' blocks and slabs, where bytes of evicted blocks lie too."""
    blocks = loaded.blocks
    theirs = [n for n, space in loaded.namespaces.items() if space.tenant in tenants]
    gone = np.isin(blocks.ns, theirs)
    _forget(journal, blocks, gone, f"encryption of {', '.join(sorted(tenants))} was turned on or off")
    for extent in [extent for extent, owner in loaded.owners.items() if owner in tenants]:
        slabs.remove(extent)
        journal.delete_extent(extent)
    journal.drain()
    return journal.load()


def _without_key(loaded: Loaded, seals: TenantKeys | None) -> list[int]:
    """Sealed namespaces that nobody can open."""
    sealed = [(n, space.tenant) for n, space in loaded.namespaces.items() if space.sealed]
    return [n for n, tenant in sealed if seals is None or not seals.can_open(tenant)]


def _open_slabs(slabs: Slabs, extents: dict[int, int], count: int) -> dict[int, int]:
    """The bytes that each slab had, of those that are on record and could be opened."""
    sizes: dict[int, int] = {}
    for extent in slabs.stored():
        if extent in extents and len(sizes) < count:
            try:
                sizes[extent] = slabs.open_existing(extent)
            except TierError as error:
                _log.error("extent %d: %s", extent, error)
    return sizes


def _fits(
    blocks: Blocks, namespaces: dict[int, Namespace], formats: dict[int, int], sizes: dict[int, int]
) -> npt.NDArray[np.bool_]:
    """Which records name a slot that is there, has their namespace's size, and is nobody else's."""
    payloads = {n: space.layout["block_bytes"] for n, space in namespaces.items()}
    wanted = mapped(blocks.ns, {n: slot_bytes(space.stored_bytes) for n, space in namespaces.items()})
    found = mapped(blocks.extent, formats)
    fits: npt.NDArray[np.bool_] = (found == wanted) & (found > 0)
    fits &= blocks.length == mapped(blocks.ns, payloads)
    fits &= (blocks.index.astype(np.int64) + 1) * found <= mapped(blocks.extent, sizes)
    place = np.where(fits, blocks.extent.astype(np.int64) << 32 | blocks.index, -1)
    latest = np.zeros(len(fits), np.bool_)
    latest[len(fits) - 1 - np.unique(place[::-1], return_index=True)[1]] = True
    return fits & latest


def strangers(loaded: Loaded) -> npt.NDArray[np.bool_]:
    """Which records say that a block of one tenant lies in an extent of another."""
    tenants = {name: i for i, name in enumerate({space.tenant for space in loaded.namespaces.values()})}
    theirs = {n: tenants[space.tenant] for n, space in loaded.namespaces.items()}
    owners = {extent: tenants.get(owner, -1) for extent, owner in loaded.owners.items()}
    tenant = mapped(loaded.blocks.ns, theirs, absent=-1)
    strange: npt.NDArray[np.bool_] = tenant != mapped(loaded.blocks.extent, owners, absent=-1)
    return strange & (tenant >= 0)


def _forget(journal: Journal, blocks: Blocks, which: npt.NDArray[np.bool_], why: str) -> None:
    if which.any():
        _log.warning("%d blocks are forgotten: %s", which.sum(), why)
    for ns in np.unique(blocks.ns[which]).tolist():
        some = np.flatnonzero(which & (blocks.ns == ns))
        journal.delete(ns, [blocks.keys[i].tobytes()[: blocks.key_bytes[i]] for i in some.tolist()])


def _restore(blocks: Blocks, usable: npt.NDArray[np.bool_]) -> Restore:
    """The usable records as an event, latest first."""
    everything = Restore(
        1,
        blocks.ns[::-1],
        blocks.keys[::-1],
        blocks.key_bytes[::-1],
        blocks.parents[::-1],
        blocks.parent_bytes[::-1],
        blocks.extent[::-1],
        blocks.index[::-1],
        blocks.version[::-1],
        blocks.checksum[::-1],
        np.full(len(blocks), np.inf),
    )
    return everything.only(usable[::-1])
