"""Checksums of blocks in GPU memory, with bounded scratch memory, or on the host if memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.cuda.device import DeviceBuffer, Stream
from kvstore.cuda.errors import OUT_OF_MEMORY, CudaError
from kvstore.cuda.kernels import SCRATCH_BYTES
from kvstore.cuda.kernels import checksums as hashed

_U64: TypeAlias = "npt.NDArray[np.uint64]"


def reserve(stream: Stream) -> None:
    """Reserves the scratch memory that `checksums` needs. CudaError if memory is short."""
    stream.scratch(SCRATCH_BYTES)
    stream.wait()


def checksums(stream: Stream, addresses: _U64, lengths: _U64, seeds: Sequence[int]) -> _U64:
    """Returns xxh3_64 of each block of the stream's GPU under its seed. Waits for the GPU. CudaError.

    The caller keeps the memory at these addresses.
    """
    try:
        return hashed(stream, addresses, lengths, seeds)
    except CudaError as error:
        if error.code != OUT_OF_MEMORY:
            raise
        return np.array(_by_processor(stream, addresses, lengths, seeds), np.uint64)


def _by_processor(stream: Stream, addresses: _U64, lengths: _U64, seeds: Sequence[int]) -> list[int]:
    """Hashes copies of blocks in host memory, because the GPU has no memory left."""
    sums = []
    for address, length, seed in zip(addresses.tolist(), lengths.tolist(), seeds, strict=True):
        copy = memoryview(bytearray(length))
        stream.copy(copy, DeviceBuffer(address, length, stream.gpu))
        stream.wait()
        sums.append(xxh3_64_intdigest(copy, seed))
    return sums
