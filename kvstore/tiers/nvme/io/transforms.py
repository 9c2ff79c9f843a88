"""Blocks that are encrypted in the file, or in GPU memory that the engine cannot reach.

Each passes through a host buffer that holds its bytes as in the file. Plain text of encrypted blocks for a
GPU stays in memory of the thread that encrypts or decrypts them. Not covered here: these buffers and the
order of I/O (`bounce_buffers.py`).
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
"""Returns whether host memory holds the bytes of a block."""

_own = threading.local()


class TagError(OSError):
    """The bytes in the file are not those of this block: they do not decrypt, or fail its checksum."""


class TransformedIO(BlockIO):
    """A block that takes `slot_bytes` in the file and in a host buffer, a multiple of `ALIGN`."""

    __slots__ = ()

    slot_bytes: int

    def pack(self, slot: memoryview) -> None:
        """Fills the whole `slot` with the bytes for the file."""
        raise NotImplementedError

    def unpack(self, slot: memoryview) -> bool:
        """Fills the block's buffer from `slot`. Returns False, buffer undefined, if that is another block."""
        raise NotImplementedError


@dataclass(slots=True)
class EncryptedIO(TransformedIO):
    """One block that is encrypted in the file. Only the payload of `buffer` is read or written.

    `check_block` verifies a block that was decrypted for a GPU, before it is copied there. A reader verifies
    blocks in host memory.
    """

    cipher: BlockCipher
    key: bytes
    slot_bytes: int
    check_block: Check | None = None

    def pack(self, slot: memoryview) -> None:
        """See TransformedIO."""
        buffer = self.buffer
        if isinstance(buffer, DeviceBuffer):
            plain = _thread_memory(buffer.nbytes)
            copy_from_gpu(buffer, plain)
            buffer = plain
        self.cipher.encrypt(self.key, buffer, slot)

    def unpack(self, slot: memoryview) -> bool:
        """See TransformedIO."""
        buffer = self.buffer
        if not isinstance(buffer, DeviceBuffer):
            return self.cipher.decrypt(self.key, slot, buffer)
        plain, length = _thread_memory(buffer.nbytes), self.cipher.block_bytes
        if not self.cipher.decrypt(self.key, slot, plain):
            return False
        if self.check_block is not None and not self.check_block(plain):
            return False
        copy_to_gpu(plain[:length], buffer[:length])
        return True


@dataclass(slots=True)
class DeviceIO(TransformedIO):
    """One block of `length` bytes in GPU memory, for an engine that cannot reach GPU memory.

    `check_block` verifies the block in host memory, before it is copied to the GPU.
    """

    slot_bytes: int
    length: int
    check_block: Check | None = None

    def pack(self, slot: memoryview) -> None:
        """See TransformedIO."""
        copy_from_gpu(self._payload, slot[: self.length])
        # The buffer may have held another tenant's block.
        slot[self.length :] = bytes(len(slot) - self.length)

    def unpack(self, slot: memoryview) -> bool:
        """See TransformedIO."""
        if self.check_block is not None and not self.check_block(slot):
            return False
        copy_to_gpu(slot[: self.length], self._payload)
        return True

    @property
    def _payload(self) -> DeviceBuffer:
        assert isinstance(self.buffer, DeviceBuffer)
        return self.buffer[: self.length]


def copy_from_gpu(source: DeviceBuffer, target: memoryview) -> None:
    """Copies from a GPU on this thread's stream, and waits. OSError if CUDA fails."""
    _copy(source.gpu.thread_stream, target, source)


def copy_to_gpu(source: memoryview, target: DeviceBuffer) -> None:
    """Copies to a GPU on this thread's stream, and waits. OSError if CUDA fails."""
    _copy(target.gpu.thread_stream, target, source)


def _copy(stream: Callable[[], Stream], target: Memory, source: Memory) -> None:
    try:
        own = stream()
        own.copy(target, source)
        own.wait()
    except CudaError as error:
        raise OSError(errno.EIO, str(error)) from None


def _thread_memory(nbytes: int) -> memoryview:
    """Returns memory of the calling thread with undefined contents, valid until the next call."""
    known: memoryview | None = getattr(_own, "memory", None)
    if known is None or len(known) < nbytes:
        known = _own.memory = memoryview(mmap.mmap(-1, nbytes))
    return known[:nbytes]
