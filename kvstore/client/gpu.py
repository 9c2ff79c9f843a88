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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvstore.client.extents import DeviceExtent, Maps, quietly
from kvstore.client.leases import Lease, Reservation
from kvstore.client.parts import U64, Buffer, Parts, flat
from kvstore.cuda.checksums import checksums
from kvstore.cuda.device import DeviceBuffer, Gpu, Stream
from kvstore.cuda.errors import CudaError
from kvstore.cuda.kernels import copy_pieces, spans
from kvstore.types import slot_bytes
from kvstore.wire.messages import MappedHbm

_log = logging.getLogger(__name__)
_KEPT = 8
_STAGED_BYTES = 64 << 20  # of device memory, of which engines leave little


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
            self._good = self._check(self._copies(self._piece, len(self)), 0)
        return self._resident(0, len(self)).views()

    def verify(self) -> int:
        """Returns how many leading blocks match their checksums, 0 if the lease's connection has ended.

        Reports the first corrupt block to the daemon.
        """
        self._check_open()
        good = self._copy(0, None, len(self), verify=True)
        return 0 if self._lost() else good

    def read(self, i: int, out: Buffer, offset: int = 0) -> None:
        """Fills `out`, an array on the host or the GPU, with bytes of block i from `offset` on. Not verified.

        Raises CudaError if the GPU fails, UnavailableError if the connection of the lease has ended.
        """
        target = flat(out, "out")
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

    @property
    def _parts_on(self) -> Gpu:
        return self.gpu

    def _copy(self, first: int, parts: Parts | None, n: int, verify: bool) -> int:
        """Copies `n` blocks into their parts, if there are parts, and verifies the blocks.

        Blocks of DRAM are copied in groups, with one kernel for all parts of a group.
        Returns how many leading blocks are good. Failures of the GPU are misses.
        """
        if parts is not None and n and isinstance(parts.buffers[0], memoryview) and not self.in_hbm:
            return super()._copy(first, parts, n, verify)
        at_once = n if self._is_resident else max(1, _STAGED_BYTES // self._step)
        done = 0
        try:
            while done < n:
                count = min(at_once, n - done)
                with self._in_device_memory(first + done, count) as blocks:
                    # The daemon may reuse a slot of its pool, so blocks are verified after the copy.
                    if parts is not None:
                        some = parts.blocks(done, done + count)
                        _copy(self.gpu.thread_stream(), some, some.within(blocks))
                    good = self._wait(blocks, first + done, verify)
                done += good
                if good < count:
                    break
        except CudaError as error:
            _log.warning("the blocks are a miss, the GPU failed: %s", error)
        return done

    @contextmanager
    def _in_device_memory(self, first: int, count: int) -> Iterator[Parts]:
        """Yields blocks in device memory. Blocks of DRAM are copied there for the `with` block."""
        if self._is_resident:
            yield self._resident(first, count)
            return
        piece = _staging.take(self.gpu, count * self._step)
        try:
            self._load(piece, first, count)
            yield self._copies(piece, count)
        finally:
            _staging.give(piece)

    def _wait(self, blocks: Parts, first: int, verify: bool) -> int:
        """Waits for copies, then verifies blocks that are not verified yet; returns how many are good."""
        if verify and self._piece is None:
            return self._check(blocks, first)
        self.gpu.thread_stream().wait()
        return len(blocks) if self._piece is None else max(0, min(self._good - first, len(blocks)))

    def _load(self, piece: DeviceBuffer, first: int, count: int) -> None:
        """Starts copies of blocks from DRAM to device memory."""
        self._slots.register(self.gpu)
        _copy(self.gpu.thread_stream(), self._copies(piece, count), self._slots.parts(first, count))

    @property
    def _is_resident(self) -> bool:
        """Whether all blocks are in device memory."""
        return self._piece is not None or self._slots.in_hbm

    def _resident(self, first: int, count: int) -> Parts:
        """Returns blocks that are in device memory: their copies, or their slots in a pool."""
        if self._piece is None:
            return self._slots.parts(first, count)
        return self._copies(self._piece, len(self)).blocks(first, first + count)

    def _copies(self, piece: DeviceBuffer, count: int) -> Parts:
        return Parts.consecutive(piece, count, self._slots.block_bytes, self._step)

    @property
    def _step(self) -> int:
        return slot_bytes(self._slots.block_bytes)

    def _check(self, blocks: Parts, first: int) -> int:
        """Returns how many leading ones of these blocks are good. `first`: index of the first of them.

        Waits for earlier copies on the stream of the thread.
        """
        n = len(blocks)
        sums = checksums(self.gpu.thread_stream(), blocks.addresses(), blocks.lengths, self._seeds(first, n))
        return self._count_good(first, sums, n)


class DeviceReservation(Reservation):
    """Slots to fill from the memory of `gpu`."""

    gpu: Gpu

    @property
    def blocks(self) -> list[Any]:
        """Writable slots, one per wanted block: device buffers in a pool, else memoryviews of DRAM.

        `commit` computes the checksums of blocks written here.
        """
        return super().blocks

    def write(self, i: int, part: Buffer, offset: int = 0) -> None:
        """Copies `part`, a device array, into slot i at byte `offset`. `commit` computes the checksum."""
        source = flat(part, "part")
        self._check_open()
        self._has_checksum[i] = 0
        stream = self.gpu.thread_stream()
        stream.copy(self._slots.view(i)[offset : offset + source.nbytes], source)
        stream.wait()

    def checksums(self) -> bytes:
        """Returns the checksums of all slots as u64. Computes those that no write has computed."""
        left = [i for i, known in enumerate(self._has_checksum) if not known]
        if self._slots.in_hbm and left:
            blocks = spans([self._slots.view(i) for i in left])
            sums = checksums(self.gpu.thread_stream(), *blocks, [self._seed(i) for i in left])
            for i, each in zip(left, sums.tolist(), strict=True):
                self._set_checksum(i, each)
        return super().checksums()

    @property
    def _parts_on(self) -> Gpu:
        return self.gpu

    def _copy_in(self, first: int, parts: Parts) -> U64:
        """Fills slots from `first` on, with a kernel for many of them. Returns their checksums. CudaError."""
        if not self._slots.in_hbm:
            self._slots.register(self.gpu)
        at_once = max(1, _STAGED_BYTES // slot_bytes(self._slots.block_bytes))
        starts = range(0, len(parts), at_once)
        return np.concatenate([self._copy_group(first + at, parts.blocks(at, at + at_once)) for at in starts])

    def _copy_group(self, first: int, parts: Parts) -> U64:
        n, size, stream = len(parts), self._slots.block_bytes, self.gpu.thread_stream()
        piece = _staging.take(self.gpu, n * slot_bytes(size))
        try:
            own = Parts.consecutive(piece, n, size, slot_bytes(size))
            _copy(stream, parts.within(own), parts)
            sums = checksums(stream, own.addresses(), own.lengths, self._seeds(first, n))
            _copy(stream, self._slots.parts(first, n), own)
            stream.wait()
        finally:
            _staging.give(piece)
        return sums


def _copy(stream: Stream, targets: Parts, sources: Parts) -> None:
    """Copies pieces to pieces of the same lengths, with one kernel if all are on the GPU."""
    if all(isinstance(buffer, DeviceBuffer) for buffer in (*targets.buffers, *sources.buffers)):
        copy_pieces(stream, targets.addresses(), sources.addresses(), targets.lengths)
        return
    for target, source in zip(targets.views(), sources.views(), strict=True):
        stream.copy(target, source)
