"""A pool of GPU memory and its clients' views of it: host memory behind the seam of `HbmTier`.

What a GPU copies takes a while, and fails when the GPU is lost: then its memory holds anything, whoever still
maps it. So it does when the daemon ends that had made it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.client.extents import Maps
from kvstore.client.leases import Lease, Reservation
from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.core.events import CORRUPT, FAILED, OK
from kvstore.cuda.errors import CudaError
from kvstore.tiers import hbm
from kvstore.tiers.base import Owner
from kvstore.types import HBM_EXTENTS, Geometry
from tests.simulation.loop import MICRO, Process

UUID = "GPU-simulated"
_HANDLE_BYTES = 64
_FAILS = 0.02

Results = npt.NDArray[np.uint8]


class DeviceMemory(bytearray):
    """Memory of a GPU. Once that is lost, a device that is to read or write it fails, as its driver would."""

    lost = False


class Gpus:
    """What all processes of a run see of one GPU. `exports`: memory by handle."""

    uuid = UUID

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.exports: dict[bytes, bytearray] = {}
        self.happened: Counter[str] = Counter()

    def open_extent(self, maps: Maps, extent: int, told: Any) -> SimExtent:
        """In place of `kvstore.client.gpu.open_extent`."""
        memory = self.exports.get(told.handle)
        if memory is None or self.dice.random() < _FAILS:
            raise CudaError("CUDA IPC does not work just now")
        mapped = SimExtent(memory)
        maps.keep(extent, mapped)  # type: ignore[arg-type]
        return mapped


class SimExtent:
    """What a client has mapped of a GPU. See `kvstore.client.extents.DeviceExtent`."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memory

    def memory(self, slot_bytes: int) -> tuple[bytearray, int]:
        return self._memory, 0

    def payload(self, slot_bytes: int, index: int, nbytes: int) -> memoryview:
        return memoryview(self._memory)[index * slot_bytes : index * slot_bytes + nbytes]


class SimLease(Lease):
    """See `kvstore.client.gpu.DeviceLease`: what is in a pool has no version, only its checksum."""

    gpu: Any

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        if self.in_hbm:
            self.gpu.happened["blocks read from a pool"] += len(self)


class SimReservation(Reservation):
    """See `kvstore.client.gpu.DeviceReservation`."""

    gpu: Any

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.gpu.happened["blocks written into a pool"] += len(self) if self._slots.in_hbm else 0


class SimPool:
    """See `kvstore.tiers.hbm.HbmTier`."""

    kind = hbm.KIND
    persistent = False
    base = HBM_EXTENTS

    def __init__(self, gpu: Gpus, process: Process, limit_bytes: int, extent_bytes: int, life: int) -> None:
        """`life`: which daemon's it is."""
        self.gpu = gpu
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.is_lost = False
        self.memory: dict[int, bytearray] = {}
        self._process = process
        self._life = life
        self._pace = gpu.dice.choice((1, 1, 10, 100))
        self._next = self.base
        self._cuts: dict[int, Geometry] = {}
        self._all: list[DeviceMemory] = []
        self._lost: Callable[[CudaError], None] = lambda _: None
        self._free_at = 0.0

    def start(self, ready: Any, ended: Any, lost: Any) -> None:
        self._lost = lost
        self.grow(self.limit_bytes // self.extent_bytes, ready, ended)

    def grow(self, count: int, ready: Any, ended: Any) -> None:
        for _ in range(count):
            self._later(self._make, ready)
        self._later(lambda: ended(CudaError("lost", lost=True) if self.is_lost else None))

    def _make(self, ready: Any) -> None:
        if not self.is_lost:
            ready(self._new())

    def _new(self) -> int:
        number, self._next = self._next, self._next + 1
        self.memory[number] = DeviceMemory(self.extent_bytes)
        self._all.append(self.memory[number])
        return number

    def watch(self, watcher: Any) -> None:
        """Host memory can be reached by whoever wants to."""

    def close(self) -> None:
        """Nothing is found there any more."""
        self.scramble()

    def scramble(self) -> None:
        """The memory is the driver's again, and holds anything."""
        for memory in self._all:
            memory[:] = self.gpu.dice.randbytes(len(memory))
        self.gpu.exports.clear()

    def lose(self) -> None:
        """The GPU falls off the bus; the daemon hears of it a little later."""
        if not self.is_lost:
            self.is_lost = True
            for memory in self._all:
                memory.lost = True
            self.gpu.happened["pool lost"] += 1
            self.scramble()
            self._later(self._lost, CudaError("lost", lost=True))

    # -- extents

    def format(self, extent: int, slot_bytes: int, owner: Owner) -> None:
        self._cuts[extent] = Geometry(self.extent_bytes, slot_bytes, table=False)

    def drop(self, identity: BlockIds, where: Where) -> None:
        pass

    def slots(self, where: Where) -> list[memoryview]:
        out = []
        for number, index in zip(where.extent.tolist(), where.index.tolist(), strict=True):
            size = self._cuts[number].slot_bytes
            out.append(memoryview(self.memory[number])[index * size : (index + 1) * size])
        return out

    def handle(self, number: int, pidfd: int) -> bytes:
        memory = self.memory[number]
        if self.is_lost:
            raise CudaError("lost", lost=True)
        name = f"{self._life}/{number}".encode().ljust(_HANDLE_BYTES)
        self.gpu.exports[name] = memory
        return name

    def renew(self, number: int, ready: Any, failed: Any) -> None:
        memory = self._let_go(number)

        def make() -> None:
            if self.is_lost:
                failed(CudaError("lost", lost=True))
                return
            memory[:] = bytes(len(memory))
            ready(self._new())

        self._later(make)

    def remove(self, number: int, done: Any) -> None:
        memory = self._let_go(number)

        def empty() -> None:
            if not self.is_lost:
                memory[:] = bytes(len(memory))
            done(CudaError("lost", lost=True) if self.is_lost else None)

        self._later(empty)

    def _let_go(self, number: int) -> bytearray:
        self._cuts.pop(number, None)
        return self.memory.pop(number)

    def _later(self, job: Callable[..., None], *args: Any) -> None:
        """On the pool's thread, which does one thing after another."""
        self._free_at = max(self._free_at, self._process.time()) + self._process.delay()
        self._process.call_at(self._free_at, job, *args)

    # -- blocks

    def copy(
        self,
        copy: Copy,
        sources: Sequence[memoryview],
        targets: Sequence[memoryview],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Callable[[Results], None],
    ) -> None:
        self._move(copy.identity, sources, targets, fingerprints, lengths, done)

    def probe(self, probe: Probe, fingerprints: Any, lengths: Any, done: Any) -> None:
        self._move(probe.identity, None, self.slots(probe.where), fingerprints, lengths, done)

    def _move(
        self,
        identity: BlockIds,
        sources: Sequence[memoryview] | None,
        targets: Sequence[memoryview],
        fingerprints: dict[int, bytes],
        lengths: dict[int, int],
        done: Callable[[Results], None],
    ) -> None:
        # Looked up now: by then a namespace may have been forgotten.
        spaces = identity.namespace.tolist()
        sizes = [lengths[n] for n in spaces]
        seeds = [arena.seed(fingerprints[n], identity.key(i), sizes[i]) for i, n in enumerate(spaces)]

        def work() -> None:
            if self.is_lost or self.gpu.dice.random() < _FAILS:
                done(np.full(len(sizes), FAILED, np.uint8))
                return
            good = []
            for i, size in enumerate(sizes):
                if sources is not None:
                    arena.copy(targets[i][:size], sources[i][:size])
                good.append(arena.checksum(targets[i][:size], seeds[i]) == int(identity.checksum[i]))
            self.gpu.happened["blocks copied by the GPU"] += 0 if sources is None else len(sizes)
            done(np.where(good, OK, CORRUPT).astype(np.uint8))

        pause = self.gpu.dice.uniform(10, 200) * MICRO * self._pace
        self._process.call_later(pause, work)


def in_place(gpu: Gpus) -> dict[str, Any]:
    """Stand-ins by the names that `kvstore.client.calls` imports."""
    return {
        "open_extent": gpu.open_extent,
        "DeviceLease": SimLease,
        "DeviceReservation": SimReservation,
        "check_device": _same,
    }


def _same(device: Gpus | None) -> Gpus | None:
    return device
