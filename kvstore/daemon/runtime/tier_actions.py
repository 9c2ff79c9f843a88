"""Executes the core's actions on storage tiers: copies, probes, drops, and the life of extents.

Runs on the event loop's thread. Callbacks of tiers run on other threads and are posted to the loop. A tier's
kind matters only to the table of movers. What an action means for clients is not covered here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.queues.device_queue import FENCED
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.runtime.executor import Executor
from kvstore.daemon.runtime.movers import MOVERS, CopyJob
from kvstore.daemon.runtime.ports import EventLog, NamespaceTable
from kvstore.daemon.runtime.problems import Problems
from kvstore.daemon.runtime.tier_set import DRAM, TierSet
from kvstore.errors import TierError
from kvstore.tiers.base import Ended, Owner, Ready
from kvstore.tiers.results import Done, Results, begin_for_sure

_log = logging.getLogger(__name__)

_REMOVE_AGAIN_S = 1.0
_GIVE_UP_AFTER_S = 10.0


class TierActions:
    """Runs each action on the tier of its number."""

    def __init__(
        self,
        core: Executor,
        tiers: TierSet,
        namespaces: NamespaceTable,
        event_log: EventLog,
        problems: Problems,
        owner_of: Callable[[int], Owner],
        clock: Callable[[], float],
        record_latency: Callable[[int, int, float], None],
    ) -> None:
        """`owner_of` returns the owner of a domain's extents, `clock` Unix time in s.

        `record_latency` receives source, target and duration (s) of each copy.
        """
        self.dram_ready = asyncio.Event()
        """Set when the first DRAM extent can be used, or none will come."""
        self._core = core
        self._tiers = tiers
        self._namespaces = namespaces
        self._event_log = event_log
        self._problems = problems
        self._owner_of = owner_of
        self._clock = clock
        self._record_latency = record_latency
        self._failing_since: dict[int, float] = {}
        core.on(ac.Copy, self._copy)
        core.on(ac.Probe, self._probe)
        core.on(ac.WriteHeader, self._write_header, self._disagrees)
        core.on(ac.Drop, self._drop, self._disagrees)
        core.on(ac.FormatExtent, self._format, self._disagrees)
        core.on(ac.MakeExtents, self._make, self._not_made)
        core.on(ac.RenewExtent, self._renew, self._renewal_failed)
        core.on(ac.RemoveExtent, self._remove, self._removal_failed)
        core.on(ac.DeviceRemoved, self._close)

    # -- bytes

    def _copy(self, copy: ac.Copy) -> None:
        began_s = time.perf_counter()

        def ended(results: Results) -> None:
            took_s = time.perf_counter() - began_s
            self._core.post(self._copied, copy, took_s, ev.CopyDone(copy.transfer, results))

        begin_for_sure(len(copy.identity), partial(self._begin_copy, copy), ended)

    def _begin_copy(self, copy: ac.Copy, done: Done) -> None:
        source, target = self._tiers.at(copy.source), self._tiers.at(copy.target)
        names = self._namespaces
        job = CopyJob(copy, names.fingerprints, names.lengths, self._stored_at(copy), done)
        MOVERS[source.kind, target.kind](source, target, job)

    def _stored_at(self, copy: ac.Copy) -> npt.NDArray[np.float64] | None:
        """When each block was stored, in Unix time (s): 0 without a TTL. None if no block has one."""
        if copy.lives is None:
            return None
        namespaces = [self._namespaces.at(n) for n in copy.identity.namespace.tolist()]
        ttl_s = np.array([namespace.ttl_s if namespace is not None else 0.0 for namespace in namespaces])
        return np.where(copy.lives < np.inf, self._clock() + copy.lives - ttl_s, 0.0)

    def _copied(self, copy: ac.Copy, took_s: float, event: ev.CopyDone) -> None:
        self._record_latency(copy.source, copy.target, took_s)
        self._core.handle(event)
        self._core.look_at_devices()

    def _write_header(self, action: ac.WriteHeader) -> None:
        names, ends = self._namespaces, None
        if action.lives is not None:
            ends = np.where(action.lives < np.inf, self._clock() + action.lives, 0.0)
        self._tiers.dram.headers.write(
            action.identity,
            action.parents,
            action.where,
            action.version,
            names.fingerprints,
            names.lengths,
            ends,
        )

    def _probe(self, probe: ac.Probe) -> None:
        names = self._namespaces

        def begin(done: Done) -> None:
            self._tiers.at(probe.tier).probe(probe, names.fingerprints, names.lengths, done)

        def ended(results: Results) -> None:
            self._core.post(self._core.handle, ev.ProbeDone(probe.probe, results))

        begin_for_sure(len(probe.identity), begin, ended)

    def _drop(self, drop: ac.Drop) -> None:
        self._tiers.at(drop.tier).drop(drop.identity, drop.where)

    def _disagrees(self, action: ac.WriteHeader | ac.Drop | ac.FormatExtent, error: Exception) -> None:
        """Fences a device, or crashes the daemon, after an action that would leave core and tier different.

        A crash is safe: checksums prove what it leaves, and no unanswered request was promised.
        """
        tier, name, reason = action.tier, self._tiers.name_of(action.tier), _reason(action, error)
        if tier != DRAM and isinstance(error, TierError):
            self._problems.report(f"{name} is fenced: {reason}")
            self._core.post(self._core.handle, ev.SetDevice(tier, FENCED))
            return
        _log.critical("the core and %s disagree: %s", name, reason)
        logging.shutdown()
        os.abort()

    # -- extents

    def _format(self, action: ac.FormatExtent) -> None:
        owner = self._owner_of(action.domain)
        self._tiers.at(action.tier).format(action.extent, action.slot_bytes, owner)

    def reporters(self, tier: int) -> tuple[Ready, Ended]:
        """Returns callbacks for the thread that makes a tier's extents."""
        post = self._core.post
        return (
            lambda extent: post(self.extent_ready, ev.ExtentReady(tier, extent)),
            lambda error: post(self._extents_end, tier, error),
        )

    def extent_ready(self, event: ev.ExtentReady) -> None:
        """Sends the event to the core and logs a renewed extent."""
        self._core.handle(event)
        if event.replaces >= 0:
            self._note(EntryKind.RENEWED, event.tier, f"extent {event.replaces} is extent {event.extent} now")
        if event.tier == DRAM:
            self.dram_ready.set()

    def _extents_end(self, tier: int, error: TierError | None) -> None:
        if error is not None:
            self._problems.report(str(error))
        self._core.handle(ev.ExtentsEnd(tier))
        if tier == DRAM:
            self.dram_ready.set()

    def _make(self, action: ac.MakeExtents) -> None:
        self._tiers.at(action.tier).grow(action.count, *self.reporters(action.tier))

    def _not_made(self, action: ac.MakeExtents, error: Exception) -> None:
        self._core.post(self._extents_end, action.tier, _reason(action, error))

    def _renew(self, action: ac.RenewExtent) -> None:
        tier, extent, post = action.tier, action.extent, self._core.post
        self._tiers.at(tier).renew(
            extent,
            lambda number: post(self.extent_ready, ev.ExtentReady(tier, number, replaces=extent)),
            lambda error: post(self._not_renewed, tier, extent, error),
        )

    def _renewal_failed(self, action: ac.RenewExtent, error: Exception) -> None:
        self._core.post(self._not_renewed, action.tier, action.extent, _reason(action, error))

    def _not_renewed(self, tier: int, extent: int, error: TierError) -> None:
        """Gives up an extent that could not be renewed. A persistent one is removed first."""
        self._problems.report(str(error))
        self._note(EntryKind.LOST, tier, str(error))
        if self._tiers.at(tier).persistent:
            self._remove(ac.RemoveExtent(tier, extent))
        else:
            self._core.handle(ev.ExtentLost(tier, extent))

    def _remove(self, action: ac.RemoveExtent) -> None:
        done = partial(self._core.post, self._removed, action)
        try:
            self._tiers.at(action.tier).remove(action.extent, done)
        except TierError as error:
            done(error)

    def _removal_failed(self, action: ac.RemoveExtent, error: Exception) -> None:
        self._core.post(self._removed, action, _reason(action, error))

    def _removed(self, action: ac.RemoveExtent, error: TierError | None) -> None:
        """Reports a removed extent to the core. The removal of a persistent one is retried until it ends.

        A device that is being removed and has failed for `_GIVE_UP_AFTER_S` is left as it is.
        """
        if error is None:
            self._failing_since.pop(action.tier, None)
        else:
            self._problems.report(str(error))
            if self._tiers.at(action.tier).persistent and not self._gives_up(action.tier):
                self._core.later(_REMOVE_AGAIN_S, self._remove, action)
                return
        self._core.handle(ev.ExtentLost(action.tier, action.extent))
        self._note(EntryKind.REMOVED, action.tier, f"extent {action.extent}")

    def _gives_up(self, tier: int) -> bool:
        since = self._failing_since.setdefault(tier, self._core.now())
        if not self._core.view.tiers[tier].leaving or self._core.now() - since < _GIVE_UP_AFTER_S:
            return False
        # Once the device has left, deletions have a generation that it does not know: see `durability`.
        name = self._tiers.name_of(tier)
        self._problems.report(f"{name} fails and is removed as it is: a restart with its folder finds blocks")
        return True

    def _close(self, action: ac.DeviceRemoved) -> None:
        """Closes an empty device."""
        name = self._tiers.name_of(action.tier)
        self._tiers.close(action.tier)
        self._event_log.add(EntryKind.LEFT, tier=name)

    def _note(self, kind: EntryKind, tier: int, detail: str) -> None:
        self._event_log.add(kind, tier=self._tiers.name_of(tier), detail=detail)


def _reason(action: ac.Action, error: Exception) -> TierError:
    if isinstance(error, TierError):
        return error
    return TierError(f"{type(action).__name__} could not be run: {error!r}")
