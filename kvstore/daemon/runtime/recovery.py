"""What an earlier daemon left, on NVMe and in memory: comes to the core, as whose it is, or is let go of."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.actions import Where
from kvstore.daemon.tenancy.namespaces import NamespaceEntry, in_memory
from kvstore.tiers.dram import DramTier, Inherited
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.tier import NvmeTier

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Shell

_log = logging.getLogger(__name__)

DRAM = 0


def restore_nvme(shell: Shell) -> None:
    """Takes in what is on record on all devices, and has each know all namespaces.

    One that was away while something was forgotten may still have that: nothing of it is taken in.
    """
    shell.generation = max(device.generation for device in shell.devices.values())
    for tier, (name, device) in enumerate(shell.devices.items(), DRAM + 1):
        there = device.generation == shell.generation
        if not there:
            _log.warning("%s was away while blocks were forgotten: it starts empty", name)
        _restore_device(shell, tier, device, there)
        if not there:
            # Only now: no crash may leave what is forgotten on a device that seems to have missed nothing.
            device.put_generation(shell.generation)
    if len(shell.devices) > 1:
        for space in shell.namespaces:
            shell.tenancy.record(space)


def _restore_device(shell: Shell, tier: int, device: NvmeTier, keep: bool) -> None:
    found, tenancy = device.load(keep), shell.tenancy
    for extent, size in sorted(found.formats.items()):
        tenant = tenancy.known(found.owners[extent]) if keep else None
        if tenant is None:
            shell.handle(ev.ExtentReady(tier, extent, tenant=ev.UNKNOWN))
            continue
        shell.handle(ev.ExtentReady(tier, extent, size, tenant=tenant, domain=tenant))
    used = np.unique(found.restore.namespace).tolist()
    others = _others(shell, found.namespaces)
    # One that has no blocks needs no number, unless others may read it.
    for number in [n for n, space in found.namespaces.items() if n in used or space.readers]:
        if number not in others and tenancy.namespaces.at(number) is None:
            space = tenancy.found(number, found.namespaces[number])
            if space is not None:
                tenancy.restore(space)
    found.restore.tier = tier
    known = np.isin(found.restore.namespace, list(tenancy.namespaces.fingerprints))
    known &= ~np.isin(found.restore.namespace, others)
    extents = shell.placement.residency.tiers[tier].extents
    known &= extents.has(found.restore.extent, found.restore.index)
    if not known.all():
        why = "the limits are too small for them, or the device is from another node"
        _log.warning("%d blocks on NVMe are forgotten: %s", (~known).sum(), why)
        device.forget(found.restore.only(~known))
    # Those without blocks, or of no tenant, were not opened: their records would stay for ever.
    for number in found.namespaces:
        if number in others or tenancy.namespaces.at(number) is None:
            device.forget_namespace(number)
    ttl_s = {space.number: space.ttl_s for space in tenancy.namespaces}
    lives = np.array([ttl_s.get(n, 0.0) for n in found.restore.namespace.tolist()])
    since = found.stored_at - shell.clock() + shell.now()
    found.restore.ends = np.where(lives > 0, since + lives, np.inf)
    shell.handle(found.restore.only(known))
    if known.any():
        _log.info("%d blocks are back from NVMe", known.sum())


def _others(shell: Shell, found: Mapping[int, Namespace]) -> list[int]:
    """Numbers for which a device before this one has another namespace, or whose one it calls otherwise."""
    known = shell.namespaces.fingerprints
    called = set(known.values())
    return [
        number
        for number, space in found.items()
        if (known[number] != space.fingerprint if number in known else space.fingerprint in called)
    ]


def restore_dram(shell: Shell, dram: DramTier) -> None:
    """Takes in what the extents hold that were handed over; has those made anew that are nobody's."""
    found = dram.load()
    owner_of = {}
    for extent, size in sorted(found.formats.items()):
        owner = shell.tenancy.domains.by_tag(found.owners[extent]) if size else (0, 0)
        if owner is None:
            _log.warning("extent %d of the daemon before is used by no tenant that is known", extent)
            shell.handle(ev.ExtentReady(DRAM, extent, tenant=ev.UNKNOWN))
            continue
        owner_of[extent] = owner[0]
        versions = found.versions.get(extent)
        shell.extent_ready(ev.ExtentReady(DRAM, extent, size, versions, *owner))
    restore = in_memory(found, owner_of, _Numbers(shell).number_of, _ends(shell, found))
    shell.handle(restore)
    _void_others(shell, dram, found)
    if found.formats:
        _log.info("%d blocks are back from %d extents of DRAM", len(restore.index), len(found.formats))


def _void_others(shell: Shell, dram: DramTier, found: Inherited) -> None:
    """What was not taken in is gone: else a later daemon might, though it has been invalidated meanwhile."""
    extents = shell.placement.residency.tiers[DRAM].extents
    gone = np.isin(found.extent, list(extents.ready))
    there = gone & extents.has(found.extent, found.index)
    slots = extents.slots_at(found.extent[there].astype(np.int64), found.index[there].astype(np.int64))
    gone[there] = extents.owner[slots] < 0
    dram.void(Where(found.extent[gone].astype(np.uint64) << np.uint64(32) | found.index[gone]))


def _ends(shell: Shell, found: Inherited) -> npt.NDArray[np.float64]:
    at = found.headers["expires"]
    # A writer can reach the header: what is no time is over.
    ends: npt.NDArray[np.float64] = np.where(at == 0, np.inf, at - shell.clock() + shell.now())
    return np.where(np.isfinite(at), ends, 0.0)


class _Numbers:
    """Numbers of namespaces that are found in memory."""

    def __init__(self, shell: Shell) -> None:
        self._tenancy = shell.tenancy

    def number_of(self, tenant: int, fingerprint: bytes, block_bytes: int) -> int:
        """The number of a tenant's namespace, 0 if it can have none."""
        tenancy = self._tenancy
        space = tenancy.namespaces.find(tenant, fingerprint)
        if space is None:
            space = NamespaceEntry(0, fingerprint, tenant, block_bytes)
            space.domain = tenancy.domains.of(tenant, tenancy.registry.name(tenant), frozenset())
            if not tenancy.restore(space):
                return 0
            tenancy.record(space)
        return space.number if space.block_bytes == block_bytes else 0
