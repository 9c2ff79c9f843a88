"""Starts and stops a daemon's tiers and services in order.

A device that hangs must not keep the process: tiers are closed on daemon threads, within a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.core import events as ev
from kvstore.core.reuse.reuse import ReuseState
from kvstore.daemon.composition import Daemon
from kvstore.daemon.operator import gpus
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.tier_set import DRAM
from kvstore.errors import TierError

_log = logging.getLogger(__name__)

_CLOSE_WITHIN_S = 5.0
_TRACES_WITHIN_S = 1.0
_POLL_S = 0.005


async def start(daemon: Daemon) -> None:
    """Recovers all tiers, starts to make extents, and returns when the first DRAM extent can be used.

    Raises ConfigError if the tiers are too small for tenants' floors, and TierError if there is no DRAM.
    """
    config, core, tiers, problems = daemon.config(), daemon.core, daemon.tiers, daemon.problems
    daemon.reload.check(config)
    daemon.quotas.apply(config)
    for device in tiers.devices.values():
        for problem in device.journal.problems:
            problems.report(problem)
    if tiers.devices:
        daemon.policy_state.restore()
        daemon.recovery.restore_nvme()
    daemon.recovery.restore_dram(daemon.tier_actions.extent_ready)
    _start_tiers(daemon)
    await daemon.tier_actions.dram_ready.wait()
    if not core.view.tiers[DRAM].has_extents():
        raise TierError(problems[-1])
    daemon.scrubber.set_rate(config.scrub.rate)
    core.look_at_devices()
    if daemon.network is not None:
        daemon.network.start()
    daemon.kv_events.start()
    daemon.tracing.start()
    daemon.event_log.add(EntryKind.STARTED, detail=f"pid {os.getpid()}")


def _start_tiers(daemon: Daemon) -> None:
    core, tiers, reporters = daemon.core, daemon.tiers, daemon.tier_actions.reporters
    for tier, device in enumerate(tiers.devices.values(), DRAM + 1):
        device.start(*reporters(tier))
    for tier, pool in enumerate(tiers.pools.values(), DRAM + 1 + len(tiers.devices)):
        pool.start(*reporters(tier), partial(core.post, gpus.lost, core, daemon.problems, tier))
        for device in tiers.devices.values():
            pool.watch(device.engine)
    for tier, other in enumerate(tiers.others.values(), DRAM + 1 + len(tiers.devices) + len(tiers.pools)):
        other.start(*reporters(tier))
    tiers.dram.start(*reporters(DRAM))


async def stop(daemon: Daemon, timeout_s: float) -> None:
    """Writes blocks that only memory holds to lower tiers, then closes the tiers.

    Copies that take longer than `timeout_s` are abandoned.
    """
    core, tiers = daemon.core, daemon.tiers
    ends = core.now() + timeout_s
    daemon.scrubber.stop()
    core.handle(ev.Flush())
    while core.view.unfinished_copies and core.now() < ends:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    if left := core.view.unfinished_copies:
        _log.warning("stopped with %d copies unfinished after %.1f s", left, timeout_s)
    if daemon.network is not None:
        await daemon.network.close(_CLOSE_WITHIN_S)
    daemon.kv_events.close()
    traces, traced_by = daemon.tracing.close(), core.now() + _TRACES_WITHIN_S
    # A late result, perhaps from a device that has hung, must start nothing.
    core.close()
    daemon.presence.close()
    state = core.view.reuse_state(core.now())
    # On threads, so that one device that hangs does not keep the others from closing.
    closing = [_on_thread(partial(_close, daemon, name, state)) for name in tiers.devices]
    ends += _CLOSE_WITHIN_S
    await _wait(daemon, closing, ends)
    if any(thread.is_alive() for thread in closing):
        _log.error("the NVMe tier could not be closed: a device does not answer")
        return
    dram = _on_thread(tiers.dram.close)
    pools = [_on_thread(tier.close) for tier in (*tiers.pools.values(), *tiers.others.values())]
    await _wait(daemon, [dram], float("inf"))
    await _wait(daemon, pools, ends)
    await _wait(daemon, traces, traced_by)


async def _wait(daemon: Daemon, threads: Sequence[threading.Thread], ends: float) -> None:
    while any(thread.is_alive() for thread in threads) and daemon.core.now() < ends:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def _close(daemon: Daemon, name: str, state: ReuseState) -> None:
    if name == daemon.policy_state.device:
        daemon.policy_state.save(state)
    elif (folder := daemon.config().nvme.paths.get(name)) is not None:
        daemon.policy_state.discard_in(folder)  # an older one, from before another device was added
    daemon.tiers.devices[name].close()


def _on_thread(close: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=close, name="kvstore-close", daemon=True)
    thread.start()
    return thread
