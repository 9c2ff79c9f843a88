"""Configuration at run time: limits, write policy, tenants, admission, sharing.

Not covered: limits of tiers (`reconfiguration.resizing`) and the eviction policy (`policy_migration`).
"""

from __future__ import annotations

from dataclasses import replace

from kvstore.core import events as ev
from kvstore.core.policy.admission import Admission
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.requests.pins import Pins
from kvstore.core.requests.reads import Reads
from kvstore.core.requests.writes import Writes

_LIMITS = "leases_per_client", "namespaces", "namespaces_per_tenant"


class Configuration:
    """Configure, SetTenant, SetAdmission, SetSharing."""

    def __init__(self, leases: LeaseTable, reads: Reads, writes: Writes, pins: Pins) -> None:
        self._r = leases.residency
        self._eviction = leases.eviction
        self._limits = leases.limits
        self._reads = reads
        self._writes = writes
        self._pins = pins

    def configure(self, event: ev.Configure, now: float) -> None:
        if event.write_policy is not None:
            self._writes.write_through = event.write_policy == "write_through"
        if event.prefetch_blocks is not None:
            self._reads.prefetch_blocks = event.prefetch_blocks
        if event.report_moves is not None:
            self._r.outbox.telling = event.report_moves
        for name in _LIMITS:
            if getattr(event, name) is not None:
                setattr(self._limits, name, getattr(event, name))

    def set_tenant(self, event: ev.SetTenant, now: float) -> None:
        for tier, quota in enumerate(event.quotas):
            state = self._r.tiers[tier]
            floor = 0 if state.leaving else quota.floor
            state.extents.holdings.set(event.tenant, replace(quota, floor=floor))
            state.device.queue.set(event.tenant, event.weight, event.rate, event.burst)
            self._eviction.shrink(tier, event.tenant)
        self._pins.pin_bytes[event.tenant] = event.pin_bytes

    def set_admission(self, event: ev.SetAdmission, now: float) -> None:
        self._r.tiers[event.tier].admission.change(event.rule, now)

    def set_sharing(self, event: ev.SetSharing, now: float) -> None:
        r = self._r
        r.outbox.sharing = None if event.rule is None else Admission(event.rule, r.reuse)
        r.blocks.offered[: r.blocks.rows_touched] = False
