"""Publication: moves the blocks of a namespace to DRAM that its readers may map, or back.

Each namespace moves in steps. A block that another tier holds too leaves DRAM; other blocks are copied to the
pool of the new domain.

Not covered: who may read a namespace. The daemon decides that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvstore.core import events as ev
from kvstore.core.actions import Answer
from kvstore.core.blocks.block_table import LIVE
from kvstore.core.jobs import Job
from kvstore.core.requests.leases import LeaseTable
from kvstore.core.requests.reads import Reads
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.residency.namespace import Namespace
from kvstore.core.residency.residency import DEMOTE, WRITING

_ROWS_AT_ONCE = 1 << 12  # rows per step, which delay all other requests
_BLOCKS_AT_ONCE = 512
_GIVE_UP_AFTER_S = 10.0
_NEXT_STEP_S = 0.001
_NEXT_LOOK_S = 0.05


@dataclass(slots=True)
class _Relocation:
    """A namespace whose blocks move to another domain. Rows before `row` are done since `since` (s)."""

    namespace: Namespace
    since: float
    row: int = 0


class Publication(Job):
    """Publish. As a job, moves namespaces to other domains of tier 0. `_requests`: namespaces by request."""

    def __init__(self, leases: LeaseTable, reads: Reads) -> None:
        self._leases = leases
        self._r = leases.residency
        self._copies = leases.copies
        self._eviction = leases.eviction
        self._transfers = leases.transfers
        self._reads = reads
        self._relocations: dict[int, _Relocation] = {}
        self._requests: dict[int, int] = {}

    def publish(self, event: ev.Publish, now: float) -> None:
        namespace = self._r.namespaces[event.namespace]
        pool = namespace.pools[0]._replace(domain=event.domain)
        if pool != namespace.pools[0]:
            namespace.pools, namespace.relocated = (pool, *namespace.pools[1:]), True
            self._r.presence.retire(namespace.number)
            self._relocate(namespace, now)
            if not self.is_settled(namespace.number):
                self._requests[event.request] = namespace.number
                return
        self._leases.say(Answer(event.request, 0))

    def answer_settled(self) -> None:
        """Answers the requests whose namespaces have moved."""
        for request, namespace in list(self._requests.items()):
            if self.is_settled(namespace):
                del self._requests[request]
                self._leases.say(Answer(request, 0))

    def is_settled(self, namespace: int) -> bool:
        """Returns whether no block of a namespace is moving to another pool of tier 0."""
        return namespace not in self._relocations and not self._copies.relocates(namespace)

    def _relocate(self, namespace: Namespace, now: float) -> None:
        """Starts to move a namespace.

        Readers of other tenants that wait get a miss, because they may not map the new pool.
        """
        # First: the end of a promotion would grant them what is already in the earlier pool.
        self._reads.end(namespace, but=namespace.tenant)
        self._reads.arrived(self._copies.cancel_promotions(namespace.number))
        self._relocations[namespace.number] = _Relocation(namespace, now)
        self._step(now)

    def _step(self, now: float) -> None:
        progressed = [self._relocate_some(each, now) for each in list(self._relocations.values())]
        later = now + (_NEXT_STEP_S if any(progressed) else _NEXT_LOOK_S)
        self._next_step = later if self._relocations else math.inf

    def _relocate_some(self, relocation: _Relocation, now: float) -> bool:
        """Takes one step. Returns whether it made progress."""
        r, namespace, blocks = self._r, relocation.namespace, self._r.blocks
        number, table = namespace.number, r.tiers[0].slots
        if namespace.pools[0] not in table.classes:
            # Before any slot is held: one of them might have to be evicted for this pool.
            self._eviction.make_room(0, namespace.pools[0], 1)
        last = min(relocation.row + _ROWS_AT_ONCE, blocks.rows_touched)
        here = slice(relocation.row, last)
        mine = (blocks.namespace[here] == number) & (blocks.state[here] == LIVE) & (blocks.slot[0, here] >= 0)
        rows = relocation.row + np.flatnonzero(mine)
        rows = rows[~table.are_of(namespace.pools[0], blocks.slot[0, rows])]
        if len(rows) > _BLOCKS_AT_ONCE:
            rows, last = rows[:_BLOCKS_AT_ONCE], int(rows[_BLOCKS_AT_ONCE])
        # Blocks that are being written to a lower tier leave DRAM afterwards.
        writing = self._copies.written_from(0, rows)
        blocks.copy_marks[writing] |= DEMOTE
        # Blocks that are being written from a GPU have to wait.
        waits = rows[((blocks.copy_marks[rows] & WRITING) > 0) & ~np.isin(rows, writing)]
        rows = rows[blocks.copy_marks[rows] == 0]
        twice = rows[r.copies(rows) > 1]
        self._reads.arrived(self._copies.cancel(twice, 0))
        r.decisions.record(DecisionKind.EVICTED, 0, twice, now)
        r.give_up(0, twice)
        rows = rows[blocks.slot[0, rows] >= 0]
        n = self._transfers.relocate(namespace, rows)
        later = len(waits) > 0 or (n < len(rows) and self._eviction.rebalancing.under_way)
        if later and now - relocation.since < _GIVE_UP_AFTER_S:
            return n > 0
        relocation.row, relocation.since = last, now
        if last >= blocks.rows_touched or namespace.closed:
            del self._relocations[number]
        return True
