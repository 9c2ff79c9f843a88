"""The invariants, asserted over the whole state. Slow: tests check them after each event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from kvstore.core.blocks.block_table import FREE, HOLE, LIVE, RESERVED, Rows
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.capacity.slot_classes import Slots
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.residency.residency import DEMOTE, Residency
from kvstore.native import presence_hash
from kvstore.types import PRESENCE_NOT_READY, PRESENCE_READY


def check(leases: LeaseTable) -> None:
    """Raises AssertionError with the name of a broken invariant."""
    r = leases.residency
    rows_of = _rows_by_namespace(r)
    _check_rows(r, rows_of)
    _check_presence(r)
    for tier in range(len(r.tiers)):
        classes = r.tiers[tier].slots.classes
        numbers_of = {pool: classes.all_slots_of(members) for pool, members in classes.items()}
        _check_tier(leases, tier, numbers_of)
        _check_tenants(leases, tier, numbers_of, rows_of)
    reserved = np.concatenate([x.rows[x.alive] for x in leases.reservations.values()] or [np.empty(0, int)])
    state = r.blocks.state
    assert sorted(reserved.tolist()) == np.flatnonzero(state == RESERVED).tolist(), (
        "reserved without a writer"
    )
    answered = set(leases.waiting) & set(leases.stalled)
    assert not answered, "a request waits twice"
    for row, requests in leases.wanted_by.items():
        for request in requests:
            assert row in leases.waiting[request].missing, (
                "a waiter is registered for a row that it does not need"
            )
    _check_copies(leases)
    lent: Counter[tuple[int, int]] = Counter()
    for lease in leases.leases.values():
        lent[lease.tenant, lease.reader] += lease.lent_bytes
    assert +lent == leases.lent, "bytes lent to other tenants miscounted"
    reservations: dict[int, set[int]] = {}
    for number, reservation in leases.reservations.items():
        reservations.setdefault(reservation.namespace.number, set()).add(number)
    assert reservations == r.gaps.open, "reservations of namespaces miscounted"
    assert r.gaps.holes.keys() <= leases.namespaces.keys(), "holes of a closed namespace"


def _rows_by_namespace(r: Residency) -> dict[int, Rows]:
    """Returns the rows that are not free, in ascending order."""
    used = np.flatnonzero(r.blocks.state != FREE)
    numbers = r.blocks.namespace[used]
    return {number: used[numbers == number] for number in np.flatnonzero(np.bincount(numbers)).tolist()}


def _check_copies(leases: LeaseTable) -> None:
    r, marks = leases.residency, np.zeros(leases.residency.blocks.capacity, np.uint8)
    coming: Counter[tuple[int, int]] = Counter()
    for t in leases.copies.under_way.values():
        rows, slots = t.rows[t.alive], t.source_slots[t.alive]
        assert (r.tiers[t.source].slots.owner[slots] == rows).all(), "a copy of a dropped block"
        assert not (marks[rows] & t.marks).any(), "two copies share a mark"
        marks[rows] |= t.marks
        coming.update((t.target, row) for row in rows.tolist())
    assert max(coming.values(), default=1) == 1, "two copies of a block into one tier"
    assert (r.blocks.copy_marks & ~np.uint8(DEMOTE) == marks & ~np.uint8(DEMOTE)).all(), (
        "a row has wrong copy marks"
    )
    assert (marks[(r.blocks.copy_marks & DEMOTE) > 0] & DEMOTE).all(), (
        "a row is marked for demotion without a copy"
    )
    for request, waiter in leases.waiting.items():
        for row in waiter.missing:
            assert (waiter.event.tier, row) in coming, "a waiter waits for a block that is not being copied"
            assert request in leases.wanted_by[row], "a waiter is not registered for a row that it needs"


def _check_rows(r: Residency, rows_of: dict[int, Rows]) -> None:
    b = r.blocks
    used = np.flatnonzero(b.state != FREE)
    assert len(used) == b.used == r.index.count, "rows, free rows and index disagree"
    rows_in = np.bincount(b.namespace[used], minlength=len(b.rows_in))
    assert (rows_in == b.rows_in).all(), "rows of a namespace miscounted"
    for namespace, own in rows_of.items():
        for size in np.flatnonzero(np.bincount(b.key_bytes[own])).tolist():
            some = own[b.key_bytes[own] == size]
            keys = Keys(b.all_words(some).view(np.uint8)[:, :size].tobytes(), size)
            assert (r.index.find_each(namespace, keys) == some).all(), "a row is not found by its key"
        holes = b.state[own] == HOLE
        opened = r.namespaces.get(namespace)
        if opened is not None and opened.independent:
            assert (b.parent[own] < 0).all(), "an independent block with a parent"
            assert not holes.any(), "a hole in an independent namespace"
        assert r.gaps.holes[namespace] == np.count_nonzero(holes), "holes miscounted"
    somewhere = (b.slot[:, used] >= 0).any(axis=0)
    states = b.state[used]
    assert (somewhere == (states == LIVE)).all(), "a live block without a slot, or a slot of another block"
    parents = b.parent[used]
    parents = parents[parents >= 0]
    assert (b.state[parents] != FREE).all(), "a parent was freed before its child"
    count = np.bincount(parents, minlength=b.capacity)
    assert (count[used] == b.children[used]).all(), "children miscounted"
    behind = used[(states == LIVE) & (b.parent[used] >= 0)]
    for namespace in np.unique(b.namespace[behind[b.state[b.parent[behind]] != LIVE]]).tolist():
        assert r.gaps.are_in(namespace), "a block is stored behind a missing one, where none is said to be"
    childless = used[(states == HOLE) & (b.children[used] == 0)]
    assert r.chains.childless.issuperset(childless.tolist()), "a hole without children"
    assert set(r.pins.ends) == set(np.flatnonzero(b.pinned).tolist()), "pins miscounted"


def _check_presence(r: Residency) -> None:
    """Each presence table has exactly the readable rows, with the tiers and places that would serve them."""
    b = r.blocks
    for number, table in r.presence.tables.items():
        assert r.namespaces.get(number) is table.namespace, "a presence table of another namespace"
        mine = (b.namespace == number) & (b.state == LIVE)
        rows = np.flatnonzero(mine[: min(table.row, b.capacity)])
        flags, there, places = r.presence.cells_of(table.namespace, rows)
        assert there.all(), "a live block without a copy"
        for size in np.unique(b.key_bytes[rows]).tolist():
            some = b.key_bytes[rows] == size
            words, seed = b.all_words(rows[some]), int(table.words[1])
            mark, first, second = presence_hash(words, size, seed, len(table.cells))
            near = np.hstack((table.cells[first], table.cells[second]))
            near_places = np.hstack((table.places[first], table.places[second]))
            here = (near == (mark | flags[some])[:, None]) & (near_places == places[some][:, None])
            assert here.any(axis=1).all(), "a readable block is not in the presence table as it is"
        used = np.count_nonzero(table.cells)
        assert used == table.count == len(rows), "a presence table has other blocks, or miscounts them"
        ready = table.row >= b.capacity and not r.topology.out_of_reach
        gapless = not (r.gaps.are_in(number) or table.namespace.relocated or table.namespace.independent)
        assert bool(table.words[2]) <= gapless, "a table says that it has no gaps"
        assert int(table.words[0]) == (PRESENCE_READY if ready else PRESENCE_NOT_READY), "a table's state"
        assert not table.namespace.closed, "a presence table of a namespace that is being deleted"
        assert not table.namespace.has_ttl, "a presence table of a namespace with a TTL"


def _check_tier(leases: LeaseTable, tier: int, numbers_of: Mapping[SlotPool, Slots]) -> None:
    r = leases.residency
    extents, table, slot = r.tiers[tier].extents, r.tiers[tier].slots, r.blocks.slot[tier]
    assert extents.limit_bytes <= extents.bound_bytes, "a bound below the limit"
    assert extents.total * extents.extent_bytes <= extents.bound_bytes, "more extents than the limit allows"
    assert extents.used_bytes <= extents.capacity_bytes, "more bytes used than the capacity"
    assert extents.removing <= set(extents.renewing), "an extent that is being removed is usable"
    if r.tiers[tier].gone:
        assert not r.tiers[tier].policies, "a removed device has policies"
        assert not len(table.owner), "a removed device has slots"
    live = np.flatnonzero(r.blocks.state != FREE)
    rows = live[slot[live] >= 0]
    assert len(set(slot[rows].tolist())) == len(rows), "a slot has two owners"
    assert (table.owner[slot[rows]] == rows).all(), "a slot has the wrong owner"
    assert int((table.owner >= 0).sum()) == len(rows), "a slot is owned by a row that has another slot"
    references = np.concatenate([np.empty(0, np.int64), *_references(leases, tier)])
    refs = np.bincount(references, minlength=len(table.refs))
    for retired in table.retired:
        refs[retired] += 1
    assert (refs == table.refs).all(), "references miscounted"
    listed = np.concatenate(
        [np.empty(0, np.int64), *(c.stack[: c.free].astype(np.int64) for c in table.classes.values())]
    )
    times_free = np.bincount(listed, minlength=len(table.refs))
    assert (times_free <= 1).all(), "a slot is in two free lists"
    closed = list(table.closed)
    for slot_class in table.classes.values():
        numbers = numbers_of[slot_class.pool]
        unused = (table.owner[numbers] < 0) & (table.refs[numbers] == 0)
        if closed:
            unused &= ~np.isin(table.place[numbers] >> np.uint64(32), closed)
        assert (unused == (times_free[numbers] > 0)).all(), "used and free slots are not all slots"
        known = len(r.tiers[tier].policies.get(slot_class.pool, ()))
        owned = int((table.owner[numbers] >= 0).sum())
        assert known == owned, "the policy has other blocks than the tier"
    for generation in r.tiers[tier].generations:
        generation.segments.check()


def _check_tenants(
    leases: LeaseTable, tier: int, numbers_of: Mapping[SlotPool, Slots], rows_of: dict[int, Rows]
) -> None:
    extents = leases.residency.tiers[tier].extents
    table = extents.slots
    holdings, shrinking = extents.holdings, leases.eviction.shrinking
    n = len(holdings.extents)
    held, fitted, used = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    for pool, members in table.classes.items():
        numbers = numbers_of[pool]
        busy = (table.owner[numbers] >= 0) | (table.refs[numbers] > 0)
        held[pool.tenant] += len(members.extents)
        fitted[pool.tenant] += len(numbers) * pool.slot_bytes
        used[pool.tenant] += int(busy.sum()) * pool.slot_bytes
    for tenant, promised in extents.promised.items():
        held[tenant] += len(promised)
    for tenant in extents.renewing.values():
        held[tenant] += tenant >= 0
    assert (held == holdings.extents).all(), "extents of tenants miscounted"
    assert (used == holdings.used).all(), "bytes of tenants miscounted"
    assert (fitted == holdings.fitted).all(), "slots of tenants miscounted"
    lacking = np.maximum(holdings.floor - held, 0).sum()
    assert lacking == holdings.unmet, "unmet floors miscounted"
    assert not table.closed & set(extents.unassigned), "a closed extent is unassigned"
    for tenant in np.flatnonzero(used > holdings.limit).tolist():
        assert (tier, tenant) in shrinking or holdings.limit[tenant] == 0, "a tenant is over its limit"
    everything = len(extents.ready) + len(extents.renewing)
    spread = int(held.sum()) + len(extents.unassigned) + sum(t < 0 for t in extents.renewing.values())
    assert everything == spread, "extents of all tenants and unassigned ones are not all extents"
    for number, rows in rows_of.items():
        namespace = leases.namespaces.get(number)
        if namespace is not None and not namespace.relocated:
            slots = leases.residency.blocks.slot[tier, rows]
            slots = slots[slots >= 0]
            assert table.are_of(namespace.pools[tier], slots).all(), "a block is in another tenant's extent"


def _references(leases: LeaseTable, tier: int) -> list[Slots]:
    """Returns the slots of a tier that have references, once per reference."""
    out = []
    for transfer in leases.copies.under_way.values():
        if transfer.source == tier:
            out.append(transfer.source_slots)
        if transfer.target == tier:
            out.append(transfer.target_slots)
    everything = np.arange(len(leases.residency.tiers[tier].slots.refs))
    out += [everything[x.slots] for x in leases.leases.values() if x.tier == tier]
    out += [x.slots for x in leases.reservations.values() if x.tier == tier]
    out += [x.slots[x.slots >= 0] for x in leases.waiting.values() if x.event.tier == tier]
    return out + [p.slots for p in leases.probes.values() if p.tier == tier]
