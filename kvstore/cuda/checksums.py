"""Checksums of blocks in GPU memory, with bounded scratch memory, or on the host if memory is short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.cuda.device import DeviceBuffer, Stream
from kvstore.cuda.errors import OUT_OF_MEMORY, CudaError
from kvstore.cuda.kernels import checksums as hashed

GROUP_BYTES = 128 << 20
"""The most bytes of blocks hashed at a time. The kernel needs a sixteenth of that."""

SCRATCH_BYTES = GROUP_BYTES // 16 + (2 << 20)


def reserve(stream: Stream) -> None:
    """Reserves the scratch memory that `checksums` needs. CudaError if memory is short."""
    stream.scratch(SCRATCH_BYTES)
    stream.wait()


def checksums(stream: Stream, blocks: Sequence[DeviceBuffer], seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Returns xxh3_64 of each whole block under its seed. Waits for the GPU. CudaError."""
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
    """Yields (start, stop) of runs of blocks. Count times longest block is at most `GROUP_BYTES`."""
    start, longest = 0, 0
    for i, block in enumerate(blocks):
        longest = max(longest, block.nbytes)
        if i > start and longest * (i + 1 - start) > GROUP_BYTES:
            yield start, i
            start, longest = i, block.nbytes
    if start < len(blocks):
        yield start, len(blocks)


def _by_processor(stream: Stream, blocks: Sequence[DeviceBuffer], seeds: Sequence[int]) -> list[int]:
    """Hashes copies of blocks in host memory, because the GPU has no memory left."""
    sums = []
    for block, seed in zip(blocks, seeds, strict=True):
        copy = memoryview(bytearray(block.nbytes))
        stream.copy(copy, block)
        stream.wait()
        sums.append(xxh3_64_intdigest(copy, seed))
    return sums
