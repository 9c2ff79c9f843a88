"""Extents of the daemon that are mapped into this process, in host memory and in a GPU's memory.

`Maps` is shared by all connections of one client to one run of the daemon. Not covered: what lies in a slot
(`leases`) and how it is copied (`arena`, `gpu`).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

from kvstore.arena import Mapping
from kvstore.cuda.buffer import DeviceBuffer
from kvstore.cuda.device import Gpu
from kvstore.cuda.errors import CudaError
from kvstore.errors import KVStoreError
from kvstore.types import HEADER_BYTES, LABEL_BYTES, Geometry

_log = logging.getLogger(__name__)


class MappedExtent:
    """A mapped extent and where its slots are, worked out once for each slot size it was cut to."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.pinned = False
        self._cuts: dict[int, tuple[int, memoryview]] = {}

    def _cut(self, slot_bytes: int) -> tuple[int, memoryview]:
        cut = self._cuts.get(slot_bytes)
        if cut is None:
            geometry = Geometry(self.mapping.nbytes, slot_bytes, table=True)
            table = self.mapping.view[LABEL_BYTES:][: geometry.slots * HEADER_BYTES].cast("Q")
            cut = self._cuts[slot_bytes] = (geometry.payload_offset, table)
        return cut

    def payload(self, slot_bytes: int, index: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a slot's payload."""
        start = self._cut(slot_bytes)[0] + index * slot_bytes
        return self.mapping.view[start : start + nbytes]

    def version(self, slot_bytes: int, index: int) -> int:
        """The version in a slot's header: one aligned 8-byte load, which never tears."""
        return self._cut(slot_bytes)[1][index * (HEADER_BYTES // 8) + 1]

    def pin(self, gpu: Gpu) -> None:
        """Has CUDA know the extent, once: copies between it and GPUs are fast then."""
        if not self.pinned:
            self.pinned = True
            view = self.mapping.view
            if gpu.register(view, readonly=view.readonly):
                # Ends before the memory is unmapped, which the finalizer's own view keeps.
                weakref.finalize(self, quietly, gpu.unregister, view).atexit = False


class DeviceExtent:
    """An extent in a GPU's memory, mapped until nobody looks at it any more."""

    def __init__(self, gpu: Gpu, handle: bytes, nbytes: int) -> None:
        """Opens it. CudaError where CUDA IPC does not work."""
        whole = gpu.open_export(handle, nbytes)
        self._memory = _Export(whole)
        weakref.finalize(self._memory, quietly, gpu.close_export, whole).atexit = False

    def payload(self, slot_bytes: int, index: int, nbytes: int) -> DeviceBuffer:
        """The first `nbytes` of a slot's payload."""
        start, whole = index * slot_bytes, self._memory.whole
        return DeviceBuffer(whole.address + start, nbytes, whole.gpu, self._memory)

    def version(self, slot_bytes: int, index: int) -> int:
        """There are no headers: who reads from here verifies what it has read."""
        raise NotImplementedError


class _Export:
    """What views of an extent keep, and with it the extent."""

    def __init__(self, whole: DeviceBuffer) -> None:
        self.whole = whole


def quietly(call: Callable[[Any], None], what: Any) -> None:
    """What is given back to a GPU that is lost is gone anyway."""
    try:
        call(what)
    except CudaError as error:
        _log.debug("%s", error)


class Maps:
    """Mapped extents of the latest run of the daemon, by (extent, writable)."""

    def __init__(self) -> None:
        self.instance = b""
        self._mapped: dict[tuple[int, bool], MappedExtent | DeviceExtent] = {}
        self._without_pool: set[str] = set()

    def of(self, instance: bytes) -> Maps:
        """What is mapped of that run, shared by all connections to it, whoever connects to the next one."""
        if instance != self.instance:
            self.instance, self._mapped, self._without_pool = instance, {}, set()
        maps = Maps()
        maps.instance, maps._mapped, maps._without_pool = self.instance, self._mapped, self._without_pool
        return maps

    def get(self, extent: int, writable: bool) -> MappedExtent | DeviceExtent | None:
        """A mapped extent, or None."""
        return self._mapped.get((extent, writable))

    def add(self, extent: int, writable: bool, fd: int, nbytes: int) -> MappedExtent:
        """Maps a received descriptor and closes it."""
        try:
            mapped = MappedExtent(Mapping(fd, nbytes, writable))
        finally:
            os.close(fd)
        self._mapped[extent, writable] = mapped
        return mapped

    def keep(self, extent: int, mapped: DeviceExtent) -> None:
        """One in a GPU's memory, which is mapped for reading and writing alike."""
        self._mapped[extent, False] = self._mapped[extent, True] = mapped

    def pool_of(self, gpu: Gpu | None) -> str:
        """The GPU whose pool a request may ask for; empty if there is none that can be mapped."""
        return "" if gpu is None or gpu.uuid in self._without_pool else gpu.uuid

    def leave_pool(self, gpu: Gpu | None, error: KVStoreError) -> bool:
        """A pool can't be mapped: from now on blocks come from DRAM. False if they did already."""
        if gpu is None or gpu.uuid in self._without_pool:
            return False
        self._without_pool.add(gpu.uuid)
        _log.warning("blocks for %s come from DRAM: %s", gpu.uuid, error)
        return True
