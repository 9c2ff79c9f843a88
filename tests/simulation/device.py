"""The device below the NVMe tier: slabs with a volatile cache, an I/O engine, and the store of records.

`Disk` outlives daemons; `SimSlabs`, `SimEngine` and `SimStore` are one daemon's view of it and fit where
`Slabs`, `PosixEngine` and `RecordStore` do. A block of 4096 bytes is written or not, or torn at a multiple of
512 when the power fails.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from kvstore.errors import TierError
from kvstore.tiers.base import BlockIO
from kvstore.tiers.nvme import generations
from kvstore.tiers.nvme.generations import History
from kvstore.tiers.nvme.records import ID, rewritten, unpack
from kvstore.tiers.nvme.store import GENERATIONS, TABLES, Changes, Items, Loaded, Namespace, unpack_extent
from tests.simulation.faults import Faults
from tests.simulation.loop import MICRO, Loop, Process

_BLOCK = 4096
_SECTOR = 512
_FIRST_FD = 1 << 20


class Slab:
    """One file: what a read sees, what is safe, and which of its blocks differ."""

    def __init__(self, nbytes: int) -> None:
        self.seen = bytearray(nbytes)
        self.safe = bytearray(nbytes)
        self.dirty: set[int] = set()

    def write(self, offset: int, data: bytes) -> None:
        self.seen[offset : offset + len(data)] = data
        self.dirty.update(range(offset // _BLOCK, (offset + len(data) - 1) // _BLOCK + 1))

    def sync(self) -> None:
        for block in self.dirty:
            at = slice(block * _BLOCK, (block + 1) * _BLOCK)
            self.safe[at] = self.seen[at]
        self.dirty.clear()

    def lose_power(self, dice: random.Random) -> None:
        for block in sorted(self.dirty):
            kind = dice.randrange(3)
            step = _SECTOR if kind == 2 else _BLOCK
            for at in range(block * _BLOCK, (block + 1) * _BLOCK, step):
                if kind == 0 or (kind == 2 and dice.random() < 0.5):
                    self.safe[at : at + step] = self.seen[at : at + step]
        self.seen[:] = self.safe
        self.dirty.clear()


class Disk:
    """What is left when a daemon ends: slabs, and the records that were committed."""

    def __init__(
        self, name: str, loop: Loop, dice: random.Random, faults: Faults, extent_bytes: int, room: int
    ) -> None:
        """`name`: what the device is called. `room`: how many extents fit."""
        self.name = name
        self.loop = loop
        self.dice = dice
        self.faults = faults
        self.extent_bytes = extent_bytes
        self.room = room
        self.slabs: dict[int, Slab] = {}
        self.tables: dict[str, dict[bytes, bytes]] = {table: {} for table in TABLES}
        self.stalled_until = 0.0
        self.commits = 0
        self.read: Any = None
        self.read_at = -1
        self.skewed = False
        self.locked = False
        self.unseen: set[bytes] = set()
        """Generations that were committed without it."""
        self._pace = dice.choice((1, 1, 30, 300))

    @property
    def nbytes(self) -> int:
        return len(self.slabs) * self.extent_bytes

    @property
    def history(self) -> History:
        """The generations on record."""
        found = self.tables["meta"].get(GENERATIONS)
        return generations.unpack(found) if found is not None else History()

    def delay(self) -> float:
        """How long something takes, from now on."""
        if self.faults.hits(self.dice, "stall"):
            self.stalled_until = self.loop.now + self.dice.uniform(5, 60)
        pause = self.dice.uniform(20, 300) * MICRO * self._pace
        if self.faults.hits(self.dice, "slow_io"):
            pause = self.dice.uniform(0.001, 0.5)
        return max(self.stalled_until - self.loop.now, 0.0) + pause

    def rot(self) -> None:
        """A bit changes where blocks are."""
        if self.slabs and self.faults.hits(self.dice, "rot"):
            slab = self.slabs[self.dice.choice(sorted(self.slabs))]
            at = self.dice.randrange(self.extent_bytes)
            for data in (slab.seen, slab.safe):
                data[at] ^= 1 << self.dice.randrange(8)

    def lose_power(self) -> None:
        for extent in sorted(self.slabs):
            self.slabs[extent].lose_power(self.dice)


class SimSlabs:
    """See `kvstore.tiers.nvme.slabs.Slabs`."""

    direct = True
    folder = Path("/simulated")

    def __init__(self, disk: Disk) -> None:
        self.extent_bytes = disk.extent_bytes
        self._disk = disk
        self._open: set[int] = set()

    def allocate(self, extent: int) -> None:
        assert extent not in self._open, f"extent {extent} is in use"
        disk = self._disk
        full = len(disk.slabs) >= disk.room and extent not in disk.slabs
        if full or disk.faults.hits(disk.dice, "small_disk"):
            disk.slabs.pop(extent, None)
            raise TierError(f"cannot allocate {self.extent_bytes} bytes")
        disk.slabs[extent] = Slab(self.extent_bytes)
        self._open.add(extent)

    def open_existing(self, extent: int) -> int:
        if extent not in self._disk.slabs:
            raise TierError(f"cannot open extent {extent}")
        self._open.add(extent)
        return self.extent_bytes

    def fd(self, extent: int) -> int:
        assert extent in self._open
        return _FIRST_FD + extent

    def stored(self) -> list[int]:
        return sorted(self._disk.slabs)

    def free_bytes(self) -> int:
        return max(0, self._disk.room - len(self._disk.slabs)) * self.extent_bytes

    def sync(self, extents: Iterable[int]) -> None:
        disk = self._disk
        for extent in sorted(extents):
            if disk.faults.hits(disk.dice, "sync_error"):
                raise TierError(f"cannot sync extent {extent}")
            disk.slabs[extent].sync()

    def remove(self, extent: int) -> None:
        self._open.discard(extent)
        self._disk.slabs.pop(extent, None)

    def close(self) -> None:
        self._open.clear()


@dataclass(eq=False)
class _Batch:
    ios: list[BlockIO]
    done: Callable[[list[OSError | None]], None]
    errors: list[OSError | None]
    left: int


@dataclass(eq=False)
class _Part:
    """A piece of one block on its way; `error` tells how its block ends."""

    batch: _Batch
    index: int
    start: int
    stop: int
    offset: int
    fault: str = ""


_ERRORS = {
    "read_error": errno.EIO,
    "write_error": errno.EIO,
    "short_write": errno.EIO,
    "no_space": errno.ENOSPC,
}
_WRITE_FAULTS = ("write_error", "short_write", "no_space", "torn_write", "lost_write", "misdirected_write")
_READ_FAULTS = ("read_error", "bit_flip")


class SimEngine:
    """See `kvstore.tiers.base.IOEngine`. Blocks move in one or two pieces, in any order."""

    name = "simulated"
    device_memory = False

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk = disk
        self._process = process
        self._under_way: dict[_Part, None] = {}
        self._refused: list[_Batch] = []
        self._closed = False

    def release(self, fd: int) -> None:
        pass

    register = unregister = release

    def submit(
        self, ios: Sequence[BlockIO], done: Callable[[list[OSError | None]], None], urgent: bool = False
    ) -> None:
        for io in ios:
            io.check()
        if self._closed:
            raise TierError("the I/O engine is closed")
        disk = self._disk
        batch = _Batch(list(ios), done, [None] * len(ios), 0)
        if not ios or disk.faults.hits(disk.dice, "queue_full"):
            batch.errors = [OSError(errno.EAGAIN, "too much waits for the device") for _ in ios]
            self._refused.append(batch)
            self._process.call_later(disk.delay(), self._refuse, batch)
            return
        for i, io in enumerate(ios):
            fault = self._draw(io)
            middle = (
                len(io.buffer) // 2
                if fault in ("short_write", "torn_write") or disk.dice.random() < 0.3
                else 0
            )
            for start, stop in ((0, middle), (middle, len(io.buffer))):
                if start < stop:
                    self._start(_Part(batch, i, start, stop, self._offset(io, fault), fault))

    def _draw(self, io: BlockIO) -> str:
        for fault in _WRITE_FAULTS if io.write else _READ_FAULTS:
            if self._disk.faults.hits(self._disk.dice, fault):
                return fault
        return ""

    def _offset(self, io: BlockIO, fault: str) -> int:
        if fault == "misdirected_write":
            return self._disk.dice.randrange(self._disk.extent_bytes // len(io.buffer)) * len(io.buffer)
        return io.offset

    def _start(self, part: _Part) -> None:
        part.batch.left += 1
        self._under_way[part] = None
        self._process.call_later(self._disk.delay(), self._move, part)

    def _move(self, part: _Part) -> None:
        if part not in self._under_way:
            return
        wait = self._disk.stalled_until - self._disk.loop.now
        if wait > 0:
            self._process.call_later(wait + self._disk.dice.uniform(1, 500) * MICRO, self._move, part)
            return
        del self._under_way[part]
        if getattr(part.batch.ios[part.index].buffer.obj, "lost", False):
            part.batch.errors[part.index] = OSError(errno.EIO, "the GPU is lost")
        else:
            self._apply(part)
        if part.fault in _ERRORS:
            part.batch.errors[part.index] = OSError(_ERRORS[part.fault], f"injected: {part.fault}")
        part.batch.left -= 1
        if not part.batch.left:
            self._end(part.batch)

    def _apply(self, part: _Part, nbytes: int | None = None) -> None:
        io = part.batch.ios[part.index]
        slab = self._disk.slabs[io.fd - _FIRST_FD]
        stop = part.stop if nbytes is None else part.start + nbytes
        what = "write" if io.write else "read"
        where = f"extent {io.fd - _FIRST_FD} at {part.offset + part.start}, {stop - part.start} bytes"
        self._disk.loop.log(f"{self._disk.name}: {what} {where} {part.fault}")
        if io.write:
            if part.fault in ("write_error", "no_space", "lost_write"):
                return
            if part.fault in ("short_write", "torn_write") and part.start:
                return
            slab.write(part.offset + part.start, bytes(io.buffer[part.start : stop]))
        elif part.fault != "read_error":
            data = bytearray(slab.seen[part.offset + part.start : part.offset + stop])
            if part.fault == "bit_flip":
                data[self._disk.dice.randrange(len(data))] ^= 1 << self._disk.dice.randrange(8)
            io.buffer[part.start : stop] = data

    def _refuse(self, batch: _Batch) -> None:
        if batch in self._refused:
            self._refused.remove(batch)
            self._end(batch)

    def _end(self, batch: _Batch) -> None:
        batch.done(batch.errors)

    def kill(self) -> None:
        """The process dies: what is under way gets there wholly, in part, or not at all."""
        for part in self._under_way:
            if part.batch.ios[part.index].write:
                size = part.stop - part.start
                self._apply(part, self._disk.dice.choice((0, size // 2 // _SECTOR * _SECTOR, size)))
        self._under_way.clear()

    def close(self) -> None:
        """Ends all at once; whoever calls has waited while the device was stalled."""
        self._closed = True
        self._disk.stalled_until = 0.0
        while self._under_way:
            self._move(next(iter(self._under_way)))
        while self._refused:
            self._refuse(self._refused[0])


class SimStore:
    """See `kvstore.tiers.nvme.store.RecordStore`: what was committed is there after any crash."""

    def __init__(self, disk: Disk) -> None:
        if disk.locked:
            raise TierError(f"the folder of {disk.name} is in use")
        disk.locked = True
        self.extent_bytes = disk.extent_bytes
        self.problems: list[str] = []
        self._disk = disk

    @property
    def history(self) -> History:
        return self._disk.history

    def load(self) -> Loaded:
        tables = self._disk.tables
        blocks, damaged = unpack(sorted(tables["slots"].items()))
        namespaces = {
            ID.unpack(key)[0]: Namespace(*msgpack.unpackb(value))
            for key, value in sorted(tables["namespaces"].items())
        }
        extents = {ID.unpack(k)[0]: unpack_extent(v) for k, v in sorted(tables["extents"].items())}
        sizes = {extent: size for extent, (size, _) in extents.items()}
        owners = {extent: owner for extent, (_, owner) in extents.items()}
        return Loaded(namespaces, sizes, owners, blocks, damaged)

    def commit(self, changes: Changes) -> None:
        disk = self._disk
        if changes and disk.faults.hits(disk.dice, "commit_error"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        disk.commits += 1
        for table, items in changes.tables.items():
            self._apply(table, items)
        self._apply("slots", dict(rewritten(disk.tables["slots"].get, changes.slots)))

    def _apply(self, table: str, items: Items) -> None:
        disk = self._disk
        for key, value in items.items():
            if value is None:
                disk.tables[table].pop(key, None)
            else:
                disk.tables[table][key] = value
            done = "deleted" if value is None else "put"
            disk.loop.log(f"{disk.name}: commit: {table} {key!r} {done}")

    def close(self) -> None:
        self._disk.locked = False


class Writer:
    """Stands for the journal's thread: its `step` runs some time after there is work."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self.journal: Any = None
        self._disk = disk
        self._process = process
        self._coming = False

    def wake(self) -> None:
        if not self._coming:
            self._coming = True
            slow = self._disk.faults.hits(self._disk.dice, "slow_commit")
            pause = self._disk.dice.uniform(0.01, 2) if slow else self._disk.delay()
            self._process.call_later(pause, self.step)

    def step(self) -> None:
        self._coming = False
        if self.journal.step():
            self.wake()
