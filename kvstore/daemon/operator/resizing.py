"""Limits of tiers that change while the daemon runs: what can be, what comes of it, what the core is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvstore.config import FIRST_DEVICE, Config
from kvstore.config.units import format_size
from kvstore.core import events as ev
from kvstore.core.blocks.topology import TierState
from kvstore.core.transfers.devices import TierSpec
from kvstore.daemon.operator import devices
from kvstore.errors import ConfigError
from kvstore.types import Tier, extent_bytes

if TYPE_CHECKING:
    from kvstore.daemon.runtime.executor import Shell


def specs(shell: Shell, config: Config) -> Iterator[tuple[TierSpec, int]]:
    """Every device that there would be by another configuration, and what it would have, in bytes."""
    for state in shell.placement.residency.tiers:
        if limit := _limit_bytes(shell, state, config):
            yield state.spec, limit
    for name in devices.new(shell, config):
        limit = config.nvme.limits[name]
        yield TierSpec(Tier.NVME, limit, extent_bytes(limit, len(config.tenants)), False, name=name), limit


def _limit_bytes(shell: Shell, state: TierState, config: Config) -> int:
    """What a device would have, in bytes; 0 for one that goes."""
    before, after = _limit(shell.config, state), _limit(config, state)
    if state.leaving or not after:
        return 0
    return after if after != before else state.extents.limit_bytes


def wanted(shell: Shell, config: Config) -> Iterator[ev.SetLimit]:
    """What the core is to be told."""
    for tier, state in enumerate(shell.placement.residency.tiers):
        limit = _limit_bytes(shell, state, config)
        if limit and limit != state.extents.limit_bytes:
            yield ev.SetLimit(tier, limit)


def check(shell: Shell, config: Config) -> None:
    """Raises ConfigError for a limit that a tier cannot take over as it runs."""
    if bool(config.hbm.limit) != bool(shell.config.hbm.limit):
        raise ConfigError("hbm.limit: this tier does not come or go while the daemon runs", "restart it")
    for event in wanted(shell, config):
        state = shell.placement.residency.tiers[event.tier]
        extents, key, limit = state.extents, _key(state), event.limit_bytes
        said = f"{key} is {format_size(limit)} ({limit} bytes)"
        pinned = sum(shell.placement.residency.pins.pinned_bytes.values())
        if limit < extents.extent_bytes:
            why = f"{said}, one extent of this tier has {extents.extent_bytes}"
            raise ConfigError(why, f"raise {key}, or change it with a restart")
        if limit > max(extents.most_bytes, extents.limit_bytes):
            why = f"{said}, this daemon can take {extents.most_bytes}: four times what it started with"
            raise ConfigError(why, "ask for less, or change it in the file and restart")
        if limit < extents.limit_bytes and limit < pinned and state.spec.tier != Tier.HBM:
            raise ConfigError(f"{said}, pins keep {pinned} bytes", f"unpin blocks, or raise {key}")
        if state.spec.tier == Tier.NVME:
            more = (limit // extents.extent_bytes - extents.total) * extents.extent_bytes
            free = shell.device_at(event.tier).free_bytes() if more > 0 else 0
            if more > free:
                why = f"{said}, which takes {more} more, the folder's file system has {free} free"
                raise ConfigError(why, f"make room there, or lower {key}")


def consequences(shell: Shell, config: Config) -> list[dict[str, Any]]:
    """What all tenants together ("") would lose to lower limits, in bytes."""
    rows = []
    for event in wanted(shell, config):
        state = shell.placement.residency.tiers[event.tier]
        lost = max(0, state.extents.used_bytes - event.limit_bytes)
        if lost:
            rows.append({"tenant": "", "tier": state.spec.name, "evicted_bytes": lost, "claimed_bytes": 0})
    return rows


def _limit(config: Config, state: TierState) -> int:
    alone = {Tier.DRAM: config.dram.limit, Tier.HBM: config.hbm.limit}
    limit = alone.get(state.spec.tier)
    return config.nvme.limits.get(state.spec.name, 0) if limit is None else limit


def _key(state: TierState) -> str:
    """What a device's limit is called in the configuration."""
    name, tier = state.spec.name, state.spec.tier
    alone = tier != Tier.NVME or name == FIRST_DEVICE
    return f"{tier.name.lower()}.limit" if alone else f"nvme.devices.{name}.limit"
