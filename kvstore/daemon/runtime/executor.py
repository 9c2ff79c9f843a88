"""The shell around the core: takes events in, runs the actions that come back, and brings results home.

Everything here runs on the event loop's thread, but for the tiers' callbacks, which only schedule. No policy:
an `if` about who goes where belongs into the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from kvstore.config import FIRST_DEVICE, Config
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.blocks.topology import TierState
from kvstore.core.capacity.extents import Extents
from kvstore.core.capacity.quotas import UNLIMITED
from kvstore.core.insight.hit_counters import HitCounters
from kvstore.core.placement import Limits, Placement
from kvstore.core.reuse.reuse import ReuseState
from kvstore.core.transfers.devices import FENCED, TierSpec
from kvstore.daemon.kv_events.tracker import Routing
from kvstore.daemon.network.tier import NetworkTier
from kvstore.daemon.operator import devices, gpus, resizing
from kvstore.daemon.operator.event_log import EventLog
from kvstore.daemon.operator.trace_recorder import TraceRecorder
from kvstore.daemon.requests.block_waits import Waits
from kvstore.daemon.runtime import policy_state
from kvstore.daemon.runtime.recovery import restore_dram, restore_nvme
from kvstore.daemon.runtime.scrubber import Scrubber
from kvstore.daemon.runtime.tier_actions import TierActions
from kvstore.daemon.tenancy.auth import Principal
from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.daemon.tenancy.tenancy import Tenancy
from kvstore.errors import TierError
from kvstore.tiers.base import Owner, StorageTier
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.network.base import Backend
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import HBM_EXTENTS, Tier

_log = logging.getLogger(__name__)

DRAM = 0
_MIN_BLOCK_BYTES = 16 << 10
_MIN_ROWS, _MAX_ROWS = 1 << 16, 1 << 25
_CLOSE_WITHIN_S = 5.0
_REMOVE_AGAIN_S = 1.0


class Asker(Protocol):
    """Whoever sent a request."""

    def answer(self, request: int, action: ac.Grant | ac.Reserved | ac.Answer | ac.Deny) -> None:
        """Takes the one answer to its request of that number."""


class Shell:
    """The core, its tiers and the namespaces of one daemon."""

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        dram: DramTier,
        nvme: dict[str, NvmeTier],
        problems: Sequence[str] = (),
        hbm: Mapping[str, HbmTier] = MappingProxyType({}),
        network: Backend | None = None,
        dice: Callable[[int], int] = secrets.randbits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes over the tiers; of `nvme` its devices by name, the first one first, and `problems` with them.

        `hbm`: pools of GPU memory by name. `network`: what other nodes share with this one. `dice` gives a
        number of so many random bits, `clock` Unix time in s.
        """
        self.clock = clock
        self.config = config
        self.loop = loop
        self.instance = dice(64).to_bytes(8, "little")
        self.started = loop.time()
        self.problems: list[str] = list(problems)
        self.now = loop.time
        self.dram = dram
        self.devices = nvme
        self.pools = dict(hbm)
        self.generation = 0
        self._new_generation = True
        self.placement = self._make_placement(dice(64))
        self.chronicle = EventLog(self)
        self.tenancy = Tenancy(config, self)
        self.namespaces = self.tenancy.namespaces
        self.remote = self._make_network(network)
        self.tiers: Mapping[str, StorageTier] = ChainMap[str, Any](
            {Tier.DRAM.name.lower(): dram}, self.devices, self.pools
        )
        self.tier_actions = TierActions(self, self.tier_at, self.namespaces, self._owner_of, clock)
        self.recorder = TraceRecorder(self.now, lambda: self.placement.view.limits.batch_keys)
        self.routing = Routing(self)
        self.waits = Waits(loop, self.namespaces, self.remote, self.placement.view.stored, self.handle)
        self.hits = HitCounters()
        self._askers: dict[int, tuple[Asker, int]] = {}
        self._last_request = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None
        self._ready = asyncio.Event()
        self._closed = False
        self._scrubber = Scrubber(loop, self.placement.residency.tiers, self.handle)
        self._run_by_type: dict[type, Callable[[Any], None]] = {
            **self.tier_actions.run_by_type,
            ac.WriteHeader: self._stamp,
            ac.OfferBlocks: self._offer,
            ac.CopyReport: self.routing.moved,
            ac.BlocksArrived: self.waits.came,
            ac.DeviceAdded: lambda action: devices.joined(self, action.tier),
            ac.DeviceRemoved: self._left,
            ac.NamespaceClosed: lambda action: self.tenancy.closed(action.namespace),
        }

    def _make_placement(self, seed: int) -> Placement:
        specs = [TierSpec(Tier.DRAM, self.dram.limit_bytes, self.dram.extent_bytes, table=True)]
        specs += [devices.spec(name, device, self.config) for name, device in self.devices.items()]
        specs += [gpus.spec(name, pool) for name, pool in self.pools.items()]
        total = sum(spec.limit_bytes for spec in specs)
        return Placement(
            specs,
            max_blocks=min(max(total // _MIN_BLOCK_BYTES, _MIN_ROWS), _MAX_ROWS),
            seed=seed,
            policy=self.config.policy.eviction,
            write_policy=self.config.nvme.write_policy,
            prefetch_blocks=self.config.nvme.prefetch_blocks,
            limits=Limits(
                batch_keys=self.config.limits.batch_keys,
                leases_per_client=self.config.limits.leases_per_connection,
                namespaces=self.config.limits.namespaces,
                namespaces_per_tenant=self.config.limits.namespaces_per_tenant,
            ),
        )

    def _make_network(self, backend: Backend | None) -> NetworkTier | None:
        if backend is None:
            return None
        return NetworkTier(
            backend,
            self.config.network,
            loop=self.loop,
            post=self.soon,
            core=self,
            blocks=self.placement.view,
            dram=self.dram,
            namespaces=self.namespaces,
            encrypts=self.tenancy.encrypts,
            event_log=self.chronicle,
        )

    # -- start and stop

    async def start(self) -> None:
        """Takes in what the tiers hold, starts making extents, returns when the first one can be used.

        Raises ConfigError if the tiers cannot keep what the configuration promises tenants.
        """
        self.tenancy.check(self.config)
        self.tenancy.apply(self.config)
        for device in self.devices.values():
            self.problems += device.problems
        for problem in self.problems:
            _log.error("%s", problem)
        if self.devices:
            policy_state.restore(self)
            restore_nvme(self)
        restore_dram(self, self.dram)
        for tier, device in enumerate(self.devices.values(), DRAM + 1):
            device.start(*self.reporters(tier))
        for tier, pool in enumerate(self.pools.values(), DRAM + 1 + len(self.devices)):
            pool.start(*self.reporters(tier), partial(self.soon, gpus.lost, self, tier))
            for device in self.devices.values():
                pool.watch(device)
        self.dram.start(*self.reporters(DRAM))
        await self._ready.wait()
        if not self.placement.residency.tiers[DRAM].extents.ready:
            raise TierError(self.problems[-1])
        self._scrubber.set_rate(self.config.scrub.rate)
        self.chronicle.look(self.placement.residency.tiers)
        if self.remote is not None:
            self.remote.start()
        self.routing.start()
        self.chronicle.add("started", detail=f"pid {os.getpid()}")

    def reporters(self, tier: int) -> tuple[Callable[[int], None], Callable[[TierError | None], None]]:
        """Callbacks for a tier's own thread."""

        def ready(extent: int) -> None:
            self.soon(self._extent_ready, tier, extent)

        def ended(error: TierError | None) -> None:
            self.soon(self._extents_end, tier, error)

        return ready, ended

    def soon(self, call: Callable[..., None], *args: Any) -> None:
        """Runs something on the loop's thread; a result that comes after the end is of no use to anyone."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *args)

    def _extent_ready(self, tier: int, extent: int) -> None:
        self.extent_ready(ev.ExtentReady(tier, extent))

    def extent_ready(self, event: ev.ExtentReady) -> None:
        """An extent can be used."""
        self.handle(event)
        if event.replaces >= 0:
            detail = f"extent {event.replaces} is extent {event.extent} now"
            self.chronicle.add("renewed", tier=self._name_of(event.tier), detail=detail)
        if event.tier == DRAM:
            self._ready.set()

    def _extents_end(self, tier: int, error: TierError | None) -> None:
        if error is not None:
            _log.error("%s", error)
            self.problems.append(str(error))
        self.handle(ev.ExtentsEnd(tier))
        if tier == DRAM:
            self._ready.set()

    async def stop(self, timeout_s: float) -> None:
        """Writes down what only DRAM holds and closes the tiers; what takes longer is left undone."""
        ends = self.now() + timeout_s
        self._scrubber.stop()
        self.handle(ev.Flush())
        copies, transfers = self.placement.copies, self.placement.transfers
        while (copies.under_way or transfers.backlog) and self.now() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        left = len(copies.under_way) + sum(map(len, transfers.backlog.values()))
        if left:
            _log.warning("stopped with %d copies unfinished after %.1f s", left, timeout_s)
        if self.remote is not None:
            await self.remote.close(_CLOSE_WITHIN_S)
        if self._timer is not None:
            self._timer.cancel()
        self.routing.close()
        # What still arrives, from a device that has hung perhaps, must start nothing more.
        self._closed = True
        # A device that hangs must not keep the process: its threads end with that.
        known = policy_state.collect(self)
        # One does not keep the others from writing down what they know.
        closing = [self._closing(partial(self._close, name, known)) for name in self.devices]
        while any(each.is_alive() for each in closing) and self.now() < ends + _CLOSE_WITHIN_S:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if any(each.is_alive() for each in closing):
            _log.error("the NVMe tier could not be closed: a device does not answer")
            return
        last = [self._closing(self.dram.close), *(self._closing(pool.close) for pool in self.pools.values())]
        # A GPU that hangs must not keep the process either.
        while last[0].is_alive() or (any(t.is_alive() for t in last) and self.now() < ends + _CLOSE_WITHIN_S):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def _closing(self, close: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=close, name="kvstore-close", daemon=True)
        thread.start()
        return thread

    def _close(self, name: str, known: ReuseState) -> None:
        if name == FIRST_DEVICE:
            policy_state.save(self, known)
        self.devices[name].close()

    def check(self, config: Config) -> None:
        """Raises ConfigError for what this daemon could not keep."""
        devices.check(self, config)
        resizing.check(self, config)
        self.tenancy.check(config)

    def reconfigure(self, config: Config, opened: Mapping[str, NvmeTier] = MappingProxyType({})) -> None:
        """Takes over those settings that can change at run time, and devices that were opened for it.

        Raises ConfigError, or MisuseError if there is no such eviction policy, and takes over none.
        """
        self.check(config)
        self.handle(ev.SetPolicy(config.policy.eviction))
        for event in resizing.wanted(self, config):
            self.handle(event)
        self.config = config
        devices.change(self, config, opened)
        limits = config.limits
        for tier, state in enumerate(self.placement.residency.tiers):
            if state.spec.tier == Tier.NVME and not state.leaving:
                self.handle(ev.SetAdmission(tier, devices.rule(config, state.spec.name)))
        self.handle(
            ev.Configure(
                write_policy=config.nvme.write_policy,
                prefetch_blocks=config.nvme.prefetch_blocks,
                leases_per_client=limits.leases_per_connection,
                namespaces=limits.namespaces,
                namespaces_per_tenant=limits.namespaces_per_tenant,
            )
        )
        self._scrubber.set_rate(config.scrub.rate)
        self.tenancy.apply(config)
        if self.remote is not None:
            self.remote.reconfigure(config.network)

    # -- requests

    def ask(self, asker: Asker, request: int, event: Any) -> None:
        """Sends a client's request to the core; its answer goes to `asker.answer`."""
        self._last_request += 1
        event.request = self._last_request
        self._askers[self._last_request] = (asker, request)
        self.handle(event)

    def leave(self, asker: Asker) -> None:
        """Answers to this asker are no longer wanted."""
        for request in [r for r, (who, _) in self._askers.items() if who is asker]:
            del self._askers[request]
        if self.remote is not None:
            self.remote.tasks.cancel(asker)

    def ask_durably(self, asker: Asker, request: int, event: Any) -> None:
        """Like `ask`, but what the answer says survives a crash from then on."""
        if self._new_generation:
            self._new_generation = False
            self.generation += 1
            for device in self.devices.values():
                device.put_generation(self.generation)
        self.ask(_Durably(self, asker) if self.devices else asker, request, event)

    def invalidate(self, asker: Asker, request: int, space: NamespaceEntry, keys: Keys) -> None:
        """These blocks are misses from now on; answered when that is so after a crash, and on the network."""
        event = ev.Invalidate(0, space.number, keys)
        if self.remote is None:
            self.ask_durably(asker, request, event)
            return
        names = [keys[i] for i in range(keys.n)]
        self.remote.deletion.delete(
            asker, request, [space], names, lambda then: self.ask_durably(then, request, event)
        )

    def devices_changed(self) -> None:
        """One has come, or gone: what is forgotten from now on, it may not hear of."""
        self._new_generation = True

    def call(self, event: ev.OpenNamespace) -> ac.Answer | ac.Deny:
        """Sends an event to the core that is answered at once."""
        actions = self.placement.handle(event, self.now())
        [answer] = [a for a in actions if isinstance(a, ac.Answer | ac.Deny) and a.request == event.request]
        self._run([action for action in actions if action is not answer])
        return answer

    # -- events and actions

    def handle(self, event: ev.Event) -> None:
        """One event through the core, and everything that follows from it. Nothing does after `stop`."""
        if self._closed:
            return
        self._run(self.placement.handle(event, self.now()))

    def _run(self, actions: Iterable[ac.Action]) -> None:
        for action in actions:
            try:
                run = self._run_by_type.get(type(action), self._answer)
                run(action)
            except Exception as error:
                self._failed(action, error)
        self._set_timer()

    def _failed(self, action: ac.Action, error: Exception) -> None:
        """An action could not be run; the others of its batch still are.

        Where the core and a tier would disagree from now on, a device is fenced, or the daemon crashes. That
        is safe: what a crash leaves is proved by checksums, and what was not answered was not promised.
        """
        what = f"{type(action).__name__} could not be run"
        reason = error if isinstance(error, TierError) else TierError(f"{what}: {error!r}")
        if not isinstance(error, TierError):
            _log.error("%s", what, exc_info=error)
        if isinstance(action, ac.RenewExtent):
            self.soon(self.tier_actions.not_renewed, action.tier, action.extent, reason)
        elif isinstance(action, ac.RemoveExtent):
            self.soon(self.tier_actions.removed, action, reason)
        elif isinstance(action, ac.MakeExtents):
            self.soon(self._extents_end, action.tier, reason)
        elif isinstance(action, ac.Drop | ac.FormatExtent | ac.WriteHeader):
            device = action.tier != DRAM and isinstance(error, TierError)
            (self._fence if device else self._crash)(action.tier, reason)

    def _fence(self, tier: int, reason: TierError) -> None:
        """A device does not keep what it is told to: nothing is read from it or written to it any more."""
        problem = f"{self._name_of(tier)} is fenced: {reason}"
        _log.error("%s", problem)
        self.problems.append(problem)
        self.soon(self.handle, ev.SetDevice(tier, FENCED))

    def _crash(self, tier: int, reason: TierError) -> None:
        _log.critical("the core and %s disagree: %s", self._name_of(tier), reason)
        logging.shutdown()
        os.abort()

    def _answer(self, action: Any) -> None:
        asked = self._askers.pop(action.request, None)
        if asked is not None:
            asker, request = asked
            try:
                asker.answer(request, action)
            except Exception as error:
                _log.error("a request could not be answered", exc_info=error)
                asker.answer(request, ac.Deny(request, "internal error", "see the daemon's log"))
        elif isinstance(action, ac.Grant | ac.Reserved) and action.lease:
            _log.debug("an answer came after its asker had left")

    def _set_timer(self) -> None:
        wake = self.placement.next_wakeup()
        if wake == self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = wake
        self._timer = None if wake is None else self.loop.call_at(wake, self._tick)

    def _look_at_devices(self) -> None:
        if self.chronicle.look(self.placement.residency.tiers):
            self.waits.look()

    def _tick(self) -> None:
        self._wakes_at = None
        self.handle(ev.Tick())
        self._look_at_devices()

    def _stamp(self, stamp: ac.WriteHeader) -> None:
        spaces, ends = self.namespaces, None
        if stamp.lives is not None:
            ends = np.where(stamp.lives < np.inf, self.clock() + stamp.lives, 0.0)
        self.dram.stamp(
            stamp.identity,
            stamp.parents,
            stamp.where,
            stamp.version,
            spaces.fingerprints,
            spaces.lengths,
            ends,
        )

    def _offer(self, offer: ac.OfferBlocks) -> None:
        if self.remote is not None:
            self.remote.uploads.offer(offer)

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Runs a call on the loop after `delay_s`, unless the daemon has stopped by then."""

        def run() -> None:
            if not self._closed:
                call(*args)

        self.loop.call_at(self.now() + delay_s, run)

    def copied(self, event: ev.CopyDone) -> None:
        """Sends the event to the core and reports devices that changed their state."""
        self.handle(event)
        self._look_at_devices()

    def problem(self, error: TierError) -> None:
        """Logs an error and shows it among the daemon's problems, once."""
        if str(error) not in self.problems:
            _log.error("%s", error)
            self.problems.append(str(error))

    def note(self, kind: str, tier: int, detail: str) -> None:
        """Adds an entry about a tier to the event log."""
        self.chronicle.add(kind, tier=self._name_of(tier), detail=detail)

    def _owner_of(self, domain: int) -> Owner:
        tenant, tag = self.tenancy.domains.owner(domain)
        return Owner(self.tenancy.registry.name(tenant), tag)

    def _left(self, action: ac.DeviceRemoved) -> None:
        """Closes a removed tier on a thread: a device that hangs must not block the loop."""
        name = self._name_of(action.tier)
        tier = self.tiers[name]
        if tier.persistent:
            self.devices_changed()
        for tiers in (self.devices, self.pools):
            tiers.pop(name, None)
        threading.Thread(target=tier.close, name=f"kvstore-close-{name}", daemon=True).start()
        self.chronicle.add("left", tier=name)

    def tier_at(self, tier: int) -> StorageTier:
        """The tier of this number."""
        return self.tiers[self._name_of(tier)]

    def device_at(self, tier: int) -> NvmeTier:
        """The NVMe device of this number."""
        return self.devices[self._name_of(tier)]

    def pool_at(self, tier: int) -> HbmTier:
        """The pool of GPU memory of this number."""
        return self.pools[self._name_of(tier)]

    def pool_on(self, uuid: str) -> int:
        """The number of a GPU's pool; of DRAM if it has none."""
        if uuid:
            for tier in self.placement.residency.topology.memory[1:]:
                pool = self.pools.get(self._name_of(tier))
                if pool is not None and pool.gpu.uuid == uuid:
                    return tier
        return DRAM

    def memory_of(self, extent: int) -> int | None:
        """The number of the tier of memory that an extent is in; None if there is none."""
        if extent < HBM_EXTENTS:
            return DRAM
        return next((t for t in self.placement.residency.topology.memory[1:] if self._has(t, extent)), None)

    def _has(self, tier: int, extent: int) -> bool:
        pool = self.pools.get(self._name_of(tier))
        return pool is not None and pool.base <= extent < pool.base + HBM_EXTENTS

    def _name_of(self, tier: int) -> str:
        return self.placement.residency.tiers[tier].spec.name

    # -- status

    def status(self, who: Principal) -> dict[str, Any]:
        """What `kvstore status` shows: plain values only. Tenants see nothing of each other."""
        if not who.operator:
            return {"tenants": [self.tenant(who.name)]}
        return {**self.summary(), "tenants": [self.tenant(name) for name in self.tenancy.registry.names()]}

    def summary(self) -> dict[str, Any]:
        """The same for operators, without tenants, of which there may be thousands."""
        residency = self.placement.residency
        return {
            "pid": os.getpid(),
            "instance": self.instance.hex(),
            "uptime_s": round(self.now() - self.started, 3),
            "tiers": [self._tier(state) for state in residency.tiers if not state.gone],
            "blocks": residency.blocks.used,
            "namespaces": len(self.namespaces),
            "leases": len(self.placement.leases.leases),
            "reservations": len(self.placement.leases.reservations),
            "copies_under_way": len(self.placement.copies.under_way),
            "core_ram_bytes": residency.ram_bytes(),
            "huge_pages": self.dram.huge,
            "policy": self.placement.policy_migration.name,
            "gpus": {name: pool.gpu.uuid for name, pool in self.pools.items()},
            "network": self.remote.status() if self.remote is not None else None,
            "events": self.routing.status(),
            "nvme_io": next((device.engine_name for device in self.devices.values()), ""),
            "counters": dict(self.placement.view.counters),
            "problems": list(self.problems),
        }

    def _tier(self, state: TierState) -> dict[str, Any]:
        e, name = state.extents, state.spec.name
        return {
            "name": name,
            "limit_bytes": e.limit_bytes,
            "capacity_bytes": e.capacity_bytes,
            "used_bytes": e.used_bytes,
            "blocks": sum(len(p) for p in state.policies.values()),
            "extents": _by_size(e),
            "retired_slots": len(e.retired),
            "bandwidth_bytes_per_s": round(state.device.bandwidth(self.now())),
            "writable": state.device.takes_writes,
            "readable": state.device.readable,
            "fenced": state.device.fenced,
            "state": state.device.state,
            "scrub_passes": self.placement.view.counters[f"scrub_passes_{name}"],
        }

    def tenant(self, name: str) -> dict[str, Any]:
        """What a tenant that there is has of every tier, and may have."""
        number = self.tenancy.registry.add(name)
        configured = self.config.tenants.get(name)
        tiers = [
            {"name": state.spec.name, **holding(state, number)}
            for state in self.placement.residency.tiers
            if not state.gone
        ]
        lent = self.placement.leases.lent_by(number)
        return {
            "name": name,
            "share": configured.share if configured is not None else 1.0,
            "tiers": tiers,
            "lent_bytes": {self.tenancy.registry.name(reader): n for reader, n in lent.items()},
        }


def holding(state: TierState, tenant: int) -> dict[str, Any]:
    """What a tenant has of a tier, and may have; `limit_bytes` None: no limit of its own."""
    used, quota = state.extents.holdings.of(tenant)
    limit = None if quota.limit >= UNLIMITED else quota.limit
    return {"used_bytes": used, "floor_bytes": quota.floor, "limit_bytes": limit}


def _by_size(extents: Extents) -> dict[str, int]:
    """How many extents are cut to each slot size."""
    sizes: Counter[str] = Counter()
    for pool, members in extents.classes.items():
        sizes[f"{pool.slot_bytes} bytes a slot"] += len(members.extents)
    return dict(sizes)


class _Durably:
    """Answers when everything that led to the answer is durable, on every device."""

    def __init__(self, shell: Shell, asker: Asker) -> None:
        self._shell = shell
        self._asker = asker

    def answer(self, request: int, action: ac.Grant | ac.Reserved | ac.Answer | ac.Deny) -> None:
        """See Asker."""

        waits_for, outcome = len(self._shell.devices), action
        if not waits_for:
            self._asker.answer(request, action)

        def done(error: Exception | None) -> None:
            self._shell.soon(ended, error)

        def ended(error: Exception | None) -> None:
            nonlocal waits_for, outcome
            waits_for -= 1
            if error is not None:
                hint = "the blocks are misses now, but may come back after a restart"
                outcome = ac.Deny(request, f"it could not be recorded: {error}", hint)
            if not waits_for:
                self._asker.answer(request, outcome)

        for device in self._shell.devices.values():
            try:
                device.when_durable(done)
            except TierError as refused:
                done(refused)
