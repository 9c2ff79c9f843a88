"""The slots of a lease or a reservation: copies between them and the caller's buffers, a batch in one call.

Not covered: who may read or fill them (`leases`), and slots in a GPU's memory (`gpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import native
from kvstore.client.parts import U64, Parts
from kvstore.cuda.device import Gpu
from kvstore.types import HBM_EXTENTS, SLOT_RECORD


class Slots:
    """Granted slots, in mapped extents. `records` has one `SLOT_RECORD` per slot."""

    def __init__(self, extents: dict[int, Any], records: bytes, slot_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.records = records
        self.in_hbm = any(number >= HBM_EXTENTS for number in extents)
        self._extents = extents
        self._wide = memoryview(records).cast("Q")
        self._slot_bytes = slot_bytes

    @classmethod
    def none(cls, block_bytes: int) -> Slots:
        """Returns no slots: those of a miss."""
        return cls({}, b"", 0, block_bytes)

    def __len__(self) -> int:
        return len(self._wide) // 3

    def checksum(self, i: int) -> int:
        """Returns the checksum that the payload of slot i must have."""
        return self._wide[3 * i + 1]

    def view(self, i: int) -> Any:
        """Returns the `block_bytes` bytes of slot i: a memoryview, or a DeviceBuffer for a slot in HBM."""
        place = self._wide[3 * i]
        extent = self._extents[place >> 32]
        return extent.payload(self._slot_bytes, place & 0xFFFFFFFF, self.block_bytes)

    def parts(self, first: int, n: int) -> Parts:
        """Returns n slots from `first` on, each as one piece of `block_bytes`."""
        places, buffers = self._records(first, n)["place"], []
        numbers, offsets = np.zeros(n, np.uint32), np.zeros(n, np.uint64)
        for at, (extent, mapped) in enumerate(self._extents.items()):
            memory, payload_offset = mapped.memory(self._slot_bytes)
            inside = places >> np.uint64(32) == extent
            numbers[inside], offsets[inside] = at, payload_offset
            buffers.append(memory)
        offsets += (places & np.uint64(0xFFFFFFFF)) * np.uint64(self._slot_bytes)
        return Parts(buffers, numbers, offsets, np.full(n, self.block_bytes, np.uint64), np.arange(n))

    def register(self, gpu: Gpu) -> None:
        """Registers the extents, which are in DRAM, with CUDA."""
        for extent in self._extents.values():
            extent.register(gpu)

    def good(
        self, first: int, sums: U64 | None, n: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Returns which of n slots have these checksums (None: all), and which have the granted version.

        Call it after the bytes were copied: a slot whose version has changed may have had other bytes.
        """
        records = self._records(first, n)
        right = np.ones(n, np.bool_) if sums is None else sums == records["checksum"]
        return right, self._versions(records) == records["version"]

    def sums(self, first: int, seeds: Sequence[int]) -> U64:
        """Returns the checksums of the bytes that are in slots from `first` on, one for each seed."""
        table, buffers = self._table(first, len(seeds))
        table["seed"] = seeds
        native.sums(buffers, table)
        return table["sum"]

    def copy_out(self, first: int, parts: Parts, seeds: Sequence[int] | None) -> U64 | None:
        """Copies slots from `first` on into parts that they fill.

        Returns the checksums of the bytes that the parts got, with a seed for each slot; None without seeds.
        """
        table, buffers = self._table(first, len(parts.ends), parts)
        if seeds is None:
            native.copy(parts.buffers, buffers, table)
            return None
        _set_seeds(table, parts, seeds)
        native.copy_out(parts.buffers, buffers, table)
        return table["sum"][parts.ends]  # type: ignore[no-any-return]

    def copy_in(self, first: int, parts: Parts, seeds: Sequence[int]) -> U64:
        """Fills slots from `first` on from parts. Returns the checksums, under a seed for each slot."""
        table, buffers = self._table(first, len(parts.ends), parts, "target", "source")
        _set_seeds(table, parts, seeds)
        native.copy_in(buffers, parts.buffers, table)
        return table["sum"][parts.ends]  # type: ignore[no-any-return]

    def _records(self, first: int, n: int) -> npt.NDArray[Any]:
        return np.frombuffer(self.records, SLOT_RECORD, n, first * SLOT_RECORD.itemsize)

    def _table(
        self, first: int, n: int, parts: Parts | None = None, here: str = "source", there: str = "target"
    ) -> tuple[npt.NDArray[Any], Sequence[Any]]:
        """Returns the pieces of n slots and their parts, and the memory in which the slots are.

        `here`, `there`: the sides of the slots and of the parts.
        """
        slots = self.parts(first, n)
        if parts is not None:
            slots = parts.within(slots)
        table = native.pieces(len(slots.lengths))
        table[here], table[f"{here}_offset"], table["length"] = slots.numbers, slots.offsets, slots.lengths
        if parts is not None:
            table[there], table[f"{there}_offset"] = parts.numbers, parts.offsets
        if len(table) > n:
            table["more"] = 1
            table["more"][slots.ends] = 0
        return table, slots.buffers

    def _versions(self, records: npt.NDArray[Any]) -> U64:
        """Returns the versions in the headers of slots; the granted ones for slots in HBM: no headers."""
        found = records["version"].astype(np.uint64)
        for extent, mapped in self._extents.items():
            if extent < HBM_EXTENTS:
                inside = records["place"] >> np.uint64(32) == extent
                indices = records["place"][inside] & np.uint64(0xFFFFFFFF)
                found[inside] = mapped.versions(self._slot_bytes, indices)
        return found


def _set_seeds(table: npt.NDArray[Any], parts: Parts, seeds: Sequence[int]) -> None:
    """Sets the seed of the first piece of each block."""
    table["seed"][parts.starts] = seeds
