"""Start-up recovery: gives the blocks that an earlier daemon left to the core, tenant by tenant.

Blocks of unknown tenants and blocks beyond the limits are forgotten. How tiers find the blocks is not covered
here: see `kvstore.tiers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.columns import distinct
from kvstore.core import events as ev
from kvstore.core.actions import Where, places
from kvstore.core.view import View
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.tier_set import DRAM, TierSet
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.namespaces import Domains, Namespaces
from kvstore.daemon.tenancy.quotas import TenantQuotas
from kvstore.tiers.dram import DramTier, Inherited
from kvstore.tiers.nvme.generations import resolve
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.tier import NvmeTier

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Recovery:
    """Recovers all tiers of one daemon, before the tiers start. `_clock` returns Unix time in s."""

    _core: Executor
    _tiers: TierSet
    _durability: Durability
    _catalog: NamespaceCatalog
    _namespaces: Namespaces
    _domains: Domains
    _quotas: TenantQuotas
    _clock: Callable[[], float]

    # -- NVMe

    def restore_nvme(self) -> None:
        """Restores all devices, and records all namespaces on each.

        A device that was absent while blocks were invalidated may still have these. All of its blocks are
        forgotten (see `kvstore.tiers.nvme.generations`).
        """
        devices = self._tiers.devices
        histories = [device.journal.history for device in devices.values()]
        resolution = resolve(histories, self._durability.new_name())
        self._durability.history = resolution.history
        found = zip(devices.items(), resolution.current, strict=True)
        for tier, ((name, device), current) in enumerate(found, DRAM + 1):
            if not current:
                _log.warning("%s was absent while blocks were invalidated: it starts empty", name)
            self._restore_device(tier, device, current)
            if not current:
                # Only now: after a crash before this, the device must still count as absent.
                device.journal.put_generations(resolution.history)
        if len(devices) > 1:
            self._catalog.record_all(devices.values())

    def _restore_device(self, tier: int, device: NvmeTier, keep: bool) -> None:
        found, names = device.load(keep), self._namespaces
        self._restore_extents(tier, found.slot_bytes, found.owners if keep else {})
        used = distinct(found.restore.namespace)
        others = _others(names, found.namespaces)
        # A namespace without blocks needs no number, unless other tenants may read it.
        for number in [n for n, namespace in found.namespaces.items() if n in used or namespace.readers]:
            if number not in others and names.at(number) is None:
                self._restore_namespace(number, found.namespaces[number])
        found.restore.tier = tier
        unknown = [number for number in used if number in others or number not in names.fingerprints]
        known = ~np.isin(found.restore.namespace, unknown)
        known &= self._core.view.tiers[tier].has_slots(found.restore.extent, found.restore.index)
        if not known.all():
            why = "the limits are too small for them, or the device is from another node"
            _log.warning("%d blocks on NVMe are forgotten: %s", (~known).sum(), why)
            device.forget(found.restore.only(~known))
        # Namespaces without blocks or tenants were not opened. Nothing else would delete their records.
        for number, record in found.namespaces.items():
            if number in others or names.at(number) is None:
                device.forget_namespace(number)
                if keep:
                    self._catalog.keep_epoch(record)
        since = found.stored_at - self._clock() + self._core.now()
        for namespace in names:
            if namespace.ttl_s:
                mine = found.restore.namespace == namespace.number
                found.restore.ends[mine] = since[mine] + namespace.ttl_s
        self._core.handle(found.restore.only(known))
        if known.any():
            _log.info("%d blocks restored from NVMe", known.sum())

    def _restore_extents(self, tier: int, formats: Mapping[int, int], owners: Mapping[int, str]) -> None:
        """Reports extents with the slot size of each. An extent without a known owner is renewed."""
        for extent, size in sorted(formats.items()):
            tenant = self._quotas.known(owners[extent]) if extent in owners else None
            if tenant is None:
                self._core.handle(ev.ExtentReady(tier, extent, tenant=ev.UNKNOWN))
            else:
                self._core.handle(ev.ExtentReady(tier, extent, size, tenant=tenant, domain=tenant))

    def _restore_namespace(self, number: int, record: Namespace) -> None:
        tenant = self._quotas.known(record.tenant)
        namespace = self._catalog.entry_of(number, tenant, record) if tenant is not None else None
        if namespace is not None:
            self._catalog.restore(namespace)

    # -- DRAM

    def restore_dram(self, extent_ready: Callable[[ev.ExtentReady], None]) -> None:
        """Restores the extents that an earlier daemon handed over. Extents of no known tenant are renewed."""
        dram = self._tiers.dram
        found = dram.load()
        owner_of = {}
        for extent, size in sorted(found.slot_bytes.items()):
            owner = self._domains.by_tag(found.owners[extent]) if size else (0, 0)
            if owner is None:
                _log.warning("extent %d of the previous daemon belongs to no known tenant", extent)
                self._core.handle(ev.ExtentReady(DRAM, extent, tenant=ev.UNKNOWN))
                continue
            owner_of[extent] = owner[0]
            extent_ready(ev.ExtentReady(DRAM, extent, size, found.versions.get(extent), *owner))
        restore = dram_restore(found, owner_of, self._catalog.restored, self._expiry(found))
        self._core.handle(restore)
        void_unrestored(self._core.view, dram, found)
        if found.slot_bytes:
            _log.info("%d blocks restored from %d DRAM extents", len(restore.index), len(found.slot_bytes))

    def _expiry(self, found: Inherited) -> npt.NDArray[np.float64]:
        at = found.headers["expires"]
        # Clients can write headers: a time that is not finite counts as past.
        ends: npt.NDArray[np.float64] = np.where(at == 0, np.inf, at - self._clock() + self._core.now())
        return np.where(np.isfinite(at), ends, 0.0)


def _others(names: Namespaces, found: Mapping[int, Namespace]) -> list[int]:
    """Returns numbers that conflict with an earlier device: other namespaces, or other numbers for one."""
    known = names.fingerprints
    fingerprints = set(known.values())
    return [
        number
        for number, namespace in found.items()
        if (
            known[number] != namespace.fingerprint
            if number in known
            else namespace.fingerprint in fingerprints
        )
    ]


def void_unrestored(view: View, dram: DramTier, found: Inherited) -> None:
    """Voids slots that were not restored: a later daemon would restore invalidated blocks from them."""
    gone = view.tiers[DRAM].lacks_block(found.extent, found.index)
    dram.headers.void(Where(places(found.extent[gone], found.index[gone])))


def dram_restore(
    found: Inherited,
    owner_of: dict[int, int],
    number_of: Callable[[int, bytes, int], int],
    ends: npt.NDArray[np.float64],
) -> ev.Restore:
    """Returns the blocks of inherited extents as an event.

    `owner_of` has the tenants of extents, `ends` the expiry of each block. `number_of` returns the number of
    a tenant's namespace with this fingerprint and payload size (bytes), 0 to leave its blocks out. A tenant's
    writers can alter headers. No header counts for another tenant, and few cannot change the payload size.
    """
    headers = found.headers
    owners = np.array([owner_of.get(e, -1) for e in found.extent.tolist()], np.int64)
    numbers = np.zeros(len(headers), np.uint32)
    good = np.zeros(len(headers), np.bool_)
    for tenant in np.unique(owners[owners >= 0]).tolist():
        mine = np.flatnonzero(owners == tenant)
        fingerprints, inverse = np.unique(headers["namespace"][mine], axis=0, return_inverse=True)
        for i, raw in enumerate(fingerprints):
            which = mine[inverse.reshape(-1) == i]
            lengths, counts = np.unique(headers["length"][which], return_counts=True)
            length = int(lengths[counts.argmax()])
            number = number_of(tenant, raw.tobytes(), length)
            numbers[which] = number
            good[which] = (headers["length"][which] == length) & (number > 0)
    # Of several headers of one block only one counts.
    names = np.concatenate(
        [numbers[:, None].view(np.uint8), headers["key_bytes"][:, None], headers["key"]], axis=1
    )
    first = np.zeros(len(headers), np.bool_)
    first[np.unique(names, axis=0, return_index=True)[1]] = True
    good &= first
    return ev.Restore(
        0,
        numbers,
        headers["key"],
        headers["key_bytes"],
        headers["parent"],
        headers["parent_bytes"],
        found.extent,
        found.index,
        headers["version"],
        headers["checksum"],
        ends,
    ).only(good)
