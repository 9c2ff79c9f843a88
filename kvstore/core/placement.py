"""The entry point of the core: `handle(event, now)` changes the state and returns actions for the daemon.

A reservation holds slots that nobody can read; a commit makes them readable. A lease holds slots that are not
reused before its release. A request that waits for a promotion or for room has a deadline and gets exactly
one answer.

Not covered: bytes, sockets, files, clocks. `now` is the daemon's monotonic clock in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.core import events as ev
from kvstore.core.actions import Action
from kvstore.core.insight import reports
from kvstore.core.insight.explain import explain
from kvstore.core.invariants import check
from kvstore.core.jobs import Job
from kvstore.core.queues.device_queue import TierSpec
from kvstore.core.reconfiguration.hotplug import Hotplug
from kvstore.core.reconfiguration.policy_migration import PolicyMigration
from kvstore.core.reconfiguration.resizing import Resizing
from kvstore.core.requests.configuration import Configuration
from kvstore.core.requests.copy_results import CopyResults
from kvstore.core.requests.deletion import Deletion
from kvstore.core.requests.hints import hint
from kvstore.core.requests.invalidation import Invalidation
from kvstore.core.requests.leases import LeaseTable, Limits
from kvstore.core.requests.namespaces import NamespaceTable
from kvstore.core.requests.pins import Pins
from kvstore.core.requests.publication import Publication
from kvstore.core.requests.reads import Reads
from kvstore.core.requests.recovery import flush, restore
from kvstore.core.requests.retries import FREEING_EVENTS, Retries
from kvstore.core.requests.verification import Verification
from kvstore.core.requests.writes import Writes
from kvstore.core.residency.residency import Residency
from kvstore.core.transfers.copy_queue import CopyQueue
from kvstore.core.transfers.eviction import Eviction
from kvstore.core.transfers.rebalancing import Rebalancing
from kvstore.core.transfers.transfers import Transfers
from kvstore.core.view import View

__all__ = ["Limits", "Placement", "TierSpec"]

Handler = Callable[[Any, float], None]


class Placement:
    """All blocks of one node. `specs[0]` is DRAM, which clients read and write; see Residency.

    Others read the state through `view`.
    """

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
        self.residency = r = Residency(specs, max_blocks, seed, policy)
        self.policy_migration = PolicyMigration(r, policy)
        self.copies = CopyQueue(r)
        rebalancing = Rebalancing(r)
        self.eviction = Eviction(r, self.copies, rebalancing)
        self.transfers = Transfers(r, self.copies, self.eviction)
        self.limits = limits or Limits()
        self.leases = LeaseTable(r, self.copies, self.eviction, self.transfers, self.limits)
        reads = Reads(self.leases, prefetch_blocks)
        invalidation = Invalidation(self.leases, reads)
        writes = Writes(self.leases, invalidation, write_policy == "write_through")
        pins = Pins(self.leases)
        verification = Verification(self.leases, reads)
        self._deletion = Deletion(self.leases, invalidation, reads)
        self._reads, self._writes = reads, writes
        self._publication = Publication(self.leases, reads)
        self._retries = Retries(self.leases, reads, writes)
        self.resizing = Resizing(r, self.eviction)
        self.hotplug = Hotplug(r, self.copies, self.resizing)
        results = CopyResults(self.leases, reads, writes, verification, self._retries, self.hotplug)
        configuration = Configuration(self.leases, reads, writes, pins)
        self._jobs: tuple[Job, ...] = (
            self._retries,
            results,
            self.transfers,
            self.eviction,
            self._publication,
            self._deletion,
            self.policy_migration,
            self.resizing,
            self.hotplug,
            r.chains,
            r.pins,
            r.presence,
        )
        self._wakes = [job.wakes_at for job in self._jobs]
        self._handlers: dict[type, Handler] = {
            ev.OpenNamespace: NamespaceTable(self.leases, pins, self._publication).open,
            ev.Configure: configuration.configure,
            ev.SetTenant: configuration.set_tenant,
            ev.SetPolicy: lambda event, now: self.policy_migration.to(event.name, now),
            ev.SetAdmission: configuration.set_admission,
            ev.SetSharing: configuration.set_sharing,
            ev.SetDevice: results.set_device,
            ev.SetLimit: self.resizing.set_limit,
            ev.AddDevice: self.hotplug.add,
            ev.RemoveDevice: self.hotplug.remove,
            ev.LoseDevice: results.lose_device,
            ev.SharePresence: lambda event, now: r.presence.share(event.namespace, event.words, event.seed),
            ev.RetirePresence: lambda event, now: r.presence.retire(event.namespace),
            ev.Publish: self._publication.publish,
            ev.Forget: self._deletion.forget,
            ev.ForgetTenant: self._deletion.forget_tenant,
            ev.Reserve: writes.reserve,
            ev.Commit: writes.commit,
            ev.Abort: writes.abort,
            ev.Acquire: reads.acquire,
            ev.Release: reads.release,
            ev.Lookup: reads.lookup,
            ev.BlocksRead: reads.blocks_read,
            ev.Contains: reads.contains,
            ev.Prefetch: reads.prefetch,
            ev.Pin: pins.pin,
            ev.Unpin: pins.unpin,
            ev.Invalidate: invalidation.invalidate,
            ev.Hint: lambda event, now: hint(self.leases, event, now),
            ev.Explain: lambda event, now: explain(r, event, now),
            ev.Suspect: verification.suspect,
            ev.Tell: lambda event, now: reports.tell(r, event),
            ev.Watch: lambda event, now: reports.watch(r, event),
            ev.Unwatch: lambda event, now: reports.watch(r, event),
            ev.ClientLost: self._client_lost,
            ev.CopyDone: results.copy_done,
            ev.ProbeDone: verification.probe_done,
            ev.Scrub: verification.scrub,
            ev.ExtentReady: self.resizing.extent_ready,
            ev.ExtentLost: self.resizing.extent_lost,
            ev.ExtentsEnd: self.resizing.extents_end,
            ev.Restore: lambda event, now: restore(self.leases, event, writes.write_through),
            ev.RestoreReuse: lambda event, now: r.reuse.load(event.state, event.elapsed_s, now),
            ev.Flush: lambda event, now: flush(self.leases),
            ev.Tick: self._tick,
        }
        self.view = View(self.leases, self.policy_migration, self.hotplug)

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Applies one event at time `now` (s, never decreasing). Returns the actions, in order."""
        self.residency.advance(now)
        frees = type(event) in FREEING_EVENTS
        tenant = self._retries.tenant_of(event) if frees else None
        self._handlers[type(event)](event, now)
        if frees:
            self.transfers.pump_soon()
            self._publication.answer_settled()
            self._retries.retry_stalled(now, tenant)
        self.copies.start()
        self.residency.presence.look_at_devices()
        return self.residency.outbox.take()

    def next_wakeup(self) -> float | None:
        """Returns when the next Tick is due, or None."""
        wake = min([wakes_at() for wakes_at in self._wakes])
        return None if wake == math.inf else wake

    def check(self) -> None:
        """Asserts every invariant. Costs time proportional to the state; for tests and debugging."""
        check(self.leases)
        for tier, state in enumerate(self.residency.tiers):
            above = state.extents.bound_bytes > state.extents.limit_bytes
            assert not above or tier in self.resizing.shrinking, "a tier above its limit does not shrink"

    def _tick(self, event: ev.Tick, now: float) -> None:
        for job in self._jobs:
            job.step(now)

    def _client_lost(self, event: ev.ClientLost, now: float) -> None:
        leases = self.leases
        for request in [k for k, w in leases.waiting.items() if w.event.client == event.client]:
            self._reads.answer_waiter(leases.waiting.pop(request))
        for request in leases.stalled.of_client(event.client):
            leases.stalled.pop(request)
        for lease in sorted(leases.held.get(event.client, ())):
            if lease in leases.leases:
                leases.drop_lease(lease)
            else:
                self._writes.abort(ev.Abort(event.client, lease), now)
        leases.forget_client(event.client)
