"""The HBM tier's memory: extents of one GPU, which other processes map by CUDA IPC.

Which block is where, the core decides; here are only bytes and handles. There are no headers: nothing
outlives the process. A number is never used again, so nobody takes a renewed extent for the one it mapped.

Memory that a process still maps must never get another tenant's bytes, and CUDA has no way to take a mapping
back. So whoever gets a handle is remembered, by a pidfd. An extent that is renewed or removed is zeroed at
once, and freed when the last of these processes has ended; until then it counts, and nothing else is made in
its place. Processes map what they were given for as long as they live: none is asked to let go.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.cuda.device import CudaError, DeviceBuffer, Gpu, Stream
from kvstore.errors import TierError
from kvstore.tiers.base import DEFAULT_OWNER, Ended, Memory, Owner, Ready
from kvstore.tiers.copy_engine import Batch, CopyEngine
from kvstore.tiers.ipc_exports import IpcExports
from kvstore.tiers.results import Done
from kvstore.types import Geometry

_log = logging.getLogger(__name__)

KIND = "hbm"

ASK_EVERY_S = 0.2
"""How often it is looked whether processes have ended that were given what is to go."""


class Watcher(Protocol):
    """Whoever must know about device memory before it can use it well."""

    def register(self, buffer: DeviceBuffer) -> None:
        """An extent is there."""

    def unregister(self, buffer: DeviceBuffer) -> None:
        """An extent is about to be freed."""


class HbmTier:
    """Up to `limit_bytes` of a GPU in extents of `extent_bytes`: a `StorageTier`.

    Besides, the GPU has CUDA's own memory for the process, and some for verifying: `SCRATCH_BYTES` a thread.
    Of a GPU that is lost, everything that is under way or comes later ends with an error or FAILED.
    """

    kind = KIND
    persistent = False

    def __init__(self, gpu: Gpu, limit_bytes: int, extent_bytes: int, base: int) -> None:
        """Numbers of extents begin with `base`. Takes no memory before `start`."""
        self.gpu = gpu
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.base = base
        self._next = base
        self._missing = limit_bytes // extent_bytes
        self._extents: dict[int, DeviceBuffer] = {}
        self._cuts: dict[int, Geometry] = {}
        self._handles: dict[int, bytes] = {}
        self._lent = IpcExports()
        self._lock = threading.Lock()  # of the four above
        self._going: dict[int, tuple[DeviceBuffer, Callable[[], None]]] = {}
        self._watchers: list[Watcher] = []
        self._stream: Stream | None = None
        self._error: CudaError | None = None
        self._lost: Callable[[CudaError], None] = lambda _: None
        self._losing = threading.Lock()
        self._stop = threading.Event()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kvstore-hbm", daemon=True)
        self._movers = CopyEngine(gpu, self._failed)

    # -- start and stop

    def start(self, ready: Ready, ended: Ended, lost: Callable[[CudaError], None]) -> None:
        """Makes all extents in a thread, which calls `ready` with each number, then `ended`.

        `lost` is called once if the GPU is lost, now or later.
        """
        self._lost = lost
        self._thread.start()
        self._submit(self._begin, ready, ended)

    def _begin(self, ready: Ready, ended: Ended) -> None:
        try:
            self._trying(self._movers.start)
        except CudaError as error:
            ended(error)
        else:
            self._make(self._missing, ready, ended)

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        """Makes so many extents more in a thread, which calls `ready` with each number, then `ended`."""
        self._submit(self._make, count, ready, ended)

    def _make(self, count: int, ready: Ready, ended: Ended) -> None:
        for _ in range(count):
            if self._stop.is_set():
                return
            try:
                number = self._new()
            except CudaError as error:
                ended(error)
                return
            ready(number)
        ended(None)

    def _new(self) -> int:
        """The number of an extent of zeros. CudaError if there is no memory for it, or no GPU."""
        extent = self._trying(self.gpu.allocate, self.extent_bytes)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._extents[number] = extent
        for watcher in self._watchers:
            _tell(watcher.register, extent)
        return number

    def close(self) -> None:
        """Ends what is under way, zeroes and frees all memory, whoever maps it. Twice does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._movers.close()
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()
        with self._lock:
            left = [*self._extents.values(), *(extent for extent, _ in self._going.values())]
            self._extents.clear()
            self._going.clear()
            self._lent.close()
        try:
            for extent in left:
                self._zero(extent)
                self._free(extent)
        except CudaError as error:
            _log.error("memory of %s is left to the driver: %s", self.gpu.uuid, error)
        self._stream = None

    def watch(self, watcher: Watcher) -> None:
        """Tells somebody, on the tier's thread, of every extent that there is and will be."""

        def add() -> None:
            self._watchers.append(watcher)
            with self._lock:
                there = list(self._extents.values())
            for extent in there:
                _tell(watcher.register, extent)

        self._submit(add)

    # -- extents

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        """Cuts an extent into slots. The owner is not recorded: no extent outlives the process."""
        with self._lock:
            self._cuts[extent] = Geometry(self._extents[extent].nbytes, slot_bytes, table=False)

    def drop(self, identity: BlockIds, where: Where) -> None:
        """Does nothing: a slot has no header, and no later process reads it."""

    def slots(self, where: Where) -> list[DeviceBuffer]:
        """Whole slots. KeyError for an extent that is unknown or not cut."""
        out = []
        with self._lock:
            for number, index in zip(where.extent.tolist(), where.index.tolist(), strict=True):
                size = self._cuts[number].slot_bytes
                out.append(self._extents[number].part(index * size, (index + 1) * size))
        return out

    def handle(self, number: int, pidfd: int) -> bytes:
        """What the process of `pidfd`, which is taken over, opens the extent by: 64 bytes.

        KeyError for an unknown extent, CudaError if CUDA IPC does not work here.
        """
        with self._lock:
            try:
                extent = self._extents[number]
                known = self._handles.get(number)
                if known is None:
                    known = self._handles[number] = self._trying(self.gpu.export, extent)
            except BaseException:
                os.close(pidfd)
                raise
            self._lent.add(number, pidfd)
            return known

    def renew(self, number: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        """Makes a new extent in the place of one that nobody refers to; calls `ready` with its number.

        That may take as long as a process lives that was given the old one, which is zeros at once. `ready`
        or `failed` comes on the tier's thread, or never after `close`. KeyError for an unknown extent.
        """
        with self._lock:
            extent = self._let_go(number)

        def freed(error: CudaError | None) -> None:
            try:
                if error is not None:
                    raise error
                if self._stop.is_set():
                    return
                renewed = self._new()
            except CudaError as why:
                failed(why)
            else:
                ready(renewed)

        self._submit(self._empty, number, extent, freed)

    def remove(self, number: int, done: Ended) -> None:
        """Gives the memory of an extent that nobody refers to back, as `renew` does.

        `done` comes on the tier's thread, with the reason if that failed, or never after `close`. Of one that
        is unknown it comes too: it is gone.
        """
        with self._lock:
            extent = self._let_go(number) if number in self._extents else None
        if extent is None:
            self._submit(done, None)
        else:
            self._submit(self._empty, number, extent, done)

    def _let_go(self, number: int) -> DeviceBuffer:
        """An extent that is unknown from now on: nobody is given it any more."""
        extent = self._extents.pop(number)
        self._cuts.pop(number, None)
        self._handles.pop(number, None)
        return extent

    def _empty(self, number: int, extent: DeviceBuffer, freed: Callable[[CudaError | None], None]) -> None:
        """Zeroes an extent now and frees it when no process can map it any more; then calls `freed`."""
        try:
            self._zero(extent)
        except CudaError as error:
            freed(error)
            return
        self._going[number] = extent, partial(self._free_and_tell, extent, freed)

    def _free_what_can_be(self) -> None:
        for number, (_, free) in list(self._going.items()):
            with self._lock:
                free_now = self._error is not None or self._lent.free(number)
            if free_now:
                del self._going[number]
                free()

    def _free_and_tell(self, extent: DeviceBuffer, freed: Callable[[CudaError | None], None]) -> None:
        try:
            self._free(extent)
        except CudaError as error:
            freed(error)
        else:
            freed(None)

    def _zero(self, extent: DeviceBuffer) -> None:
        if self._stream is None:
            self._stream = self._trying(self.gpu.stream)
        self._trying(self._stream.zero, extent)
        self._trying(self._stream.wait)

    def _free(self, extent: DeviceBuffer) -> None:
        for watcher in self._watchers:
            _tell(watcher.unregister, extent)
        self._trying(self.gpu.free, extent)

    # -- blocks

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
        self._submit_batch(copy.identity, sources, targets, fingerprints, lengths, done)

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        """Verifies blocks where they are. Results as in CopyDone."""
        self._submit_batch(probe.identity, None, [*self.slots(probe.where)], fingerprints, lengths, done)

    def _submit_batch(
        self,
        identity: BlockIds,
        sources: list[Memory] | None,
        targets: list[Memory],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
    ) -> None:
        # Looked up now: by then a namespace may have been forgotten.
        spaces = identity.namespace.tolist()
        names, sizes = [fingerprints[n] for n in spaces], [lengths[n] for n in spaces]
        self._movers.submit(Batch(identity, sources, targets, names, sizes, done))

    # -- the tier's thread

    def _submit(self, job: Callable[..., None], *args: Any) -> None:
        if not self._stop.is_set():
            self._jobs.put(partial(job, *args))

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=ASK_EVERY_S if self._going else None)
            except Empty:
                job = None
            else:
                if job is None:
                    return
            try:
                if job is not None:
                    job()
                self._free_what_can_be()
            except CudaError as error:
                _log.error("%s", error)
            except Exception:
                _log.exception("a job of the HBM tier failed")
            del job  # the next wait may be long, and must not keep memory alive

    def _trying(self, call: Callable[..., Any], *args: Any) -> Any:
        """A call that may find that the GPU is lost; then none is made any more. CudaError."""
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
        with self._losing:
            first, self._error = self._error is None, self._error or error
        if first:
            self._movers.give_up()
            self._submit(self._lost, error)


def _tell(call: Callable[[DeviceBuffer], None], extent: DeviceBuffer) -> None:
    try:
        call(extent)
    except Exception:
        _log.exception("a watcher of device memory failed")
