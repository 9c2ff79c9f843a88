"""Everything that placement asks of the shell. Each result comes back as an event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

GRANTED, PRESENT, PENDING, DENIED = range(4)
"""What became of one key of a reservation: write it; already there; somebody else writes it; not stored."""

NO_ROOM, WORTH_LESS = "no room", "worth less than what is stored"
"""Why keys were DENIED."""

U32 = npt.NDArray[np.uint32]


@dataclass(slots=True)
class Where:
    """Slots of one tier, one entry a slot: extent << 32 | index within it."""

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
    """Who the blocks of an action are, one entry a block. `words` is (n, 8): keys padded with zeros."""

    namespace: npt.NDArray[np.uint16]
    words: npt.NDArray[np.uint64]
    key_bytes: npt.NDArray[np.uint8]
    checksum: npt.NDArray[np.uint64]

    def key(self, i: int) -> bytes:
        """Key of block i."""
        return bytes(self.words[i].tobytes()[: int(self.key_bytes[i])])

    def only(self, which: npt.NDArray[np.bool_]) -> BlockIds:
        """The same for some of the blocks."""
        return BlockIds(self.namespace[which], self.words[which], self.key_bytes[which], self.checksum[which])

    def __len__(self) -> int:
        return len(self.words)


@dataclass(slots=True)
class _Slots:
    """An answer with slots: one `SLOT_RECORD` each."""

    request: int
    lease: int
    slot_bytes: int
    slots: npt.NDArray[np.void]

    @property
    def where(self) -> Where:
        """Where the slots are."""
        return Where(self.slots["place"])

    @property
    def version(self) -> U32:
        """Their versions."""
        return self.slots["version"]


@dataclass(slots=True)
class Stored:
    """How many leading keys of a question were stored, by the number of the tier that would serve them.

    `unworthy` of them were left out because computing them again is faster, `late` because they did not come
    in time.
    """

    by_tier: dict[int, int] = field(default_factory=dict)
    unworthy: int = 0
    late: int = 0

    @property
    def blocks(self) -> int:
        """How many there were in all."""
        return sum(self.by_tier.values())


@dataclass(slots=True)
class Grant(_Slots):
    """Answer to Acquire: the leading blocks, readable until the lease ends. lease 0: nothing was found.

    `sources`: the number of the tier in which each block was found.
    """

    stored: Stored = field(default_factory=Stored)
    sources: npt.NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))

    @property
    def checksum(self) -> npt.NDArray[np.uint64]:
        """What the bytes must hash to."""
        return self.slots["checksum"]

    @property
    def tiers(self) -> U32:
        """Where each block was found."""
        return self.slots["tier"]


@dataclass(slots=True)
class Reserved(_Slots):
    """Answer to Reserve: `status` for every key asked, slots for the GRANTED ones in the same order."""

    status: npt.NDArray[np.uint8]
    why: str


@dataclass(slots=True)
class Answer:
    """A number: blocks found, stored, pinned, dropped."""

    request: int
    value: int


@dataclass(slots=True)
class Found(Answer):
    """Answer to Lookup. `gaps`: stored blocks may lie beyond missing ones, for now."""

    gaps: bool
    stored: Stored = field(default_factory=Stored)


@dataclass(slots=True)
class Explained:
    """Answer to Explain: plain values, one map a key and namespace that knows something of it."""

    request: int
    blocks: list[dict[str, Any]]


@dataclass(slots=True)
class Deny:
    """No, and why. With `retry_s` above 0 it is only for now: try again so much later."""

    request: int
    why: str
    hint: str = ""
    retry_s: float = 0.0


@dataclass(slots=True)
class Copy:
    """Move bytes from one tier's slots to another's. Ends with CopyDone. `parents`: keys, empty for roots.

    `urgent`: somebody waits. `lives`: see Stamp.
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
class WriteHeader:
    """Memory tiers: these slots now hold these blocks; write their headers.

    `parents` says whose children they are, keys of 0 bytes for roots; `lives` how many seconds longer they
    may be served (infinity: for good), None if all of them for good.
    """

    tier: int
    identity: BlockIds
    parents: BlockIds
    where: Where
    version: U32
    lives: npt.NDArray[np.float64] | None


@dataclass(slots=True)
class OfferBlocks:
    """Copy these blocks from DRAM to the network."""

    identity: BlockIds


@dataclass(slots=True)
class Drop:
    """These slots hold nothing any more: void their headers, or delete their records.

    Of a slot that a copy is still on its way into, no record may appear.
    """

    tier: int
    identity: BlockIds
    where: Where


@dataclass(slots=True)
class CopyReport:
    """Reports that these blocks gained or lost a copy in a tier. Sent only while `Outbox.telling`.

    `parents` has the parents of blocks that gained a copy, keys of 0 bytes for roots; None if they lost one.
    """

    tier: int
    identity: BlockIds
    parents: BlockIds | None

    @property
    def gained(self) -> bool:
        """Whether the blocks gained the copy."""
        return self.parents is not None


@dataclass(slots=True)
class BlocksArrived:
    """Reports that these blocks gained a copy in a tier. A lookup may wait for them; see `Outbox.awaited`."""

    identity: BlockIds


@dataclass(slots=True)
class Probe:
    """Read these slots again and compare with the checksums. Ends with ProbeDone."""

    probe: int
    tier: int
    slot_bytes: int
    identity: BlockIds
    where: Where


@dataclass(slots=True)
class FormatExtent:
    """Cut an extent into slots of a size, for a domain."""

    tier: int
    extent: int
    slot_bytes: int
    domain: int = 0


@dataclass(slots=True)
class RenewExtent:
    """Replace an extent that gets another owner, so that its old bytes stay hidden. Ends with ExtentReady."""

    tier: int
    extent: int


@dataclass(slots=True)
class RemoveExtent:
    """Free the memory or disk space of an extent. Ends with ExtentLost."""

    tier: int
    extent: int


@dataclass(slots=True)
class DeviceAdded:
    """A device was added under this number, without extents. SetLimit requests extents."""

    tier: int


@dataclass(slots=True)
class DeviceRemoved:
    """A device that was being removed is empty. Later actions do not name it."""

    tier: int


@dataclass(slots=True)
class NamespaceClosed:
    """A namespace without blocks was closed because of a limit. Its number is free."""

    namespace: int


@dataclass(slots=True)
class MakeExtents:
    """Make `count` extents. Each one ends with ExtentReady, and the last is followed by ExtentsEnd."""

    tier: int
    count: int


Action = (
    Grant
    | Reserved
    | Answer
    | Explained
    | Deny
    | Copy
    | WriteHeader
    | OfferBlocks
    | Drop
    | CopyReport
    | BlocksArrived
    | Probe
    | FormatExtent
    | RenewExtent
    | RemoveExtent
    | MakeExtents
    | DeviceAdded
    | DeviceRemoved
    | NamespaceClosed
)
