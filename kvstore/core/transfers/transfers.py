"""Copies between tiers: queued, started in turns, joined, finished block by block.

A copy holds a reference on its source and its target slots until it ends, so neither is reused meanwhile.
A copy that failed never becomes readable; a block that was given up meanwhile leaves both slots free.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import BlockIds, Copy, Drop, Probe
from kvstore.core.blocks.block_table import LIVE, Rows
from kvstore.core.blocks.residency import DEMOTE, PROMOTING, WRITING, Residency
from kvstore.core.capacity.eviction import Eviction
from kvstore.core.capacity.extents import Slots
from kvstore.core.capacity.quotas import Namespace, SlotPool
from kvstore.core.events import CORRUPT, FAILED, OK, CopyDone, ProbeDone
from kvstore.core.insight.decision_log import DecisionKind
from kvstore.core.transfers.devices import DEMAND, SCRUB, WRITE_BACK, DeviceQueue
from kvstore.types import Tier

_READ_BYTES = 4 << 20
_WRITE_BYTES = 16 << 20
_CHUNK_BLOCKS = 64
_WRITES_IN_FLIGHT = 4
_TENANTS_AT_ONCE = 16
_CALLED_OFF_AT_ONCE = 8
_NEXT_STEP_S = 0.001


@dataclass(slots=True)
class Transfer:
    """One copy, queued or under way. `alive` is False where the block was given up in the meantime.

    `writing`: it goes down, so that its source gets free, or outlives it.
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
    alive: npt.NDArray[np.bool_]
    started: bool = False

    @property
    def marks(self) -> int:
        """Its bits of `Blocks.moving`: no row has two living copies that share one."""
        return (WRITING | DEMOTE if self.writing else 0) | (PROMOTING if self.target == 0 else 0)


@dataclass(slots=True)
class Arrived:
    """Rows now readable in a tier, and rows that were on their way there and will not get there."""

    target: int
    good: Rows
    bad: Rows


class Transfers:
    """The copies of one residency. Writes down to the next tier wait in a backlog, at most once a row."""

    def __init__(self, residency: Residency) -> None:
        self._r = residency
        self.eviction = Eviction(residency, self.demote, self._leaving, self.written_from)
        self.under_way: dict[int, Transfer] = {}
        self.writing: Counter[int] = Counter()
        self._writes = 0
        self.backlog: dict[int, deque[Rows]] = {}
        self._probes: dict[int, tuple[Probe, int]] = {}
        self._queued = 0
        self._lifting = 0
        self._last = 0
        self._next_step = math.inf

    # -- starting

    def promote(
        self,
        space: Namespace,
        rows: Rows,
        asker: int,
        kind: int = DEMAND,
        patient: bool = False,
        at: int = 0,
        whole: bool = False,
    ) -> int:
        """Queues copies of rows of a namespace into memory (the tier `at`), from the fastest that has them.

        Returns for how many, counted from the first, there was room (also in the asker's queues).
        `whole`: all of them, or none.
        """
        r, pool, least = self._r, space.pools[at], len(rows) if whole else 1
        if len(r.tiers) == 1:
            return 0
        source = self.source(rows, at)
        n = self._fit_queues(space, source, asker, kind, at)
        rows, source = rows[:n], source[:n]
        if n < least:
            return 0
        others = [(t, r.blocks.slot[i, rows].astype(np.int64)) for i, t in enumerate(r.tiers) if i != at]
        # What is about to move up must not lose its other copies while room is made.
        for tier, slots in others:
            tier.extents.hold(slots[slots >= 0])
        n = self.eviction.make_room(at, pool, len(rows), patient)
        n = n if n >= least else 0
        for number in np.unique(source[:n]).tolist():
            some = rows[:n][source[:n] == number]
            slots = r.tiers[at].extents.take(pool, len(some))
            self._queue(asker, kind, number, at, space, some, slots)
        for tier, slots in others:
            tier.extents.release(slots[slots >= 0])
        return n

    def source(self, rows: Rows, at: int) -> Rows:
        """From where each of these rows would come into a tier of memory: what can be read, memory first."""
        r = self._r
        order = np.array([i for i in (*r.memory, *r.lasting) if i != at])
        there = r.blocks.slot[:, rows][order] >= 0
        there[[i != 0 and not r.tiers[i].device.readable for i in order.tolist()]] = False
        source: Rows = order[np.argmax(there, axis=0)]
        return source

    def _device(self, source: int, target: int) -> DeviceQueue:
        """Whose turn a copy waits for: the lower one's, but nobody waits for DRAM."""
        between = [t for t in (self._r.tiers[source], self._r.tiers[target]) if t.spec.tier != Tier.DRAM]
        return max(between, key=lambda t: t.spec.tier).device

    def coming(self, at: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these rows are on their way into a tier of memory."""
        if at == 0:
            return (self._r.blocks.moving[rows] & PROMOTING) > 0
        coming = np.zeros(len(rows), np.bool_)
        for t in self.under_way.values() if self._lifting else ():
            if t.target == at:
                coming |= np.isin(rows, t.rows[t.alive])
        return coming

    def written_from(self, tier: int, rows: Rows) -> Rows:
        """Those of these rows that are on their way down from a tier."""
        rows = rows[(self._r.blocks.moving[rows] & WRITING) > 0]
        if len(rows) and len(self._r.memory) > 1:
            mine = [t.rows[t.alive] for t in self.under_way.values() if t.writing and t.source == tier]
            rows = rows[np.isin(rows, np.concatenate([rows[:0], *mine]))]
        return rows

    def _fit_queues(self, space: Namespace, source: Rows, asker: int, kind: int, at: int) -> int:
        """How many rows that come from these tiers, from the first, the asker may queue."""
        n = len(source)
        size = max(pool.slot_bytes for pool in space.pools)
        for number in np.unique(source).tolist():
            mine = np.flatnonzero(source == number)
            room = self._device(number, at).room(asker, kind) // size
            n = min(n, int(mine[room])) if room < len(mine) else n
        return n

    def demote(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Starts writing rows down so that their slots here get free; False where that can't start now."""
        started = self._write(tier, rows)
        self._r.blocks.moving[rows[started]] |= DEMOTE
        return started

    def _leaving(self, tier: int, pool: SlotPool) -> int:
        """How many blocks of a pool leave their tier when they are written down."""
        if not self.writing[pool.tenant]:
            return 0
        moving = self._r.blocks.moving
        mine = [t for t in self.under_way.values() if t.writing and t.source == tier and t.pool == pool]
        return sum(int(np.count_nonzero(moving[t.rows[t.alive]] & DEMOTE)) for t in mine)

    def queue_writes(self, rows: Rows) -> None:
        """Rows that a lasting tier should hold too, as soon as there is time."""
        if self._r.lasting:
            for space, some in self._r.by_space(rows):
                self.backlog.setdefault(space.tenant, deque()).append(some)

    def pump(self) -> None:
        """Starts writes from the backlog while fewer than the bound are in flight, tenant by tenant."""
        for tenant in list(islice(self.backlog, _TENANTS_AT_ONCE)):
            waiting = self.backlog.pop(tenant)
            while waiting and self._write_chunks(tenant) > 0:
                if not self._write_some(waiting):
                    break
            if waiting:
                # Behind the others, who are next then.
                self.backlog[tenant] = waiting

    def _write_some(self, waiting: deque[Rows]) -> bool:
        """Starts one write of those of one tenant; False if none can start for now."""
        r, blocks, tiers = self._r, self._r.blocks, self._r.tiers
        rows = waiting.popleft()
        rows = rows[(blocks.state[rows] == LIVE) & (blocks.moving[rows] == 0) & r.alone_in_memory(rows)]
        if not len(rows):
            return True
        # Since it was queued, a row may have been given to a block of another namespace.
        (space, alike), *others = r.by_space(rows)
        waiting.extendleft(some for _, some in others)
        n = _chunk(space.pools[r.lasting[0]].slot_bytes, _WRITE_BYTES)
        if len(alike) > n:
            waiting.appendleft(alike[n:])
        some = self._worth_writing(space, alike[:n])
        rest = some[~self._write_from_memory(some)]
        if not len(rest):
            return True
        takers = r.takers(0)
        growing = any(tiers[t].growing for t in takers)
        if takers and (growing or self._r.copying[space.tenant] or self.eviction.under_way):
            waiting.appendleft(rest)
            return False
        r.counters["unwritten_blocks"] += len(rest)
        r.decisions.record(DecisionKind.UNWRITTEN, r.lasting[0], rest, r.now)
        return True

    def _write_from_memory(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Queues copies of rows that only memory has, from where they are there; see `_write`."""
        started = np.zeros(len(rows), np.bool_)
        for tier in self._r.memory:
            here = np.flatnonzero((self._r.blocks.slot[tier, rows] >= 0) & (self._r.blocks.moving[rows] == 0))
            if len(here):
                started[here] = self._write(tier, rows[here])
        return started

    def _worth_writing(self, space: Namespace, rows: Rows) -> Rows:
        """Those of a chain's rows that the next tier takes, and all above them."""
        r = self._r
        tier = r.gate(0)
        admitted = np.flatnonzero(r.tiers[tier].admission.admits(rows, space.tenant, r.now))
        n = int(admitted[-1]) + 1 if len(admitted) else 0
        r.counters["refused_blocks"] += len(rows) - n
        r.decisions.record(DecisionKind.REFUSED, tier, rows[n:], r.now, space.tenant)
        return rows[:n]

    def _write_chunks(self, tenant: int) -> int:
        """How many more writes of a tenant may be in flight: one always, more while all have few."""
        return max(self._free_writes(0), 1 - self.writing[tenant])

    def _free_writes(self, tier: int) -> int:
        """How many more writes from a tier may be in flight."""
        return _WRITES_IN_FLIGHT * max(1, len(self._r.takers(tier))) - self._writes

    def _write(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Queues copies of rows from `tier` to the next one, the first ones first, within the bounds."""
        started = np.zeros(len(rows), np.bool_)
        for target in self._r.takers(tier) if not self._r.tiers[tier].lost else ():
            left = np.flatnonzero(~started)
            if not len(left):
                break
            started[left] = self._write_to(tier, target, rows[left])
        return started

    def _write_to(self, tier: int, target: int, rows: Rows) -> npt.NDArray[np.bool_]:
        started, at = np.zeros(len(rows), np.bool_), np.arange(len(rows))
        for space, some in self._r.by_space(rows):
            pool = space.pools[target]
            if len(some) < len(rows):
                at = np.flatnonzero(self._r.blocks.namespace[rows] == space.number)
            free = max(self._free_writes(tier) + 2, 1 - self.writing[pool.tenant], 0)
            room = self._device(tier, target).room(pool.tenant, WRITE_BACK) // pool.slot_bytes
            most = min(room, free * _chunk(pool.slot_bytes, _WRITE_BYTES))
            idle = np.flatnonzero(self._r.blocks.moving[some] == 0)[:most]
            if not len(idle):
                continue
            idle = idle[: self.eviction.make_room(target, pool, len(idle), patient=True)]
            if len(idle):
                todo = some[idle]
                slots = self._r.tiers[target].extents.take(pool, len(todo))
                self._queue(pool.tenant, WRITE_BACK, tier, target, space, todo, slots, writing=True)
                started[at[idle]] = True
        return started

    def move(self, space: Namespace, rows: Rows) -> int:
        """Copies rows of tier 0 to the pool that their namespace has there now; how many have room."""
        pool = space.pools[0]
        extents = self._r.tiers[0].extents
        if not len(rows):
            return 0
        held = self._r.blocks.slot[0, rows].astype(np.int64)
        extents.hold(held)
        n = self.eviction.make_room(0, pool, len(rows))
        if n:
            self._queue(pool.tenant, DEMAND, 0, 0, space, rows[:n], extents.take(pool, n))
        extents.release(held)
        return n

    def moves(self, namespace: int) -> bool:
        """Whether blocks of a namespace are being copied within tier 0, or leave it when they are written."""
        moving = self._r.blocks.moving
        return any(
            t.source == t.target or (t.source == 0 and bool((moving[t.rows[t.alive]] & DEMOTE).any()))
            for t in self.under_way.values()
            if t.namespace == namespace
        )

    def cancel_promotions(self, namespace: int) -> list[Arrived]:
        """Has no copy into DRAM of blocks of a namespace arrive; which blocks were on their way."""
        coming = [t for t in self.under_way.values() if t.namespace == namespace and t.target == 0]
        return [gone for t in coming if (gone := self._end(t, t.alive)) is not None]

    def lose(self, tier: int) -> list[Arrived]:
        """Has no copy into a lost device arrive, nor one out of it; which blocks were on their way."""
        over = [t for t in self.under_way.values() if tier in (t.source, t.target)]
        return [gone for t in over if (gone := self._end(t, t.alive)) is not None]

    def probe(self, probe: Probe, tenant: int) -> None:
        """Queues a look at slots of a lower tier, behind everything else."""
        nbytes = probe.slot_bytes * len(probe.identity)
        self._last += 1
        self._probes[self._last] = probe, nbytes
        queued = self._r.tiers[probe.tier].device.put(self._r.now, tenant, SCRUB, nbytes, self._last)
        assert queued, "the scrubber has one probe at a time"
        self._queued += 1

    def _queue(
        self,
        asker: int,
        kind: int,
        source: int,
        target: int,
        space: Namespace,
        rows: Rows,
        slots: Slots,
        writing: bool = False,
    ) -> None:
        """Rows of one namespace; `slots` are in its pool of the target tier."""
        r = self._r
        pool = space.pools[source if writing else target]
        size = max(space.pools[source].slot_bytes, space.pools[target].slot_bytes)
        chunk = _chunk(size, _WRITE_BYTES if kind == WRITE_BACK else _READ_BYTES)
        for at in range(0, len(rows), chunk):
            part, to = rows[at : at + chunk], slots[at : at + chunk]
            source_slots = r.blocks.slot[source, part].astype(np.int64)
            r.tiers[source].extents.hold(source_slots)
            self._last += 1
            transfer = Transfer(
                space.number,
                source,
                target,
                writing,
                kind,
                len(part) * size,
                pool,
                part,
                source_slots,
                to,
                r.identity(part),
                np.ones(len(part), np.bool_),
            )
            self.under_way[self._last] = transfer
            r.blocks.moving[part] |= transfer.marks & ~DEMOTE
            r.copying[pool.tenant] += 1
            if writing:
                r.tiers[target].admission.wrote(transfer.nbytes, r.now)
                r.tiers[target].device.turn += transfer.nbytes / r.tiers[target].spec.limit_bytes
                self.writing[pool.tenant] += 1
                self._writes += 1
            else:
                self._lifting += target != 0
            if source == target:
                self._start(self._last)
            else:
                device = self._device(source, target)
                queued = device.put(r.now, asker, kind, transfer.nbytes, self._last)
                assert queued, "beyond what fits the queue"
                self._queued += 1

    def start(self) -> None:
        """Starts what its device has room for now."""
        if not self._queued:
            return
        for state in self._r.tiers[1:]:
            for number, _, _ in state.device.next(self._r.now):
                self._queued -= 1
                if number in self._probes:
                    self._r.out.append(self._probes[number][0])
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
        ends = r.blocks.expires[t.rows]
        r.out.append(
            Copy(
                number,
                t.source,
                t.target,
                t.identity,
                r.blocks.keys_of(r.blocks.parent[t.rows]),
                r.where(t.source, t.source_slots),
                r.where(t.target, t.target_slots),
                r.tiers[t.target].extents.version[t.target_slots],
                t.kind == DEMAND,
                np.where(ends > 0, ends - r.now, math.inf) if ends.any() else None,
            )
        )

    def _shed(self, t: Transfer) -> None:
        """Blocks that were given up while they were queued need not be copied."""
        r, gone = self._r, ~t.alive
        r.tiers[t.target].extents.release(t.target_slots[gone])
        r.tiers[t.source].extents.release(t.source_slots[gone])
        t.rows, t.identity = t.rows[t.alive], t.identity.only(t.alive)
        t.source_slots, t.target_slots = t.source_slots[t.alive], t.target_slots[t.alive]
        t.alive = t.alive[t.alive]

    def call_off(self, now: float) -> list[CopyDone | ProbeDone]:
        """How some of what waits for devices that an operator has fenced ends: without having begun."""
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

    def concern(self, namespaces: Sequence[int]) -> bool:
        """Whether copies or looks at blocks of these namespaces are under way."""
        if any(t.namespace in namespaces for t in self.under_way.values()):
            return True
        return any(np.isin(p.identity.namespace, namespaces).any() for p, _ in self._probes.values())

    # -- ending

    def cancel(self, rows: Rows, source: int | None = None) -> list[Arrived]:
        """These rows are about to be given up, in one tier (`source`) or in all.

        Copies of what is given up must not arrive, nor leave a record. Returns which were on their way.
        """
        if not len(rows) or not (self._lifting or self._r.blocks.moving[rows].any()):
            return []
        concerned = set(np.unique(self._r.blocks.namespace[rows]).tolist())
        over = [
            t
            for t in self.under_way.values()
            if t.namespace in concerned and (source is None or t.source == source)
        ]
        gone = [self._end(t, t.alive & np.isin(t.rows, rows)) for t in over]
        return [each for each in gone if each is not None]

    def _end(self, t: Transfer, gone: npt.NDArray[np.bool_]) -> Arrived | None:
        """Some blocks of a copy will not arrive, whatever comes of it."""
        if not gone.any():
            return None
        rows = t.rows[gone]
        self._r.blocks.moving[rows] &= 0xFF & ~t.marks
        if t.target in self._r.lasting and t.started:
            where = self._r.where(t.target, t.target_slots[gone])
            self._r.out.append(Drop(t.target, t.identity.only(gone), where))
        t.alive = t.alive & ~gone
        return Arrived(t.target, rows[:0], rows)

    def finish(self, event: CopyDone) -> list[Arrived]:
        """Takes in how a copy ended: what it brought, and which other copies do not arrive because of it."""
        t = self.under_way.pop(event.transfer)
        r, blocks = self._r, self._r.blocks
        r.copying[t.pool.tenant] -= 1
        if t.writing:
            self.writing[t.pool.tenant] -= 1
            self._writes -= 1
        else:
            self._lifting -= t.target != 0
        arrived = t.alive & (event.results == OK)
        good, slots = t.rows[arrived], t.target_slots[arrived]
        demoted = good[(blocks.moving[good] & DEMOTE) > 0] if t.writing else good[:0]
        blocks.moving[t.rows[t.alive]] &= 0xFF & ~t.marks
        gone: list[Arrived] = []
        if t.source == t.target:
            gone += self.cancel(good, t.source)
            r.give_up(t.source, good, vanish=False)
        r.place(t.target, good, slots)
        r.tiers[t.target].extents.release(t.target_slots)
        r.tiers[t.source].extents.release(t.source_slots)
        if r.tiers[t.target].spec.table and len(good):
            r.stamp(t.target, good, slots)
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
        """A probe of a lower tier is over."""
        for key, (probe, nbytes) in list(self._probes.items()):
            if probe.probe == number:
                del self._probes[key]
                self._r.tiers[tier].device.ended(self._r.now, SCRUB, nbytes, nbytes)

    def quarantine(self, tier: int, rows: Rows) -> list[Arrived]:
        """These copies are known to be bad: dropped, their slots never used again. None of them arrives.

        Returns what was on its way.
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
        """Lifts a fence; closes a lower tier for a while when everything keeps failing."""
        device, now = self._device(t.source, t.target), self._r.now
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
        # A device that answers, if with wrong bytes, is worth asking.
        if len(results) and breaker.ended(now, failed, len(results)):
            self._r.counters["tier_closed"] += 1

    # -- worth it

    def worth(
        self, space: Namespace, rows: Rows, asker: int, ends: float, recompute_s: float, at: int = 0
    ) -> int:
        """How many of these leading rows are worth having: loaded before `ends`, and faster than recomputed.

        Estimated from what devices have done lately and from what waits for them.
        """
        r = self._r
        absent = (r.blocks.slot[at, rows] < 0) & ~self.coming(at, rows)
        if not absent.any() or (ends == math.inf and not recompute_s):
            return len(rows)
        first = int(absent.argmax())
        absent = absent[first:]
        source, load_s = self.source(rows[first:], at), np.zeros(len(absent))
        for number in np.unique(source[absent]).tolist():
            # Devices are read side by side: a chain is there when the last of them has its part.
            device = self._device(number, at)
            per_block_s = space.pools[at].slot_bytes / device.share_of(r.now, asker)
            to_load = np.cumsum(absent & (source == number))
            wait_s = np.where(to_load > 0, device.wait_s(r.now, asker, 0), 0.0)
            load_s = np.maximum(load_s, wait_s + to_load * per_block_s)
        good = load_s <= max(0.0, ends - r.now)
        if recompute_s:
            good &= load_s <= np.arange(1, len(absent) + 1) * recompute_s
        last = np.flatnonzero(good)
        n = first + (int(last[-1]) + 1 if len(last) else 0)
        r.counters["not_worth_loading_blocks"] += len(rows) - n
        return n

    # -- time

    def at(self, now: float) -> None:
        """It is `now`."""
        for state in self._r.tiers[1:]:
            if state.device.at(now):
                self._r.counters["tier_fenced"] += 1

    def wakes_at(self, now: float) -> float:
        """When time alone changes something."""
        devices = (t.device.wakes_at(now) for t in self._r.tiers[1:])
        return min(self._next_step, min(devices, default=math.inf))


def _chunk(slot_bytes: int, nbytes: int) -> int:
    """Blocks in one copy: enough to keep a device busy, few enough that the first ones arrive soon."""
    return min(_CHUNK_BLOCKS, max(1, nbytes // slot_bytes))
