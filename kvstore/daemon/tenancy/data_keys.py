"""Data keys of encrypted tenants: on each NVMe device one for each tenant.

A key is made before the first namespace of an encrypted tenant is opened, and erased when the tenant is
deleted. Keys change on threads, because a change waits for the device. What is encrypted with them is not
covered here: see `kvstore.tiers.nvme.encryption`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import CurrentConfig, Ended
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.tiers.nvme.tier import NvmeTier

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DataKeys:
    """The data keys on all NVMe devices."""

    _core: Executor
    _tiers: TierSet
    _config: CurrentConfig

    def are_used_by(self, name: str) -> bool:
        """Returns whether a tenant's blocks are encrypted on any device."""
        return any(device.keys.encrypts(name) for device in self._tiers.devices.values())

    def are_wanted_by(self, name: str) -> bool:
        """Returns whether a tenant's blocks are, or by the configuration will be, encrypted."""
        configured = self._config().tenants.get(name)
        return self.are_used_by(name) or (configured is not None and configured.encrypt)

    def exist(self, name: str) -> bool:
        """Returns whether namespaces of a tenant can be opened without making a key first."""
        return not any(device.keys.lacks_key(name) for device in self._tiers.devices.values())

    def set_encrypted(self, name: str, wanted: bool, empty: bool) -> None:
        """Encrypts a tenant that is `empty`: it has no namespaces. Any other change needs a restart."""
        for device in self._tiers.devices.values():
            if device.keys.encrypts(name) != wanted:
                if wanted and empty:
                    device.keys.encrypt(name)
                else:
                    _log.warning("needs a restart: tenants.%s.encrypt", name)

    def make(self, name: str, ended: Ended) -> None:
        """Makes the keys that a tenant lacks, on threads. `ended` gets the first error, if any."""
        lacking = [device for device in self._tiers.devices.values() if device.keys.lacks_key(name)]
        self._change([(device, device.keys.make) for device in lacking], name, ended)

    def erase(self, name: str, ended: Ended) -> None:
        """Erases a tenant's keys, on threads. `ended` gets the first error, if any."""
        devices = self._tiers.devices.values() if self.are_used_by(name) else ()
        self._change([(device, device.keys.erase) for device in devices], name, ended)

    def _change(
        self, changes: Sequence[tuple[NvmeTier, Callable[[str], object]]], name: str, ended: Ended
    ) -> None:
        left, failed = len(changes), None

        def changed(error: Exception | None) -> None:
            nonlocal left, failed
            left, failed = left - 1, failed or error
            if not left:
                ended(failed)

        for device, change in changes:
            device.keys.change(change, name, partial(self._core.post, changed))
        if not changes:
            ended(None)
