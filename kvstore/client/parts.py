"""Tables of pieces: which bytes of which buffers make up blocks. What callers pass is checked here.

Not covered: tables of a paged memory (`paged_memory`), and copies between tables (`slots`, `gpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.cuda.array_interop import is_on_device, wrap
from kvstore.cuda.device import DeviceBuffer, Gpu, Memory
from kvstore.errors import MisuseError

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, numpy array; or a device array."""

U64: TypeAlias = "npt.NDArray[np.uint64]"


def flat(buffer: Buffer, name: str) -> Any:
    """Returns the bytes of a buffer: a memoryview or a DeviceBuffer. Raises MisuseError with `name`."""
    try:
        view = memoryview(buffer)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except TypeError as error:
        if is_on_device(buffer):
            return wrap(buffer)
        raise MisuseError(f"{name}: {error}", "pass a C-contiguous buffer") from None


def as_bytes(buffer: Buffer, name: str, nbytes: int, writable: bool = False) -> Any:
    """Returns the bytes of a buffer, see `flat`. Raises MisuseError unless it has exactly `nbytes`."""
    view = flat(buffer, name)
    if view.nbytes != nbytes:
        raise _wrong_size(name, view.nbytes, nbytes)
    if writable and view.readonly:
        raise MisuseError(f"{name} is read-only")
    return view


def gpu_of(memory: Memory) -> Gpu | None:
    """Returns the GPU that has the memory; None: the host."""
    return memory.gpu if isinstance(memory, DeviceBuffer) else None


def check_place(place: Gpu | None, gpu: Gpu | None) -> None:
    """Raises MisuseError unless an array is where the blocks are: on `gpu`, or in host memory for None."""
    if place is not gpu:
        raise MisuseError(f"an array {_place(place)}", f"the blocks are {_place(gpu)}")


@dataclass(slots=True)
class Parts:
    """Pieces of buffers that make up blocks: those of one block, then those of the next.

    Whoever makes a table takes care that pieces lie within their buffers.
    """

    buffers: Sequence[Memory]
    numbers: npt.NDArray[Any]
    """The buffer of each piece."""
    offsets: U64
    lengths: U64
    ends: npt.NDArray[Any]
    """The last piece of each block."""
    is_partial: bool = False
    """Whether some pieces are scratch memory, for bytes that nobody wants."""

    @classmethod
    def consecutive(cls, buffer: Memory, n: int, block_bytes: int, step: int = 0) -> Parts:
        """Returns n blocks in one buffer, one each `step` bytes, by default without gaps."""
        offsets = np.arange(n, dtype=np.uint64) * np.uint64(step or block_bytes)
        lengths = np.full(n, block_bytes, np.uint64)
        return cls([buffer], np.zeros(n, np.uint32), offsets, lengths, np.arange(n))

    @classmethod
    def each(cls, buffers: Sequence[Memory], block_bytes: int) -> Parts:
        """Returns blocks of one buffer each."""
        n = len(buffers)
        lengths = np.full(n, block_bytes, np.uint64)
        return cls(buffers, np.arange(n), np.zeros(n, np.uint64), lengths, np.arange(n))

    @classmethod
    def of(cls, blocks: Sequence[Sequence[Buffer]], numbers: Sequence[int]) -> Parts:
        """Returns blocks of several buffers each. `numbers` name them in a MisuseError."""
        names = [f"block {number}" for number in numbers]
        buffers = [flat(buffer, names[i]) for i, each in enumerate(blocks) for buffer in each]
        lengths = np.fromiter((buffer.nbytes for buffer in buffers), np.uint64, len(buffers))
        ends = np.cumsum([len(each) for each in blocks], dtype=np.int64) - 1
        return cls(buffers, np.arange(len(buffers)), np.zeros(len(buffers), np.uint64), lengths, ends)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> npt.NDArray[Any]:
        """The first piece of each block."""
        starts = np.zeros_like(self.ends)
        starts[1:] = self.ends[:-1] + 1
        return starts

    def blocks(self, start: int, stop: int) -> Parts:
        """Returns the pieces of some of the blocks."""
        first, ends = int(self.starts[start]), self.ends[start:stop]
        some, ends = slice(first, int(ends[-1]) + 1), ends - first
        return Parts(self.buffers, self.numbers[some], self.offsets[some], self.lengths[some], ends)

    def take(self, which: Sequence[int]) -> Parts:
        """Returns these blocks, each of which is one piece."""
        rows = np.asarray(which, np.intp)
        ends = np.arange(len(rows))
        return Parts(self.buffers, self.numbers[rows], self.offsets[rows], self.lengths[rows], ends)

    def within(self, blocks: Parts) -> Parts:
        """Returns where these pieces belong in the same blocks, of which each is one piece there."""
        if len(self.lengths) == len(self):
            return blocks
        starts = self.starts
        counts = self.ends + 1 - starts
        before = np.cumsum(self.lengths) - self.lengths
        offsets = np.repeat(blocks.offsets - before[starts], counts) + before
        return Parts(blocks.buffers, np.repeat(blocks.numbers, counts), offsets, self.lengths, self.ends)

    def addresses(self) -> U64:
        """Returns the addresses of pieces in device memory."""
        bases: U64 = np.array([buffer.address for buffer in self.buffers], np.uint64)  # type: ignore[union-attr]
        return np.asarray(bases[self.numbers] + self.offsets)

    def views(self) -> list[Any]:
        """Returns the pieces as memoryviews or DeviceBuffers."""
        table = zip(self.numbers.tolist(), self.offsets.tolist(), self.lengths.tolist(), strict=True)
        return [self.buffers[number][start : start + length] for number, start, length in table]

    def check(self, block_bytes: int, numbers: Sequence[int], gpu: Gpu | None, writable: bool) -> None:
        """Raises MisuseError unless the pieces fill their blocks, are on `gpu` (None: on the host), and can
        be written (`writable`), or are all wanted. `numbers` name the blocks.
        """
        for place in set(map(gpu_of, self.buffers)):
            check_place(place, gpu)
        # A block without pieces ends where the one before it does.
        sums = np.zeros(len(self.lengths) + 1, np.uint64)
        np.cumsum(self.lengths, out=sums[1:])
        sizes = sums[self.ends + 1]
        sizes[1:] -= sizes[:-1].copy()
        if (sizes != block_bytes).any():
            bad = int(np.argmax(sizes != block_bytes))
            raise _wrong_size(f"block {numbers[bad]}", int(sizes[bad]), block_bytes)
        if not writable:
            if self.is_partial:
                raise MisuseError("a block to store with a page of -1", "only a scatter skips pages")
            return
        locked = np.array([buffer.readonly for buffer in self.buffers], np.bool_)
        if locked.any() and (pieces := np.flatnonzero(locked[self.numbers])).size:
            raise MisuseError(f"block {numbers[int(np.searchsorted(self.ends, pieces[0]))]} is read-only")


def _wrong_size(name: str, nbytes: int, expected: int) -> MisuseError:
    return MisuseError(f"{name} has {nbytes} bytes instead of {expected}", "see Layout.block_bytes")


def _place(gpu: Gpu | None) -> str:
    return "in host memory" if gpu is None else f"on {gpu.uuid}"
