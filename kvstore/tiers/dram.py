"""The DRAM tier's memory: extents that the daemon and its clients map, headers kept true.

Extents are made and populated in a thread, one after another, so that a large tier does not delay the
start. Which block is where, the core decides; here are only bytes, headers and descriptors. Headers are true
at every moment, so that whoever takes the extents over, after a crash too, knows what is in them. Whose an
extent is, the table of owners says, which no client can reach. A number is never used again while this
process lives, and clients keep no mapping beyond that: none takes a renewed extent for the one it mapped.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.arena import HEADER, MAGIC, Extent
from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.core.events import CORRUPT, OK
from kvstore.errors import TierError
from kvstore.tiers.base import DEFAULT_OWNER, Ended, Owner, Ready
from kvstore.tiers.job_thread import JobThread
from kvstore.tiers.ownership import OwnershipTable
from kvstore.tiers.results import Done, Results, finish_for_sure, verify
from kvstore.types import ALIGN, LABEL_BYTES, MAX_KEY_BYTES, Geometry

_log = logging.getLogger(__name__)

OWNERS = "dram-owners"
"""The name under which the table of owners is kept, beside the extents."""

KIND = "dram"

_CHECK_THREADS = 4


class Pins(Protocol):
    """Whoever makes extents known to a device."""

    def pin(self, number: int, view: memoryview) -> None:
        """An extent is there."""

    def unpin(self, number: int) -> None:
        """An extent is about to be given back."""


class Keeper(Protocol):
    """Whoever keeps descriptors beyond the end of this process."""

    def keep(self, name: str, fd: int) -> None:
        """Keeps a duplicate of `fd` under a name."""

    def forget(self, name: str) -> None:
        """Closes what is kept under a name."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """What extents of an earlier process hold: slot size and last versions of each, blocks (latest first).

    `owners` has the tags of those that are cut, `headers` is (n,) of `HEADER`, `extent` and `index` say where
    the blocks are.
    """

    formats: dict[int, int]
    owners: dict[int, bytes]
    versions: dict[int, npt.NDArray[np.uint32]]
    headers: npt.NDArray[Any]
    extent: npt.NDArray[np.uint32]
    index: npt.NDArray[np.uint32]


class DramTier:
    """Up to `limit_bytes` in extents of `extent_bytes`, or of the size that inherited ones have.

    A `StorageTier`.
    """

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
        """Takes over the descriptors of `inherited`, by name; what cannot be used is forgotten.

        `pins` is told of extents on the tier's thread.
        """
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.huge = False
        self._want_huge = huge_pages
        self._keeper = keeper
        self._pins = pins
        self._extents: dict[int, Extent] = {}
        self._headers: dict[int, npt.NDArray[Any]] = {}
        self._cuts: dict[int, Geometry] = {}
        self._offsets: dict[int, int] = {}
        self._stamp = 1
        self._last = -1
        self._stop = threading.Event()
        self._worker = JobThread("kvstore-dram")
        self._checkers = ThreadPoolExecutor(_CHECK_THREADS, "kvstore-check")
        given = dict(inherited or {})
        labelled = OWNERS not in given
        self._owners = self._open_owners(given.pop(OWNERS, -1))
        for name, fd in sorted(given.items()):
            self._take_over(name, fd, labelled)
        for number in set(self._owners.numbers()) - set(self._extents):
            self._owners.remove(number)
        self._missing = limit_bytes // self.extent_bytes - len(self._extents)

    # -- start and stop

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
        """Uses an extent, or lets go of it. `labelled`: its label says how it is cut, there are no owners."""
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
            why = "it was about to change hands"
        else:
            self.extent_bytes = nbytes
            self._extents[number] = extent
            return
        self._refuse(name, why)
        extent.punch()
        extent.close()

    def _refuse(self, name: str, why: str) -> None:
        _log.warning("%s of the daemon before is not used: %s", name, why)
        if self._keeper is not None:
            self._keeper.forget(name)

    def load(self) -> Inherited:
        """What the extents that were taken over hold."""
        formats, owners, versions, found = {}, {}, {}, []
        for number in self._extents:
            size = formats[number] = self._owners.slot_bytes(number)
            if size:
                owners[number] = self._owners.owner(number)
                self._cut(number, size)
                table = self._headers[number]
                versions[number] = table["last"].copy()
                index = np.flatnonzero(_readable(table, size))
                table["version"][np.setdiff1d(np.flatnonzero(table["version"]), index)] = 0
                found.append((table[index], np.full(len(index), number, np.uint32), index.astype(np.uint32)))
        if not found:
            none = np.zeros(0, np.uint32)
            return Inherited(formats, owners, versions, np.zeros(0, HEADER), none, none)
        headers = np.concatenate([some for some, _, _ in found])
        extents = np.concatenate([some for _, some, _ in found])
        indexes = np.concatenate([some for _, _, some in found])
        order = np.argsort(headers["stamp"], kind="stable")[::-1]
        self._stamp = int(headers["stamp"].max(initial=0)) + 1
        return Inherited(formats, owners, versions, headers[order], extents[order], indexes[order])

    def start(self, ready: Ready, ended: Ended) -> None:
        """Makes the missing extents in a thread, which calls `ready` with each number, then `ended`."""
        self._worker.submit(self.make, ready, ended)
        self._worker.submit(self._pin_inherited, list(self._extents))

    def make(self, ready: Ready, ended: Ended) -> None:
        """What `start` does, here and now."""
        self._make(self._missing, ready, ended)

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        """Makes so many extents more in a thread, which calls `ready` with each number, then `ended`."""
        self._worker.submit(self._make, count, ready, ended)

    def _make(self, count: int, ready: Ready, ended: Ended) -> None:
        for _ in range(count):
            if self._stop.is_set():
                return
            try:
                number = self._new()
            except TierError as error:
                ended(error)
                return
            ready(number)
        ended(None)

    def _new(self) -> int:
        """The number of an extent that nobody has seen before. TierError if there is no memory for it."""
        number = self._last = self._last + 1
        extent = Extent.create(f"kvstore-dram-{number}", self.extent_bytes)
        try:
            extent.label[0] = (MAGIC, number, 0)
            self.huge = extent.populate(self._want_huge)
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

    def close(self) -> None:
        """Lets go of all memory; clients' mappings and whoever keeps the descriptors keep theirs alive."""
        self._stop.set()
        self._worker.close()
        self._checkers.shutdown(cancel_futures=True)
        for extent in self._extents.values():
            extent.close()
        self._owners.close()

    # -- what the core asks for

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        """Gives an extent to an owner and cuts it into empty slots."""
        self._owners.begin_cut(extent, owner.tag)
        size = Geometry(self.extent_bytes, slot_bytes, table=True).slots * HEADER.itemsize
        self._extents[extent].view[LABEL_BYTES:][:size] = bytes(size)
        self._cut(extent, slot_bytes)
        self._owners.end_cut(extent, slot_bytes)

    def renew(self, number: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        """Makes a new extent in the place of one that nobody refers to; calls `ready` with its number.

        Whoever maps the old one sees zeros by then, and it counts no more. It is unknown from now on, and no
        later daemon uses it. `ready` or `failed` comes on the tier's thread, or never after `close`.
        """
        self._worker.submit(self._renew, number, self._let_go(number), ready, failed)

    def remove(self, number: int, done: Ended) -> None:
        """Gives the memory of an extent that nobody refers to back to the kernel, as `renew` does.

        `done` comes on the tier's thread, with the reason if that failed, or never after `close`.
        """
        self._worker.submit(self._remove, number, self._let_go(number), done)

    def _let_go(self, number: int) -> Extent:
        """An extent that is unknown from now on, and that no later daemon uses."""
        extent = self._extents.pop(number)
        for known in (self._headers, self._cuts, self._offsets):
            known.pop(number, None)
        self._owners.remove(number)
        return extent

    def _pin_inherited(self, numbers: list[int]) -> None:
        for number in numbers:
            extent = self._extents.get(number)
            if extent is not None and self._pins is not None and not self._stop.is_set():
                self._pins.pin(number, extent.view)

    def _empty(self, number: int, extent: Extent) -> None:
        try:
            if self._pins is not None:
                self._pins.unpin(number)
            extent.punch()
        finally:
            extent.close()
            if self._keeper is not None:
                self._keeper.forget(_name(number))

    def _remove(self, number: int, extent: Extent, done: Ended) -> None:
        try:
            self._empty(number, extent)
        except TierError as error:
            done(error)
        else:
            done(None)

    def _renew(
        self,
        number: int,
        extent: Extent,
        ready: Ready,
        failed: Callable[[TierError], None],
    ) -> None:
        try:
            self._empty(number, extent)
            if self._stop.is_set():
                return
            renewed = self._new()
        except TierError as error:
            failed(error)
        else:
            ready(renewed)

    def _cut(self, number: int, slot_bytes: int) -> None:
        geometry = Geometry(self.extent_bytes, slot_bytes, table=True)
        self._cuts[number] = geometry
        self._offsets[number] = geometry.payload_offset
        self._headers[number] = self._extents[number].headers(geometry)

    def slots(self, where: Where) -> list[memoryview]:
        """Writable views of whole slots."""
        out = []
        for number, index in zip(where.extent.tolist(), where.index.tolist(), strict=True):
            size = self._cuts[number].slot_bytes
            start = self._offsets[number] + index * size
            out.append(self._extents[number].view[start : start + size])
        return out

    def move(self, copy: Copy, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done) -> None:
        """Copies blocks from one extent to another and verifies each. Results as in CopyDone."""
        sources, targets = self.slots(copy.source_where), self.slots(copy.target_where)
        self._check(copy.identity, targets, fingerprints, lengths, done, sources)

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        """Verifies blocks where they are. Results as in CopyDone."""
        self._check(probe.identity, self.slots(probe.where), fingerprints, lengths, done)

    def _check(
        self,
        identity: BlockIds,
        slots: list[memoryview],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
        sources: list[memoryview] | None = None,
    ) -> None:
        """Verifies slots on a thread, after a copy from `sources` into them."""
        # Looked up now: the namespace may be gone when the thread runs.
        names = [(fingerprints[n], lengths[n]) for n in identity.namespace.tolist()]

        def find(_: None) -> Results:
            good = []
            for i, slot in enumerate(slots):
                if sources is not None:
                    arena.copy(slot, sources[i])
                good.append(verify(identity, i, slot, *names[i]))
            return np.where(good, OK, CORRUPT).astype(np.uint8)

        self._checkers.submit(finish_for_sure(len(slots), find, done), None)

    def stamp(
        self,
        identity: BlockIds,
        parents: BlockIds,
        where: Where,
        version: npt.NDArray[np.uint32],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        expires: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Writes the headers of slots that have become readable, a chain in order; their version last.

        `expires` says when blocks do, in s since 1970; 0, or None for all of them: never.
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
        # Parents get the later stamps, so that latest first is also parents first.
        header["stamp"] = np.arange(self._stamp + n - 1, self._stamp - 1, -1)
        self._stamp += n
        for namespace in np.unique(identity.namespace).tolist():
            which = identity.namespace == namespace
            header["namespace"][which] = np.frombuffer(fingerprints[namespace], np.uint8)
            header["length"][which] = lengths[namespace]
        for number, which in _by_extent(where):
            table, index = self._headers[number], where.index[which]
            table[index] = header[which]
            table["version"][index] = version[which]

    def drop(self, identity: BlockIds, where: Where) -> None:
        """Marks slots as empty."""
        self.void(where)

    def void(self, where: Where) -> None:
        """Marks slots as empty."""
        for number, which in _by_extent(where):
            self._headers[number]["version"][where.index[which]] = 0

    def descriptor(self, number: int, writable: bool) -> int:
        """A descriptor of an extent to pass on; the caller closes it. KeyError for an unknown extent."""
        extent = self._extents[number]
        return os.dup(extent.fd) if writable else extent.readonly_fd()


def _name(number: int) -> str:
    """What the keeper knows an extent by."""
    return f"dram-{number:06d}"


def _readable(table: npt.NDArray[Any], size: int) -> npt.NDArray[np.bool_]:
    """Which headers name a block that fits its slot. Whether it is in there, its checksum says."""
    good: npt.NDArray[np.bool_] = (table["version"] != 0) & (table["magic"] == MAGIC)
    good &= (table["key_bytes"] >= 1) & (table["key_bytes"] <= MAX_KEY_BYTES)
    good &= (table["parent_bytes"] <= MAX_KEY_BYTES) & (table["version"] == table["last"])
    good &= (table["length"] > size - ALIGN) & (table["length"] <= size)
    return good


def _by_extent(where: Where) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Each extent number, and which slots are in it."""
    for number in np.unique(where.extent).tolist():
        yield number, where.extent == number
