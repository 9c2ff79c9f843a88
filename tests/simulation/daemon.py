"""One life of the daemon: built from what the last one left, started, killed or stopped."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.arena import Extent
from kvstore.config import FIRST_DEVICE, Config, NvmeDevice, parse
from kvstore.core import events as ev
from kvstore.core.policy import POLICIES
from kvstore.core.policy.admission import Rule
from kvstore.daemon import lifecycle
from kvstore.daemon.composition import Daemon, Storage
from kvstore.daemon.operator.settings import LiveConfig
from kvstore.errors import TierError
from kvstore.tiers.dram import DramTier
from kvstore.tiers.job_thread import ExtentJobs
from kvstore.tiers.nvme.encryption import TenantKeys
from kvstore.tiers.nvme.journal import Journal
from kvstore.tiers.nvme.tier import NvmeTier
from tests.simulation.device import Disk, SimEngine, SimSlabs, SimStore, Writer
from tests.simulation.loop import MICRO, Process
from tests.simulation.network import Network
from tests.simulation.pool import Gpus, SimPool

DRAM, NVME = 0, 1
SECOND_DEVICE = "nvme1"
FOLDERS = Path("/simulated")
"""Where devices would have their folders."""
NO_KEYS = TenantKeys(Path(os.devnull), None, {})
TENANTS = ("one", "two")
"""Known by tokens that are their names."""


@dataclass
class Setup:
    """What all daemons of a run are configured with."""

    dram_extents: int
    nvme_extents: int
    extent_bytes: int
    write_policy: str
    scrub_bytes_per_s: int
    leases: int
    quotas: dict[str, tuple[tuple[int, int], tuple[int, int]]]
    policy: str = "lru"
    admission: Rule = field(default_factory=Rule)
    second_bytes: int = 0  # the limit of the second device, which is there if the NVMe tier is
    first_left: bool = False  # the first device was removed, the second one is there
    hbm_extents: int = 0  # of a pool of GPU memory
    hbm_quotas: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def draw(cls, dice: random.Random) -> Setup:
        setup = cls(
            dram_extents=dice.randint(2, 8),
            nvme_extents=dice.choice((0, 2, 4, 6, 6)),
            extent_bytes=dice.choice((1, 1, 2)) * (64 << 10),
            write_policy=dice.choice(("write_through", "write_through", "on_evict")),
            scrub_bytes_per_s=dice.choice((0, 4 << 20, 64 << 20)),
            leases=dice.choice((4, 64)),
            quotas={},
        )
        if dice.random() < 0.6:
            setup.draw_quotas(dice)
        return setup

    def draw_policy(self, dice: random.Random) -> None:
        """Who leaves first, and what is written down."""
        self.policy = dice.choice(list(POLICIES))
        mode = dice.choice(("always", "always", "twice", "reuse"))
        threshold, bytes_a_day = dice.choice((0.01, 0.1, 0.3)), dice.choice((0, 0, 1 << 27, 1 << 31, 1 << 35))
        self.admission = Rule(mode, threshold, bytes_a_day)

    def draw_quotas(self, dice: random.Random) -> None:
        """Floors and limits of every tenant in both tiers, in bytes; half of them none."""
        self.quotas = {}
        left = [self.dram_extents, self.nvme_extents]
        for name in TENANTS:
            parts = []
            for tier, extents in ((DRAM, self.dram_extents), (NVME, self.nvme_extents)):
                floor = dice.choice((0, 0, 1)) if left[tier] > 1 else 0
                left[tier] -= floor
                most = dice.uniform(max(floor, 0.2), max(extents, 1)) if dice.random() < 0.5 else extents + 1
                parts.append((floor * self.extent_bytes, int(most * self.extent_bytes)))
            self.quotas[name] = parts[0], parts[1]

    def draw_hbm(self, dice: random.Random) -> None:
        """A pool of a few extents, and what tenants may have of it."""
        self.hbm_extents = dice.randint(2, 5)
        if dice.random() < 0.5:
            for name in TENANTS:
                floor = dice.choice((0, 0, 1))
                most = dice.uniform(max(floor, 0.2), self.hbm_extents + 1)
                self.hbm_quotas[name] = floor * self.extent_bytes, int(most * self.extent_bytes)

    def config(self) -> Config:
        # A floor that the first device has room for may be too much for the second one alone.
        quotas = {
            n: (d, (0, most) if self.first_left else (floor, most))
            for n, (d, (floor, most)) in self.quotas.items()
        }
        tenants = "".join(
            f"[tenants.{name}]\n"
            f'tokens = [{{hash = "sha256:{sha256(name.encode()).hexdigest()}", role = "admin"}}]\n'
            + "".join(
                f"{tier}.floor = {floor}\n{tier}.limit = {limit}\n"
                for tier, (floor, limit) in (
                    *zip(("dram", "nvme"), quotas.get(name, ()), strict=False),
                    *(("hbm", part) for part in [self.hbm_quotas.get(name)] if part is not None),
                )
            )
            for name in TENANTS
        )
        config = parse(
            f'policy.eviction = "{self.policy}"\n'
            f'nvme.write_policy = "{self.write_policy}"\n'
            f'nvme.admission = "{self.admission.mode}"\n'
            f"nvme.admission_threshold = {self.admission.threshold}\n"
            f"nvme.write_budget = {self.admission.bytes_a_day}\n"
            f"hbm.limit = {(1 << 30) if self.hbm_extents else 0}\n"
            f"scrub.rate = {self.scrub_bytes_per_s}\n"
            f"limits.leases_per_connection = {self.leases}\n"
            "limits.batch_keys = 16\n" + tenants
        )
        # Less than could be configured: a few extents are soon full.
        nvme: dict[str, Any] = {}
        if self.nvme_extents:
            nvme["limit"] = self.nvme_extents * self.extent_bytes
            nvme["path"] = None if self.first_left else FOLDERS / FIRST_DEVICE
        if self.second_bytes:
            second = NvmeDevice.model_construct(
                path=FOLDERS / SECOND_DEVICE,
                limit=self.second_bytes,
                write_budget=self.admission.bytes_a_day,
            )
            nvme["devices"] = {SECOND_DEVICE: second}
        hbm = {"limit": self.hbm_extents * self.extent_bytes}
        tiers = {"nvme": config.nvme.model_copy(update=nvme), "hbm": config.hbm.model_copy(update=hbm)}
        return config.model_copy(update=tiers)


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

    def __init__(
        self,
        setup: Setup,
        number: int,
        disks: dict[str, Disk],
        manager: Manager,
        net: Network,
        gpu: Gpus | None = None,
    ) -> None:
        """`disks` by the names of devices: also of those that come later, once they are there."""
        disk, config = next(iter(disks.values())), setup.config()
        self.process = Process(disk.loop, f"daemon{number}")
        self.up = False
        self.stopped = False
        self._stopping: Any = None
        self._net = net
        self._disk = disk
        self._disks = disks
        self._in_use: list[tuple[Disk, SimEngine]] = []
        dice = disk.dice
        given = {name: os.dup(fd) for name, fd in manager.kept.items()}
        self.dram = _Dram(
            disk, self.process, setup.dram_extents * setup.extent_bytes, setup.extent_bytes, manager, given
        )
        devices: dict[str, NvmeTier] = {}
        if setup.nvme_extents:
            self._skew = dice.choice((0.0, 0.0, -500.0))
            # Others are left out: they are away.
            devices = {name: self.open(config, name) for name in config.nvme.limits if name in disks}
        self.pool: SimPool | None = None
        if gpu is not None:
            limit = setup.hbm_extents * setup.extent_bytes
            self.pool = SimPool(gpu, self.process, limit, setup.extent_bytes, number)
        pools: dict[str, Any] = {"hbm0": self.pool} if self.pool is not None else {}
        self.devices_at_start = len(devices) + len(pools)
        self.daemon = Daemon(
            config,
            self.process,
            Storage(self.dram, devices, pools),
            random_bits=dice.getrandbits,
            clock=lambda: disk.loop.now,
            stopwatch=_Stopwatch(disk),
        )
        if len(pools) == 0:
            # Nobody takes what is offered; who counts as shared must be right all the same.
            self.daemon.core.handle(ev.SetSharing(Rule("twice")))
        # So that much happens while one policy follows another.
        self.daemon.placement.policy_migration.rows_at_once = 4
        self.tenants_forgotten = 0
        handle = self.daemon.placement.handle

        def counted(event: ev.Event, now: float) -> Any:
            self.tenants_forgotten += type(event) is ev.ForgetTenant
            return handle(event, now)

        self.daemon.placement.handle = counted  # type: ignore[method-assign]
        self.server = self.daemon.make_server(LiveConfig(None))
        # In the order of their coming: a set of objects has another one in every process.
        self.server.table.connections = _Ordered()  # type: ignore[assignment]
        self._serving = self._serve()
        self.process.create_task(self._serving)

    def open(self, config: Config, name: str) -> NvmeTier:
        """One device, as `daemon.devices` opens it. TierError if it is in use."""
        disk, skew = self._disks[name], self._skew
        writer = Writer(disk, self.process)
        writer.journal = Journal(Path("simulated"), SimStore(disk), writer.wake)
        engine = SimEngine(disk, self.process)
        self._in_use.append((disk, engine))
        disk.skewed |= skew != 0.0
        limit = config.nvme.limits[name]
        return _Nvme(
            self.process, writer.journal, SimSlabs(disk), engine, limit, NO_KEYS, lambda: disk.loop.now + skew
        )

    def tier_of(self, name: str) -> int | None:
        """The number that a device of NVMe has now."""
        tiers = enumerate(self.daemon.placement.residency.tiers)
        return next((i for i, t in tiers if t.spec.name == name and i != DRAM and not t.gone), None)

    async def _serve(self) -> None:
        await lifecycle.start(self.daemon)
        self._net.listener = (self.process, self.server.connect)
        self.up = True

    def stop(self) -> None:
        """An orderly stop, as `main` does it; `stopped` when it is over."""
        self._net.listener = None
        self.up = False
        self._stopping = self._stop()
        self.process.create_task(self._stopping)

    async def _stop(self) -> None:
        await self.server.close()
        await lifecycle.stop(self.daemon, self.daemon.config().daemon.stop_timeout)
        self.stopped = True

    def rot(self) -> None:
        """A bit changes in a block in DRAM."""
        dice, faults = self._disk.dice, self._disk.faults
        r = self.daemon.placement.residency
        owned = np.flatnonzero(r.tiers[DRAM].slots.owner >= 0)
        if len(owned) and faults.hits(dice, "dram_rot"):
            [slot] = self.dram.slots(r.where(DRAM, owned[[dice.randrange(len(owned))]]))
            slot[dice.randrange(2048)] ^= 1 << dice.randrange(8)

    def end(self) -> None:
        """The process is gone, now."""
        self.process.kill()
        self._serving.close()
        if self._stopping is not None:
            self._stopping.close()
        self._net.reset_all()
        for disk, engine in self._in_use:
            engine.kill()
            disk.locked = False
        for extent in self.dram._extents.values():
            extent.close()
        for table in self.daemon.presence._tables.values():
            table.memory.close()
        self.dram._owners.close()
        if self.pool is not None:
            self.pool.scramble()


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
        self, disk: Disk, process: Process, limit: int, size: int, manager: Manager, given: dict[str, int]
    ) -> None:
        super().__init__(limit, size, False, manager, given)
        self._disk = disk
        self._jobs = _Worker(process)
        self._checkers = _Checkers(process)  # type: ignore[assignment]
        self.renewed: set[int] = set()

    def _free(self, number: int, extent: Extent) -> None:
        super()._free(number, extent)
        self.renewed.add(number)

    def _new(self) -> int:
        if self._extents and self._disk.faults.hits(self._disk.dice, "no_memory"):
            raise TierError("no memory for an extent")
        return super()._new()


class _Nvme(NvmeTier):
    def __init__(self, process: Process, *parts: Any) -> None:
        super().__init__(*parts)
        self._jobs = _Worker(process)

    def retire(self) -> Path:
        self.close()
        return FOLDERS

    def take_back(self) -> None:
        pass


class _Checkers:
    """Stands for the threads that verify blocks in DRAM."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        self._process.run_in_executor(None, call, *args)

    def shutdown(self, cancel_futures: bool) -> None:
        pass


class _Worker(ExtentJobs):
    """Does its jobs some time later; what they report comes one after another, with pauses."""

    def __init__(self, process: Process) -> None:
        super().__init__("simulated")
        self._process = process
        self._free_at = 0.0

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        if not self.closed:
            self._free_at = max(self._free_at, self._process.time()) + self._process.delay()
            self._process.call_at(self._free_at, job, *map(self._later, args))

    def _later(self, arg: Any) -> Any:
        """What a job reports to, which hears of it later. Other arguments stay as they are."""
        if not callable(arg):
            return arg

        def call(*args: Any) -> None:
            process = self._process
            self._free_at = max(self._free_at, process.time()) + process.delay()
            self._free_at += process.loop.dice.choice((0.0, 0.001, 0.05))
            process.call_at(self._free_at, arg, *args)

        return call


class Thread:
    """Stands for `threading.Thread` where the daemon closes its tiers."""

    delay: Callable[[], float]

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target
        self._alive = True

    def start(self) -> None:
        asyncio.get_running_loop().call_later(type(self).delay(), self._run)

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
