"""Builds the objects of one daemon and passes each the objects that it uses. Nothing is decided here."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstore.config import Config
from kvstore.core import actions as ac
from kvstore.core.insight.hit_counters import HitCounters
from kvstore.core.placement import Limits, Placement
from kvstore.core.queues.device_queue import TierSpec
from kvstore.daemon.kv_events.tracker import Tracker
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator import devices as nvme_devices
from kvstore.daemon.operator import gpus
from kvstore.daemon.operator.blocks import BlockCommands
from kvstore.daemon.operator.command import Commands
from kvstore.daemon.operator.device_commands import DeviceCommands
from kvstore.daemon.operator.devices import Devices
from kvstore.daemon.operator.event_log import EventLog
from kvstore.daemon.operator.latency import Calls, CopyLatency, Lag
from kvstore.daemon.operator.metrics import Metrics
from kvstore.daemon.operator.namespaces import NamespaceCommands
from kvstore.daemon.operator.reload import ConfigInUse, Reload
from kvstore.daemon.operator.resizing import Resizing
from kvstore.daemon.operator.settings import LiveConfig
from kvstore.daemon.operator.status import Status
from kvstore.daemon.operator.tenants import TenantCommands
from kvstore.daemon.operator.trace_recorder import TraceRecorder
from kvstore.daemon.requests.block_waits import Waits
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.policy_state import PolicyStateFile
from kvstore.daemon.runtime.problems import Problems
from kvstore.daemon.runtime.scrubber import Scrubber
from kvstore.daemon.runtime.tier_actions import TierActions
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.daemon.server.server import Server
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.deletion import Deletion, delete_here_only
from kvstore.daemon.tenancy.namespaces import Domains, Namespaces
from kvstore.daemon.tenancy.presence import PresenceMemory
from kvstore.daemon.tenancy.quotas import TenantQuotas
from kvstore.daemon.tenancy.recovery import Recovery
from kvstore.daemon.tracing.tracing import Tracing
from kvstore.tiers.base import Owner, StorageTier
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.network.base import Backend
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import Tier

_MIN_BLOCK_BYTES = 16 << 10
_MIN_ROWS, _MAX_ROWS = 1 << 16, 1 << 25


@dataclass(frozen=True)
class Storage:
    """The opened tiers: NVMe devices and GPU pools by name.

    `others` has tiers of other kinds, each with the core's description of it. `problems`: why configured
    devices are left out.
    """

    dram: DramTier
    devices: dict[str, NvmeTier] = field(default_factory=dict)
    pools: Mapping[str, HbmTier] = field(default_factory=dict)
    network: Backend | None = None
    problems: Sequence[str] = ()
    others: Sequence[tuple[TierSpec, StorageTier]] = ()


class Daemon:
    """One daemon over opened tiers, not started yet. Its attributes are the objects that are passed to rooms.

    Read the constructor from top to bottom: an object is built after the objects that it uses. Calls from an
    object into one that is built later are set where that one is built.
    """

    commands: Commands
    """The operators' commands. Set by `make_server`."""

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        storage: Storage,
        *,
        random_bits: Callable[[int], int] = secrets.randbits,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`random_bits` returns a number of that many random bits, `clock` Unix time in s.

        `stopwatch` returns s and advances while a request runs, unlike the event loop's time.
        """
        self.clock, self.stopwatch = clock, stopwatch
        self.config = in_use = ConfigInUse(config)
        self.instance = random_bits(64).to_bytes(8, "little")
        self.placement = _placement(config, storage, random_bits(64))

        # The core, names and reports
        self.core = core = Executor(loop, self.placement)
        self.view = view = core.view
        self.authenticator = authenticator = Authenticator(config)
        self.namespaces = names = Namespaces()
        self.event_log = log = EventLog(core, names, authenticator, self.instance, clock)
        self.problems = problems = Problems()
        domains = Domains()
        for problem in storage.problems:
            problems.report(problem)

        # Tiers
        self.tiers = tiers = TierSet(view, storage.dram, storage.devices, storage.pools, storage.others)
        self.copies = CopyLatency()
        owner_of = partial(_owner, domains, authenticator)
        self.tier_actions = TierActions(core, tiers, names, log, problems, owner_of, clock, self.copies.add)
        self.durability = durable = Durability(core, tiers, random_bits)
        self.scrubber = Scrubber(core)

        # Tenants
        self.data_keys = keys = DataKeys(core, tiers, in_use)
        self.quotas = quotas = TenantQuotas(core, authenticator, names, domains, keys, in_use)
        self.network: NetworkTier | None = None
        core.on(ac.OfferBlocks, lambda offer: None)
        if storage.network is not None:
            self.network = NetworkTier(
                storage.network,
                config.network,
                core=core,
                dram=storage.dram,
                namespaces=names,
                encrypts=lambda tenant: keys.are_wanted_by(authenticator.name(tenant)),
                event_log=log,
                random_bits=random_bits,
                clock=clock,
            )
            quotas.listeners.append(self.network.set_tenant)
            core.on(ac.OfferBlocks, self.network.uploads.offer)
        delete = self.network.deletion.delete if self.network is not None else delete_here_only
        self.policy_state = PolicyStateFile(core, in_use, authenticator.name, quotas.known, clock)
        tiers.on_retired = self.policy_state.discard_in
        shared = self.network is not None
        self.catalog = catalog = NamespaceCatalog(
            core, durable, tiers, names, domains, authenticator, keys, log, in_use, shared
        )
        core.on(ac.NamespaceClosed, catalog.closed)
        self.presence = PresenceMemory(core, random_bits)
        self.recovery = Recovery(core, tiers, durable, catalog, names, domains, quotas, clock)
        forget = self.policy_state.discard
        self.deletion = Deletion(
            durable, catalog, names, authenticator, quotas, keys, log, in_use, delete, forget
        )
        if self.network is not None:
            self.network.epochs.delete_here = self.deletion.forget_here
            self.network.epochs.delete_keys_here = self.deletion.invalidate_here
            self.network.epochs.record = catalog.record
            catalog.on_opened = self.network.epochs.ask

        # Listeners of stored blocks
        self.waits = Waits(core, names, self.network)
        core.on(ac.BlocksArrived, self.waits.blocks_arrived)
        core.look_at_devices = self._look_at_devices
        catalog.on_closed = self._closed
        self.kv_events = Tracker(core, names, authenticator, problems, config.events)
        core.on(ac.CopyReport, self.kv_events.copies_changed)
        catalog.on_freed = self.kv_events.namespaces_freed

        # Operators
        self.tracing = Tracing(config.tracing, problems, self.instance, clock, stopwatch)
        self.devices = devices = Devices(core, tiers, durable, catalog, quotas, log, in_use)
        core.on(ac.DeviceAdded, devices.added)
        resizing = Resizing(view, tiers, devices, in_use)
        self.reload = Reload(core, quotas, devices, resizing, self.scrubber, log, self.network, in_use)
        self.tenants = TenantCommands(view, authenticator, self.deletion, in_use)
        self.status = Status(
            core,
            tiers,
            names,
            self.tenants,
            problems,
            self.instance,
            self.network,
            self.kv_events,
            self.tracing,
        )
        self.hits, self.calls, self.lag = HitCounters(), Calls(), Lag(loop, stopwatch)
        self.recorder = TraceRecorder(core.now, lambda: view.limits.batch_keys)

    def _look_at_devices(self) -> None:
        if self.event_log.look_at_devices():
            self.waits.recheck()

    def _closed(self, number: int, but: int) -> None:
        self.waits.end(number, but)
        self.presence.retire(number)

    def make_server(self, settings: LiveConfig) -> Server:
        """Returns the server of the started daemon, and lets `settings` change the daemon."""
        core, names, tenants = self.core, self.namespaces, self.authenticator
        self.commands = Commands(
            core.loop,
            self.status,
            Metrics(core, tenants, self.hits, self.calls, self.copies, self.lag),
            self.event_log,
            self.tenants,
            NamespaceCommands(self.view, names, tenants, self.catalog, self.deletion),
            BlockCommands(core, names, self.deletion),
            settings,
            DeviceCommands(core, names, tenants),
        )
        server = Server(self)
        self.status.server = server.status
        self.reload.listeners.append(lambda config: server.reconfigure())
        self.reload.listeners.append(lambda config: self.presence.retire_all())
        settings.applier = self.reload
        return server


def _owner(domains: Domains, authenticator: Authenticator, domain: int) -> Owner:
    """Returns the owner of a domain's extents."""
    tenant, tag = domains.owner(domain)
    return Owner(authenticator.name(tenant), tag)


def _placement(config: Config, storage: Storage, seed: int) -> Placement:
    specs = [TierSpec(Tier.DRAM, storage.dram.limit_bytes, storage.dram.extent_bytes, table=True)]
    specs += [nvme_devices.spec(name, device, config) for name, device in storage.devices.items()]
    specs += [gpus.spec(name, pool) for name, pool in storage.pools.items()]
    specs += [spec for spec, _ in storage.others]
    total = sum(spec.limit_bytes for spec in specs)
    limits = config.limits
    return Placement(
        specs,
        max_blocks=min(max(total // _MIN_BLOCK_BYTES, _MIN_ROWS), _MAX_ROWS),
        seed=seed,
        policy=config.policy.eviction,
        write_policy=config.nvme.write_policy,
        prefetch_blocks=config.nvme.prefetch_blocks,
        limits=Limits(
            batch_keys=limits.batch_keys,
            leases_per_client=limits.leases_per_connection,
            namespaces=limits.namespaces,
            namespaces_per_tenant=limits.namespaces_per_tenant,
        ),
    )
