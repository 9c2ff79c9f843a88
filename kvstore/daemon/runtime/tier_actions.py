"""Executes the core's actions on storage tiers: copies, probes, drops, and the life of extents.

Runs on the event loop's thread. Callbacks of tiers come on threads of theirs and are posted to the loop. A
tier's kind matters only to the table of movers. What an action means for clients is not covered here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.daemon.runtime.movers import MOVERS, CopyJob
from kvstore.daemon.runtime.ports import NamespaceTable
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.errors import TierError
from kvstore.tiers.base import Ended, Owner, Ready
from kvstore.tiers.results import Done, Results, begin_for_sure

_REMOVE_AGAIN_S = 1.0


class Host(Protocol):
    """What tier actions use of the daemon: the core, the event loop, and reports to operators."""

    def handle(self, event: ev.Event) -> None:
        """Sends an event to the core. Does nothing once the daemon has stopped."""

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Posts a call to the loop, from any thread."""

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Runs a call on the loop after `delay_s`, unless the daemon has stopped by then."""

    def reporters(self, tier: int) -> tuple[Ready, Ended]:
        """Callbacks for the thread that makes a tier's extents."""

    def extent_ready(self, event: ev.ExtentReady) -> None:
        """Sends the event to the core and reports a renewed extent."""

    def copied(self, event: ev.CopyDone) -> None:
        """Sends the event to the core and reports devices that changed their state."""

    def problem(self, error: TierError) -> None:
        """Logs an error and shows it among the daemon's problems, once."""

    def note(self, kind: str, tier: int, detail: str) -> None:
        """Adds an entry about a tier to the event log."""


class TierActions:
    """Runs each action on the tier of its number."""

    def __init__(
        self,
        host: Host,
        tiers: TierSet,
        namespaces: NamespaceTable,
        owner_of: Callable[[int], Owner],
        clock: Callable[[], float],
        record_latency: Callable[[int, int, float], None],
    ) -> None:
        """`owner_of` returns the owner of a domain's extents, `clock` Unix time in s.

        `record_latency` receives source, target and duration (s) of each copy.
        """
        self._host = host
        self._tiers = tiers
        self._record_latency = record_latency
        self._namespaces = namespaces
        self._owner_of = owner_of
        self._clock = clock
        self.run_by_type: dict[type, Callable[[Any], None]] = {
            ac.Copy: self._copy,
            ac.WriteHeader: self._write_header,
            ac.Probe: self._probe,
            ac.Drop: self._drop,
            ac.FormatExtent: self._format,
            ac.RenewExtent: self._renew,
            ac.RemoveExtent: self._remove,
            ac.MakeExtents: self._make,
        }

    def _copy(self, copy: ac.Copy) -> None:
        began_s = time.perf_counter()

        def ended(results: Results) -> None:
            took_s = time.perf_counter() - began_s
            self._host.post(self._copied, copy, took_s, ev.CopyDone(copy.transfer, results))

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
        self._host.copied(event)

    def _write_header(self, action: ac.WriteHeader) -> None:
        names, ends = self._namespaces, None
        if action.lives is not None:
            ends = np.where(action.lives < np.inf, self._clock() + action.lives, 0.0)
        self._tiers.dram.stamp(
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
            self._host.post(self._host.handle, ev.ProbeDone(probe.probe, results))

        begin_for_sure(len(probe.identity), begin, ended)

    def _drop(self, drop: ac.Drop) -> None:
        self._tiers.at(drop.tier).drop(drop.identity, drop.where)

    def _format(self, action: ac.FormatExtent) -> None:
        owner = self._owner_of(action.domain)
        self._tiers.at(action.tier).format(action.extent, action.slot_bytes, owner)

    def _make(self, action: ac.MakeExtents) -> None:
        self._tiers.at(action.tier).grow(action.count, *self._host.reporters(action.tier))

    def _renew(self, action: ac.RenewExtent) -> None:
        tier, extent, host = action.tier, action.extent, self._host

        def ready(number: int) -> None:
            host.post(host.extent_ready, ev.ExtentReady(tier, number, replaces=extent))

        def failed(error: TierError) -> None:
            host.post(self.not_renewed, tier, extent, error)

        self._tiers.at(tier).renew(extent, ready, failed)

    def not_renewed(self, tier: int, extent: int, error: TierError) -> None:
        """Gives up an extent that could not be renewed. A persistent one is removed first."""
        self._host.problem(error)
        self._host.note("lost", tier, str(error))
        if self._tiers.at(tier).persistent:
            self._remove(ac.RemoveExtent(tier, extent))
        else:
            self._host.handle(ev.ExtentLost(tier, extent))

    def _remove(self, action: ac.RemoveExtent) -> None:
        def done(error: TierError | None) -> None:
            self._host.post(self.removed, action, error)

        try:
            self._tiers.at(action.tier).remove(action.extent, done)
        except TierError as error:
            done(error)

    def removed(self, action: ac.RemoveExtent, error: TierError | None) -> None:
        """Reports a removed extent to the core. The removal of a persistent one is retried until it ends."""
        if error is not None:
            self._host.problem(error)
            if self._tiers.at(action.tier).persistent:
                self._host.later(_REMOVE_AGAIN_S, self._remove, action)
                return
        self._host.handle(ev.ExtentLost(action.tier, action.extent))
        self._host.note("removed", action.tier, f"extent {action.extent}")
