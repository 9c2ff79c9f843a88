"""Blocks that are something else in the file than in their buffer, or lie where an engine cannot reach.

Each passes through a host buffer that has it as it is in the file. Plain text of sealed blocks for a GPU is
in host memory of the thread that seals or opens them. Not here: whose these buffers are, and when what moves
(`bounce.py`).
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.cuda.device import CudaError, DeviceBuffer, Stream
from kvstore.tiers.base import BlockIO, Memory
from kvstore.tiers.nvme.encryption import BlockCipher

Check: TypeAlias = Callable[[memoryview], bool]
"""Whether host memory holds the bytes that a block must have."""

_own = threading.local()


class TagError(OSError):
    """What was read is not what was written as this block: it does not open, or does not match."""


class TransformedIO(BlockIO):
    """A block that takes `slot_bytes` in the file, a multiple of `ALIGN`, and as many of a host buffer."""

    __slots__ = ()

    slot_bytes: int

    def pack(self, slot: memoryview) -> None:
        """Fills `slot`, which may have anything in it, with what is to be in the file."""
        raise NotImplementedError

    def unpack(self, slot: memoryview) -> bool:
        """Takes over what the file has; False, and the block's buffer holds anything, if it is another's."""
        raise NotImplementedError


@dataclass(slots=True)
class EncryptedIO(TransformedIO):
    """One block that is sealed in the file and plain in `buffer`, where only its payload is read or written.

    `holds` looks at what was opened for a GPU, before it goes there; host memory is looked at by whoever
    reads.
    """

    seal: BlockCipher
    key: bytes
    slot_bytes: int
    holds: Check | None = None

    def pack(self, slot: memoryview) -> None:
        """See TransformedIO."""
        buffer = self.buffer
        if isinstance(buffer, DeviceBuffer):
            plain = _aside(buffer.nbytes)
            lower(buffer, plain)
            buffer = plain
        self.seal.seal(self.key, buffer, slot)

    def unpack(self, slot: memoryview) -> bool:
        """See TransformedIO."""
        buffer = self.buffer
        if not isinstance(buffer, DeviceBuffer):
            return self.seal.open(self.key, slot, buffer)
        plain, length = _aside(buffer.nbytes), self.seal.block_bytes
        if not self.seal.open(self.key, slot, plain) or (self.holds is not None and not self.holds(plain)):
            return False
        lift(plain[:length], buffer[:length])
        return True


@dataclass(slots=True)
class DeviceIO(TransformedIO):
    """One block of `length` bytes whose `buffer` is a GPU's memory, for an engine that cannot reach it.

    `holds` looks at what was read before it goes there.
    """

    slot_bytes: int
    length: int
    holds: Check | None = None

    def pack(self, slot: memoryview) -> None:
        """See TransformedIO."""
        lower(self._payload, slot[: self.length])
        # The buffer may have held another tenant's block.
        slot[self.length :] = bytes(len(slot) - self.length)

    def unpack(self, slot: memoryview) -> bool:
        """See TransformedIO."""
        if self.holds is not None and not self.holds(slot):
            return False
        lift(slot[: self.length], self._payload)
        return True

    @property
    def _payload(self) -> DeviceBuffer:
        assert isinstance(self.buffer, DeviceBuffer)
        return self.buffer[: self.length]


def lower(source: DeviceBuffer, target: memoryview) -> None:
    """Copies from a GPU, on a stream of this thread, and waits. OSError if the GPU refuses."""
    _copy(source.gpu.thread_stream, target, source)


def lift(source: memoryview, target: DeviceBuffer) -> None:
    """Copies to a GPU, as `lower` copies from one."""
    _copy(target.gpu.thread_stream, target, source)


def _copy(stream: Callable[[], Stream], target: Memory, source: Memory) -> None:
    try:
        own = stream()
        own.copy(target, source)
        own.wait()
    except CudaError as error:
        raise OSError(errno.EIO, str(error)) from None


def _aside(nbytes: int) -> memoryview:
    """Host memory of this thread's own, with anything in it, until it is asked for again."""
    known: memoryview | None = getattr(_own, "memory", None)
    if known is None or len(known) < nbytes:
        known = _own.memory = memoryview(mmap.mmap(-1, nbytes))
    return known[:nbytes]
