"""Headers of slots in DRAM extents. They are true at every moment, so a crash leaves nothing to repair."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.arena import HEADER, MAGIC
from kvstore.columns import distinct
from kvstore.core.actions import BlockIds, Where
from kvstore.types import ALIGN, MAX_KEY_BYTES


class SlotHeaders:
    """The header tables of all extents that are cut into slots."""

    def __init__(self) -> None:
        self._tables: dict[int, npt.NDArray[Any]] = {}
        self._stamp = 1

    def add(self, extent: int, table: npt.NDArray[Any]) -> None:
        """Uses the table of an extent, shape (slots,) of `HEADER`."""
        self._tables[extent] = table

    def discard(self, extent: int) -> None:
        """Forgets the table of an extent, if known."""
        self._tables.pop(extent, None)

    def write(
        self,
        identity: BlockIds,
        parents: BlockIds,
        where: Where,
        version: npt.NDArray[np.uint32],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        expires: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Writes the headers of slots that become readable, version last. Blocks are in chain order.

        `expires` is in s since 1970; 0, or None for all, means never.
        """
        n = len(identity)
        header = np.zeros(n, HEADER)
        header["magic"] = MAGIC
        header["key"] = identity.words.view(np.uint8)
        header["key_bytes"] = identity.key_bytes
        header["parent"] = parents.words.view(np.uint8)
        header["parent_bytes"] = parents.key_bytes
        header["checksum"] = identity.checksum
        header["last"] = version
        header["expires"] = 0.0 if expires is None else expires
        # Parents get later stamps than their children, so that latest first means parents first.
        header["stamp"] = np.arange(self._stamp + n - 1, self._stamp - 1, -1)
        self._stamp += n
        for namespace in distinct(identity.namespace):
            which = identity.namespace == namespace
            header["namespace"][which] = np.frombuffer(fingerprints[namespace], np.uint8)
            header["length"][which] = lengths[namespace]
        places = where.index
        for extent, which in _by_extent(where):
            table, index = self._tables[extent], places[which]
            table[index] = header[which]
            table["version"][index] = version[which]

    def void(self, where: Where) -> None:
        """Marks slots as empty."""
        places = where.index
        for extent, which in _by_extent(where):
            self._tables[extent]["version"][places[which]] = 0

    def read(self, extent: int, slot_bytes: int) -> npt.NDArray[np.uint32]:
        """Returns the indexes of readable slots. Voids headers that name no block which fits its slot."""
        table = self._tables[extent]
        index = np.flatnonzero(_readable(table, slot_bytes))
        table["version"][np.setdiff1d(np.flatnonzero(table["version"]), index)] = 0
        # Later headers get later stamps.
        self._stamp = max(self._stamp, int(table["stamp"][index].max(initial=0)) + 1)
        return index.astype(np.uint32)


def _readable(table: npt.NDArray[Any], slot_bytes: int) -> npt.NDArray[np.bool_]:
    """Returns which headers name a block that fits its slot. Only a checksum proves the slot's contents."""
    good: npt.NDArray[np.bool_] = (table["version"] != 0) & (table["magic"] == MAGIC)
    good &= (table["key_bytes"] >= 1) & (table["key_bytes"] <= MAX_KEY_BYTES)
    good &= (table["parent_bytes"] <= MAX_KEY_BYTES) & (table["version"] == table["last"])
    good &= (table["length"] > slot_bytes - ALIGN) & (table["length"] <= slot_bytes)
    return good


def _by_extent(where: Where) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yields each extent and which slots lie in it. A batch that was evicted lies in many extents."""
    extents = where.extent
    order = np.argsort(extents, kind="stable")
    ordered = extents[order]
    ends = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for first, end in pairwise([0, *ends.tolist(), len(order)]):
        if end > first:  # not of an empty batch
            yield int(ordered[first]), order[first:end]
