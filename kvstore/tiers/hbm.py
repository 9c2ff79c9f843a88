"""The HBM tier: extents of one GPU's memory, which other processes map by CUDA IPC.

There are no headers, because nothing outlives the process. An extent number is never reused, so no client
takes a renewed extent for the old one. Not covered here: which block lies where.

Memory that a process still maps must never hold another tenant's bytes, and CUDA cannot revoke a mapping.
So the tier keeps a pidfd of each process that got a handle. A renewed or removed extent is zeroed at once,
and freed when all of these processes have ended. Until then it counts against the limit.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.cuda.device import CudaError, DeviceBuffer, Gpu, Stream
from kvstore.errors import TierError
from kvstore.tiers.base import DEFAULT_OWNER, Ended, Memory, Owner, Ready
from kvstore.tiers.copy_engine import Batch, CopyEngine
from kvstore.tiers.ipc_exports import IpcExports
from kvstore.tiers.job_thread import ExtentJobs
from kvstore.tiers.results import Done
from kvstore.types import Geometry

_log = logging.getLogger(__name__)

KIND = "hbm"

POLL_S = 0.2
"""Interval of checks whether processes that map a retired extent have ended."""


class Watcher(Protocol):
    """Registers device memory for its own use, such as an I/O engine."""

    def register(self, buffer: DeviceBuffer) -> None:
        """Registers a new extent."""

    def unregister(self, buffer: DeviceBuffer) -> None:
        """Unregisters an extent before it is freed."""


class HbmTier:
    """A `StorageTier` of up to `limit_bytes` of a GPU, in extents of `extent_bytes`.

    CUDA takes more memory for the process, and verification `SCRATCH_BYTES` a thread. Once the GPU is lost,
    everything under way and every later call ends with an error or FAILED.
    """

    kind = KIND
    persistent = False

    def __init__(self, gpu: Gpu, limit_bytes: int, extent_bytes: int, base: int) -> None:
        """Extent numbers begin with `base`. Takes no memory before `start`."""
        self.gpu = gpu
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.base = base
        self._next = base
        self._missing = limit_bytes // extent_bytes
        self._extents: dict[int, DeviceBuffer] = {}
        self._cuts: dict[int, Geometry] = {}
        self._handles: dict[int, bytes] = {}
        self._exports = IpcExports()
        self._lock = threading.Lock()  # of the four above
        self._retired: dict[int, tuple[DeviceBuffer, Callable[[], None]]] = {}
        self._watchers: list[Watcher] = []
        self._stream: Stream | None = None
        self._error: CudaError | None = None
        self._lost: Callable[[CudaError], None] = lambda _: None
        self._error_lock = threading.Lock()
        self._jobs = ExtentJobs("kvstore-hbm", self._free_unmapped, POLL_S)
        self._copy_engine = CopyEngine(gpu, self._failed)

    # -- extents

    def start(self, ready: Ready, ended: Ended, lost: Callable[[CudaError], None] = lambda _: None) -> None:
        """See `StorageTier.start`. `lost` is called once if the GPU is lost, now or later."""
        self._lost = lost

        def begin(ready: Ready, ended: Ended) -> None:
            try:
                self._call(self._copy_engine.start)
            except CudaError as error:
                ended(error)
            else:
                self._jobs.make(self._missing, self._new, ready, ended)

        self._jobs.submit(begin, ready, ended)

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        """See `StorageTier.grow`."""
        self._jobs.make(count, self._new, ready, ended)

    def _new(self) -> int:
        """Makes an extent of zeros and returns its number. CudaError without memory or GPU."""
        extent = self._call(self.gpu.allocate, self.extent_bytes)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._extents[number] = extent
        for watcher in self._watchers:
            _tell(watcher.register, extent)
        return number

    def watch(self, watcher: Watcher) -> None:
        """Tells a watcher, on the tier's thread, of every present and future extent."""

        def add() -> None:
            self._watchers.append(watcher)
            with self._lock:
                present = list(self._extents.values())
            for extent in present:
                _tell(watcher.register, extent)

        self._jobs.submit(add)

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        """Cuts an extent into slots. The owner is not recorded, because no extent outlives the process."""
        with self._lock:
            self._cuts[extent] = Geometry(self._extents[extent].nbytes, slot_bytes, table=False)

    def handle(self, extent: int, pidfd: int) -> bytes:
        """Returns the 64-byte handle by which the process of `pidfd` maps an extent. Takes over `pidfd`.

        KeyError for an unknown extent, CudaError if CUDA IPC does not work here.
        """
        with self._lock:
            try:
                memory = self._extents[extent]
                known = self._handles.get(extent)
                if known is None:
                    known = self._handles[extent] = self._call(self.gpu.export, memory)
            except BaseException:
                os.close(pidfd)
                raise
            self._exports.add(extent, pidfd)
            return known

    def renew(self, extent: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        """Replaces an unused extent by a new one with a new number.

        The old extent is zeroed at once. It is freed, and the new one made, when all processes that were
        given it have ended. `ready` or `failed` is called on the tier's thread, or never after `close`.
        KeyError for an unknown extent.
        """
        with self._lock:
            memory = self._forget(extent)
        renew = partial(self._jobs.renew_now, partial(self._free, memory), self._new, ready, failed)
        self._jobs.submit(self._retire, extent, memory, renew, failed)

    def remove(self, extent: int, done: Ended) -> None:
        """Frees the memory of an unused extent, as `renew` does. An unknown extent is already removed.

        `done` is called on the tier's thread, or never after `close`.
        """
        with self._lock:
            memory = self._forget(extent) if extent in self._extents else None
        if memory is None:
            self._jobs.submit(done, None)
        else:
            remove = partial(self._jobs.remove_now, partial(self._free, memory), done)
            self._jobs.submit(self._retire, extent, memory, remove, done)

    def _forget(self, number: int) -> DeviceBuffer:
        extent = self._extents.pop(number)
        self._cuts.pop(number, None)
        self._handles.pop(number, None)
        return extent

    def _retire(
        self, number: int, extent: DeviceBuffer, then: Callable[[], None], failed: Callable[[TierError], None]
    ) -> None:
        """Zeroes an extent now, and calls `then` when no process maps it any more."""
        try:
            self._zero(extent)
        except CudaError as error:
            failed(error)
        else:
            self._retired[number] = extent, then

    def _free_unmapped(self) -> bool:
        """Frees retired extents that no process maps. Returns whether some are left."""
        for number, (_, then) in list(self._retired.items()):
            with self._lock:
                unmapped = self._error is not None or self._exports.unused(number)
            if unmapped:
                del self._retired[number]
                then()
        return bool(self._retired)

    def _zero(self, extent: DeviceBuffer) -> None:
        if self._stream is None:
            self._stream = self._call(self.gpu.stream)
        self._call(self._stream.zero, extent)
        self._call(self._stream.wait)

    def _free(self, extent: DeviceBuffer) -> None:
        for watcher in self._watchers:
            _tell(watcher.unregister, extent)
        self._call(self.gpu.free, extent)

    def close(self) -> None:
        """Ends the work under way, zeroes and frees all memory, mapped or not. A second call does nothing."""
        if self._jobs.closed:
            return
        self._jobs.close()
        self._copy_engine.close()
        with self._lock:
            left = [*self._extents.values(), *(extent for extent, _ in self._retired.values())]
            self._extents.clear()
            self._retired.clear()
            self._exports.close()
        try:
            for extent in left:
                self._zero(extent)
                self._free(extent)
        except CudaError as error:
            _log.error("memory of %s is left to the driver: %s", self.gpu.uuid, error)
        self._stream = None

    # -- blocks

    def slots(self, where: Where) -> list[DeviceBuffer]:
        """Returns whole slots. KeyError for an extent that is unknown or not cut."""
        out = []
        with self._lock:
            for number, index in zip(where.extent.tolist(), where.index.tolist(), strict=True):
                size = self._cuts[number].slot_bytes
                out.append(self._extents[number].part(index * size, (index + 1) * size))
        return out

    def drop(self, identity: BlockIds, where: Where) -> None:
        """Does nothing: a slot has no header, and no later process reads it."""

    def copy(
        self,
        copy: Copy,
        sources: list[Memory],
        targets: list[Memory],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
    ) -> None:
        """Copies blocks from or to slots of this GPU and verifies each. Results as in CopyDone."""
        self._submit(copy.identity, sources, targets, fingerprints, lengths, done)

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        """See `StorageTier.probe`."""
        self._submit(probe.identity, None, [*self.slots(probe.where)], fingerprints, lengths, done)

    def _submit(
        self,
        identity: BlockIds,
        sources: list[Memory] | None,
        targets: list[Memory],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
    ) -> None:
        # Looked up now, because the namespace may be gone when the thread runs.
        namespaces = identity.namespace.tolist()
        names, sizes = [fingerprints[n] for n in namespaces], [lengths[n] for n in namespaces]
        self._copy_engine.submit(Batch(identity, sources, targets, names, sizes, done))

    # -- a lost GPU

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls CUDA, unless the GPU is lost. CudaError."""
        if self._error is not None:
            raise self._error
        try:
            return call(*args)
        except CudaError as error:
            self._failed(error)
            raise

    def _failed(self, error: CudaError) -> None:
        if not error.lost:
            _log.error("%s", error)
            return
        with self._error_lock:
            first, self._error = self._error is None, self._error or error
        if first:
            self._copy_engine.give_up()
            self._jobs.submit(self._lost, error)


def _tell(call: Callable[[DeviceBuffer], None], extent: DeviceBuffer) -> None:
    try:
        call(extent)
    except Exception:
        _log.exception("a watcher of device memory failed")
