"""The NVMe tier: blocks go to slab files, then their records to the journal, and only then do they count.

A crash at any moment leaves each slot without a record, or with one that its bytes prove: a record is written
after its bytes are on the device, and a slot is written again only after its old record is gone from there.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.core.events import CORRUPT, FAILED, OK, Restore
from kvstore.cuda.checksums import checksums
from kvstore.cuda.device import CudaError, DeviceBuffer
from kvstore.errors import TierError
from kvstore.tiers.base import DEFAULT_OWNER, BlockIO, Ended, IOEngine, Memory, Owner, Ready
from kvstore.tiers.job_thread import JobThread
from kvstore.tiers.nvme.bounce_buffers import BounceBufferEngine
from kvstore.tiers.nvme.encryption import BlockCipher, TenantKeys
from kvstore.tiers.nvme.journal import Journal, Namespace
from kvstore.tiers.nvme.key_files import MasterKey
from kvstore.tiers.nvme.records import RecordBatch
from kvstore.tiers.nvme.recovery import Recovered, recover
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.tiers.nvme.transforms import DeviceIO, EncryptedIO, TagError
from kvstore.tiers.results import Done, Results, finish_for_sure, verify

_log = logging.getLogger(__name__)

KIND = "nvme"


class NvmeTier:
    """One folder on one device, up to `limit_bytes`: a `StorageTier`."""

    kind = KIND
    persistent = True

    def __init__(
        self,
        journal: Journal,
        slabs: Slabs,
        engine: IOEngine,
        limit_bytes: int,
        clock: Callable[[], float] = time.time,
        seals: TenantKeys | None = None,
    ) -> None:
        """Takes over its parts, `clock` (s since 1970) for what records say. Most call `open`.

        Without `seals` nothing is encrypted, and what is cannot be read.
        """
        self.limit_bytes = limit_bytes
        self.extent_bytes = journal.extent_bytes
        self._count = limit_bytes // self.extent_bytes
        self._journal = journal
        self._slabs = slabs
        self._engine = BounceBufferEngine(engine)
        self._seals = seals
        self._seal_of: dict[int, BlockCipher] = {}
        self._clock = clock
        self._latest = 0.0
        self._formats: dict[int, int] = {}
        self._missing = list(range(self._count))
        self._taken = set(self._missing)
        self._stop = threading.Event()
        self._worker = JobThread("kvstore-slabs")
        self._key_worker = JobThread("kvstore-keys")
        self._lock = threading.Lock()
        self._sync_extents: set[int] = set()
        self._sync = self._sync_slabs
        self._writing: dict[int, bool] = {}
        self._unsettled: dict[int, int] = {}
        self._drops = itertools.count(1)

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
        """The tier in a folder, made if absent; an old one keeps its extents' size. TierError: why not.

        `encrypt` says of every configured tenant whether it is encrypted, `master` by which key: see
        `TenantKeys`.
        """
        seals = TenantKeys(folder, master, encrypt)
        journal = Journal.open(folder, extent_bytes)
        try:
            if limit_bytes < journal.extent_bytes:
                raise TierError(
                    f"nvme.limit is below one extent of {journal.extent_bytes} bytes in {folder}",
                    "raise the limit, or use another folder",
                )
            slabs = Slabs(folder, journal.extent_bytes, engine.release)
            return cls(journal, slabs, engine, limit_bytes, seals=seals)
        except BaseException:
            journal.close()
            raise

    @property
    def engine_name(self) -> str:
        """Which I/O engine moves the bytes, and whether past the page cache."""
        return f"{self._engine.name}, {'direct' if self._slabs.direct else 'buffered'}"

    @property
    def problems(self) -> list[str]:
        """What was wrong with the folder when it was opened."""
        return self._journal.problems

    @property
    def generation(self) -> int:
        """Counts on whenever something is forgotten: a device with less has missed that."""
        return self._journal.generation

    def put_generation(self, generation: int) -> None:
        """Records it, no later than what is recorded from now on."""
        self._journal.put_generation(generation)

    # -- start and stop

    def load(self, keep: bool = True) -> Recovered:
        """What the folder holds; unless it is kept, only its extents, and the rest is forgotten.

        Such an extent is to be made anew (`renew`): until then, records may still speak of it.
        """
        recovered = recover(self._journal, self._slabs, self._count, self._seals)
        if not keep:
            self.forget(recovered.restore)
            for number in recovered.namespaces:
                self.forget_namespace(number)
            none = np.zeros(len(recovered.stored_at), np.bool_)
            nothing, ages = recovered.restore.only(none), recovered.stored_at[none]
            recovered = replace(recovered, namespaces={}, restore=nothing, stored_at=ages)
        self._formats = dict(recovered.formats)
        lacking = self._count - len(self._formats)
        self._taken = set(self._formats)
        self._missing = self._take(lacking)
        self._remove_leftovers()
        self._latest = recovered.latest
        for number in np.unique(recovered.restore.namespace).tolist():
            self._set_seal(number, recovered.namespaces[number])
        return recovered

    def begin_empty(self, found: Recovered) -> None:
        """After a `load` that found no blocks, instead of `start`: no extent is there before `grow`.

        Slabs that nobody had go; so do namespaces: who may read them was said by a daemon before.
        """
        self._taken.clear()
        self._missing = []
        self._remove_leftovers()
        for number in found.namespaces:
            self.forget_namespace(number)

    def start(self, ready: Ready, ended: Ended) -> None:
        """Allocates the slabs that are missing in a thread, which calls `ready` for each, then `ended`."""
        self._worker.submit(self.allocate, ready, ended)

    def allocate(self, ready: Ready, ended: Ended) -> None:
        """What `start` does, here and now."""
        self._allocate(self._missing, ready, ended)

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        """Allocates so many slabs more in a thread, which calls `ready` for each, then `ended`."""
        self._worker.submit(self._allocate, self._take(count), ready, ended)

    def free_bytes(self) -> int:
        """What the folder's file system has free."""
        return self._slabs.free_bytes()

    def _take(self, count: int) -> list[int]:
        """The lowest numbers that no extent has, which these have from now on."""
        free = (number for number in itertools.count() if number not in self._taken)
        taken = list(itertools.islice(free, count))
        self._taken.update(taken)
        return taken

    def _remove_leftovers(self) -> None:
        """Slabs that a crash left, or a higher limit."""
        for extent in set(self._slabs.stored()) - self._taken:
            self._slabs.remove(extent)

    def _allocate(
        self,
        extents: list[int],
        ready: Ready,
        ended: Ended,
    ) -> None:
        for i, extent in enumerate(extents):
            if self._stop.is_set():
                return
            try:
                self._slabs.allocate(extent)
            except TierError as error:
                self._give_up(extents[i:])
                ended(error)
                return
            ready(extent)
        ended(None)

    def _give_up(self, extents: list[int]) -> None:
        """Slabs that are not to be: what a crash left there would take room."""
        for extent in extents:
            try:
                self._slabs.remove(extent)
                self._taken.discard(extent)
            except TierError as error:
                _log.error("%s", error)

    def close(self) -> None:
        """Ends what is under way, makes every record durable, closes all files."""
        self._stop.set()
        self._worker.close()
        self._key_worker.close()
        self._engine.close()
        self._journal.close()
        self._slabs.close()

    def register(self, buffer: DeviceBuffer) -> None:
        """Memory of a GPU from and to which blocks will move: a whole allocation."""
        self._engine.register(buffer)

    def unregister(self, buffer: DeviceBuffer) -> None:
        """Such memory is about to be freed, and nothing of it is under way."""
        self._engine.unregister(buffer)

    def forget(self, blocks: Restore) -> None:
        """Deletes the records of blocks that nobody can use."""
        for namespace in np.unique(blocks.namespace).tolist():
            some = np.flatnonzero(blocks.namespace == namespace).tolist()
            keys = [blocks.keys[i].tobytes()[: blocks.key_bytes[i]] for i in some]
            self._journal.delete(namespace, keys)

    # -- what the core asks for

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        """Gives an extent to a tenant and cuts it into slots. What the slots hold, records say."""
        self._formats[extent] = slot_bytes
        self._journal.put_extent(extent, slot_bytes, owner.tenant)

    def renew(self, extent: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        """Makes an extent that nobody refers to anew, of zeros; calls `ready` with its number.

        Its slab is removed when no record speaks of it any more: after every deletion so far. `ready` or
        `failed` comes on a thread of the tier, or never after `close`.
        """
        self._forget(extent, failed, self._renew, ready, failed)

    def remove(self, extent: int, done: Ended) -> None:
        """Removes the slab of an extent that nobody refers to, when no record speaks of it any more.

        `done` comes on a thread of the tier, with the reason if that failed, or never after `close`.
        """
        self._forget(extent, done, self._remove, done)

    def _forget(
        self, extent: int, failed: Callable[[TierError], None], then: Callable[..., None], *more: Any
    ) -> None:
        """Takes an extent off the record; `then` happens on the worker's thread when that is durable."""

        def forgotten(error: Exception | None) -> None:
            # On the journal's thread, where the slabs are synced: no sync of this one is under way.
            with self._lock:
                self._sync_extents.discard(extent)
                self._unsettled.pop(extent, None)
            if error is None:
                self._worker.submit(then, extent, *more)
            else:
                failed(TierError(f"extent {extent} cannot be taken off the record: {error}"))

        self._formats.pop(extent, None)  # it may be uncut
        self._journal.delete_extent(extent)
        self._journal.when_durable(forgotten)

    def _renew(self, extent: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        try:
            self._slabs.remove(extent)
            if self._stop.is_set():
                return
            self._slabs.allocate(extent)
        except TierError as error:
            failed(error)
        else:
            ready(extent)

    def _remove(self, extent: int, done: Ended) -> None:
        try:
            self._slabs.remove(extent)
        except TierError as error:
            done(error)
        else:
            self._taken.discard(extent)
            done(None)

    def forget_namespace(self, number: int) -> None:
        """Deletes what is on record of a namespace, after what was asked for before. Its blocks are gone."""
        self._seal_of.pop(number, None)
        self._journal.delete_namespace(number)

    def put_namespace(self, number: int, namespace: Namespace) -> None:
        """Records what a namespace number stands for, sealed if its tenant is encrypted.

        TierError if such a tenant has no data key yet and none can be written.
        """
        namespace = replace(namespace, sealed=self.encrypts(namespace.tenant))
        self._set_seal(number, namespace)
        self._journal.put_namespace(number, namespace)

    def encrypts(self, tenant: str) -> bool:
        """Whether a tenant's blocks are sealed here: slots are `SEAL_BYTES` larger then, before rounding."""
        return self._seals is not None and self._seals.encrypts(tenant)

    @property
    def encrypted(self) -> frozenset[str]:
        """The tenants whose blocks are sealed here."""
        return frozenset() if self._seals is None else self._seals.encrypted

    def encrypt(self, tenant: str) -> None:
        """From now on a tenant is encrypted that has nothing here yet. TierError without a master key."""
        if self._seals is None:
            raise TierError(f"tenant {tenant} cannot be encrypted: this tier has no keys")
        self._seals.add(tenant)

    def has_key(self, tenant: str) -> bool:
        """Whether a tenant's namespaces can be recorded without a data key being made."""
        return self._seals is None or not self._seals.encrypts(tenant) or self._seals.can_open(tenant)

    def make_key(self, tenant: str) -> None:
        """Makes the data key of an encrypted tenant if it has none; durable on return. Or TierError."""
        if self._seals is not None and self._seals.encrypts(tenant):
            self._seals.make(tenant)

    def erase_key(self, tenant: str) -> None:
        """Destroys a tenant's data key, if it has one: what it has sealed can never be read again.

        Durable on return, after two syncs of a small file. TierError if the key may still be there.
        """
        if self._seals is not None:
            self._seals.erase(tenant)

    def change_key(
        self, change: Callable[[str], None], tenant: str, done: Callable[[Exception | None], None]
    ) -> None:
        """Calls `make_key` or `erase_key` on a thread of the tier; `done` gets the error, if any, there."""

        def run() -> None:
            error = None
            try:
                change(tenant)
            except Exception as failure:
                error = failure
            done(error)

        if not self._key_worker.submit(run):
            done(TierError(f"the key of tenant {tenant} cannot be changed: the device is being closed"))

    def _set_seal(self, number: int, namespace: Namespace) -> None:
        self._seal_of.pop(number, None)
        if namespace.sealed and self._seals is not None:
            length = int(namespace.layout["block_bytes"])
            self._seal_of[number] = self._seals.seal(namespace.tenant, namespace.fingerprint, length)

    def when_durable(self, done: Callable[[Exception | None], None]) -> None:
        """Calls `done` when every change so far is durable, or with the reason why it may not be."""
        self._journal.when_durable(done)

    def drop(self, identity: BlockIds, where: Where) -> None:
        """Deletes the records of blocks; what is on its way into these slots gets none."""
        number = next(self._drops)
        extents = np.unique(where.extent).tolist()
        with self._lock:
            for place in where.place.tolist():
                if place in self._writing:
                    self._writing[place] = False
            self._unsettled.update(dict.fromkeys(extents, number))
            for namespace in np.unique(identity.namespace).tolist():
                which = np.flatnonzero(identity.namespace == namespace).tolist()
                self._journal.delete(namespace, [identity.key(i) for i in which])
            self._journal.when_durable(partial(self._settled, extents, number))

    def _settled(self, extents: list[int], number: int, error: Exception | None) -> None:
        if error is None:
            with self._lock:
                for extent in extents:
                    if self._unsettled.get(extent) == number:
                        del self._unsettled[extent]

    def write(
        self,
        copy: Copy,
        slots: Sequence[Memory],
        lengths: dict[int, int],
        done: Done,
        stored_at: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Writes slots down, all of DRAM or all of a GPU, and records them. Results as in CopyDone.

        What was dropped meanwhile is FAILED.

        `stored_at` says since when each block has been stored (s since 1970); 0, or None for all: since now.
        """
        since = np.zeros(len(slots)) if stored_at is None else stored_at
        written = partial(self._written, copy, lengths, done, since)
        if _in_gpu(slots):
            ios = self._device_ios(copy.identity, copy.target_where, slots, lengths, None)
        else:
            ios = self._ios(copy.identity, copy.target_where, slots, write=True)
        with self._lock:
            self._writing.update(dict.fromkeys(copy.target_where.place.tolist(), True))
            unsettled = not self._unsettled.keys().isdisjoint(copy.target_where.extent.tolist())

        def start(error: Exception | None) -> None:
            try:
                if error is None:
                    self._engine.submit(ios, written)
                else:
                    written([OSError(str(error))] * len(ios))
            except Exception as failure:
                if not isinstance(failure, TierError):  # which is: closed meanwhile
                    _log.error("a write to NVMe could not be begun", exc_info=failure)
                with self._lock:
                    for place in copy.target_where.place.tolist():
                        self._writing.pop(place, None)
                done(np.full(len(ios), FAILED, np.uint8))

        if unsettled:
            # These slots may still have records of their last owners: those must not see other bytes.
            self._journal.when_durable(start)
        else:
            start(None)

    def read(
        self,
        copy: Copy,
        slots: Sequence[Memory],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
        urgent: bool = True,
    ) -> None:
        """Reads blocks into slots, all of DRAM or all of a GPU, and verifies each. Results as in CopyDone.

        `urgent`: somebody waits. A sealed block that does not open is CORRUPT, and its slot holds anything.
        """
        read = self._read_device if _in_gpu(slots) else self._read
        read(copy.identity, copy.source_where, slots, fingerprints, lengths, done, urgent)

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        """Reads blocks aside and verifies each. Results as in CopyDone."""
        size = probe.slot_bytes
        aside = memoryview(mmap.mmap(-1, size * len(probe.identity)))
        slots = [aside[i * size : (i + 1) * size] for i in range(len(probe.identity))]
        self._read(probe.identity, probe.where, slots, fingerprints, lengths, done, urgent=False)

    def _read(
        self,
        identity: BlockIds,
        where: Where,
        slots: Sequence[Any],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
        urgent: bool,
    ) -> None:
        def find(errors: list[OSError | None]) -> Results:
            results = np.full(len(errors), FAILED, np.uint8)
            for i, error in enumerate(errors):
                if error is None:
                    number = int(identity.namespace[i])
                    good = verify(identity, i, slots[i], fingerprints[number], lengths[number])
                    results[i] = OK if good else CORRUPT
                elif isinstance(error, TagError):
                    results[i] = CORRUPT
                else:
                    _log.error("read of extent %d failed: %s", where.extent[i], error)
            return results

        ios = self._ios(identity, where, slots, write=False)
        self._engine.submit(ios, finish_for_sure(len(ios), find, done), urgent)

    def _read_device(
        self,
        identity: BlockIds,
        where: Where,
        slots: Sequence[Any],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
        urgent: bool,
    ) -> None:
        """The same into a GPU: what passes through host memory is verified there, the rest by the GPU."""
        ios = self._device_ios(identity, where, slots, lengths, fingerprints)

        def find(errors: list[OSError | None]) -> Results:
            results = np.full(len(errors), FAILED, np.uint8)
            straight = []
            for i, error in enumerate(errors):
                if error is None and type(ios[i]) is BlockIO:
                    straight.append(i)
                elif error is None:
                    results[i] = OK
                elif isinstance(error, TagError):
                    results[i] = CORRUPT
                else:
                    _log.error("read of extent %d failed: %s", where.extent[i], error)
            if straight:
                try:
                    good = _verify_there(identity, straight, slots, fingerprints, lengths)
                    results[straight] = np.where(good, OK, CORRUPT)
                except CudaError as error:
                    _log.error("what was read cannot be verified: %s", error)
            return results

        self._engine.submit(ios, finish_for_sure(len(ios), find, done), urgent)

    def _device_ios(
        self,
        identity: BlockIds,
        where: Where,
        slots: Sequence[Any],
        lengths: dict[int, int],
        fingerprints: dict[int, bytes] | None,
    ) -> list[BlockIO]:
        """Writes of memory of a GPU; with `fingerprints`, reads that are verified on their way."""
        ios: list[BlockIO] = []
        write = fingerprints is None
        places = zip(identity.namespace.tolist(), where.extent.tolist(), where.index.tolist(), strict=True)
        for i, (number, extent, index) in enumerate(places):
            size, seal, length = self._formats[extent], self._seal_of.get(number), lengths[number]
            fd, offset, holds = self._slabs.fd(extent), index * size, None
            if fingerprints is not None:
                holds = partial(_holds, identity, i, fingerprints[number], length)
            if seal is not None:
                ios.append(EncryptedIO(fd, offset, slots[i], write, seal, identity.key(i), size, holds))
            elif self._engine.device_memory and slots[i].nbytes == size:
                ios.append(BlockIO(fd, offset, slots[i], write))
            else:
                ios.append(DeviceIO(fd, offset, slots[i], write, size, length, holds))
        return ios

    def _ios(self, identity: BlockIds, where: Where, slots: Sequence[Any], write: bool) -> list[BlockIO]:
        ios = []
        places = zip(identity.namespace.tolist(), where.extent.tolist(), where.index.tolist(), strict=True)
        for i, (number, extent, index) in enumerate(places):
            size, seal = self._formats[extent], self._seal_of.get(number)
            fd, offset = self._slabs.fd(extent), index * size
            if seal is None:
                ios.append(BlockIO(fd, offset, slots[i], write))
            else:
                ios.append(EncryptedIO(fd, offset, slots[i], write, seal, identity.key(i), size))
        return ios

    def _written(
        self,
        copy: Copy,
        lengths: dict[int, int],
        done: Done,
        since: npt.NDArray[np.float64],
        errors: list[OSError | None],
    ) -> None:
        """The bytes are at the device: now the records of those that arrived and are still wanted."""
        for error in {str(e) for e in errors if e is not None}:
            _log.error("a write to NVMe failed: %s", error)
        places = copy.target_where.place.tolist()
        results = np.full(len(errors), FAILED, np.uint8)

        def recorded(error: Exception | None) -> None:
            if error is None:
                results[good] = OK
            else:
                _log.error("%s", error)
            done(results)

        # A drop comes before, and takes what it drops out of these records, or after, and deletes them.
        with self._lock:
            wanted = [self._writing.pop(place) for place in places]
            good = [i for i, error in enumerate(errors) if error is None and wanted[i]]
            self._sync_extents.update(copy.target_where.extent[good].tolist())
            try:
                self._journal.put(self._records(copy, good, lengths, since), self._sync, recorded)
            except Exception as error:
                recorded(error)

    def _records(
        self, copy: Copy, good: list[int], lengths: dict[int, int], since: npt.NDArray[np.float64]
    ) -> RecordBatch:
        spaces = copy.identity.namespace[good].tolist()
        # Parents get the later times, so that newest first is also parents first. A clock that was set back
        # must not make what is stored now older than what was stored before.
        self._latest = now = max(self._clock(), self._latest + 1e-6 * (len(good) + 1))
        return RecordBatch(
            spaces,
            [copy.identity.key(i) for i in good],
            [copy.parents[i] for i in good],
            copy.target_where.extent[good].tolist(),
            copy.target_where.index[good].tolist(),
            copy.version[good].tolist(),
            [lengths[n] for n in spaces],
            copy.identity.checksum[good].tolist(),
            [at if at > 0 else now - 1e-6 * i for i, at in zip(good, since[good].tolist(), strict=True)],
        )

    def _sync_slabs(self) -> None:
        """One data sync for everything written since the last one."""
        with self._lock:
            extents, self._sync_extents = self._sync_extents, set()
        try:
            self._slabs.sync(extents)
        except TierError:
            with self._lock:
                self._sync_extents |= extents
            raise


def _in_gpu(slots: Sequence[Memory]) -> bool:
    return bool(slots) and isinstance(slots[0], DeviceBuffer)


def _holds(identity: BlockIds, i: int, fingerprint: bytes, length: int, slot: memoryview) -> bool:
    return verify(identity, i, slot, fingerprint, length)


def _verify_there(
    identity: BlockIds,
    which: list[int],
    slots: Sequence[DeviceBuffer],
    fingerprints: dict[int, bytes],
    lengths: dict[int, int],
) -> npt.NDArray[np.bool_]:
    """Whether slots of one GPU hold the bytes of these blocks, as the GPU finds. CudaError."""
    blocks, seeds = [], []
    for i in which:
        number = int(identity.namespace[i])
        length = lengths[number]
        blocks.append(slots[i][:length])
        seeds.append(arena.seed(fingerprints[number], identity.key(i), length))
    stream = slots[which[0]].gpu.thread_stream()
    good: npt.NDArray[np.bool_] = checksums(stream, blocks, seeds) == identity.checksum[which]
    return good
