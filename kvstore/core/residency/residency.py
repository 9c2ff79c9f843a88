"""The stored blocks and their slots: keeps rows, index, links, slots, pins and policies in step.

Not covered: which blocks are evicted or copied; see `transfers.eviction` and `transfers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import Drop, Where
from kvstore.core.blocks.block_table import LIVE, Blocks, Picked, Rows, compact
from kvstore.core.blocks.index import Index
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.capacity.slot_classes import Slots
from kvstore.core.queues.device_queue import TierSpec
from kvstore.core.residency.chains import Chains
from kvstore.core.residency.decision_log import Decisions
from kvstore.core.residency.gaps import Gaps
from kvstore.core.residency.namespace import Namespace, Namespaces
from kvstore.core.residency.outbox import Outbox
from kvstore.core.residency.pin_table import PinTable
from kvstore.core.residency.presence import PresenceTables
from kvstore.core.residency.topology import Topology
from kvstore.core.reuse.reuse import Reuse

PROMOTING, WRITING, DEMOTE = 1, 2, 4
"""Bits of `Blocks.copy_marks`: a copy to DRAM; a copy to a lower tier; drop the upper copy when it ends."""

_LEAST_GHOSTS = 1 << 18


class Residency:
    """The blocks of one placement and the tiers that hold them.

    `tiers` is the list of `topology`. `copying` counts copies that are queued or under way, by tenant.
    `ending`: the process may stop soon, so copies in memory tiers do not count. `now`: the time of the
    current event, in s.
    """

    def __init__(self, specs: Sequence[TierSpec], max_blocks: int, seed: int, policy: str) -> None:
        self.blocks = Blocks(max_blocks, len(specs))
        self.index = Index(self.blocks, seed)
        self.reuse = Reuse(self.blocks, max(max_blocks, _LEAST_GHOSTS), seed)
        self.decisions = Decisions(self.blocks, self.reuse)
        self.topology = Topology(specs, self.blocks, self.reuse, seed, policy)
        self.tiers = self.topology.tiers
        self.namespaces = Namespaces(self.blocks)
        self.gaps = Gaps()
        self.chains = Chains(self.blocks, self.index, self.reuse, self.gaps)
        self.pins = PinTable(self.blocks, self.namespaces)
        self.outbox = Outbox(self.blocks)
        self.presence = PresenceTables(self.blocks, self.namespaces, self.topology, self.outbox, self.gaps)
        self.now = 0.0
        self.ending = False
        self.copying: Counter[int] = Counter()
        self.counters: Counter[str] = Counter()
        self._uses: list[tuple[Picked, Namespace, int | None, bool, float]] = []

    def advance(self, now: float) -> None:
        """Begins an event at `now`. Applies the uses that the previous event recorded."""
        self.settle()
        self.now = self.chains.now = self.outbox.now = now

    # -- which tiers have a block

    def copies(self, rows: Rows, persistent: bool = False) -> npt.NDArray[np.int64]:
        """Returns the number of (`persistent`) tiers with a copy of each row. Lost devices do not count."""
        slot = self.blocks.slot[:, rows]
        if persistent:
            slot = slot[self.topology.persistent]
        elif self.topology.losing:
            slot = slot[[i for i in range(len(self.tiers)) if i not in self.topology.losing]]
        n: npt.NDArray[np.int64] = (slot >= 0).sum(axis=0)
        return n

    def alone_in_memory(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which rows have copies in memory tiers only."""
        slot = self.blocks.slot[:, rows]
        alone: npt.NDArray[np.bool_] = np.logical_or.reduce(slot[self.topology.memory] >= 0)
        alone &= ~np.logical_or.reduce(slot[self.topology.persistent] >= 0)
        return alone

    def idle(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which rows have a copy in a tier that is neither referenced nor pinned."""
        slots = self.blocks.slot[tier, rows]
        idle: npt.NDArray[np.bool_] = (self.tiers[tier].slots.refs[slots] == 0) & (slots >= 0)
        idle &= ~self.kept(tier, rows)
        return idle

    def kept(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Returns which copies in a tier are protected by pins. In HBM, pins protect only last copies."""
        pinned: npt.NDArray[np.bool_] = self.blocks.pinned[rows]
        if tier in self.topology.memory[1:] and pinned.any():
            pinned &= self.copies(rows) == 1
        return pinned

    # -- reading

    def resident_run(self, namespace: int, keys: Keys, tier: int = 0) -> tuple[slice, Picked] | None:
        """Returns (rows, slots in a tier) if all keys lie in consecutive rows and all are in the tier.

        This is the fast path of the most common request. None does not mean that blocks are missing.
        """
        first = self.index.find_run(namespace, keys)
        if first < 0:
            return None
        run = slice(first, first + keys.n)
        slots = compact(self.blocks.slot[tier, run])
        # A row that is not live has no slot.
        there = slots.start >= 0 if isinstance(slots, slice) else slots.min() >= 0
        return (run, slots) if there else None

    def readable(self, namespace: int, keys: Keys) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Returns the row of each key, below 0 if it has none, and whether the key is readable."""
        rows = self.index.find(namespace, keys)
        good = (rows >= 0) & (self.blocks.state[rows] == LIVE)
        if self.topology.out_of_reach:
            within = [i for i, t in enumerate(self.tiers) if i == 0 or t.device.readable]
            good &= (self.blocks.slot[:, rows][within] >= 0).any(axis=0)
        if self.namespaces[namespace].has_ttl:
            good &= ~self.blocks.expired(rows, self.now)
        return rows, good

    def prefix(self, namespace: int, keys: Keys) -> Rows:
        """Returns the rows of the leading readable keys, up to the first repeated key."""
        rows, good = self.readable(namespace, keys)
        _, first = np.unique(rows, return_index=True)
        if len(first) < len(rows):
            once = np.zeros(len(rows), np.bool_)
            once[first] = True
            good &= once
        return rows if good.all() else rows[: int(good.argmin())]

    def search_prefix(self, namespace: int, keys: Keys) -> int:
        """Returns the length of the readable prefix by binary search. Wrong if a parent is missing."""
        low, high = 0, keys.n
        while low < high:
            middle = (low + high) // 2
            row = self.index.find_one(namespace, keys[middle])
            if row >= 0 and self.blocks.state[row] == LIVE:
                low = middle + 1
            else:
                high = middle
        return low

    # -- uses

    def touch(self, rows: Picked, namespace: Namespace) -> None:
        """Records a use of a chain from its root. The next event applies it, after the answer is sent."""
        self._uses.append((rows, namespace, None, True, self.now))

    def refresh(self, rows: Picked, namespace: Namespace, tier: int | None = None) -> None:
        """Records new blocks of a chain in one tier, or in all: its start must stay as long as they do."""
        self._uses.append((rows, namespace, tier, False, self.now))

    def settle(self) -> None:
        """Tells the policies which blocks were used."""
        for rows, namespace, only, used, when in self._uses:
            numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            if used:
                self.reuse.used(numbers, namespace.tenant, when)
                self.outbox.offer(numbers, namespace)
            chain = None
            for tier in range(len(self.tiers)) if only is None else (only,):
                state, pool = self.tiers[tier], namespace.pools[tier]
                state.extents.holdings.mark_active(pool.tenant, self.now)
                policy = state.policies.get(pool)
                if policy is None or not (used or policy.follows_children):
                    continue
                if chain is None:
                    chain = self.chains.with_ancestors(numbers) if policy.follows_children else numbers
                some = self._in_pool(tier, pool, chain) if namespace.relocated else chain
                if used:
                    policy.touch(some, when)
                else:
                    policy.refresh(some)
        self._uses.clear()

    def _in_pool(self, tier: int, pool: SlotPool, rows: Rows) -> Rows:
        rows = rows[self.blocks.slot[tier, rows] >= 0]
        return rows[self.tiers[tier].slots.are_of(pool, self.blocks.slot[tier, rows])]

    # -- new and dropped copies

    def where(self, tier: int, slots: Slots) -> Where:
        """Returns the places of slots."""
        return Where(self.tiers[tier].slots.place[slots])

    def place(self, tier: int, rows: Rows, slots: Slots) -> None:
        """Makes slots the copies of rows in a tier. The rows are chains, each in order."""
        table = self.tiers[tier].slots
        self.blocks.slot[tier, rows] = slots
        table.own(slots, rows, self.blocks.checksum[rows])
        for members, some in table.by_class(slots):
            self.topology.policy(tier, members.pool).insert(table.owner[some].astype(np.int64), self.now)
        # A parent that looks older than its child would be evicted first.
        for namespace, some in self.namespaces.split(rows):
            self.refresh(some, namespace, tier)
        self.presence.changed(tier, rows)
        self.outbox.report(tier, rows, gained=True)

    def write_headers(self, tier: int, rows: Rows, slots: Slots) -> None:
        """Asks for the headers of slots that have become readable."""
        version = self.tiers[tier].slots.version[slots]
        self.outbox.write_headers(tier, rows, self.where(tier, slots), version)

    def give_up(self, tier: int, rows: Rows, retire: bool = False, vanish: bool = True) -> None:
        """Drops rows' copies in one tier. Frees rows without another copy, or turns them into holes.

        `retire`: their slots are not used again. `vanish` False: the caller is about to place the rows in
        other slots, so the rows stay and the loss is not reported.
        """
        if not len(rows):
            return
        table = self.tiers[tier].slots
        slots = self.blocks.slot[tier, rows].astype(np.int64)
        self.outbox.actions.append(Drop(tier, self.outbox.ids(rows), self.where(tier, slots)))
        self.blocks.slot[tier, rows] = -1
        for members, some in table.by_class(slots):
            self.topology.policy(tier, members.pool).remove(table.owner[some].astype(np.int64))
        (table.retire if retire else table.disown)(slots)
        if vanish:
            self.presence.changed(tier, rows)
            self.outbox.report(tier, rows, gained=False)
        lost = rows[(self.blocks.slot[:, rows] < 0).all(axis=0)]
        if len(lost) and vanish:
            self.counters["dropped_blocks"] += len(lost)
            self.vanish(lost)

    def vanish(self, rows: Rows) -> None:
        """Frees rows without a copy, and their pins. Rows with children become holes."""
        if len(rows):
            self.pins.unpin(rows[self.blocks.pinned[rows]])
            self.chains.remove(rows)

    def ram_bytes(self) -> int:
        """Bytes of all state about blocks, for the rows and slots used so far."""
        blocks = self.blocks.ram_bytes() + self.index.ram_bytes()
        blocks += self.presence.ram_bytes()
        return blocks + self.topology.ram_bytes() + self.decisions.ram_bytes() + self.reuse.ram_bytes
