"""Executes the core's actions on storage tiers: copies, probes, drops, and the life of extents.

Runs on the event loop's thread. Callbacks of tiers come on other threads and are posted to the loop. What an
action means for clients is not covered here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.cuda.stream import Memory
from kvstore.daemon.runtime.ports import NamespaceTable
from kvstore.daemon.runtime.tier_set import DRAM, TierSet
from kvstore.errors import TierError
from kvstore.tiers.nvme.tier import verify
from kvstore.tiers.results import Done, Results, begin_for_sure, finish_for_sure
from kvstore.types import Tier

_REMOVE_AGAIN_S = 1.0


class Host(Protocol):
    """What tier actions use of the executor."""

    def handle(self, event: ev.Event, /) -> None:
        """Sends an event to the core. Has no effect once the daemon has stopped."""

    def post(self, call: Callable[..., None], /, *args: Any) -> None:
        """Posts a call to the loop, from any thread."""

    def later(self, delay_s: float, call: Callable[..., None], /, *args: Any) -> None:
        """Runs a call on the loop after `delay_s`, unless the daemon has stopped by then."""

    def reporters(self, tier: int, /) -> tuple[Callable[[int], None], Callable[[TierError | None], None]]:
        """Returns callbacks for the thread that makes a tier's extents."""

    def extent_ready(self, event: ev.ExtentReady, /) -> None:
        """Sends the event to the core and logs a renewed extent."""

    def copied(self, event: ev.CopyDone, /) -> None:
        """Sends the event to the core and reports devices that changed their state."""

    def problem(self, error: TierError, /) -> None:
        """Reports a problem of a tier."""

    def note(self, kind: str, tier: int, detail: str, /) -> None:
        """Adds an entry about a tier to the event log."""


class TierActions:
    """Runs each action on the tier of its number."""

    def __init__(
        self,
        host: Host,
        loop: asyncio.AbstractEventLoop,
        tiers: TierSet,
        namespaces: NamespaceTable,
        tag_of: Callable[[int], bytes],
        tenant_of: Callable[[int], str],
        clock: Callable[[], float],
        record_latency: Callable[[int, int, float], None],
    ) -> None:
        """`tag_of` and `tenant_of` describe the owner of a domain's extents. `clock` returns Unix time in s.

        `record_latency` receives source, target and duration (s) of each copy.
        """
        self._host = host
        self._loop = loop
        self._tiers = tiers
        self._namespaces = namespaces
        self._tag_of = tag_of
        self._tenant_of = tenant_of
        self._clock = clock
        self._record_latency = record_latency
        self.run_by_type: dict[type, Callable[[Any], None]] = {
            ac.Copy: self._copy,
            ac.WriteHeader: self._write_header,
            ac.Probe: self._probe,
            ac.Drop: self._drop,
            ac.Format: self._format,
            ac.Renew: self._renew,
            ac.Remove: self._remove,
            ac.Make: self._make,
        }

    def _copy(self, copy: ac.Copy) -> None:
        began_s = time.perf_counter()

        def ended(results: Results) -> None:
            took_s = time.perf_counter() - began_s
            self._host.post(self._copied, copy, took_s, ev.CopyDone(copy.transfer, results))

        begin_for_sure(len(copy.identity), partial(self._begin_copy, copy), ended)

    def _begin_copy(self, copy: ac.Copy, done: Done) -> None:
        names, tiers = self._namespaces, self._tiers
        if copy.source == copy.target:
            self._move(copy, done)
        elif tiers.kind_of(copy.target) == Tier.NVME:
            sources = self._slots(copy.source, copy.source_where)
            tiers.device_at(copy.target).write(copy, sources, names.lengths, done, self._stored_at(copy))
        elif tiers.kind_of(copy.source) == Tier.NVME:
            slots, device = self._slots(copy.target, copy.target_where), tiers.device_at(copy.source)
            device.read(copy, slots, names.fingerprints, names.lengths, done, copy.urgent)
        else:
            sources = self._slots(copy.source, copy.source_where)
            targets = self._slots(copy.target, copy.target_where)
            pool = tiers.pool_at(copy.source if copy.target == DRAM else copy.target)
            pool.copy(copy, sources, targets, names.fingerprints, names.lengths, done)

    def _slots(self, tier: int, where: ac.Where) -> list[Memory]:
        """Returns slots of a memory tier."""
        if tier == DRAM:
            return [*self._tiers.dram.slots(where)]
        return [*self._tiers.pool_at(tier).slots(where)]

    def _copied(self, copy: ac.Copy, took_s: float, event: ev.CopyDone) -> None:
        self._record_latency(copy.source, copy.target, took_s)
        self._host.copied(event)

    def _move(self, copy: ac.Copy, done: Done) -> None:
        """Copies from one DRAM extent to another."""
        sources, targets = (
            self._tiers.dram.slots(copy.source_where),
            self._tiers.dram.slots(copy.target_where),
        )
        fingerprints, lengths = self._namespaces.fingerprints, self._namespaces.lengths
        # A namespace may be gone before the copy runs.
        spaces = [
            (fingerprints[n], lengths[n]) if self._namespaces.at(n) is not None else None
            for n in copy.identity.namespace.tolist()
        ]

        def move(i: int, space: tuple[bytes, int] | None) -> bool:
            arena.copy(targets[i], sources[i])
            return space is not None and verify(copy.identity, i, targets[i], *space)

        self._aside(lambda: [move(i, space) for i, space in enumerate(spaces)], len(spaces), done)

    def _aside(self, look: Callable[[], list[bool]], n: int, done: Done) -> None:
        """Runs `look` on a thread, which returns which of n blocks are good. All are FAILED if it raises."""

        def find(_: None) -> Results:
            return np.where(look(), ev.OK, ev.CORRUPT).astype(np.uint8)

        self._loop.run_in_executor(None, finish_for_sure(n, find, done), None)

    def _stored_at(self, copy: ac.Copy) -> npt.NDArray[np.float64] | None:
        """Returns when blocks were stored, in Unix time (s): 0 without a TTL. None if no block has one."""
        if copy.lives is None:
            return None
        spaces = [self._namespaces.at(n) for n in copy.identity.namespace.tolist()]
        ttl_s = np.array([space.ttl_s if space is not None else 0.0 for space in spaces])
        return np.where(copy.lives < np.inf, self._clock() + copy.lives - ttl_s, 0.0)

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
        def ended(results: Results) -> None:
            self._host.post(self._host.handle, ev.ProbeDone(probe.probe, results))

        begin_for_sure(len(probe.identity), partial(self._begin_probe, probe), ended)

    def _begin_probe(self, probe: ac.Probe, done: Done) -> None:
        fingerprints, lengths = self._namespaces.fingerprints, self._namespaces.lengths
        if probe.tier != DRAM:
            hbm = self._tiers.kind_of(probe.tier) == Tier.HBM
            device = self._tiers.pool_at(probe.tier) if hbm else self._tiers.device_at(probe.tier)
            device.probe(probe, fingerprints, lengths, done)
            return
        slots = self._tiers.dram.slots(probe.where)
        # Looked up now: a namespace may be gone before the thread runs.
        spaces = [(fingerprints[n], lengths[n]) for n in probe.identity.namespace.tolist()]

        def look() -> list[bool]:
            return [verify(probe.identity, i, slots[i], *space) for i, space in enumerate(spaces)]

        self._aside(look, len(spaces), done)

    def _drop(self, drop: ac.Drop) -> None:
        if drop.tier == DRAM:
            self._tiers.dram.void(drop.where)
        elif self._tiers.kind_of(drop.tier) == Tier.NVME:
            self._tiers.device_at(drop.tier).drop(drop.identity, drop.where)

    def _format(self, action: ac.Format) -> None:
        if action.tier == DRAM:
            self._tiers.dram.format(action.extent, action.slot_bytes, self._tag_of(action.domain))
        elif self._tiers.kind_of(action.tier) == Tier.HBM:
            self._tiers.pool_at(action.tier).format(action.extent, action.slot_bytes)
        else:
            tenant = self._tenant_of(action.domain)
            self._tiers.device_at(action.tier).format(action.extent, action.slot_bytes, tenant)

    def _make(self, action: ac.Make) -> None:
        self._tiers.at(action.tier).grow(action.count, *self._host.reporters(action.tier))

    def _renew(self, action: ac.Renew) -> None:
        tier, extent, host = action.tier, action.extent, self._host

        def ready(number: int) -> None:
            host.post(host.extent_ready, ev.ExtentReady(tier, number, replaces=extent))

        def failed(error: TierError) -> None:
            host.post(self.not_renewed, tier, extent, error)

        self._tiers.at(tier).renew(extent, ready, failed)

    def not_renewed(self, tier: int, extent: int, error: TierError) -> None:
        """Gives up an extent that could not be renewed."""
        self._host.problem(error)
        self._host.note("lost", tier, str(error))
        if self._tiers.kind_of(tier) != Tier.NVME:
            self._host.handle(ev.ExtentLost(tier, extent))
        else:
            # The slab file may still exist, and counts until it is deleted.
            self._remove(ac.Remove(tier, extent))

    def _remove(self, action: ac.Remove) -> None:
        def done(error: TierError | None) -> None:
            self._host.post(self.removed, action, error)

        try:
            self._tiers.at(action.tier).remove(action.extent, done)
        except TierError as error:
            done(error)

    def removed(self, action: ac.Remove, error: TierError | None) -> None:
        """Reports a removed extent to the core. A slab file that cannot be deleted is tried again."""
        if error is not None:
            self._host.problem(error)
            if self._tiers.kind_of(action.tier) == Tier.NVME:
                self._host.later(_REMOVE_AGAIN_S, self._remove, action)
                return
        self._host.handle(ev.ExtentLost(action.tier, action.extent))
        self._host.note("removed", action.tier, f"extent {action.extent}")
