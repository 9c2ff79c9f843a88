"""A `Lease` on blocks to read, and a `Reservation` of slots to fill, both in memory that the daemon owns.

Both end with the `with` block, with `release`/`commit`/`abort`, or with the connection. Views of a lease are
read-only, which the kernel enforces; their bytes may change after the release. Not covered: blocks in a GPU's
memory, see `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from xxhash import xxh3_64

from kvstore import arena
from kvstore.client.parts import U64, Buffer, Parts, check_place, flat
from kvstore.client.slots import Slots
from kvstore.cuda.device import DeviceBuffer, Gpu
from kvstore.errors import MisuseError, UnavailableError
from kvstore.types import SLOT_RECORD, Key

Blocks: TypeAlias = Sequence[Sequence[Buffer]] | Parts
"""For each block the buffers of its parts, or a table of `PagedMemory.parts`."""


def _nothing(*_: Any) -> None:
    """Ends an empty lease or reservation."""


def _never() -> bool:
    return False


class _Grant:
    """Slots that the daemon has granted until `end` is called, once: a lease or a reservation."""

    def __init__(
        self, slots: Slots, keys: Sequence[Key], namespace: bytes, end: Callable[[], None], gpu: Gpu | None
    ) -> None:
        self.gpu = gpu
        self._slots = slots
        self._keys = keys
        self._namespace = namespace
        self._end: Callable[[], None] | None = end

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def _parts_on(self) -> Gpu | None:
        """Where the parts of blocks must be; None: in host memory."""
        return None

    def _parts(self, blocks: Blocks, numbers: Sequence[int], writable: bool = False) -> Parts:
        """Returns the parts of blocks that are named by `numbers`. Raises MisuseError, see `Parts.check`."""
        parts = blocks if isinstance(blocks, Parts) else Parts.of(blocks, numbers)
        parts.check(self._slots.block_bytes, numbers, self._parts_on, writable)
        return parts

    def _finish(self) -> None:
        """Ends the grant. Does nothing if it has ended."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def _check_open(self) -> None:
        if self._end is None:
            raise MisuseError("the lease or reservation has ended", "use it inside its `with` block")

    def _check_range(self, first: int, n: int) -> None:
        self._check_open()
        if first < 0 or first + n > len(self):
            blocks = f"block {first}" if n == 1 else f"blocks {first} to {first + n}"
            raise MisuseError(blocks, f"there are {len(self)} blocks of {self._slots.block_bytes} bytes")

    def _range(self, i: int, offset: int, nbytes: int) -> memoryview:
        self._check_open()
        if not 0 <= i < len(self) or offset < 0 or offset + nbytes > self._slots.block_bytes:
            raise MisuseError(
                f"bytes {offset} to {offset + nbytes} of block {i}",
                f"there are {len(self)} blocks of {self._slots.block_bytes} bytes",
            )
        part: memoryview = self._slots.view(i)[offset : offset + nbytes]
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()


class Lease(_Grant):
    """The leading blocks of an acquire; `len` is their number. `gpu`: see `DeviceLease`."""

    stored: int
    """The number of leading blocks that were stored. More than `len`: the others were not ready in time, or
    slower to load than to recompute."""

    def __init__(
        self,
        slots: Slots,
        keys: Sequence[Key] = (),
        namespace: bytes = b"",
        end: Callable[[], None] = _nothing,
        suspect: Callable[[Key], None] = _nothing,
        lost: Callable[[], bool] = _never,
        gpu: Gpu | None = None,
    ) -> None:
        """`namespace`: its fingerprint. `suspect` reports a corrupt block.

        `lost` returns whether the connection of the lease has ended.
        """
        super().__init__(slots, keys, namespace, end, gpu)
        self.stored = len(slots)
        self._suspect = suspect
        self._lost = lost

    @property
    def ended(self) -> bool:
        """Whether the lease was released or its connection has ended.

        Check it after reading `blocks`: if it is true, the slots may have been reused meanwhile.
        """
        return self._end is None or self._lost()

    @property
    def in_hbm(self) -> bool:
        """Whether the slots are in a GPU's memory."""
        return self._slots.in_hbm

    @property
    def tiers(self) -> bytes:
        """The tier where each block was found: one byte per block, a `Tier`."""
        return np.frombuffer(self._slots.records, SLOT_RECORD)["tier"].astype(np.uint8).tobytes()

    @property
    def blocks(self) -> list[memoryview]:
        """Read-only views, one per block, without a copy. Not verified: call `verify` where that matters.

        Raises UnavailableError if the connection of the lease has ended. See also `ended`.
        """
        self._check_held()
        return [self._slots.view(i) for i in range(len(self))]

    def verify(self) -> int:
        """Returns how many leading blocks match their checksums, 0 if the lease's connection has ended.

        Reports the first corrupt block to the daemon.
        """
        self._check_open()
        good = self._count_good(0, self._slots.sums(0, self._seeds(0, len(self))), len(self))
        return 0 if self._lost() else good

    def copy_into(self, out: Buffer, verify: bool = True) -> int:
        """Copies the blocks into `out`, one after another; returns how many leading ones are good.

        `out` is a writable C-contiguous buffer of at least len * block_bytes bytes. Its bytes behind the
        good blocks are undefined.
        """
        size, target = self._slots.block_bytes, flat(out, "out")
        if target.readonly or target.nbytes < size * len(self):
            raise MisuseError(
                f"out has {target.nbytes} bytes{', read-only' if target.readonly else ''}",
                f"{len(self)} blocks of {size} bytes must fit into it",
            )
        if isinstance(target, DeviceBuffer):
            check_place(target.gpu, self._parts_on)
        self._check_open()
        return self._copy(0, Parts.consecutive(target, len(self), size), len(self), verify)

    def scatter(self, i: int, parts: Sequence[Buffer]) -> bool:
        """Copies block i into `parts`, writable C-contiguous buffers that it fills one after another.

        Returns whether the bytes match their checksum. If not, the block is reported to the daemon and the
        bytes of the parts are undefined.
        """
        return self.scatter_all([parts], i) == 1

    def scatter_all(self, parts: Blocks, first: int = 0) -> int:
        """Copies the blocks from `first` on into their parts: lists of buffers, or pages of `PagedMemory`.

        Returns how many leading ones of these are good. The bytes of the other parts are undefined.
        """
        n = len(parts)
        self._check_range(first, n)
        return self._copy(first, self._parts(parts, range(first, first + n), writable=True), n, verify=True)

    def read(self, i: int, out: Buffer, offset: int = 0) -> None:
        """Fills `out` with bytes of block i from `offset` on. Not verified.

        Raises UnavailableError if the connection of the lease has ended; `out` is undefined then.
        """
        target = memoryview(out).cast("B")
        arena.copy(target, self._range(i, offset, target.nbytes))
        self._check_held()

    def release(self) -> None:
        """Ends the lease. Does nothing if it has ended."""
        self._finish()

    def _check_held(self) -> None:
        self._check_open()
        if self._lost():
            raise UnavailableError("the connection of the lease has ended", "acquire the blocks again")

    def _copy(self, first: int, parts: Parts, n: int, verify: bool) -> int:
        """Copies n blocks from `first` on into their parts. Returns the number of leading good ones."""
        if not n:
            return 0
        seeds = self._seeds(first, n) if verify else None
        return self._count_good(first, self._slots.copy_out(first, parts, seeds), n)

    def _seeds(self, first: int, n: int) -> list[int]:
        return arena.seeds(self._namespace, self._keys[first : first + n], self._slots.block_bytes)

    def _count_good(self, first: int, sums: Any, n: int) -> int:
        """Returns how many leading ones of n blocks match their checksums and have kept their slots.

        Reports the first corrupt one. `sums`: of blocks from `first` on, None: not verified.
        """
        right, current = self._slots.good(first, sums, n)
        good = right & current
        if good.all():
            return n
        bad = int(good.argmin())
        if not right[bad]:
            self._suspect(self._keys[first + bad])
        return bad


NO_ANSWER, INVALIDATED = "the daemon did not answer", "invalidated while it was written"
GIVEN_UP = "its caller has not filled it"
DENIALS = {
    NO_ANSWER: "The deadline passed. Raise `deadline_s`, or see `kvstore status` for the load of the daemon.",
    GIVEN_UP: "The `fill` of a put among several returned False.",
    INVALIDATED: "A client invalidated the block, or its namespace was deleted, before the commit.",
}
"""Reasons of the client in `PutResult.why`, with their meanings. `core.actions` has those of the daemon."""


@dataclass(slots=True)
class PutResult:
    """How many blocks were stored, were present (or being written) already, were refused, and why."""

    stored: int = 0
    present: int = 0
    denied: int = 0
    why: str = ""


class Reservation(_Grant):
    """Slots to fill. `wanted`: the positions of their keys among the keys of the call.

    `gpu`: see `DeviceReservation`.
    """

    def __init__(
        self,
        slots: Slots,
        result: PutResult,
        commit: Callable[[bytes], Any],
        keys: Sequence[Key] = (),
        namespace: bytes = b"",
        wanted: Sequence[int] = (),
        end: Callable[[], None] = _nothing,
        lease: int = 0,
        gpu: Gpu | None = None,
    ) -> None:
        """`keys`: those of the call. `namespace`: its fingerprint. `lease`: the reservation's number."""
        super().__init__(slots, keys, namespace, end, gpu)
        self.wanted = list(wanted)
        self.result = result
        self.lease = lease
        self._commit = commit
        self._checksums = memoryview(bytearray(8 * len(slots))).cast("Q")
        self._has_checksum = bytearray(len(slots))
        self._written: dict[int, tuple[int, xxh3_64]] = {}

    @property
    def blocks(self) -> list[memoryview]:
        """Writable views, one per wanted block. `commit` computes the checksums of blocks written here."""
        self._check_open()
        self._has_checksum[:] = bytes(len(self))
        self._written.clear()
        return [self._slots.view(i) for i in range(len(self))]

    def fill(self, i: int, block: Buffer) -> None:
        """Copies a whole block into slot i. The copy computes its checksum."""
        self.gather(i, [block])

    def gather(self, i: int, parts: Sequence[Buffer]) -> None:
        """Copies C-contiguous buffers, one after another, into slot i: a whole block."""
        self.gather_all([parts], i)

    def gather_all(self, parts: Blocks, first: int = 0) -> None:
        """Fills the slots from `first` on from their parts: lists of buffers, or pages of `PagedMemory`."""
        n = len(parts)
        self._check_range(first, n)
        if not n:
            return
        sums = self._copy_in(first, self._parts(parts, self.wanted[first : first + n]))
        self._checksums[first : first + n] = memoryview(sums.tobytes()).cast("Q")
        self._has_checksum[first : first + n] = b"\x01" * n

    def write(self, i: int, part: Buffer, offset: int = 0) -> None:
        """Copies `part` into slot i at byte `offset`, for instance layer by layer.

        Writes in order of offset compute the checksum during the copy; otherwise `commit` reads the slot.
        """
        source = memoryview(part).cast("B")
        target = self._range(i, offset, source.nbytes)
        self._has_checksum[i] = 0
        start = (0, xxh3_64(seed=self._seed(i)))
        written, digest = self._written.pop(i, start) if offset else start
        if written != offset:
            arena.copy(target, source)
            return
        arena.copy_digest(target, source, digest)
        if offset + source.nbytes < self._slots.block_bytes:
            self._written[i] = offset + source.nbytes, digest
        else:
            self._set_checksum(i, digest.intdigest())

    def checksums(self) -> bytes:
        """Returns the checksums of all slots as u64. Computes those that no write has computed."""
        for i, known in enumerate(self._has_checksum):
            if not known:
                self._set_checksum(i, arena.checksum(self._slots.view(i), self._seed(i)))
        return self._checksums.tobytes()

    def commit(self) -> Any:
        """Makes all blocks readable and ends the reservation; returns the PutResult (asyncio: awaited)."""
        self._check_open()
        self._end = None
        return self._commit(self.checksums())

    def abort(self) -> None:
        """Ends the reservation without storing blocks. Does nothing if it has ended."""
        self._finish()

    def _copy_in(self, first: int, parts: Parts) -> U64:
        """Fills slots from `first` on. Returns their checksums."""
        return self._slots.copy_in(first, parts, self._seeds(first, len(parts)))

    def _seeds(self, first: int, n: int) -> list[int]:
        keys = [self._keys[i] for i in self.wanted[first : first + n]]
        return arena.seeds(self._namespace, keys, self._slots.block_bytes)

    def _set_checksum(self, i: int, checksum: int) -> None:
        self._checksums[i] = checksum
        self._has_checksum[i] = 1

    def _seed(self, i: int) -> int:
        return arena.seed(self._namespace, self._keys[self.wanted[i]], self._slots.block_bytes)
