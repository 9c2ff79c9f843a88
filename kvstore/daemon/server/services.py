"""What requests use of the daemon: one port for each room. The composition fills them in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.config import Config
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.insight.hit_counters import HitCounters
from kvstore.core.view import View
from kvstore.daemon.kv_events.tracker import Routing
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator.latency import Calls
from kvstore.daemon.operator.trace_recorder import TraceRecorder
from kvstore.daemon.server.block_waits import Waits
from kvstore.daemon.tenancy.auth import Principal
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.daemon.tenancy.tenancy import Tenancy
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier


class Asker(Protocol):
    """The sender of a request."""

    def answer(
        self, request: int, action: ac.Grant | ac.Reserved | ac.Answer | ac.Explained | ac.Deny
    ) -> None:
        """Takes the answer to request number `request`. Called at most once for each request."""


class Core(Protocol):
    """Runs events through the core."""

    def now(self) -> float:
        """Returns the time of the event loop in seconds."""

    def handle(self, event: ev.Event) -> None:
        """Runs an event that has no answer."""

    def ask(self, asker: Asker, request: int, event: Any) -> None:
        """Runs an event. Its answer goes to `asker`, at once or later."""

    def invalidate(self, asker: Asker, request: int, space: NamespaceEntry, keys: Keys) -> None:
        """Turns blocks into misses. The answer comes when this is durable."""

    def leave(self, asker: Asker) -> None:
        """Drops the answers that `asker` still waits for."""


class Memory(Protocol):
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

    def run(self, asker: Any, request: int, call: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the answer; None if `asker` gets it later. Raises MisuseError."""


@dataclass(slots=True)
class Services:
    """What the requests of all connections share.

    `clock` returns Unix time in seconds: tokens expire by it. `stopwatch` returns seconds and goes on while a
    request runs, as the event loop's time may not. `config` is replaced at a reload. `state` returns what a
    peer may see of the core and its tiers, `status` that and the server's own.
    """

    config: Config
    instance: bytes
    loop: asyncio.AbstractEventLoop
    core: Core
    view: View
    memory: Memory
    tenancy: Tenancy
    network: NetworkTier | None
    kv_events: Routing
    waits: Waits
    hits: HitCounters
    recorder: TraceRecorder
    clock: Callable[[], float]
    stopwatch: Callable[[], float]
    latency: Calls
    state: Callable[[Principal], dict[str, Any]]
    status: Callable[[Principal], dict[str, Any]] = field(init=False)
    commands: OperatorCommands = field(init=False)
