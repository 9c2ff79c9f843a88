"""What requests use of the daemon. The composition fills it in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.core.insight.hit_counters import HitCounters
from kvstore.core.view import View
from kvstore.daemon.kv_events.tracker import Routing
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator.command import Commands
from kvstore.daemon.operator.latency import Calls, Lag
from kvstore.daemon.operator.trace_recorder import TraceRecorder
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.ports import CurrentConfig
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.daemon.server.block_waits import Waits
from kvstore.daemon.tenancy.auth import Authenticator, Principal
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.deletion import Deletion
from kvstore.daemon.tenancy.namespaces import Namespaces


@dataclass(slots=True, kw_only=True)
class Services:
    """What the requests of all connections share.

    `clock` returns Unix time in s: tokens expire by it. `stopwatch` returns s and goes on while a request
    runs. `status` returns what a principal may see of the daemon.
    """

    loop: asyncio.AbstractEventLoop
    config: CurrentConfig
    instance: bytes
    core: Executor
    view: View
    tiers: TierSet
    authenticator: Authenticator
    namespaces: Namespaces
    catalog: NamespaceCatalog
    data_keys: DataKeys
    deletion: Deletion
    network: NetworkTier | None
    kv_events: Routing
    waits: Waits
    hits: HitCounters
    recorder: TraceRecorder
    commands: Commands
    status: Callable[[Principal], dict[str, Any]]
    calls: Calls
    lag: Lag
    clock: Callable[[], float]
    stopwatch: Callable[[], float]
