"""The seams of storage: `StorageTier`, driven by the daemon, and `IOEngine`, used by the NVMe tier.

The core decides which blocks a tier holds and where. A tier keeps extents and their bytes. An I/O engine
moves bytes between memory and file offsets and knows no keys. Which tier copies to which is not covered here:
see `kvstore.daemon.runtime.movers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvstore.core.actions import BlockIds, Probe, Where
from kvstore.cuda.device import DeviceBuffer
from kvstore.errors import MisuseError, TierError
from kvstore.tiers.results import Done

Memory: TypeAlias = memoryview | DeviceBuffer

Ready: TypeAlias = Callable[[int], None]
"""Receives the number of an extent that can be used."""

Ended: TypeAlias = Callable[[TierError | None], None]
"""Receives the reason of a failure, None for success."""

DEFAULT_TENANT = "default"

OTHERS_EVERY = 8
"""Of this many starts, one is not urgent if both urgencies wait."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of an extent: a tenant, and the 16-byte tag of the set of tenants that may map the extent."""

    tenant: str = DEFAULT_TENANT
    tag: bytes = bytes(16)


DEFAULT_OWNER = Owner()


class StorageTier(Protocol):
    """One device of a tier: extents of memory or files that hold blocks in slots of one size.

    The core numbers extents and slots. Callbacks run on threads of the tier, or never after `close`.
    """

    @property
    def kind(self) -> str:
        """The kind of tier, by which `movers` finds how blocks are copied."""

    @property
    def persistent(self) -> bool:
        """Whether extents outlive the process. An extent whose removal fails then still takes room."""

    def start(self, ready: Ready, ended: Ended) -> None:
        """Makes the missing extents. Calls `ready` with each number, then `ended`."""

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        """Makes `count` more extents. Calls `ready` with each number, then `ended`."""

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        """Assigns an extent to an owner and cuts it into empty slots of `slot_bytes`."""

    def renew(self, extent: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        """Replaces an unused extent by one of zeros and calls `ready` with its number, or `failed`."""

    def remove(self, extent: int, done: Ended) -> None:
        """Removes an unused extent and its bytes, then calls `done`."""

    def drop(self, identity: BlockIds, where: Where) -> None:
        """Marks slots as empty. A copy under way into such a slot leaves no record or header."""

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        """Reads blocks and compares their checksums. `done` receives the results, as in CopyDone.

        `fingerprints` and `lengths` (bytes of a payload) are by namespace number.
        """

    def close(self) -> None:
        """Ends the work under way and closes the tier. A second call does nothing."""


@dataclass(slots=True)
class BlockIO:
    """One block to move between memory and a file, or a run of `blocks` that are neighbours in both.

    `offset` and the length of `buffer` are multiples of `ALIGN` where `fd` was opened for direct I/O.
    `buffer` is contiguous bytes, writable for a read (`write` False), or memory of a GPU if the engine has
    `device_memory`. `fd` stays open until the batch ends.
    """

    fd: int
    offset: int
    buffer: Memory
    write: bool
    blocks: int = field(default=1, kw_only=True)

    def split(self) -> list[BlockIO]:
        """Returns one I/O for each block of a run."""
        size = len(self.buffer) // self.blocks
        starts = range(0, len(self.buffer), size)
        return [BlockIO(self.fd, self.offset + at, self.buffer[at : at + size], self.write) for at in starts]

    def check(self) -> None:
        """Raises MisuseError for a buffer that no engine accepts."""
        buffer = self.buffer
        if buffer.nbytes != len(buffer) or not buffer.c_contiguous:
            raise MisuseError(f"a buffer of format {buffer.format}, shape {buffer.shape}", "contiguous bytes")
        if buffer.readonly and not self.write:
            raise MisuseError("a read into a read-only buffer")


class IOEngine(Protocol):
    """Moves batches of blocks. Any thread may submit; many batches may be under way."""

    name: str

    device_memory: bool
    """Whether buffers may be memory of a GPU. If not, such a block fails with EINVAL."""

    def submit(
        self, ios: Sequence[BlockIO], done: Callable[[list[OSError | None]], None], urgent: bool = False
    ) -> None:
        """Starts to move all blocks and returns at once. The engine keeps the buffers alive meanwhile.

        Urgent blocks precede other waiting blocks, except one start in `OTHERS_EVERY`. `done` is called
        once, on an engine thread, after the last block: one outcome an I/O, in batch order, None for
        success. An I/O moves whole or has an error: EIO for a read past the end of the file, EAGAIN for
        all blocks if the queue of this urgency is full. Blocks and batches end in any order. Raises
        MisuseError, and starts nothing, if a block fails its `check`; TierError after `close`.
        """

    def release(self, fd: int) -> None:
        """Frees the engine's state of a descriptor, before it is closed and with no I/O under way."""

    def register(self, buffer: DeviceBuffer) -> None:
        """Registers a whole allocation of GPU memory for faster I/O."""

    def unregister(self, buffer: DeviceBuffer) -> None:
        """Unregisters memory before it is freed, with no I/O under way."""

    def close(self) -> None:
        """Ends after all submitted batches. A second call does nothing."""
