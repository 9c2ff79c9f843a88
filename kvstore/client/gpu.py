"""Leases and reservations of a GPU: blocks in device memory, whichever tier they are in.

A block in the daemon's pool on the GPU is read in place. A block in DRAM is copied into device memory of this
process first. Readers copy bytes before they verify them, so the bytes that they keep are verified even if
the lease ends meanwhile. Writers compute checksums from a private copy.

Not covered: copies and kernels (`kvstore.cuda`), and how extents are mapped (`extents`).
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.client.extents import DeviceExtent, Maps, quietly
from kvstore.client.leases import Buffer, Lease, Reservation
from kvstore.cuda.array_interop import wrap
from kvstore.cuda.checksums import checksums
from kvstore.cuda.device import DeviceBuffer, Gpu, Memory, Stream
from kvstore.cuda.errors import CudaError
from kvstore.cuda.kernels import copy_pieces
from kvstore.errors import MisuseError
from kvstore.types import slot_bytes
from kvstore.wire.messages import MappedHbm

_log = logging.getLogger(__name__)
_KEPT = 8
_GROUP_BYTES = 64 << 20  # of device memory, of which engines leave little

_U64: TypeAlias = "npt.NDArray[np.uint64]"
_Parts: TypeAlias = "Sequence[Sequence[Memory]]"


class _Staging:
    """Device memory for copies. Keeps up to `_KEPT` pieces per GPU for reuse. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: defaultdict[Gpu, list[DeviceBuffer]] = defaultdict(list)

    def take(self, gpu: Gpu, nbytes: int) -> DeviceBuffer:
        """Returns at least `nbytes` of uninitialised device memory. Raises CudaError if there is no room."""
        size = 1 << max(21, (nbytes - 1).bit_length())
        with self._lock:
            kept = self._kept[gpu]
            found = next((i for i, piece in enumerate(kept) if nbytes <= piece.nbytes <= 2 * size), None)
            if found is not None:
                return kept.pop(found)
        return gpu.allocate(size)

    def give(self, piece: DeviceBuffer) -> None:
        """Keeps a piece for reuse. Frees the oldest if there are too many."""
        with self._lock:
            kept = self._kept[piece.gpu]
            kept.append(piece)
            old = kept.pop(0) if len(kept) > _KEPT else None
        if old is not None:
            quietly(piece.gpu.free, old)


_staging = _Staging()


def is_on_device(array: object) -> bool:
    """Returns whether an array declares that it is in a GPU's memory."""
    return not isinstance(array, bytes | bytearray | memoryview | np.ndarray) and hasattr(
        array, "__cuda_array_interface__"
    )


def open_extent(maps: Maps, extent: int, answer: MappedHbm) -> DeviceExtent:
    """Maps an extent in a GPU's memory. Raises CudaError where CUDA IPC does not work."""
    mapped = DeviceExtent(Gpu.open(answer.device), answer.handle, answer.extent_bytes)
    maps.keep(extent, mapped)
    return mapped


class DeviceLease(Lease):
    """The leading blocks of an acquire, in the memory of `gpu`; `len` is their number."""

    gpu: Gpu
    _piece: DeviceBuffer | None = None
    """Copies of all blocks, made by `blocks`; the first `_good` of them are verified."""
    _good = 0

    @property
    def blocks(self) -> list[DeviceBuffer]:  # type: ignore[override]
        """The blocks in device memory, one buffer each, with `__cuda_array_interface__` and DLPack.

        In a pool these are the slots themselves: do not write to them. They are not verified (see `verify`).
        Blocks in DRAM are all copied to device memory; raises CudaError if the GPU has no room for them.
        Kernels that read the blocks must end before the lease. Raises UnavailableError if the connection of
        the lease has ended.
        """
        self._check_held()
        if not self._slots.in_hbm and self._piece is None and len(self):
            self._piece = _staging.take(self.gpu, len(self) * self._step)
            self._load(self._piece, 0, len(self))
            self._good = self._check(self._parts_of(self._piece, len(self)), 0)
        return self._resident(0, len(self))

    def verify(self) -> int:
        """Returns how many leading blocks match their checksums, 0 if the lease's connection has ended.

        Reports the first corrupt block to the daemon.
        """
        good = self._move(None, 0, len(self))
        return 0 if self._lost() else good

    def copy_into(self, out: Buffer, verify: bool = True) -> int:
        """Copies the blocks into `out`, an array of this GPU or a writable host buffer, one after another.

        Returns how many leading ones are good. The bytes behind them are undefined.
        """
        if not is_on_device(out) and not self._slots.in_hbm:
            return super().copy_into(out, verify)
        size = self._slots.block_bytes
        target = wrap(out) if is_on_device(out) else memoryview(out).cast("B")
        if target.nbytes < size * len(self):
            raise MisuseError(f"out has {target.nbytes} bytes", f"{len(self)} blocks of {size} must fit")
        parts = [[target[i * size : (i + 1) * size]] for i in range(len(self))]
        return self._move(parts, 0, len(self), verify)

    def scatter(self, i: int, parts: Sequence[Buffer]) -> bool:
        """Copies block i into device arrays that it fills one after another; returns whether it is good."""
        return self.scatter_all([parts], i) == 1

    def scatter_all(self, parts: Sequence[Sequence[Buffer]], first: int = 0) -> int:
        """Copies blocks from `first` on into their parts, device arrays, many blocks with one kernel.

        Returns how many leading ones of these are good. The bytes of the other parts are undefined.
        """
        if first < 0 or first + len(parts) > len(self):
            raise MisuseError(f"blocks {first} to {first + len(parts)} of {len(self)}")
        return self._move([[wrap(part) for part in each] for each in parts], first, len(parts))

    def read(self, i: int, out: Buffer, offset: int = 0) -> None:
        """Fills `out`, an array on the host or the GPU, with bytes of block i from `offset` on. Not verified.

        Raises CudaError if the GPU fails, UnavailableError if the connection of the lease has ended.
        """
        target = wrap(out) if is_on_device(out) else memoryview(out).cast("B")
        source = self._range(i, offset, target.nbytes)
        stream = self.gpu.thread_stream()
        stream.copy(target, source)
        stream.wait()
        self._check_held()

    def _finish(self) -> None:
        """Ends the lease and frees the copies of its blocks. Does nothing if it has ended."""
        super()._finish()
        piece, self._piece = self._piece, None
        if piece is not None:
            _staging.give(piece)

    def _move(self, parts: _Parts | None, first: int, n: int, verify: bool = True) -> int:
        """Copies `n` blocks into parts that they fill, if there are parts, and verifies the blocks.

        Works in groups of at most `_GROUP_BYTES`. Returns how many leading blocks are good. Failures of the
        GPU are misses.
        """
        self._check_open()
        at_once = max(1, _GROUP_BYTES // self._step)
        done = 0
        try:
            while done < n:
                count = min(at_once, n - done)
                with self._in_device_memory(first + done, count) as blocks:
                    # The daemon may reuse a slot of its pool, so blocks are verified after the copy.
                    if parts is not None:
                        _copy_all(self.gpu.thread_stream(), parts[done : done + count], blocks)
                    good = self._wait(blocks, first + done, verify)
                done += good
                if good < count:
                    break
        except CudaError as error:
            _log.warning("the blocks are a miss, the GPU failed: %s", error)
        return done

    @contextmanager
    def _in_device_memory(self, first: int, count: int) -> Iterator[list[DeviceBuffer]]:
        """Yields blocks in device memory. Blocks of DRAM are copied there for the `with` block."""
        if self._piece is not None or self._slots.in_hbm:
            yield self._resident(first, count)
            return
        piece = _staging.take(self.gpu, count * self._step)
        try:
            self._load(piece, first, count)
            yield self._parts_of(piece, count)
        finally:
            _staging.give(piece)

    def _wait(self, blocks: Sequence[DeviceBuffer], first: int, verify: bool) -> int:
        """Waits for copies, then verifies blocks that are not verified yet; returns how many are good."""
        if verify and self._piece is None:
            return self._check(blocks, first)
        self.gpu.thread_stream().wait()
        return len(blocks) if self._piece is None else max(0, min(self._good - first, len(blocks)))

    def _load(self, piece: DeviceBuffer, first: int, count: int) -> None:
        """Starts copies of blocks from DRAM to device memory."""
        self._slots.register(self.gpu)
        stream = self.gpu.thread_stream()
        for i, block in enumerate(self._parts_of(piece, count)):
            stream.copy(block, self._slots.view(first + i))

    def _resident(self, first: int, count: int) -> list[DeviceBuffer]:
        """Returns these blocks if they are in device memory, else none."""
        if self._piece is not None:
            return self._parts_of(self._piece, len(self))[first : first + count]
        return [self._slots.view(i) for i in range(first, first + count)] if self._slots.in_hbm else []

    def _parts_of(self, piece: DeviceBuffer, count: int) -> list[DeviceBuffer]:
        return _blocks_of(piece, count, self._slots.block_bytes)

    @property
    def _step(self) -> int:
        return slot_bytes(self._slots.block_bytes)

    def _check(self, blocks: Sequence[DeviceBuffer], first: int) -> int:
        """Returns how many leading ones of these blocks match their checksums. `first`: index of blocks[0].

        Waits for earlier copies on the stream of the thread.
        """
        indices = range(first, first + len(blocks))
        seeds = [arena.seed(self._namespace, self._keys[i], self._slots.block_bytes) for i in indices]
        sums = checksums(self.gpu.thread_stream(), blocks, seeds).tolist()
        for at, i in enumerate(indices):
            if sums[at] != self._slots.checksum(i):
                self._suspect(self._keys[i])
                return at
        return len(blocks)


class DeviceReservation(Reservation):
    """Slots to fill from the memory of `gpu`."""

    gpu: Gpu

    @property
    def blocks(self) -> list[Any]:
        """Writable slots, one per wanted block: device buffers in a pool, else memoryviews of DRAM.

        `commit` computes the checksums of blocks written here.
        """
        return super().blocks

    def gather(self, i: int, parts: Sequence[Buffer]) -> None:
        """Copies device arrays, one after another, into slot i: a whole block."""
        self.gather_all([parts], i)

    def gather_all(self, parts: Sequence[Sequence[Buffer]], first: int = 0) -> None:
        """Fills slots from `first` on, each from its parts, many slots with one kernel.

        Raises CudaError if the GPU fails.
        """
        self._check_open()
        if first < 0 or first + len(parts) > len(self):
            raise MisuseError(f"slots {first} to {first + len(parts)} of {len(self)}")
        if not self._slots.in_hbm:
            self._slots.register(self.gpu)
        at_once = max(1, _GROUP_BYTES // slot_bytes(self._slots.block_bytes))
        for at in range(0, len(parts), at_once):
            self._gather([[wrap(part) for part in each] for each in parts[at : at + at_once]], first + at)

    def _gather(self, parts: Sequence[Sequence[DeviceBuffer]], first: int) -> None:
        size, indices = self._slots.block_bytes, range(first, first + len(parts))
        piece = _staging.take(self.gpu, len(parts) * slot_bytes(size))
        try:
            own = _blocks_of(piece, len(parts), size)
            stream = self.gpu.thread_stream()
            targets, sources, sizes = _pieces(own, parts)
            copy_pieces(stream, targets, sources, sizes)
            sums = checksums(stream, own, [self._seed(i) for i in indices])
            _copy_all(stream, [[self._slots.view(i)] for i in indices], own)
            stream.wait()
        finally:
            _staging.give(piece)
        for i, each in zip(indices, sums.tolist(), strict=True):
            self._set_checksum(i, each)

    def write(self, i: int, part: Buffer, offset: int = 0) -> None:
        """Copies `part`, a device array, into slot i at byte `offset`. `commit` computes the checksum."""
        source = wrap(part) if is_on_device(part) else memoryview(part).cast("B")
        self._check_open()
        self._has_checksum[i] = 0
        stream = self.gpu.thread_stream()
        stream.copy(self._slots.view(i)[offset : offset + source.nbytes], source)
        stream.wait()

    def checksums(self) -> bytes:
        """Returns the checksums of all slots as u64. Computes those that no write has computed."""
        left = [i for i, known in enumerate(self._has_checksum) if not known]
        if self._slots.in_hbm and left:
            blocks: list[Any] = [self._slots.view(i) for i in left]
            sums = checksums(self.gpu.thread_stream(), blocks, [self._seed(i) for i in left])
            for i, each in zip(left, sums.tolist(), strict=True):
                self._set_checksum(i, each)
        return super().checksums()


def _blocks_of(piece: DeviceBuffer, count: int, block_bytes: int) -> list[DeviceBuffer]:
    """Returns `count` blocks of staging memory, each at a multiple of the size of its slot."""
    step = slot_bytes(block_bytes)
    return [piece.part(i * step, i * step + block_bytes) for i in range(count)]


def _copy_all(stream: Stream, targets: _Parts, sources: Sequence[DeviceBuffer]) -> None:
    """Copies blocks from device memory into parts, with one kernel if all parts are on this GPU."""
    on_device = [[part for part in parts if isinstance(part, DeviceBuffer)] for parts in targets]
    if all(len(some) == len(parts) for some, parts in zip(on_device, targets, strict=True)):
        from_blocks, to_parts, sizes = _pieces(sources, on_device)
        copy_pieces(stream, to_parts, from_blocks, sizes)
        return
    for source, parts in zip(sources, targets, strict=True):
        at = 0
        for part in parts:
            stream.copy(part, source[at : at + part.nbytes])
            at += part.nbytes


def _pieces(
    blocks: Sequence[DeviceBuffer], parts: Sequence[Sequence[DeviceBuffer]]
) -> tuple[_U64, _U64, _U64]:
    """Returns addresses within the blocks, addresses of the parts that fill them, and sizes, all in bytes.

    Raises MisuseError if parts are on another GPU or do not fill their block.
    """
    in_blocks: list[int] = []
    in_parts: list[int] = []
    sizes: list[int] = []
    for block, each in zip(blocks, parts, strict=True):
        at = 0
        for part in each:
            if part.gpu is not block.gpu:
                raise MisuseError(f"an array on {part.gpu.uuid}", f"the block is on {block.gpu.uuid}")
            in_blocks.append(block.address + at)
            in_parts.append(part.address)
            sizes.append(part.nbytes)
            at += part.nbytes
        if at != block.nbytes:
            raise MisuseError(f"parts of {at} bytes for a block of {block.nbytes}", "see Layout.block_bytes")
    return np.array(in_blocks, np.uint64), np.array(in_parts, np.uint64), np.array(sizes, np.uint64)
