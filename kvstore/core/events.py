"""The events of the placement core. The daemon turns requests, results and time into events."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.quotas import Quota
from kvstore.core.policy.admission import Rule
from kvstore.core.queues.device_queue import TierSpec
from kvstore.core.reuse.reuse import ReuseState

OK, CORRUPT, FAILED = range(3)
"""Results of one block: copied or verified; wrong checksum; the device failed."""

UNKNOWN = -1
"""The tenant of an extent whose tenant was deleted."""


class Event:
    """An input of the core."""

    __slots__ = ()


@dataclass(slots=True)
class TierEvent(Event):
    """An event of one tier. `tier` is its number: 0 is DRAM, each device and GPU pool has one above."""

    tier: int


@dataclass(slots=True)
class KeyedRequest(Event):
    """A request about keys of one namespace."""

    request: int
    namespace: int
    keys: Keys


@dataclass(slots=True)
class OpenNamespace(Event):
    """Opens namespace number `namespace` of `tenant`, with payloads of `block_bytes`.

    `domain` selects the extents, and thereby the tenants that may map them. Blocks are misses `ttl_s` after
    their storing (0: never). `extra_bytes` are added to each payload below tier 0, for encryption.
    `block_tokens` are only counted (0: unknown). At a limit, the oldest unused namespaces are closed, unless
    `may_close` is False. Those `in_use` stay. `independent`: no block has a parent.
    """

    request: int
    namespace: int
    block_bytes: int
    tenant: int = 0
    domain: int = 0
    ttl_s: float = 0.0
    extra_bytes: int = 0
    block_tokens: int = 0
    may_close: bool = True
    in_use: frozenset[int] = frozenset()
    independent: bool = False


@dataclass(slots=True)
class SetTenant(Event):
    """Sets the quotas of a tenant by tier, its weight at devices, and the bytes that it may pin.

    `rate` limits its transfers (bytes/s; 0: no limit), with bursts of `burst` bytes.
    """

    tenant: int
    quotas: tuple[Quota, ...]
    weight: float = 1.0
    pin_bytes: int = 1 << 62
    rate: float = 0.0
    burst: float = 0.0


@dataclass(slots=True)
class Configure(Event):
    """Changes settings. None leaves a setting as it is.

    `report_moves`: whether `CopyReport` actions report gained and lost copies.
    """

    write_policy: str | None = None
    prefetch_blocks: int | None = None
    leases_per_client: int | None = None
    namespaces: int | None = None
    namespaces_per_tenant: int | None = None
    report_moves: bool | None = None


@dataclass(slots=True)
class SetPolicy(Event):
    """Changes the eviction policy. The new one starts with the order of the old one."""

    name: str


@dataclass(slots=True)
class SetAdmission(TierEvent):
    """Sets the admission rule of a tier."""

    rule: Rule


@dataclass(slots=True)
class SetSharing(Event):
    """Sets the rule by which blocks are offered to the network, each once. None: no block is offered."""

    rule: Rule | None


@dataclass(slots=True)
class SetDevice(TierEvent):
    """Sets the state of a device. See `queues.device_queue`."""

    state: str


@dataclass(slots=True)
class SetLimit(TierEvent):
    """Sets the size of all extents of a tier together: at least one extent, at most `Extents.most_bytes`."""

    limit_bytes: int


@dataclass(slots=True)
class AddDevice(Event):
    """Adds a device to an existing lower tier. Ends with DeviceAdded; the device has no extents then."""

    spec: TierSpec


@dataclass(slots=True)
class RemoveDevice(TierEvent):
    """Empties and removes a device. Ends with DeviceRemoved."""


@dataclass(slots=True)
class LoseDevice(TierEvent):
    """A device is lost with all its blocks. Ends with DeviceRemoved."""


@dataclass(slots=True)
class SharePresence(Event):
    """Makes the presence table of a namespace in `words`, zeros. Ends with PresenceRetired.

    `seed` is a secret 64-bit number. See `residency.presence`.
    """

    namespace: int
    words: npt.NDArray[np.uint64]
    seed: int


@dataclass(slots=True)
class RetirePresence(Event):
    """Ends the presence table of a namespace, if it has one."""

    namespace: int


@dataclass(slots=True)
class Publish(Event):
    """Moves a namespace to extents of another domain. Answered when its blocks in DRAM have moved."""

    request: int
    namespace: int
    domain: int


@dataclass(slots=True)
class Forget(Event):
    """Deletes namespaces. Answered at the end with the number of deleted blocks."""

    request: int
    namespaces: tuple[int, ...]


@dataclass(slots=True)
class ForgetTenant(Event):
    """Deletes all namespaces of a tenant. Answered when its extents have been renewed too."""

    request: int
    tenant: int


@dataclass(slots=True)
class Reserve(Event):
    """Reserves slots for those of `keys` (one chain, in order) that are not stored. `parent` precedes them.

    Keys of an independent namespace are no chain, and `parent` is empty. They may belong to the block
    `chain_key` of the namespace `chain` (empty: to none), and are refused if it is not stored. `tier`: see
    Acquire. `loading`: the blocks are downloaded for a request.
    """

    request: int
    client: int
    namespace: int
    keys: Keys
    parent: bytes
    deadline: float
    tier: int = 0
    chain: int = 0
    chain_key: bytes = b""
    loading: bool = False


@dataclass(slots=True)
class Commit(Event):
    """Makes the blocks of a reservation readable. `checksums` has one entry for each granted key.

    `written` marks the granted keys whose slots are filled. The other slots are freed.
    """

    request: int
    client: int
    lease: int
    checksums: npt.NDArray[np.uint64]
    written: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Abort(Event):
    """Frees the slots of a reservation."""

    client: int
    lease: int


@dataclass(slots=True)
class Acquire(Event):
    """Leases the slots of the longest stored prefix of `keys`, promoted where needed, until `deadline`.

    `tenant` asks. `recompute_s`: the time to recompute one block (0: unknown); blocks that take longer to
    load are left out. `tier`: the preferred memory tier of the slots; DRAM is used if it cannot hold them.
    `no_touch`: the request does not count as a use of the blocks.
    """

    request: int
    client: int
    namespace: int
    keys: Keys
    deadline: float
    tenant: int = 0
    recompute_s: float = 0.0
    tier: int = 0
    no_touch: bool = False


@dataclass(slots=True)
class Release(Event):
    """Ends a lease."""

    client: int
    lease: int


@dataclass(slots=True)
class Lookup(KeyedRequest):
    """Counts the leading keys that are stored and worth loading by `deadline`. See Acquire.

    Each key stands for `step` blocks. The blocks of the first `have` keys are not loaded.
    """

    tenant: int = 0
    deadline: float = math.inf
    recompute_s: float = 0.0
    tier: int = 0
    step: int = 1
    have: int = 0


@dataclass(slots=True)
class BlocksRead(Event):
    """Blocks with these keys were read from DRAM without a request, `blocks` with repetitions. No answer."""

    namespace: int
    keys: Keys
    blocks: int


@dataclass(slots=True)
class Contains(KeyedRequest):
    """Asks which of the keys are stored, each for itself. Not a use of the blocks."""

    tenant: int = 0


@dataclass(slots=True)
class Prefetch(KeyedRequest):
    """Promotes the stored prefix to memory tier `tier`, as far as there is room. Answered at once."""

    tenant: int = 0
    tier: int = 0


@dataclass(slots=True)
class Pin(KeyedRequest):
    """Keeps the stored prefix from eviction until `until`."""

    until: float


@dataclass(slots=True)
class Unpin(KeyedRequest):
    """Undoes Pin for the stored prefix."""


@dataclass(slots=True)
class Invalidate(KeyedRequest):
    """Drops the blocks of these keys from every tier."""


@dataclass(slots=True)
class Hint(KeyedRequest):
    """Tells what a client expects of the stored prefix: the next use in `next_use_s` (None: unknown).

    `closed`: the session is over. `priority`: -1, 0 or 1.
    """

    next_use_s: float | None = None
    closed: bool = False
    priority: int = 0


@dataclass(slots=True)
class Explain(Event):
    """Asks for the state of these keys in each of these namespaces, and for the latest decisions."""

    request: int
    namespaces: tuple[int, ...]
    keys: Keys


@dataclass(slots=True)
class Suspect(KeyedRequest):
    """A reader found wrong checksums under these keys in `tier`.

    Unless `request` is 0, it is answered with the number of corrupt blocks after these were dropped.
    """

    tier: int = 0


@dataclass(slots=True)
class Tell(Event):
    """Reports where blocks are, as CopyReport. Does nothing unless `Configure.report_moves` is set."""

    namespace: int
    keys: Keys


@dataclass(slots=True)
class ClientLost(Event):
    """A connection ended. Its leases and reservations end too."""

    client: int


@dataclass(slots=True)
class CopyDone(Event):
    """A copy ended. `results` has OK, CORRUPT or FAILED for each of its blocks."""

    transfer: int
    results: npt.NDArray[np.uint8]


@dataclass(slots=True)
class ProbeDone(Event):
    """A probe ended. `results` has OK, CORRUPT, or FAILED (not readable) for each of its slots."""

    probe: int
    results: npt.NDArray[np.uint8]


@dataclass(slots=True)
class Scrub(TierEvent):
    """Probes the next `step_bytes` of a tier and the rest of the last block, unless a probe is under way.

    At least one block is probed.

    Steps of `MEASURED_BYTES` or more also measure the device.
    """

    step_bytes: int


@dataclass(slots=True)
class ExtentReady(TierEvent):
    """An extent can be used.

    `slot_bytes` is 0 for a new extent. For an extent of an earlier process, `versions` are the last versions
    of its slots, `tenant` and `domain` its owners; if `tenant` is `UNKNOWN`, the extent is renewed first.
    `replaces` is the extent that it renews; -1: none.
    """

    extent: int
    slot_bytes: int = 0
    versions: npt.NDArray[np.uint32] | None = None
    tenant: int = 0
    domain: int = 0
    replaces: int = -1


@dataclass(slots=True)
class ExtentLost(TierEvent):
    """An extent is gone: its renewal failed, or it was removed on request."""

    extent: int


@dataclass(slots=True)
class ExtentsEnd(TierEvent):
    """A tier gets no more extents: it is complete, or memory or disk is full."""


@dataclass(slots=True)
class Restore(TierEvent):
    """Adds blocks that a tier already holds, coldest last. Every column has one entry a block.

    `ends` is the time when a block expires, in the clock of `now`; infinity: never. Tiers are restored from
    the lowest up. If two tiers disagree about a block, the later event is right.
    """

    namespace: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint8]
    key_bytes: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    parent_bytes: npt.NDArray[np.uint8]
    extent: npt.NDArray[np.uint32]
    index: npt.NDArray[np.uint32]
    version: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.uint64]
    ends: npt.NDArray[np.float64]

    def only(self, which: npt.NDArray[np.bool_]) -> Restore:
        """Returns the event for some of the blocks."""
        if which.all():
            return self
        columns = [getattr(self, f.name)[which] for f in fields(self) if f.name != "tier"]
        return Restore(self.tier, *columns)


@dataclass(slots=True)
class RestoreReuse(Event):
    """Continues from the reuse statistics that an earlier process saved `elapsed_s` ago, before any block."""

    state: ReuseState
    elapsed_s: float


@dataclass(slots=True)
class Watch(Event):
    """Reports blocks with this key as `Came` when they are stored, until as many `Unwatch` events."""

    key: bytes


@dataclass(slots=True)
class Unwatch(Event):
    """Undoes one `Watch` of this key."""

    key: bytes


@dataclass(slots=True)
class Flush(Event):
    """Queues writes of all blocks that only memory holds, before a stop."""


@dataclass(slots=True)
class Tick(Event):
    """Takes a step of every job."""
