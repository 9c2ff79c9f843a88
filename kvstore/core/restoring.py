"""Start-up: what a tier already holds becomes rows, links and places in the order of eviction."""

from __future__ import annotations

import numpy as np

from kvstore.core import events as ev
from kvstore.core.blocks import Rows
from kvstore.core.keys import Keys
from kvstore.core.ledger import Ledger
from kvstore.core.residency import Residency
from kvstore.types import slot_bytes


def restore(ledger: Ledger, event: ev.Restore) -> None:
    """Takes in what a tier holds: first all blocks, then who is whose child."""
    r = ledger.residency
    extents = r.tiers[event.tier].extents
    event = event.only(extents.has(event.extent))
    group = event.namespace.astype(np.int64) << 8 | event.key_bytes
    for code in np.unique(group).tolist():
        namespace, size = code >> 8, code & 0xFF
        which = np.flatnonzero(group == code)
        keys = Keys(np.ascontiguousarray(event.keys[which, :size]).tobytes(), size)
        slots = extents.slots_at(event.extent[which].astype(np.int64), event.index[which].astype(np.int64))
        rows = r.restore(event.tier, namespace, keys, slots)
        which, slots = which[: len(rows)], slots[: len(rows)]
        r.blocks.checksum[rows] = event.checksum[which]
        room = slot_bytes(ledger.namespaces[namespace])
        extents.claim(room, slots, rows, event.version[which].astype(np.int64))
        r.policy(event.tier, room).insert(rows)
    for code in np.unique(group).tolist():
        _link(r, event, code >> 8, np.flatnonzero(group == code), code & 0xFF)
    r.counters["restored_blocks"] += len(group)


def _link(r: Residency, event: ev.Restore, namespace: int, which: Rows, size: int) -> None:
    which = which[event.parent_bytes[which] > 0]
    for length in np.unique(event.parent_bytes[which]).tolist():
        some = which[event.parent_bytes[which] == length]
        keys = Keys(np.ascontiguousarray(event.keys[some, :size]).tobytes(), size)
        rows = r.index.find(namespace, keys)
        some, rows = some[rows >= 0], rows[rows >= 0]
        parents = Keys(np.ascontiguousarray(event.parents[some, :length]).tobytes(), length)
        r.link(rows, r.adopt(namespace, parents))
