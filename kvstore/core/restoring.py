"""Start-up: what a tier already holds becomes rows, links and places in the order of eviction."""

from __future__ import annotations

import numpy as np

from kvstore.core import events as ev
from kvstore.core.blocks import HOLE, LIVE, Rows
from kvstore.core.keys import Keys
from kvstore.core.ledger import Ledger
from kvstore.core.residency import Residency
from kvstore.types import slot_bytes


def restore(ledger: Ledger, event: ev.Restore, write_down: bool) -> None:
    """Takes in what a tier holds: first all blocks, then who is whose child.

    `write_down`: what no lower tier has goes there.
    """
    r = ledger.residency
    extents = r.tiers[event.tier].extents
    event = event.only(extents.has(event.extent))
    group = event.namespace.astype(np.int64) << 8 | event.key_bytes
    for code in np.unique(group).tolist():
        namespace, size = code >> 8, code & 0xFF
        which = np.flatnonzero(group == code)
        keys = Keys(np.ascontiguousarray(event.keys[which, :size]).tobytes(), size)
        rows = _rows_for(r, namespace, keys)
        which, rows = which[rows >= 0], rows[rows >= 0]
        slots = extents.slots_at(event.extent[which].astype(np.int64), event.index[which].astype(np.int64))
        room = slot_bytes(ledger.namespaces[namespace])
        _disown_others(r, event, rows[r.blocks.checksum[rows] != event.checksum[which]], room)
        r.blocks.checksum[rows] = event.checksum[which]
        r.blocks.slot[event.tier, rows] = slots
        versions = event.version[which].astype(np.int64)
        extents.claim(room, slots, rows, versions, event.checksum[which])
        r.policy(event.tier, room).insert(rows)
        if write_down:
            ledger.transfers.queue_writes(rows)
    for code in np.unique(group).tolist():
        _link(r, event, code >> 8, np.flatnonzero(group == code), code & 0xFF)
    r.counters[f"restored_blocks_{r.tiers[event.tier].spec.tier.name.lower()}"] += len(group)


def _disown_others(r: Residency, event: ev.Restore, rows: Rows, slot_bytes: int) -> None:
    """Copies in other tiers with other bytes under these keys: an earlier life was about to drop them."""
    for tier in range(len(r.tiers)):
        held = rows[r.blocks.slot[tier, rows] >= 0]
        if tier != event.tier and len(held):
            r.give_up(tier, slot_bytes, held, vanish=False)


def _link(r: Residency, event: ev.Restore, namespace: int, which: Rows, size: int) -> None:
    which = which[event.parent_bytes[which] > 0]
    for length in np.unique(event.parent_bytes[which]).tolist():
        some = which[event.parent_bytes[which] == length]
        keys = Keys(np.ascontiguousarray(event.keys[some, :size]).tobytes(), size)
        rows = r.index.find(namespace, keys)
        orphan = rows >= 0
        orphan[orphan] = r.blocks.parent[rows[orphan]] < 0
        some, rows = some[orphan], rows[orphan]
        names = Keys(np.ascontiguousarray(event.parents[some, :length]).tobytes(), length)
        parents = _adopt(r, namespace, names)
        rows, parents = rows[parents >= 0], parents[parents >= 0]
        apart = ~r.would_loop(rows, parents)
        r.link(rows[apart], parents[apart])


def _rows_for(r: Residency, namespace: int, keys: Keys) -> Rows:
    """LIVE rows for distinct blocks, new ones without a parent; -1 where there are no rows left."""
    rows = r.index.find(namespace, keys)
    r.count_holes(rows[(rows >= 0) & (r.blocks.state[rows] == HOLE)], -1)
    new = np.flatnonzero(rows < 0)
    taken = r.blocks.take(namespace, keys, new)
    r.index.add(taken)
    rows[new[: len(taken)]] = taken
    r.blocks.state[rows[rows >= 0]] = LIVE
    return rows


def _adopt(r: Residency, namespace: int, parents: Keys) -> Rows:
    """Rows of restored blocks' parents, -1 where no row is left; one that is not stored becomes a hole."""
    found = r.index.find(namespace, parents)
    missing = np.flatnonzero(found < 0)
    if len(missing):
        distinct = {parents[i]: i for i in missing.tolist()}
        rows = r.blocks.take(namespace, parents, np.array(list(distinct.values())))
        r.index.add(rows)
        r.keep_as_holes(rows)
        found = r.index.find(namespace, parents)
    return found
