"""Extents of the daemon that are mapped into this process, in host memory and in a GPU's memory.

All connections of a client to one run of the daemon share `Maps`. Not covered: the contents of slots
(`leases`) and copies (`arena`, `gpu`).
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.arena import Mapping
from kvstore.client.presence_tables import PresenceTables
from kvstore.cuda.device import DeviceBuffer, Gpu
from kvstore.cuda.errors import CudaError
from kvstore.errors import KVStoreError
from kvstore.types import Geometry

U64 = npt.NDArray[np.uint64]

_log = logging.getLogger(__name__)


class MappedExtent:
    """An extent in host memory. Computes the place of its slots once per slot size."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._registered = False
        self._tables: dict[int, tuple[int, U64]] = {}

    def _table(self, slot_bytes: int) -> tuple[int, U64]:
        """Returns the offset of the payloads, and a view of the versions of all slots."""
        known = self._tables.get(slot_bytes)
        if known is None:
            geometry = Geometry(self.mapping.nbytes, slot_bytes, table=True)
            versions = self.mapping.headers(geometry)["version"]
            known = self._tables[slot_bytes] = (geometry.payload_offset, versions)
        return known

    def memory(self, slot_bytes: int) -> tuple[memoryview, int]:
        """Returns the whole extent, and where in it the payload of slot 0 starts."""
        return self.mapping.view, self._table(slot_bytes)[0]

    def payload(self, slot_bytes: int, index: int, nbytes: int) -> memoryview:
        """Returns the first `nbytes` bytes of a slot's payload."""
        start = self._table(slot_bytes)[0] + index * slot_bytes
        return self.mapping.view[start : start + nbytes]

    def versions(self, slot_bytes: int, indices: U64) -> U64:
        """Returns the versions in the headers of slots, each by one aligned and so atomic 8-byte load."""
        return self._table(slot_bytes)[1][indices]

    def slots(self, slot_bytes: int) -> tuple[memoryview, int, int]:
        """Returns the whole extent, where in it the payload of slot 0 starts, and the number of slots."""
        offset, versions = self._table(slot_bytes)
        return self.mapping.view, offset, len(versions)

    def register(self, gpu: Gpu) -> None:
        """Registers the extent with CUDA, once: this makes copies between it and GPUs fast."""
        if not self._registered:
            self._registered = True
            view = self.mapping.view
            if gpu.register(view, readonly=view.readonly):
                # The finalizer keeps a view, so it unregisters before the memory is unmapped.
                weakref.finalize(self, quietly, gpu.unregister, view).atexit = False


class DeviceExtent:
    """An extent in a GPU's memory, mapped until its last view is deleted. Its slots have no headers."""

    def __init__(self, gpu: Gpu, handle: bytes, nbytes: int) -> None:
        """Maps the extent. Raises CudaError where CUDA IPC does not work."""
        self._whole = gpu.open_export(handle, nbytes)
        weakref.finalize(self, quietly, gpu.close_export, self._whole).atexit = False

    def memory(self, slot_bytes: int) -> tuple[DeviceBuffer, int]:
        """Returns the whole extent, and where in it slot 0 starts. The view keeps the extent mapped."""
        return DeviceBuffer(self._whole.address, self._whole.nbytes, self._whole.gpu, self), 0

    def payload(self, slot_bytes: int, index: int, nbytes: int) -> DeviceBuffer:
        """Returns the first `nbytes` bytes of a slot's payload. The view keeps the extent mapped."""
        return DeviceBuffer(self._whole.address + index * slot_bytes, nbytes, self._whole.gpu, self)


def quietly(call: Callable[[Any], None], memory: Any) -> None:
    """Frees memory of a GPU. Logs errors and ignores them: a lost GPU has freed its memory."""
    try:
        call(memory)
    except CudaError as error:
        _log.debug("%s", error)


class Maps:
    """Mapped extents of the latest run of the daemon, by (extent, writable), and its presence tables."""

    def __init__(self) -> None:
        self.instance = b""
        self.presence = PresenceTables()
        self._mapped: dict[tuple[int, bool], MappedExtent | DeviceExtent] = {}
        self._without_pool: set[str] = set()

    def of(self, instance: bytes) -> Maps:
        """Returns the maps of a run of the daemon. All connections to the run share them."""
        if instance != self.instance:
            self.instance, self._mapped, self._without_pool = instance, {}, set()
            self.presence = PresenceTables()
        return copy.copy(self)

    def get(self, extent: int, writable: bool) -> MappedExtent | DeviceExtent | None:
        """Returns a mapped extent, or None."""
        return self._mapped.get((extent, writable))

    def add(self, extent: int, writable: bool, fd: int, nbytes: int) -> MappedExtent:
        """Maps a received descriptor and closes the descriptor."""
        try:
            mapped = MappedExtent(Mapping(fd, nbytes, writable))
        finally:
            os.close(fd)
        self._mapped[extent, writable] = mapped
        return mapped

    def keep(self, extent: int, mapped: DeviceExtent) -> None:
        """Adds an extent in a GPU's memory. One mapping serves reads and writes."""
        self._mapped[extent, False] = self._mapped[extent, True] = mapped

    def pool_of(self, gpu: Gpu | None) -> str:
        """Returns the UUID of the GPU if a request may use its pool; "" if the pool cannot be mapped."""
        return "" if gpu is None or gpu.uuid in self._without_pool else gpu.uuid

    def leave_pool(self, gpu: Gpu | None, error: KVStoreError) -> bool:
        """Stops using a pool that cannot be mapped. Returns False if it was not in use."""
        if gpu is None or gpu.uuid in self._without_pool:
            return False
        self._without_pool.add(gpu.uuid)
        _log.warning("blocks for %s come from DRAM: %s", gpu.uuid, error)
        return True
