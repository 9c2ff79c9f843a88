"""Devices of the NVMe tier: opened by name, those that come while the daemon runs, and those that go.

One that comes must be empty: what an earlier daemon left on it is taken in when a daemon starts. Without the
first there is no daemon, without another one there is, and it says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.config import FIRST_DEVICE, Config
from kvstore.core import events as ev
from kvstore.core.blocks.residency import TierState
from kvstore.core.transfers.admission import Rule
from kvstore.core.transfers.devices import TierSpec
from kvstore.errors import ConfigError, KVStoreError, TierError
from kvstore.tiers.nvme.engines import best_engine
from kvstore.tiers.nvme.key_files import MasterKey
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import Tier, extent_bytes

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Shell

_LEFT_BEHIND = {"lost+found", "slabs", "records", "keys", "lock"}
"""What may be in the folder of a device that comes: all of it may be without a block."""


def open_devices(config: Config) -> tuple[dict[str, NvmeTier], list[str]]:
    """The configured devices by name, and why there are not all of them. KVStoreError without the first."""
    devices: dict[str, NvmeTier] = {}
    problems = []
    for name in config.nvme.paths:
        try:
            devices[name] = _open(config, name, devices.get(FIRST_DEVICE))
        except KVStoreError as error:
            if name == FIRST_DEVICE:
                raise
            problems.append(f"nvme.devices.{name} is left out: {error.message}")
    return devices, problems


def open_new(config: Config, names: Iterable[str], first: NvmeTier | None) -> dict[str, NvmeTier]:
    """Some of the configured devices, if they are empty. Raises KVStoreError, and leaves none open."""
    devices: dict[str, NvmeTier] = {}
    try:
        for name in names:
            path = config.nvme.paths[name]
            _check_empty(path)
            devices[name] = _open(config, name, first)
            found = devices[name].load()
            if found.formats or len(found.restore.index):
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
            for tenant in devices[name].encrypted:
                if first is not None and first.has_key(tenant):
                    devices[name].make_key(tenant)
    except BaseException:
        close_all(devices)
        raise
    return devices


def _check_empty(path: Path) -> None:
    """Raises TierError unless a folder is there, with nothing in it but what a device that left leaves."""
    try:
        others = sorted(set(os.listdir(path)) - _LEFT_BEHIND)
    except OSError as error:
        hint = "mount the device and make the folder first"
        raise TierError(f"cannot use {path}: {error.strerror}", hint) from None
    if others:
        raise TierError(f"there is {others[0]!r:.80} in {path}", "a device that is added must be empty")


def close_all(devices: Mapping[str, NvmeTier]) -> None:
    """Closes them."""
    for device in devices.values():
        device.close()


def _open(config: Config, name: str, first: NvmeTier | None) -> NvmeTier:
    limit, path = config.nvme.limits[name], config.nvme.paths[name]
    # Who is sealed on one, though not configured any more, is nowhere plain.
    encrypt = dict.fromkeys(first.encrypted if first is not None else (), True)
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


def opener(shell: Shell, config: Config) -> Callable[[], dict[str, NvmeTier]]:
    """Opens the devices that are to come; may run on another thread. See `open_new`."""
    names, first = new(shell, config), shell.devices.get(FIRST_DEVICE)
    return lambda: open_new(config, names, first)


def new(shell: Shell, config: Config) -> list[str]:
    """Names of devices that are to come."""
    return [name for name in config.nvme.devices if name not in shell.config.nvme.devices]


def spec(name: str, device: NvmeTier, config: Config) -> TierSpec:
    """What the core is told of a device."""
    return TierSpec(Tier.NVME, device.limit_bytes, device.extent_bytes, False, rule(config, name), name)


def rule(config: Config, name: str) -> Rule:
    """What goes to a device."""
    nvme = config.nvme
    return Rule(nvme.admission, nvme.admission_threshold, nvme.bytes_a_day(name))


def check(shell: Shell, config: Config) -> None:
    """Raises ConfigError for devices that can't come or go while the daemon runs."""
    wanted = new(shell, config)
    if wanted and not shell.devices:
        raise ConfigError(f"nvme.devices.{wanted[0]}: there is no NVMe tier", "set nvme.path, and restart")
    for name in wanted:
        if name in shell.devices:
            raise ConfigError(f"nvme.devices.{name} is being removed", "wait until it is empty")
    if len(wanted) > shell.placement.hotplug.room:
        hint = "restart it: it can tell so many apart, those that were removed included"
        raise ConfigError(f"{len(wanted)} devices more are too many for this daemon", hint)


def going(shell: Shell, config: Config) -> Iterator[tuple[int, TierState]]:
    """Devices that are there now and are not to be, by number."""
    for tier, state in enumerate(shell.placement.residency.tiers):
        stays = state.spec.tier != Tier.NVME or state.spec.name in config.nvme.limits
        if not (stays or state.leaving):
            yield tier, state


def consequences(shell: Shell, config: Config) -> list[dict[str, Any]]:
    """What all tenants together ("") would lose with devices that go, in bytes."""
    return [
        {"tenant": "", "tier": state.spec.name, "evicted_bytes": state.extents.used_bytes, "claimed_bytes": 0}
        for _, state in going(shell, config)
        if state.extents.used_bytes
    ]


def change(shell: Shell, config: Config, opened: Mapping[str, NvmeTier]) -> None:
    """Has devices go that are not configured any more, and those come that were opened for it."""
    for tier, state in list(going(shell, config)):
        shell.chronicle.add("leaving", tier=state.spec.name)
        shell.handle(ev.RemoveDevice(tier))
    for name, device in opened.items():
        shell.devices[name] = device
        shell.devices_changed()
        device.put_generation(shell.generation)
        for pool in shell.pools.values():
            pool.watch(device)
        for space in shell.namespaces:
            shell.tenancy.record(space, [device])
        shell.handle(ev.AddDevice(spec(name, device, config)))


def joined(shell: Shell, tier: int) -> None:
    """A device is there: tenants have their part of it, and its extents are made."""
    state = shell.placement.residency.tiers[tier]
    shell.chronicle.add("joined", tier=state.spec.name)
    if state.spec.name not in shell.config.nvme.limits:
        # It was to go again before it was there.
        shell.handle(ev.RemoveDevice(tier))
        return
    shell.tenancy.apply(shell.config)
    shell.handle(ev.SetLimit(tier, state.spec.limit_bytes))
