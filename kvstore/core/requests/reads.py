"""Requests that read: lookups, presence, leases on blocks (after waiting for promotions), prefetch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.actions import Answer, Found, Grant, Presence, Stored
from kvstore.core.blocks.block_table import LIVE, Picked, Rows
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.slot_classes import Slots
from kvstore.core.capacity.slot_table import SlotTable
from kvstore.core.insight.hit_counters import spread
from kvstore.core.queues.device_queue import PREFETCH
from kvstore.core.requests.leases import Lease, LeaseTable, Waiter
from kvstore.core.residency.namespace import Namespace
from kvstore.core.transfers.copy_queue import Arrived

_SAMPLE = 8
"""Keys of a looked-up prefix whose tiers are taken for those of all keys."""


class Reads:
    """Lookup, Contains, Acquire, Release, Prefetch, and the answers to waiting requests."""

    def __init__(self, leases: LeaseTable, prefetch_blocks: int = 0) -> None:
        """`prefetch_blocks`: the most blocks behind a promoted chain that are promoted with it."""
        self._leases = leases
        self.prefetch_blocks = prefetch_blocks
        self._r = leases.residency
        self._copies = leases.copies
        self._transfers = leases.transfers

    def acquire(self, event: ev.Acquire, now: float) -> None:
        namespace = self._leases.namespace(event)
        if namespace is None:
            return None
        r = self._r
        if event.recompute_s:
            r.topology.recompute_s[event.namespace] = event.recompute_s
        tier = self._leases.tier_for(event, namespace, event.tenant)
        if tier != event.tier:
            event = replace(event, tier=tier)
        foreign = namespace.relocated and event.tenant != namespace.tenant
        run = None if foreign or namespace.has_ttl else r.resident_run(event.namespace, event.keys, tier)
        if run is not None:
            if not event.no_touch:
                r.touch(run[0], namespace)
            r.tiers[tier].slots.hold(run[1])
            return self._grant(event, namespace, run[1], event.keys.n)
        # Some blocks are missing, in another tier, or scattered.
        rows = self._readable(event, namespace)
        if len(rows) and not (self._leases.retried or event.no_touch):
            r.touch(rows, namespace)
        return self._serve(event, namespace, rows, now)

    def _serve(self, event: ev.Acquire, namespace: Namespace, rows: Rows, now: float) -> None:
        """Grants these rows in the tier of the event, as soon as they are there."""
        slots = self._r.blocks.slot[event.tier, rows].astype(np.int64)
        if (slots < 0).any():
            return self._promote_for(event, namespace, rows, slots, now)
        self._r.tiers[event.tier].slots.hold(slots)
        return self._grant(event, namespace, slots, len(rows))

    def _readable(self, event: ev.Acquire | ev.Lookup, namespace: Namespace) -> Rows:
        """Returns the stored prefix. It ends at a block that the tenant may not map yet."""
        rows = self._r.prefix(event.namespace, event.keys)
        if namespace.relocated and event.tenant != namespace.tenant:
            seen = self._mappable(namespace, rows)
            rows = rows if seen.all() else rows[: int(seen.argmin())]
        return rows

    def _mappable(self, namespace: Namespace, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns whether other tenants may map the DRAM slot of each row; True for rows without one."""
        slots = self._r.blocks.slot[0, rows]
        seen: npt.NDArray[np.bool_] = self._r.tiers[0].slots.are_of(namespace.pools[0], slots) | (slots < 0)
        return seen

    def blocks_read(self, event: ev.BlocksRead, now: float) -> None:
        namespace = self._r.namespaces.get(event.namespace)
        if namespace is None or namespace.closed:
            return
        rows, there = self._r.readable(event.namespace, event.keys)
        self._r.touch(rows[there], namespace)
        self._r.settle()  # nobody waits for an answer
        self._count_hits(namespace, {0: event.blocks})

    def _count_hits(self, namespace: Namespace, by_tier: Mapping[int, int]) -> None:
        """Counts blocks that were served, by tier."""
        for tier, n in by_tier.items():
            self._r.counters[f"hit_blocks_{self._r.tiers[tier].spec.name}"] += n
            self._r.counters["served_bytes"] += n * namespace.block_bytes

    def contains(self, event: ev.Contains, now: float) -> None:
        namespace = self._leases.namespace(event)
        if namespace is None:
            return
        rows, there = self._r.readable(event.namespace, event.keys)
        if namespace.relocated and event.tenant != namespace.tenant:
            there &= self._mappable(namespace, rows)
        self._leases.say(Presence(event.request, there))

    def lookup(self, event: ev.Lookup, now: float) -> None:
        namespace = self._leases.namespace(event)
        if namespace is None:
            return
        # A binary search would be wrong while parents may be missing.
        r = self._r
        gaps = namespace.independent or r.gaps.are_in(event.namespace) or r.topology.out_of_reach
        gaps = gaps or namespace.has_ttl or (namespace.relocated and event.tenant != namespace.tenant)
        if not gaps and not event.recompute_s and event.deadline == math.inf:
            found = r.search_prefix(event.namespace, event.keys)
            stored = Stored(spread(self._sampled(event, found), found))
        else:
            rows, at = self._readable(event, namespace), self._leases.tier_for(event, namespace, event.tenant)
            # A sample of the keys does not count if blocks may be missing between them.
            sampled = gaps and event.step > 1
            found = len(rows) if sampled else self._worth_looked_up(event, namespace, rows, at)
            stored = Stored(self._by_tier(rows, at), unworthy=len(rows) - found)
        self._leases.say(Found(event.request, found, gaps, stored))

    def _worth_looked_up(self, event: ev.Lookup, namespace: Namespace, rows: Rows, at: int) -> int:
        """Returns how many of the leading rows that a lookup found are worth loading to the tier `at`."""
        return self._transfers.worth(
            namespace, rows, event.tenant, event.deadline, event.recompute_s, at, event.step, event.have
        )

    def _sampled(self, event: ev.Lookup, found: int) -> dict[int, int]:
        """Returns the tiers of some of the `found` leading keys; of all if their rows are consecutive."""
        r, keys = self._r, event.keys.take(0, found)
        if len(r.tiers) == 1 or not found:
            return {0: found} if found else {}
        first = r.index.find_run(event.namespace, keys)
        if first >= 0:
            return self._by_tier(np.arange(first, first + found), event.tier)
        some = b"".join(keys[i] for i in range(0, found, -(-found // _SAMPLE)))
        rows = r.index.find(event.namespace, Keys(some, keys.size))
        return self._by_tier(rows[rows >= 0], event.tier) or {0: found}

    def _by_tier(self, rows: Rows, at: int) -> dict[int, int]:
        """Returns the number of these rows that each tier would serve to the memory tier `at`."""
        absent = rows[self._r.blocks.slot[at, rows] < 0]
        by_tier = {at: len(rows) - len(absent)} if len(absent) < len(rows) else {}
        if len(absent):
            counts = np.bincount(self._transfers.source(absent, at))
            by_tier |= {tier: n for tier, n in enumerate(counts.tolist()) if n}
        return by_tier

    def _promote_for(
        self, event: ev.Acquire, namespace: Namespace, rows: Rows, slots: Slots, now: float
    ) -> None:
        """Promotes the rows without a slot. Grants the rows, or lets the request wait for them."""
        r, at, asker = self._r, event.tier, event.tenant
        table = r.tiers[at].slots
        stored = Stored(self._by_tier(rows, at))
        if event.deadline > now:
            n = self._transfers.worth(namespace, rows, asker, event.deadline, event.recompute_s, at)
            stored.unworthy = len(rows) - n
            rows, slots = rows[:n], slots[:n]
        tiers = np.full(len(rows), at, np.int16)
        table.hold(slots[slots >= 0])
        absent = slots < 0
        coming = self._copies.coming(at, rows)
        tiers[absent] = self._transfers.source(rows[absent], at)
        wanted = np.flatnonzero(absent & ~coming)
        cut = len(rows)
        if len(wanted):
            patient = event.deadline > now
            n = self._transfers.promote(
                namespace, rows[wanted], asker, patient=patient, target=at, whole=at > 0
            )
            if n < len(wanted) and at:
                # A chain that does not fit into GPU memory is served from DRAM as a whole.
                table.release(slots[slots >= 0])
                r.counters["hbm_full_requests"] += 1
                event = replace(event, tier=0)
                # Some of these blocks may have been evicted while room was made.
                return self._serve(event, namespace, self._readable(event, namespace), now)
            if n < len(wanted) and self._leases.room_is_coming(event, namespace.tenant, now):
                table.release(slots[slots >= 0])
                return self._leases.stall(event, asker)
            cut = cut if n == len(wanted) else int(wanted[n])
        beyond = slots[cut:]
        table.release(beyond[beyond >= 0])
        if self.prefetch_blocks and cut == event.keys.n and len(wanted) and asker == namespace.tenant:
            self._look_ahead(event, namespace, int(rows[-1]))
        waiter = Waiter(event, namespace, rows[:cut], slots[:cut], tiers[:cut], stored)
        waiter.missing = set(rows[:cut][slots[:cut] < 0].tolist())
        if not waiter.missing or event.deadline <= now:
            return self.answer_waiter(waiter)
        self._leases.waiting[event.request] = waiter
        for row in waiter.missing:
            self._leases.wanted_by.setdefault(row, []).append(event.request)
        self._leases.remind(event)
        return None

    def arrived(self, arrived: Sequence[Arrived]) -> None:
        """Answers the requests that waited for no other promotions than these."""
        if not self._leases.wanted_by:
            return
        done: dict[int, None] = {}
        for each in arrived:
            some = [(row, True) for row in each.good.tolist()] + [(row, False) for row in each.bad.tolist()]
            for row, ok in some:
                done.update(dict.fromkeys(self._end_wait(each.target, row, ok)))
        for request in done:
            self.answer_waiter(self._leases.waiting.pop(request))

    def _end_wait(self, tier: int, row: int, ok: bool) -> list[int]:
        """Ends the waits for a row in a tier. Returns the requests that wait for no other row."""
        done, others = [], []
        for request in self._leases.wanted_by.pop(row, ()):
            waiter = self._leases.waiting[request]
            if waiter.event.tier != tier:
                # This request waits for another copy, which is still under way.
                others.append(request)
                continue
            waiter.missing.discard(row)
            if ok:
                place = waiter.rows == row
                waiter.slots[place] = self._r.blocks.slot[tier, row]
                self._r.tiers[tier].slots.hold(waiter.slots[place])
            if not waiter.missing:
                done.append(request)
        if others:
            self._leases.wanted_by[row] = others
        return done

    def take_back(self, tier: int, gone: Sequence[Arrived]) -> list[ev.Acquire]:
        """Removes the requests that wait in a lost tier, or for rows in `gone`. Returns them for a retry."""
        of = [(each.target, set(each.bad.tolist())) for each in gone]
        out = []
        for request, waiter in list(self._leases.waiting.items()):
            at = waiter.event.tier
            if at == tier or any(target == at and waiter.missing & rows for target, rows in of):
                del self._leases.waiting[request]
                self._forget_missing(waiter)
                self._r.tiers[at].slots.release(waiter.slots[waiter.slots >= 0])
                out.append(waiter.event)
        return out

    def _forget_missing(self, waiter: Waiter) -> None:
        """Ends all waits of a waiter."""
        for row in waiter.missing:
            others = [x for x in self._leases.wanted_by.pop(row, ()) if x != waiter.event.request]
            if others:
                self._leases.wanted_by[row] = others

    def answer_waiter(self, waiter: Waiter) -> None:
        """Grants the leading blocks that are there. Releases the others."""
        self._forget_missing(waiter)
        there = waiter.slots >= 0
        n = len(there) if there.all() else int(there.argmin())
        rest = waiter.slots[n:]
        self._r.tiers[waiter.event.tier].slots.release(rest[rest >= 0])
        waiter.stored.late = len(there) - n
        self._r.counters["late_blocks"] += len(there) - n
        self._grant(waiter.event, waiter.namespace, waiter.slots[:n], n, waiter.tiers[:n], waiter.stored)

    def end(self, namespace: Namespace, but: int = -1) -> None:
        """Answers all requests that wait for blocks of a namespace with a miss, except the tenant `but`."""
        for request, waiter in list(self._leases.waiting.items()):
            if waiter.namespace is namespace and waiter.event.tenant != but:
                del self._leases.waiting[request]
                self._r.tiers[waiter.event.tier].slots.release(waiter.slots[waiter.slots >= 0])
                waiter.slots, waiter.tiers = waiter.slots[:0], waiter.tiers[:0]
                self.answer_waiter(waiter)
        for event in self._leases.stalled.of_namespace(namespace.number):
            asker = event.tenant if isinstance(event, ev.Acquire) else namespace.tenant
            if asker != but:
                self._leases.stalled.pop(event.request)
                self._leases.deny(event.request, f"namespace {namespace.number} is not there any more")

    def _grant(
        self,
        event: ev.Acquire,
        namespace: Namespace,
        slots: Picked,
        n: int,
        tiers: npt.NDArray[np.int16] | None = None,
        stored: Stored | None = None,
    ) -> None:
        """Answers an Acquire with n held slots. `tiers` None: all blocks were in this tier already."""
        r, at, foreign = self._r, event.tier, event.tenant != namespace.tenant
        table = r.tiers[at].slots
        if n and foreign:
            lendable = self._leases.lendable_bytes(namespace.tenant) // namespace.pools[at].slot_bytes
            if not lendable:
                table.release(slots)
                return self._leases.deny_loan(event.request)
            if lendable < n:
                slots, n = self._cut(table, slots, lendable), lendable
                tiers = None if tiers is None else tiers[:n]
        lease = self._leases.hold(event.client) if n else 0
        if n and not lease:
            table.release(slots)
            return self._leases.deny_hold(event.request)
        if lease:
            made = Lease(event.client, namespace.tenant, slots, at, namespace.number, event.tenant)
            self._leases.leases[lease] = made
            if foreign:
                self._leases.lend(made, n * namespace.pools[at].slot_bytes)
        slots_told = table.record[slots].copy()
        if tiers is None:
            tiers = np.full(n, at, np.int16)
        else:
            slots_told["tier"] = np.array([t.spec.tier for t in r.tiers], np.uint8)[tiers]
        if not event.no_touch:
            self._count_hits(namespace, dict(enumerate(np.bincount(tiers).tolist())))
        stored = stored or Stored({at: n} if n else {})
        self._leases.say(
            Grant(event.request, lease, namespace.pools[at].slot_bytes, slots_told, stored, tiers)
        )
        return None

    def _cut(self, table: SlotTable, slots: Picked, n: int) -> Picked:
        """Returns the first n of some held slots. Releases the others."""
        if isinstance(slots, slice):
            slots = np.arange(slots.start, slots.stop)
        table.release(slots[n:])
        return slots[:n]

    def release(self, event: ev.Release, now: float) -> None:
        lease = self._leases.leases.get(event.lease)
        if lease is not None and lease.client == event.client:
            self._leases.drop_lease(event.lease)

    def prefetch(self, event: ev.Prefetch, now: float) -> None:
        namespace = self._leases.namespace(event)
        if namespace is None:
            return
        rows = self._r.prefix(event.namespace, event.keys)
        _, dropped = self._prefetch(
            namespace, rows, event.tenant, self._leases.tier_for(event, namespace, event.tenant)
        )
        self._leases.say(Answer(event.request, len(rows) - dropped))

    def _prefetch(self, namespace: Namespace, rows: Rows, asker: int, at: int) -> tuple[int, int]:
        """Promotes the rows of a chain that lack a copy in a tier while there is room: (started, dropped)."""
        r, table = self._r, self._r.tiers[at].slots
        absent = rows[(r.blocks.slot[at, rows] < 0) & ~self._copies.coming(at, rows)]
        there = rows[r.blocks.slot[at, rows] >= 0]
        pool = table.classes.get(namespace.pools[at])
        # No request waits for a prefetch, so it may take at most an eighth of the pool.
        bound = max(1, pool.total // 8) if pool else len(absent)
        held = r.blocks.slot[at, there].astype(np.int64)
        table.hold(held)
        n = self._transfers.promote(namespace, absent[:bound], asker, PREFETCH, target=at)
        table.release(held)
        r.counters["dropped_prefetch_blocks"] += len(absent) - n
        return n, len(absent) - n

    def _look_ahead(self, event: ev.Acquire, namespace: Namespace, last: int) -> None:
        """Promotes the blocks behind a promoted chain up to the first branch.

        Looks only at the rows after `last`, which hold blocks that were stored together.
        """
        r, blocks = self._r, self._r.blocks
        rows = np.arange(last + 1, min(last + 1 + self.prefetch_blocks, blocks.rows_touched))
        only = (blocks.parent[rows] == rows - 1) & (blocks.children[rows - 1] == 1)
        only &= (blocks.state[rows] == LIVE) & ~blocks.expired(rows, r.now)
        rows = rows if only.all() else rows[: int(only.argmin())]
        if len(rows) and not r.topology.out_of_reach:
            started, _ = self._prefetch(namespace, rows, event.tenant, event.tier)
            r.counters["ahead_blocks"] += started
