"""The owner and slot size of each DRAM extent, in memory that no client maps.

Clients with write access can change every byte of an extent, labels too. So this table decides the owner of
an extent after a restart. Each step is one aligned store: a kill between two steps leaves an extent that is
cut, or one that is unusable.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kvstore.arena import Extent
from kvstore.errors import TierError

_MAGIC = int.from_bytes(b"KVOWNS01", "little")
_NBYTES = 1 << 20
ROW = np.dtype({"names": ["number", "slot_bytes", "owner"], "formats": ["<u8", "<u8", ("u1", (16,))]})
"""One extent: its number, its slot size (see below) and its owner."""
_FREE, _UNCUT, _CUTTING = range(3)
"""Values of `slot_bytes` that are no size: no extent; an unassigned extent; an extent being cut."""


class OwnershipTable:
    """A row for each extent. The first row has the magic number."""

    def __init__(self, fd: int) -> None:
        """Takes over the table of an earlier daemon. TierError if it is invalid or cannot be mapped."""
        try:
            if os.fstat(fd).st_size != _NBYTES:
                raise TierError("the table of owners has another size")
            self._extent = Extent(fd, _NBYTES)
        except TierError:
            os.close(fd)
            raise
        rows = np.frombuffer(self._extent.view, ROW)
        if rows["number"][0] != _MAGIC:
            self._extent.close()
            raise TierError("another version of kvstore laid out the table of owners")
        self._rows: np.ndarray[Any, Any] = rows[1:]
        used = np.flatnonzero(self._rows["slot_bytes"] != _FREE).tolist()
        self._at = {int(self._rows["number"][i]): i for i in used}

    @classmethod
    def create(cls) -> OwnershipTable:
        """Returns an empty table. TierError if memory is short."""
        extent = Extent.create("kvstore-owners", _NBYTES)
        np.frombuffer(extent.view, ROW, count=1)["number"] = _MAGIC
        fd = os.dup(extent.fd)
        extent.close()
        return cls(fd)

    @property
    def fd(self) -> int:
        """The table's descriptor, to be kept."""
        return self._extent.fd

    def numbers(self) -> list[int]:
        """Returns the numbers of all extents."""
        return list(self._at)

    def add(self, number: int) -> None:
        """Adds an unassigned extent. TierError if the table is full."""
        free = self._rows["slot_bytes"] == _FREE
        row = int(free.argmax())
        if not free[row]:
            raise TierError(f"more than {len(free)} extents", "give the tier less DRAM, or larger extents")
        self._rows["number"][row] = number
        self._rows["slot_bytes"][row] = _UNCUT
        self._at[number] = row

    def remove(self, number: int) -> None:
        """Removes an extent: no later daemon uses it."""
        self._rows["slot_bytes"][self._at.pop(number)] = _FREE

    def begin_cut(self, number: int, owner: bytes) -> None:
        """Assigns an extent to an owner (16 bytes). The extent is unusable until `end_cut`."""
        row = self._at[number]
        self._rows["slot_bytes"][row] = _CUTTING
        self._rows["owner"][row] = np.frombuffer(owner, np.uint8)

    def end_cut(self, number: int, slot_bytes: int) -> None:
        """Marks an extent as cut and usable."""
        self._rows["slot_bytes"][self._at[number]] = slot_bytes

    def usable(self, number: int) -> bool:
        """Returns whether an extent is known and not half cut."""
        return number in self._at and int(self._rows["slot_bytes"][self._at[number]]) != _CUTTING

    def slot_bytes(self, number: int) -> int:
        """Returns the slot size of an extent, 0 if it is unassigned."""
        size = int(self._rows["slot_bytes"][self._at[number]])
        return 0 if size == _UNCUT else size

    def owner(self, number: int) -> bytes:
        """Returns the owner of a cut extent."""
        return bytes(self._rows["owner"][self._at[number]])

    def close(self) -> None:
        """Closes the table. A kept descriptor keeps its memory alive."""
        self._extent.close()
