"""Operator commands about tenants: their use of each tier, and their deletion."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from kvstore.core.view import TierView, View
from kvstore.daemon.operator.command import MOST_AT_ONCE, Later, check_limit, command
from kvstore.daemon.runtime.ports import CurrentConfig
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.deletion import Deletion


@dataclass(slots=True, eq=False)
class TenantCommands:
    """Lists and deletes tenants."""

    _view: View
    _authenticator: Authenticator
    _deletion: Deletion
    _config: CurrentConfig

    @command
    def tenants(self, after: str = "", limit: int = MOST_AT_ONCE) -> dict[str, Any]:
        """Returns at most `limit` tenants whose names come after `after`."""
        check_limit(limit)
        names = sorted(self._authenticator.names())
        start = bisect_right(names, after)
        shown = [self.usage(name) for name in names[start : start + limit]]
        return {"tenants": shown, "more": len(names) > start + limit}

    @command
    def tenant(self, name: str) -> dict[str, Any]:
        """Returns one tenant."""
        self._authenticator.existing(name)
        return self.usage(name)

    @command
    def delete_tenant(self, name: str) -> Later:
        """Deletes all blocks of a tenant. Answers with their number when nothing is left."""
        self._authenticator.existing(name)
        return lambda requester, request: self._deletion.delete(requester, request, name)

    def all_usage(self) -> list[dict[str, Any]]:
        """Returns all tenants by number."""
        return [self.usage(name) for name in self._authenticator.names()]

    def usage(self, name: str) -> dict[str, Any]:
        """Returns an existing tenant's use and quota of each tier."""
        number = self._authenticator.add(name)
        configured = self._config().tenants.get(name)
        lent = self._view.lent_by(number)
        return {
            "name": name,
            "share": configured.share if configured is not None else 1.0,
            "tiers": [
                {"name": tier.name, **holding(tier, number)} for tier in self._view.tiers if not tier.gone
            ],
            "lent_bytes": {self._authenticator.name(reader): n for reader, n in lent.items()},
        }


def holding(tier: TierView, tenant: int) -> dict[str, Any]:
    """Returns a tenant's use and quota of a tier. `limit_bytes` None: the tenant has no limit."""
    held = tier.holding(tenant)
    return {"used_bytes": held.used_bytes, "floor_bytes": held.floor_bytes, "limit_bytes": held.limit_bytes}
