"""Leases and rooms of a GPU: blocks in device memory, wherever the daemon has them.

A block in a pool of the GPU is looked at in place; one in DRAM is brought into memory of this process first.
Bytes that a reader keeps are copied before they are verified, so what was verified is what it keeps, even if
its lease has ended meanwhile. Writers take checksums from a copy of their own, which nobody else reaches.
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
from kvstore.client.leases import Buffer, Lease, PutResult, Reservation, Slots
from kvstore.cuda.array_interop import wrap
from kvstore.cuda.buffer import DeviceBuffer
from kvstore.cuda.checksums import checksums
from kvstore.cuda.device import Gpu
from kvstore.cuda.errors import CudaError
from kvstore.cuda.kernels import copy_pieces
from kvstore.cuda.stream import Memory, Stream
from kvstore.errors import MisuseError
from kvstore.types import Key, slot_bytes
from kvstore.wire.messages import MappedHbm

_log = logging.getLogger(__name__)
_KEPT = 8
_GROUP_BYTES = 64 << 20  # of device memory, of which engines leave little

_U64: TypeAlias = "npt.NDArray[np.uint64]"
_Check: TypeAlias = "Callable[[Sequence[DeviceBuffer]], int]"
_Work: TypeAlias = "Callable[[Sequence[DeviceBuffer], int, _Check], int]"
"""(blocks in device memory, place of the first among those asked for, how to verify) -> how many are good."""


class _Staging:
    """Device memory for blocks on their way. A few pieces are kept for the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: defaultdict[Gpu, list[DeviceBuffer]] = defaultdict(list)

    def take(self, gpu: Gpu, nbytes: int) -> DeviceBuffer:
        """At least so much, with anything in it. CudaError if there is no room."""
        size = 1 << max(21, (nbytes - 1).bit_length())
        with self._lock:
            kept = self._kept[gpu]
            found = next((i for i, piece in enumerate(kept) if nbytes <= piece.nbytes <= 2 * size), None)
            if found is not None:
                return kept.pop(found)
        return gpu.allocate(size)

    def give(self, piece: DeviceBuffer) -> None:
        """Done with it."""
        with self._lock:
            kept = self._kept[piece.gpu]
            kept.append(piece)
            old = kept.pop(0) if len(kept) > _KEPT else None
        if old is not None:
            quietly(piece.gpu.free, old)


_staging = _Staging()


def is_on_device(array: object) -> bool:
    """Whether something lies in a GPU's memory, as far as it says so."""
    return not isinstance(array, bytes | bytearray | memoryview | np.ndarray) and hasattr(
        array, "__cuda_array_interface__"
    )


def open_extent(maps: Maps, extent: int, told: MappedHbm) -> DeviceExtent:
    """Maps an extent in a GPU's memory. CudaError where CUDA IPC does not work."""
    mapped = DeviceExtent(Gpu.open(told.device), told.handle, told.extent_bytes)
    maps.keep(extent, mapped)
    return mapped


class DeviceLease(Lease):
    """The leading blocks of an acquire, in the memory of `gpu`; `len` says how many."""

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
        """The blocks in device memory, one each, with `__cuda_array_interface__` and DLPack.

        In a pool they are the slots themselves: not to be written, and unverified (see `verify`). Blocks of
        DRAM are brought, all of them, which takes as much device memory: CudaError if there is not so much.
        Whatever reads them must be over before the lease is. UnavailableError if its connection has ended.
        """
        self._check_held()
        if not self._slots.in_hbm and self._piece is None and len(self):
            self._piece = _staging.take(self.gpu, len(self) * self._step)
            self._bring(self._piece, 0, len(self))
            self._good = self._check(self._parts_of(self._piece, len(self)))
        return self._here(0, len(self))

    def verify(self) -> int:
        """How many leading blocks match their checksums, 0 if the connection of the lease has ended.

        The first bad one is reported to the daemon.
        """
        self._check_open()
        good = self._in_groups(len(self), 0, lambda blocks, _, check: check(blocks))
        return 0 if self._lost() else good

    def copy_into(self, out: Buffer, verify: bool = True) -> int:
        """Copies the blocks into `out`, an array of this GPU or a writable host buffer, one after another.

        Returns how many leading ones are good; what lies behind them is undefined.
        """
        if not is_on_device(out) and not self._slots.in_hbm:
            return super().copy_into(out, verify)
        size = self._slots.block_bytes
        target = wrap(out) if is_on_device(out) else memoryview(out).cast("B")
        if target.nbytes < size * len(self):
            raise MisuseError(f"out has {target.nbytes} bytes", f"{len(self)} blocks of {size} must fit")
        return self._move([[target[i * size : (i + 1) * size]] for i in range(len(self))], 0, verify)

    def scatter(self, i: int, parts: Sequence[Buffer]) -> bool:
        """Copies block i into device arrays that it fills one after another; whether its bytes were right."""
        return self.scatter_all([parts], i) == 1

    def scatter_all(self, parts: Sequence[Sequence[Buffer]], first: int = 0) -> int:
        """Copies blocks from `first` on into their parts, device arrays, many with one kernel.

        Returns how many leading ones of these are good; what lies in the other parts is undefined.
        """
        if first < 0 or first + len(parts) > len(self):
            raise MisuseError(f"blocks {first} to {first + len(parts)} of {len(self)}")
        return self._move([[wrap(part) for part in those] for those in parts], first, True)

    def read(self, i: int, out: Buffer, offset: int = 0) -> None:
        """Copies a byte range of block i, from `offset`, into all of `out`, an array of either kind.

        Unverified. CudaError if the GPU fails, UnavailableError if the connection of the lease has ended.
        """
        target = wrap(out) if is_on_device(out) else memoryview(out).cast("B")
        source = self._range(i, offset, target.nbytes)
        stream = self.gpu.thread_stream()
        stream.copy(target, source)
        stream.wait()
        self._check_held()

    def release(self) -> None:
        """Gives the slots back, and the memory that the blocks were brought into; may be called again."""
        if self._finish() and self._piece is not None:
            _staging.give(self._piece)
            self._piece = None

    def _move(self, parts: Sequence[Sequence[Memory]], first: int, verify: bool) -> int:
        """Copies blocks into parts that they fill; how many leading ones are good, or there, unverified."""
        self._check_open()

        def move(blocks: Sequence[DeviceBuffer], at: int, check: _Check) -> int:
            # Of a pool, others may write: copied first, and right then if it still is right.
            _copy_all(self.gpu.thread_stream(), parts[at : at + len(blocks)], blocks)
            if verify:
                return check(blocks)
            self.gpu.thread_stream().wait()
            return len(blocks)

        return self._in_groups(len(parts), first, move)

    def _in_groups(self, n: int, first: int, work: _Work) -> int:
        """Has blocks worked on, so many at a time as little device memory holds; how many leading are good.

        A GPU that fails is a miss.
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
            _log.warning("a miss: %s", error)
        return done

    def _group(self, first: int, count: int, at: int, work: _Work) -> int:
        if self._piece is not None:
            good = max(0, min(self._good - first, count))
            return min(good, work(self._here(first, count), at, lambda blocks: self._waited(len(blocks))))
        if self._slots.in_hbm:
            return work(self._here(first, count), at, lambda blocks: self._check(blocks, first))
        piece = _staging.take(self.gpu, count * self._step)
        try:
            self._bring(piece, first, count)
            return work(self._parts_of(piece, count), at, lambda blocks: self._check(blocks, first))
        finally:
            _staging.give(piece)

    def _bring(self, piece: DeviceBuffer, first: int, count: int) -> None:
        """Has blocks copied out of DRAM."""
        self._slots.pin(self.gpu)
        stream = self.gpu.thread_stream()
        for i, block in enumerate(self._parts_of(piece, count)):
            stream.copy(block, self._slots.view(first + i))

    def _here(self, first: int, count: int) -> list[DeviceBuffer]:
        """Blocks that are in device memory."""
        if self._piece is not None:
            return self._parts_of(self._piece, len(self))[first : first + count]
        return [self._slots.view(i) for i in range(first, first + count)] if self._slots.in_hbm else []

    def _parts_of(self, piece: DeviceBuffer, count: int) -> list[DeviceBuffer]:
        step, size = self._step, self._slots.block_bytes
        return [piece.part(i * step, i * step + size) for i in range(count)]

    @property
    def _step(self) -> int:
        return slot_bytes(self._slots.block_bytes)

    def _waited(self, count: int) -> int:
        self.gpu.thread_stream().wait()
        return count

    def _check(self, blocks: Sequence[DeviceBuffer], first: int = 0) -> int:
        """How many leading ones of these blocks, of which `first` is the first, hold what they should.

        Waits for what was copied out of them before.
        """
        names = range(first, first + len(blocks))
        seeds = [arena.seed(self._namespace, self._keys[i], self._slots.block_bytes) for i in names]
        sums = checksums(self.gpu.thread_stream(), blocks, seeds).tolist()
        for at, i in enumerate(names):
            if sums[at] != self._slots.checksum(i):
                self._suspect(self._keys[i])
                return at
        return len(blocks)


class DeviceReservation(Reservation):
    """Slots to fill from the memory of `gpu`."""

    gpu: Gpu

    def on(self, gpu: Gpu) -> DeviceReservation:
        """Says which GPU."""
        self.gpu = gpu
        return self

    @property
    def blocks(self) -> list[Any]:
        """Writable slots, one a wanted block: device buffers in a pool, else memoryviews of DRAM.

        Whoever writes through them leaves checksums to `commit`.
        """
        return super().blocks

    def fill(self, i: int, block: Buffer) -> None:
        """Copies a whole block, a device array, into slot i and takes its checksum."""
        self.gather_all([[block]], i)

    def gather(self, i: int, parts: Sequence[Buffer]) -> None:
        """`fill` from device arrays that make the block one after another."""
        self.gather_all([parts], i)

    def gather_all(self, parts: Sequence[Sequence[Buffer]], first: int = 0) -> None:
        """Fills slots from `first` on, each from its parts, many with one kernel.

        CudaError if the GPU fails.
        """
        self._check_open()
        if first < 0 or first + len(parts) > len(self):
            raise MisuseError(f"slots {first} to {first + len(parts)} of {len(self)}")
        if not self._slots.in_hbm:
            self._slots.pin(self.gpu)
        at_once = max(1, _GROUP_BYTES // slot_bytes(self._slots.block_bytes))
        for at in range(0, len(parts), at_once):
            self._gather([[wrap(part) for part in those] for those in parts[at : at + at_once]], first + at)

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
            self._checksums[first + i] = each

    def write(self, i: int, part: Buffer, offset: int = 0) -> None:
        """Copies `part`, a device array, into slot i at byte `offset`; the checksum is taken at `commit`."""
        source = wrap(part) if is_on_device(part) else memoryview(part).cast("B")
        self._check_open()
        self._checksums.pop(i, None)
        stream = self.gpu.thread_stream()
        stream.copy(self._slots.view(i)[offset : offset + source.nbytes], source)
        stream.wait()

    def checksums(self) -> bytes:
        """Checksums of all slots as u64; those not taken while writing are taken now."""
        left = [i for i in range(len(self)) if i not in self._checksums]
        if self._slots.in_hbm and left:
            blocks: list[Any] = [self._slots.view(i) for i in left]
            sums = checksums(self.gpu.thread_stream(), blocks, [self._seed(i) for i in left])
            self._checksums |= dict(zip(left, sums.tolist(), strict=True))
        return super().checksums()


def _copy_all(stream: Stream, targets: Sequence[Sequence[Memory]], sources: Sequence[DeviceBuffer]) -> None:
    """Copies blocks out of device memory into parts, by one kernel if they stay on this GPU."""
    there = [[part for part in those if isinstance(part, DeviceBuffer)] for those in targets]
    if all(len(device) == len(those) for device, those in zip(there, targets, strict=True)):
        outside, inside, sizes = _pieces(sources, there)
        copy_pieces(stream, inside, outside, sizes)
        return
    for source, those in zip(sources, targets, strict=True):
        at = 0
        for part in those:
            stream.copy(part, source[at : at + part.nbytes])
            at += part.nbytes


def _pieces(
    blocks: Sequence[DeviceBuffer], parts: Sequence[Sequence[DeviceBuffer]]
) -> tuple[_U64, _U64, _U64]:
    """Addresses of places in the blocks, of the parts that fill them, and their sizes. MisuseError."""
    inside: list[int] = []
    outside: list[int] = []
    sizes: list[int] = []
    for block, those in zip(blocks, parts, strict=True):
        at = 0
        for part in those:
            if part.gpu is not block.gpu:
                raise MisuseError(f"an array on {part.gpu.uuid}", f"this is about {block.gpu.uuid}")
            inside.append(block.address + at)
            outside.append(part.address)
            sizes.append(part.nbytes)
            at += part.nbytes
        if at != block.nbytes:
            raise MisuseError(f"parts of {at} bytes for a block of {block.nbytes}", "see Layout.block_bytes")
    return np.array(inside, np.uint64), np.array(outside, np.uint64), np.array(sizes, np.uint64)


def no_lease_on(gpu: Gpu, block_bytes: int) -> Lease:
    """What a miss gets."""
    empty = Slots({}, b"", 0, block_bytes)
    return DeviceLease(empty, (), b"", _nothing, _nothing, gpu)


def no_reservation_on(
    gpu: Gpu, block_bytes: int, lost: PutResult, commit: Callable[[bytes], Any]
) -> Reservation:
    """What a refusal gets."""
    empty = Slots({}, b"", 0, block_bytes)
    return DeviceReservation(empty, (), b"", [], lost, 0, _nothing, commit).on(gpu)


def _nothing(*_: Any) -> None:
    """The end of a hold on nothing."""
