"""Runs kernels.cu: checksums of blocks in device memory, copies of many pieces, FP8 conversion.

Checksums are those of `kvstore.arena`: xxh3_64 under a seed. Buffers start at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.cuda.base import Buffer, Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

THREADS = 256
_CHAIN_THREADS = 8  # spreads few blocks over many multiprocessors
_SHORT_BYTES = 240  # XXH3 has other algorithms for these
_ROW_BYTES = 1024
_SUMS_BYTES = 64  # of device memory a row
_CHUNK_BYTES = 16 << 10  # CHUNK_BYTES in kernels.cu

ROWS = 1 << 17
"""The most rows of 1 KiB summed by one launch, at least one a block: 8 MiB of sums fit into the L2 cache."""

SCRATCH_BYTES = ROWS * _SUMS_BYTES + (2 << 20)
"""Scratch memory of a stream that suffices to hash 10,000 blocks at a time."""

_HASHED = np.dtype([("address", "<u8"), ("length", "<u8"), ("seed", "<u8")])
_RECODED = np.dtype([("target", "<u8"), ("source", "<u8")])
_PARTS = 16  # PARTS in kernels.cu
_PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_MX1 = np.uint64(0x165667919E3779F9)


def spans(buffers: Sequence[Buffer]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns the addresses and the lengths (bytes) of buffers, as the functions below take them."""
    addresses = np.array([buffer.address for buffer in buffers], np.uint64)
    return addresses, np.array([buffer.nbytes for buffer in buffers], np.uint64)


def checksums(
    stream: Stream, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], seeds: Sequence[int]
) -> NDArray[np.uint64]:
    """Returns xxh3_64 of each of n blocks in device memory under its 64-bit seed. Waits for the stream.

    Rows of 1 KiB are summed in parallel, and the sums of a block chained in sequence.
    """
    if not len(addresses) == len(lengths) == len(seeds):
        raise ValueError(f"{len(addresses)} addresses, {len(lengths)} lengths, {len(seeds)} seeds")
    table = np.empty(len(seeds), _HASHED)
    table["address"], table["length"], table["seed"] = addresses, lengths, np.array(seeds, np.uint64)
    shortest, longest = int(lengths.min(initial=0)), int(lengths.max(initial=0))
    if shortest == longest > _SHORT_BYTES:
        return _hash(stream, table)
    is_long = table["length"] > _SHORT_BYTES
    short, long = np.flatnonzero(~is_long), np.flatnonzero(is_long)
    # Longest first, so that the blocks with rows left are the first ones.
    long = long[np.argsort(table["length"][long])[::-1]]
    copies = _copied(stream, table[short])
    sums = np.empty(len(seeds), np.uint64)
    sums[long] = _hash(stream, table[long])
    sums[short] = [
        xxh3_64_intdigest(copy, seed)
        for copy, seed in zip(copies, table["seed"][short].tolist(), strict=True)
    ]
    return sums


def copy_pieces(
    stream: Stream, targets: NDArray[np.uint64], sources: NDArray[np.uint64], nbytes: NDArray[np.uint64]
) -> None:
    """Copies n pieces of device memory, given by addresses and lengths, with one kernel. Does not wait.

    Fast where both ends of a piece are multiples of 16. Pieces must not overlap.
    """
    if not len(targets) == len(sources) == len(nbytes):
        raise ValueError(f"{len(targets)} targets, {len(sources)} sources, {len(nbytes)} lengths")
    n, longest = len(targets), int(nbytes.max(initial=0))
    if not longest:
        return
    # The upload counts: thousands of pages are copied in the time that 100 KB take.
    each = longest if int(nbytes.min()) == longest else 0
    places = np.concatenate((targets, sources) if each else (targets, sources, nbytes), dtype=np.uint64)
    chunks = -(-longest // _CHUNK_BYTES)
    shape = np.uint32(n), np.uint32(chunks), np.uint64(each)
    stream.launch("copy_pieces", n * chunks, THREADS, _uploaded(stream, places), *shape)


@dataclass(frozen=True, slots=True)
class Fp8Shape:
    """The order of 16-bit values in a block: [outer][runs][heads][values].

    The values of one (outer, head) in all runs share a scale. `values` is a multiple of 8.
    """

    outer: int
    runs: int
    heads: int
    values: int
    bfloat16: bool

    @property
    def groups(self) -> int:
        """The number of scales in a block."""
        return self.outer * self.heads

    @property
    def count(self) -> int:
        """The number of values in a block."""
        return self.groups * self.runs * self.values


def fp8_encode(stream: Stream, shape: Fp8Shape, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
    """Starts to convert plain blocks to FP8, see `kvstore.fp8`."""
    if sources:
        table = _recoded(stream, sources, targets)
        parts = stream.scratch(len(sources) * shape.groups * _PARTS * 2)
        sizes = _sizes(len(sources), shape)
        searchers = len(sources) * shape.groups * _PARTS
        stream.launch("fp8_largest", _grid(searchers, THREADS), THREADS, table, *sizes, parts)
        encoders = len(sources) * shape.count // 8
        stream.launch("fp8_encode", _grid(encoders, THREADS), THREADS, table, *sizes, parts)


def fp8_decode(stream: Stream, shape: Fp8Shape, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
    """Starts to convert FP8 blocks to plain ones, see `kvstore.fp8`."""
    if sources:
        table = _recoded(stream, sources, targets)
        decoders = len(sources) * shape.count // 8
        sizes = _sizes(len(sources), shape)
        stream.launch("fp8_decode", _grid(decoders, THREADS), THREADS, table, *sizes)


def _recoded(stream: Stream, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> Buffer:
    table = np.empty(len(sources), _RECODED)
    table["source"] = [source.address for source in sources]
    table["target"] = [target.address for target in targets]
    return _uploaded(stream, table)


def _sizes(n: int, shape: Fp8Shape) -> tuple[np.uint32, ...]:
    sizes = n, shape.groups, shape.runs, shape.heads, shape.values // 8, int(shape.bfloat16)
    return tuple(map(np.uint32, sizes))


def _hash(stream: Stream, table: NDArray[np.void]) -> NDArray[np.uint64]:
    """Returns the checksums of blocks sorted by length, longest first. Waits for the stream."""
    folds = np.empty((len(table), 4), np.uint64)
    if len(table):
        _fold(stream, table, folds)
    stream.wait()
    return _mixed(folds, table["length"])


def _fold(stream: Stream, table: NDArray[np.void], folds: NDArray[np.uint64]) -> None:
    """Starts to fill `folds`."""
    full = (table["length"].astype(np.int64) - 1) // _ROW_BYTES
    step = min(max(1, ROWS // len(table)), max(1, int(full[0])))
    blocks, sums = _uploaded(stream, table), stream.scratch(len(table) * step * _SUMS_BYTES)
    lanes, folded = stream.scratch(len(table) * _SUMS_BYTES), stream.scratch(folds.nbytes)
    starts = range(0, max(1, int(full[0])), step)
    summed = np.searchsorted(-full, -np.array(starts), "left").tolist()
    # Blocks without a full row have no sums, and end with the first chain.
    chained = [len(table), *summed[1:]]
    for start, n, n_chained in zip(starts, summed, chained, strict=True):
        rows = np.uint32(start), np.uint32(step)
        if n:
            stream.launch(
                "xxh3_rows", _grid(n * step * 4, THREADS), THREADS, blocks, np.uint32(n), *rows, sums
            )
        grid = _grid(n_chained * 4, _CHAIN_THREADS)
        chain = np.uint32(n_chained), *rows, sums, lanes, folded
        stream.launch("xxh3_chain", grid, _CHAIN_THREADS, blocks, *chain)
    stream.copy(folds.data.cast("B"), folded)


def _copied(stream: Stream, table: NDArray[np.void]) -> list[memoryview]:
    """Starts to copy blocks to host memory. Returns the copies."""
    ends = np.cumsum(table["length"], dtype=np.uint64)
    whole = memoryview(bytearray(int(ends[-1]) if len(ends) else 0))
    starts = ends - table["length"]
    if whole:
        joined = stream.scratch(len(whole))
        copy_pieces(stream, starts + np.uint64(joined.address), table["address"], table["length"])
        stream.copy(whole, joined)
    return [whole[start:stop] for start, stop in zip(starts.tolist(), ends.tolist(), strict=True)]


def _mixed(folds: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Computes checksums from folded lanes and lengths, the last step of XXH3."""
    mixed = folds[:, 0] + folds[:, 1] + folds[:, 2] + folds[:, 3] + lengths * _PRIME64_1
    mixed = (mixed ^ mixed >> np.uint64(37)) * _PRIME_MX1
    return np.asarray(mixed ^ mixed >> np.uint64(32))


def _uploaded(stream: Stream, table: NDArray[Any]) -> Buffer:
    """Copies a table to device memory. `copy` has read pageable memory when it returns."""
    there = stream.scratch(table.nbytes)
    stream.copy(there, table.view(np.uint8).data)
    return there


def _grid(threads: int, width: int) -> int:
    return -(-threads // width)
