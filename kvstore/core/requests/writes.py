"""Requests that write: room for new blocks beside what their chain already has, then commit or abort."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.actions import (
    DENIED,
    GRANTED,
    NO_ROOM,
    PENDING,
    PRESENT,
    WORTH_LESS,
    Answer,
    Deny,
    Reserved,
)
from kvstore.core.blocks.block_table import FREE, HOLE, LIVE, RESERVED, Rows
from kvstore.core.requests.invalidation import Invalidation
from kvstore.core.requests.leases import NONE, LeaseTable, Reservation, number_on_connection
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.namespace import Namespace


class Writes:
    """Reserve, commit, abort."""

    def __init__(self, leases: LeaseTable, invalidation: Invalidation, write_through: bool) -> None:
        self._leases = leases
        self._invalidation = invalidation
        self._r = leases.residency
        self._eviction = leases.eviction
        self._transfers = leases.transfers
        self.write_through = write_through

    def reserve(self, event: ev.Reserve, now: float) -> None:
        space = self._leases.space(event)
        if space is None:
            return None
        r, keys = self._r, event.keys
        if keys.n > self._leases.limits.reserve_keys:
            hint = f"at most {self._leases.limits.reserve_keys} keys a reservation"
            return self._leases.say(Deny(event.request, f"{keys.n} keys in one reservation", hint))
        if len({keys[i] for i in range(keys.n)}) != keys.n:
            return self._leases.say(
                Deny(event.request, "a key occurs twice in one call", "keys are one chain")
            )
        if space.has_ttl:
            self._drop_expired(event, now)
        parent = -1
        if event.parent:
            parent = r.index.find_one(event.namespace, event.parent)
            if parent < 0 or r.blocks.state[parent] not in (LIVE, RESERVED):
                return self._leases.say(
                    Deny(event.request, "the parent is not stored", "store the chain from its start")
                )
        rows = r.index.find(event.namespace, keys)
        state = np.where(rows >= 0, r.blocks.state[rows], FREE)
        present = rows[state == LIVE]
        if len(present):
            r.touch(present, space)
        want = np.flatnonzero((state == FREE) | (state == HOLE))
        if len(want) and not self._leases.may_hold(event.client):
            return self._leases.deny_hold(event.request)
        before = np.concatenate(([parent], rows))[:-1]
        tier = self._leases.tier_for(event, space, space.tenant)
        if tier != event.tier:
            event = replace(event, tier=tier)
        earn = self._earn(event, space, state, want, before, now)
        n = self._room_beside(event, space, len(want), rows, parent, earn)
        if n < len(want) and event.tier:
            # A chain that does not fit into GPU memory goes to DRAM as a whole.
            event = replace(event, tier=0)
            earn = self._earn(event, space, state, want, before, now)
            n = self._room_beside(event, space, len(want), rows, parent, earn)
        if n < len(want) and self._leases.room_is_coming(event, space.tenant, now):
            self._leases.stall(event, space.tenant)
        else:
            why = NO_ROOM
            if n < len(want) and earn < math.inf:
                self._pass_by(event, space, want[n:], before, now)
                if self._eviction.has_idle(event.tier, space.pools[event.tier]):
                    why = WORTH_LESS
            self._give_room(event, space, rows, state, want[:n], parent, why)
        r.chains.prune(np.unique(np.append(rows, parent)))
        return None

    def _drop_expired(self, event: ev.Reserve, now: float) -> None:
        """Drops the expired blocks that a request names, so that it finds what a look-up finds.

        Readers keep the slots on which they have leases.
        """
        blocks, index = self._r.blocks, self._r.index
        rows = index.find(event.namespace, event.keys)
        if event.parent:
            rows = np.append(rows, index.find_one(event.namespace, event.parent))
        rows = np.unique(rows[rows >= 0])
        rows = rows[(blocks.state[rows] == LIVE) & blocks.expired(rows, now)]
        if len(rows):
            self._r.counters["expired_blocks"] += self._invalidation.forget(rows, DecisionKind.EXPIRED)

    def _earn(
        self,
        event: ev.Reserve,
        space: Namespace,
        state: npt.NDArray[np.uint8],
        want: Rows,
        before: Rows,
        now: float,
    ) -> float:
        """What the blocks that are wanted earn a second (see Reuse): to be stored they must be worth it.

        All are where nobody weighs that, and where others hang on one of them.
        """
        r, pool = self._r, space.pools[event.tier]
        if not len(want) or event.loading or (state == HOLE).any():
            return math.inf
        if not self._eviction.weighs(event.tier, pool):
            return math.inf
        first = int(want[0])
        words, parent = event.keys.words[first], int(before[first])
        return r.reuse.density_if_stored(words, event.namespace, parent, len(want), space.tenant, now)

    def _pass_by(self, event: ev.Reserve, space: Namespace, which: Rows, before: Rows, now: float) -> None:
        """These keys are not stored, but they have been seen: if they come again they are worth more."""
        blocks = self._r.blocks
        rows = blocks.take(event.namespace, event.keys, which)
        if len(rows):
            # As if stored: a new block takes after what it continues, also if that came before.
            blocks.parent[rows] = np.append(before[which[0]], rows[:-1])
            self._r.reuse.passed_by(rows, space.tenant, now)
            blocks.give_back(rows)

    def _room_beside(
        self, event: ev.Reserve, space: Namespace, n: int, rows: Rows, parent: int, earn: float
    ) -> int:
        """Makes room for n blocks without evicting the chain that they will hang on."""
        r = self._r
        guarded = np.unique(np.concatenate((rows[rows >= 0], [parent] if parent >= 0 else NONE)))
        r.blocks.children[guarded] += 1
        self._eviction.make_rows(int((rows < 0).sum()), space.tenant)
        patient = event.deadline > r.now
        n = self._eviction.make_room(event.tier, space.pools[event.tier], n, patient, earn)
        r.blocks.children[guarded] -= 1
        return n

    def _give_room(
        self,
        event: ev.Reserve,
        space: Namespace,
        rows: Rows,
        state: npt.NDArray[np.uint8],
        want: Rows,
        parent: int,
        why: str,
    ) -> None:
        r, at, pool = self._r, event.tier, space.pools[event.tier]
        new = want[state[want] == FREE]
        taken = r.blocks.take(event.namespace, event.keys, new)
        if len(taken) < len(new):
            want = want[want < new[len(taken)]]
            self._r.counters["denied_max_blocks"] += 1
            r.blocks.give_back(taken[len(want[state[want] == FREE]) :])
            new = want[state[want] == FREE]
            taken = taken[: len(new)]
        rows[new] = taken
        if len(taken):
            r.index.add(taken)
        filled = rows[want]
        holes = filled[r.blocks.state[filled] == HOLE]
        r.chains.holes[event.namespace] -= len(holes)
        r.blocks.state[filled] = RESERVED
        orphan = r.blocks.parent[filled] < 0
        r.chains.link(filled[orphan], np.concatenate(([parent], rows))[want[orphan]])
        status = np.full(event.keys.n, DENIED, np.uint8)
        status[state == LIVE] = PRESENT
        status[state == RESERVED] = PENDING
        status[want] = GRANTED
        denied = int((status == DENIED).sum())
        r.counters["denied_blocks" if why == NO_ROOM else "refused_blocks"] += denied
        what = DecisionKind.DENIED if why == NO_ROOM else DecisionKind.REFUSED
        r.decisions.record_keys(what, at, event.namespace, event.keys, status == DENIED, r.now)
        r.counters["present_blocks"] += int((status == PRESENT).sum())
        lease, slots = 0, NONE
        if len(want):
            lease = self._leases.hold(event.client)
            slots = r.tiers[at].slots.take(pool, len(want))
            alive = np.ones(len(want), np.bool_)
            self._leases.reservations[lease] = Reservation(
                event.client, space, at, pool, filled, slots, alive, event.loading
            )
            self._leases.writers[event.namespace] += 1
        where = r.tiers[at].slots.record[slots]
        self._leases.say(
            Reserved(event.request, lease, pool.slot_bytes, where, status, why if denied else "")
        )

    def commit(self, event: ev.Commit, now: float) -> None:
        reservation = self._take_reservation(event.client, event.lease)
        if reservation is None:
            hint = "commit once, on the connection that reserved"
            why = f"no reservation {number_on_connection(event.lease)}"
            return self._leases.say(Deny(event.request, why, hint))
        n = len(reservation.rows)
        if len(event.checksums) != n or len(event.written) != n:
            self._give_up(reservation, np.ones(n, np.bool_), now)
            return self._leases.say(Deny(event.request, f"{len(event.checksums)} checksums for {n} blocks"))
        r, at = self._r, reservation.tier
        ok = event.written & reservation.alive & (not r.tiers[at].lost)
        rows, slots = reservation.rows[ok], reservation.slots[ok]
        r.blocks.checksum[rows] = event.checksums[ok]
        r.blocks.state[rows] = LIVE
        space = reservation.space
        if space.ttl_s and len(rows):
            r.blocks.expires[rows] = now + space.ttl_s
            self._leases.end_at(now + space.ttl_s)
        r.reuse.stored(rows, space.tenant, now)
        r.place(at, rows, slots)
        r.tiers[at].slots.release(slots)
        if len(rows):
            if r.tiers[at].spec.table:
                r.write_headers(at, rows, slots)
            if reservation.loading:
                r.blocks.offered[rows] = True
            elif at == 0:
                r.outbox.offer(rows, space)
            if self.write_through:
                self._transfers.queue_writes(rows)
            if reservation.pool != space.pools[at]:
                self._transfers.relocate(space, rows)
        r.counters["stored_blocks"] += len(rows)
        self._leases.say(Answer(event.request, len(rows)))
        self._give_up(reservation, ~ok, now)
        return None

    def _take_reservation(self, client: int, lease: int) -> Reservation | None:
        reservation = self._leases.reservations.get(lease)
        if reservation is None or reservation.client != client:
            return None
        return self._leases.drop_reservation(lease)

    def _give_up(self, reservation: Reservation, which: npt.NDArray[np.bool_], now: float) -> None:
        """These blocks of a reservation will not be written."""
        self._r.tiers[reservation.tier].slots.release(reservation.slots[which])
        lost = reservation.rows[which & reservation.alive]
        if len(lost):
            self._r.vanish(lost)

    def abort(self, event: ev.Abort, now: float) -> None:
        reservation = self._take_reservation(event.client, event.lease)
        if reservation is not None:
            self._give_up(reservation, np.ones(len(reservation.rows), np.bool_), now)
