"""The NVMe tier: one folder with slab files, records and data keys.

Blocks are written in `writes.py` and read in `reads.py`. Not covered here: which block lies where, which the
core decides.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from kvstore.core.actions import BlockIds, Probe, Where, places
from kvstore.core.events import Restore
from kvstore.errors import TierError
from kvstore.tiers.base import DEFAULT_OWNER, Ended, IOEngine, Owner, Ready
from kvstore.tiers.job_thread import ExtentJobs
from kvstore.tiers.nvme.encryption import TenantKeys
from kvstore.tiers.nvme.io.bounce_buffers import BounceBufferEngine
from kvstore.tiers.nvme.journal import Journal, Namespace
from kvstore.tiers.nvme.key_files import MasterKey
from kvstore.tiers.nvme.reads import BlockReader
from kvstore.tiers.nvme.recovery import Recovered, recover
from kvstore.tiers.nvme.slabs import Slabs, sync_folder
from kvstore.tiers.nvme.slots import SlotMap
from kvstore.tiers.nvme.writes import BlockWriter
from kvstore.tiers.results import Done

_log = logging.getLogger(__name__)

KIND = "nvme"

REMOVED = "removed"
"""File in a folder that was removed from a running daemon: a restart does not use the folder."""


class NvmeTier:
    """One folder on one device, up to `limit_bytes`: a `StorageTier`.

    Its parts are public: `journal`, `keys`, `slabs`, `engine`, `reader` and `writer`.
    """

    kind = KIND
    persistent = True

    def __init__(
        self,
        journal: Journal,
        slabs: Slabs,
        engine: IOEngine,
        limit_bytes: int,
        keys: TenantKeys,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes over its parts. `clock` returns s since 1970. Most callers use `open`."""
        self.limit_bytes = limit_bytes
        self.extent_bytes = journal.extent_bytes
        self.journal = journal
        self.slabs = slabs
        self.keys = keys
        self.engine = BounceBufferEngine(engine)
        self._slots = SlotMap(slabs, self.engine)
        self.reader = BlockReader(self._slots, self.engine, slabs.folder)
        self.writer = BlockWriter(self._slots, slabs, journal, self.engine, clock)
        self._count = limit_bytes // self.extent_bytes
        self._missing = list(range(self._count))
        self._taken = set(self._missing)
        self._jobs = ExtentJobs("kvstore-slabs")

    @classmethod
    def open(
        cls,
        folder: Path,
        limit_bytes: int,
        extent_bytes: int,
        engine: IOEngine,
        master: MasterKey | None = None,
        encrypt: Mapping[str, bool] = MappingProxyType({}),
    ) -> NvmeTier:
        """Opens the tier in a folder, and makes the folder if absent. An old folder keeps its extent size.

        `master` and `encrypt` are those of `TenantKeys`. TierError with the reason.
        """
        keys = TenantKeys(folder, master, encrypt)
        journal = Journal.open(folder, extent_bytes)
        try:
            if limit_bytes < journal.extent_bytes:
                raise TierError(
                    f"nvme.limit is below one extent of {journal.extent_bytes} bytes in {folder}",
                    "raise the limit, or use another folder",
                )
            slabs = Slabs(folder, journal.extent_bytes, engine.release)
            return cls(journal, slabs, engine, limit_bytes, keys)
        except BaseException:
            journal.close()
            raise

    @property
    def engine_name(self) -> str:
        """The I/O engine, and whether its I/O is direct or buffered."""
        return f"{self.engine.name}, {'direct' if self.slabs.direct else 'buffered'}"

    # -- start and stop

    def load(self, keep: bool = True) -> Recovered:
        """Returns the blocks, namespaces and extents on record.

        Without `keep`, blocks and namespaces are forgotten and only extents are returned. These must be
        renewed, because records may still name their blocks.
        """
        recovered = recover(self.journal, self.slabs, self._count, self.keys)
        if not keep:
            self.forget(recovered.restore)
            for number in recovered.namespaces:
                self.forget_namespace(number)
            none = np.zeros(len(recovered.stored_at), np.bool_)
            nothing, ages = recovered.restore.only(none), recovered.stored_at[none]
            recovered = replace(recovered, namespaces={}, restore=nothing, stored_at=ages)
        self._slots.slot_bytes = dict(recovered.slot_bytes)
        self._taken = set(recovered.slot_bytes)
        self._missing = self._take(self._count - len(self._taken))
        self._remove_leftovers()
        self.writer.latest = recovered.latest
        for number in np.unique(recovered.restore.namespace).tolist():
            self._slots.set_namespace(number, recovered.namespaces[number], self.keys)
        return recovered

    def begin_empty(self, found: Recovered) -> None:
        """Replaces `start` after a `load` without blocks: the tier has no extents before `grow`.

        Removes all slabs, and all namespaces, because their readers were set by an earlier daemon.
        """
        self._taken.clear()
        self._missing = []
        self._remove_leftovers()
        for number in found.namespaces:
            self.forget_namespace(number)

    def start(self, ready: Ready, ended: Ended) -> None:
        """See `StorageTier.start`."""
        self._make(self._missing, ready, ended)

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        """See `StorageTier.grow`."""
        self._make(self._take(count), ready, ended)

    def _make(self, extents: list[int], ready: Ready, ended: Ended) -> None:
        self._jobs.make(len(extents), partial(self._allocate, iter(extents)), ready, ended)

    def _take(self, count: int) -> list[int]:
        """Takes the lowest free extent numbers."""
        free = (number for number in itertools.count() if number not in self._taken)
        taken = list(itertools.islice(free, count))
        self._taken.update(taken)
        return taken

    def _remove_leftovers(self) -> None:
        """Removes slabs that a crash or a higher limit left."""
        for extent in set(self.slabs.stored()) - self._taken:
            self.slabs.remove(extent)

    def _allocate(self, extents: Iterator[int]) -> int:
        """Allocates the next extent. After a TierError, none of these extents has a slab."""
        extent = next(extents)
        try:
            self.slabs.allocate(extent)
        except TierError:
            for given_up in (extent, *extents):
                try:
                    self.slabs.remove(given_up)
                    self._taken.discard(given_up)
                except TierError as error:
                    _log.error("%s", error)
            raise
        return extent

    def close(self) -> None:
        """Ends the work under way, makes every record durable and closes all files."""
        self._jobs.close()
        self.keys.close()
        self.engine.close()
        self.journal.close()
        self.slabs.close()

    def retire(self) -> Path:
        """Notes in the folder of an empty device that it was removed, and closes it. Returns the folder."""
        folder = self.slabs.folder.parent
        try:
            (folder / REMOVED).touch(mode=0o600)
            sync_folder(folder)
        except OSError as error:
            _log.error("%s was removed, which cannot be noted there: %s", folder, error)
        self.close()
        return folder

    def take_back(self) -> None:
        """Deletes the note of an earlier `retire`, durably. TierError if it cannot."""
        folder = self.slabs.folder.parent
        try:
            (folder / REMOVED).unlink(missing_ok=True)
            sync_folder(folder)
        except OSError as error:
            raise TierError(f"cannot use {folder}: {error.strerror}") from error

    # -- extents and blocks

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        """Assigns an extent to a tenant and cuts it into slots. Records say what the slots hold."""
        self._slots.slot_bytes[extent] = slot_bytes
        self.journal.put_extent(extent, slot_bytes, owner.tenant)

    def renew(self, extent: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        """Replaces the slab of an unused extent after its records are durably deleted.

        `ready` or `failed` is called on a thread of the tier, or never after `close`.
        """

        def new() -> int:
            self.slabs.allocate(extent)
            return extent

        empty = partial(self.slabs.remove, extent)
        self._delete_records(extent, failed, lambda: self._jobs.renew(empty, new, ready, failed))

    def remove(self, extent: int, done: Ended) -> None:
        """Removes the slab of an unused extent after its records are durably deleted.

        `done` is called on a thread of the tier, or never after `close`.
        """

        def empty() -> None:
            self.slabs.remove(extent)
            self._taken.discard(extent)

        self._delete_records(extent, done, lambda: self._jobs.remove(empty, done))

    def _delete_records(
        self, extent: int, failed: Callable[[TierError], None], then: Callable[[], None]
    ) -> None:
        def deleted(error: Exception | None) -> None:
            if error is None:
                then()
            else:
                failed(TierError(f"extent {extent} cannot be taken off the record: {error}"))

        self._slots.slot_bytes.pop(extent, None)  # absent if the extent was never cut
        self.writer.delete_extent(extent, deleted)

    def drop(self, identity: BlockIds, where: Where) -> None:
        """See `StorageTier.drop`."""
        self.writer.drop(identity, where)

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        """See `StorageTier.probe`."""
        self.reader.probe(probe, fingerprints, lengths, done)

    # -- records

    def forget(self, blocks: Restore) -> None:
        """Deletes the records of recovered blocks."""
        self.journal.delete(places(blocks.extent, blocks.index))

    def put_namespace(self, number: int, namespace: Namespace) -> None:
        """Records the namespace of a number, encrypted if its tenant is.

        TierError if such a tenant has no data key yet and none can be written.
        """
        namespace = replace(namespace, encrypted=self.keys.encrypts(namespace.tenant))
        self._slots.set_namespace(number, namespace, self.keys)
        self.journal.put_namespace(number, namespace)

    def forget_namespace(self, number: int) -> None:
        """Deletes the record of a namespace, after all earlier changes. Its blocks must be dropped."""
        self._slots.forget_namespace(number)
        self.journal.delete_namespace(number)
