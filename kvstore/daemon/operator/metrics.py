"""The operator command behind the metrics: counters, latencies, decisions, hits and holdings.

Only the largest tenants have rows of their own, which bounds the size of the answer.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.core.insight.hit_counters import ALL_TIERS, MOST, NETWORK, REQUESTED, Amount, HitCounters
from kvstore.core.residency.decision_log import EVERY_TIER
from kvstore.core.view import View
from kvstore.daemon.operator.command import command
from kvstore.daemon.operator.device_commands import brief
from kvstore.daemon.operator.latency import BOUNDS_S, Calls, CopyLatency, Lag
from kvstore.daemon.operator.tenants import holding
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.types import Tier

_MOST_TENANTS = 20
_UNITS = "blocks", "tokens", "bytes"
_REMOVED = "(removed)"
"""Name of all removed devices, because the names of devices are reused."""


@dataclass(slots=True, eq=False)
class Metrics:
    """Everything that is counted and measured in one daemon."""

    _core: Executor
    _authenticator: Authenticator
    _hits: HitCounters
    _calls: Calls
    _copies: CopyLatency
    _lag: Lag

    @command
    def figures(self) -> dict[str, Any]:
        """Returns all metrics. Removed devices are left out, because their names may be used again."""
        view, names = self._core.view, tier_names(self._core.view)
        return {
            "bounds_s": list(BOUNDS_S),
            "calls": self._calls.plain(),
            "copies": [
                {"source": names[source], "target": names[target], **histogram.plain()}
                for (source, target), histogram in self._copies.items()
                if names[source] and names[target]
            ],
            "loop_lag": self._lag.histogram.plain(),
            "decisions": [
                {"what": what.name.lower(), "tier": "" if tier == EVERY_TIER else names[tier], "blocks": n}
                for (what, tier), n in view.decisions.blocks_by_what.items()
                if tier == EVERY_TIER or names[tier]
            ],
            "devices": [brief(tier, self._core.now()) for tier in view.tiers if not tier.gone],
            "hits": self._hit_rows(names),
            "holdings": self._holding_rows(names),
        }

    def _hit_rows(self, names: list[str]) -> list[dict[str, Any]]:
        """Returns sums of prompts by tenant and tier. Small tenants share rows without a tenant's name."""
        sums = {tenant: self._hits.of(tenant) for tenant in self._hits}

        def requested_bytes(tenant: int) -> int:
            return sums[tenant].get((REQUESTED, ALL_TIERS), Amount()).nbytes

        largest = heapq.nlargest(_MOST_TENANTS, sums, key=requested_bytes)
        rows: dict[tuple[str, str, str], Amount] = {}
        for tenant, columns in sums.items():
            name = self._authenticator.name(tenant) if tenant in largest else ""
            for (what, tier), amount in columns.items():
                row = name, what, tier_name(names, tier)
                rows[row] = rows.get(row, Amount()).plus(amount)
        # A number that does not fit into a message would fail the whole answer.
        return [
            {"tenant": tenant, "what": what, "tier": tier}
            | {unit: min(n, MOST) for unit, n in zip(_UNITS, amount, strict=True)}
            for (tenant, what, tier), amount in sorted(rows.items())
        ]

    def _holding_rows(self, names: list[str]) -> list[dict[str, Any]]:
        """Returns what tenants use of each tier. Small tenants share a row without a tenant's name."""
        tiers = self._core.view.tiers
        used = np.zeros(len(self._authenticator.names()), np.int64)
        for tier in tiers:
            mine = tier.used_by_tenant()[: len(used)]
            used[: len(mine)] += mine
        largest = np.sort(np.argsort(-used, kind="stable")[:_MOST_TENANTS]).tolist()
        rows = []
        for name, tier in ((name, tier) for name, tier in zip(names, tiers, strict=True) if name):
            left_used, left_floor = int(tier.used_by_tenant().sum()), tier.capacity().floor_bytes
            for tenant in largest:
                has = holding(tier, tenant)
                rows.append({"tenant": self._authenticator.name(tenant), "tier": name, **has})
                left_used, left_floor = left_used - has["used_bytes"], left_floor - has["floor_bytes"]
            if len(used) > len(largest):
                row = {"tenant": "", "tier": name, "used_bytes": left_used}
                rows.append(row | {"floor_bytes": left_floor, "limit_bytes": None})
        return rows


def tier_names(view: View) -> list[str]:
    """Returns the names of tiers by number, empty for removed devices."""
    return ["" if tier.gone else tier.name for tier in view.tiers]


def tier_name(names: list[str], number: int) -> str:
    """Returns the name of a hit counter's tier, empty for all tiers together."""
    if number < 0:
        return Tier.NETWORK.name.lower() if number == NETWORK else ""
    return names[number] or _REMOVED
