"""What a client holds in the daemon: a `Lease` on blocks to read, a `Reservation` of slots to fill.

Both end with the `with` block, with `release`/`commit`/`abort`, or with the connection. Views of a lease
are read-only and the kernel sees to it; after the release their bytes may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from xxhash import xxh3_64

from kvstore import arena
from kvstore.cuda.device import Gpu
from kvstore.errors import MisuseError, UnavailableError
from kvstore.types import HBM_EXTENTS, SLOT_RECORD, Key

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, numpy array."""


class Slots:
    """Slots of mapped extents that a lease or a room speaks of.

    `records` has one `SLOT_RECORD` a slot, read field by field when somebody looks.
    """

    def __init__(self, extents: dict[int, Any], records: bytes, slot_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.records = records
        self._extents = extents
        self.in_hbm = any(number >= HBM_EXTENTS for number in extents)
        self._wide = memoryview(records).cast("Q")
        self._slot_bytes = slot_bytes

    def __len__(self) -> int:
        return len(self._wide) // 3

    def checksum(self, i: int) -> int:
        """What the payload of slot i must hash to."""
        return self._wide[3 * i + 1]

    @property
    def tiers(self) -> bytes:
        """Where each block was found, a byte each."""
        return np.frombuffer(self.records, SLOT_RECORD)["tier"].astype(np.uint8).tobytes()

    def view(self, i: int) -> Any:
        """The payload of slot i, `block_bytes` long: a memoryview, of a slot in HBM a DeviceBuffer."""
        place = self._wide[3 * i]
        extent = self._extents[place >> 32]
        return extent.payload(self._slot_bytes, place & 0xFFFFFFFF, self.block_bytes)

    def pin(self, gpu: Gpu) -> None:
        """Has CUDA know the extents, which are in DRAM."""
        for extent in self._extents.values():
            extent.pin(gpu)

    def is_current(self, i: int) -> bool:
        """Whether slot i still carries the version that was granted."""
        place = self._wide[3 * i]
        extent = self._extents[place >> 32]
        told: int = extent.version(self._slot_bytes, place & 0xFFFFFFFF)
        return told == self._wide[3 * i + 2] & 0xFFFFFFFF


def as_bytes(buffer: Buffer, what: str, nbytes: int, writable: bool = False) -> memoryview:
    """A flat view of a buffer of exactly `nbytes`. Raises MisuseError otherwise."""
    [flat] = _parts([buffer], what, nbytes, writable)
    return flat


def _parts(buffers: Sequence[Buffer], what: str, nbytes: int, writable: bool = False) -> list[memoryview]:
    """Flat views of buffers of `nbytes` together. Raises MisuseError otherwise."""
    flats = [_flat(buffer, what) for buffer in buffers]
    total = sum(flat.nbytes for flat in flats)
    if total != nbytes:
        raise MisuseError(f"{what} has {total} bytes instead of {nbytes}", "see Layout.block_bytes")
    if writable and any(flat.readonly for flat in flats):
        raise MisuseError(f"{what} is read-only")
    return flats


def _flat(buffer: Buffer, what: str) -> memoryview:
    try:
        view = memoryview(buffer)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except TypeError as error:
        raise MisuseError(f"{what}: {error}", "pass a C-contiguous buffer") from None


def _no_slots(block_bytes: int) -> Slots:
    return Slots({}, b"", 0, block_bytes)


def _nothing(*_: Any) -> None:
    """The end of a hold on nothing."""


def _never() -> bool:
    return False


class _Held:
    """What leases and rooms share: views, and an end that happens once."""

    def __init__(self, slots: Slots, end: Callable[[], None]) -> None:
        self._slots = slots
        self._end: Callable[[], None] | None = end

    def __len__(self) -> int:
        return len(self._slots)

    def _finish(self) -> bool:
        end, self._end = self._end, None
        if end is not None:
            end()
        return end is not None

    def _check_open(self) -> None:
        if self._end is None:
            raise MisuseError("the lease or room has ended", "use it inside its `with` block")

    def _range(self, i: int, offset: int, nbytes: int) -> memoryview:
        self._check_open()
        if not 0 <= i < len(self) or offset < 0 or offset + nbytes > self._slots.block_bytes:
            raise MisuseError(
                f"bytes {offset} to {offset + nbytes} of block {i}",
                f"there are {len(self)} blocks of {self._slots.block_bytes} bytes",
            )
        part: memoryview = self._slots.view(i)[offset : offset + nbytes]
        return part


class Lease(_Held):
    """The leading blocks of an acquire; `len` says how many."""

    def __init__(
        self,
        slots: Slots,
        keys: Sequence[Key],
        namespace: bytes,
        end: Callable[[], None],
        suspect: Callable[[Key], None],
    ) -> None:
        super().__init__(slots, end)
        self._keys = keys
        self._namespace = namespace
        self._suspect = suspect
        self._lost: Callable[[], bool] = _never

    @classmethod
    def on_nothing(cls, block_bytes: int) -> Lease:
        """What a miss gets."""
        return cls(_no_slots(block_bytes), (), b"", _nothing, _nothing)

    def held_over(self, lost: Callable[[], bool]) -> Self:
        """Says how to find out whether the lease's connection has ended."""
        self._lost = lost
        return self

    @property
    def ended(self) -> bool:
        """Whether the lease is over: it was released, or its connection has ended.

        Readers of `blocks` look at it when they have read: if it is true, they may have read other bytes.
        """
        return self._end is None or self._lost()

    @property
    def in_hbm(self) -> bool:
        """Whether the slots are in a GPU's memory."""
        return self._slots.in_hbm

    @property
    def tiers(self) -> bytes:
        """Where each block was found: one byte a block, a `Tier`."""
        return self._slots.tiers

    @property
    def blocks(self) -> list[memoryview]:
        """Zero-copy read-only views, one a block. Unverified: call `verify` where that matters.

        Raises UnavailableError if the connection of the lease has ended. See also `ended`.
        """
        self._check_held()
        return [self._slots.view(i) for i in range(len(self))]

    def verify(self) -> int:
        """How many leading blocks match their checksums, 0 if the connection of the lease has ended.

        A bad one is reported to the daemon.
        """
        good = self._verified(lambda i, seed: arena.checksum(self._slots.view(i), seed))
        return 0 if self._lost() else good

    def copy_into(self, out: Buffer, verify: bool = True) -> int:
        """Copies the blocks into `out`, block after block; returns how many leading ones are good.

        `out` is a writable C-contiguous buffer of at least len * block_bytes bytes. What lies in it behind
        the good blocks is undefined.
        """
        size = self._slots.block_bytes
        try:
            flat = memoryview(out).cast("B")
        except TypeError as error:
            raise MisuseError(f"out: {error}", "pass a writable C-contiguous buffer") from None
        if flat.readonly or flat.nbytes < size * len(self):
            raise MisuseError(
                f"out has {flat.nbytes} bytes{', read-only' if flat.readonly else ''}",
                f"{len(self)} blocks of {size} bytes must fit into it",
            )

        def move(i: int, seed: int) -> int:
            target = flat[i * size : (i + 1) * size]
            if verify:
                return arena.scatter([target], self._slots.view(i), seed)
            arena.copy(target, self._slots.view(i))
            return self._slots.checksum(i)

        return self._verified(move)

    def scatter(self, i: int, parts: Sequence[Buffer]) -> bool:
        """Copies block i into `parts`, writable C-contiguous buffers that it fills one after another.

        Whether these were the right bytes: if not, the block is reported to the daemon and what lies in the
        parts is undefined.
        """
        targets = _parts(
            parts, f"block {i}", self._range(i, 0, self._slots.block_bytes).nbytes, writable=True
        )
        return self._is_good(i, lambda i, seed: arena.scatter(targets, self._slots.view(i), seed))

    def scatter_all(self, parts: Sequence[Sequence[Buffer]], first: int = 0) -> int:
        """`scatter` for the blocks from `first` on, a list of parts each; how many leading ones were good."""
        for at, those in enumerate(parts):
            if not self.scatter(first + at, those):
                return at
        return len(parts)

    def read(self, i: int, out: Buffer, offset: int = 0) -> None:
        """Copies a byte range of block i, from `offset`, into all of `out`. Unverified.

        Raises UnavailableError if the connection of the lease has ended: then `out` is undefined.
        """
        target = memoryview(out).cast("B")
        arena.copy(target, self._range(i, offset, target.nbytes))
        self._check_held()

    def release(self) -> None:
        """Gives the slots back; may be called again."""
        self._finish()

    def _check_held(self) -> None:
        self._check_open()
        if self._lost():
            raise UnavailableError("the connection of the lease has ended", "acquire the blocks again")

    def _verified(self, digest: Callable[[int, int], int]) -> int:
        """Counts leading blocks whose digest is right and whose slot was theirs until after it."""
        self._check_open()
        for i in range(len(self)):
            if not self._is_good(i, digest):
                return i
        return len(self)

    def _is_good(self, i: int, digest: Callable[[int, int], int]) -> bool:
        """Whether block i has the right digest, and its slot was its own until after it was taken."""
        seed = arena.seed(self._namespace, self._keys[i], self._slots.block_bytes)
        if digest(i, seed) != self._slots.checksum(i):
            self._suspect(self._keys[i])
            return False
        return self._slots.is_current(i)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True)
class PutResult:
    """How many blocks were stored now, were there (or being written) already, were refused, and why."""

    stored: int = 0
    present: int = 0
    denied: int = 0
    why: str = ""


class Reservation(_Held):
    """Slots to fill. `wanted` has the positions (in the keys asked for) of those blocks."""

    def __init__(
        self,
        slots: Slots,
        keys: Sequence[Key],
        namespace: bytes,
        wanted: list[int],
        result: PutResult,
        lease: int,
        end: Callable[[], None],
        commit: Callable[[bytes], Any],
    ) -> None:
        super().__init__(slots, end)
        self.wanted = wanted
        self.result = result
        self.lease = lease
        self._keys = keys
        self._namespace = namespace
        self._commit = commit
        self._checksums: dict[int, int] = {}
        self._written: dict[int, tuple[int, xxh3_64]] = {}

    @classmethod
    def on_nothing(cls, block_bytes: int, result: PutResult, commit: Callable[[bytes], Any]) -> Reservation:
        """What a refusal gets."""
        return cls(_no_slots(block_bytes), (), b"", [], result, 0, _nothing, commit)

    @property
    def blocks(self) -> list[memoryview]:
        """Writable views, one a wanted block. Whoever writes through them leaves checksums to `commit`."""
        self._check_open()
        self._checksums.clear()
        self._written.clear()
        return [self._slots.view(i) for i in range(len(self))]

    def fill(self, i: int, block: Buffer) -> None:
        """Copies a whole block into slot i and takes its checksum on the way."""
        source = as_bytes(block, f"block {self.wanted[i]}", self._slots.block_bytes)
        self._checksums[i] = arena.gather(self._range(i, 0, source.nbytes), [source], self._seed(i))

    def gather(self, i: int, parts: Sequence[Buffer]) -> None:
        """`fill` from C-contiguous buffers that make the block one after another."""
        sources = _parts(parts, f"block {self.wanted[i]}", self._slots.block_bytes)
        target = self._range(i, 0, self._slots.block_bytes)
        self._checksums[i] = arena.gather(target, sources, self._seed(i))

    def gather_all(self, parts: Sequence[Sequence[Buffer]], first: int = 0) -> None:
        """`gather` for the slots from `first` on, a list of parts each."""
        for at, those in enumerate(parts):
            self.gather(first + at, those)

    def write(self, i: int, part: Buffer, offset: int = 0) -> None:
        """Copies `part` into slot i at byte `offset`, layer by layer for instance.

        Best in order: then the checksum is that of the parts, else that of the slot at `commit`.
        """
        source = memoryview(part).cast("B")
        target = self._range(i, offset, source.nbytes)
        self._checksums.pop(i, None)
        start = (0, xxh3_64(seed=self._seed(i)))
        written, digest = self._written.pop(i, start) if offset else start
        if written != offset:
            arena.copy(target, source)
            return
        arena.copy_digest(target, source, digest)
        if offset + source.nbytes < self._slots.block_bytes:
            self._written[i] = offset + source.nbytes, digest
        else:
            self._checksums[i] = digest.intdigest()

    def checksums(self) -> bytes:
        """Checksums of all slots as u64; those not taken while writing are taken now."""
        for i in range(len(self)):
            if i not in self._checksums:
                self._checksums[i] = arena.checksum(self._slots.view(i), self._seed(i))
        return np.array([self._checksums[i] for i in range(len(self))], "<u8").tobytes()

    def commit(self) -> Any:
        """Makes all blocks readable at once and ends the room: the PutResult (awaitable if the client is)."""
        self._check_open()
        self._end = None
        return self._commit(self.checksums())

    def abort(self) -> None:
        """Gives the slots up; may be called again."""
        self._finish()

    def _seed(self, i: int) -> int:
        return arena.seed(self._namespace, self._keys[self.wanted[i]], self._slots.block_bytes)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.abort()
