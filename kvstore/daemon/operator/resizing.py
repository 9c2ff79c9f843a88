"""Changes of tiers' limits while the daemon runs: validation, consequences, and events for the core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvstore.config import FIRST_DEVICE, Config
from kvstore.config.units import format_size
from kvstore.core import events as ev
from kvstore.core.queues.device_queue import TierSpec
from kvstore.core.view import TierView, View
from kvstore.daemon.operator.devices import Devices
from kvstore.daemon.runtime.ports import CurrentConfig
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.errors import ConfigError
from kvstore.types import Tier, extent_bytes


@dataclass(slots=True, eq=False)
class Resizing:
    """Compares the limits of a new configuration with those of the running daemon."""

    _view: View
    _tiers: TierSet
    _devices: Devices
    _config: CurrentConfig

    def specs(self, config: Config) -> Iterator[tuple[TierSpec, int]]:
        """Returns each tier that a configuration would leave, and its limit in bytes."""
        for tier in self._view.tiers:
            if limit := self._limit_bytes(tier, config):
                yield tier.spec, limit
        for name in self._devices.added_by(config):
            limit = config.nvme.limits[name]
            size = extent_bytes(limit, len(config.tenants))
            yield TierSpec(Tier.NVME, limit, size, False, name=name), limit

    def events(self, config: Config) -> list[ev.SetLimit]:
        """Returns the events that change limits."""
        return [
            ev.SetLimit(tier.number, limit)
            for tier in self._view.tiers
            if (limit := self._limit_bytes(tier, config)) and limit != tier.capacity().limit_bytes
        ]

    def check(self, config: Config) -> None:
        """Raises ConfigError for a limit that a tier cannot get while the daemon runs."""
        if bool(config.hbm.limit) != bool(self._config().hbm.limit):
            raise ConfigError("hbm.limit: this tier does not come or go while the daemon runs", "restart it")
        for event in self.events(config):
            self._check_limit(self._view.tiers[event.tier], event.limit_bytes)

    def _check_limit(self, tier: TierView, limit: int) -> None:
        capacity, key = tier.capacity(), _key(tier)
        said = f"{key} is {format_size(limit)} ({limit} bytes)"
        pinned = self._view.totals().pinned_bytes
        if limit < capacity.extent_bytes:
            why = f"{said}, one extent of this tier has {capacity.extent_bytes}"
            raise ConfigError(why, f"raise {key}, or change it with a restart")
        if limit > max(capacity.max_bytes, capacity.limit_bytes):
            why = f"{said}, this daemon can take {capacity.max_bytes}: four times what it started with"
            raise ConfigError(why, "ask for less, or change it in the file and restart")
        if limit < capacity.limit_bytes and limit < pinned and tier.kind.keeps_pins:
            raise ConfigError(f"{said}, pins keep {pinned} bytes", f"unpin blocks, or raise {key}")
        device = self._tiers.devices.get(tier.name)
        if device is not None:
            more = (limit // capacity.extent_bytes - capacity.extents) * capacity.extent_bytes
            free = device.slabs.free_bytes() if more > 0 else 0
            if more > free:
                why = f"{said}, which takes {more} more, the folder's file system has {free} free"
                raise ConfigError(why, f"make room there, or lower {key}")

    def consequences(self, config: Config) -> list[dict[str, Any]]:
        """Returns the bytes that all tenants together ("") would lose by lower limits and removed devices."""
        rows = []
        for tier in self._view.tiers:
            capacity, limit = tier.capacity(), self._limit_bytes(tier, config)
            lost = capacity.used_bytes - limit
            if lost > 0 and limit != capacity.limit_bytes and not tier.leaving:
                rows.append({"tenant": "", "tier": tier.name, "evicted_bytes": lost, "claimed_bytes": 0})
        return rows

    def _limit_bytes(self, tier: TierView, config: Config) -> int:
        """Returns the limit that a tier would have, 0 for a device that is removed."""
        before, after = _limit(self._config(), tier), _limit(config, tier)
        if tier.leaving or not after:
            return 0
        return after if after != before else tier.capacity().limit_bytes


def _limit(config: Config, tier: TierView) -> int:
    return config.shared_limits(tier.kind, tier.name).get(tier.name, 0)


def _key(tier: TierView) -> str:
    """Returns the configuration key of a tier's limit."""
    added = tier.kind.persistent and tier.name != FIRST_DEVICE
    return f"nvme.devices.{tier.name}.limit" if added else f"{tier.kind.name.lower()}.limit"
