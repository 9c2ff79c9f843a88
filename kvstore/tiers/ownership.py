"""Whose the extents in memory are and how they are cut, in memory that no client ever maps.

Clients that write map extents whole and can change every byte of them, their labels too. So what decides,
after a restart, who gets an extent is kept here, by numbers that come from whoever keeps the descriptors.
Each step is one aligned store: a kill between two leaves an extent that is cut, or one that nobody may use.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kvstore.arena import Extent
from kvstore.errors import TierError

_MAGIC = int.from_bytes(b"KVOWNS01", "little")
_NBYTES = 1 << 20
_ROW = np.dtype({"names": ["number", "slot_bytes", "owner"], "formats": ["<u8", "<u8", ("u1", (16,))]})
_FREE, _UNCUT, _CUTTING = range(3)
"""What `slot_bytes` says besides a size: no extent; one that was nobody's yet; one that is being cut."""


class OwnershipTable:
    """A row for each extent. The first row has the magic number in place of an extent's."""

    def __init__(self, fd: int) -> None:
        """Takes over the table of an earlier daemon. TierError if it is none, or cannot be mapped."""
        try:
            if os.fstat(fd).st_size != _NBYTES:
                raise TierError("the table of owners has another size")
            self._extent = Extent(fd, _NBYTES)
        except TierError:
            os.close(fd)
            raise
        rows = np.frombuffer(self._extent.view, _ROW)
        if rows["number"][0] != _MAGIC:
            self._extent.close()
            raise TierError("another version of kvstore laid out the table of owners")
        self._rows: np.ndarray[Any, Any] = rows[1:]
        used = np.flatnonzero(self._rows["slot_bytes"] != _FREE).tolist()
        self._at = {int(self._rows["number"][i]): i for i in used}

    @classmethod
    def create(cls) -> OwnershipTable:
        """An empty one. TierError if there is no memory for it."""
        extent = Extent.create("kvstore-owners", _NBYTES)
        np.frombuffer(extent.view, _ROW, count=1)["number"] = _MAGIC
        fd = os.dup(extent.fd)
        extent.close()
        return cls(fd)

    @property
    def fd(self) -> int:
        """The descriptor to keep."""
        return self._extent.fd

    def numbers(self) -> list[int]:
        """All extents."""
        return list(self._at)

    def add(self, number: int) -> None:
        """A new extent, which is nobody's. TierError if there is no room for more."""
        free = self._rows["slot_bytes"] == _FREE
        row = int(free.argmax())
        if not free[row]:
            raise TierError(f"more than {len(free)} extents", "give the tier less DRAM, or larger extents")
        self._rows["number"][row] = number
        self._rows["slot_bytes"][row] = _UNCUT
        self._at[number] = row

    def remove(self, number: int) -> None:
        """No daemon may use this extent any more."""
        self._rows["slot_bytes"][self._at.pop(number)] = _FREE

    def begin_cut(self, number: int, owner: bytes) -> None:
        """From now on the extent is its owner's (16 bytes); nothing in it counts."""
        row = self._at[number]
        self._rows["slot_bytes"][row] = _CUTTING
        self._rows["owner"][row] = np.frombuffer(owner, np.uint8)

    def end_cut(self, number: int, slot_bytes: int) -> None:
        """It is cut."""
        self._rows["slot_bytes"][self._at[number]] = slot_bytes

    def usable(self, number: int) -> bool:
        """Whether an extent can be used: not if it is unknown, was to be renewed, or is half cut."""
        return number in self._at and int(self._rows["slot_bytes"][self._at[number]]) != _CUTTING

    def slot_bytes(self, number: int) -> int:
        """How an extent is cut; 0 if it is not."""
        size = int(self._rows["slot_bytes"][self._at[number]])
        return 0 if size == _UNCUT else size

    def owner(self, number: int) -> bytes:
        """Whose a cut extent is."""
        return bytes(self._rows["owner"][self._at[number]])

    def close(self) -> None:
        """Lets go of it; whoever keeps its descriptor keeps it alive."""
        self._extent.close()
