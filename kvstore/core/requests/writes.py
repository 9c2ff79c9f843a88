"""Requests that write: reservations of slots for new blocks, then commit or abort."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.actions import DENIED, GRANTED, NO_ROOM, PENDING, PRESENT, WORTH_LESS, Answer, Reserved
from kvstore.core.blocks.block_table import FREE, HOLE, LIVE, RESERVED, Rows
from kvstore.core.requests.invalidation import Invalidation
from kvstore.core.requests.leases import NONE, LeaseTable, Reservation, number_on_connection
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.namespace import Namespace


@dataclass(slots=True)
class _Chain:
    """The keys of a Reserve, one entry a key: rows (-1: none) and their states. `before`: the row before the
    first key, -1 at a root. `of`: the row of the chain that independent keys belong to, -1: none.
    """

    event: ev.Reserve
    namespace: Namespace
    rows: Rows
    state: npt.NDArray[np.uint8]
    before: int
    of: int = -1

    def parent_of(self, i: int) -> int:
        """Returns the parent's row of key i, -1 for a root."""
        if self.namespace.independent:
            return -1
        return int(self.rows[i - 1]) if i else self.before

    def parents_of(self, which: Rows) -> Rows:
        """Returns the parents' rows of some keys."""
        if self.namespace.independent:
            return np.full(len(which), -1)
        return np.concatenate(([self.before], self.rows))[which]


class Writes:
    """Reserve, Commit, Abort."""

    def __init__(self, leases: LeaseTable, invalidation: Invalidation, write_through: bool) -> None:
        self._leases = leases
        self._invalidation = invalidation
        self._r = leases.residency
        self._eviction = leases.eviction
        self._transfers = leases.transfers
        self.write_through = write_through

    def reserve(self, event: ev.Reserve, now: float) -> None:
        namespace = self._leases.namespace(event)
        if namespace is None:
            return None
        r, keys, deny = self._r, event.keys, self._leases.deny
        if keys.n > self._leases.limits.reserve_keys:
            hint = f"at most {self._leases.limits.reserve_keys} keys a reservation"
            return deny(event.request, f"{keys.n} keys in one reservation", hint)
        if not keys.distinct:
            return deny(event.request, "a key occurs twice in one call", "name each block once")
        if event.parent and namespace.independent:
            why = "blocks of an independent namespace have no parent"
            return deny(event.request, why, "leave out the parent")
        belongs_to = self._chain_of(event)
        if event.chain_key and not namespace.independent:
            return deny(event.request, "only independent blocks belong to a chain", "name a parent instead")
        if event.chain_key and belongs_to < 0:
            return deny(event.request, "the chain of these blocks is not stored", "store the chain first")
        if namespace.has_ttl:
            self._drop_expired(event, now)
        parent = -1
        if event.parent:
            parent = r.index.find_one(event.namespace, event.parent)
            if parent < 0 or r.blocks.state[parent] not in (LIVE, RESERVED):
                return deny(event.request, "the parent is not stored", "store the chain from its start")
        rows = r.index.find(event.namespace, keys)
        state = np.where(rows >= 0, r.blocks.state[rows], FREE)
        present = rows[state == LIVE]
        if len(present):
            r.touch(present, namespace)
        want = np.flatnonzero((state == FREE) | (state == HOLE))
        if len(want) and not self._leases.may_hold(event.client):
            return self._leases.deny_hold(event.request)
        tier = self._leases.tier_for(event, namespace, namespace.tenant)
        if tier != event.tier:
            event = replace(event, tier=tier)
        chain = _Chain(event, namespace, rows, state, parent, belongs_to)
        earn, n = self._make_room(chain, want, now)
        if n < len(want) and event.tier:
            # A chain that does not fit into GPU memory goes to DRAM as a whole.
            chain.event = event = replace(event, tier=0)
            earn, n = self._make_room(chain, want, now)
        if n < len(want) and self._leases.room_is_coming(event, namespace.tenant, now):
            self._leases.stall(event, namespace.tenant)
        else:
            why = NO_ROOM
            if n < len(want) and earn < math.inf:
                self._count_refused(chain, want[n:], now)
                if self._eviction.has_idle(event.tier, namespace.pools[event.tier]):
                    why = WORTH_LESS
            self._give_slots(chain, want[:n], why)
        if r.gaps.holes[event.namespace]:
            r.chains.prune(np.unique(np.append(rows, parent)))
        return None

    def _chain_of(self, asked: ev.Reserve | Reservation) -> int:
        """Returns the row of the chain that independent blocks belong to, -1 without one."""
        if not asked.chain_key:
            return -1
        row = self._r.index.find_one(asked.chain, asked.chain_key)
        return row if row >= 0 and self._r.blocks.state[row] in (LIVE, RESERVED) else -1

    def _drop_expired(self, event: ev.Reserve, now: float) -> None:
        """Drops the expired blocks among the keys and the parent. Leases keep their slots."""
        blocks, index = self._r.blocks, self._r.index
        rows = index.find(event.namespace, event.keys)
        if event.parent:
            rows = np.append(rows, index.find_one(event.namespace, event.parent))
        rows = np.unique(rows[rows >= 0])
        rows = rows[(blocks.state[rows] == LIVE) & blocks.expired(rows, now)]
        if len(rows):
            self._r.counters["expired_blocks"] += self._invalidation.forget(rows, DecisionKind.EXPIRED)

    def _make_room(self, chain: _Chain, want: Rows, now: float) -> tuple[float, int]:
        """Makes room for keys without evicting those that are stored, or the chain that they continue.

        Returns what a slot would earn with them (uses/s), and how many keys have room.
        """
        r, event, namespace = self._r, chain.event, chain.namespace
        earn = self._earn(chain, want, now)
        guarded = np.append(chain.rows, (chain.before, chain.of))
        guarded = guarded[guarded >= 0]
        r.blocks.children[guarded] += 1
        self._eviction.make_rows(int((chain.rows < 0).sum()), namespace.tenant)
        patient = event.deadline > r.now
        n = self._eviction.make_room(event.tier, namespace.pools[event.tier], len(want), patient, earn)
        r.blocks.children[guarded] -= 1
        return earn, n

    def _earn(self, chain: _Chain, want: Rows, now: float) -> float:
        """Returns what a slot would earn with these keys, in uses/s: see `Reuse.density_if_stored`.

        Returns infinity, so that they are stored, if there is room, the policy does not weigh or a hole is
        filled.
        """
        r, event, namespace = self._r, chain.event, chain.namespace
        at, pool = event.tier, namespace.pools[event.tier]
        if event.loading or (chain.state == HOLE).any():
            return math.inf
        if self._eviction.has_room(at, pool, len(want)) or not self._eviction.weighs(at, pool):
            return math.inf
        first = int(want[0])
        words, n = event.keys.words[first], 1 if namespace.independent else len(want)
        return r.reuse.density_if_stored(
            words, event.namespace, chain.parent_of(first), n, namespace.tenant, now, chain.of
        )

    def _count_refused(self, chain: _Chain, which: Rows, now: float) -> None:
        """Counts a use of keys that are not stored: they are worth more when they return."""
        blocks = self._r.blocks
        rows = blocks.take(chain.event.namespace, chain.event.keys, which)
        if len(rows):
            # As if stored, because a new block inherits from its parent.
            if not chain.namespace.independent:
                blocks.parent[rows] = np.append(chain.parent_of(int(which[0])), rows[:-1])
            independent = chain.namespace.independent
            self._r.reuse.passed_by(rows, chain.namespace.tenant, now, independent, chain.of)
            blocks.give_back(rows)

    def _follow_others(self, chain: _Chain, which: Rows) -> bool:
        """Returns whether a parent of these keys is in another reservation."""
        if chain.namespace.independent:
            return False
        before = self._r.blocks.state[chain.before] if chain.before >= 0 else FREE
        return bool((np.append(before, chain.state)[which] == RESERVED).any())

    def _give_slots(self, chain: _Chain, want: Rows, why: str) -> None:
        """Reserves slots for these keys, and answers. `why` the other keys are denied."""
        r, event, state, rows = self._r, chain.event, chain.state, chain.rows
        at, pool = event.tier, chain.namespace.pools[event.tier]
        new = want[state[want] == FREE]
        taken = r.blocks.take(event.namespace, event.keys, new)
        if len(taken) < len(new):
            want = want[want < new[len(taken)]]
            r.counters["denied_max_blocks"] += 1
            r.blocks.give_back(taken[len(want[state[want] == FREE]) :])
            new = want[state[want] == FREE]
            taken = taken[: len(new)]
        rows[new] = taken
        if len(taken):
            r.index.add(taken)
        filled = rows[want]
        holes = filled[r.blocks.state[filled] == HOLE]
        r.blocks.state[filled] = RESERVED
        orphan = r.blocks.parent[filled] < 0
        r.chains.link(filled[orphan], chain.parents_of(want[orphan]))
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
                event.client,
                chain.namespace,
                at,
                pool,
                filled,
                slots,
                alive,
                event.loading,
                event.chain,
                event.chain_key,
            )
            r.gaps.begin(event.namespace, lease, len(holes) > 0 or self._follow_others(chain, want))
            if len(holes):
                # After `begin`: readers of the presence table must not see a moment without gaps.
                r.gaps.count_holes(event.namespace, -len(holes))
        records = r.tiers[at].slots.record[slots]
        self._leases.say(
            Reserved(event.request, lease, pool.slot_bytes, records, status, why if denied else "")
        )

    def commit(self, event: ev.Commit, now: float) -> None:
        reservation = self._take_reservation(event.client, event.lease)
        if reservation is None:
            why = f"no reservation {number_on_connection(event.lease)}"
            return self._leases.deny(event.request, why, "commit once, on the connection that reserved")
        n = len(reservation.rows)
        if len(event.checksums) != n or len(event.written) != n:
            self._give_up(reservation, np.ones(n, np.bool_), now)
            return self._leases.deny(event.request, f"{len(event.checksums)} checksums for {n} blocks")
        r, at = self._r, reservation.tier
        ok = event.written & reservation.alive & (not r.tiers[at].lost)
        rows, slots = reservation.rows[ok], reservation.slots[ok]
        r.blocks.checksum[rows] = event.checksums[ok]
        r.blocks.state[rows] = LIVE
        namespace = reservation.namespace
        if namespace.ttl_s and len(rows):
            r.blocks.expires[rows] = now + namespace.ttl_s
            self._leases.end_at(now + namespace.ttl_s)
        of = self._chain_of(reservation)
        r.reuse.stored(rows, namespace.tenant, now, namespace.independent, of)
        r.place(at, rows, slots)
        r.tiers[at].slots.release(slots)
        if len(rows):
            if r.tiers[at].spec.table:
                r.write_headers(at, rows, slots)
            if reservation.loading:
                r.blocks.offered[rows] = True
            elif at == 0:
                r.outbox.offer(rows, namespace)
            if self.write_through:
                self._transfers.queue_writes(rows)
            if reservation.pool != namespace.pools[at]:
                self._transfers.relocate(namespace, rows)
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
        """Frees these slots and rows of a reservation."""
        self._r.tiers[reservation.tier].slots.release(reservation.slots[which])
        lost = reservation.rows[which & reservation.alive]
        if len(lost):
            self._r.vanish(lost)

    def abort(self, event: ev.Abort, now: float) -> None:
        reservation = self._take_reservation(event.client, event.lease)
        if reservation is not None:
            self._give_up(reservation, np.ones(len(reservation.rows), np.bool_), now)
