"""Checksums of blocks in a GPU's memory, with bounded scratch memory, or without if there is none left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.cuda.device import DeviceBuffer, Stream
from kvstore.cuda.errors import OUT_OF_MEMORY, CudaError
from kvstore.cuda.kernels import checksums as hashed

GROUP_BYTES = 128 << 20
"""Blocks are hashed so many bytes at a time: the kernel needs a sixteenth of that for itself."""

SCRATCH_BYTES = GROUP_BYTES // 16 + (2 << 20)


def reserve(stream: Stream) -> None:
    """Has a stream keep what `checksums` needs of it, before others take the memory. CudaError."""
    stream.scratch(SCRATCH_BYTES)
    stream.wait()


def checksums(stream: Stream, blocks: Sequence[DeviceBuffer], seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """xxh3_64 of each whole block under its seed. Waits. CudaError if the GPU refuses."""
    sums = np.zeros(len(blocks), np.uint64)
    for start, stop in _groups(blocks):
        try:
            sums[start:stop] = hashed(stream, blocks[start:stop], seeds[start:stop])
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            sums[start:stop] = _by_processor(stream, blocks[start:stop], seeds[start:stop])
    return sums


def _groups(blocks: Sequence[DeviceBuffer]) -> Iterator[tuple[int, int]]:
    """Runs of blocks, as (start, stop), that take `GROUP_BYTES` if each counts as the run's longest."""
    start, longest = 0, 0
    for i, block in enumerate(blocks):
        longest = max(longest, block.nbytes)
        if i > start and longest * (i + 1 - start) > GROUP_BYTES:
            yield start, i
            start, longest = i, block.nbytes
    if start < len(blocks):
        yield start, len(blocks)


def _by_processor(stream: Stream, blocks: Sequence[DeviceBuffer], seeds: Sequence[int]) -> list[int]:
    """The same at the speed of the way to the host: others have left the GPU no memory."""
    sums = []
    for block, seed in zip(blocks, seeds, strict=True):
        copy = memoryview(bytearray(block.nbytes))
        stream.copy(copy, block)
        stream.wait()
        sums.append(xxh3_64_intdigest(copy, seed))
    return sums
