"""What requests use of the daemon: one port for each room. The composition fills them in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.config import Config
from kvstore.core.insight.hit_counters import HitCounters
from kvstore.core.view import View
from kvstore.daemon.kv_events.tracker import Routing
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator.latency import Calls, Lag
from kvstore.daemon.operator.trace_recorder import TraceRecorder
from kvstore.daemon.requests.block_waits import Waits
from kvstore.daemon.runtime import ports
from kvstore.daemon.tenancy.auth import Authenticator, Principal
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.deletion import Deletion
from kvstore.daemon.tenancy.namespaces import Namespaces
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier


class Core(ports.Core, Protocol):
    """The placement core, for requesters that may leave before their answers come."""

    def leave(self, requester: ports.Requester, /) -> None:
        """Drops the answers that a requester still waits for."""


class MemoryTiers(Protocol):
    """Memory that peers map: DRAM extents and GPU pools."""

    dram: DramTier

    def pool_on(self, uuid: str) -> int:
        """Returns the tier number of a GPU's pool; that of DRAM if the GPU has none."""

    def memory_of(self, extent: int) -> int | None:
        """Returns the tier number of an extent in memory; None if there is no such extent."""

    def pool_at(self, tier: int) -> HbmTier:
        """Returns the GPU pool of a tier number."""


class OperatorCommands(Protocol):
    """The operators' calls by name."""

    def run(
        self, requester: Any, request: int, call: str, arguments: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Returns the answer; None if `requester` gets it later. Raises MisuseError."""


@dataclass(slots=True, kw_only=True)
class Services:
    """What the requests of all connections share.

    `config` returns the configuration in use. `clock` returns Unix time in seconds: tokens expire by it.
    `stopwatch` returns seconds and goes on while a request runs, as the event loop's time may not. `status`
    returns what a principal may see of the core and its tiers, `server_status` that and the server's part.
    """

    loop: asyncio.AbstractEventLoop
    config: Callable[[], Config]
    instance: bytes
    core: Core
    view: View
    tiers: MemoryTiers
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
    status: Callable[[Principal], dict[str, Any]]
    calls: Calls
    lag: Lag
    clock: Callable[[], float]
    stopwatch: Callable[[], float]
    commands: OperatorCommands = field(init=False)
    server_status: Callable[[Principal], dict[str, Any]] = field(init=False)
