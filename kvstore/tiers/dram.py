"""The DRAM tier: extents in shared memory that clients map.

One thread makes and populates extents, so a large tier does not delay the start. The next daemon takes the
extents over, after a crash too: headers say which blocks they hold, and the ownership table says which tenant
each extent belongs to. An extent number is never reused while this process lives, and clients keep no mapping
longer, so no client takes a renewed extent for the old one. Not covered here: which block lies where.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.arena import HEADER, MAGIC, Extent
from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.core.events import CORRUPT, OK
from kvstore.errors import TierError
from kvstore.tiers.base import DEFAULT_OWNER, Ended, Owner, Ready
from kvstore.tiers.job_thread import ExtentJobs
from kvstore.tiers.ownership import OwnershipTable
from kvstore.tiers.results import Done, Results, finish_for_sure, verify_all
from kvstore.tiers.slot_headers import SlotHeaders
from kvstore.tiers.slot_views import SlotViews
from kvstore.types import ALIGN, LABEL_BYTES, Geometry

_log = logging.getLogger(__name__)

OWNERS = "dram-owners"
"""The name of the ownership table's descriptor."""

KIND = "dram"

_CHECK_THREADS = 4


class Pins(Protocol):
    """Pins extents for a GPU."""

    def pin(self, number: int, view: memoryview) -> None:
        """Pins a new extent."""

    def unpin(self, number: int) -> None:
        """Unpins an extent before its memory is freed."""


class Keeper(Protocol):
    """Keeps descriptors beyond the end of this process."""

    def keep(self, name: str, fd: int) -> None:
        """Keeps a duplicate of `fd` under a name."""

    def forget(self, name: str) -> None:
        """Closes the descriptor kept under a name."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """Contents of the extents of an earlier daemon: by extent slot sizes, owners and last versions of slots.

    A slot size is 0 for an uncut extent; `owners` has the tags of cut extents. `headers` is (n,) of `HEADER`,
    latest first; `extent` and `index` are the places of these blocks.
    """

    slot_bytes: dict[int, int]
    owners: dict[int, bytes]
    versions: dict[int, npt.NDArray[np.uint32]]
    headers: npt.NDArray[Any]
    extent: npt.NDArray[np.uint32]
    index: npt.NDArray[np.uint32]


class DramTier:
    """A `StorageTier` of up to `limit_bytes`. Inherited extents determine `extent_bytes`."""

    kind = KIND
    persistent = False

    def __init__(
        self,
        limit_bytes: int,
        extent_bytes: int,
        huge_pages: bool,
        keeper: Keeper | None = None,
        inherited: Mapping[str, int] | None = None,
        pins: Pins | None = None,
    ) -> None:
        """Takes over the descriptors of `inherited`, by name. Unusable ones are forgotten.

        `pins` is called on the tier's thread.
        """
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.headers = SlotHeaders()
        self.huge = False
        self._huge_pages = huge_pages
        self._keeper = keeper
        self._pins = pins
        self._extents: dict[int, Extent] = {}
        self._cuts: dict[int, Geometry] = {}
        self._offsets: dict[int, int] = {}
        self._last = -1
        self._jobs = ExtentJobs("kvstore-dram")
        self._checkers = ThreadPoolExecutor(_CHECK_THREADS, "kvstore-check")
        given = dict(inherited or {})
        labelled = OWNERS not in given
        self._owners = self._open_owners(given.pop(OWNERS, -1))
        for name, fd in sorted(given.items()):
            self._take_over(name, fd, labelled)
        for number in set(self._owners.numbers()) - set(self._extents):
            self._owners.remove(number)
        self._missing = limit_bytes // self.extent_bytes - len(self._extents)

    # -- recovery

    def _open_owners(self, fd: int) -> OwnershipTable:
        if fd >= 0:
            try:
                return OwnershipTable(fd)
            except TierError as error:
                self._refuse(OWNERS, str(error))
        owners = OwnershipTable.create()
        if self._keeper is not None:
            self._keeper.keep(OWNERS, owners.fd)
        return owners

    def _take_over(self, name: str, fd: int, labelled: bool) -> None:
        """Uses an inherited extent, or frees it. `labelled`: there is no ownership table, labels count."""
        nbytes = os.fstat(fd).st_size
        wanted = next(iter(self._extents.values())).nbytes if self._extents else nbytes
        try:
            extent = Extent(fd, nbytes)
        except TierError as error:
            os.close(fd)
            self._refuse(name, str(error))
            return
        digits = name.rpartition("-")[2]
        number = int(digits) if digits.isdecimal() and name == _name(int(digits)) else -1
        self._last = max(self._last, number)
        size = int(extent.label["slot_bytes"][0])
        if labelled and number >= 0 and 0 < size <= nbytes and size % ALIGN == 0:
            self._owners.add(number)
            self._owners.begin_cut(number, DEFAULT_OWNER.tag)
            self._owners.end_cut(number, size)
        if extent.label["magic"][0] != MAGIC:
            why = "another version of kvstore laid it out"
        elif nbytes != wanted or (len(self._extents) + 1) * nbytes > self.limit_bytes:
            why = f"it is beyond the limit of {self.limit_bytes} bytes"
        elif not self._owners.usable(number):
            why = "it was being reassigned"
        else:
            self.extent_bytes = nbytes
            self._extents[number] = extent
            return
        self._refuse(name, why)
        extent.punch()
        extent.close()

    def _refuse(self, name: str, why: str) -> None:
        _log.warning("%s of the previous daemon is not used: %s", name, why)
        if self._keeper is not None:
            self._keeper.forget(name)

    def load(self) -> Inherited:
        """Returns the contents of the inherited extents."""
        slot_bytes, owners, versions = {}, {}, {}
        headers, extents, indexes = [np.zeros(0, HEADER)], [np.zeros(0, np.uint32)], [np.zeros(0, np.uint32)]
        for number in self._extents:
            size = slot_bytes[number] = self._owners.slot_bytes(number)
            if size:
                owners[number] = self._owners.owner(number)
                table = self._cut(number, size)
                index = self.headers.read(number, size)
                versions[number] = table["last"].copy()
                headers.append(table[index])
                extents.append(np.full(len(index), number, np.uint32))
                indexes.append(index)
        header, extent, index = np.concatenate(headers), np.concatenate(extents), np.concatenate(indexes)
        latest_first = np.argsort(header["stamp"], kind="stable")[::-1]
        return Inherited(
            slot_bytes, owners, versions, header[latest_first], extent[latest_first], index[latest_first]
        )

    # -- extents

    def start(self, ready: Ready, ended: Ended) -> None:
        """See `StorageTier.start`."""
        self._jobs.make(self._missing, self._new, ready, ended)
        self._jobs.submit(self._pin_inherited, list(self._extents))

    def _pin_inherited(self, numbers: list[int]) -> None:
        for number in numbers:
            extent = self._extents.get(number)
            if extent is not None and self._pins is not None and not self._jobs.closed:
                self._pins.pin(number, extent.view)

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        """See `StorageTier.grow`."""
        self._jobs.make(count, self._new, ready, ended)

    def _new(self) -> int:
        """Makes an extent and returns its number. TierError if memory is short."""
        number = self._last = self._last + 1
        extent = Extent.create(f"kvstore-dram-{number}", self.extent_bytes)
        try:
            extent.label[0] = (MAGIC, number, 0)
            self.huge = extent.populate(self._huge_pages)
            self._owners.add(number)
        except TierError:
            extent.close()
            raise
        if self._pins is not None:
            self._pins.pin(number, extent.view)
        self._extents[number] = extent
        if self._keeper is not None:
            self._keeper.keep(_name(number), extent.fd)
        return number

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        """Assigns an extent to an owner and cuts it into empty slots."""
        self._owners.begin_cut(extent, owner.tag)
        size = Geometry(self.extent_bytes, slot_bytes, table=True).slots * HEADER.itemsize
        self._extents[extent].view[LABEL_BYTES:][:size] = bytes(size)
        self._cut(extent, slot_bytes)
        self._owners.end_cut(extent, slot_bytes)

    def _cut(self, extent: int, slot_bytes: int) -> npt.NDArray[Any]:
        geometry = self._cuts[extent] = Geometry(self.extent_bytes, slot_bytes, table=True)
        self._offsets[extent] = geometry.payload_offset
        table = self._extents[extent].headers(geometry)
        self.headers.add(extent, table)
        return table

    def renew(self, extent: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        """Replaces an unused extent by a new one with a new number.

        Processes that map the old extent read zeros by then. The old extent is unknown from now on, and no
        later daemon uses it. `ready` or `failed` is called on the tier's thread, or never after `close`.
        """
        self._jobs.renew(partial(self._free, extent, self._forget(extent)), self._new, ready, failed)

    def remove(self, extent: int, done: Ended) -> None:
        """Frees the memory of an unused extent, as `renew` does. `done` is called on the tier's thread."""
        self._jobs.remove(partial(self._free, extent, self._forget(extent)), done)

    def _forget(self, number: int) -> Extent:
        extent = self._extents.pop(number)
        self._cuts.pop(number, None)
        self._offsets.pop(number, None)
        self.headers.discard(number)
        self._owners.remove(number)
        return extent

    def _free(self, number: int, extent: Extent) -> None:
        try:
            if self._pins is not None:
                self._pins.unpin(number)
            extent.punch()
        finally:
            extent.close()
            if self._keeper is not None:
                self._keeper.forget(_name(number))

    def descriptor(self, extent: int, writable: bool) -> int:
        """Returns a descriptor for a client. The caller closes it. KeyError for an unknown extent."""
        known = self._extents[extent]
        return os.dup(known.fd) if writable else known.readonly_fd()

    def close(self) -> None:
        """Closes all extents. Mappings of clients and kept descriptors keep their memory alive."""
        self._jobs.close()
        self._checkers.shutdown(cancel_futures=True)
        for extent in self._extents.values():
            extent.close()
        self._owners.close()

    # -- blocks

    def slots(self, where: Where) -> SlotViews:
        """Returns writable views of whole slots."""
        return SlotViews(where, self._view)

    def _view(self, place: int, count: int) -> memoryview:
        number, index = place >> 32, place & 0xFFFFFFFF
        size = self._cuts[number].slot_bytes
        start = self._offsets[number] + index * size
        return self._extents[number].view[start : start + count * size]

    def drop(self, identity: BlockIds, where: Where) -> None:
        """See `StorageTier.drop`."""
        self.headers.void(where)

    def move(self, copy: Copy, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done) -> None:
        """Copies blocks between extents and verifies each. Results as in CopyDone."""
        # Views that exist keep the memory of an extent that is closed meanwhile, here and in `probe`.
        sources, targets = list(self.slots(copy.source_where)), list(self.slots(copy.target_where))
        self._verify(copy.identity, targets, fingerprints, lengths, done, sources)

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        """See `StorageTier.probe`."""
        self._verify(probe.identity, list(self.slots(probe.where)), fingerprints, lengths, done)

    def _verify(
        self,
        identity: BlockIds,
        slots: Sequence[memoryview],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
        sources: Sequence[memoryview] | None = None,
    ) -> None:
        """Verifies slots on a thread, after a copy from `sources` into them."""
        # Copied now, because the namespace may be gone when the thread runs.
        numbers = set(identity.namespace.tolist())
        names, sizes = {n: fingerprints[n] for n in numbers}, {n: lengths[n] for n in numbers}

        def find(_: None) -> Results:
            good = verify_all(identity, range(len(slots)), slots, names, sizes, sources)
            return np.where(good, OK, CORRUPT).astype(np.uint8)

        self._checkers.submit(finish_for_sure(len(slots), find, done), None)


def _name(number: int) -> str:
    """Returns the name of an extent's kept descriptor."""
    return f"dram-{number:06d}"
