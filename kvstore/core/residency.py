"""Which blocks there are and which slots hold them: rows, index, extents and policies, kept in step.

Residency knows no client. It makes room by the policy's order and these verdicts, in this order: a copy that
another tier holds too is simply given up; the only copy goes down where a lower tier takes it; else it is
dropped if it is a leaf. A block in use, pinned or with children stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import Action, Drop, Format, Identity, Stamp, Where
from kvstore.core.blocks import HOLE, LIVE, RESERVED, Blocks, Picked, Rows, compact
from kvstore.core.extents import Extents, Slots
from kvstore.core.index import Index
from kvstore.core.keys import Keys
from kvstore.core.policy import POLICIES, Policy
from kvstore.types import Tier

PROMOTING, WRITING, DEMOTE = 1, 2, 4
"""Bits of `Blocks.moving`: a copy up is under way; a copy down is; give the upper copy up when it ends."""

_SCAN_MIN = 64
_AHEAD = 32
_LONGEST_CHAIN = 1 << 17


@dataclass(slots=True)
class TierSpec:
    """A tier as configured. `table`: its extents start with slot headers (shared memory)."""

    tier: Tier
    limit_bytes: int
    extent_bytes: int
    table: bool


@dataclass(slots=True)
class TierState:
    """A tier at run time. Nothing is written to it before `closed_until` (its device failed).

    `growing`: more extents are on their way. `moving`: copies from and to it under way, of which none has
    ended since `quiet_since`. `fenced`: too long ago, and until one ends its blocks are out of reach.
    """

    spec: TierSpec
    extents: Extents
    policies: dict[int, Policy] = field(default_factory=dict)
    closed_until: float = 0.0
    failures: int = 0
    growing: bool = True
    moving: int = 0
    quiet_since: float = 0.0
    fenced: bool = False

    @property
    def takes_writes(self) -> bool:
        """Whether copies to it may start."""
        return not self.closed_until and not self.fenced


Demote = Callable[[int, int, Rows], npt.NDArray[np.bool_]]
"""(tier, slot size, rows) -> which of these rows are now on their way down, and will leave when there."""


class Residency:
    """State of all tiers, tier 0 serving. `out` collects actions; `counters` counts what happened."""

    def __init__(self, specs: Sequence[TierSpec], max_blocks: int, seed: int, policy: str) -> None:
        self.blocks = Blocks(max_blocks, len(specs))
        self.index = Index(self.blocks, seed)
        self.tiers = [
            TierState(s, Extents(s.limit_bytes, s.extent_bytes, s.table, max_blocks, s.tier)) for s in specs
        ]
        self.policy_name = policy
        self.holes: Counter[int] = Counter()
        self.pins: dict[int, float] = {}
        self.counters: Counter[str] = Counter()
        self.out: list[Action] = []
        self._touched: list[tuple[Picked, int, int | None]] = []
        self._parent_of = self.blocks.parent.data

    def policy(self, tier: int, slot_bytes: int) -> Policy:
        """The policy of one tier and slot size."""
        policies = self.tiers[tier].policies
        if slot_bytes not in policies:
            policies[slot_bytes] = POLICIES[self.policy_name](self.blocks.capacity)
        return policies[slot_bytes]

    # -- reading

    def resident_run(self, namespace: int, keys: Keys) -> tuple[slice, Picked] | None:
        """(rows, slots of tier 0) if all keys lie in a run of rows, as a chain stored at one go does.

        The short way of the commonest request; None says nothing about what is stored.
        """
        first = self.index.find_run(namespace, keys)
        if first < 0:
            return None
        run = slice(first, first + keys.n)
        slots = compact(self.blocks.slot[0, run])
        # A row that is not live has no slot.
        there = slots.start >= 0 if isinstance(slots, slice) else slots.min() >= 0
        return (run, slots) if there else None

    def prefix(self, namespace: int, keys: Keys) -> Rows:
        """Rows of the leading keys that are readable, up to the first key that repeats: no chain has one."""
        rows = self.index.find(namespace, keys)
        good = (rows >= 0) & (self.blocks.state[rows] == LIVE)
        if self.fenced:
            within = [i for i, t in enumerate(self.tiers) if not t.fenced]
            good &= (self.blocks.slot[:, rows][within] >= 0).any(axis=0)
        _, first = np.unique(rows, return_index=True)
        if len(first) < len(rows):
            once = np.zeros(len(rows), np.bool_)
            once[first] = True
            good &= once
        return rows if good.all() else rows[: int(good.argmin())]

    @property
    def fenced(self) -> bool:
        """Whether some tier is."""
        return any(t.fenced for t in self.tiers)

    def count_prefix(self, namespace: int, keys: Keys) -> int:
        """Length of the readable prefix, every key looked at."""
        return len(self.prefix(namespace, keys))

    def search_prefix(self, namespace: int, keys: Keys) -> int:
        """Length of the readable prefix by binary search, log2(n) probes: right if no parent is missing."""
        low, high = 0, keys.n
        while low < high:
            middle = (low + high) // 2
            row = self.index.find_one(namespace, keys[middle])
            if row >= 0 and self.blocks.state[row] == LIVE:
                low = middle + 1
            else:
                high = middle
        return low

    def with_ancestors(self, rows: Rows) -> Rows:
        """The chain from its root down to and including `rows` (a chain itself, in order)."""
        up: list[int] = []
        row = self._parent_of[int(rows[0])] if len(rows) and rows[0] >= 0 else -1
        while row >= 0 and len(up) < _LONGEST_CHAIN:
            up.append(row)
            row = self._parent_of[row]
        return np.concatenate((np.array(up[::-1], np.int64), rows)) if up else rows

    def touch(self, rows: Picked, slot_bytes: int, tier: int | None = None) -> None:
        """A chain was used, from its root on, in one tier or in every one. Counted by `settle`."""
        self._touched.append((rows, slot_bytes, tier))

    def settle(self) -> None:
        """Tells the policies what was used: at the next event, when the answer is already on its way."""
        for rows, slot_bytes, only in self._touched:
            numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            chain = self.with_ancestors(numbers)
            for state in self.tiers if only is None else (self.tiers[only],):
                if slot_bytes in state.policies:
                    state.policies[slot_bytes].touch(chain)
        self._touched.clear()

    def identity(self, rows: Rows) -> Identity:
        """Who these rows are, copied out."""
        b = self.blocks
        return Identity(b.namespace[rows], b.words[rows], b.key_bytes[rows], b.checksum[rows])

    def stamp(self, tier: int, slot_bytes: int, rows: Rows, slots: Slots) -> None:
        """Has the headers of slots that have become readable written."""
        b = self.blocks
        above = b.parent[rows].astype(np.int64)
        parents = self.identity(above)
        parents.words[above < 0] = 0
        parents.key_bytes[above < 0] = 0
        where, version = self.where(tier, slots), self.tiers[tier].extents.version[slots]
        self.out.append(Stamp(tier, slot_bytes, self.identity(rows), parents, where, version))

    def where(self, tier: int, slots: Slots) -> Where:
        """Where slots are."""
        return Where(self.tiers[tier].extents.place[slots])

    # -- copies come and go

    def place(self, tier: int, slot_bytes: int, rows: Rows, slots: Slots) -> None:
        """These slots now hold valid copies of these rows, a chain in order."""
        self.blocks.slot[tier, rows] = slots
        self.tiers[tier].extents.own(slots, rows, self.blocks.checksum[rows])
        self.policy(tier, slot_bytes).insert(rows)
        # A child that arrives after its parent must not look younger, or the parent would be offered first.
        self.touch(rows, slot_bytes, tier)

    def give_up(
        self, tier: int, slot_bytes: int, rows: Rows, retire: bool = False, vanish: bool = True
    ) -> None:
        """These rows' copies in one tier are gone; a row without any copy goes too, or becomes a hole.

        Not so without `vanish`: the caller is about to place them elsewhere.
        """
        if not len(rows):
            return
        extents = self.tiers[tier].extents
        slots = self.blocks.slot[tier, rows].astype(np.int64)
        self.out.append(Drop(tier, slot_bytes, self.identity(rows), self.where(tier, slots)))
        self.blocks.slot[tier, rows] = -1
        self.policy(tier, slot_bytes).remove(rows)
        (extents.retire if retire else extents.disown)(slots)
        lost = rows[(self.blocks.slot[:, rows] < 0).all(axis=0)]
        if len(lost) and vanish:
            self.counters["dropped_blocks"] += len(lost)
            self.vanish(lost)

    def vanish(self, rows: Rows) -> None:
        """Rows without any copy leave; those with children stay as holes until the children are gone."""
        blocks = self.blocks
        for row in rows[blocks.pinned[rows]].tolist():
            self.unpin(row)
        self.count_holes(rows[blocks.state[rows] == HOLE], -1)
        blocks.state[rows] = RESERVED
        while len(rows):
            # A whole branch that goes together has no children left once its own links are undone.
            parents = blocks.parent[rows].astype(np.int64)
            np.subtract.at(blocks.children, parents[parents >= 0], 1)
            stay = np.zeros(len(rows), np.bool_)
            while (kept := (blocks.children[rows] > 0) & ~stay).any():
                # Those that must stay keep their own parents too.
                stay |= kept
                above = parents[kept]
                np.add.at(blocks.children, above[above >= 0], 1)
            gone = rows[~stay]
            self.keep_as_holes(rows[stay])
            rows = self._free_rows(gone, parents[~stay])

    def prune(self, rows: Rows) -> None:
        """Frees those of these rows that are holes and have lost their last child."""
        rows = rows[rows >= 0]
        self.vanish(rows[(self.blocks.state[rows] == HOLE) & (self.blocks.children[rows] == 0)])

    def keep_as_holes(self, rows: Rows) -> None:
        """These rows hold nothing, but have children."""
        self.blocks.state[rows] = HOLE
        self.count_holes(rows, 1)

    def _free_rows(self, rows: Rows, parents: Rows) -> Rows:
        """Frees childless rows; returns the holes above them that have become childless."""
        blocks = self.blocks
        self.index.remove(rows)
        blocks.give_back(rows)
        above: Rows = np.unique(parents[parents >= 0])
        above = above[(blocks.state[above] == HOLE) & (blocks.children[above] == 0)]
        self.count_holes(above, -1)
        blocks.state[above] = RESERVED
        return above

    def count_holes(self, rows: Rows, sign: int) -> None:
        """Keeps the number of holes of each namespace."""
        for namespace, n in zip(*np.unique(self.blocks.namespace[rows], return_counts=True), strict=True):
            self.holes[int(namespace)] += sign * int(n)

    def would_loop(self, rows: Rows, parents: Rows) -> npt.NDArray[np.bool_]:
        """Which rows have their new parent below themselves: only what a client made up can be like that."""
        loops = np.zeros(len(rows), np.bool_)
        for i in np.flatnonzero(self.blocks.children[rows] > 0).tolist():
            loops[i] = int(rows[i]) in self.with_ancestors(parents[i : i + 1]).tolist()
        return loops

    def link(self, rows: Rows, parents: Rows) -> None:
        """Makes `parents` (-1: root) the parents of rows that have none."""
        self.blocks.parent[rows] = parents
        np.add.at(self.blocks.children, parents[parents >= 0], 1)

    def pin(self, row: int, until: float) -> None:
        """Keeps a block from eviction."""
        self.blocks.pinned[row] = True
        self.pins[row] = until

    def unpin(self, row: int) -> None:
        """Undoes pin."""
        self.blocks.pinned[row] = False
        self.pins.pop(row, None)

    # -- making room

    def make_room(self, tier: int, slot_bytes: int, n: int, demote: Demote, patient: bool = False) -> int:
        """Frees slots until n are free, if it can; returns how many of the n are.

        `patient`: evicts nothing while more extents are on their way.
        """
        self.settle()
        extents = self.tiers[tier].extents
        while extents.free(slot_bytes) < n:
            extent = extents.assign(slot_bytes)
            if extent is None and not self.tiers[tier].growing:
                extent = self._take_over(tier, slot_bytes, demote)
            if extent is None:
                break
            self.out.append(Format(tier, extent, slot_bytes))
        short = n - extents.free(slot_bytes)
        if short > 0 and slot_bytes in extents.classes and not (patient and self.tiers[tier].growing):
            ahead = min(_AHEAD, extents.classes[slot_bytes].total // 64)
            self._evict(tier, slot_bytes, short + ahead, demote)
        return min(n, extents.free(slot_bytes))

    def make_rows(self, n: int, demote: Demote) -> None:
        """Drops blocks, from the lowest tier up, until n rows are free, if it can."""
        for tier in reversed(range(len(self.tiers))):
            for slot_bytes in list(self.tiers[tier].policies):
                short = n - (self.blocks.capacity - self.blocks.used)
                if short <= 0:
                    return
                self._evict(tier, slot_bytes, short, demote)

    def idle(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Whether nobody uses these rows' copies in a tier, and no pin keeps them."""
        slots = self.blocks.slot[tier, rows]
        idle: npt.NDArray[np.bool_] = (self.tiers[tier].extents.refs[slots] == 0) & (slots >= 0)
        idle &= ~self.blocks.pinned[rows]
        return idle

    def _evict(self, tier: int, slot_bytes: int, n: int, demote: Demote) -> None:
        policy = self.policy(tier, slot_bytes)
        budget = 4 * n + _SCAN_MIN
        while n > 0 and budget > 0:
            rows = policy.coldest(min(max(n, 16), budget))
            if not len(rows):
                return
            budget -= len(rows)
            idle = self.idle(tier, rows)
            busy = rows[~idle]
            only = (self.blocks.slot[:, rows] >= 0).sum(axis=0) == 1
            if not self._lower_tier_takes(tier, slot_bytes):
                # Nothing can go down, so the order alone decides: a copy elsewhere is a warmer block's.
                idle &= np.cumsum(idle) <= n
            spare = rows[idle & ~only][:n]
            self.give_up(tier, slot_bytes, spare)
            self.counters["evicted_copies"] += len(spare)
            n -= len(spare)
            writing = busy[(self.blocks.moving[busy] & WRITING) > 0]
            self.blocks.moving[writing] |= DEMOTE
            self.policy(tier, slot_bytes).defer(busy)
            n -= len(writing)
            last = rows[idle & only][: max(n, 0)]
            n -= self._evict_last_copies(tier, slot_bytes, last, demote)

    def _evict_last_copies(self, tier: int, slot_bytes: int, rows: Rows, demote: Demote) -> int:
        """Sends only copies down, or drops leaves where there is no room below; how many slots that frees."""
        if not len(rows):
            return 0
        leaving = demote(tier, slot_bytes, rows)
        n = int(leaving.sum())
        stuck = rows
        if not self._lower_tier_takes(tier, slot_bytes) or not (n or self.tiers[tier + 1].moving):
            # Or all that is below are parents of what is here: no room will come of waiting.
            leaf = self._leaf_first(rows)
            self.give_up(tier, slot_bytes, rows[leaf])
            n, stuck = int(leaf.sum()), rows[~leaf]
        self.policy(tier, slot_bytes).defer(stuck)
        return n

    def _lower_tier_takes(self, tier: int, slot_bytes: int) -> bool:
        """Whether blocks of this size can go down at all, if perhaps not at once."""
        return any(
            t.takes_writes and (t.growing or (t.extents.ready and t.extents.geometry(slot_bytes).slots))
            for t in self.tiers[tier + 1 :]
        )

    def _leaf_first(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of rows (coldest first) may go in this order without leaving a child behind."""
        children = self.blocks.children[rows].tolist()
        parents = self.blocks.parent[rows].tolist()
        going: dict[int, int] = {}
        leaf = np.zeros(len(rows), np.bool_)
        for i, row in enumerate(rows.tolist()):
            if children[i] == going.get(row, 0):
                leaf[i] = True
                going[parents[i]] = going.get(parents[i], 0) + 1
        return leaf

    def _take_over(self, tier: int, slot_bytes: int, demote: Demote) -> int | None:
        """An extent of another slot size for one that holds less than an even share of the extents."""
        extents = self.tiers[tier].extents
        if not extents.geometry(slot_bytes).slots:
            return None
        mine = extents.classes.get(slot_bytes)
        donors = [c for c in extents.classes.values() if c.slot_bytes != slot_bytes]
        even = len(extents.ready) // (len(donors) + 1)
        if not donors or (mine is not None and len(mine.extents) >= max(even, 1)):
            return None
        donor = max(donors, key=lambda c: len(c.extents))
        if mine is not None and len(donor.extents) <= even:
            return None
        for extent in self._emptiest_first(extents, donor.extents):
            slots = extents.slots_of(extent)
            if extents.refs[slots].any():
                continue
            rows: Rows = extents.owner[slots].astype(np.int64)
            rows = rows[rows >= 0]
            if self.blocks.pinned[rows].any():
                continue
            only = rows[(self.blocks.slot[:, rows] >= 0).sum(axis=0) == 1]
            below = len(only) > 0 and self._lower_tier_takes(tier, donor.slot_bytes)
            # They make way, unless all that is below are parents of what is here.
            if below and (demote(tier, donor.slot_bytes, only).any() or self.tiers[tier + 1].moving):
                return None
            self.give_up(tier, donor.slot_bytes, rows)
            extents.withdraw(extent)
            return extents.assign(slot_bytes, extent)
        return None

    @staticmethod
    def _emptiest_first(extents: Extents, numbers: list[int]) -> list[int]:
        return sorted(numbers, key=lambda e: int((extents.owner[extents.slots_of(e)] >= 0).sum()))

    def ram_bytes(self) -> int:
        """Bytes of all state about blocks, by the rows and slots used so far."""
        policies = sum(p.ram_bytes(self.blocks.rows_touched) for t in self.tiers for p in t.policies.values())
        extents = sum(t.extents.ram_bytes() for t in self.tiers)
        return self.blocks.ram_bytes() + self.index.ram_bytes() + policies + extents
