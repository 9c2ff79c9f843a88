"""Everything that can happen to placement. The shell turns requests, results and time into these."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.key_batch import Keys
from kvstore.core.capacity.quotas import Quota
from kvstore.core.reuse.reuse import ReuseState
from kvstore.core.transfers.admission import Rule
from kvstore.core.transfers.devices import TierSpec

OK, CORRUPT, FAILED = range(3)
"""How one block of a copy ended: bytes arrived; they do not match their checksum; the device refused."""


UNKNOWN = -1
"""Whose an extent was, if that is no tenant that there is."""


@dataclass(slots=True)
class OpenNamespace:
    """Namespace number `namespace` exists, its payloads are `block_bytes` long, and it is `tenant`'s.

    `domain` says who may map its extents; `ttl_s` after they were stored, blocks are misses (0: never).
    `extra_bytes` come on top of each payload below tier 0, where what is stored may be sealed.
    `block_tokens` are only counted (0: nobody knows how many a block has). Where a limit is reached, the
    oldest unused namespaces are closed, unless `may_close` is False; none of those `in_use`.
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


@dataclass(slots=True)
class SetTenant:
    """What a tenant may have from now on: a quota a tier, its weight at devices, bytes it may pin.

    `rate` caps its transfers, in bytes/s, with bursts of `burst` bytes; 0: no cap.
    """

    tenant: int
    quotas: tuple[Quota, ...]
    weight: float = 1.0
    pin_bytes: int = 1 << 62
    rate: float = 0.0
    burst: float = 0.0


@dataclass(slots=True)
class Configure:
    """Changes settings. None leaves a setting as it is.

    `report_moves`: whether `Moved` actions report which blocks come to a tier and leave it.
    """

    write_policy: str | None = None
    prefetch_blocks: int | None = None
    leases_per_client: int | None = None
    namespaces: int | None = None
    namespaces_per_tenant: int | None = None
    report_moves: bool | None = None


@dataclass(slots=True)
class SetPolicy:
    """From now on blocks leave by another eviction policy, which goes on from what the last one knew."""

    name: str


@dataclass(slots=True)
class SetAdmission:
    """From now on, tier number `tier` takes what this rule says."""

    tier: int
    rule: Rule


@dataclass(slots=True)
class SetSharing:
    """From now on blocks are offered to the network as this rule says, once each; None: none are."""

    rule: Rule | None


@dataclass(slots=True)
class SetDevice:
    """What the device of tier number `tier`, not the first, is to do from now on: see `devices`."""

    tier: int
    state: str


@dataclass(slots=True)
class SetLimit:
    """Tier number `tier` is to have extents of `limit_bytes` together: more are asked for, or some leave.

    At least one, and no more than `Extents.most_bytes`.
    """

    tier: int
    limit_bytes: int


@dataclass(slots=True)
class AddDevice:
    """A device more, for a lower tier that there is. Ends with Joined; it has no extents then."""

    spec: TierSpec


@dataclass(slots=True)
class RemoveDevice:
    """The device of number `tier`, not the first of its tier, is to be emptied and left. Ends with Left."""

    tier: int


@dataclass(slots=True)
class LoseDevice:
    """The device of number `tier`, not the first, is gone with all that it held. Ends with Left."""

    tier: int


@dataclass(slots=True)
class Publish:
    """From now on a namespace's blocks lie in extents of another domain: others may map these.

    Answered when those that are in tier 0 have been copied there.
    """

    request: int
    namespace: int
    domain: int


@dataclass(slots=True)
class Forget:
    """These namespaces are misses from now on, and no more. Answered, when nothing is left: blocks gone."""

    request: int
    namespaces: tuple[int, ...]


@dataclass(slots=True)
class ForgetTenant:
    """Like Forget, for all that a tenant has; answered when all its extents have been renewed too."""

    request: int
    tenant: int


@dataclass(slots=True)
class Reserve:
    """Room for those of `keys` (one chain, in order) not stored yet. `parent` is before the first.

    `at`: see Acquire. `loading`: they come from the network, because somebody wants them.
    """

    request: int
    client: int
    namespace: int
    keys: Keys
    parent: bytes
    deadline: float
    at: int = 0
    loading: bool = False


@dataclass(slots=True)
class Commit:
    """The writer has filled these slots of its reservation; `checksums` has one entry a granted key.

    `written` marks the granted keys that were filled; the others are given up.
    """

    request: int
    client: int
    lease: int
    checksums: npt.NDArray[np.uint64]
    written: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Abort:
    """The writer gives its reservation up."""

    client: int
    lease: int


@dataclass(slots=True)
class Acquire:
    """Slots of the longest stored prefix of `keys`, promoted where needed, by `deadline`.

    `tenant` is who asks. `recompute_s`: what computing one block anew takes; what takes longer to load is
    left out. 0: nobody knows. `at`: the memory tier that the slots are to be in, or DRAM if they can't be.
    `quiet`: it is no use of the blocks, and does not count.
    """

    request: int
    client: int
    namespace: int
    keys: Keys
    deadline: float
    tenant: int = 0
    recompute_s: float = 0.0
    at: int = 0
    quiet: bool = False


@dataclass(slots=True)
class Release:
    """The reader is done with its lease."""

    client: int
    lease: int


@dataclass(slots=True)
class Lookup:
    """How many leading keys are stored, of those that are worth loading by `deadline`: see Acquire."""

    request: int
    namespace: int
    keys: Keys
    tenant: int = 0
    deadline: float = math.inf
    recompute_s: float = 0.0
    at: int = 0


@dataclass(slots=True)
class Prefetch:
    """Bring the stored prefix into the tier `at`, as far as there is room; nobody waits."""

    request: int
    namespace: int
    keys: Keys
    tenant: int = 0
    at: int = 0


@dataclass(slots=True)
class Pin:
    """Keep the stored prefix until `until`."""

    request: int
    namespace: int
    keys: Keys
    until: float


@dataclass(slots=True)
class Unpin:
    """Undo Pin."""

    request: int
    namespace: int
    keys: Keys


@dataclass(slots=True)
class Invalidate:
    """These keys must be misses from now on."""

    request: int
    namespace: int
    keys: Keys


@dataclass(slots=True)
class Hint:
    """What a client expects of the stored prefix: next use in `next_use_s` (None: nobody knows).

    `closed`: its session is over. `priority`: -1, 0 or 1.
    """

    request: int
    namespace: int
    keys: Keys
    next_use_s: float | None = None
    closed: bool = False
    priority: int = 0


@dataclass(slots=True)
class Explain:
    """What is known of these keys in each of these namespaces, and what was decided about them lately."""

    request: int
    namespaces: tuple[int, ...]
    keys: Keys


@dataclass(slots=True)
class Suspect:
    """A reader saw bytes in the tier `at` that do not match their checksum under these keys.

    Answered, unless `request` is 0, when bad ones are out of the way: how many were.
    """

    request: int
    namespace: int
    keys: Keys
    at: int = 0


@dataclass(slots=True)
class Tell:
    """Says where blocks are, as Moved, as if they had just come there; nothing while nobody is told."""

    namespace: int
    keys: Keys


@dataclass(slots=True)
class ClientLost:
    """A connection ended; what it held is free at once."""

    client: int


@dataclass(slots=True)
class CopyDone:
    """A copy ended; `results` has OK, CORRUPT or FAILED for each of its blocks."""

    transfer: int
    results: npt.NDArray[np.uint8]


@dataclass(slots=True)
class ProbeDone:
    """What the probed slots hold: OK, CORRUPT, or FAILED where they could not be read."""

    probe: int
    results: npt.NDArray[np.uint8]


@dataclass(slots=True)
class Scrub:
    """Probe the next blocks of tier number `tier`, up to `limit_bytes`, unless some still are."""

    tier: int
    limit_bytes: int


@dataclass(slots=True)
class ExtentReady:
    """An extent of tier number `tier` can be used.

    `slot_bytes` is 0 unless it was cut in an earlier life; `versions` are then its slots' last ones, `tenant`
    and `domain` whose it was; if that is `UNKNOWN`, it is made anew first. `replaces` is the extent that it
    was renewed from, -1 for a first one.
    """

    tier: int
    extent: int
    slot_bytes: int = 0
    versions: npt.NDArray[np.uint32] | None = None
    tenant: int = 0
    domain: int = 0
    replaces: int = -1


@dataclass(slots=True)
class ExtentLost:
    """An extent that was to be renewed could not be, or one that was to be removed has been: one less."""

    tier: int
    extent: int


@dataclass(slots=True)
class ExtentsEnd:
    """Tier number `tier` will get no more extents: it is complete, or its memory or disk is."""

    tier: int


@dataclass(slots=True)
class Restore:
    """Blocks that tier number `tier` already holds, coldest last. One entry a block in every column.

    `ends` is when a block may not be served any more, in the clock of `now`; infinity: never.

    Tiers are restored from the lowest up: where two disagree about a block, the later event is right.
    """

    tier: int
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
        """The same for some of the blocks."""
        if which.all():
            return self
        columns = [getattr(self, f.name)[which] for f in fields(self) if f.name != "tier"]
        return Restore(self.tier, *columns)


@dataclass(slots=True)
class RestoreReuse:
    """Continues from the reuse statistics that an earlier process saved `elapsed_s` ago, before any block."""

    state: ReuseState
    elapsed_s: float


@dataclass(slots=True)
class Watch:
    """Reports blocks with this key as `Came` when they are stored, until as many `Unwatch` events."""

    key: bytes


@dataclass(slots=True)
class Unwatch:
    """Undoes one `Watch` of this key."""

    key: bytes


@dataclass(slots=True)
class Flush:
    """Write everything down that only the serving tier holds (before a stop)."""


@dataclass(slots=True)
class Tick:
    """Time has passed."""

    _: None = field(default=None, repr=False)


Event = (
    OpenNamespace
    | SetTenant
    | Configure
    | SetPolicy
    | SetAdmission
    | SetSharing
    | SetDevice
    | SetLimit
    | AddDevice
    | RemoveDevice
    | LoseDevice
    | Publish
    | Forget
    | ForgetTenant
    | Reserve
    | Commit
    | Abort
    | Acquire
    | Release
    | Lookup
    | Prefetch
    | Pin
    | Unpin
    | Invalidate
    | Hint
    | Explain
    | Suspect
    | Tell
    | ClientLost
    | CopyDone
    | ProbeDone
    | Scrub
    | ExtentReady
    | ExtentLost
    | ExtentsEnd
    | Restore
    | RestoreReuse
    | Watch
    | Unwatch
    | Flush
    | Tick
)
