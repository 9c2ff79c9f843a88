"""The seams of storage: `StorageTier`, driven by the daemon, and `IOEngine`, used by the NVMe tier.

The core decides which blocks a tier holds and where. A tier keeps extents and their bytes. An I/O engine
moves bytes between memory and file offsets and knows no keys. Which tier copies to which is not covered here:
see `kvstore.daemon.runtime.movers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""While both wait, one start in so many is of what is not urgent."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of an extent: a tenant, and the 16-byte tag of the set of tenants that may map the extent.

    The default is the default tenant, whose extents no other tenant may map.
    """

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
        """Whether an extent outlives the process: if its removal fails, the extent still takes room."""

    def start(self, ready: Ready, ended: Ended) -> None:
        """Makes the missing extents, calls `ready` with each number, then `ended`."""

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        """Makes `count` more extents, calls `ready` with each number, then `ended`."""

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        """Gives an extent to an owner and cuts it into empty slots of `slot_bytes`."""

    def renew(self, extent: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        """Replaces an unused extent by one of zeros and calls `ready` with its number, or `failed`."""

    def remove(self, extent: int, done: Ended) -> None:
        """Removes an unused extent and everything that was in it, then calls `done`."""

    def drop(self, identity: BlockIds, where: Where) -> None:
        """Marks slots as empty. A copy that is still on its way into such a slot leaves no trace."""

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
    """One block to move between memory and a file.

    `offset` and the length of `buffer` are multiples of `ALIGN` where `fd` was opened for direct I/O.
    `buffer` is contiguous bytes, writable for a read (`write` False), or memory of a GPU if the engine says
    that it moves such. `fd` stays open until the batch ends.
    """

    fd: int
    offset: int
    buffer: Memory
    write: bool

    def check(self) -> None:
        """MisuseError for a buffer that no engine may touch."""
        buffer = self.buffer
        if buffer.nbytes != len(buffer) or not buffer.c_contiguous:
            raise MisuseError(f"a buffer of format {buffer.format}, shape {buffer.shape}", "contiguous bytes")
        if buffer.readonly and not self.write:
            raise MisuseError("a read into a read-only buffer")


class IOEngine(Protocol):
    """Moves batches of blocks. Any thread may submit; many batches may be under way."""

    name: str

    device_memory: bool
    """Whether buffers may be memory of a GPU: without, such a block fails with EINVAL."""

    def submit(
        self, ios: Sequence[BlockIO], done: Callable[[list[OSError | None]], None], urgent: bool = False
    ) -> None:
        """Starts to move all blocks and returns at once. The engine keeps the buffers alive meanwhile.

        What is `urgent` goes ahead of what waits and is not, which still gets one start in `OTHERS_EVERY`.
        `done` is called exactly once, on an engine thread, when every block of this batch has ended: one
        outcome a block, in the batch's order, None for success. A block moves whole or has an error: EIO for
        a read past the end of the file, EAGAIN for all blocks if too much of the same urgency waits already.
        Blocks and batches may end in any order. MisuseError, and nothing is started, if a block fails its
        `check`; TierError after `close`.
        """

    def release(self, fd: int) -> None:
        """A descriptor is about to be closed, and nothing of it is under way: what was kept for it goes."""

    def register(self, buffer: DeviceBuffer) -> None:
        """Memory of a GPU, a whole allocation, from and to which many blocks will move."""

    def unregister(self, buffer: DeviceBuffer) -> None:
        """Such memory is about to be freed, and nothing of it is under way."""

    def close(self) -> None:
        """Waits for what was submitted, then stops. Closing twice does nothing."""
