"""The DRAM tier's memory: extents that the daemon and its clients map, headers kept true.

Extents are made and populated in a thread, one after another, so that a large tier does not delay the start.
Which block is where, the core decides; here are only bytes, headers and descriptors.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np

from kvstore.arena import HEADER, MAGIC, Extent
from kvstore.core.actions import Identity, Where
from kvstore.errors import TierError
from kvstore.types import Geometry

_log = logging.getLogger(__name__)


class DramTier:
    """Up to `limit_bytes` in extents of `extent_bytes`."""

    def __init__(self, limit_bytes: int, extent_bytes: int, huge_pages: bool) -> None:
        self.extent_bytes = extent_bytes
        self.huge = False
        self._count = limit_bytes // extent_bytes
        self._want_huge = huge_pages
        self._extents: dict[int, Extent] = {}
        self._headers: dict[int, np.ndarray[tuple[int], np.dtype[np.void]]] = {}
        self._cuts: dict[int, Geometry] = {}
        self._offsets: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, ready: Callable[[int], None], ended: Callable[[TierError | None], None]) -> None:
        """Makes the extents in a thread, which calls `ready` with the number of each, then `ended`."""

        def make() -> None:
            for number in range(self._count):
                if self._stop.is_set():
                    return
                try:
                    extent = Extent.create(f"kvstore-dram-{number}", self.extent_bytes)
                    self._extents[number] = extent
                    self.huge = extent.populate(self._want_huge)
                except TierError as error:
                    ended(error)
                    return
                ready(number)
            ended(None)

        self._thread = threading.Thread(target=make, name="kvstore-dram", daemon=True)
        self._thread.start()

    def format(self, number: int, slot_bytes: int) -> None:
        """Cuts an extent into slots; none of them holds anything."""
        geometry = Geometry(self.extent_bytes, slot_bytes, table=True)
        extent = self._extents[number]
        extent.view[: geometry.payload_offset] = bytes(geometry.payload_offset)
        self._cuts[number] = geometry
        self._offsets[number] = geometry.payload_offset
        self._headers[number] = extent.headers(geometry)

    def slots(self, where: Where) -> list[memoryview]:
        """Writable views of whole slots."""
        out = []
        for number, index in zip(where.extent.tolist(), where.index.tolist(), strict=True):
            size = self._cuts[number].slot_bytes
            start = self._offsets[number] + index * size
            out.append(self._extents[number].view[start : start + size])
        return out

    def stamp(
        self,
        identity: Identity,
        where: Where,
        version: np.ndarray[tuple[int], np.dtype[np.uint32]],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
    ) -> None:
        """Writes the headers of slots that have become readable; their version last."""
        header = np.zeros(len(identity), HEADER)
        header["magic"] = MAGIC
        header["key"] = identity.words.view(np.uint8)
        header["key_bytes"] = identity.key_bytes
        header["checksum"] = identity.checksum
        for namespace in np.unique(identity.namespace).tolist():
            which = identity.namespace == namespace
            header["namespace"][which] = np.frombuffer(fingerprints[namespace], np.uint8)
            header["length"][which] = lengths[namespace]
        for number, which in _by_extent(where):
            table, index = self._headers[number], where.index[which]
            table[index] = header[which]
            table["version"][index] = version[which]

    def void(self, where: Where) -> None:
        """Nothing is readable in these slots any longer."""
        for number, which in _by_extent(where):
            self._headers[number]["version"][where.index[which]] = 0

    def descriptor(self, number: int, writable: bool) -> int:
        """A descriptor of an extent to pass on; the caller closes it. KeyError for an unknown extent."""
        extent = self._extents[number]
        return os.dup(extent.fd) if writable else extent.readonly_fd()

    def close(self) -> None:
        """Lets go of all memory; clients' mappings keep theirs alive."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for extent in self._extents.values():
            extent.close()


def _by_extent(where: Where) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Each extent number, and which slots are in it."""
    for number in np.unique(where.extent).tolist():
        yield number, where.extent == number
