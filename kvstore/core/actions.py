"""The actions of the placement core. The daemon executes them. Their results return as events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

GRANTED, PRESENT, PENDING, DENIED = range(4)
"""The status of one key of a reservation: slot granted; stored; written by another client; no slot."""

NO_ROOM, WORTH_LESS = "no room", "worth less than what is stored"
DENIALS = {
    NO_ROOM: "The tenant's limit or the tier is full, and nothing could be evicted in time: leases, pins and "
    "floors of other tenants protect the stored blocks. Raise `dram.limit` or the tenant's limit.",
    WORTH_LESS: "Every stored block is more likely to be used again. Only `hazard` refuses such blocks.",
}
"""The reasons why keys were DENIED, with their meanings."""

U32 = npt.NDArray[np.uint32]


def places(extent: npt.NDArray[Any], index: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Returns the place of each slot: extent << 32 | index within it."""
    return extent.astype(np.uint64) << np.uint64(32) | index.astype(np.uint64)


@dataclass(slots=True)
class Where:
    """Slots of one tier, one entry a slot: see `places`."""

    place: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.place)

    @property
    def extent(self) -> U32:
        """The extent of each slot."""
        return (self.place >> np.uint64(32)).astype(np.uint32)

    @property
    def index(self) -> U32:
        """The index of each slot within its extent."""
        return self.place.astype(np.uint32)


@dataclass(slots=True)
class BlockIds:
    """Namespaces, keys and checksums, one entry a block. `words` is (n, 8): keys padded with zeros."""

    namespace: npt.NDArray[np.uint16]
    words: npt.NDArray[np.uint64]
    key_bytes: npt.NDArray[np.uint8]
    checksum: npt.NDArray[np.uint64]

    def key(self, i: int) -> bytes:
        """Returns the key of block i."""
        return bytes(self.words[i].tobytes()[: int(self.key_bytes[i])])

    def keys(self) -> list[bytes]:
        """Returns the keys of all blocks."""
        raw, width = self.words.tobytes(), 8 * self.words.shape[1]
        return [raw[i * width : i * width + n] for i, n in enumerate(self.key_bytes.tolist())]

    def only(self, which: npt.NDArray[np.bool_]) -> BlockIds:
        """Returns the ids of some of the blocks."""
        return BlockIds(self.namespace[which], self.words[which], self.key_bytes[which], self.checksum[which])

    def __len__(self) -> int:
        return len(self.words)


@dataclass(slots=True)
class Stored:
    """Leading keys of a request that were stored, by the number of the tier that would serve them.

    `unworthy` of them were left out because recomputing is faster, `late` because of the deadline.
    """

    by_tier: dict[int, int] = field(default_factory=dict)
    unworthy: int = 0
    late: int = 0

    @property
    def blocks(self) -> int:
        """The number of stored keys."""
        return sum(self.by_tier.values())


class Action:
    """An output of the core."""

    __slots__ = ()


# -- answers


@dataclass(slots=True)
class _Answer(Action):
    """The answer to a request."""

    request: int


@dataclass(slots=True)
class _Slots(_Answer):
    """An answer with slots: one `SLOT_RECORD` each."""

    lease: int
    slot_bytes: int
    slots: npt.NDArray[np.void]

    @property
    def where(self) -> Where:
        """The places of the slots."""
        return Where(self.slots["place"])


@dataclass(slots=True)
class Grant(_Slots):
    """Answers Acquire: the leading blocks, readable until the lease ends. lease 0: no block was found.

    `sources`: the number of the tier in which each block was found.
    """

    stored: Stored = field(default_factory=Stored)
    sources: npt.NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))

    @property
    def checksum(self) -> npt.NDArray[np.uint64]:
        """The checksums of the blocks."""
        return self.slots["checksum"]


@dataclass(slots=True)
class Reserved(_Slots):
    """Answers Reserve: the `status` of every key, and slots for the GRANTED keys in the same order."""

    status: npt.NDArray[np.uint8]
    why: str


@dataclass(slots=True)
class Answer(_Answer):
    """Answers with a number of blocks: found, stored, pinned, dropped."""

    value: int


@dataclass(slots=True)
class Found(Answer):
    """Answers Lookup. `gaps`: stored blocks may lie behind missing ones for now."""

    gaps: bool
    stored: Stored = field(default_factory=Stored)


@dataclass(slots=True)
class Presence(_Answer):
    """Answers Contains: whether each key is stored."""

    mask: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Explained(_Answer):
    """Answers Explain: one map of plain values for each known key and namespace."""

    blocks: list[dict[str, Any]]


@dataclass(slots=True)
class Deny(_Answer):
    """Refuses a request. With `retry_s` above 0, the client may retry after this time."""

    why: str
    hint: str = ""
    retry_s: float = 0.0


Reply = Grant | Reserved | Answer | Presence | Explained | Deny
"""The actions that answer a request."""


# -- bytes and headers


@dataclass(slots=True)
class Copy(Action):
    """Copies blocks from one tier to another. Ends with CopyDone. `parents`: keys, empty for roots.

    `urgent`: a request waits. `lives`: see WriteHeader.
    """

    transfer: int
    source: int
    target: int
    identity: BlockIds
    parents: list[bytes]
    source_where: Where
    target_where: Where
    version: U32
    urgent: bool
    lives: npt.NDArray[np.float64] | None


@dataclass(slots=True)
class Probe(Action):
    """Reads slots and compares the bytes with the checksums. Ends with ProbeDone."""

    probe: int
    tier: int
    slot_bytes: int
    identity: BlockIds
    where: Where


@dataclass(slots=True)
class OfferBlocks(Action):
    """Offers blocks in DRAM to the network tier."""

    identity: BlockIds


@dataclass(slots=True)
class BlocksArrived(Action):
    """Reports that blocks gained a copy in a tier. A lookup may wait for them; see `Outbox.awaited`."""

    identity: BlockIds


@dataclass(slots=True)
class TierAction(Action):
    """An action in one tier."""

    tier: int


@dataclass(slots=True)
class WriteHeader(TierAction):
    """Writes the headers of blocks in slots of a memory tier.

    `parents` has keys of 0 bytes for roots. `lives`: the seconds until each block expires (infinity: never);
    None: no block expires.
    """

    identity: BlockIds
    parents: BlockIds
    where: Where
    version: U32
    lives: npt.NDArray[np.float64] | None


@dataclass(slots=True)
class Drop(TierAction):
    """Voids the headers of slots, or deletes their records. Later ends of copies into them get no record."""

    identity: BlockIds
    where: Where


@dataclass(slots=True)
class CopyReport(TierAction):
    """Reports that blocks gained or lost a copy in a tier. Sent only while `Outbox.telling`.

    `parents` has the parents of blocks that gained a copy, keys of 0 bytes for roots; None if they lost one.
    """

    identity: BlockIds
    parents: BlockIds | None

    @property
    def gained(self) -> bool:
        """Whether the blocks gained the copy."""
        return self.parents is not None


# -- extents, devices, namespaces


@dataclass(slots=True)
class MakeExtents(TierAction):
    """Makes `count` extents. Each ends with ExtentReady; ExtentsEnd follows the last."""

    count: int


@dataclass(slots=True)
class ExtentAction(TierAction):
    """An action on one extent."""

    extent: int


@dataclass(slots=True)
class FormatExtent(ExtentAction):
    """Cuts an extent into slots of one size, for a domain."""

    slot_bytes: int
    domain: int = 0


@dataclass(slots=True)
class RenewExtent(ExtentAction):
    """Replaces an extent, so that its next owner cannot read old bytes. Ends with ExtentReady."""


@dataclass(slots=True)
class RemoveExtent(ExtentAction):
    """Frees the memory or disk space of an extent. Ends with ExtentLost."""


@dataclass(slots=True)
class DeviceAdded(TierAction):
    """Reports the number of a new device, which has no extents yet. SetLimit requests extents."""


@dataclass(slots=True)
class DeviceRemoved(TierAction):
    """Reports that a device that was being removed is empty. Later actions do not name it."""


@dataclass(slots=True)
class PresenceRetired(Action):
    """Reports that the presence table of a namespace has ended: its memory is not used any more."""

    namespace: int


@dataclass(slots=True)
class NamespaceClosed(Action):
    """Reports that a namespace without blocks was closed because of a limit. Its number is free."""

    namespace: int
