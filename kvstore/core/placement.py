"""Requests decided: `handle(event, now)` changes state and returns what the shell must do.

A reservation holds slots that nobody can read; commit makes them readable. A lease holds slots that nobody
can reuse. Whoever waits (for a promotion, for room) waits with a deadline and is answered exactly once.

Not covered: bytes, sockets, files, clocks. `now` is the shell's monotonic clock in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.actions import (
    DENIED,
    GRANTED,
    PENDING,
    PRESENT,
    Action,
    Answer,
    Deny,
    Grant,
    Probe,
    Room,
    Stamp,
)
from kvstore.core.blocks import FREE, HOLE, LIVE, RESERVED, Picked, Rows
from kvstore.core.check import check
from kvstore.core.extents import Slots
from kvstore.core.keys import Keys
from kvstore.core.residency import PROMOTING, Residency, TierSpec
from kvstore.core.transfers import Arrived, Transfers
from kvstore.types import slot_bytes

_NONE = np.empty(0, np.int64)
_RETRIES = 8


@dataclass(slots=True)
class Lease:
    """Slots of tier 0 that a reader may look at."""

    client: int
    slots: Picked


@dataclass(slots=True)
class Reservation:
    """Slots of tier 0 that a writer may fill, and the rows they will belong to."""

    client: int
    namespace: int
    slot_bytes: int
    rows: Rows
    slots: Slots
    alive: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Waiter:
    """An Acquire whose blocks are still on their way up. slot -1: not there yet."""

    event: ev.Acquire
    slot_bytes: int
    rows: Rows
    slots: Slots
    tiers: npt.NDArray[np.uint8]
    missing: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Limits:
    """What one client or one call may ask for."""

    batch_keys: int = 4096
    reserve_keys: int = 128
    leases_per_client: int = 1024
    namespaces: int = 4096


class Placement:
    """Where every block of one node is. `specs[0]` is the tier that clients read and write."""

    def __init__(
        self,
        specs: Sequence[TierSpec],
        *,
        max_blocks: int,
        seed: int = 0,
        policy: str = "lru",
        write_policy: str = "write_through",
        limits: Limits | None = None,
    ) -> None:
        self.residency = Residency(specs, max_blocks, seed, policy)
        self.transfers = Transfers(self.residency)
        self.limits = limits or Limits()
        self.namespaces: dict[int, int] = {}
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.waiting: dict[int, Waiter] = {}
        self.stalled: dict[int, ev.Acquire | ev.Reserve] = {}
        self.probes: dict[int, tuple[Rows, Slots, int]] = {}
        self._write_through = write_policy == "write_through"
        self._writers: Counter[int] = Counter()
        self._wanted_by: dict[int, list[int]] = {}
        self._held: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._flushing = False
        self._last = 0
        self._hit_names = [f"hit_blocks_{s.tier.name.lower()}" for s in specs]
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.OpenNamespace: self._open,
            ev.Reserve: self._reserve,
            ev.Commit: self._commit,
            ev.Abort: self._abort,
            ev.Acquire: self._acquire,
            ev.Release: self._release,
            ev.Lookup: self._lookup,
            ev.Prefetch: self._prefetch,
            ev.Pin: self._pin,
            ev.Unpin: self._unpin,
            ev.Invalidate: self._invalidate,
            ev.Suspect: self._suspect,
            ev.ClientLost: self._client_lost,
            ev.CopyDone: self._copy_done,
            ev.ProbeDone: self._probe_done,
            ev.ExtentReady: self._extent_ready,
            ev.ExtentsEnd: self._extents_end,
            ev.Restore: self._restore,
            ev.Flush: self._flush,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Applies one event at time `now` (s, never going back) and returns the actions, in order."""
        self.residency.settle()
        self._handlers[type(event)](event, now)
        actions, self.residency.out = self.residency.out, []
        return actions

    def next_wakeup(self) -> float | None:
        """When a Tick is due at the latest, or None."""
        r = self.residency
        wake = self._deadlines[0][0] if self._deadlines else math.inf
        for tier in r.tiers:
            if tier.closed_until:
                wake = min(wake, tier.closed_until)
        if r.pins:
            wake = min(wake, *r.pins.values())
        return None if wake == math.inf else wake

    @property
    def counters(self) -> Counter[str]:
        """What has happened since the start, by name."""
        return self.residency.counters

    def check(self) -> None:
        """Asserts every invariant; costs time proportional to the state. For tests and debugging."""
        check(self)

    # -- helpers

    def _say(self, action: Action) -> None:
        self.residency.out.append(action)

    def _slot_bytes(self, event: Any) -> int:
        """The slot size of the event's namespace; 0 (and a Deny) if the request cannot be served."""
        size = self.namespaces.get(event.namespace)
        if size is None:
            hint = "open the namespace on this connection first"
            self._say(Deny(event.request, f"unknown namespace {event.namespace}", hint))
            return 0
        if event.keys.n > self.limits.batch_keys:
            hint = f"at most {self.limits.batch_keys} keys a call"
            self._say(Deny(event.request, f"{event.keys.n} keys in one call", hint))
            return 0
        return slot_bytes(size)

    def _hold_id(self, client: int) -> int:
        """A new lease number for a client, or 0 beyond its limit."""
        held = self._held.setdefault(client, set())
        if len(held) >= self.limits.leases_per_client:
            return 0
        self._last += 1
        held.add(self._last)
        return self._last

    # -- namespaces, look-ups

    def _open(self, event: ev.OpenNamespace, now: float) -> None:
        top = self.residency.tiers[0].extents
        size = slot_bytes(event.block_bytes)
        if event.namespace not in self.namespaces and len(self.namespaces) >= self.limits.namespaces:
            self._say(Deny(event.request, f"{len(self.namespaces)} namespaces are open", "use fewer layouts"))
        elif not top.geometry(size).slots:
            why = f"a block of {event.block_bytes} bytes does not fit into an extent of {top.extent_bytes}"
            self._say(Deny(event.request, why, "raise dram.limit"))
        else:
            self.namespaces[event.namespace] = event.block_bytes
            self._say(Answer(event.request, event.namespace))

    def _lookup(self, event: ev.Lookup, now: float) -> None:
        if self._slot_bytes(event):
            # While parents may be missing or being written, every key has to be looked at.
            gaps = self.residency.holes[event.namespace] or self._writers[event.namespace]
            find = self.residency.count_prefix if gaps else self.residency.search_prefix
            self._say(Answer(event.request, find(event.namespace, event.keys)))

    # -- reading

    def _acquire(self, event: ev.Acquire, now: float) -> None:
        size = self._slot_bytes(event)
        if not size:
            return None
        r = self.residency
        run = r.resident_run(event.namespace, event.keys)
        if run is not None:
            rows, slots = run
            r.touch(rows, size)
            r.tiers[0].extents.hold(slots)
            return self._grant(event, size, slots, event.keys.n, None)
        return self._acquire_some(event, size, now)

    def _acquire_some(self, event: ev.Acquire, size: int, now: float) -> None:
        """The long way: part of it is missing, in a lower tier, or scattered."""
        r = self.residency
        rows = r.prefix(event.namespace, event.keys)
        slots = r.blocks.slot[0, rows].astype(np.int64)
        if len(rows):
            r.touch(rows, size)
        if (slots < 0).any():
            return self._promote_for(event, size, rows, slots, now)
        r.tiers[0].extents.hold(slots)
        return self._grant(event, size, slots, len(rows), None)

    def _promote_for(self, event: ev.Acquire, size: int, rows: Rows, slots: Slots, now: float) -> None:
        r = self.residency
        tiers = np.full(len(rows), r.tiers[0].spec.tier, np.uint8)
        r.tiers[0].extents.hold(slots[slots >= 0])
        absent = slots < 0
        coming = (r.blocks.moving[rows] & PROMOTING) > 0
        lower = np.array([t.spec.tier for t in r.tiers], np.uint8)
        tiers[absent] = lower[np.argmax(r.blocks.slot[:, rows[absent]] >= 0, axis=0)]
        wanted = np.flatnonzero(absent & ~coming)
        cut = len(rows)
        if len(wanted):
            n = self.transfers.promote(size, rows[wanted])
            if n < len(wanted) and self._room_is_coming(event, now):
                r.tiers[0].extents.release(slots[slots >= 0])
                return self._stall(event)
            cut = cut if n == len(wanted) else int(wanted[n])
        beyond = slots[cut:]
        r.tiers[0].extents.release(beyond[beyond >= 0])
        waiter = Waiter(event, size, rows[:cut], slots[:cut], tiers[:cut])
        waiter.missing = set(rows[:cut][slots[:cut] < 0].tolist())
        if not waiter.missing or event.deadline <= now:
            return self._answer_waiter(waiter)
        self.waiting[event.request] = waiter
        for row in waiter.missing:
            self._wanted_by.setdefault(row, []).append(event.request)
        heapq.heappush(self._deadlines, (event.deadline, event.request))
        return None

    def _room_is_coming(self, event: ev.Acquire | ev.Reserve, now: float) -> bool:
        """Whether to wait for slots rather than do with less: not past the deadline, not for nothing."""
        t = self.transfers
        moving = t.writes_in_flight > 0 or t.reads_in_flight > 0
        return event.deadline > now and (moving or self.residency.tiers[0].growing)

    def _stall(self, event: ev.Acquire | ev.Reserve) -> None:
        """Holds nothing, and tries the whole request again when something has got free."""
        self.stalled[event.request] = event
        heapq.heappush(self._deadlines, (event.deadline, event.request))

    def _arrived(self, arrived: Arrived) -> None:
        """Tells those who wait for promotions."""
        slot = self.residency.blocks.slot[0]
        extents = self.residency.tiers[0].extents
        done: dict[int, None] = {}
        for row, ok in [(r, True) for r in arrived.good.tolist()] + [
            (r, False) for r in arrived.bad.tolist()
        ]:
            for request in self._wanted_by.pop(row, ()):
                waiter = self.waiting.get(request)
                if waiter is None or row not in waiter.missing:
                    continue
                waiter.missing.discard(row)
                if ok:
                    at = waiter.rows == row
                    waiter.slots[at] = slot[row]
                    extents.hold(waiter.slots[at])
                if not waiter.missing:
                    done[request] = None
        for request in done:
            self._answer_waiter(self.waiting.pop(request))

    def _answer_waiter(self, waiter: Waiter) -> None:
        """Grants the leading blocks that are there, lets go of the rest."""
        for row in waiter.missing:
            others = [x for x in self._wanted_by.pop(row, ()) if x != waiter.event.request]
            if others:
                self._wanted_by[row] = others
        there = waiter.slots >= 0
        n = len(there) if there.all() else int(there.argmin())
        rest = waiter.slots[n:]
        self.residency.tiers[0].extents.release(rest[rest >= 0])
        self.counters["late_blocks"] += len(there) - n
        self._grant(waiter.event, waiter.slot_bytes, waiter.slots[:n], n, waiter.tiers[:n])

    def _grant(
        self, event: ev.Acquire, size: int, slots: Picked, n: int, tiers: npt.NDArray[np.uint8] | None
    ) -> None:
        """Answers an Acquire with n slots on which references are held. `tiers` None: all in tier 0."""
        r = self.residency
        extents = r.tiers[0].extents
        lease = self._hold_id(event.client) if n else 0
        if n and not lease:
            extents.release(slots)
            return self._deny_hold(event.request)
        if lease:
            self.leases[lease] = Lease(event.client, slots)
        slots_told = extents.record[slots]
        if tiers is None:
            r.counters[self._hit_names[0]] += n
        else:
            slots_told["tier"] = tiers
            for state, name in zip(r.tiers, self._hit_names, strict=True):
                r.counters[name] += int((tiers == state.spec.tier).sum())
        r.counters["missed_blocks"] += event.keys.n - n
        r.counters["served_bytes"] += n * self.namespaces[event.namespace]
        self._say(Grant(event.request, lease, size, slots_told))
        return None

    def _deny_hold(self, request: int) -> None:
        hint = f"at most {self.limits.leases_per_client} leases and reservations a connection"
        self._say(Deny(request, "too many leases", hint))

    def _release(self, event: ev.Release, now: float) -> None:
        lease = self.leases.get(event.lease)
        if lease is not None and lease.client == event.client:
            del self.leases[event.lease]
            self._held[event.client].discard(event.lease)
            self.residency.tiers[0].extents.release(lease.slots)
            self._go_on(now)

    def _prefetch(self, event: ev.Prefetch, now: float) -> None:
        size = self._slot_bytes(event)
        if not size:
            return
        r = self.residency
        rows = r.prefix(event.namespace, event.keys)
        absent = rows[(r.blocks.slot[0, rows] < 0) & (r.blocks.moving[rows] & PROMOTING == 0)]
        there = rows[r.blocks.slot[0, rows] >= 0]
        pool = r.tiers[0].extents.classes.get(size)
        # Nobody waits for a prefetch: it may take an eighth of the tier, no more.
        bound = max(1, pool.total // 8) if pool else len(absent)
        held = r.blocks.slot[0, there].astype(np.int64)
        r.tiers[0].extents.hold(held)
        n = self.transfers.promote(size, absent[:bound])
        r.tiers[0].extents.release(held)
        self._say(Answer(event.request, len(rows) - len(absent) + n))

    # -- writing

    def _reserve(self, event: ev.Reserve, now: float) -> None:
        size = self._slot_bytes(event)
        if not size:
            return None
        r, keys = self.residency, event.keys
        if keys.n > self.limits.reserve_keys:
            hint = f"at most {self.limits.reserve_keys} keys a reservation"
            return self._say(Deny(event.request, f"{keys.n} keys in one reservation", hint))
        if len({keys[i] for i in range(keys.n)}) != keys.n:
            return self._say(Deny(event.request, "a key occurs twice in one call", "keys are one chain"))
        parent = -1
        if event.parent:
            parent = r.index.find_one(event.namespace, event.parent)
            if parent < 0 or r.blocks.state[parent] not in (LIVE, RESERVED):
                return self._say(
                    Deny(event.request, "the parent is not stored", "store the chain from its start")
                )
        rows = r.index.find(event.namespace, keys)
        state = np.where(rows >= 0, r.blocks.state[rows], FREE)
        present = rows[state == LIVE]
        if len(present):
            r.touch(present, size)
        want = np.flatnonzero((state == FREE) | (state == HOLE))
        if len(want) and not self._held_room(event.client):
            return self._deny_hold(event.request)
        n = self._room_beside(size, len(want), rows, parent)
        if n < len(want) and self._room_is_coming(event, now):
            self._stall(event)
        else:
            self._give_room(event, size, rows, state, want[:n], parent)
        r.prune(rows)
        return None

    def _held_room(self, client: int) -> bool:
        return len(self._held.get(client, ())) < self.limits.leases_per_client

    def _room_beside(self, size: int, n: int, rows: Rows, parent: int) -> int:
        """Makes room for n blocks without evicting the chain that they will hang on."""
        r = self.residency
        guarded = np.unique(np.concatenate((rows[rows >= 0], [parent] if parent >= 0 else _NONE)))
        r.blocks.children[guarded] += 1
        r.make_rows(int((rows < 0).sum()), self.transfers.demote)
        n = r.make_room(0, size, n, self.transfers.demote)
        r.blocks.children[guarded] -= 1
        return n

    def _give_room(
        self, event: ev.Reserve, size: int, rows: Rows, state: npt.NDArray[np.uint8], want: Rows, parent: int
    ) -> None:
        r = self.residency
        new = want[state[want] == FREE]
        taken = r.blocks.take(event.namespace, event.keys, new)
        if len(taken) < len(new):
            want = want[want < new[len(taken)]]
            self.counters["denied_max_blocks"] += 1
            r.blocks.give_back(taken[len(want[state[want] == FREE]) :])
            new = want[state[want] == FREE]
            taken = taken[: len(new)]
        rows[new] = taken
        if len(taken):
            r.index.add(taken)
        filled = rows[want]
        holes = filled[r.blocks.state[filled] == HOLE]
        r.holes[event.namespace] -= len(holes)
        r.blocks.state[filled] = RESERVED
        before = np.concatenate(([parent], rows))[want]
        orphan = (r.blocks.parent[filled] < 0) & ~r.would_loop(filled, before)
        r.link(filled[orphan], before[orphan])
        status = np.full(event.keys.n, DENIED, np.uint8)
        status[state == LIVE] = PRESENT
        status[state == RESERVED] = PENDING
        status[want] = GRANTED
        denied = int((status == DENIED).sum())
        r.counters["denied_blocks"] += denied
        r.counters["present_blocks"] += int((status == PRESENT).sum())
        lease, slots = 0, _NONE
        if len(want):
            lease = self._hold_id(event.client)
            slots = r.tiers[0].extents.take(size, len(want))
            alive = np.ones(len(want), np.bool_)
            self.reservations[lease] = Reservation(event.client, event.namespace, size, filled, slots, alive)
            self._writers[event.namespace] += 1
        why = "no room" if denied else ""
        self._say(Room(event.request, lease, size, r.tiers[0].extents.record[slots], status, why))

    def _commit(self, event: ev.Commit, now: float) -> None:
        reservation = self._take_reservation(event.client, event.lease)
        if reservation is None:
            hint = "commit once, on the connection that reserved"
            return self._say(Deny(event.request, f"no reservation {event.lease}", hint))
        n = len(reservation.rows)
        if len(event.checksums) != n or len(event.written) != n:
            self._give_up(reservation, np.ones(n, np.bool_), now)
            return self._say(Deny(event.request, f"{len(event.checksums)} checksums for {n} blocks"))
        r = self.residency
        ok = event.written & reservation.alive
        rows, slots = reservation.rows[ok], reservation.slots[ok]
        r.blocks.checksum[rows] = event.checksums[ok]
        r.blocks.state[rows] = LIVE
        r.place(0, reservation.slot_bytes, rows, slots)
        r.tiers[0].extents.release(slots)
        if len(rows):
            r.touch(rows, reservation.slot_bytes)
            version = r.tiers[0].extents.version[slots]
            self._say(Stamp(0, reservation.slot_bytes, r.identity(rows), r.where(0, slots), version))
            if self._write_through:
                self.transfers.queue_writes(rows)
        r.counters["stored_blocks"] += len(rows)
        self._say(Answer(event.request, len(rows)))
        self._give_up(reservation, ~ok, now)
        return None

    def _take_reservation(self, client: int, lease: int) -> Reservation | None:
        reservation = self.reservations.get(lease)
        if reservation is None or reservation.client != client:
            return None
        self._held[client].discard(lease)
        self._writers[reservation.namespace] -= 1
        return self.reservations.pop(lease)

    def _give_up(self, reservation: Reservation, which: npt.NDArray[np.bool_], now: float) -> None:
        """These blocks of a reservation will not be written."""
        self.residency.tiers[0].extents.release(reservation.slots[which])
        lost = reservation.rows[which & reservation.alive]
        if len(lost):
            self.residency.vanish(lost)
        self._go_on(now)

    def _abort(self, event: ev.Abort, now: float) -> None:
        reservation = self._take_reservation(event.client, event.lease)
        if reservation is not None:
            self._give_up(reservation, np.ones(len(reservation.rows), np.bool_), now)

    # -- keeping and forgetting

    def _pin(self, event: ev.Pin, now: float) -> None:
        size = self._slot_bytes(event)
        if not size:
            return
        r = self.residency
        # Half of the smallest tier that must hold them stays free to move.
        bound = min(t.spec.limit_bytes for t in r.tiers) // (2 * size)
        rows = r.prefix(event.namespace, event.keys)
        n = 0
        for row in rows.tolist():
            if row not in r.pins and len(r.pins) >= bound:
                break
            r.pin(row, max(event.until, r.pins.get(row, 0.0)))
            n += 1
        self._say(Answer(event.request, n))

    def _unpin(self, event: ev.Unpin, now: float) -> None:
        if self._slot_bytes(event):
            rows = self.residency.prefix(event.namespace, event.keys)
            pinned = rows[self.residency.blocks.pinned[rows]].tolist()
            for row in pinned:
                self.residency.unpin(row)
            self._say(Answer(event.request, len(pinned)))

    def _invalidate(self, event: ev.Invalidate, now: float) -> None:
        size = self._slot_bytes(event)
        if not size:
            return
        r = self.residency
        rows = np.unique(r.index.find(event.namespace, event.keys))
        rows = rows[rows >= 0]
        state = r.blocks.state[rows]
        for reservation in self.reservations.values():
            hit = np.isin(reservation.rows, rows[state == RESERVED]) & reservation.alive
            if hit.any():
                reservation.alive[hit] = False
                r.vanish(reservation.rows[hit])
        live = rows[state == LIVE]
        self._forget(live, size)
        r.counters["invalidated_blocks"] += len(live)
        self._say(Answer(event.request, len(live)))
        self._go_on(now)

    def _forget(self, rows: Rows, size: int) -> None:
        r = self.residency
        self.transfers.cancel(rows)
        self._arrived(Arrived(0, _NONE, rows))
        held = [r.blocks.slot[tier, rows] >= 0 for tier in range(len(r.tiers))]
        for tier in range(len(r.tiers)):
            r.give_up(tier, size, rows[held[tier]])

    def _suspect(self, event: ev.Suspect, now: float) -> None:
        size = self._slot_bytes(event)
        if not size:
            return
        r = self.residency
        rows = r.index.find(event.namespace, event.keys)
        rows = np.unique(rows[rows >= 0])
        rows = rows[(r.blocks.state[rows] == LIVE) & (r.blocks.slot[0, rows] >= 0)]
        if len(rows) and len(self.probes) < 64:
            slots = r.blocks.slot[0, rows].astype(np.int64)
            r.tiers[0].extents.hold(slots)
            self._last += 1
            self.probes[self._last] = (rows, slots, size)
            self._say(Probe(self._last, 0, size, r.identity(rows), r.where(0, slots)))

    def _probe_done(self, event: ev.ProbeDone, now: float) -> None:
        rows, slots, size = self.probes.pop(event.probe)
        r = self.residency
        bad = ~event.good & (r.tiers[0].extents.owner[slots] == rows)
        r.tiers[0].extents.release(slots)
        self.transfers.quarantine(0, size, rows[bad])
        self._go_on(now)

    # -- results, time, start-up

    def _copy_done(self, event: ev.CopyDone, now: float) -> None:
        arrived = self.transfers.finish(event, now)
        if arrived.target == 0:
            self._arrived(arrived)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Something got free: writes from the backlog, and those who wait for room, oldest first."""
        self.transfers.pump()
        for request in list(islice(self.stalled, _RETRIES)):
            self._try_again(self.stalled.pop(request), now)

    def _try_again(self, event: ev.Acquire | ev.Reserve, now: float) -> None:
        if isinstance(event, ev.Acquire):
            self._acquire(event, now)
        else:
            self._reserve(event, now)

    def _client_lost(self, event: ev.ClientLost, now: float) -> None:
        for request in [k for k, w in self.waiting.items() if w.event.client == event.client]:
            self._answer_waiter(self.waiting.pop(request))
        self.stalled = {k: s for k, s in self.stalled.items() if s.client != event.client}
        for lease in sorted(self._held.get(event.client, ())):
            if lease in self.leases:
                self.residency.tiers[0].extents.release(self.leases.pop(lease).slots)
            else:
                self._abort(ev.Abort(event.client, lease), now)
        self._held.pop(event.client, None)
        self._go_on(now)

    def _tick(self, event: ev.Tick, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request = heapq.heappop(self._deadlines)
            if request in self.waiting:
                self._answer_waiter(self.waiting.pop(request))
            elif request in self.stalled:
                self._try_again(self.stalled.pop(request), now)
        for row in [r for r, until in self.residency.pins.items() if until <= now]:
            self.residency.unpin(row)
        for tier in self.residency.tiers:
            if tier.closed_until and tier.closed_until <= now:
                tier.closed_until = 0.0
        self._go_on(now)

    def _extent_ready(self, event: ev.ExtentReady, now: float) -> None:
        extents = self.residency.tiers[event.tier].extents
        extents.add(event.extent)
        if event.slot_bytes:
            extents.assign(event.slot_bytes, event.extent)
        self._go_on(now)

    def _extents_end(self, event: ev.ExtentsEnd, now: float) -> None:
        self.residency.tiers[event.tier].growing = False
        self._go_on(now)

    def _flush(self, event: ev.Flush, now: float) -> None:
        r = self.residency
        if len(r.tiers) > 1:
            alone = (r.blocks.state == LIVE) & (r.blocks.slot[0] >= 0) & (r.blocks.slot[1] < 0)
            by_size: dict[int, list[int]] = {}
            for row in np.flatnonzero(alone).tolist():
                size = slot_bytes(self.namespaces[int(r.blocks.namespace[row])])
                by_size.setdefault(size, []).append(row)
            self.transfers.backlog.clear()
            for rows in by_size.values():
                self.transfers.queue_writes(np.array(rows, np.int64))
            self.transfers.pump()

    def _restore(self, event: ev.Restore, now: float) -> None:
        r = self.residency
        extents = r.tiers[event.tier].extents
        event = event.only(extents.has(event.extent))
        group = event.namespace.astype(np.int64) << 8 | event.key_bytes
        for code in np.unique(group).tolist():
            namespace, size = code >> 8, code & 0xFF
            which = np.flatnonzero(group == code)
            keys = Keys(np.ascontiguousarray(event.keys[which, :size]).tobytes(), size)
            slots = extents.slots_at(
                event.extent[which].astype(np.int64), event.index[which].astype(np.int64)
            )
            rows = r.restore(event.tier, namespace, keys, slots)
            which, slots = which[: len(rows)], slots[: len(rows)]
            r.blocks.checksum[rows] = event.checksum[which]
            room = slot_bytes(self.namespaces[namespace])
            extents.claim(room, slots, rows, event.version[which].astype(np.int64))
            r.policy(event.tier, room).insert(rows)
        for code in np.unique(group).tolist():
            self._restore_links(event, code >> 8, np.flatnonzero(group == code), code & 0xFF)
        r.counters["restored_blocks"] += len(group)

    def _restore_links(self, event: ev.Restore, namespace: int, which: Rows, size: int) -> None:
        r = self.residency
        which = which[event.parent_bytes[which] > 0]
        for length in np.unique(event.parent_bytes[which]).tolist():
            some = which[event.parent_bytes[which] == length]
            keys = Keys(np.ascontiguousarray(event.keys[some, :size]).tobytes(), size)
            rows = r.index.find(namespace, keys)
            some, rows = some[rows >= 0], rows[rows >= 0]
            parents = Keys(np.ascontiguousarray(event.parents[some, :length]).tobytes(), length)
            r.link(rows, r.adopt(namespace, parents))
