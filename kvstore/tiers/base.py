"""The seam between the daemon and whatever moves blocks between memory and files.

The daemon decides which blocks move; an engine moves them. An engine knows bytes at offsets and no keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvstore.cuda.device import DeviceBuffer
from kvstore.errors import MisuseError

Memory: TypeAlias = memoryview | DeviceBuffer

OTHERS_EVERY = 8
"""While both wait, one start in so many is of what is not urgent."""


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
