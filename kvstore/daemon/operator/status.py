"""The status of the whole daemon, for `kvstore status` and the REST interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore import native
from kvstore.core.view import TierView
from kvstore.daemon.kv_events.tracker import Tracker
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator.command import command
from kvstore.daemon.operator.tenants import TenantCommands
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.daemon.tenancy.auth import Principal
from kvstore.daemon.tenancy.namespaces import Namespaces
from kvstore.daemon.tracing.tracing import Tracing


@dataclass(slots=True, eq=False)
class Status:
    """The status of the daemon with the id `_instance`."""

    _core: Executor
    _tiers: TierSet
    _namespaces: Namespaces
    _tenants: TenantCommands
    _problems: list[str]
    _instance: bytes
    _network: NetworkTier | None
    _kv_events: Tracker
    _tracing: Tracing
    server: Callable[[Principal | None], dict[str, Any]] = field(default=lambda who: {}, init=False)
    """Returns the server's part of the status: for a principal, or for operators."""
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self._core.now()

    @command
    def status(self) -> dict[str, Any]:
        """Returns the status without tenants, of which there may be thousands."""
        return {**self.server(None), **self._summary()}

    def of(self, who: Principal) -> dict[str, Any]:
        """Returns what a principal may see: operators see everything, others their own tenant."""
        if not who.operator:
            return {**self.server(who), "tenants": [self._tenants.usage(who.name)]}
        return {**self.server(who), **self._summary(), "tenants": self._tenants.all_usage()}

    def _summary(self) -> dict[str, Any]:
        view, devices = self._core.view, self._tiers.devices.values()
        totals = view.totals()
        return {
            "pid": os.getpid(),
            "instance": self._instance.hex(),
            "uptime_s": round(self._core.now() - self._started, 3),
            "tiers": [self._tier(tier) for tier in view.tiers if not tier.gone],
            "blocks": totals.blocks,
            "namespaces": len(self._namespaces),
            "leases": totals.leases,
            "reservations": totals.reservations,
            "copies_under_way": totals.copies_under_way,
            "core_ram_bytes": totals.ram_bytes,
            "huge_pages": self._tiers.dram.huge,
            "policy": view.policy().name,
            "gpus": {name: pool.gpu.uuid for name, pool in self._tiers.pools.items()},
            "network": self._network.status() if self._network is not None else None,
            "events": self._kv_events.status(),
            "tracing": self._tracing.status(),
            "copies": native.IMPLEMENTATION,
            "nvme_io": next((device.engine_name for device in devices), ""),
            "counters": dict(view.counters),
            "problems": list(self._problems),
        }

    def _tier(self, tier: TierView) -> dict[str, Any]:
        capacity, traffic = tier.capacity(), tier.traffic(self._core.now())
        return {
            "name": tier.name,
            "limit_bytes": capacity.limit_bytes,
            "capacity_bytes": capacity.capacity_bytes,
            "used_bytes": capacity.used_bytes,
            "blocks": capacity.blocks,
            "extents": {f"{size} bytes a slot": n for size, n in capacity.extents_by_slot_bytes.items()},
            "retired_slots": capacity.retired_slots,
            "bandwidth_bytes_per_s": round(traffic.bandwidth_bytes_per_s),
            **asdict(tier.health()),
            "scrub_passes": self._core.view.counters[f"scrub_passes_{tier.name}"],
        }
