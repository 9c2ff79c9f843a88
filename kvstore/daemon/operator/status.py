"""What `kvstore status` and the admin API show of the daemon as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kvstore.core.view import TierView
from kvstore.daemon.kv_events.tracker import Tracker
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator.command import command
from kvstore.daemon.operator.tenants import TenantCommands
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.daemon.tenancy.auth import Principal
from kvstore.daemon.tenancy.namespaces import Namespaces


class Status:
    """The status of one daemon. `instance` is the daemon's id."""

    def __init__(
        self,
        core: Executor,
        tiers: TierSet,
        namespaces: Namespaces,
        tenants: TenantCommands,
        problems: list[str],
        instance: bytes,
        network: NetworkTier | None,
        kv_events: Tracker,
    ) -> None:
        self.server: Callable[[Principal | None], dict[str, Any]] = lambda who: {}
        """Returns the server's part of the status: for a principal, or for operators."""
        self._core = core
        self._view = core.view
        self._tiers = tiers
        self._namespaces = namespaces
        self._tenants = tenants
        self._problems = problems
        self._instance = instance
        self._started = core.now()
        self._network = network
        self._kv_events = kv_events

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
        view, devices = self._view, self._tiers.devices.values()
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
            "nvme_io": next((device.engine_name for device in devices), ""),
            "counters": dict(view.counters),
            "problems": list(self._problems),
        }

    def _tier(self, tier: TierView) -> dict[str, Any]:
        capacity, health, traffic = tier.capacity(), tier.health(), tier.traffic(self._core.now())
        return {
            "name": tier.name,
            "limit_bytes": capacity.limit_bytes,
            "capacity_bytes": capacity.capacity_bytes,
            "used_bytes": capacity.used_bytes,
            "blocks": capacity.blocks,
            "extents": {f"{size} bytes a slot": n for size, n in capacity.extents_by_slot_bytes.items()},
            "retired_slots": capacity.retired_slots,
            "bandwidth_bytes_per_s": round(traffic.bandwidth_bytes_per_s),
            "writable": health.writable,
            "readable": health.readable,
            "fenced": health.fenced,
            "state": health.state,
            "scrub_passes": self._view.counters[f"scrub_passes_{tier.name}"],
        }
