"""Everything that placement asks of the shell. Each result comes back as an event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GRANTED, PRESENT, PENDING, DENIED = range(4)
"""What became of one key of a reservation: write it; already there; somebody else writes it; no room."""

U32 = npt.NDArray[np.uint32]


@dataclass(slots=True)
class Where:
    """Slots of one tier: extent and index within it, one entry a slot."""

    extent: U32
    index: U32

    def __len__(self) -> int:
        return len(self.extent)


@dataclass(slots=True)
class Identity:
    """Who the blocks of an action are, one entry a block. `words` is (n, 8): keys padded with zeros."""

    namespace: npt.NDArray[np.uint16]
    words: npt.NDArray[np.uint64]
    key_bytes: npt.NDArray[np.uint8]
    checksum: npt.NDArray[np.uint64]

    def key(self, i: int) -> bytes:
        """Key of block i."""
        return bytes(self.words[i].tobytes()[: int(self.key_bytes[i])])

    def __len__(self) -> int:
        return len(self.words)


@dataclass(slots=True)
class Grant:
    """Answer to Acquire: the leading blocks, readable until the lease ends. lease 0: nothing was found."""

    request: int
    lease: int
    slot_bytes: int
    where: Where
    version: U32
    checksum: npt.NDArray[np.uint64]
    tiers: npt.NDArray[np.uint8]


@dataclass(slots=True)
class Room:
    """Answer to Reserve: `status` for every key asked, slots for the GRANTED ones in the same order."""

    request: int
    lease: int
    slot_bytes: int
    status: npt.NDArray[np.uint8]
    where: Where
    version: U32
    why: str


@dataclass(slots=True)
class Answer:
    """A number: blocks found, stored, pinned, dropped."""

    request: int
    value: int


@dataclass(slots=True)
class Deny:
    """No, and why."""

    request: int
    why: str
    hint: str = ""


@dataclass(slots=True)
class Copy:
    """Move bytes from one tier's slots to another's. Ends with CopyDone. `parents`: keys, empty for roots."""

    transfer: int
    source: int
    target: int
    slot_bytes: int
    identity: Identity
    parents: list[bytes]
    source_where: Where
    target_where: Where
    version: U32


@dataclass(slots=True)
class Stamp:
    """Memory tiers: these slots now hold these blocks; write their headers."""

    tier: int
    slot_bytes: int
    identity: Identity
    where: Where
    version: U32


@dataclass(slots=True)
class Drop:
    """These slots hold nothing any more: void their headers, or delete their records."""

    tier: int
    slot_bytes: int
    identity: Identity
    where: Where


@dataclass(slots=True)
class Probe:
    """Read these slots again and compare with the checksums. Ends with ProbeDone."""

    probe: int
    tier: int
    slot_bytes: int
    identity: Identity
    where: Where


@dataclass(slots=True)
class Format:
    """An extent has been given to a slot size."""

    tier: int
    extent: int
    slot_bytes: int


Action = Grant | Room | Answer | Deny | Copy | Stamp | Drop | Probe | Format
