"""Requests that read: look-ups; leases on blocks, after waiting for what is still on its way up; prefetch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.actions import Answer, Deny, Found, Grant
from kvstore.core.blocks import LIVE, Picked, Rows
from kvstore.core.devices import PREFETCH
from kvstore.core.extents import Slots
from kvstore.core.ledger import Lease, Ledger, Waiter
from kvstore.core.residency import PROMOTING
from kvstore.core.tenants import Space
from kvstore.core.traffic import MISSED
from kvstore.core.transfers import Arrived


class Reads:
    """Lookup, acquire, release, prefetch, and those who wait."""

    def __init__(self, ledger: Ledger, prefetch_blocks: int = 0) -> None:
        """`prefetch_blocks`: how many blocks behind those that are promoted come with them, at most."""
        self._ledger = ledger
        self.prefetch_blocks = prefetch_blocks
        self._r = ledger.residency
        self._transfers = ledger.transfers

    def acquire(self, event: ev.Acquire, now: float) -> None:
        space = self._ledger.space(event)
        if space is None:
            return None
        r = self._r
        if event.recompute_s:
            r.recompute_s[event.namespace] = event.recompute_s
        foreign = space.moved and event.tenant != space.tenant
        run = None if foreign or space.mortal else r.resident_run(event.namespace, event.keys)
        if run is not None:
            rows, slots = run
            r.touch(rows, space)
            r.tiers[0].extents.hold(slots)
            return self._grant(event, space, slots, event.keys.n, None)
        return self._acquire_some(event, space, now)

    def _acquire_some(self, event: ev.Acquire, space: Space, now: float) -> None:
        """The long way: part of it is missing, in a lower tier, or scattered."""
        r = self._r
        rows = self._readable(event, space)
        slots = r.blocks.slot[0, rows].astype(np.int64)
        if len(rows) and not self._ledger.retried:
            r.touch(rows, space)
        if (slots < 0).any():
            return self._promote_for(event, space, rows, slots, now)
        r.tiers[0].extents.hold(slots)
        return self._grant(event, space, slots, len(rows), None)

    def _readable(self, event: ev.Acquire | ev.Lookup, space: Space) -> Rows:
        """The stored prefix, up to what lies where the asker may not look: blocks from before publication."""
        r = self._r
        rows = r.prefix(event.namespace, event.keys)
        if space.moved and event.tenant != space.tenant:
            slots = r.blocks.slot[0, rows]
            seen = r.tiers[0].extents.are_of(space.pools[0], slots) | (slots < 0)
            rows = rows if seen.all() else rows[: int(seen.argmin())]
        return rows

    def lookup(self, event: ev.Lookup, now: float) -> None:
        space = self._ledger.space(event)
        if space is None:
            return
        # While parents may be missing or being written, every key has to be looked at.
        r = self._r
        gaps = r.holes[event.namespace] > 0 or self._ledger.writers[event.namespace] > 0 or r.out_of_reach
        gaps = gaps or space.mortal or (space.moved and event.tenant != space.tenant)
        if not gaps and not event.recompute_s and event.deadline == math.inf:
            found = r.search_prefix(event.namespace, event.keys)
        else:
            rows = self._readable(event, space)
            found = self._transfers.worth(space, rows, event.tenant, event.deadline, event.recompute_s)
        self._ledger.say(Found(event.request, found, gaps))

    def _promote_for(self, event: ev.Acquire, space: Space, rows: Rows, slots: Slots, now: float) -> None:
        r = self._r
        if event.deadline > now:
            n = self._transfers.worth(space, rows, event.tenant, event.deadline, event.recompute_s)
            rows, slots = rows[:n], slots[:n]
        tiers = np.zeros(len(rows), np.uint8)
        r.tiers[0].extents.hold(slots[slots >= 0])
        absent = slots < 0
        coming = (r.blocks.moving[rows] & PROMOTING) > 0
        tiers[absent] = np.argmax(r.blocks.slot[:, rows[absent]] >= 0, axis=0)
        wanted = np.flatnonzero(absent & ~coming)
        cut = len(rows)
        if len(wanted):
            n = self._transfers.promote(space, rows[wanted], event.tenant, patient=event.deadline > now)
            if n < len(wanted) and self._ledger.room_is_coming(event, space.tenant, now):
                r.tiers[0].extents.release(slots[slots >= 0])
                return self._ledger.stall(event, event.tenant)
            cut = cut if n == len(wanted) else int(wanted[n])
        beyond = slots[cut:]
        r.tiers[0].extents.release(beyond[beyond >= 0])
        if self.prefetch_blocks and cut == event.keys.n and len(wanted) and event.tenant == space.tenant:
            self._look_ahead(event, space, int(rows[-1]))
        waiter = Waiter(event, space, rows[:cut], slots[:cut], tiers[:cut])
        waiter.missing = set(rows[:cut][slots[:cut] < 0].tolist())
        if not waiter.missing or event.deadline <= now:
            return self.answer_waiter(waiter)
        self._ledger.waiting[event.request] = waiter
        for row in waiter.missing:
            self._ledger.wanted_by.setdefault(row, []).append(event.request)
        self._ledger.remind(event)
        return None

    def arrived(self, arrived: Arrived) -> None:
        """Tells those who wait for promotions."""
        slot = self._r.blocks.slot[0]
        extents = self._r.tiers[0].extents
        if not self._ledger.wanted_by:
            return
        done: dict[int, None] = {}
        for row, ok in [(r, True) for r in arrived.good.tolist()] + [
            (r, False) for r in arrived.bad.tolist()
        ]:
            for request in self._ledger.wanted_by.pop(row, ()):
                waiter = self._ledger.waiting.get(request)
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
            self.answer_waiter(self._ledger.waiting.pop(request))

    def answer_waiter(self, waiter: Waiter) -> None:
        """Grants the leading blocks that are there, lets go of the rest."""
        for row in waiter.missing:
            others = [x for x in self._ledger.wanted_by.pop(row, ()) if x != waiter.event.request]
            if others:
                self._ledger.wanted_by[row] = others
        there = waiter.slots >= 0
        n = len(there) if there.all() else int(there.argmin())
        rest = waiter.slots[n:]
        self._r.tiers[0].extents.release(rest[rest >= 0])
        self._r.counters["late_blocks"] += len(there) - n
        self._grant(waiter.event, waiter.space, waiter.slots[:n], n, waiter.tiers[:n])

    def end(self, space: Space, but: int = -1) -> None:
        """Those who wait for blocks of a namespace, but for one tenant, are told now that there are none."""
        for request, waiter in list(self._ledger.waiting.items()):
            if waiter.space is space and waiter.event.tenant != but:
                del self._ledger.waiting[request]
                self._r.tiers[0].extents.release(waiter.slots[waiter.slots >= 0])
                waiter.slots, waiter.tiers = waiter.slots[:0], waiter.tiers[:0]
                self.answer_waiter(waiter)
        for event in self._ledger.stalled.of_namespace(space.number):
            asker = event.tenant if isinstance(event, ev.Acquire) else space.tenant
            if asker != but:
                self._ledger.stalled.pop(event.request)
                self._ledger.say(Deny(event.request, f"namespace {space.number} is not there any more"))

    def _grant(
        self, event: ev.Acquire, space: Space, slots: Picked, n: int, tiers: npt.NDArray[np.uint8] | None
    ) -> None:
        """Answers an Acquire with n slots on which references are held. `tiers` None: all in tier 0."""
        r = self._r
        extents = r.tiers[0].extents
        lease = self._ledger.hold(event.client) if n else 0
        if n and not lease:
            extents.release(slots)
            return self._ledger.deny_hold(event.request)
        if lease:
            self._ledger.leases[lease] = Lease(event.client, space.tenant, slots)
        slots_told = extents.record[slots].copy()
        if tiers is None:
            r.counters[f"hit_blocks_{r.tiers[0].spec.name}"] += n
            r.traffic.count(event.tenant, 0, space, n)
        else:
            slots_told["tier"] = np.array([t.spec.tier for t in r.tiers], np.uint8)[tiers]
            for i, state in enumerate(r.tiers):
                hits = int((tiers == i).sum())
                r.counters[f"hit_blocks_{state.spec.name}"] += hits
                r.traffic.count(event.tenant, i, space, hits)
        if event.keys.n > n:
            r.counters["missed_blocks"] += event.keys.n - n
            r.traffic.count(event.tenant, MISSED, space, event.keys.n - n)
        r.counters["served_bytes"] += n * space.block_bytes
        self._ledger.say(Grant(event.request, lease, space.pools[0].slot_bytes, slots_told))
        return None

    def release(self, event: ev.Release, now: float) -> None:
        lease = self._ledger.leases.get(event.lease)
        if lease is not None and lease.client == event.client:
            self._ledger.drop_lease(event.lease)

    def prefetch(self, event: ev.Prefetch, now: float) -> None:
        space = self._ledger.space(event)
        if space is None:
            return
        rows = self._r.prefix(event.namespace, event.keys)
        _, dropped = self._bring(space, rows, event.tenant)
        self._ledger.say(Answer(event.request, len(rows) - dropped))

    def _bring(self, space: Space, rows: Rows, asker: int) -> tuple[int, int]:
        """Promotes those of a chain that only lower tiers have, while there is room: (started, dropped)."""
        r = self._r
        absent = rows[(r.blocks.slot[0, rows] < 0) & (r.blocks.moving[rows] & PROMOTING == 0)]
        there = rows[r.blocks.slot[0, rows] >= 0]
        pool = r.tiers[0].extents.classes.get(space.pools[0])
        # Nobody waits for a prefetch: it may take an eighth of the tier, no more.
        bound = max(1, pool.total // 8) if pool else len(absent)
        held = r.blocks.slot[0, there].astype(np.int64)
        r.tiers[0].extents.hold(held)
        n = self._transfers.promote(space, absent[:bound], asker, PREFETCH)
        r.tiers[0].extents.release(held)
        r.counters["dropped_prefetch_blocks"] += len(absent) - n
        return n, len(absent) - n

    def _look_ahead(self, event: ev.Acquire, space: Space, last: int) -> None:
        """What follows a chain that is being promoted comes too, as far as only one way leads on.

        Looked for in the rows behind `last`, where what was stored at one go lies: no children are listed.
        """
        r, blocks = self._r, self._r.blocks
        rows = np.arange(last + 1, min(last + 1 + self.prefetch_blocks, blocks.rows_touched))
        only = (blocks.parent[rows] == rows - 1) & (blocks.children[rows - 1] == 1)
        only &= (blocks.state[rows] == LIVE) & ~blocks.expired(rows, r.now)
        rows = rows if only.all() else rows[: int(only.argmin())]
        if len(rows) and not r.out_of_reach:
            started, _ = self._bring(space, rows, event.tenant)
            r.counters["ahead_blocks"] += started
