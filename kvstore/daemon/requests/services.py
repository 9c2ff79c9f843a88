"""The objects of the daemon that requests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.core.insight.hit_counters import HitCounters
from kvstore.daemon.kv_events.tracker import Tracker
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator.command import Commands
from kvstore.daemon.operator.latency import Calls
from kvstore.daemon.operator.reload import ConfigInUse
from kvstore.daemon.operator.status import Status
from kvstore.daemon.operator.trace_recorder import TraceRecorder
from kvstore.daemon.requests.block_waits import Waits
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.deletion import Deletion
from kvstore.daemon.tenancy.namespaces import Namespaces
from kvstore.daemon.tenancy.presence import PresenceMemory
from kvstore.daemon.tracing.tracing import Tracing


class Services(Protocol):
    """The part of `kvstore.daemon.composition.Daemon` that the requests of all connections share.

    A Protocol, because the composition imports this room. `clock` returns Unix time in s: tokens expire by
    it. `stopwatch` returns s and advances while a request runs, unlike the event loop's time.
    """

    config: ConfigInUse
    instance: bytes
    core: Executor
    tiers: TierSet
    authenticator: Authenticator
    namespaces: Namespaces
    catalog: NamespaceCatalog
    presence: PresenceMemory
    data_keys: DataKeys
    deletion: Deletion
    network: NetworkTier | None
    kv_events: Tracker
    waits: Waits
    hits: HitCounters
    recorder: TraceRecorder
    status: Status
    commands: Commands
    calls: Calls
    tracing: Tracing
    clock: Callable[[], float]
    stopwatch: Callable[[], float]
