"""Starts and stops the daemon's tiers and services in order, and closes devices that were removed.

A device that hangs must not keep the process: tiers are closed on daemon threads, within a bounded time. How
recovery assigns blocks to tenants is not covered here: see `kvstore.daemon.tenancy.recovery`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvstore.config import FIRST_DEVICE
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.reuse.reuse import ReuseState
from kvstore.core.view import View
from kvstore.cuda.errors import CudaError
from kvstore.daemon.runtime.durability import Durability
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.policy_state import PolicyStateFile
from kvstore.daemon.runtime.ports import Closing, CurrentConfig, EventLog, NetworkService
from kvstore.daemon.runtime.problems import Problems
from kvstore.daemon.runtime.scrubber import Scrubber
from kvstore.daemon.runtime.tier_set import DRAM, TierSet
from kvstore.errors import TierError

_log = logging.getLogger(__name__)

_CLOSE_WITHIN_S = 5.0
_POLL_S = 0.005


class Recovery(Protocol):
    """Start-up recovery."""

    def restore_nvme(self) -> None:
        """Restores the blocks on all NVMe devices."""

    def restore_dram(self, extent_ready: Callable[[ev.ExtentReady], None], /) -> None:
        """Restores the blocks of the DRAM extents that an earlier daemon handed over."""


class Lifecycle:
    """Start and stop of one daemon."""

    def __init__(
        self,
        executor: Executor,
        view: View,
        tiers: TierSet,
        durability: Durability,
        recovery: Recovery,
        policy_state: PolicyStateFile,
        scrubber: Scrubber,
        event_log: EventLog,
        problems: Problems,
        config: CurrentConfig,
        *,
        prepare: Callable[[], None],
        network: NetworkService | None,
        kv_events: Closing,
        gpu_lost: Callable[[int, CudaError], None],
    ) -> None:
        """`prepare` checks and applies the configuration, before recovery. Raises ConfigError.

        `gpu_lost` is called on the loop with the number of a pool and the reason.
        """
        self._executor = executor
        self._view = view
        self._tiers = tiers
        self._durability = durability
        self._recovery = recovery
        self._policy_state = policy_state
        self._scrubber = scrubber
        self._event_log = event_log
        self._problems = problems
        self._config = config
        self._prepare = prepare
        self._network = network
        self._kv_events = kv_events
        self._gpu_lost = gpu_lost

    # -- start

    async def start(self) -> None:
        """Recovers all tiers, starts to make extents, and returns when the first DRAM extent can be used.

        Raises ConfigError if the tiers are too small for tenants' floors, and TierError if there is no DRAM.
        """
        tiers = self._tiers
        self._prepare()
        for device in tiers.devices.values():
            for problem in device.problems:
                self._problems.report(problem)
        if tiers.devices:
            self._policy_state.restore()
            self._recovery.restore_nvme()
        self._recovery.restore_dram(self._executor.extent_ready)
        self._start_tiers()
        await self._executor.dram_ready.wait()
        if not self._view.tiers[DRAM].has_extents():
            raise TierError(self._problems[-1])
        self._scrubber.set_rate(self._config().scrub.rate)
        self._executor.look_at_devices()
        if self._network is not None:
            self._network.start()
        self._kv_events.start()
        self._event_log.add("started", detail=f"pid {os.getpid()}")

    def _start_tiers(self) -> None:
        tiers, executor = self._tiers, self._executor
        for tier, device in enumerate(tiers.devices.values(), DRAM + 1):
            device.start(*executor.reporters(tier))
        for tier, pool in enumerate(tiers.pools.values(), DRAM + 1 + len(tiers.devices)):
            pool.start(*executor.reporters(tier), partial(executor.post, self._gpu_lost, tier))
            for device in tiers.devices.values():
                pool.watch(device)
        tiers.dram.start(*executor.reporters(DRAM))

    # -- run time

    def device_removed(self, action: ac.DeviceRemoved) -> None:
        """Closes an empty device on a thread."""
        name, tier = self._tiers.name_of(action.tier), self._tiers.take(action.tier)
        if tier.persistent:
            self._durability.devices_changed()
        threading.Thread(target=tier.close, name=f"kvstore-close-{name}", daemon=True).start()
        self._event_log.add("left", tier=name)

    # -- stop

    async def stop(self, timeout_s: float) -> None:
        """Writes blocks that only memory holds to lower tiers, then closes the tiers.

        Copies that take longer than `timeout_s` are abandoned.
        """
        ends = self._executor.now() + timeout_s
        self._scrubber.stop()
        self._executor.handle(ev.Flush())
        while self._view.unfinished_copies and self._executor.now() < ends:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        if left := self._view.unfinished_copies:
            _log.warning("stopped with %d copies unfinished after %.1f s", left, timeout_s)
        if self._network is not None:
            await self._network.close(_CLOSE_WITHIN_S)
        self._kv_events.close()
        # A result that comes late, perhaps from a device that has hung, must start nothing.
        self._executor.close()
        state = self._policy_state.collect()
        # On threads, so that one device that hangs does not keep the others from closing.
        closing = [_on_thread(partial(self._close, name, state)) for name in self._tiers.devices]
        ends += _CLOSE_WITHIN_S
        await self._wait(closing, ends)
        if any(thread.is_alive() for thread in closing):
            _log.error("the NVMe tier could not be closed: a device does not answer")
            return
        dram = _on_thread(self._tiers.dram.close)
        pools = [_on_thread(pool.close) for pool in self._tiers.pools.values()]
        await self._wait([dram], float("inf"))
        await self._wait(pools, ends)

    async def _wait(self, threads: Sequence[threading.Thread], ends: float) -> None:
        while any(thread.is_alive() for thread in threads) and self._executor.now() < ends:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _close(self, name: str, state: ReuseState) -> None:
        if name == FIRST_DEVICE:
            self._policy_state.save(state)
        self._tiers.devices[name].close()


def _on_thread(close: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=close, name="kvstore-close", daemon=True)
    thread.start()
    return thread
