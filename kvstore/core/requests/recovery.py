"""Start and stop: restores the blocks that a tier holds; queues writes of blocks that only memory holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.core import events as ev
from kvstore.core.blocks.block_table import HOLE, LIVE, Rows
from kvstore.core.blocks.key_batch import Keys
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
    group = event.namespace.astype(np.int64) << 8 | event.key_bytes
    taken = np.full(len(group), -1, np.int64)
    r.index.make_room(len(group))
    for code in np.unique(group).tolist():
        namespace, size = code >> 8, code & 0xFF
        which = np.flatnonzero(group == code)
        rows = taken[which] = _rows_for(r, namespace, _keys(event.keys, which, size))
        which, rows = which[rows >= 0], rows[rows >= 0]
        slots = table.classes.slots_at(
            event.extent[which].astype(np.int64), event.index[which].astype(np.int64)
        )
        _disown_others(r, event, rows[r.blocks.checksum[rows] != event.checksum[which]])
        r.blocks.checksum[rows] = event.checksum[which]
        r.blocks.slot[event.tier, rows] = slots
        versions = event.version[which].astype(np.int64)
        table.claim(slots, rows, versions, event.checksum[which])
        r.reuse.restored(rows, leases.namespaces[namespace].tenant, r.now)
        # Parents stay ahead of their children: they were used no earlier.
        latest_first = np.argsort(-r.reuse.history.last_used(rows), kind="stable")
        for members, some in table.by_class(slots[latest_first]):
            r.topology.policy(event.tier, members.pool).insert(table.owner[some].astype(np.int64), r.now)
            # These blocks are older than the last publication of their namespace.
            leases.namespaces[namespace].relocated |= (
                members.pool != leases.namespaces[namespace].pools[event.tier]
            )
        _end(leases, namespace, rows, event.ends[which])
        r.presence.retire(namespace)
        if write_down:
            leases.transfers.queue_writes(rows)
    for namespace in np.unique(event.namespace).tolist():
        if not leases.namespaces[namespace].independent:
            _link(r, event, taken, namespace)
    r.outbox.report(event.tier, taken[taken >= 0], gained=True)
    r.counters[f"restored_blocks_{r.tiers[event.tier].spec.name}"] += len(group)


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
    extents, namespaces = leases.residency.tiers[event.tier].extents, leases.namespaces
    numbers, at = np.unique(event.namespace, return_inverse=True)
    owner = np.array([namespaces[n].tenant for n in numbers.tolist()], np.int64)
    held, where = np.unique(event.extent, return_inverse=True)
    holder = np.array([extents.slots.classes.of_extent(e).pool.tenant for e in held.tolist()], np.int64)
    own: npt.NDArray[np.bool_] = owner[at] == holder[where]
    return own


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


def _link(r: Residency, event: ev.Restore, taken: Rows, namespace: int) -> None:
    """Links the blocks of a namespace that have no parent row to their parents."""
    orphan = (event.namespace == namespace) & (event.parent_bytes > 0) & (taken >= 0)
    orphan[orphan] = r.blocks.parent[taken[orphan]] < 0
    which = np.flatnonzero(orphan)
    # Most blocks come right after their parent. Then no key is looked up.
    before = np.maximum(which - 1, 0)
    near = (event.key_bytes[before] == event.parent_bytes[which]) & (event.namespace[before] == namespace)
    near &= (which > 0) & (_words(event.keys)[before] == _words(event.parents)[which]).all(axis=1)
    parents = np.where(near, taken[before], -1)
    for length in np.unique(event.parent_bytes[which[~near]]).tolist():
        some = ~near & (event.parent_bytes[which] == length)
        parents[some] = _adopt(r, namespace, _keys(event.parents, which[some], length))
    r.chains.link(taken[which[parents >= 0]], parents[parents >= 0])


def _words(column: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return column.view(np.uint64)


def _keys(column: npt.NDArray[np.uint8], which: Rows, size: int) -> Keys:
    return Keys(np.ascontiguousarray(column[which, :size]).tobytes(), size)


def _rows_for(r: Residency, namespace: int, keys: Keys) -> Rows:
    """Returns LIVE rows for distinct keys, new rows without a parent; -1 where no rows are left."""
    rows = r.index.find(namespace, keys)
    r.chains.count_holes(rows[(rows >= 0) & (r.blocks.state[rows] == HOLE)], -1)
    new = np.flatnonzero(rows < 0)
    taken = r.blocks.take(namespace, keys, new)
    r.index.add(taken, _AT_ONCE)
    rows[new[: len(taken)]] = taken
    r.blocks.state[rows[rows >= 0]] = LIVE
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
