"""Results of copies: answers waiting readers, and writes down the blocks that only memory holds.

Fenced and lost devices end copies without a result, so their events are handled here too.

Not covered: the state of the copies themselves. See `transfers.copy_queue`.
"""

from __future__ import annotations

import numpy as np

from kvstore.core import events as ev
from kvstore.core.blocks.block_table import Rows
from kvstore.core.jobs import Job
from kvstore.core.reconfiguration.hotplug import Hotplug
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.requests.reads import Reads
from kvstore.core.requests.retries import Retries
from kvstore.core.requests.verification import Verification
from kvstore.core.requests.writes import Writes


class CopyResults(Job):
    """CopyDone, SetDevice, LoseDevice. As a job, ends the copies that wait for fenced devices."""

    def __init__(
        self,
        leases: LeaseTable,
        reads: Reads,
        writes: Writes,
        verification: Verification,
        retries: Retries,
        hotplug: Hotplug,
    ) -> None:
        self._r = leases.residency
        self._copies = leases.copies
        self._transfers = leases.transfers
        self._reads = reads
        self._writes = writes
        self._verification = verification
        self._retries = retries
        self._hotplug = hotplug

    def copy_done(self, event: ev.CopyDone, now: float) -> None:
        ended = self._copies.finish(event)
        self._reads.arrived(ended)
        if ended[0].target in self._r.topology.memory:
            # The backlog skips rows that are being copied.
            self._write_through(np.concatenate((ended[0].good, ended[0].bad)))

    def set_device(self, event: ev.SetDevice, now: float) -> None:
        self._r.tiers[event.tier].device.state = event.state
        self._end_fenced(now)

    def lose_device(self, event: ev.LoseDevice, now: float) -> None:
        cancelled = self._hotplug.lose(event, now)
        self._end_fenced(now)
        for request in self._reads.take_back(event.tier, cancelled):
            self._retries.retry(request, now)
        for each in cancelled:
            self._write_through(each.bad)

    def _end_fenced(self, now: float) -> None:
        """Ends some of the copies and probes that wait for fenced devices."""
        for result in self._copies.call_off(now):
            if isinstance(result, ev.CopyDone):
                self.copy_done(result, now)
            else:
                self._verification.probe_done(result, now)

    def _write_through(self, rows: Rows) -> None:
        """Queues writes of those of these rows that only memory holds."""
        if self._writes.write_through and len(rows):
            alone = self._r.alone_in_memory(rows) & (self._r.copies(rows) > 0)
            if alone.any():
                self._transfers.queue_writes(rows[alone])

    # -- time

    def step(self, now: float) -> None:
        self._copies.step(now)
        self._end_fenced(now)

    def wakes_at(self) -> float:
        return self._copies.wakes_at()
