"""NVMe devices: opened at the start, added and removed while the daemon runs.

A device that is added must be empty: only a start recovers blocks. Each device has its own records and keys,
so any of them can be removed, but for the last one. The daemon does not start if the first device cannot be
opened. Any other one is left out and reported, and so is a removed device that is still configured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import FIRST_DEVICE, Config
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.policy.admission import Rule
from kvstore.core.queues.device_queue import TierSpec
from kvstore.core.view import TierView
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import CurrentConfig, EventLog
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.quotas import TenantQuotas
from kvstore.errors import ConfigError, KVStoreError, TierError
from kvstore.tiers.nvme.io.engines import best_engine
from kvstore.tiers.nvme.key_files import MasterKey
from kvstore.tiers.nvme.tier import REMOVED, NvmeTier
from kvstore.types import Tier, extent_bytes

_CLOSED_WITHIN_S = 5.0
_LEFT_BEHIND = {"lost+found", "slabs", "records", "keys", "lock", REMOVED}
"""Files that an empty device may have in its folder: a removed device leaves them."""


def open_devices(config: Config) -> tuple[dict[str, NvmeTier], list[str]]:
    """Opens the configured devices. Returns them by name, and why some are left out.

    Raises KVStoreError if the first device cannot be opened, or if none is left.
    """
    devices: dict[str, NvmeTier] = {}
    problems = []
    for name, path in config.nvme.paths.items():
        note = path / REMOVED
        if os.path.exists(note):
            hint = f"delete {_key(name)} from the configuration; to use the folder again, delete {note}"
            problems.append(f"{_key(name)} is left out: it was removed from a running daemon ({hint})")
            continue
        try:
            devices[name] = _open(config, name, _any_of(devices))
        except KVStoreError as error:
            if name == FIRST_DEVICE:
                raise
            problems.append(f"{_key(name)} is left out: {error.message}")
    if problems and not devices:
        raise TierError(f"no NVMe device can be used: {'; '.join(problems)}")
    return devices, problems


def _any_of(devices: Mapping[str, NvmeTier]) -> NvmeTier | None:
    return next(iter(devices.values()), None)


def _key(name: str) -> str:
    """Returns the key of a device's folder or table."""
    return "nvme.path" if name == FIRST_DEVICE else f"nvme.devices.{name}"


def open_new(config: Config, names: Iterable[str], other: NvmeTier | None) -> dict[str, NvmeTier]:
    """Opens these configured devices, which must be empty. Raises KVStoreError, and leaves none open."""
    devices: dict[str, NvmeTier] = {}
    try:
        for name in names:
            path = config.nvme.paths[name]
            _check_empty(path)
            devices[name] = _open(config, name, other)
            found = devices[name].load()
            if found.slot_bytes or len(found.restore.index):
                raise TierError(
                    f"{path} holds a cache already", "restart the daemon to have it, or empty the folder"
                )
            size = _extent_bytes(config, name)
            if devices[name].extent_bytes != size:
                raise TierError(
                    f"{path} has extents of {devices[name].extent_bytes} bytes from before, not of {size}",
                    "empty the folder",
                )
            devices[name].begin_empty(found)
            for tenant in devices[name].keys.encrypted:
                if other is not None and not other.keys.lacks_key(tenant):
                    devices[name].keys.make(tenant)
            devices[name].take_back()
    except BaseException:
        close_all(devices)
        raise
    return devices


def _check_empty(path: Path) -> None:
    """Raises TierError unless a folder exists and has at most the files of an empty device."""
    try:
        others = sorted(set(os.listdir(path)) - _LEFT_BEHIND)
    except OSError as error:
        hint = "mount the device and make the folder first"
        raise TierError(f"cannot use {path}: {error.strerror}", hint) from None
    if others:
        raise TierError(f"there is {others[0]!r:.80} in {path}", "a device that is added must be empty")


def close_all(devices: Mapping[str, NvmeTier]) -> None:
    """Closes devices."""
    for device in devices.values():
        device.close()


def _open(config: Config, name: str, other: NvmeTier | None) -> NvmeTier:
    limit, path = config.nvme.limits[name], config.nvme.paths[name]
    # A tenant that is encrypted on one device is encrypted on all, even if it is no longer configured.
    encrypt = dict.fromkeys(other.keys.encrypted if other is not None else (), True)
    encrypt |= {tenant: each.encrypt for tenant, each in config.tenants.items()}
    master = MasterKey.load(config.encryption.key_file)
    engine = best_engine(config.nvme.io_threads)
    try:
        return NvmeTier.open(path, limit, _extent_bytes(config, name), engine, master, encrypt)
    except BaseException:
        engine.close()
        raise


def _extent_bytes(config: Config, name: str) -> int:
    return extent_bytes(config.nvme.limits[name], len(config.tenants))


def spec(name: str, device: NvmeTier, config: Config) -> TierSpec:
    """Returns the core's description of a device."""
    return TierSpec(Tier.NVME, device.limit_bytes, device.extent_bytes, False, rule(config, name), name)


def rule(config: Config, name: str) -> Rule:
    """Returns the rule for writes to a device."""
    nvme = config.nvme
    return Rule(nvme.admission, nvme.admission_threshold, nvme.bytes_a_day(name))


@dataclass(slots=True, eq=False)
class Devices:
    """Adds and removes NVMe devices while the daemon runs."""

    _core: Executor
    _tiers: TierSet
    _durability: Durability
    _catalog: NamespaceCatalog
    _quotas: TenantQuotas
    _event_log: EventLog
    _config: CurrentConfig

    def added_by(self, config: Config) -> list[str]:
        """Returns the names of devices that a configuration adds."""
        return [name for name in config.nvme.paths if name not in self._config().nvme.paths]

    def opener(self, config: Config) -> Callable[[], dict[str, NvmeTier]]:
        """Returns a function that opens the added devices. It may run on another thread. See `open_new`."""
        names, other = self.added_by(config), _any_of(self._tiers.devices)

        def opened() -> dict[str, NvmeTier]:
            # One of them may have been removed a moment ago.
            self._tiers.wait_for_closed(_CLOSED_WITHIN_S)
            return open_new(config, names, other)

        return opened

    def check(self, config: Config) -> None:
        """Raises ConfigError for devices that cannot be added or removed while the daemon runs."""
        wanted = self.added_by(config)
        if wanted and not self._tiers.devices:
            raise ConfigError(f"{_key(wanted[0])}: there is no NVMe tier", "restart the daemon")
        for name in wanted:
            if name in self._tiers.devices:
                raise ConfigError(f"{_key(name)} is being removed", "wait until it is empty")
        removed = self._removed_by(config)
        if removed and not wanted and len(removed) == len(self._staying()):
            hint = "add another device first; or delete it from the file, and restart the daemon"
            raise ConfigError(f"{removed[0].name} is the last NVMe device", hint)
        if len(wanted) > self._core.view.addable_devices:
            hint = "restart it: removed devices count until then"
            raise ConfigError(f"{len(wanted)} devices more are too many for this daemon", hint)

    def change(self, config: Config, opened: Mapping[str, NvmeTier]) -> None:
        """Removes devices that are no longer configured, and adds the opened ones."""
        for tier in self._removed_by(config):
            self._event_log.add(EntryKind.LEAVING, tier=tier.name)
            self._core.handle(ev.RemoveDevice(tier.number))
        for name, device in opened.items():
            self._tiers.add(name, device)
            device.journal.put_generations(self._durability.history)
            for pool in self._tiers.pools.values():
                pool.watch(device.engine)
            self._catalog.record_all([device])
            self._core.handle(ev.AddDevice(spec(name, device, config)))

    def set_admission(self, config: Config) -> None:
        """Applies the configured admission rules to all devices that stay."""
        for tier in self._staying():
            self._core.handle(ev.SetAdmission(tier.number, rule(config, tier.name)))

    def added(self, action: ac.DeviceAdded) -> None:
        """Applies quotas to a device that the core has added, and lets its extents be made."""
        tier, config = self._core.view.tiers[action.tier], self._config()
        self._event_log.add(EntryKind.JOINED, tier=tier.name)
        if tier.name not in config.nvme.limits:
            # The configuration has removed it before the core could add it.
            self._core.handle(ev.RemoveDevice(tier.number))
            return
        self._quotas.apply(config)
        self._core.handle(ev.SetLimit(tier.number, tier.spec.limit_bytes))

    def _removed_by(self, config: Config) -> list[TierView]:
        return [tier for tier in self._staying() if tier.name not in config.nvme.limits]

    def _staying(self) -> list[TierView]:
        """Returns the devices that are not being removed."""
        names = self._tiers.devices
        return [tier for tier in self._core.view.tiers if tier.name in names and not tier.leaving]
