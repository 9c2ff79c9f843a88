"""Which blocks there are and which slots hold them: rows, index, extents and policies, kept in step.

Residency knows no client, and decides nothing: who goes to make room is `eviction`'s business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.columns import zeros
from kvstore.core.actions import Action, BlockIds, Came, Drop, Moved, Offer, Where, WriteHeader
from kvstore.core.blocks.block_table import HOLE, LIVE, Blocks, Picked, Rows, compact
from kvstore.core.blocks.index import Index
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.extents import Extents, Slots
from kvstore.core.capacity.quotas import Namespace, SlotPool
from kvstore.core.insight.decision_log import Decisions
from kvstore.core.policy import Factory, Policy, find
from kvstore.core.policy.pool_view import PolicyContext
from kvstore.core.policy.queue import Segments
from kvstore.core.reuse.ghosts import Ghosts
from kvstore.core.reuse.reuse import Reuse
from kvstore.core.transfers.admission import Admission
from kvstore.core.transfers.devices import DeviceQueue, TierSpec
from kvstore.types import Tier

PROMOTING, WRITING, DEMOTE = 1, 2, 4
"""Bits of `Blocks.moving`: a copy up is under way; a copy down is; give the upper copy up when it ends."""

_LONGEST_CHAIN = 1 << 17
_RUN = 256
_MOST_RUNS = 256
_REMOVING = 4
"""The state of a row within `vanish`, in addition to those of `Blocks`."""
_ONE = np.int32(1)  # of the column's type, which makes counting several times as fast
_LEAST_GHOSTS = 1 << 18
_UNPINNED_AT_ONCE = 4096
_NEXT_UNPIN_S = 0.05
_CHILDLESS_AT_ONCE = 512
_NEXT_CHILDLESS_S = 0.001


@dataclass(slots=True)
class PolicyGeneration:
    """What all policies of a tier share that `make` made: a block is in one pool of it."""

    make: Factory
    segments: Segments
    ghosts: Ghosts | None = None


@dataclass(slots=True)
class TierState:
    """One device of a tier at run time. `growing`: more extents are coming.

    `leaving`, `lost`, `gone`: see `joining`. New policies are of the `era`. While those before it are
    replaced, `before` is theirs: see `switch`.
    """

    spec: TierSpec
    extents: Extents
    era: PolicyGeneration
    admission: Admission
    policies: dict[SlotPool, Policy] = field(default_factory=dict)
    growing: bool = True
    device: DeviceQueue = field(default_factory=DeviceQueue)
    before: PolicyGeneration | None = None
    leaving: bool = False
    lost: bool = False
    gone: bool = False

    @property
    def eras(self) -> list[PolicyGeneration]:
        """Those that have policies."""
        return [self.era] if self.before is None else [self.before, self.era]


class Residency:
    """State of all devices of all tiers, by number: `tiers`, of which 0 is DRAM and serves everybody.

    `memory`: DRAM first, then pools of HBM, which serve whoever asks for them; `lasting`: all others, the
    upper ones first. `below`: for each, those that its blocks go down to. `out` collects actions; `counters`
    counts what happened.

    `copying`: how many copies of each tenant's blocks are queued or under way. `ending`: what is in memory
    may soon be gone, and does not count as a copy. `losing`: devices that are lost, and not forgotten yet.
    `sharing`: what is offered to the network, None: nothing.
    `telling`: whether it says which blocks come to a tier and leave it, as Moved.
    `awaited`: first words of the keys that somebody waits for; their blocks are told as Came.
    `childless`: holes that have lost their last child. Later steps free them and the holes above them.
    """

    def __init__(self, specs: Sequence[TierSpec], max_blocks: int, seed: int, policy: str) -> None:
        self.blocks = Blocks(max_blocks, len(specs))
        self.index = Index(self.blocks, seed)
        self.reuse = Reuse(self.blocks, max(max_blocks, _LEAST_GHOSTS), seed)
        self.decisions = Decisions(self.blocks, self.index, self.reuse)
        make = find(policy)
        self.tiers = [self._new_tier(spec, make) for spec in specs]
        self._see_levels()
        self.recompute_s = np.zeros(1 << 16, np.float32)
        self._seed, self._policies_made = seed, 0
        self.now = 0.0
        self.ending = False
        self.telling = False
        self.awaited: Counter[int] = Counter()
        self.losing: set[int] = set()
        self.sharing: Admission | None = None
        self.spaces: dict[int, Namespace] = {}
        self.holes: Counter[int] = Counter()
        self.childless: set[int] = set()
        self._next_childless = math.inf
        self.pins: dict[int, float] = {}
        self.next_unpin = math.inf
        self.pinned_bytes: Counter[int] = Counter()
        self.copying: Counter[int] = Counter()
        self.counters: Counter[str] = Counter()
        self.out: list[Action] = []
        self._touched: list[tuple[Picked, Namespace, int | None, bool, float]] = []
        # A memoryview reads one row several times as fast as the array.
        self._parent_of = self.blocks.parent.data
        self._children_of = self.blocks.children.data
        self._state_of = self.blocks.state.data

    def _new_tier(self, spec: TierSpec, make: Factory) -> TierState:
        extents = Extents(spec.limit_bytes, spec.extent_bytes, spec.table, self.blocks.capacity, spec.tier)
        return TierState(spec, extents, self.new_era(make), Admission(spec.admission, self.reuse))

    def join(self, spec: TierSpec) -> int:
        """One device more, at the bottom, without extents; its number. Blocks have a column for it."""
        state = self._new_tier(spec, self.tiers[0].era.make)
        state.growing = False
        state.device.turn = max((t.device.turn for t in self.tiers[1:]), default=0.0)
        self.tiers.append(state)
        self._see_levels()
        return len(self.tiers) - 1

    def _see_levels(self) -> None:
        numbers = range(len(self.tiers))
        kinds = [state.spec.tier for state in self.tiers]
        self.memory = sorted((i for i in numbers if kinds[i] <= Tier.DRAM), key=lambda i: -kinds[i])
        self.lasting = sorted((i for i in numbers if kinds[i] > Tier.DRAM), key=lambda i: kinds[i])
        self.below = [self._next_tier(i) for i in numbers]

    def _next_tier(self, tier: int) -> tuple[int, ...]:
        """Where blocks of a tier go down to: what a GPU holds, past DRAM, if there is anything below that."""
        kind = self.tiers[tier].spec.tier
        lower = [i for i in self.lasting if self.tiers[i].spec.tier > kind]
        if lower:
            return tuple(i for i in lower if self.tiers[i].spec.tier == self.tiers[lower[0]].spec.tier)
        return (0,) if kind < Tier.DRAM else ()

    def copies(self, rows: Rows, lasting: bool = False) -> npt.NDArray[np.int64]:
        """How many tiers have each of these rows' blocks, what is lost not counted; or how many `lasting`."""
        slot = self.blocks.slot[:, rows]
        if lasting:
            slot = slot[self.lasting]
        elif self.losing:
            slot = slot[[i for i in range(len(self.tiers)) if i not in self.losing]]
        n: npt.NDArray[np.int64] = (slot >= 0).sum(axis=0)
        return n

    def alone_in_memory(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these rows' blocks are in memory and nowhere else."""
        slot = self.blocks.slot[:, rows]
        alone: npt.NDArray[np.bool_] = np.logical_or.reduce(slot[self.memory] >= 0)
        alone &= ~np.logical_or.reduce(slot[self.lasting] >= 0)
        return alone

    def takers(self, tier: int) -> list[int]:
        """The devices of the next tier that take writes now, whose turn it is first."""
        open_ = [t for t in self.below[tier] if self.tiers[t].device.takes_writes]
        if len(open_) > 1:
            # One that has spent its write budget would refuse what others still take.
            open_.sort(key=lambda t: (self.tiers[t].admission.spent, self.tiers[t].device.turn))
        return open_

    def gate(self, tier: int) -> int:
        """The device of the next tier, which there is, whose admission says what leaves for that tier."""
        return (self.takers(tier) or self.below[tier])[0]

    def policy(self, tier: int, pool: SlotPool) -> Policy:
        """The policy of one pool of a tier."""
        state = self.tiers[tier]
        if pool not in state.policies:
            state.policies[pool] = self.make_policy(tier, pool, state.era)
        return state.policies[pool]

    def new_era(self, make: Factory) -> PolicyGeneration:
        """The beginning of one."""
        return PolicyGeneration(make, Segments(zeros(self.blocks.capacity, np.int32)))

    def make_policy(self, tier: int, pool: SlotPool, era: PolicyGeneration) -> Policy:
        """A policy for a pool of a tier, used by nobody so far."""
        limit_bytes = self.tiers[tier].spec.limit_bytes

        def ghosts() -> Ghosts:
            if era.ghosts is None:
                # Half full, it forgets few before their time.
                era.ghosts = Ghosts(2 * min(limit_bytes // pool.slot_bytes, self.blocks.capacity))
            return era.ghosts

        seed = self._seed + self._policies_made
        self._policies_made += 1
        return era.make(
            PolicyContext(era.segments, self.blocks, ghosts, seed, pool.tenant, self.recompute_s, self.reuse)
        )

    def by_space(self, rows: Rows) -> Iterator[tuple[Namespace, Rows]]:
        """The namespaces of rows, mostly one, and which rows are whose."""
        numbers = self.blocks.namespace[rows]
        raw = numbers.tobytes()
        # Compared as bytes, which costs a fraction of comparing as arrays at this size.
        if raw and raw == raw[:2] * len(rows):
            yield self.spaces[int(numbers[0])], rows
            return
        for number in np.unique(numbers).tolist():
            yield self.spaces[number], rows[numbers == number]

    # -- reading

    def resident_run(self, namespace: int, keys: Keys, tier: int = 0) -> tuple[slice, Picked] | None:
        """(rows, slots of a tier) if all keys lie in a run of rows, as a chain stored at one go does.

        The short way of the commonest request; None says nothing about what is stored.
        """
        first = self.index.find_run(namespace, keys)
        if first < 0:
            return None
        run = slice(first, first + keys.n)
        slots = compact(self.blocks.slot[tier, run])
        # A row that is not live has no slot.
        there = slots.start >= 0 if isinstance(slots, slice) else slots.min() >= 0
        return (run, slots) if there else None

    def prefix(self, namespace: int, keys: Keys) -> Rows:
        """Rows of the leading keys that are readable, up to the first key that repeats: no chain has one."""
        rows = self.index.find(namespace, keys)
        good = (rows >= 0) & (self.blocks.state[rows] == LIVE)
        if self.out_of_reach:
            within = [i for i, t in enumerate(self.tiers) if i == 0 or t.device.readable]
            good &= (self.blocks.slot[:, rows][within] >= 0).any(axis=0)
        if self.spaces[namespace].mortal:
            good &= ~self.blocks.expired(rows, self.now)
        _, first = np.unique(rows, return_index=True)
        if len(first) < len(rows):
            once = np.zeros(len(rows), np.bool_)
            once[first] = True
            good &= once
        return rows if good.all() else rows[: int(good.argmin())]

    @property
    def out_of_reach(self) -> bool:
        """Whether some tier is, for now: not one that is lost, once nothing is known to be there any more."""
        if self.losing:
            return True
        return any(not (t.device.readable or t.lost) for t in self.tiers[1:])

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
        """The chain from its root down to and including `rows` (a chain itself, mostly in order)."""
        above: list[Rows] = [rows]
        row = self._parent_of[int(rows[0])] if len(rows) and rows[0] >= 0 else -1
        above += [np.arange(first, last + 1) for first, last in self._ancestor_runs(row)]
        if len(above) == 1:
            return rows
        up = np.concatenate(above[:0:-1])
        if (self.blocks.parent[rows[1:]] != rows[:-1]).any():
            # What is copied, or asked for, may be ordered otherwise, a child before its parent.
            rows = rows[~np.isin(rows, up)]
        return np.concatenate((up, rows))

    def _ancestor_runs(self, row: int) -> Iterator[tuple[int, int]]:
        """Yields the chain that ends with `row` (-1: none), from there up, as (first, last) of runs of rows.

        Most chains were stored at one go and lie in ascending rows. Their runs are long.
        """
        done, look = 0, _RUN
        while row >= 0 and done < _LONGEST_CHAIN:
            first = max(0, row - look)
            behind = self.blocks.parent[first + 1 : row + 1] == np.arange(first, row)
            breaks = np.flatnonzero(~behind)
            start = first + 1 + int(breaks[-1]) if len(breaks) else first
            yield start, row
            done += row + 1 - start
            look = _RUN if len(breaks) else 2 * look
            row = self._parent_of[start]

    def touch(self, rows: Picked, space: Namespace) -> None:
        """A chain was used, from its root on. Counted by `settle`."""
        self._touched.append((rows, space, None, True, self.now))

    def refresh(self, rows: Picked, space: Namespace, tier: int | None = None) -> None:
        """A chain has new blocks, in one tier or in every one: its start is to stay as long as they do."""
        self._touched.append((rows, space, tier, False, self.now))

    def settle(self) -> None:
        """Tells the policies what was used: at the next event, when the answer is already on its way."""
        for rows, space, only, used, at in self._touched:
            numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            if used:
                self.reuse.used(numbers, space.tenant, at)
                self.offer(numbers, space)
            chain = None
            for tier in range(len(self.tiers)) if only is None else (only,):
                state, pool = self.tiers[tier], space.pools[tier]
                state.extents.holdings.saw(pool.tenant, self.now)
                policy = state.policies.get(pool)
                if policy is None or not (used or policy.follows_children):
                    continue
                if chain is None:
                    chain = self.with_ancestors(numbers) if policy.follows_children else numbers
                some = self._in_pool(tier, pool, chain) if space.moved else chain
                if used:
                    policy.touch(some, at)
                else:
                    policy.refresh(some)
        self._touched.clear()

    def _in_pool(self, tier: int, pool: SlotPool, rows: Rows) -> Rows:
        rows = rows[self.blocks.slot[tier, rows] >= 0]
        return rows[self.tiers[tier].extents.are_of(pool, self.blocks.slot[tier, rows])]

    def identity(self, rows: Rows) -> BlockIds:
        """Who these rows are, copied out."""
        b = self.blocks
        return BlockIds(b.namespace[rows], b.words[rows], b.key_bytes[rows], b.checksum[rows])

    def stamp(self, tier: int, rows: Rows, slots: Slots) -> None:
        """Has the headers of slots that have become readable written."""
        where, version = self.where(tier, slots), self.tiers[tier].extents.version[slots]
        parents = self._parents(rows)
        self.out.append(WriteHeader(tier, self.identity(rows), parents, where, version, self._lives(rows)))

    def _parents(self, rows: Rows) -> BlockIds:
        """Who the parents of these rows are; keys of 0 bytes for roots."""
        above = self.blocks.parent[rows].astype(np.int64)
        parents = self.identity(above)
        parents.words[above < 0] = 0
        parents.key_bytes[above < 0] = 0
        return parents

    def tell(self, tier: int, rows: Rows, gained: bool) -> None:
        """Says that these rows have a copy in a tier, or have lost it, if anybody wants to know."""
        if self.awaited and gained:
            self._tell_awaited(rows)
        if self.telling and len(rows):
            parents = self._parents(rows) if gained else None
            self.out.append(Moved(tier, self.identity(rows), parents))

    def offer(self, rows: Rows, space: Namespace) -> None:
        """Offers those of these rows to the network that are worth it, and have not been offered yet."""
        if self.sharing is None or space.mortal:
            return
        b = self.blocks
        rows = rows[~b.offered[rows] & (b.slot[0, rows] >= 0) & (b.state[rows] == LIVE)]
        rows = rows[self.sharing.admits(rows, space.tenant, self.now)] if len(rows) else rows
        if len(rows):
            b.offered[rows] = True
            self.out.append(Offer(self.identity(rows)))

    def _lives(self, rows: Rows) -> npt.NDArray[np.float64] | None:
        """How much longer each block lives, in seconds (infinity: for good); None: all of them for good."""
        ends = self.blocks.expires[rows]
        return np.where(ends > 0, ends - self.now, np.inf) if ends.any() else None

    def where(self, tier: int, slots: Slots) -> Where:
        """Where slots are."""
        return Where(self.tiers[tier].extents.place[slots])

    # -- copies come and go

    def place(self, tier: int, rows: Rows, slots: Slots) -> None:
        """These slots now hold valid copies of these rows, a chain in order."""
        extents = self.tiers[tier].extents
        self.blocks.slot[tier, rows] = slots
        extents.own(slots, rows, self.blocks.checksum[rows])
        for members, some in extents.by_class(slots):
            self.policy(tier, members.pool).insert(extents.owner[some].astype(np.int64), self.now)
        # A child that arrives after its parent must not look younger, or the parent would be offered first.
        for space, some in self.by_space(rows):
            self.refresh(some, space, tier)
        self.tell(tier, rows, gained=True)

    def _tell_awaited(self, rows: Rows) -> None:
        came = [word in self.awaited for word in self.blocks.words[rows, 0].tolist()]
        if any(came):
            self.out.append(Came(self.identity(rows[np.array(came)])))

    def give_up(self, tier: int, rows: Rows, retire: bool = False, vanish: bool = True) -> None:
        """These rows' copies in one tier are gone; a row without any copy goes too, or becomes a hole.

        Not so without `vanish`: the caller is about to place them elsewhere, and nobody is told.
        """
        if not len(rows):
            return
        extents = self.tiers[tier].extents
        slots = self.blocks.slot[tier, rows].astype(np.int64)
        self.out.append(Drop(tier, self.identity(rows), self.where(tier, slots)))
        self.blocks.slot[tier, rows] = -1
        for members, some in extents.by_class(slots):
            self.policy(tier, members.pool).remove(extents.owner[some].astype(np.int64))
        (extents.retire if retire else extents.disown)(slots)
        if vanish:
            self.tell(tier, rows, gained=False)
        lost = rows[(self.blocks.slot[:, rows] < 0).all(axis=0)]
        if len(lost) and vanish:
            self.counters["dropped_blocks"] += len(lost)
            self.vanish(lost)

    def vanish(self, rows: Rows) -> None:
        """Frees rows without any copy. Rows with children stay as holes until the children are gone.

        The time is proportional to the number of rows, whatever their order and links.
        """
        if not len(rows):
            return
        blocks = self.blocks
        self.unpin(rows[blocks.pinned[rows]])
        self.count_holes(rows[blocks.state[rows] == HOLE], -1)
        blocks.state[rows] = _REMOVING
        # A whole branch that goes together has no children left once its own links are undone.
        parents = blocks.parent[rows]
        np.subtract.at(blocks.children, parents[parents >= 0], _ONE)
        self._keep_ancestors(rows[blocks.children[rows] > 0])
        stays = blocks.state[rows] == HOLE
        if stays.any():
            # Rows that stay keep their parents too.
            above = parents[stays]
            np.add.at(blocks.children, above[above >= 0], _ONE)
            self.keep_as_holes(rows[stays])
            rows, parents = rows[~stays], parents[~stays]
        free = np.concatenate((rows, self._remove_childless(parents)))
        if len(free):
            self.index.remove(free)
            self.reuse.history.leave(free)
            blocks.give_back(free)

    def _keep_ancestors(self, rows: Rows) -> None:
        """Turns these rows, and all rows above them that are being removed, into holes."""
        for lowest in rows.tolist():
            row = lowest
            while row >= 0 and self._state_of[row] == _REMOVING:
                self._state_of[row] = HOLE
                row = self._parent_of[row]

    def _remove_childless(self, rows: npt.NDArray[np.int32]) -> Rows:
        """Removes holes without children, from these rows upwards. Returns them, to be freed.

        Holes beyond the bound of one step are left to later steps.
        """
        blocks, removed = self.blocks, list[int]()
        rows = np.unique(rows[rows >= 0])
        for lowest in rows[(blocks.state[rows] == HOLE) & (blocks.children[rows] == 0)].tolist():
            row = lowest
            while row >= 0 and self._state_of[row] == HOLE and not self._children_of[row]:
                if len(removed) >= _CHILDLESS_AT_ONCE:
                    self.childless.add(row)
                    self._next_childless = min(self._next_childless, self.now + _NEXT_CHILDLESS_S)
                    break
                self._state_of[row] = _REMOVING
                removed.append(row)
                row = self._parent_of[row]
                if row >= 0:
                    self._children_of[row] -= 1
        holes = np.array(removed, np.int64)
        self.count_holes(holes, -1)
        return holes

    def free_childless(self) -> None:
        """Frees some of the holes that earlier steps left without children."""
        n = min(len(self.childless), _CHILDLESS_AT_ONCE)
        some = np.array([self.childless.pop() for _ in range(n)], np.int64)
        self._next_childless = self.now + _NEXT_CHILDLESS_S if self.childless else math.inf
        # Some of them may have been filled again since.
        self.prune(some)

    def prune(self, rows: Rows) -> None:
        """Frees those of these rows that are holes and have lost their last child."""
        rows = rows[rows >= 0]
        self.vanish(rows[(self.blocks.state[rows] == HOLE) & (self.blocks.children[rows] == 0)])

    def keep_as_holes(self, rows: Rows) -> None:
        """These rows hold nothing, but have children."""
        self.blocks.state[rows] = HOLE
        self.blocks.no_end(rows)
        self.count_holes(rows, 1)

    def count_holes(self, rows: Rows, sign: int) -> None:
        """Keeps the number of holes of each namespace."""
        if not len(rows):
            return
        for namespace, n in zip(*np.unique(self.blocks.namespace[rows], return_counts=True), strict=True):
            self.holes[int(namespace)] += sign * int(n)

    def link(self, rows: Rows, parents: Rows) -> None:
        """Sets the parents (-1: root) of rows that have none, one row after the other.

        A row stays a root where its parent would be its own descendant: no client does that by mistake. It
        also stays one where the way up is too long to find that out in one step.
        """
        done, budget = 0, _MOST_RUNS + len(rows)
        # A row without children is nobody's ancestor.
        for i in np.flatnonzero((self.blocks.children[rows] > 0) & (parents >= 0)).tolist():
            self._set_parents(rows[done:i], parents[done:i])
            root, budget = self._root_of(int(parents[i]), budget)
            done = i + 1 if root in (-1, rows[i]) else i
        self._set_parents(rows[done:], parents[done:])

    def _root_of(self, row: int, budget: int) -> tuple[int, int]:
        """(root of the chain that ends with `row`, rest of the budget); -1: the budget does not suffice.

        A run of 256 rows costs 1, as one row does that does not lie beside its parent.
        """
        for first, last in self._ancestor_runs(row):
            budget -= 1 + (last - first) // _RUN
            if budget < 0:
                return -1, 0
            if self._parent_of[first] < 0:
                return first, budget
        return -1, budget

    def _set_parents(self, rows: Rows, parents: Rows) -> None:
        self.blocks.parent[rows] = parents
        np.add.at(self.blocks.children, parents[parents >= 0], _ONE)

    def pin(self, space: Namespace, rows: Rows, until: float) -> None:
        """Keeps blocks of a namespace from eviction until then, or for as long as they are kept already."""
        pool, pins = space.pools[0], self.pins
        new = len(rows) - int(np.count_nonzero(self.blocks.pinned[rows]))
        self.pinned_bytes[pool.tenant] += new * pool.slot_bytes
        self.blocks.pinned[rows] = True
        pins.update((row, max(until, pins.get(row, until))) for row in rows.tolist())
        if len(rows):
            self.next_unpin = min(self.next_unpin, until)

    def unpin(self, rows: Rows) -> None:
        """Undoes pin."""
        if not len(rows):
            return
        for space, some in self.by_space(rows):
            pool = space.pools[0]
            self.pinned_bytes[pool.tenant] -= len(some) * pool.slot_bytes
        self.blocks.pinned[rows] = False
        for row in rows.tolist():
            del self.pins[row]
        if not self.pins:
            self.next_unpin = math.inf

    def at(self, now: float) -> None:
        """It is `now`: pins whose time is over end, or a little later, so that all are seldom looked at.

        Some of the childless holes are freed.
        """
        if now >= self._next_childless:
            self.free_childless()
        if now < self.next_unpin:
            return
        over = [row for row, until in self.pins.items() if until <= now]
        self.unpin(np.array(over[:_UNPINNED_AT_ONCE], np.int64))
        first = min(self.pins.values(), default=math.inf)
        self.next_unpin = max(first, now + _NEXT_UNPIN_S)

    def wakes_at(self) -> float:
        """When there is something to go on with."""
        return min(self.next_unpin, self._next_childless)

    def idle(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Whether nobody uses these rows' copies in a tier, and no pin keeps them."""
        slots = self.blocks.slot[tier, rows]
        idle: npt.NDArray[np.bool_] = (self.tiers[tier].extents.refs[slots] == 0) & (slots >= 0)
        idle &= ~self.kept(tier, rows)
        return idle

    def kept(self, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these rows' copies in a tier pins keep: in HBM, none but those that nothing else has."""
        pinned: npt.NDArray[np.bool_] = self.blocks.pinned[rows]
        if tier in self.memory[1:] and pinned.any():
            pinned &= self.copies(rows) == 1
        return pinned

    def ram_bytes(self) -> int:
        """Bytes of all state about blocks, by the rows and slots used so far."""
        policies = sum(p.ram_bytes() for t in self.tiers for p in t.policies.values())
        eras = [era for t in self.tiers for era in t.eras]
        policies += sum(era.segments.bytes_a_row for era in eras) * self.blocks.rows_touched
        policies += sum(era.ghosts.ram_bytes() for era in eras if era.ghosts)
        extents = sum(t.extents.ram_bytes() for t in self.tiers)
        blocks = self.blocks.ram_bytes() + self.index.ram_bytes()
        return blocks + policies + extents + self.decisions.ram_bytes() + self.reuse.ram_bytes
