"""Applies a changed configuration to the running daemon.

Not covered: which keys can change at run time (`kvstore.config`), and how the configuration is read and
persisted (`settings`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvstore.config import Config
from kvstore.core import events as ev
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator.devices import Devices
from kvstore.daemon.operator.resizing import Resizing
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import EventLog
from kvstore.daemon.runtime.scrubber import Scrubber
from kvstore.daemon.tenancy.quotas import TenantQuotas
from kvstore.tiers.nvme.tier import NvmeTier


class ConfigInUse:
    """A `CurrentConfig` that a reload replaces."""

    def __init__(self, config: Config) -> None:
        self.value = config

    def __call__(self) -> Config:
        return self.value


@dataclass(slots=True, eq=False)
class Reload:
    """Checks and applies configurations. Other rooms add their part to `listeners`."""

    _core: Executor
    _quotas: TenantQuotas
    _devices: Devices
    _resizing: Resizing
    _scrubber: Scrubber
    _event_log: EventLog
    _network: NetworkTier | None
    _in_use: ConfigInUse
    listeners: list[Callable[[Config], None]] = field(default_factory=list, init=False)
    """Called with each configuration that was applied."""

    def check(self, config: Config) -> None:
        """Raises ConfigError for a configuration that needs a restart or does not fit the tiers."""
        self._devices.check(config)
        self._resizing.check(config)
        self._quotas.check(config, self._resizing.specs(config))

    def consequences(self, config: Config) -> list[dict[str, Any]]:
        """Returns the bytes that tenants would lose or could claim. Raises ConfigError as `check` does."""
        self.check(config)
        return self._quotas.consequences(config) + self._resizing.consequences(config)

    def opener(self, config: Config) -> Callable[[], dict[str, NvmeTier]]:
        """Returns a function that opens the added devices. It may run on another thread. See `open_new`."""
        return self._devices.opener(config)

    def apply(
        self, config: Config, changed: list[str], opened: Mapping[str, NvmeTier] = MappingProxyType({})
    ) -> None:
        """Applies the settings that can change at run time, and adds the devices that were opened for it.

        `changed`: names of changed keys, for the event log. Raises ConfigError, or MisuseError for an unknown
        eviction policy, and applies nothing.
        """
        self.check(config)
        self._core.handle(ev.SetPolicy(config.policy.eviction))
        for event in self._resizing.events(config):
            self._core.handle(event)
        self._in_use.value = config
        self._devices.change(config, opened)
        self._devices.set_admission(config)
        limits = config.limits
        self._core.handle(
            ev.Configure(
                write_policy=config.nvme.write_policy,
                prefetch_blocks=config.nvme.prefetch_blocks,
                leases_per_client=limits.leases_per_connection,
                namespaces=limits.namespaces,
                namespaces_per_tenant=limits.namespaces_per_tenant,
            )
        )
        self._scrubber.set_rate(config.scrub.rate)
        self._quotas.apply(config)
        if self._network is not None:
            self._network.reconfigure(config.network)
        for listener in self.listeners:
            listener(config)
        logging.getLogger().setLevel(config.daemon.log_level.upper())
        self._event_log.add(EntryKind.RELOADED, detail=", ".join(changed) or "nothing has changed")
