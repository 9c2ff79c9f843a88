"""Quotas: how much of each tier a tenant may use, its weight and bandwidth, and which tenants are known.

The core enforces quotas by tenant number. Not covered: authentication of peers (`auth`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvstore.config import Config, Tenant
from kvstore.core import events as ev
from kvstore.core.capacity.quotas import UNLIMITED, Quota
from kvstore.core.queues.device_queue import TierSpec
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import CurrentConfig
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.namespaces import Domains, Namespaces
from kvstore.errors import ConfigError, KVStoreError

_log = logging.getLogger(__name__)

_UNCONFIGURED_SHARE = 0.001
"""The share of a tenant that was removed from the configuration: its blocks are evicted first."""
_BURST_S = 1.0


@dataclass(slots=True, eq=False)
class TenantQuotas:
    """Applies the configuration's tenants to the core, the authenticator and the data keys."""

    _core: Executor
    _authenticator: Authenticator
    _namespaces: Namespaces
    _domains: Domains
    _data_keys: DataKeys
    _config: CurrentConfig
    listeners: list[Callable[[ev.SetTenant], None]] = field(default_factory=list, init=False)
    """Called with each change of a tenant's quotas, weight or bandwidth."""
    _suspended: Counter[int] = field(default_factory=Counter, init=False)

    def check(self, config: Config, tiers: Iterable[tuple[TierSpec, int]]) -> None:
        """Raises ConfigError if floors, in whole extents, exceed a tier's limit (bytes)."""
        for spec, limit in tiers:
            size = spec.extent_bytes
            floors = sum(-(-_quota(t, spec, config).floor // size) for t in config.tenants.values())
            if floors > limit // size:
                raise ConfigError(
                    f"floors of {spec.name} take {floors} extents of {size} bytes each, "
                    f"the tier has {limit // size}",
                    "lower floors, or raise the tier's limit",
                )

    def consequences(self, config: Config) -> list[dict[str, Any]]:
        """Returns the bytes that tenants would lose by lower limits or could claim by higher floors."""
        before, rows = self._config().tenants, []
        for name in dict.fromkeys((*before, *config.tenants)):
            old, new = before.get(name, Tenant()), config.tenants.get(name, Tenant())
            if old.quotas == new.quotas:
                continue
            number = self._authenticator.number(name)
            for tier in self._core.view.tiers:
                quota, used, held = _quota(new, tier.spec, config), 0, 0
                if number is not None:
                    holding = tier.holding(number)
                    used, held = holding.used_bytes, holding.held_bytes
                lost, lacking = max(0, used - quota.limit), max(0, quota.floor - held)
                if lost or lacking:
                    row = {"tenant": name, "tier": tier.name}
                    rows.append({**row, "evicted_bytes": lost, "claimed_bytes": lacking})
        return rows

    def apply(self, config: Config) -> None:
        """Applies members, quotas and encryption. A tenant that is no longer configured keeps its blocks."""
        self._authenticator.reload(config)
        for name in self._authenticator.names():
            self._set(name, config)
            self._domains.of(self._authenticator.add(name), name, frozenset())
        for name, tenant in config.tenants.items():
            empty = not self._namespaces.of(self._authenticator.add(name))
            self._data_keys.set_encrypted(name, tenant.encrypt, empty)

    def suspend(self, name: str) -> None:
        """Leaves a tenant's quotas as they are until `resume`. Used while the tenant is deleted."""
        self._suspended[self._authenticator.add(name)] += 1

    def resume(self, name: str) -> None:
        """Undoes one `suspend`, and applies the configured quotas again."""
        self._suspended[self._authenticator.add(name)] -= 1
        self._set(name, self._config())

    def is_suspended(self, tenant: int) -> bool:
        """Returns whether a tenant is being deleted."""
        return self._suspended[tenant] > 0

    def known(self, name: str) -> int | None:
        """Returns the number of a tenant that recovery found. Adds the tenant if it is not configured.

        Returns None for a name that no tenant can have: the record is damaged.
        """
        number = self._authenticator.number(name)
        if number is None:
            try:
                number = self._authenticator.add(name)
            except KVStoreError as error:
                _log.error("ignored the records of a tenant: %s", error)
                return None
            self._set(name, self._config())
            self._domains.of(number, name, frozenset())
        return number

    def _set(self, name: str, config: Config) -> None:
        number = self._authenticator.add(name)
        if self._suspended[number]:
            return
        tiers, tenant = self._core.view.tiers, config.tenants.get(name)
        if tenant is not None:
            quotas = tuple(_quota(tenant, tier.spec, config) for tier in tiers)
            rate = float(tenant.bandwidth or 0)
            pin = UNLIMITED if tenant.pin is None else tenant.pin
            event = ev.SetTenant(number, quotas, tenant.share, pin, rate, rate * _BURST_S)
        else:
            share = 1.0 if not config.tenants else _UNCONFIGURED_SHARE
            event = ev.SetTenant(number, tuple(Quota(share=share) for _ in tiers))
        self._core.handle(event)
        for listener in self.listeners:
            listener(event)


def _quota(tenant: Tenant, spec: TierSpec, config: Config) -> Quota:
    """Returns a tenant's quota on one device: its quota of the tier, times the device's part of the tier."""
    part = tenant.quotas.get(spec.tier.name.lower())
    if part is None:
        return Quota(share=tenant.share)  # no configuration key sets quotas of this kind of tier
    limits = config.shared_limits(spec.tier, spec.name)
    mine, total = limits.get(spec.name, 0), sum(limits.values())
    limit = UNLIMITED if part.limit is None else part.limit * mine // total
    return Quota(-(-part.floor * mine // total), limit, tenant.share)
