"""Copies and checksums by numpy and xxhash: for machines without the C extension."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore.native.pieces import PIECE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_STEP_BYTES = 512 << 10  # copied, then hashed while still in the core's cache
_SKEWED_STEP_BYTES = 1 << 20
_LINE_BYTES = 64


def copy(targets: Sequence[Any], sources: Sequence[Any], table: Any) -> None:
    """Copies the pieces of a table, in order. Leaves `sum` as it is.

    A source is a C-contiguous buffer, a target a writable one. ValueError for a piece that is out of bounds
    or whose source and target overlap, BufferError or TypeError for an unsuitable buffer: then nothing is
    copied.
    """
    for into, data in _moves(_rows(table), targets, sources):
        np.copyto(into, data)


def copy_in(targets: Sequence[Any], sources: Sequence[Any], table: Any) -> None:
    """Copies as `copy` does and writes the xxh3_64 of each block to its `sum`: for writers of slots.

    The sum is that of the sources. Other writers of a target can damage it, but the sum shows that.
    """
    rows = _rows(table)
    moves = _moves(rows, targets, sources)
    _sum(rows, ((data[step] for step in copied(into, data)) for into, data in moves))


def copy_out(targets: Sequence[Any], sources: Sequence[Any], table: Any) -> None:
    """Copies as `copy` does and writes the xxh3_64 of each block to its `sum`: for readers of slots.

    The sum is that of the bytes that the targets got, even if another process writes to a source meanwhile.
    """
    rows = _rows(table)
    moves = _moves(rows, targets, sources)
    _sum(rows, ((into[step] for step in copied(into, data)) for into, data in moves))


def sums(sources: Sequence[Any], table: Any) -> None:
    """Writes the xxh3_64 of each block to its `sum`. Ignores targets. Errors: see `copy`."""
    rows = _rows(table)
    _sum(rows, ((data,) for data in _parts(rows, "source", [_flat(each) for each in sources])))


def checksum(payload: Any, seed: int) -> int:
    """Returns the xxh3_64 of a C-contiguous buffer."""
    return xxh3_64_intdigest(payload, seed)


def copied(into: Bytes, data: Bytes) -> Iterator[slice]:
    """Copies bytes of one size in steps, and yields each, to be hashed while it is in the cache."""
    size = _STEP_BYTES
    if into.size > size and (into.ctypes.data - data.ctypes.data) % _LINE_BYTES:
        # If source and target differ in cache line offset, as numpy arrays and slots do, ordinary stores
        # delay later loads and halve the speed. From this size on, memcpy uses non-temporal stores.
        size = _SKEWED_STEP_BYTES
    for start in range(0, into.size, size):
        step = slice(start, start + size)
        np.copyto(into[step], data[step])
        yield step


def _rows(table: Any) -> NDArray[Any]:
    """Returns a table as rows of `PIECE`."""
    view = memoryview(table)
    if view.readonly or not view.c_contiguous:
        raise BufferError("the table is not a writable C-contiguous buffer")
    if view.nbytes % PIECE.itemsize:
        raise ValueError(f"{view.nbytes} bytes are no table of pieces of {PIECE.itemsize}")
    rows = np.frombuffer(view.cast("B"), PIECE) if view.nbytes else np.zeros(0, PIECE)
    if len(rows) and rows["more"][-1]:
        raise ValueError("the last piece has `more`")
    return rows


def _flat(buffer: Any, writable: bool = False) -> Bytes:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BufferError("a buffer is not C-contiguous")
    if writable and view.readonly:
        raise BufferError("a target is not writable")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.zeros(0, np.uint8)


def _parts(rows: NDArray[Any], side: str, flats: Sequence[Bytes]) -> list[Bytes]:
    """Returns the bytes of each piece on one side."""
    parts = []
    columns = (rows[side], rows[f"{side}_offset"], rows["length"])
    for i, (number, start, length) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if number >= len(flats):
            raise ValueError(f"piece {i}: {side} {number} of {len(flats)}")
        if start + length > len(flats[number]):
            has = f"{side} {number}, which has {len(flats[number])}"
            raise ValueError(f"piece {i}: {length} bytes at {start} of {has}")
        parts.append(flats[number][start : start + length])
    return parts


def _moves(
    rows: NDArray[Any], targets: Sequence[Any], sources: Sequence[Any]
) -> Iterable[tuple[Bytes, Bytes]]:
    """Returns target and source of each piece."""
    intos = _parts(rows, "target", [_flat(each, writable=True) for each in targets])
    parts = _parts(rows, "source", [_flat(each) for each in sources])
    for i, (into, data) in enumerate(zip(intos, parts, strict=True)):
        a, b = into.ctypes.data, data.ctypes.data
        if a < b + data.size and b < a + into.size:
            raise ValueError(f"piece {i}: source and target overlap")
    return zip(intos, parts, strict=True)


def _sum(rows: NDArray[Any], pieces: Iterable[Iterable[Bytes]]) -> None:
    """Writes the sums of the blocks whose pieces are given, in steps."""
    digest = None
    for row, steps in zip(rows, pieces, strict=True):
        if digest is None:
            digest = xxh3_64(seed=int(row["seed"]))
        for step in steps:
            digest.update(step.data)
        if not row["more"]:
            row["sum"], digest = digest.intdigest(), None
