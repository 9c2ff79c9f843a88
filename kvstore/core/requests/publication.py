"""Publication: the blocks of a namespace move to memory that its readers may map, and back.

Routers are told of blocks here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvstore.core import events as ev
from kvstore.core.blocks.block_table import LIVE
from kvstore.core.blocks.residency import DEMOTE, WRITING
from kvstore.core.capacity.quotas import Namespace
from kvstore.core.insight.decision_log import DecisionKind
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.requests.reads import Reads

_ROWS_AT_ONCE = 1 << 12  # looked through at a step, which the event loop waits for
_BLOCKS_AT_ONCE = 512
_GIVE_UP_AFTER_S = 10.0
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


@dataclass(slots=True)
class _Move:
    """A namespace whose blocks move to another domain: from `row` on, which is waited at `since` then."""

    space: Namespace
    since: float
    row: int = 0


class Publication:
    """Moves namespaces to other domains of tier 0, step by step."""

    def __init__(self, ledger: LeaseTable, reads: Reads) -> None:
        self._r = ledger.residency
        self._copies = ledger.copies
        self._eviction = ledger.eviction
        self._transfers = ledger.transfers
        self._reads = reads
        self._moving: dict[int, _Move] = {}
        self._next_step = math.inf

    def tell(self, event: ev.Tell, now: float) -> None:
        r = self._r
        rows = r.index.find(event.namespace, event.keys)
        rows = rows[rows >= 0]
        for tier in range(len(r.tiers)):
            r.tell(tier, rows[r.blocks.slot[tier, rows] >= 0], gained=True)

    def move(self, space: Namespace, now: float) -> None:
        """What a namespace has in tier 0 goes to its new pool there, or away if another tier has it too.

        Step by step. Readers of other tenants that wait are told that there is nothing: they may not look
        where it is going, perhaps.
        """
        self._reads.arrived(self._copies.cancel_promotions(space.number))
        self._reads.end(space, but=space.tenant)
        self._moving[space.number] = _Move(space, now)
        self._next_step = now
        self.at(now)

    def at(self, now: float) -> None:
        """It is `now`: goes on with what moves."""
        if now < self._next_step:
            return
        got_on = [self._move_some(move, now) for move in list(self._moving.values())]
        later = now + (_NEXT_STEP_S if any(got_on) else _NEXT_LOOK_S)
        self._next_step = later if self._moving else math.inf

    def wakes_at(self) -> float:
        """When there is something to go on with."""
        return self._next_step

    def has_moved(self, namespace: int) -> bool:
        """Whether nothing of a namespace is on its way to another pool of tier 0."""
        return namespace not in self._moving and not self._copies.relocates(namespace)

    def _move_some(self, move: _Move, now: float) -> bool:
        """Takes one step; whether that got it on."""
        r, space, blocks = self._r, move.space, self._r.blocks
        number, extents = space.number, r.tiers[0].extents
        if space.pools[0] not in extents.classes:
            # Before anything is held that would have to leave for it.
            self._eviction.make_room(0, space.pools[0], 1)
        last = min(move.row + _ROWS_AT_ONCE, blocks.rows_touched)
        here = slice(move.row, last)
        mine = (blocks.namespace[here] == number) & (blocks.state[here] == LIVE) & (blocks.slot[0, here] >= 0)
        rows = move.row + np.flatnonzero(mine)
        rows = rows[~extents.are_of(space.pools[0], blocks.slot[0, rows])]
        if len(rows) > _BLOCKS_AT_ONCE:
            rows, last = rows[:_BLOCKS_AT_ONCE], int(rows[_BLOCKS_AT_ONCE])
        # What is on its way down already leaves when it is there.
        writing = self._copies.written_from(0, rows)
        blocks.moving[writing] |= DEMOTE
        # What a GPU has may be on its way down too.
        waits = rows[((blocks.moving[rows] & WRITING) > 0) & ~np.isin(rows, writing)]
        rows = rows[blocks.moving[rows] == 0]
        twice = rows[r.copies(rows) > 1]
        self._reads.arrived(self._copies.cancel(twice, 0))
        r.decisions.record(DecisionKind.EVICTED, 0, twice, now)
        r.give_up(0, twice)
        rows = rows[blocks.slot[0, rows] >= 0]
        n = self._transfers.relocate(space, rows)
        later = len(waits) > 0 or (n < len(rows) and self._eviction.under_way)
        if later and now - move.since < _GIVE_UP_AFTER_S:
            return n > 0
        move.row, move.since = last, now
        if last >= blocks.rows_touched or space.closed:
            del self._moving[number]
        return True
