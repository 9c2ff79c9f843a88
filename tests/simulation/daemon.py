"""One life of the daemon: built from what the last one left, started, killed or stopped."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.config import Config, parse
from kvstore.daemon.server import Server
from kvstore.daemon.shell import Shell
from kvstore.errors import TierError
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme.journal import Journal
from kvstore.tiers.nvme.tier import NvmeTier
from tests.simulation.device import Disk, SimEngine, SimSlabs, SimStore, Writer
from tests.simulation.loop import MICRO, Process
from tests.simulation.network import Network

DRAM, NVME = 0, 1


@dataclass
class Setup:
    """What all daemons of a run are configured with."""

    dram_extents: int
    nvme_extents: int
    extent_bytes: int
    write_policy: str
    scrub_bytes_per_s: int
    leases: int

    @classmethod
    def draw(cls, dice: random.Random) -> Setup:
        return cls(
            dram_extents=dice.randint(2, 4),
            nvme_extents=dice.choice((0, 2, 4, 6, 6)),
            extent_bytes=dice.choice((1, 1, 2)) * (64 << 10),
            write_policy=dice.choice(("write_through", "write_through", "on_evict")),
            scrub_bytes_per_s=dice.choice((0, 4 << 20, 64 << 20)),
            leases=dice.choice((4, 64)),
        )

    def config(self) -> Config:
        return parse(
            f'nvme.write_policy = "{self.write_policy}"\n'
            f"scrub.rate = {self.scrub_bytes_per_s}\n"
            f"limits.leases_per_connection = {self.leases}\n"
            "limits.batch_keys = 16\n"
        )


@dataclass
class Manager:
    """The service manager: keeps descriptors. A `tiers.dram.Keeper`."""

    kept: dict[str, int] = field(default_factory=dict)

    def keep(self, name: str, fd: int) -> None:
        if name not in self.kept:
            self.kept[name] = os.dup(fd)

    def forget(self, name: str) -> None:
        if name in self.kept:
            os.close(self.kept.pop(name))

    def forget_all(self) -> None:
        for name in list(self.kept):
            self.forget(name)


class Life:
    """A daemon from its start to its end. `up` once it listens."""

    def __init__(self, setup: Setup, number: int, disk: Disk, manager: Manager, net: Network) -> None:
        self.process = Process(disk.loop, f"daemon{number}")
        self.up = False
        self.stopped = False
        self._net = net
        self._disk = disk
        dice = disk.dice
        given = {name: os.dup(fd) for name, fd in manager.kept.items()}
        self.dram = _Dram(
            self.process, setup.dram_extents * setup.extent_bytes, setup.extent_bytes, manager, given
        )
        self.nvme: _Nvme | None = None
        if setup.nvme_extents:
            self.engine = SimEngine(disk, self.process)
            self.slabs = SimSlabs(disk)
            writer = Writer(disk, self.process)
            writer.journal = Journal(Path("simulated"), SimStore(disk), writer.wake)
            limit = setup.nvme_extents * setup.extent_bytes
            skew = dice.choice((0.0, 0.0, -500.0))
            self.nvme = _Nvme(
                self.process, writer.journal, self.slabs, self.engine, limit, lambda: disk.loop.now + skew
            )
        self.shell = Shell(setup.config(), self.process, self.dram, self.nvme, dice.getrandbits)
        self.server = Server(self.shell, _Stopwatch(disk))
        # In the order of their coming: a set of objects has another one in every process.
        self.server.connections = _Ordered()  # type: ignore[assignment]
        self.process.create_task(self._serve())

    async def _serve(self) -> None:
        await self.shell.start()
        self._net.listener = (self.process, self.server.connect)
        self.up = True

    def stop(self) -> None:
        """An orderly stop, as `main` does it; `stopped` when it is over."""
        self._net.listener = None
        self.up = False
        self.process.create_task(self._stop())

    async def _stop(self) -> None:
        await self.server.close()
        await self.shell.stop(self.shell.config.daemon.stop_timeout)
        self.stopped = True

    def rot(self) -> None:
        """A bit changes in a block in DRAM."""
        dice, faults = self._disk.dice, self._disk.faults
        r = self.shell.placement.residency
        owned = np.flatnonzero(r.tiers[DRAM].extents.owner >= 0)
        if len(owned) and faults.hits(dice, "dram_rot"):
            [slot] = self.dram.slots(r.where(DRAM, owned[[dice.randrange(len(owned))]]))
            slot[dice.randrange(2048)] ^= 1 << dice.randrange(8)

    def end(self) -> None:
        """The process is gone, now."""
        self.process.kill()
        self._net.reset_all()
        if self.nvme is not None:
            self.engine.kill()
        for extent in self.dram._extents.values():
            extent.close()


class _Stopwatch:
    """Moves on with each look, as if requests took time, which they do not on the simulated clock."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._dice = random.Random(0)
        self._ahead = 0.0

    def __call__(self) -> float:
        self._ahead += self._dice.uniform(0, 200) * MICRO
        return self._disk.loop.now + self._ahead


class _Dram(DramTier):
    def __init__(
        self, process: Process, limit: int, size: int, manager: Manager, given: dict[str, int]
    ) -> None:
        super().__init__(limit, size, False, manager, given)
        self._process = process

    def start(self, ready: Callable[[int], None], ended: Callable[[TierError | None], None]) -> None:
        _in_thread(self._process, self.make, ready, ended)


class _Nvme(NvmeTier):
    def __init__(self, process: Process, *parts: Any) -> None:
        super().__init__(*parts)
        self._process = process

    def start(self, ready: Callable[[int], None], ended: Callable[[TierError | None], None]) -> None:
        _in_thread(self._process, self.allocate, ready, ended)


def _in_thread(process: Process, make: Callable[..., None], *reports: Callable[..., None]) -> None:
    """Runs what makes extents; what it reports comes one after another, with pauses."""
    when = 0.0

    def later(report: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            nonlocal when
            when += process.loop.dice.choice((0.0, 0.001, 0.05)) + process.delay()
            process.call_later(when, report, *args)

        return call

    process.call_later(process.delay(), make, *map(later, reports))


class Thread:
    """Stands for `threading.Thread` in the shell, where one closes the tiers."""

    disk: Disk

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target
        self._alive = True

    def start(self) -> None:
        asyncio.get_running_loop().call_later(self.disk.delay(), self._run)

    def _run(self) -> None:
        self._target()
        self._alive = False

    def is_alive(self) -> bool:
        return self._alive


class _Ordered(dict[Any, None]):
    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)
