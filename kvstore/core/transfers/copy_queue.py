"""The queue of copies between tiers: from queueing to the result of each block.

A copy holds a reference on its source slots and its target slots until it ends, so neither are reused
meanwhile. A block whose copy failed never becomes readable. A block that is dropped during its copy leaves
both slots free.

Not covered: which blocks are copied, and why; see `transfers` and `transfers.eviction`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.columns import distinct
from kvstore.core.actions import BlockIds, Copy, Drop, Probe
from kvstore.core.blocks.block_table import Rows
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.capacity.slot_classes import Slots
from kvstore.core.events import CORRUPT, FAILED, OK, CopyDone, ProbeDone
from kvstore.core.queues.device_queue import DEMAND, SCRUB, WRITE_BACK, DeviceQueue
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.namespace import Namespace
from kvstore.core.residency.residency import DEMOTE, PROMOTING, WRITING, Residency
from kvstore.types import Tier

_READ_BYTES = 4 << 20
_WRITE_BYTES = 16 << 20
_READ_BLOCKS, _WRITE_BLOCKS = 64, 256
_WRITES_IN_FLIGHT, _SMALL_WRITES_IN_FLIGHT = 4, 32
_CALLED_OFF_AT_ONCE = 8
_NEXT_STEP_S = 0.001


@dataclass(slots=True)
class Transfer:
    """One copy, queued or under way. `alive` is False where the block was dropped in the meantime.

    `writing`: the copy goes to a lower tier.
    """

    namespace: int
    source: int
    target: int
    writing: bool
    kind: int
    nbytes: int
    pool: SlotPool
    rows: Rows
    source_slots: Slots
    target_slots: Slots
    identity: BlockIds
    alive: npt.NDArray[np.bool_] = field(init=False)
    started: bool = False

    def __post_init__(self) -> None:
        self.alive = np.ones(len(self.rows), np.bool_)

    @property
    def marks(self) -> int:
        """The bits of `Blocks.copy_marks` that the copy sets: two copies of a row never share one."""
        return (WRITING | DEMOTE if self.writing else 0) | (PROMOTING if self.target == 0 else 0)


@dataclass(slots=True)
class Arrived:
    """The outcome of a copy: `good` rows are readable in the tier `target`, `bad` rows did not arrive."""

    target: int
    good: Rows
    bad: Rows


class CopyQueue:
    """All copies and probes of one placement that wait for a device or are under way.

    `under_way` has the copies by number. `writing` counts the copies to lower tiers by tenant.
    """

    def __init__(self, residency: Residency) -> None:
        self._r = residency
        self.under_way: dict[int, Transfer] = {}
        self.writing: Counter[int] = Counter()
        self._writes = self._write_bytes = 0
        self._probes: dict[int, tuple[Probe, int]] = {}
        self._queued = 0
        self._lifting = 0
        self._last = 0
        self._next_step = math.inf

    # -- room

    def device(self, source: int, target: int) -> DeviceQueue:
        """The device in whose queue a copy waits: that of the lower tier. Copies never wait for DRAM."""
        between = [t for t in (self._r.tiers[source], self._r.tiers[target]) if t.spec.tier != Tier.DRAM]
        return max(between, key=lambda t: t.spec.tier.rank).device

    def room(self, namespace: Namespace, source: Rows, asker: int, kind: int, target: int) -> int:
        """Returns how many leading rows the asker may queue. `source` has the tier of each row."""
        n = len(source)
        size = max(pool.slot_bytes for pool in namespace.pools)
        for number in distinct(source):
            mine = np.flatnonzero(source == number)
            room = self.device(number, target).room(asker, kind) // size
            n = min(n, int(mine[room])) if room < len(mine) else n
        return n

    def room_for_writes(self, tier: int, tenant: int, more: int = 0) -> int:
        """Returns how many more writes from a tier may start: at least one for each tenant.

        `more` raises the bound.
        """
        devices = max(1, len(self._r.topology.takers(tier)))
        room_bytes = (_WRITES_IN_FLIGHT * devices + more) * _WRITE_BYTES - self._write_bytes
        free = min(-(-room_bytes // _WRITE_BYTES), _SMALL_WRITES_IN_FLIGHT * devices + more - self._writes)
        return max(free, 1 - self.writing[tenant], 0)

    # -- what is queued

    def coming(self, target: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which rows are being copied into a memory tier."""
        if target == 0:
            return (self._r.blocks.copy_marks[rows] & PROMOTING) > 0
        coming = np.zeros(len(rows), np.bool_)
        for t in self.under_way.values() if self._lifting else ():
            if t.target == target:
                coming |= np.isin(rows, t.rows[t.alive])
        return coming

    def written_from(self, tier: int, rows: Rows) -> Rows:
        """Those of the rows that are being written from this tier to a lower one, which is not fenced."""
        rows = rows[(self._r.blocks.copy_marks[rows] & WRITING) > 0]
        fenced = any(state.device.fenced for state in self._r.tiers)
        if len(rows) and (fenced or len(self._r.topology.memory) > 1):
            mine = [t.rows[t.alive] for t in self._writes_from(tier)]
            rows = rows[np.isin(rows, np.concatenate([rows[:0], *mine]))]
        return rows

    def demoting(self, tier: int, pool: SlotPool) -> int:
        """Returns the number of blocks in a pool that are dropped when their write to a lower tier ends."""
        if not self.writing[pool.tenant]:
            return 0
        marks = self._r.blocks.copy_marks
        mine = [t for t in self._writes_from(tier) if t.pool == pool]
        return sum(int(np.count_nonzero(marks[t.rows[t.alive]] & DEMOTE)) for t in mine)

    def _writes_from(self, tier: int) -> list[Transfer]:
        """Returns the writes to lower tiers that may end soon: not those to a fenced device."""
        writes = (t for t in self.under_way.values() if t.writing and t.source == tier)
        return [t for t in writes if not self._r.tiers[t.target].device.fenced]

    def relocates(self, namespace: int) -> bool:
        """Returns whether blocks of a namespace are being copied within tier 0, or demoted from it."""
        marks = self._r.blocks.copy_marks
        return any(
            t.source == t.target or (t.source == 0 and bool((marks[t.rows[t.alive]] & DEMOTE).any()))
            for t in self.under_way.values()
            if t.namespace == namespace
        )

    def concern(self, namespaces: Sequence[int]) -> bool:
        """Returns whether blocks of these namespaces are being copied or probed."""
        if any(t.namespace in namespaces for t in self.under_way.values()):
            return True
        return any(np.isin(p.identity.namespace, namespaces).any() for p, _ in self._probes.values())

    # -- starting

    def put(
        self,
        asker: int,
        kind: int,
        source: int,
        target: int,
        namespace: Namespace,
        rows: Rows,
        slots: Slots,
        writing: bool = False,
    ) -> None:
        """Queues copies of rows of one namespace. `slots` are in the namespace's pool of the target tier."""
        r = self._r
        pool = namespace.pools[source if writing else target]
        size = max(namespace.pools[source].slot_bytes, namespace.pools[target].slot_bytes)
        chunk = write_chunk(size) if kind == WRITE_BACK else min(_READ_BLOCKS, max(1, _READ_BYTES // size))
        for first in range(0, len(rows), chunk):
            part, to = rows[first : first + chunk], slots[first : first + chunk]
            source_slots = r.blocks.slot[source, part].astype(np.int64)
            r.tiers[source].slots.hold(source_slots)
            self._last += 1
            nbytes, ids = len(part) * size, r.outbox.ids(part)
            self.under_way[self._last] = transfer = Transfer(
                namespace.number, source, target, writing, kind, nbytes, pool, part, source_slots, to, ids
            )
            r.blocks.copy_marks[part] |= transfer.marks & ~DEMOTE
            r.copying[pool.tenant] += 1
            if writing:
                r.tiers[target].admission.wrote(nbytes, r.now)
                r.tiers[target].device.turn += nbytes / r.tiers[target].spec.limit_bytes
                self.writing[pool.tenant] += 1
                self._writes += 1
                self._write_bytes += nbytes
            else:
                self._lifting += target != 0
            if source == target:
                self._start(self._last)
            else:
                queued = self.device(source, target).put(r.now, asker, kind, nbytes, self._last)
                assert queued, "beyond what fits the queue"
                self._queued += 1

    def probe(self, probe: Probe, tenant: int) -> None:
        """Queues a probe of slots of a lower tier, behind all copies."""
        nbytes = probe.slot_bytes * len(probe.identity)
        self._last += 1
        self._probes[self._last] = probe, nbytes
        queued = self._r.tiers[probe.tier].device.put(self._r.now, tenant, SCRUB, nbytes, self._last)
        assert queued, "the scrubber has one probe at a time"
        self._queued += 1

    def start(self) -> None:
        """Starts the copies and probes for which their devices have room now."""
        if not self._queued:
            return
        for state in self._r.tiers[1:]:
            for number, _, _ in state.device.next(self._r.now):
                self._queued -= 1
                if number in self._probes:
                    self._r.outbox.actions.append(self._probes[number][0])
                else:
                    self._start(number)

    def _start(self, number: int) -> None:
        r, t = self._r, self.under_way[number]
        t.started = True
        if not t.alive.all():
            self._shed(t)
            if not len(t.rows):
                self.finish(CopyDone(number, np.zeros(0, np.uint8)))
                return
        parents = r.blocks.keys_of(r.blocks.parent[t.rows])
        places = r.where(t.source, t.source_slots), r.where(t.target, t.target_slots)
        version, ttls = r.tiers[t.target].slots.version[t.target_slots], r.outbox.ttls(t.rows)
        copy = Copy(number, t.source, t.target, t.identity, parents, *places, version, t.kind == DEMAND, ttls)
        r.outbox.actions.append(copy)

    def _shed(self, t: Transfer) -> None:
        """Removes the blocks that were dropped while the copy was queued."""
        r, gone = self._r, ~t.alive
        r.tiers[t.target].slots.release(t.target_slots[gone])
        r.tiers[t.source].slots.release(t.source_slots[gone])
        t.rows, t.identity = t.rows[t.alive], t.identity.only(t.alive)
        t.source_slots, t.target_slots = t.source_slots[t.alive], t.target_slots[t.alive]
        t.alive = t.alive[t.alive]

    # -- cancelling

    def call_off(self, now: float) -> list[CopyDone | ProbeDone]:
        """Ends some of the copies and probes that wait for fenced devices. Returns their results."""
        ends: list[CopyDone | ProbeDone] = []
        for state in self._r.tiers[1:]:
            for number, _, _ in islice(state.device.called_off(now), _CALLED_OFF_AT_ONCE):
                self._queued -= 1
                if number in self._probes:
                    probe = self._probes[number][0]
                    ends.append(ProbeDone(probe.probe, np.full(len(probe.identity), FAILED, np.uint8)))
                else:
                    results = np.full(len(self.under_way[number].rows), FAILED, np.uint8)
                    ends.append(CopyDone(number, results))
        self._next_step = now + _NEXT_STEP_S if ends else math.inf
        return ends

    def cancel(self, rows: Rows, source: int | None = None) -> list[Arrived]:
        """Cancels the copies of rows that are about to be dropped from one tier (`source`) or from all.

        The copies do not arrive and leave no record. Returns the cancelled ones.
        """
        if not len(rows) or not (self._lifting or self._r.blocks.copy_marks[rows].any()):
            return []
        concerned = set(distinct(self._r.blocks.namespace[rows]))
        over = [t for t in self.under_way.values() if t.namespace in concerned and source in (None, t.source)]
        gone = [self._cancel(t, t.alive & np.isin(t.rows, rows)) for t in over]
        return [each for each in gone if each is not None]

    def cancel_promotions(self, namespace: int) -> list[Arrived]:
        """Cancels all copies of a namespace's blocks into DRAM. Returns the cancelled ones."""
        coming = [t for t in self.under_way.values() if t.namespace == namespace and t.target == 0]
        return [gone for t in coming if (gone := self._cancel(t, t.alive)) is not None]

    def lose(self, tier: int) -> list[Arrived]:
        """Cancels all copies into and from a lost device. Returns the cancelled ones."""
        over = [t for t in self.under_way.values() if tier in (t.source, t.target)]
        return [gone for t in over if (gone := self._cancel(t, t.alive)) is not None]

    def _cancel(self, t: Transfer, gone: npt.NDArray[np.bool_]) -> Arrived | None:
        """Cancels some blocks of a copy, whatever its result. None if `gone` selects no block."""
        if not gone.any():
            return None
        rows = t.rows[gone]
        self._r.blocks.copy_marks[rows] &= 0xFF & ~t.marks
        if t.target in self._r.topology.persistent and t.started:
            where = self._r.where(t.target, t.target_slots[gone])
            self._r.outbox.actions.append(Drop(t.target, t.identity.only(gone), where))
        t.alive = t.alive & ~gone
        return Arrived(t.target, rows[:0], rows)

    # -- ending

    def finish(self, event: CopyDone) -> list[Arrived]:
        """Applies the result of a copy. Returns its outcome, then those of the copies that it cancelled."""
        t = self.under_way.pop(event.transfer)
        r, blocks = self._r, self._r.blocks
        r.copying[t.pool.tenant] -= 1
        if t.writing:
            self.writing[t.pool.tenant] -= 1
            self._writes -= 1
            self._write_bytes -= t.nbytes
        else:
            self._lifting -= t.target != 0
        arrived = t.alive & (event.results == OK)
        good, slots = t.rows[arrived], t.target_slots[arrived]
        demoted = good[(blocks.copy_marks[good] & DEMOTE) > 0] if t.writing else good[:0]
        blocks.copy_marks[t.rows[t.alive]] &= 0xFF & ~t.marks
        gone: list[Arrived] = []
        if t.source == t.target:
            gone += self.cancel(good, t.source)
            r.give_up(t.source, good, vanish=False)
        r.place(t.target, good, slots)
        r.tiers[t.target].slots.release(t.target_slots)
        r.tiers[t.source].slots.release(t.source_slots)
        if r.tiers[t.target].spec.table and len(good):
            r.write_headers(t.target, good, slots)
        r.counters["written_blocks" if t.writing else "promoted_blocks"] += len(good)
        r.counters["written_bytes" if t.writing else "promoted_bytes"] += len(good) * t.pool.slot_bytes
        if t.source != t.target:
            self._judge_device(t, event.results)
        gone += self.quarantine(t.source, t.rows[t.alive & (event.results == CORRUPT)])
        demoted = demoted[r.idle(t.source, demoted)]
        r.decisions.record(DecisionKind.DEMOTED, t.source, demoted, r.now, t.pool.tenant)
        r.give_up(t.source, demoted)
        return [Arrived(t.target, good, t.rows[t.alive & ~arrived]), *gone]

    def probed(self, tier: int, number: int) -> None:
        """Ends a probe of a lower tier."""
        for key, (probe, nbytes) in list(self._probes.items()):
            if probe.probe == number:
                del self._probes[key]
                self._r.tiers[tier].device.ended(self._r.now, SCRUB, nbytes, nbytes)

    def quarantine(self, tier: int, rows: Rows) -> list[Arrived]:
        """Drops corrupt copies of rows from a tier. Their slots are not used again by this process.

        Returns the copies of these slots that were cancelled.
        """
        rows = rows[self._r.blocks.slot[tier, rows] >= 0]
        if not len(rows):
            return []
        self._r.counters["quarantined_blocks"] += len(rows)
        self._r.decisions.record(DecisionKind.QUARANTINED, tier, rows, self._r.now)
        gone = self.cancel(rows, tier)
        self._r.give_up(tier, rows, retire=True)
        return gone

    def _judge_device(self, t: Transfer, results: npt.NDArray[np.uint8]) -> None:
        """Reports a result to the device: lifts its fence, opens its breaker when all copies fail."""
        device, now = self.device(t.source, t.target), self._r.now
        if not t.started:
            self._r.counters["called_off_blocks"] += len(t.rows)
            device.ended(now, t.kind, t.nbytes, 0)
            return
        self._r.counters["failed_blocks"] += int((results[t.alive] != OK).sum())
        # Wrong bytes are their writer's fault, and no reason to close the device for everybody.
        results = results[t.alive | (results != FAILED)]
        failed = int((results == FAILED).sum())
        device.ended(now, t.kind, t.nbytes, (len(results) - failed) * t.pool.slot_bytes)
        breaker = device.writes if t.writing else device.reads
        # A device that returns wrong bytes still answers: it stays open.
        if len(results) and breaker.ended(now, failed, len(results)):
            self._r.counters["tier_closed"] += 1

    # -- time

    def step(self, now: float) -> None:
        """Fences the devices that have made no progress for too long."""
        for state in self._r.tiers[1:]:
            if state.device.step(now):
                self._r.counters["tier_fences"] += 1

    def wakes_at(self) -> float:
        """When the passing of time alone changes a device."""
        devices = (t.device.wakes_at(self._r.now) for t in self._r.tiers[1:])
        return min(self._next_step, min(devices, default=math.inf))


def write_chunk(slot_bytes: int) -> int:
    """Blocks in one copy to a lower tier: enough to keep a device busy, few enough to arrive soon."""
    return min(_WRITE_BLOCKS, max(1, _WRITE_BYTES // slot_bytes))
