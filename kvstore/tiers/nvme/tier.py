"""The NVMe tier: blocks go to slab files, then their records to the journal, and only then do they count.

Opening reads all records back. A folder keeps the extent size that it was made with; extents beyond a
smaller limit, and records without a slab, are forgotten with a warning. Slabs are allocated in a thread, up
to the limit or to what the file system gives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.core.actions import Copy, Identity, Where
from kvstore.core.events import CORRUPT, FAILED, OK, Restore
from kvstore.errors import TierError
from kvstore.tiers.base import BlockIO, IOEngine
from kvstore.tiers.nvme.journal import Journal, Namespace
from kvstore.tiers.nvme.records import Blocks, RecordBatch
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.types import slot_bytes

_log = logging.getLogger(__name__)

Results = npt.NDArray[np.uint8]
Done = Callable[[Results], None]


class NvmeTier:
    """One folder on one device, up to `limit_bytes`. Callbacks come on threads of the tier."""

    def __init__(self, folder: Path, limit_bytes: int, extent_bytes: int, engine: IOEngine) -> None:
        self._journal = Journal.open(folder, extent_bytes)
        self.extent_bytes = self._journal.extent_bytes
        self._count = limit_bytes // self.extent_bytes
        if not self._count:
            self._journal.close()
            raise TierError(
                f"nvme.limit is below one extent of {self.extent_bytes} bytes in {folder}",
                "raise the limit, or use another folder",
            )
        self._slabs = Slabs(folder, self.extent_bytes)
        self._engine = engine
        self._formats: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._sync_extents: set[int] = set()
        self._sync_lock = threading.Lock()
        self._sync = self._sync_slabs

    @property
    def engine_name(self) -> str:
        """Which I/O engine moves the bytes, and whether past the page cache."""
        return f"{self._engine.name}, {'direct' if self._slabs.direct else 'buffered'}"

    # -- start and stop

    def load(self) -> tuple[dict[int, Namespace], dict[int, int], Restore]:
        """What the folder holds: namespaces, extents with their slot sizes, blocks (latest first)."""
        loaded = self._journal.load()
        for extent in self._slabs.stored():
            if extent >= self._count:
                self._slabs.remove(extent)
                continue
            if extent not in loaded.extents:
                continue
            try:
                self._slabs.open_existing(extent)
                self._formats[extent] = loaded.extents[extent]
            except TierError as error:
                _log.error("extent %d: %s", extent, error)
        usable = np.isin(loaded.blocks.extent, list(self._formats))
        usable &= self._fits(loaded.blocks, loaded.namespaces)
        self._forget(loaded.blocks, ~usable)
        for extent in set(loaded.extents) - set(self._formats):
            self._slabs.remove(extent)
            self._journal.delete_extent(extent)
        return loaded.namespaces, dict(self._formats), _restore(loaded.blocks, usable)

    def _fits(self, blocks: Blocks, namespaces: dict[int, Namespace]) -> npt.NDArray[np.bool_]:
        """Which records name a slot that exists, has their namespace's size, and is nobody else's."""
        sizes = {n: slot_bytes(space.layout["block_bytes"]) for n, space in namespaces.items()}
        wanted = _mapped(blocks.ns, sizes)
        found = _mapped(blocks.extent, self._formats)
        fits: npt.NDArray[np.bool_] = (found == wanted) & (found > 0)
        fits &= (blocks.index.astype(np.int64) + 1) * found <= self.extent_bytes
        place = blocks.extent.astype(np.int64) << 32 | blocks.index
        latest = np.zeros(len(fits), np.bool_)
        latest[len(fits) - 1 - np.unique(place[::-1], return_index=True)[1]] = True
        return fits & latest

    def _forget(self, blocks: Blocks, which: npt.NDArray[np.bool_]) -> None:
        if which.any():
            _log.warning("%d blocks are forgotten: their slabs are gone or beyond the limit", which.sum())
        for ns in np.unique(blocks.ns[which]).tolist():
            some = np.flatnonzero(which & (blocks.ns == ns))
            keys = [blocks.keys[i].tobytes()[: blocks.key_bytes[i]] for i in some.tolist()]
            self._journal.delete(ns, keys)

    def start(self, ready: Callable[[int], None], ended: Callable[[TierError | None], None]) -> None:
        """Allocates the slabs that are missing in a thread, which calls `ready` for each, then `ended`."""

        def make() -> None:
            for extent in range(self._count):
                if self._stop.is_set():
                    return
                if extent in self._formats:
                    continue
                try:
                    self._slabs.allocate(extent)
                except TierError as error:
                    ended(error)
                    return
                ready(extent)
            ended(None)

        self._thread = threading.Thread(target=make, name="kvstore-slabs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends what is under way, makes every record durable, closes all files."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._engine.close()
        self._journal.close()
        self._slabs.close()

    # -- what the core asks for

    def format(self, extent: int, slot_bytes: int) -> None:
        """An extent has been given to a slot size."""
        self._formats[extent] = slot_bytes
        self._journal.put_extent(extent, slot_bytes)

    def put_namespace(self, number: int, namespace: Namespace) -> None:
        """Records what a namespace number stands for."""
        self._journal.put_namespace(number, namespace)

    def drop(self, identity: Identity) -> None:
        """Deletes the records of blocks."""
        for namespace in np.unique(identity.namespace).tolist():
            which = np.flatnonzero(identity.namespace == namespace).tolist()
            self._journal.delete(namespace, [identity.key(i) for i in which])

    def write(self, copy: Copy, slots: list[memoryview], lengths: dict[int, int], done: Done) -> None:
        """Writes slots down and records them. Results as in CopyDone."""
        self._engine.submit(
            self._ios(copy.target_where, slots, write=True), partial(self._written, copy, lengths, done)
        )

    def read(
        self,
        copy: Copy,
        slots: list[memoryview],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
    ) -> None:
        """Reads blocks into slots and verifies each. Results as in CopyDone."""

        def finished(errors: list[OSError | None]) -> None:
            results = np.full(len(errors), FAILED, np.uint8)
            for i, error in enumerate(errors):
                if error is None:
                    number = int(copy.identity.namespace[i])
                    good = verify(copy.identity, i, slots[i], fingerprints[number], lengths[number])
                    results[i] = OK if good else CORRUPT
                else:
                    _log.error("read of extent %d failed: %s", copy.source_where.extent[i], error)
            done(results)

        self._engine.submit(self._ios(copy.source_where, slots, write=False), finished)

    def _ios(self, where: Where, slots: list[memoryview], write: bool) -> list[BlockIO]:
        return [
            BlockIO(self._slabs.fd(extent), index * self._formats[extent], slot, write)
            for extent, index, slot in zip(where.extent.tolist(), where.index.tolist(), slots, strict=True)
        ]

    def _written(self, copy: Copy, lengths: dict[int, int], done: Done, errors: list[OSError | None]) -> None:
        """The bytes are at the device: now the records of those that arrived."""
        good = [i for i, error in enumerate(errors) if error is None]
        for error in {str(e) for e in errors if e is not None}:
            _log.error("a write to NVMe failed: %s", error)
        extents = copy.target_where.extent[good].tolist()
        spaces = copy.identity.namespace[good].tolist()
        # Parents get the later times, so that newest first is also parents first.
        now = time.time()
        records = RecordBatch(
            spaces,
            [copy.identity.key(i) for i in good],
            [copy.parents[i] for i in good],
            extents,
            copy.target_where.index[good].tolist(),
            copy.version[good].tolist(),
            [lengths[n] for n in spaces],
            copy.identity.checksum[good].tolist(),
            [now - 1e-6 * i for i in good],
        )

        def recorded(error: Exception | None) -> None:
            results = np.full(len(errors), FAILED, np.uint8)
            if error is None:
                results[good] = OK
            else:
                _log.error("%s", error)
            done(results)

        with self._sync_lock:
            self._sync_extents.update(extents)
        self._journal.put(records, self._sync, recorded)

    def _sync_slabs(self) -> None:
        """One data sync for everything written since the last one."""
        with self._sync_lock:
            extents, self._sync_extents = self._sync_extents, set()
        try:
            self._slabs.sync(extents)
        except TierError:
            with self._sync_lock:
                self._sync_extents |= extents
            raise


def verify(identity: Identity, i: int, slot: memoryview, fingerprint: bytes, length: int) -> bool:
    """Whether a slot holds the bytes of block i."""
    seed = arena.seed(fingerprint, identity.key(i), length)
    return arena.checksum(slot[:length], seed) == int(identity.checksum[i])


def _mapped(column: npt.NDArray[np.uint32], values: dict[int, int]) -> npt.NDArray[np.int64]:
    """The value for each number of a column, 0 where there is none."""
    out = np.zeros(len(column), np.int64)
    for number, value in values.items():
        out[column == number] = value
    return out


def _restore(blocks: Blocks, usable: npt.NDArray[np.bool_]) -> Restore:
    """The usable records as an event, latest first."""
    which = np.flatnonzero(usable)[::-1]
    return Restore(
        1,
        blocks.ns[which],
        blocks.keys[which],
        blocks.key_bytes[which],
        blocks.parents[which],
        blocks.parent_bytes[which],
        blocks.extent[which],
        blocks.index[which],
        blocks.version[which],
        blocks.checksum[which],
    )
