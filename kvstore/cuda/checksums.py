"""Checksums of blocks in GPU memory, with bounded scratch memory, or on the host if memory is short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.cuda.device import DeviceBuffer, Stream
from kvstore.cuda.errors import OUT_OF_MEMORY, CudaError
from kvstore.cuda.kernels import checksums as hashed

GROUP_BYTES = 128 << 20
"""The most bytes of blocks hashed at a time. The kernel needs a sixteenth of that."""

_U64: TypeAlias = "npt.NDArray[np.uint64]"

SCRATCH_BYTES = GROUP_BYTES // 16 + (2 << 20)


def reserve(stream: Stream) -> None:
    """Reserves the scratch memory that `checksums` needs. CudaError if memory is short."""
    stream.scratch(SCRATCH_BYTES)
    stream.wait()


def checksums(stream: Stream, addresses: _U64, lengths: _U64, seeds: Sequence[int]) -> _U64:
    """Returns xxh3_64 of each block of the stream's GPU under its seed. Waits for the GPU. CudaError.

    The caller keeps the memory at these addresses.
    """
    sums = np.zeros(len(addresses), np.uint64)
    for start, stop in _groups(lengths.tolist()):
        some = addresses[start:stop], lengths[start:stop], seeds[start:stop]
        try:
            sums[start:stop] = hashed(stream, *some)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            sums[start:stop] = _by_processor(stream, *some)
    return sums


def _groups(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of runs of blocks. Count times longest block is at most `GROUP_BYTES`."""
    start, longest = 0, 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if i > start and longest * (i + 1 - start) > GROUP_BYTES:
            yield start, i
            start, longest = i, length
    if start < len(lengths):
        yield start, len(lengths)


def _by_processor(stream: Stream, addresses: _U64, lengths: _U64, seeds: Sequence[int]) -> list[int]:
    """Hashes copies of blocks in host memory, because the GPU has no memory left."""
    sums = []
    for address, length, seed in zip(addresses.tolist(), lengths.tolist(), seeds, strict=True):
        copy = memoryview(bytearray(length))
        stream.copy(copy, DeviceBuffer(address, length, stream.gpu))
        stream.wait()
        sums.append(xxh3_64_intdigest(copy, seed))
    return sums
