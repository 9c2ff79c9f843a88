"""Read-only questions about the state of the placement core.

The daemon, the lab and status reports read the core through `View` alone, so the parts of the core can change
without them. Answers are values as of now: an event may change the state right after. Nothing here changes
state. A change is an event (see `events`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import U32
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.quotas import UNLIMITED, SlotPool
from kvstore.core.policy.admission import Rule
from kvstore.core.queues.device_queue import TierSpec
from kvstore.core.reconfiguration.hotplug import Hotplug
from kvstore.core.reconfiguration.policy_migration import PolicyMigration
from kvstore.core.requests.leases import LeaseTable, Limits
from kvstore.core.residency.decision_log import Decisions
from kvstore.core.residency.topology import TierState
from kvstore.core.reuse.reuse import ReuseState
from kvstore.core.transfers.copy_queue import Transfer
from kvstore.types import Tier


@dataclass(frozen=True, slots=True)
class Capacity:
    """Space of one tier. `max_bytes`: the highest limit that it can get at run time.

    `floor_bytes`: the sum of all tenants' floors. `extents_by_slot_bytes`: how many extents are cut to each
    slot size.
    """

    limit_bytes: int
    capacity_bytes: int
    used_bytes: int
    floor_bytes: int
    extent_bytes: int
    max_bytes: int
    extents: int
    blocks: int
    retired_slots: int
    extents_by_slot_bytes: dict[int, int]


@dataclass(frozen=True, slots=True)
class Health:
    """The state of one device. `fenced`: calls hang, so nothing is read or written."""

    state: str
    fenced: bool
    readable: bool
    writable: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """Copies of one device, in bytes by class (see `queues.device_queue`). `copies` are under way."""

    bandwidth_bytes_per_s: float
    queued_bytes: list[int]
    moving_bytes: list[int]
    copies: int


@dataclass(frozen=True, slots=True)
class AdmissionStatus:
    """Admission of writes to one device. `spent`: the write budget is used up for now."""

    rule: Rule
    threshold: float
    written_bytes: int
    written_per_day_bytes: int
    refused_blocks: int
    spent: bool


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """The eviction policy's state in one tier. `weighs`: it weighs what a block costs to recompute."""

    pools: int
    blocks: int
    state_bytes: int
    weighs: bool


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """The eviction policy in use. During a change to `wanted`, `pools_left` pools still use the old one."""

    name: str
    wanted: str
    pools_left: int


@dataclass(frozen=True, slots=True)
class Holding:
    """One tenant's part of a tier, in bytes. `held_bytes` are whole extents. `limit_bytes` None: no limit."""

    used_bytes: int
    held_bytes: int
    floor_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """One copy between tiers, queued or `started`. `kind` is its class (see `queues.device_queue`)."""

    number: int
    source: int
    target: int
    kind: int
    started: bool
    tenant: int
    namespace: int
    blocks: int
    nbytes: int

    @classmethod
    def of(cls, number: int, t: Transfer) -> TransferStatus:
        """Returns the status of a copy."""
        where = number, t.source, t.target, t.kind, t.started
        return cls(*where, t.pool.tenant, t.namespace, int(t.alive.sum()), t.nbytes)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of the core's tables. `pinned_bytes`: of all tenants."""

    blocks: int
    leases: int
    reservations: int
    copies_under_way: int
    pinned_bytes: int
    ram_bytes: int


class TierView:
    """One tier instance: DRAM, an NVMe device or a pool of GPU memory."""

    def __init__(self, number: int, state: TierState) -> None:
        self.number = number
        self._state = state

    @property
    def spec(self) -> TierSpec:
        """The tier as the core knows it."""
        return self._state.spec

    @property
    def name(self) -> str:
        """The tier's name, `dram` for DRAM."""
        return self._state.spec.name

    @property
    def kind(self) -> Tier:
        """The kind of memory."""
        return self._state.spec.tier

    @property
    def gone(self) -> bool:
        """Whether the device was removed. Its number is not used again, its name may be."""
        return self._state.gone

    @property
    def leaving(self) -> bool:
        """Whether the device is being removed, or is gone."""
        return self._state.leaving

    @property
    def growing(self) -> bool:
        """Whether more extents are being made."""
        return self._state.growing

    def health(self) -> Health:
        """Returns whether the device can be read and written."""
        device = self._state.device
        return Health(device.state, device.fenced, device.readable, device.takes_writes)

    def capacity(self) -> Capacity:
        """Returns limits, use and extents. Costs time proportional to the number of slot pools."""
        extents = self._state.extents
        by_size: Counter[int] = Counter()
        for pool, members in extents.slots.classes.items():
            by_size[pool.slot_bytes] += len(members.extents)
        return Capacity(
            limit_bytes=extents.limit_bytes,
            capacity_bytes=extents.capacity_bytes,
            used_bytes=extents.used_bytes,
            floor_bytes=int(extents.holdings.floor.sum()) * extents.holdings.extent_bytes,
            extent_bytes=extents.extent_bytes,
            max_bytes=extents.most_bytes,
            extents=extents.total,
            blocks=sum(len(policy) for policy in self._state.policies.values()),
            retired_slots=len(extents.slots.retired),
            extents_by_slot_bytes=dict(by_size),
        )

    def traffic(self, now: float) -> Traffic:
        """Returns queues and bandwidth at `now` (s)."""
        device = self._state.device
        kinds = range(len(device.bytes_moving))
        queued = [device.queue.waiting(kind) for kind in kinds]
        return Traffic(device.bandwidth(now), queued, list(device.bytes_moving), device.moving)

    def admission(self, now: float) -> AdmissionStatus:
        """Returns what writes are admitted, and what was written, at `now` (s)."""
        a = self._state.admission
        written = a.written, a.written_in_a_day(now)
        return AdmissionStatus(a.rule, a.threshold, *written, a.refused, a.spent)

    def policy(self) -> TierPolicy:
        """Returns the state of the eviction policy in this tier."""
        state = self._state
        return TierPolicy(
            pools=len(state.policies),
            blocks=sum(generation.segments.known_rows for generation in state.generations),
            state_bytes=sum(generation.segments.ram_bytes() for generation in state.generations),
            weighs=bool(getattr(state.generation.make, "weighs", False)),
        )

    def holding(self, tenant: int) -> Holding:
        """Returns one tenant's part of this tier."""
        holdings = self._state.extents.holdings
        used, quota = holdings.of(tenant)
        limit = None if quota.limit >= UNLIMITED else quota.limit
        return Holding(used, holdings.held(tenant), quota.floor, limit)

    def used_by_tenant(self) -> npt.NDArray[np.int64]:
        """Returns used bytes by tenant number. Tenants above the last number use none."""
        return self._state.extents.holdings.used.copy()

    def has_extents(self) -> bool:
        """Returns whether any extent can be used."""
        return bool(self._state.extents.ready)

    def pool_of(self, extent: int) -> SlotPool | None:
        """Returns the slot pool that owns an extent. None if the extent is unassigned or unknown."""
        return self._state.slots.classes.pool_at(extent)

    def domains(self) -> set[int]:
        """Returns the domains of the slot pools that have extents."""
        return {pool.domain for pool in self._state.slots.classes}

    def has_slots(self, extents: U32, indexes: U32) -> npt.NDArray[np.bool_]:
        """Returns which of these places are slots."""
        return self._state.slots.classes.has(extents, indexes)

    def lacks_block(self, extents: U32, indexes: U32) -> npt.NDArray[np.bool_]:
        """Returns which of these places are in a usable extent and hold no block."""
        table = self._state.slots
        empty = np.isin(extents, list(self._state.extents.ready))
        slot = empty & table.classes.has(extents, indexes)
        slots = table.classes.slots_at(extents[slot].astype(np.int64), indexes[slot].astype(np.int64))
        empty[slot] = table.owner[slots] < 0
        return empty


class View:
    """The state of one placement core."""

    def __init__(self, leases: LeaseTable, policy_migration: PolicyMigration, hotplug: Hotplug) -> None:
        self._leases = leases
        self._residency = leases.residency
        self._copies = leases.copies
        self._policy_migration = policy_migration
        self._hotplug = hotplug
        self._tiers: list[TierView] = []

    # -- blocks

    def stored(self, namespace: int, keys: Keys) -> int:
        """Returns how many leading keys can be read on this node. Does not count as a use of the blocks."""
        r = self._residency
        return len(r.prefix(namespace, keys)) if namespace in r.namespaces else 0

    def readable(self, namespace: int, keys: Keys) -> npt.NDArray[np.bool_]:
        """Returns which keys can be read on this node, each for itself. Does not count as a use."""
        if namespace not in self._residency.namespaces:
            return np.zeros(keys.n, np.bool_)
        return self._residency.readable(namespace, keys)[1]

    def in_memory(self, namespace: int, keys: Keys, tier: int) -> bool:
        """Returns whether all keys are known to be in this memory tier. False may also mean unknown."""
        return self._residency.resident_run(namespace, keys, tier) is not None

    def presence_bytes(self, namespace: int) -> int:
        """Returns the bytes of a new presence table of a namespace; 0 if it can have none."""
        return self._residency.presence.bytes_for(namespace)

    def slot_bytes(self, namespace: int) -> int:
        """Returns the size of the slots of a namespace in DRAM."""
        return self._residency.namespaces[namespace].pools[0].slot_bytes

    def parents(self, namespace: int, keys: Keys) -> list[bytes]:
        """Returns the parent key of each key, empty for roots and for unknown keys."""
        blocks = self._residency.blocks
        rows = self._residency.index.find(namespace, keys)
        return blocks.keys_of(np.where(rows >= 0, blocks.parent[rows], -1))

    # -- tiers

    @property
    def tiers(self) -> Sequence[TierView]:
        """All tiers by number, including removed devices."""
        states = self._residency.tiers
        for number in range(len(self._tiers), len(states)):
            self._tiers.append(TierView(number, states[number]))
        return self._tiers

    @property
    def memory(self) -> Sequence[int]:
        """The numbers of memory tiers: DRAM first, then pools of GPU memory."""
        return self._residency.topology.memory

    @property
    def addable_devices(self) -> int:
        """How many devices can still be added at run time."""
        return self._hotplug.addable

    # -- tenants and requests

    @property
    def limits(self) -> Limits:
        """The limits of one client and of one call."""
        return self._leases.limits

    def lent_by(self, tenant: int) -> dict[int, int]:
        """Returns bytes of a tenant's blocks that other tenants hold by leases, by reader."""
        return self._leases.lent_by(tenant)

    # -- transfers

    @property
    def unfinished_copies(self) -> int:
        """Copies under way, and batches of blocks that wait to be written to a lower tier."""
        transfers = self._leases.transfers
        return len(self._copies.under_way) + sum(map(len, transfers.backlog.values()))

    def transfers(self, after: int, limit: int) -> list[TransferStatus]:
        """Returns copies with numbers above `after`, the oldest `limit`."""
        under_way = self._copies.under_way
        # Numbers ascend in the order in which copies were queued.
        numbers = islice((number for number in under_way if number > after), limit)
        return [TransferStatus.of(number, under_way[number]) for number in numbers]

    # -- counters and logs

    def totals(self) -> Totals:
        """Returns the sizes of the core's tables."""
        r, leases = self._residency, self._leases
        return Totals(
            blocks=r.blocks.used,
            leases=len(leases.leases),
            reservations=len(leases.reservations),
            copies_under_way=len(self._copies.under_way),
            pinned_bytes=sum(r.pins.pinned_bytes.values()),
            ram_bytes=r.ram_bytes(),
        )

    @property
    def counters(self) -> Counter[str]:
        """Events since the start, by name."""
        return self._residency.counters

    @property
    def decisions(self) -> Decisions:
        """The log of eviction decisions."""
        return self._residency.decisions

    def policy(self) -> PolicyStatus:
        """Returns the eviction policy in use, and the progress of a change of policy."""
        migration = self._policy_migration
        return PolicyStatus(migration.name, migration.wanted, migration.pools_left)

    def reuse_state(self, now: float) -> ReuseState:
        """Returns the reuse statistics, for the next process. Costs a pass over all blocks."""
        return self._residency.reuse.save(now)
