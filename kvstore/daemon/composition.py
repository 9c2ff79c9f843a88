"""Builds the objects of one daemon and gives each the ports that it uses. Nothing is decided here.

Read from top to bottom: an object is built after everything that it uses. A few objects call back into rooms
that are built later: `_connect` sets these calls.
"""

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
from kvstore.core.view import View
from kvstore.daemon.kv_events.tracker import Routing
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
from kvstore.daemon.requests.services import Services
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.lifecycle import Lifecycle
from kvstore.daemon.runtime.policy_state import PolicyStateFile
from kvstore.daemon.runtime.problems import Problems
from kvstore.daemon.runtime.scrubber import Scrubber
from kvstore.daemon.runtime.tier_actions import TierActions
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.daemon.server.server import Server
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.daemon.tenancy.catalog import NamespaceCatalog
from kvstore.daemon.tenancy.data_keys import DataKeys
from kvstore.daemon.tenancy.deletion import Deletion
from kvstore.daemon.tenancy.namespaces import Domains, Namespaces
from kvstore.daemon.tenancy.quotas import TenantQuotas
from kvstore.daemon.tenancy.recovery import Recovery
from kvstore.tiers.base import Owner
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.network.base import Backend
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import Tier

_MIN_BLOCK_BYTES = 16 << 10
_MIN_ROWS, _MAX_ROWS = 1 << 16, 1 << 25


@dataclass(frozen=True)
class Storage:
    """The opened tiers: NVMe devices by name, the first one first, and GPU pools by name.

    `problems`: why configured devices are left out.
    """

    dram: DramTier
    devices: dict[str, NvmeTier] = field(default_factory=dict)
    pools: Mapping[str, HbmTier] = field(default_factory=dict)
    network: Backend | None = None
    problems: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """The parts of one daemon that `main` runs and that the server and its commands use."""

    loop: asyncio.AbstractEventLoop
    config: ConfigInUse
    instance: bytes
    placement: Placement
    core: Executor
    tiers: TierSet
    lifecycle: Lifecycle
    reload: Reload
    authenticator: Authenticator
    quotas: TenantQuotas
    namespaces: Namespaces
    catalog: NamespaceCatalog
    data_keys: DataKeys
    deletion: Deletion
    network: NetworkTier | None
    kv_events: Routing
    waits: Waits
    devices: Devices
    event_log: EventLog
    status: Status
    tenants: TenantCommands
    recorder: TraceRecorder
    hits: HitCounters
    copies: CopyLatency

    @property
    def view(self) -> View:
        """The state of the core."""
        return self.placement.view


def compose(
    config: Config,
    loop: asyncio.AbstractEventLoop,
    storage: Storage,
    *,
    random_bits: Callable[[int], int] = secrets.randbits,
    clock: Callable[[], float] = time.time,
) -> Daemon:
    """Returns a daemon over opened tiers, ready to start.

    `random_bits` returns a number of that many random bits, `clock` Unix time in s.
    """
    now, in_use = loop.time, ConfigInUse(config)
    instance = random_bits(64).to_bytes(8, "little")
    placement = _placement(config, storage, random_bits(64))
    view = placement.view

    # Names
    authenticator = Authenticator(config)
    namespaces, domains = Namespaces(), Domains()
    event_log = EventLog(view, namespaces, authenticator, instance, now, clock)
    problems = Problems()

    # The core and its tiers
    tiers = TierSet(view, storage.dram, storage.devices, storage.pools)
    copies = CopyLatency()
    core = Executor(loop, placement, event_log, problems)
    core.use(
        TierActions(
            core,
            tiers,
            namespaces,
            partial(_owner, domains, authenticator),
            clock,
            record_latency=copies.add,
        )
    )
    durable = Durability(core, tiers.devices, core.post)
    scrubber = Scrubber(loop, core, view)

    # Tenants
    data_keys = DataKeys(tiers.devices, in_use, core.post)
    network = None
    if storage.network is not None:
        network = NetworkTier(
            storage.network,
            config.network,
            loop=loop,
            post=core.post,
            core=core,
            view=view,
            dram=storage.dram,
            namespaces=namespaces,
            encrypts=lambda tenant: data_keys.are_wanted_by(authenticator.name(tenant)),
            event_log=event_log,
        )
    quotas = TenantQuotas(core, view, authenticator, namespaces, domains, data_keys, in_use)
    policy_state = PolicyStateFile(core, view, in_use, authenticator.name, quotas.known, clock)
    catalog = NamespaceCatalog(
        core,
        durable,
        view,
        tiers,
        namespaces,
        domains,
        authenticator,
        data_keys,
        event_log,
        in_use,
        has_network=network is not None,
    )
    deletion = Deletion(
        durable,
        catalog,
        namespaces,
        authenticator,
        quotas,
        data_keys,
        event_log,
        in_use,
        network.deletion if network is not None else None,
        policy_state.discard,
    )

    # Listeners of stored blocks
    waits = Waits(loop, namespaces, network, view.stored, core.handle)
    kv_events = Routing(loop, core, core.post, view, namespaces, authenticator, problems, config.events)

    # Operators
    devices = Devices(core, view, tiers, durable, catalog, namespaces, quotas, event_log, in_use)
    resizing = Resizing(view, tiers, devices, in_use)
    reload = Reload(core, quotas, devices, resizing, scrubber, event_log, network, in_use)
    tenants = TenantCommands(view, authenticator, deletion, in_use)
    status = Status(view, tiers, namespaces, tenants, problems, instance, now, network, kv_events)

    # Start and stop
    recovery = Recovery(
        core, view, tiers, durable, catalog, namespaces, domains, authenticator, quotas, clock
    )

    def prepare() -> None:
        for problem in storage.problems:
            problems.report(problem)
        reload.check(config)
        quotas.apply(config)

    lifecycle = Lifecycle(
        core,
        view,
        tiers,
        durable,
        recovery,
        policy_state,
        scrubber,
        event_log,
        problems,
        in_use,
        prepare=prepare,
        network=network,
        kv_events=kv_events,
        gpu_lost=partial(gpus.lost, core, view, problems),
    )
    daemon = Daemon(
        loop=loop,
        config=in_use,
        instance=instance,
        placement=placement,
        core=core,
        tiers=tiers,
        lifecycle=lifecycle,
        reload=reload,
        authenticator=authenticator,
        quotas=quotas,
        namespaces=namespaces,
        catalog=catalog,
        data_keys=data_keys,
        deletion=deletion,
        network=network,
        kv_events=kv_events,
        waits=waits,
        devices=devices,
        event_log=event_log,
        status=status,
        tenants=tenants,
        recorder=TraceRecorder(now, lambda: view.limits.batch_keys),
        hits=HitCounters(),
        copies=copies,
    )
    _connect(daemon)
    return daemon


def _connect(daemon: Daemon) -> None:
    """Sets the calls from the core and from tenants into rooms that are built after these."""
    core, network, waits = daemon.core, daemon.network, daemon.waits
    core.on(ac.CopyReport, daemon.kv_events.moved)
    core.on(ac.BlocksArrived, waits.came)
    core.on(ac.NamespaceClosed, daemon.catalog.closed)
    core.on(ac.DeviceAdded, daemon.devices.added)
    core.on(ac.DeviceRemoved, daemon.lifecycle.device_removed)
    core.on(ac.OfferBlocks, network.uploads.offer if network is not None else lambda offer: None)
    daemon.catalog.on_closed = waits.end
    daemon.catalog.on_freed = daemon.kv_events.forgotten
    if network is not None:
        daemon.quotas.listeners.append(network.set_tenant)

    def look_at_devices() -> None:
        if daemon.event_log.look_at_devices():
            waits.look()

    core.look_at_devices = look_at_devices


def compose_server(
    daemon: Daemon,
    settings: LiveConfig,
    *,
    clock: Callable[[], float] = time.time,
    stopwatch: Callable[[], float] = time.perf_counter,
) -> Server:
    """Returns the server of a started daemon, and lets `settings` change the daemon.

    `clock` returns Unix time in s, by which tokens expire. `stopwatch` returns s, also while a request runs.
    """
    core, view, names, tenants = daemon.core, daemon.view, daemon.namespaces, daemon.authenticator
    calls, lag = Calls(), Lag(daemon.loop, stopwatch)
    services = Services(
        loop=daemon.loop,
        config=daemon.config,
        instance=daemon.instance,
        core=core,
        view=view,
        tiers=daemon.tiers,
        authenticator=tenants,
        namespaces=names,
        catalog=daemon.catalog,
        data_keys=daemon.data_keys,
        deletion=daemon.deletion,
        network=daemon.network,
        kv_events=daemon.kv_events,
        waits=daemon.waits,
        hits=daemon.hits,
        recorder=daemon.recorder,
        clock=clock,
        stopwatch=stopwatch,
        calls=calls,
        lag=lag,
        status=daemon.status.of,
    )
    server = Server(services)
    services.commands = Commands(
        daemon.loop,
        daemon.status,
        Metrics(core, view, tenants, daemon.hits, calls, daemon.copies, lag),
        daemon.event_log,
        daemon.tenants,
        NamespaceCommands(view, names, tenants, daemon.catalog, daemon.deletion),
        BlockCommands(core, names, daemon.deletion),
        settings,
        DeviceCommands(core, view, names, tenants),
    )
    daemon.status.server = server.summary
    daemon.reload.listeners.append(lambda config: server.reconfigure())
    settings.told_to(daemon.reload.consequences, daemon.reload.apply, daemon.devices.opener)
    return server


def _owner(domains: Domains, authenticator: Authenticator, domain: int) -> Owner:
    """Returns the owner of a domain's extents."""
    tenant, tag = domains.owner(domain)
    return Owner(authenticator.name(tenant), tag)


def _placement(config: Config, storage: Storage, seed: int) -> Placement:
    specs = [TierSpec(Tier.DRAM, storage.dram.limit_bytes, storage.dram.extent_bytes, table=True)]
    specs += [nvme_devices.spec(name, device, config) for name, device in storage.devices.items()]
    specs += [gpus.spec(name, pool) for name, pool in storage.pools.items()]
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
