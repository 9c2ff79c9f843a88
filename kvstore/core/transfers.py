"""Copies between tiers: started, bounded, joined, finished block by block.

A copy holds a reference on its source and its target slots until it ends, so neither is reused meanwhile.
A copy that failed never becomes readable; a block that was given up meanwhile leaves both slots free.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import Copy, Drop, Identity
from kvstore.core.blocks import LIVE, Rows
from kvstore.core.events import CORRUPT, OK, CopyDone
from kvstore.core.extents import Slots
from kvstore.core.residency import DEMOTE, PROMOTING, WRITING, Residency

_CHUNK_BYTES = 16 << 20
_CHUNK_BLOCKS = 64
_WRITES_IN_FLIGHT = 4
_READS_IN_FLIGHT = 64
_FAILURES_TO_CLOSE = 8
_CLOSED_FOR_S = 30.0
_QUIET_FOR_S = 5.0


@dataclass(slots=True)
class Transfer:
    """One copy under way. `alive` is False where the block was given up in the meantime."""

    source: int
    target: int
    slot_bytes: int
    rows: Rows
    source_slots: Slots
    target_slots: Slots
    identity: Identity
    alive: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Arrived:
    """What CopyDone brought: rows now readable in the target tier, and rows that did not get there."""

    target: int
    good: Rows
    bad: Rows


class Transfers:
    """The copies of one residency. Writes down to the next tier wait in a backlog, at most once a row."""

    def __init__(self, residency: Residency) -> None:
        self._r = residency
        self.under_way: dict[int, Transfer] = {}
        self.writes_in_flight = 0
        self.reads_in_flight = 0
        self.backlog: deque[Rows] = deque()
        self._last = 0
        self._now = 0.0

    # -- starting

    def promote(self, slot_bytes: int, rows: Rows, patient: bool = False) -> int:
        """Starts copying rows up to tier 0, each from the uppermost tier that holds it and can be read.

        Returns for how many, counted from the first, there was room (also among reads in flight).
        """
        r = self._r
        rows = rows[: _chunk(slot_bytes) * max(0, _READS_IN_FLIGHT - self.reads_in_flight)]
        if not len(rows):
            return 0
        below = [(t, r.blocks.slot[i + 1, rows].astype(np.int64)) for i, t in enumerate(r.tiers[1:])]
        # What is about to move up must not lose its lower copy while room is made.
        for tier, slots in below:
            tier.extents.hold(slots[slots >= 0])
        n = r.make_room(0, slot_bytes, len(rows), self.demote, patient)
        source = np.argmax(self._reachable(rows[:n]), axis=0) + 1
        for number in np.unique(source).tolist():
            some = rows[:n][source == number]
            slots = r.tiers[0].extents.take(slot_bytes, len(some))
            self._start(number, 0, slot_bytes, some, slots, PROMOTING)
        for tier, slots in below:
            tier.extents.release(slots[slots >= 0])
        return n

    def _reachable(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which lower tiers (from 1 on) have a copy of which rows, and can be read now."""
        there: npt.NDArray[np.bool_] = self._r.blocks.slot[1:, rows] >= 0
        there[[t.fenced for t in self._r.tiers[1:]]] = False
        return there

    def demote(self, tier: int, slot_bytes: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Starts writing rows down so that their slots here get free; False where that can't start now."""
        started = self._write(tier, slot_bytes, rows)
        self._r.blocks.moving[rows[started]] |= DEMOTE
        return started

    def queue_writes(self, rows: Rows) -> None:
        """Rows that the next tier should hold too, as soon as there is time."""
        if len(self._r.tiers) > 1 and len(rows):
            self.backlog.append(rows)

    def pump(self) -> None:
        """Starts writes from the backlog while fewer than the bound are in flight."""
        blocks = self._r.blocks
        while self.backlog and self.writes_in_flight < _WRITES_IN_FLIGHT:
            rows = self.backlog.popleft()
            todo = (blocks.state[rows] == LIVE) & (blocks.slot[0, rows] >= 0) & (blocks.moving[rows] == 0)
            rows = rows[todo & (blocks.slot[1, rows] < 0)]
            if not len(rows):
                continue
            extents = self._r.tiers[0].extents
            slots = blocks.slot[0, rows]
            size = extents.class_size(slots[:1])
            # Since it was queued, a row may have been given to a block of another size.
            alike = extents.are_of(size, slots)
            if not alike.all():
                self.backlog.appendleft(rows[~alike])
                rows = rows[alike]
            n = _chunk(size)
            if len(rows) > n:
                self.backlog.appendleft(rows[n:])
            rest = rows[:n][~self._write(0, size, rows[:n])]
            if not len(rest):
                continue
            below = self._r.tiers[1]
            if below.takes_writes and (below.growing or below.moving):
                self.backlog.appendleft(rest)
                return
            self._r.counters["unwritten_blocks"] += len(rest)

    def _write(self, tier: int, slot_bytes: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Starts copying rows from `tier` to the next one, the first ones first, within the bounds."""
        started = np.zeros(len(rows), np.bool_)
        target = tier + 1
        if target >= len(self._r.tiers) or not self._r.tiers[target].takes_writes:
            return started
        room = _chunk(slot_bytes) * (_WRITES_IN_FLIGHT + 2 - self.writes_in_flight)
        todo = np.flatnonzero(self._r.blocks.moving[rows] == 0)[: max(room, 0)]
        if not len(todo):
            return started
        todo = todo[: self._r.make_room(target, slot_bytes, len(todo), self.demote, patient=True)]
        if len(todo):
            slots = self._r.tiers[target].extents.take(slot_bytes, len(todo))
            self._start(tier, target, slot_bytes, rows[todo], slots, WRITING)
            started[todo] = True
        return started

    def _start(self, source: int, target: int, size: int, rows: Rows, slots: Slots, flag: int) -> None:
        r = self._r
        chunk = _chunk(size)
        for at in range(0, len(rows), chunk):
            part, to = rows[at : at + chunk], slots[at : at + chunk]
            source_slots = r.blocks.slot[source, part].astype(np.int64)
            r.tiers[source].extents.hold(source_slots)
            r.blocks.moving[part] |= flag
            self._last += 1
            alive = np.ones(len(part), np.bool_)
            who = r.identity(part)
            self.under_way[self._last] = Transfer(source, target, size, part, source_slots, to, who, alive)
            self.writes_in_flight += flag == WRITING
            self.reads_in_flight += flag == PROMOTING
            device = r.tiers[max(source, target)]
            device.quiet_since = device.quiet_since if device.moving else self._now
            device.moving += 1
            parents = r.blocks.parent[part].tolist()
            r.out.append(
                Copy(
                    self._last,
                    source,
                    target,
                    size,
                    who,
                    [r.blocks.key(p) if p >= 0 else b"" for p in parents],
                    r.where(source, source_slots),
                    r.where(target, to),
                    r.tiers[target].extents.version[to],
                )
            )

    # -- ending

    def cancel(self, rows: Rows) -> None:
        """These rows are about to be given up: copies of them must not arrive, nor leave a record."""
        if self._r.blocks.moving[rows].any():
            for t in self.under_way.values():
                gone = t.alive & np.isin(t.rows, rows)
                t.alive &= ~gone
                if t.target > t.source and gone.any():
                    where = self._r.where(t.target, t.target_slots[gone])
                    self._r.out.append(Drop(t.target, t.slot_bytes, t.identity.only(gone), where))
            self._r.blocks.moving[rows] = 0

    def finish(self, event: CopyDone) -> Arrived:
        """Takes in how a copy ended."""
        t = self.under_way.pop(event.transfer)
        r, blocks = self._r, self._r.blocks
        writing = t.target > t.source
        self.writes_in_flight -= writing
        self.reads_in_flight -= not writing
        arrived = t.alive & (event.results == OK)
        good, slots = t.rows[arrived], t.target_slots[arrived]
        demoted = good[(blocks.moving[good] & DEMOTE) > 0]
        blocks.moving[t.rows[t.alive]] &= 0xFF & ~(WRITING | DEMOTE if writing else PROMOTING)
        r.place(t.target, t.slot_bytes, good, slots)
        r.tiers[t.target].extents.release(t.target_slots)
        r.tiers[t.source].extents.release(t.source_slots)
        if r.tiers[t.target].spec.table and len(good):
            r.stamp(t.target, t.slot_bytes, good, slots)
        r.counters["written_blocks" if writing else "promoted_blocks"] += len(good)
        r.counters["written_bytes" if writing else "promoted_bytes"] += len(good) * t.slot_bytes
        self._judge_device(t, event.results[t.alive])
        corrupt = t.rows[t.alive & (event.results == CORRUPT)]
        self.quarantine(t.source, t.slot_bytes, corrupt)
        demoted = demoted[r.idle(t.source, demoted)]
        r.give_up(t.source, t.slot_bytes, demoted)
        return Arrived(t.target, good, t.rows[t.alive & ~arrived])

    def quarantine(self, tier: int, slot_bytes: int, rows: Rows) -> None:
        """These copies are known to be bad: dropped, and their slots never used again."""
        rows = rows[self._r.blocks.slot[tier, rows] >= 0]
        if len(rows):
            self._r.counters["quarantined_blocks"] += len(rows)
            self.cancel(rows)
            self._r.give_up(tier, slot_bytes, rows, retire=True)

    def _judge_device(self, t: Transfer, results: npt.NDArray[np.uint8]) -> None:
        """Lifts a fence; closes a lower tier for writing for a while when writes keep failing."""
        device = self._r.tiers[max(t.source, t.target)]
        device.moving -= 1
        device.quiet_since, device.fenced = self._now, False
        failed = int((results != OK).sum())
        self._r.counters["failed_blocks"] += failed
        if not t.target > t.source or not len(results):
            return
        device.failures = device.failures + failed if failed == len(results) else 0
        if device.failures >= _FAILURES_TO_CLOSE:
            device.closed_until, device.failures = self._now + _CLOSED_FOR_S, 0
            self._r.counters["tier_closed"] += 1

    # -- time

    def at(self, now: float) -> None:
        """It is `now`."""
        self._now = now

    def fences_at(self) -> float:
        """When a device that stays quiet from now on is fenced; infinity if none is at work."""
        quiet = [t.quiet_since for t in self._r.tiers if t.moving and not t.fenced]
        return min(quiet) + _QUIET_FOR_S if quiet else math.inf

    def fence(self) -> None:
        """Puts devices out of reach that are at work and have been quiet for too long."""
        for device in self._r.tiers:
            if device.moving and not device.fenced and self._now >= device.quiet_since + _QUIET_FOR_S:
                device.fenced = True
                self._r.counters["tier_fenced"] += 1


def _chunk(slot_bytes: int) -> int:
    """Blocks in one copy: enough to keep a device busy, few enough that the first ones arrive soon."""
    return min(_CHUNK_BLOCKS, max(1, _CHUNK_BYTES // slot_bytes))
