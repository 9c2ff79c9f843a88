"""The core's door: `handle(event, now)` changes state and returns what the shell must do.

A reservation holds slots that nobody can read; commit makes them readable. A lease holds slots that nobody
can reuse. Whoever waits (for a promotion, for room) waits with a deadline and is answered exactly once.

Not covered: bytes, sockets, files, clocks. `now` is the shell's monotonic clock in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Action, Answer
from kvstore.core.blocks.block_table import LIVE, Rows
from kvstore.core.blocks.residency import Residency
from kvstore.core.capacity.eviction import Eviction
from kvstore.core.capacity.hotplug import Hotplug
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.capacity.resizing import Resizing
from kvstore.core.insight.explain import explain
from kvstore.core.insight.hints import hint
from kvstore.core.invariants import check
from kvstore.core.policy_migration import PolicyMigration
from kvstore.core.requests.deletion import Deletion
from kvstore.core.requests.invalidation import Invalidation
from kvstore.core.requests.leases import LeaseTable, Limits, Reservation
from kvstore.core.requests.namespaces import NamespaceTable
from kvstore.core.requests.pins import Pins
from kvstore.core.requests.publication import Publication
from kvstore.core.requests.reads import Reads
from kvstore.core.requests.recovery import restore
from kvstore.core.requests.verification import Verification
from kvstore.core.requests.writes import Writes
from kvstore.core.transfers.admission import Admission
from kvstore.core.transfers.copy_queue import CopyQueue
from kvstore.core.transfers.devices import TierSpec
from kvstore.core.transfers.transfers import Transfers
from kvstore.core.view import View

__all__ = ["Limits", "Placement", "TierSpec"]

_RETRIES = 8
_FREES = {
    ev.Release,
    ev.Commit,
    ev.Abort,
    ev.Invalidate,
    ev.ProbeDone,
    ev.CopyDone,
    ev.ClientLost,
    ev.ExtentReady,
    ev.ExtentLost,
    ev.ExtentsEnd,
    ev.Forget,
    ev.ForgetTenant,
    ev.SetDevice,
    ev.LoseDevice,
    ev.Tick,
}
"""Events after which somebody who waits may go on."""
_NOBODY = -1


class Job(Protocol):
    """Work of many small steps, which a Tick takes."""

    def at(self, now: float) -> None:
        """It is `now`: takes a step if one is due."""

    def wakes_at(self) -> float:
        """When the next step is due; infinity if nothing is to be done."""


class Placement:
    """Where every block of one node is. `specs[0]` is DRAM, which clients read and write; see Residency."""

    def __init__(
        self,
        specs: Sequence[TierSpec],
        *,
        max_blocks: int,
        seed: int = 0,
        policy: str = "lru",
        write_policy: str = "write_through",
        limits: Limits | None = None,
        prefetch_blocks: int = 0,
    ) -> None:
        self.residency = Residency(specs, max_blocks, seed, policy)
        self.switch = PolicyMigration(self.residency, policy)
        self.copies = CopyQueue(self.residency)
        self.eviction = Eviction(self.residency, self.copies)
        self.transfers = Transfers(self.residency, self.copies, self.eviction)
        self.limits = limits or Limits()
        self.ledger = LeaseTable(self.residency, self.copies, self.eviction, self.transfers, self.limits)
        self._reads = Reads(self.ledger, prefetch_blocks)
        self._pins = Pins(self.ledger)
        self._publication = Publication(self.ledger, self._reads)
        invalidation = Invalidation(self.ledger, self._reads)
        verification = Verification(self.ledger, self._reads)
        self._writes = Writes(self.ledger, invalidation, write_policy == "write_through")
        self.resizing = Resizing(self.residency, self.eviction)
        self.joining = Hotplug(self.residency, self.copies, self.resizing)
        self._deletion = Deletion(self.ledger, invalidation, self._reads)
        self._publishing: dict[int, int] = {}
        self._jobs: tuple[Job, ...] = (
            self.eviction,
            self._publication,
            self._deletion,
            self.switch,
            self.resizing,
            self.joining,
            self.residency,
        )
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.OpenNamespace: NamespaceTable(self.ledger, self._pins, self._publication).open,
            ev.SetTenant: self._set_tenant,
            ev.Configure: self._configure,
            ev.SetPolicy: lambda event, now: self.switch.to(event.name, now),
            ev.SetAdmission: self._set_admission,
            ev.SetSharing: self._set_sharing,
            ev.SetDevice: self._set_device,
            ev.SetLimit: self.resizing.set_limit,
            ev.AddDevice: self.joining.add,
            ev.RemoveDevice: self.joining.remove,
            ev.LoseDevice: self._lose_device,
            ev.Publish: self._publish,
            ev.Forget: self._deletion.forget,
            ev.ForgetTenant: self._deletion.forget_tenant,
            ev.Reserve: self._writes.reserve,
            ev.Commit: self._writes.commit,
            ev.Abort: self._writes.abort,
            ev.Acquire: self._reads.acquire,
            ev.Release: self._reads.release,
            ev.Lookup: self._reads.lookup,
            ev.Prefetch: self._reads.prefetch,
            ev.Pin: self._pins.pin,
            ev.Unpin: self._pins.unpin,
            ev.Invalidate: invalidation.invalidate,
            ev.Hint: lambda event, now: hint(self.ledger, event, now),
            ev.Explain: lambda event, now: explain(self.ledger, event, now),
            ev.Suspect: verification.suspect,
            ev.Tell: self._publication.tell,
            ev.ClientLost: self._client_lost,
            ev.CopyDone: self._copy_done,
            ev.ProbeDone: verification.probe_done,
            ev.ExtentReady: self._extent_ready,
            ev.ExtentLost: lambda event, now: self.resizing.lost(event.tier, event.extent),
            ev.ExtentsEnd: lambda event, now: self.resizing.ended(event.tier),
            ev.Scrub: verification.scrub,
            ev.Restore: lambda event, now: restore(self.ledger, event, self._writes.write_through),
            ev.RestoreReuse: lambda event, now: self.residency.reuse.load(event.state, event.elapsed_s, now),
            ev.Watch: lambda event, now: self._watch(event.key, 1),
            ev.Unwatch: lambda event, now: self._watch(event.key, -1),
            ev.Flush: self._flush,
            ev.Tick: self._tick,
        }
        self.view = View(self)

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Applies one event at time `now` (s, never going back) and returns the actions, in order."""
        self.residency.settle()
        self.residency.now = now
        frees = type(event) in _FREES
        whose = self._whose_room(event) if frees else None
        self._handlers[type(event)](event, now)
        if frees:
            self._go_on(now, whose)
        self.copies.start()
        actions, self.residency.out = self.residency.out, []
        return actions

    def _whose_room(self, event: ev.Event) -> int | None:
        """The only tenant for whom an event, about to be handled, may make room; None: it may be anybody."""
        if isinstance(event, ev.CopyDone):
            copied = self.copies.under_way.get(event.transfer)
            return copied.pool.tenant if copied is not None else None
        if isinstance(event, ev.Release):
            lease = self.ledger.leases.get(event.lease)
            return lease.tenant if lease is not None else _NOBODY
        if isinstance(event, ev.Commit | ev.Abort):
            reservation = self.ledger.reservations.get(event.lease)
            if reservation is None or (isinstance(event, ev.Commit) and self._keeps_all(event, reservation)):
                return _NOBODY
            return reservation.pool.tenant
        return None

    def _keeps_all(self, event: ev.Commit, reservation: Reservation) -> bool:
        """Whether all that was reserved stays in use: nothing of it has been given up meanwhile."""
        n, state = len(reservation.rows), self.residency.tiers[reservation.at]
        whole = len(event.written) == len(event.checksums) == n and not state.lost
        return whole and bool(event.written.all() and reservation.alive.all())

    def next_wakeup(self) -> float | None:
        """When a Tick is due at the latest, or None."""
        r, deadlines = self.residency, self.ledger.deadlines
        wake = min(
            deadlines[0][0] if deadlines else math.inf,
            self.copies.wakes_at(r.now),
            *(job.wakes_at() for job in self._jobs),
        )
        return None if wake == math.inf else wake

    def check(self) -> None:
        """Asserts every invariant; costs time proportional to the state. For tests and debugging."""
        check(self.ledger)
        for tier, state in enumerate(self.residency.tiers):
            beyond = state.extents.bound_bytes > state.extents.limit_bytes
            assert not beyond or self.resizing.is_at_work(tier), (
                "over the limit, and nothing is done about it"
            )

    # -- settings, namespaces, tenants

    def _configure(self, event: ev.Configure, now: float) -> None:
        limits = self.limits
        if event.write_policy is not None:
            self._writes.write_through = event.write_policy == "write_through"
        if event.prefetch_blocks is not None:
            self._reads.prefetch_blocks = event.prefetch_blocks
        if event.report_moves is not None:
            self.residency.telling = event.report_moves
        for name in ("leases_per_client", "namespaces", "namespaces_per_tenant"):
            if getattr(event, name) is not None:
                setattr(limits, name, getattr(event, name))

    def _watch(self, key: bytes, count: int) -> None:
        awaited, word = self.residency.awaited, int.from_bytes(key[:8], "little")
        awaited[word] += count
        if not awaited[word]:
            del awaited[word]

    def _set_tenant(self, event: ev.SetTenant, now: float) -> None:
        r = self.residency
        for tier, quota in enumerate(event.quotas):
            floor = 0 if r.tiers[tier].leaving else quota.floor
            r.tiers[tier].extents.holdings.set(event.tenant, replace(quota, floor=floor))
            r.tiers[tier].device.queue.set(event.tenant, event.weight, event.rate, event.burst)
            self.eviction.shrink(tier, event.tenant)
        self._pins.pin_bytes[event.tenant] = event.pin_bytes

    def _set_admission(self, event: ev.SetAdmission, now: float) -> None:
        self.residency.tiers[event.tier].admission.change(event.rule, now)

    def _set_sharing(self, event: ev.SetSharing, now: float) -> None:
        r = self.residency
        r.sharing = None if event.rule is None else Admission(event.rule, r.reuse)
        r.blocks.offered[: r.blocks.rows_touched] = False

    def _set_device(self, event: ev.SetDevice, now: float) -> None:
        self.residency.tiers[event.tier].device.state = event.state
        self._call_off(now)

    def _lose_device(self, event: ev.LoseDevice, now: float) -> None:
        gone = self.joining.lose(event, now)
        self._call_off(now)
        for request in self._reads.take_back(event.tier, gone):
            self._try_again(request, now)
        for arrived in gone:
            self._write_through(arrived.bad)

    def _call_off(self, now: float) -> None:
        """What waits for a device that is fenced ends, some of it; others are told that there is nothing."""
        for end in self.copies.call_off(now):
            self._handlers[type(end)](end, now)

    def _publish(self, event: ev.Publish, now: float) -> None:
        space = self.residency.spaces[event.namespace]
        pool = space.pools[0]._replace(domain=event.domain)
        if pool != space.pools[0]:
            space.pools, space.moved = (pool, *space.pools[1:]), True
            self._publication.move(space, now)
            if not self._publication.has_moved(space.number):
                self._publishing[event.request] = space.number
                return
        self.ledger.say(Answer(event.request, 0))

    # -- results, clients, time

    def _copy_done(self, event: ev.CopyDone, now: float) -> None:
        ended = self.copies.finish(event)
        self._reads.arrived(ended)
        if ended[0].target in self.residency.memory:
            # What moved within tier 0 was passed over when it was its turn to be written down.
            self._write_through(np.concatenate((ended[0].good, ended[0].bad)))

    def _write_through(self, rows: Rows) -> None:
        """Has those of these rows written down that should be, and are not."""
        if self._writes.write_through and len(rows):
            alone = self.residency.alone_in_memory(rows) & (self.residency.copies(rows) > 0)
            if alone.any():
                self.transfers.queue_writes(rows[alone])

    def _go_on(self, now: float, only: int | None = None) -> None:
        """Something got free: writes from the backlog, publications, those who wait for room.

        `only`: nothing but room of this tenant.
        """
        self.transfers.pump()
        for request, namespace in list(self._publishing.items()):
            if self._publication.has_moved(namespace):
                del self._publishing[request]
                self.ledger.say(Answer(request, 0))
        stalled, budget = self.ledger.stalled, _RETRIES
        for tenant in stalled.tenants() if only is None else (only,):
            # Tenants wait for room of their own: where the oldest finds none, those behind it need not try.
            while budget and (request := stalled.oldest(tenant)):
                budget -= 1
                self._try_again(stalled.pop(request), now)
                if request in stalled:
                    break

    def _try_again(self, event: ev.Acquire | ev.Reserve, now: float) -> None:
        self.ledger.retried = event.request
        self.eviction.trying_again = now < event.deadline
        if isinstance(event, ev.Acquire):
            self._reads.acquire(event, now)
        else:
            self._writes.reserve(event, now)
        self.ledger.retried = 0
        self.eviction.trying_again = False

    def _client_lost(self, event: ev.ClientLost, now: float) -> None:
        for request in [k for k, w in self.ledger.waiting.items() if w.event.client == event.client]:
            self._reads.answer_waiter(self.ledger.waiting.pop(request))
        for request in self.ledger.stalled.of_client(event.client):
            self.ledger.stalled.pop(request)
        for lease in sorted(self.ledger.held.get(event.client, ())):
            if lease in self.ledger.leases:
                self.ledger.drop_lease(lease)
            else:
                self._writes.abort(ev.Abort(event.client, lease), now)
        self.ledger.forget_client(event.client)

    def _tick(self, event: ev.Tick, now: float) -> None:
        while self.ledger.deadlines and self.ledger.deadlines[0][0] <= now:
            _, request = heapq.heappop(self.ledger.deadlines)
            if request in self.ledger.waiting:
                self._reads.answer_waiter(self.ledger.waiting.pop(request))
            elif request in self.ledger.stalled:
                self._try_again(self.ledger.stalled.pop(request), now)
        self.copies.at(now)
        self._call_off(now)
        for job in self._jobs:
            job.at(now)

    # -- start and stop

    def _extent_ready(self, event: ev.ExtentReady, now: float) -> None:
        extents = self.residency.tiers[event.tier].extents
        extents.add(event.extent, event.replaces)
        if event.tenant == ev.UNKNOWN:
            self.eviction.renew(event.tier, event.extent)
        cut = None
        if event.slot_bytes:
            cut = extents.assign(SlotPool(event.tenant, event.domain, event.slot_bytes), event.extent)
            self.eviction.shrink(event.tier, event.tenant)
        if event.versions is not None and cut is not None:
            slots = extents.slots_of(event.extent)
            extents.version[slots] = event.versions[: len(slots)]

    def _flush(self, event: ev.Flush, now: float) -> None:
        r = self.residency
        if r.lasting:
            r.ending = True
            rows = np.flatnonzero(r.blocks.state == LIVE)
            rows = rows[r.alone_in_memory(rows)]
            self.transfers.backlog.clear()
            # There may not be time, or room, for all: and a block is of no use without its parents.
            latest_first = np.argsort(-r.reuse.history.last_used(rows), kind="stable")
            self.transfers.queue_writes(rows[latest_first])
            self.transfers.pump()
