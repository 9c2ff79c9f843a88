"""Connects the server to the rooms that its requests use, and a reload to all that it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kvstore.config import Config
from kvstore.daemon.operator import devices, resizing
from kvstore.daemon.operator.commands import Commands
from kvstore.daemon.operator.latency import Calls, Lag
from kvstore.daemon.operator.settings import LiveConfig
from kvstore.daemon.requests.services import Services
from kvstore.daemon.runtime.executor import Shell
from kvstore.daemon.server.connection import VERSION
from kvstore.daemon.server.server import Server
from kvstore.tiers.nvme.tier import NvmeTier


def new_server(
    shell: Shell,
    settings: LiveConfig,
    clock: Callable[[], float] = time.time,
    stopwatch: Callable[[], float] = time.perf_counter,
) -> Server:
    """Returns the server of a daemon. For `clock` and `stopwatch` see Services."""
    services = Services(
        config=lambda: shell.config,
        instance=shell.instance,
        loop=shell.loop,
        core=shell,
        view=shell.placement.view,
        tiers=shell,
        authenticator=shell.tenancy.registry,
        namespaces=shell.namespaces,
        catalog=shell.tenancy,
        data_keys=shell.tenancy,
        deletion=shell.tenancy,
        network=shell.remote,
        kv_events=shell.routing,
        waits=shell.waits,
        hits=shell.hits,
        recorder=shell.recorder,
        clock=clock,
        stopwatch=stopwatch,
        status=shell.status,
        calls=Calls(),
        lag=Lag(shell.loop, stopwatch),
    )
    server = Server(services)
    services.commands = Commands(server, shell, settings, VERSION)
    settings.told_to(
        partial(consequences, shell), partial(reconfigure, shell, server), partial(devices.opener, shell)
    )
    return server


def consequences(shell: Shell, config: Config) -> list[dict[str, Any]]:
    """Returns what a configuration would cost tenants and tiers. Raises ConfigError if it can't be kept."""
    shell.check(config)
    rows = shell.tenancy.consequences(config) + resizing.consequences(shell, config)
    return rows + devices.consequences(shell, config)


def reconfigure(
    shell: Shell,
    server: Server,
    config: Config,
    changed: list[str],
    opened: Mapping[str, NvmeTier] = MappingProxyType({}),
) -> None:
    """Takes over the settings that can change at run time. Raises ConfigError, and takes over none."""
    shell.reconfigure(config, opened)
    server.reconfigure()
    logging.getLogger().setLevel(config.daemon.log_level.upper())
    shell.chronicle.add("reloaded", detail=", ".join(changed) or "nothing has changed")
