"""The tiers of one node: their devices, their order, and the eviction policies of their slot pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.columns import zeros
from kvstore.core.blocks.block_table import Blocks
from kvstore.core.capacity.extents import Extents
from kvstore.core.capacity.quotas import SlotPool
from kvstore.core.capacity.slot_table import SlotTable
from kvstore.core.policy import Factory, Policy, find
from kvstore.core.policy.admission import Admission
from kvstore.core.policy.base import PolicyContext
from kvstore.core.policy.queue import Segments
from kvstore.core.queues.device_queue import DeviceQueue, TierSpec
from kvstore.core.reuse.ghosts import Ghosts
from kvstore.core.reuse.reuse import Reuse
from kvstore.types import Tier

_POLICIES_KEPT = 16


@dataclass(slots=True)
class PolicyGeneration:
    """The shared state of a tier's policies, which `make` made. A block is in at most one of their pools."""

    make: Factory
    segments: Segments
    ghosts: Ghosts | None = None


@dataclass(slots=True)
class TierState:
    """One tier instance at run time: DRAM, an NVMe device or a pool of GPU memory.

    `growing`: more extents are being made. `leaving`, `lost`, `gone`: see `reconfiguration.hotplug`.
    New policies are of the `generation`. During a change of policy, `old_generation` is the replaced one.
    """

    spec: TierSpec
    extents: Extents
    slots: SlotTable
    generation: PolicyGeneration
    admission: Admission
    policies: dict[SlotPool, Policy] = field(default_factory=dict)
    growing: bool = True
    device: DeviceQueue = field(default_factory=DeviceQueue)
    old_generation: PolicyGeneration | None = None
    leaving: bool = False
    lost: bool = False
    gone: bool = False

    @property
    def generations(self) -> list[PolicyGeneration]:
        """The generations that have policies."""
        return [self.generation] if self.old_generation is None else [self.old_generation, self.generation]


class Topology:
    """The tier instances by number: `tiers`, of which 0 is DRAM, which serves all requests.

    `memory`: DRAM first, then pools of GPU memory, which serve the requests that name them. `persistent`:
    the other tiers, the fastest first. `below` has for each tier those that its blocks are demoted to.
    `losing`: lost devices whose blocks are not all forgotten yet.
    """

    def __init__(
        self, specs: Sequence[TierSpec], blocks: Blocks, reuse: Reuse, seed: int, policy: str
    ) -> None:
        self._blocks = blocks
        self._reuse = reuse
        self._seed, self._policies_made = seed, 0
        self.recompute_s = np.zeros(1 << 16, np.float32)
        self.losing: set[int] = set()
        make = find(policy)
        self.tiers = [self._new_tier(spec, make) for spec in specs]
        self._order()

    def _new_tier(self, spec: TierSpec, make: Factory) -> TierState:
        extents = Extents(spec.limit_bytes, spec.extent_bytes, spec.table, self._blocks.capacity, spec.tier)
        admission = Admission(spec.admission, self._reuse)
        return TierState(spec, extents, extents.slots, self.new_generation(make), admission)

    def join(self, spec: TierSpec) -> int:
        """Adds a device without extents. Returns its number. The block table must have a column for it."""
        state = self._new_tier(spec, self.tiers[0].generation.make)
        state.growing = False
        state.device.turn = max((t.device.turn for t in self.tiers[1:]), default=0.0)
        self.tiers.append(state)
        self._order()
        return len(self.tiers) - 1

    def clear(self, tier: int) -> None:
        """Gives back the memory of a removed device, whose number is not used again."""
        state = self.tiers[tier]
        state.slots = state.extents.forget_slots()
        state.policies = {}
        state.generation, state.old_generation = self.new_generation(state.generation.make), None

    def _order(self) -> None:
        numbers = range(len(self.tiers))
        kinds = [state.spec.tier for state in self.tiers]
        self.memory = sorted((i for i in numbers if not kinds[i].persistent), key=lambda i: -kinds[i].rank)
        self.persistent = sorted((i for i in numbers if kinds[i].persistent), key=lambda i: kinds[i].rank)
        self.below = [self._lower(i) for i in numbers]

    def _lower(self, tier: int) -> tuple[int, ...]:
        """Where blocks of a tier are demoted to. GPU memory skips DRAM if a persistent tier exists."""
        rank = self.tiers[tier].spec.tier.rank
        lower = [i for i in self.persistent if self.tiers[i].spec.tier.rank > rank]
        if lower:
            return tuple(i for i in lower if self.tiers[i].spec.tier is self.tiers[lower[0]].spec.tier)
        return (0,) if rank < Tier.DRAM.rank else ()

    def takers(self, tier: int) -> list[int]:
        """The devices of the next tier that take writes now, the one whose turn it is first."""
        open_ = [t for t in self.below[tier] if self.tiers[t].device.takes_writes]
        if len(open_) > 1:
            # A device that has spent its write budget would refuse blocks that others still take.
            open_.sort(key=lambda t: (self.tiers[t].admission.spent, self.tiers[t].device.turn))
        return open_

    def gate(self, tier: int) -> int:
        """The device of the next tier whose admission rule decides. A next tier must exist."""
        return (self.takers(tier) or self.below[tier])[0]

    @property
    def out_of_reach(self) -> bool:
        """Whether a device cannot be read now. A lost device counts until its blocks are forgotten."""
        if self.losing:
            return True
        return any(not (t.device.readable or t.lost) for t in self.tiers[1:])

    # -- policies

    def policy(self, tier: int, pool: SlotPool) -> Policy:
        """Returns the policy of a pool. Makes one if there is none."""
        state = self.tiers[tier]
        if pool not in state.policies:
            self._drop_policies_without_slots(state)
            state.policies[pool] = self.make_policy(tier, pool, state.generation)
        return state.policies[pool]

    def _drop_policies_without_slots(self, state: TierState) -> None:
        """Drops policies of pools without extents if they are many: pools come and go with domains and sizes.

        A change of policy has a list of the pools, so none is dropped meanwhile.
        """
        pools = state.slots.classes
        if state.old_generation is None and len(state.policies) > 2 * len(pools) + _POLICIES_KEPT:
            state.policies = {pool: policy for pool, policy in state.policies.items() if pool in pools}

    def new_generation(self, make: Factory) -> PolicyGeneration:
        """Returns a policy generation without policies."""
        return PolicyGeneration(make, Segments(zeros(self._blocks.capacity, np.int32)))

    def make_policy(self, tier: int, pool: SlotPool, generation: PolicyGeneration) -> Policy:
        """Returns a new policy for a pool of a tier, without installing it."""
        limit_bytes = self.tiers[tier].spec.limit_bytes

        def ghosts() -> Ghosts:
            if generation.ghosts is None:
                # Twice as many as blocks: a table that is half full forgets few ghosts too early.
                most = min(limit_bytes // pool.slot_bytes, self._blocks.capacity)
                generation.ghosts = Ghosts(2 * most)
            return generation.ghosts

        seed = self._seed + self._policies_made
        self._policies_made += 1
        context = PolicyContext(
            generation.segments, self._blocks, ghosts, seed, pool.tenant, self.recompute_s, self._reuse
        )
        return generation.make(context)

    def ram_bytes(self) -> int:
        """Bytes of the extents, policies and ghosts of all tiers."""
        policies = sum(p.ram_bytes() for t in self.tiers for p in t.policies.values())
        generations = [generation for t in self.tiers for generation in t.generations]
        policies += sum(g.segments.bytes_a_row for g in generations) * self._blocks.rows_touched
        policies += sum(g.ghosts.ram_bytes() for g in generations if g.ghosts)
        return policies + sum(t.slots.ram_bytes() for t in self.tiers)
