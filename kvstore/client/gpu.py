"""Leases and reservations of a GPU: blocks in device memory, whichever tier they are in.

A block in the daemon's pool on the GPU is read in place. A block in DRAM is copied into device memory of this
process first. Readers copy bytes before they verify them: the verified bytes are the ones that they keep,
even if the lease has ended meanwhile. Writers compute checksums from a private copy.

Not covered: copies and kernels (`kvstore.cuda`), and how extents are mapped (`extents`).
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.client.extents import DeviceExtent, Maps, quietly
from kvstore.client.leases import Buffer, Lease, PutResult, Reservation, Slots, nothing
from kvstore.cuda.array_interop import wrap
from kvstore.cuda.checksums import checksums
from kvstore.cuda.device import DeviceBuffer, Gpu, Memory, Stream
from kvstore.cuda.errors import CudaError
from kvstore.cuda.kernels import copy_pieces
from kvstore.errors import MisuseError
from kvstore.types import Key, slot_bytes
from kvstore.wire.messages import MappedHbm

_log = logging.getLogger(__name__)
_KEPT = 8
_GROUP_BYTES = 64 << 20  # of device memory, of which engines leave little

_U64: TypeAlias = "npt.NDArray[np.uint64]"
_Check: TypeAlias = "Callable[[Sequence[DeviceBuffer]], int]"
_Work: TypeAlias = "Callable[[Sequence[DeviceBuffer], int, _Check], int]"
"""(blocks in device memory, index of the first among those of the call, check) -> how many are good."""


class _Staging:
    """Device memory for copies. Keeps a few pieces per GPU for reuse. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: defaultdict[Gpu, list[DeviceBuffer]] = defaultdict(list)

    def take(self, gpu: Gpu, nbytes: int) -> DeviceBuffer:
        """Device memory of at least `nbytes`, uninitialised. Raises CudaError if the GPU has no room."""
        size = 1 << max(21, (nbytes - 1).bit_length())
        with self._lock:
            kept = self._kept[gpu]
            found = next((i for i, piece in enumerate(kept) if nbytes <= piece.nbytes <= 2 * size), None)
            if found is not None:
                return kept.pop(found)
        return gpu.allocate(size)

    def give(self, piece: DeviceBuffer) -> None:
        """Takes a piece back for reuse."""
        with self._lock:
            kept = self._kept[piece.gpu]
            kept.append(piece)
            old = kept.pop(0) if len(kept) > _KEPT else None
        if old is not None:
            quietly(piece.gpu.free, old)


_staging = _Staging()


def is_on_device(array: object) -> bool:
    """Whether an array declares that it is in a GPU's memory."""
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

    def __init__(
        self,
        slots: Slots,
        keys: Sequence[Key],
        namespace: bytes,
        end: Callable[[], None],
        suspect: Callable[[Key], None],
        gpu: Gpu,
    ) -> None:
        super().__init__(slots, keys, namespace, end, suspect)
        self.gpu = gpu
        self._piece: DeviceBuffer | None = None
        self._good = 0

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
            self._good = self._check(self._parts_of(self._piece, len(self)))
        return self._resident(0, len(self))

    def verify(self) -> int:
        """Returns how many leading blocks match their checksums, 0 if the lease's connection has ended.

        Reports the first corrupt block to the daemon.
        """
        self._check_open()
        good = self._in_groups(len(self), 0, lambda blocks, _, check: check(blocks))
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
        return self._move([[target[i * size : (i + 1) * size]] for i in range(len(self))], 0, verify)

    def scatter(self, i: int, parts: Sequence[Buffer]) -> bool:
        """Copies block i into device arrays that it fills one after another; whether its checksum matches."""
        return self.scatter_all([parts], i) == 1

    def scatter_all(self, parts: Sequence[Sequence[Buffer]], first: int = 0) -> int:
        """Copies blocks from `first` on into their parts, device arrays, many blocks with one kernel.

        Returns how many leading ones of these are good. The bytes of the other parts are undefined.
        """
        if first < 0 or first + len(parts) > len(self):
            raise MisuseError(f"blocks {first} to {first + len(parts)} of {len(self)}")
        return self._move([[wrap(part) for part in each] for each in parts], first, True)

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

    def release(self) -> None:
        """Ends the lease and frees the copies of its blocks. Does nothing if it has ended."""
        if self._finish() and self._piece is not None:
            _staging.give(self._piece)
            self._piece = None

    def _move(self, parts: Sequence[Sequence[Memory]], first: int, verify: bool) -> int:
        """Copies blocks into parts that they fill; how many leading ones are good (not `verify`: copied)."""
        self._check_open()

        def move(blocks: Sequence[DeviceBuffer], at: int, check: _Check) -> int:
            # The daemon may reuse a slot of its pool: so the copy comes first, then the check.
            _copy_all(self.gpu.thread_stream(), parts[at : at + len(blocks)], blocks)
            if verify:
                return check(blocks)
            self.gpu.thread_stream().wait()
            return len(blocks)

        return self._in_groups(len(parts), first, move)

    def _in_groups(self, n: int, first: int, work: _Work) -> int:
        """Works on `n` blocks in groups of at most `_GROUP_BYTES`; how many leading ones are good.

        A GPU that fails makes a miss.
        """
        at_once = max(1, _GROUP_BYTES // self._step)
        done = 0
        try:
            while done < n:
                count = min(at_once, n - done)
                good = self._group(first + done, count, done, work)
                done += good
                if good < count:
                    break
        except CudaError as error:
            _log.warning("the blocks are a miss, the GPU failed: %s", error)
        return done

    def _group(self, first: int, count: int, at: int, work: _Work) -> int:
        if self._piece is not None:
            good = max(0, min(self._good - first, count))
            return min(good, work(self._resident(first, count), at, lambda blocks: self._wait(len(blocks))))
        if self._slots.in_hbm:
            return work(self._resident(first, count), at, lambda blocks: self._check(blocks, first))
        piece = _staging.take(self.gpu, count * self._step)
        try:
            self._load(piece, first, count)
            return work(self._parts_of(piece, count), at, lambda blocks: self._check(blocks, first))
        finally:
            _staging.give(piece)

    def _load(self, piece: DeviceBuffer, first: int, count: int) -> None:
        """Starts copies of blocks from DRAM to device memory."""
        self._slots.pin(self.gpu)
        stream = self.gpu.thread_stream()
        for i, block in enumerate(self._parts_of(piece, count)):
            stream.copy(block, self._slots.view(first + i))

    def _resident(self, first: int, count: int) -> list[DeviceBuffer]:
        """Those of these blocks that are in device memory."""
        if self._piece is not None:
            return self._parts_of(self._piece, len(self))[first : first + count]
        return [self._slots.view(i) for i in range(first, first + count)] if self._slots.in_hbm else []

    def _parts_of(self, piece: DeviceBuffer, count: int) -> list[DeviceBuffer]:
        step, size = self._step, self._slots.block_bytes
        return [piece.part(i * step, i * step + size) for i in range(count)]

    @property
    def _step(self) -> int:
        return slot_bytes(self._slots.block_bytes)

    def _wait(self, count: int) -> int:
        self.gpu.thread_stream().wait()
        return count

    def _check(self, blocks: Sequence[DeviceBuffer], first: int = 0) -> int:
        """How many leading ones of these blocks match their checksums. `first`: the index of blocks[0].

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

    def on(self, gpu: Gpu) -> DeviceReservation:
        """Sets the GPU; the reservation itself."""
        self.gpu = gpu
        return self

    @property
    def blocks(self) -> list[Any]:
        """Writable slots, one per wanted block: device buffers in a pool, else memoryviews of DRAM.

        `commit` computes the checksums of blocks written here.
        """
        return super().blocks

    def fill(self, i: int, block: Buffer) -> None:
        """Copies a whole block, a device array, into slot i and computes its checksum."""
        self.gather_all([[block]], i)

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
            self._slots.pin(self.gpu)
        at_once = max(1, _GROUP_BYTES // slot_bytes(self._slots.block_bytes))
        for at in range(0, len(parts), at_once):
            self._gather([[wrap(part) for part in each] for each in parts[at : at + at_once]], first + at)

    def _gather(self, parts: Sequence[Sequence[DeviceBuffer]], first: int) -> None:
        size = self._slots.block_bytes
        step = slot_bytes(size)
        piece = _staging.take(self.gpu, len(parts) * step)
        try:
            own = [piece.part(i * step, i * step + size) for i in range(len(parts))]
            stream = self.gpu.thread_stream()
            targets, sources, sizes = _pieces(own, parts)
            copy_pieces(stream, targets, sources, sizes)
            sums = checksums(stream, own, [self._seed(first + i) for i in range(len(own))])
            _copy_all(stream, [[self._slots.view(first + i)] for i in range(len(own))], own)
            stream.wait()
        finally:
            _staging.give(piece)
        for i, each in enumerate(sums.tolist()):
            self._set_checksum(first + i, each)

    def write(self, i: int, part: Buffer, offset: int = 0) -> None:
        """Copies `part`, a device array, into slot i at byte `offset`. `commit` computes the checksum."""
        source = wrap(part) if is_on_device(part) else memoryview(part).cast("B")
        self._check_open()
        self._has_checksum[i] = 0
        stream = self.gpu.thread_stream()
        stream.copy(self._slots.view(i)[offset : offset + source.nbytes], source)
        stream.wait()

    def checksums(self) -> bytes:
        """The checksums of all slots as u64. Computes those that no write has computed."""
        left = [i for i, known in enumerate(self._has_checksum) if not known]
        if self._slots.in_hbm and left:
            blocks: list[Any] = [self._slots.view(i) for i in left]
            sums = checksums(self.gpu.thread_stream(), blocks, [self._seed(i) for i in left])
            for i, each in zip(left, sums.tolist(), strict=True):
                self._set_checksum(i, each)
        return super().checksums()


def _copy_all(stream: Stream, targets: Sequence[Sequence[Memory]], sources: Sequence[DeviceBuffer]) -> None:
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
    """Addresses within the blocks, addresses of the parts that fill them, and sizes, all in bytes.

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


def no_lease(block_bytes: int, gpu: Gpu | None) -> Lease:
    """The lease of a miss, on the host or of `gpu`."""
    if gpu is None:
        return Lease.empty(block_bytes)
    return DeviceLease(Slots.none(block_bytes), (), b"", nothing, nothing, gpu)


def no_reservation(
    block_bytes: int, result: PutResult, commit: Callable[[bytes], Any], gpu: Gpu | None
) -> Reservation:
    """The reservation of a refusal, on the host or of `gpu`."""
    if gpu is None:
        return Reservation.empty(block_bytes, result, commit)
    return DeviceReservation.empty(block_bytes, result, commit).on(gpu)
