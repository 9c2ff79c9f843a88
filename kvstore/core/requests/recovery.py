"""Start and stop: restores the blocks that a tier holds; queues writes of blocks that only memory holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.columns import distinct
from kvstore.core import events as ev
from kvstore.core.blocks.block_table import HOLE, LIVE, Picked, Rows, compact
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.slot_classes import Slots
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.residency.residency import Residency

_AT_ONCE = 1 << 16


def restore(leases: LeaseTable, event: ev.Restore, write_down: bool) -> None:
    """Restores the blocks of a tier: first the rows, then their parents.

    `write_down`: blocks that no lower tier has are queued for writing.
    """
    r = leases.residency
    table = r.tiers[event.tier].slots
    event = event.only(table.classes.has(event.extent, event.index))
    event = event.only(_own(leases, event))
    taken = np.full(len(event.namespace), -1, np.int64)
    r.index.make_room(len(taken))
    for namespace, size, group in _groups(event):
        rows = taken[group] = _rows_for(r, namespace, _keys(event.keys, group, size))
        which = group
        if rows.min() < 0:
            which, rows = np.arange(len(taken))[group][rows >= 0], rows[rows >= 0]
        slots = table.classes.slots_at(
            event.extent[which].astype(np.int64), event.index[which].astype(np.int64)
        )
        at = compact(rows)
        _disown_others(r, event, rows[r.blocks.checksum[at] != event.checksum[which]])
        r.blocks.checksum[at] = event.checksum[which]
        r.blocks.slot[event.tier, at] = slots
        versions = event.version[which].astype(np.int64)
        table.claim(slots, rows, versions, event.checksum[which])
        r.reuse.restored(rows, leases.namespaces[namespace].tenant, r.now)
        for members, some in table.by_class(_latest_first(r, rows, slots)):
            r.topology.policy(event.tier, members.pool).insert(table.owner[some].astype(np.int64), r.now)
            # These blocks are older than the last publication of their namespace.
            leases.namespaces[namespace].relocated |= (
                members.pool != leases.namespaces[namespace].pools[event.tier]
            )
        _end(leases, namespace, rows, event.ends[which])
        r.presence.retire(namespace)
        if write_down and event.tier in r.topology.memory:
            leases.transfers.queue_writes(rows)
    follows = _follow_the_row_before(event)
    for namespace in distinct(event.namespace):
        if not leases.namespaces[namespace].independent:
            _link(r, event, taken, namespace, follows)
    r.outbox.report(event.tier, taken[taken >= 0], gained=True)
    r.counters[f"restored_blocks_{r.tiers[event.tier].spec.name}"] += len(taken)


def flush(leases: LeaseTable) -> None:
    """Replaces the backlog of writes by all blocks that only memory holds, the last used first."""
    r, transfers = leases.residency, leases.transfers
    if not r.topology.persistent:
        return
    r.ending = True
    rows = np.flatnonzero(r.blocks.state == LIVE)
    rows = rows[r.alone_in_memory(rows)]
    transfers.backlog.clear()
    # Time or space may run out, and a block is useless without its parents, which were used no earlier.
    latest_first = np.argsort(-r.reuse.history.last_used(rows), kind="stable")
    transfers.queue_writes(rows[latest_first])
    transfers.pump()


def _own(leases: LeaseTable, event: ev.Restore) -> npt.NDArray[np.bool_]:
    """Returns which blocks are in an extent of their own tenant. Other tenants may have forged the rest."""
    numbers = distinct(event.namespace)
    owner = np.zeros(max(numbers, default=0) + 1, np.int64)
    owner[numbers] = [leases.namespaces[n].tenant for n in numbers]
    classes = leases.residency.tiers[event.tier].slots.classes
    own: npt.NDArray[np.bool_] = owner[event.namespace] == classes.tenants_of(event.extent)
    return own


def _groups(event: ev.Restore) -> Iterator[tuple[int, int, Picked]]:
    """Yields the blocks of one namespace whose keys have one length, as (namespace, length, blocks)."""
    group = event.namespace << np.uint32(8) | event.key_bytes
    codes = distinct(group)
    for code in codes:
        # Mostly there is one group. A slice of columns is no copy.
        yield code >> 8, code & 0xFF, slice(None) if len(codes) == 1 else np.flatnonzero(group == code)


def _latest_first(r: Residency, rows: Rows, slots: Slots) -> Slots:
    """Returns the slots of rows, the last used first."""
    last_used = r.reuse.history.last_used(rows)
    if (last_used[1:] <= last_used[:-1]).all():
        return slots
    # Parents stay ahead of their children: they were used no earlier.
    return slots[np.argsort(-last_used, kind="stable")]


def _end(leases: LeaseTable, namespace: int, rows: Rows, ends: npt.NDArray[np.float64]) -> None:
    """Sets the expiry of rows; `ends` is in core time, infinity: never."""
    which = np.flatnonzero(ends < np.inf)
    if len(which):
        # Above 0, which means no expiry.
        leases.residency.blocks.expires[rows[which]] = np.maximum(ends[which], 1e-9)
        leases.namespaces[namespace].has_ttl = True
        leases.end_at(float(ends[which].min()))


def _disown_others(r: Residency, event: ev.Restore, rows: Rows) -> None:
    """Drops the copies of rows in other tiers. The earlier process was about to drop them."""
    for tier in range(len(r.tiers)):
        held = rows[r.blocks.slot[tier, rows] >= 0]
        if tier != event.tier and len(held):
            r.give_up(tier, held, vanish=False)
            r.outbox.report(tier, held, gained=False)


def _follow_the_row_before(event: ev.Restore) -> npt.NDArray[np.bool_]:
    """Returns which blocks come right after their parent."""
    keys, parents = _words(event.keys), _words(event.parents)
    follows = np.zeros(len(keys), np.bool_)
    follows[1:] = (event.key_bytes[:-1] == event.parent_bytes[1:]) & (
        event.namespace[:-1] == event.namespace[1:]
    )
    for word in range(keys.shape[1]):
        follows[1:] &= keys[:-1, word] == parents[1:, word]
    return follows


def _link(
    r: Residency, event: ev.Restore, taken: Rows, namespace: int, follows: npt.NDArray[np.bool_]
) -> None:
    """Links the blocks of a namespace that have no parent row to their parents."""
    orphan = (event.namespace == namespace) & (event.parent_bytes > 0) & (taken >= 0)
    orphan[orphan] = r.blocks.parent[taken[orphan]] < 0
    which = np.flatnonzero(orphan)
    # Most blocks come right after their parent. Then no key is looked up.
    near = follows[which]
    parents = np.where(near, taken[which - 1], -1)
    for length in np.unique(event.parent_bytes[which[~near]]).tolist():
        some = ~near & (event.parent_bytes[which] == length)
        parents[some] = _adopt(r, namespace, _keys(event.parents, which[some], length))
    r.chains.link(taken[which[parents >= 0]], parents[parents >= 0])


def _words(column: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return column.view(np.uint64)


def _keys(column: npt.NDArray[np.uint8], which: Picked, size: int) -> Keys:
    return Keys(np.ascontiguousarray(column[which, :size]).reshape(-1).data, size)


def _rows_for(r: Residency, namespace: int, keys: Keys) -> Rows:
    """Returns LIVE rows for distinct keys, new rows without a parent; -1 where no rows are left."""
    rows = r.index.find(namespace, keys)
    r.chains.count_holes(rows[(rows >= 0) & (r.blocks.state[rows] == HOLE)], -1)
    new = np.flatnonzero(rows < 0)
    taken = r.blocks.take(namespace, keys, new)
    r.index.add(taken, _AT_ONCE)
    rows[new[: len(taken)]] = taken
    there = rows if rows.min() >= 0 else rows[rows >= 0]
    r.blocks.state[compact(there)] = LIVE
    return rows


def _adopt(r: Residency, namespace: int, parents: Keys) -> Rows:
    """Returns the rows of parents, -1 where no row is left. Missing parents become holes."""
    found = r.index.find(namespace, parents)
    missing = np.flatnonzero(found < 0)
    if len(missing):
        distinct = {parents[i]: i for i in missing.tolist()}
        rows = r.blocks.take(namespace, parents, np.array(list(distinct.values())))
        r.index.add(rows)
        r.chains.keep_as_holes(rows)
        found = r.index.find(namespace, parents)
    return found
