"""The outbox of one event: the actions that the executor will run, in order.

Also covers reports of blocks that reach or leave a tier, for routers (`telling`) and for waiting network
lookups (`awaited`), and offers of blocks to the network.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import Action, BlockIds, BlocksArrived, CopyReport, OfferBlocks, Where, WriteHeader
from kvstore.core.blocks.block_table import LIVE, Blocks, Rows
from kvstore.core.policy.admission import Admission
from kvstore.core.residency.namespace import Namespace


class Outbox:
    """`actions` of the current event, which happens at `now` (s).

    `telling`: report blocks that reach or leave a tier. `awaited` counts waiting lookups by the first word
    of their key. `sharing` admits the blocks that are offered to the network; None: no block is offered.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.now = 0.0
        self.actions: list[Action] = []
        self.telling = False
        self.awaited: Counter[int] = Counter()
        self.sharing: Admission | None = None

    def take(self) -> list[Action]:
        """Empties the outbox and returns its actions."""
        actions, self.actions = self.actions, []
        return actions

    def ids(self, rows: Rows) -> BlockIds:
        """Returns copies of the rows' identities."""
        b = self._blocks
        return BlockIds(b.namespace[rows], b.all_words(rows), b.key_bytes[rows], b.checksum[rows])

    def _parent_ids(self, rows: Rows) -> BlockIds:
        """Returns the identities of the rows' parents; keys of 0 bytes for roots."""
        above = self._blocks.parent[rows].astype(np.int64)
        parents = self.ids(above)
        parents.words[above < 0] = 0
        parents.key_bytes[above < 0] = 0
        return parents

    def ttls(self, rows: Rows) -> npt.NDArray[np.float64] | None:
        """Returns the seconds until each block expires (infinity: never); None if no block expires."""
        ends = self._blocks.expires[rows]
        return np.where(ends > 0, ends - self.now, np.inf) if ends.any() else None

    def write_headers(self, tier: int, rows: Rows, where: Where, version: npt.NDArray[np.uint32]) -> None:
        """Asks for the headers of slots that have become readable."""
        ids, parents = self.ids(rows), self._parent_ids(rows)
        self.actions.append(WriteHeader(tier, ids, parents, where, version, self.ttls(rows)))

    def report(self, tier: int, rows: Rows, gained: bool) -> None:
        """Reports that rows have gained or lost their copy in a tier, if a reader of reports exists."""
        if self.awaited and gained:
            self._report_awaited(rows)
        if self.telling and len(rows):
            parents = self._parent_ids(rows) if gained else None
            self.actions.append(CopyReport(tier, self.ids(rows), parents))

    def _report_awaited(self, rows: Rows) -> None:
        came = [word in self.awaited for word in self._blocks.words[0, rows, 0].tolist()]
        if any(came):
            self.actions.append(BlocksArrived(self.ids(rows[np.array(came)])))

    def offer(self, rows: Rows, namespace: Namespace) -> None:
        """Offers the admitted blocks in DRAM to the network, each block once."""
        if self.sharing is None or namespace.has_ttl:
            return
        b = self._blocks
        rows = rows[~b.offered[rows] & (b.slot[0, rows] >= 0) & (b.state[rows] == LIVE)]
        rows = rows[self.sharing.admits(rows, namespace.tenant, self.now)] if len(rows) else rows
        if len(rows):
            b.offered[rows] = True
            self.actions.append(OfferBlocks(self.ids(rows)))
