"""One seed: a world is drawn, lives through its crashes, comes to rest, and is looked at."""

from __future__ import annotations

import asyncio
import hashlib
import random
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.client.leases import Reservation
from kvstore.config import FIRST_DEVICE, Config
from kvstore.core import events as ev
from kvstore.core.queues.device_queue import DRAINING, FENCED, SERVING
from kvstore.core.requests.leases import number_on_connection
from kvstore.daemon import composition
from kvstore.daemon.operator.devices import open_new
from kvstore.daemon.tenancy.auth import Principal, Role
from kvstore.errors import ConfigError, TierError
from kvstore.tiers.nvme.store import GENERATIONS
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.types import ALIGN, Tier
from tests.simulation import audit
from tests.simulation.clients import SPACES, Engine
from tests.simulation.daemon import DRAM, NVME, SECOND_DEVICE, TENANTS, Life, Manager, Setup
from tests.simulation.device import Disk
from tests.simulation.faults import Faults
from tests.simulation.loop import Loop, Process
from tests.simulation.network import Link, Network
from tests.simulation.oracle import Oracle, payload
from tests.simulation.pool import Gpus
from tests.simulation.seams import in_simulation

KILL, POWER, STOP = "kill", "power cut", "stop"
_AT_ONCE = 20_000  # callbacks at one time: more are a loop without end
_REST_S = 400.0
_FINGERPRINTS = [space.fingerprint for space in SPACES]


class Violation(AssertionError):
    """A property does not hold."""


@dataclass
class Outcome:
    """What came of a seed. `violation` is empty if all properties held."""

    seed: int
    violation: str = ""
    digest: str = ""
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class World:
    """Everything of one run. `plain`: blocks leave by LRU, and all are written down, to `one_device`.

    `chains`: no namespace is of independent blocks. An audit comes `audit_every` so many callbacks.
    """

    audit_every = 25

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        plain: bool = False,
        one_device: bool = False,
        chains: bool = False,
    ) -> None:
        self.dice = dice = random.Random(seed)
        self._hash = hashlib.blake2b(digest_size=16)
        self._trace = trace
        self.loop = Loop(dice, self.log)
        self.faults = Faults.draw(dice)
        self.setup = Setup.draw(dice)
        # With dice of its own: all else is the same with every policy.
        self._policy_dice = None if plain else random.Random(f"policy {seed}")
        if self._policy_dice is not None:
            self.setup.draw_policy(self._policy_dice)
        self.oracle = Oracle()
        self.operations: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.manager = Manager()
        self.net = Network(self.loop, dice, self.faults, self.fail)
        setup = self.setup
        first = self._new_disk(FIRST_DEVICE, dice, setup.nvme_extents, setup.extent_bytes)
        self.disks = {FIRST_DEVICE: first}
        # The same for the second device: what it does, when it comes, and when it leaves.
        self._device_dice: random.Random | None = None
        self._away: Disk | None = None
        devices = random.Random(f"devices {seed}")
        if setup.nvme_extents and not (plain or one_device) and devices.random() < 0.4:
            self._device_dice = devices
            if devices.random() < 0.75:
                self.disks[SECOND_DEVICE] = self._new_second(devices)
        # And for the first one: whether it leaves, while the second one is there, and comes again.
        self._first_dice = (
            random.Random(f"first {seed}") if self._device_dice is not None and not chains else None
        )
        self._first_away: Disk | None = None
        self.coming = SECOND_DEVICE
        # And for two devices that are away in turn: which, when, and where the power fails.
        self._turns: random.Random | None = None
        self._drives = tuple(self.disks.values())
        self._recorded: dict[Disk, bytes | None] = {}
        self._committed: set[bytes] = set()
        self._cut_generation = self._devices_changed = False
        turns = random.Random(f"turns {seed}")
        sizes = {disk.extent_bytes for disk in self.disks.values()}
        # Of one size: the second one is the first one while that is away.
        if len(self.disks) == 2 and len(sizes) == 1 and turns.random() < 0.8:
            self._turns = turns
        # And for the pool of GPU memory: whether there is one, who asks for it, when it is lost.
        pools = random.Random(f"hbm {seed}")
        self.gpu = Gpus(pools) if not (plain or one_device) and pools.random() < 0.3 else None
        if self.gpu is not None:
            setup.draw_hbm(pools)
        # And for independent namespaces: whether there are some.
        has_kinds = not (plain or one_device or chains) and random.Random(f"kinds {seed}").random() < 0.5
        self.spaces = [i for i, space in enumerate(SPACES) if has_kinds or not space.layout.independent]
        self.has_kinds = has_kinds
        self.counts["with independent namespaces"] += has_kinds
        self.ending = False
        self.quotas = audit.Quotas()
        self.recent = (0, [b"s0b0k00"])
        self._salt = 0
        self._lives = 0
        self.life: Life | None = None
        self.begin_at = 0.0
        self.engines: list[Engine] = []
        self._left: audit.Left | None = None
        self._errors: list[str] = []

    def _new_disk(self, name: str, dice: random.Random, extents: int, extent_bytes: int) -> Disk:
        """One that has room for so many, mostly."""
        room = extents if dice.random() < 0.8 else dice.randint(0, extents)
        return Disk(name, self.loop, dice, self.faults, extent_bytes, room)

    def _new_second(self, dice: random.Random) -> Disk:
        """An empty second device, and its limit."""
        extents, extent_bytes = dice.randint(2, 6), self.setup.extent_bytes * dice.choice((1, 1, 2))
        self.setup.second_bytes = extents * extent_bytes
        return self._new_disk(SECOND_DEVICE, dice, extents, extent_bytes)

    # -- what everybody uses

    @property
    def takes_turns(self) -> bool:
        """Whether two devices are away in turn."""
        return self._turns is not None

    @property
    def skewed(self) -> bool:
        """Whether some daemon's clock said something else than others'."""
        return any(disk.skewed for disk in self.disks.values())

    def log(self, text: str) -> None:
        line = f"{self.loop.now:.6f} {text}" if hasattr(self, "loop") else text
        self._hash.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def fail(self, what: str, why: str) -> None:
        raise Violation(f"{what}: {why}")

    def device(self) -> Gpus | None:
        """Where somebody would have blocks."""
        return self.gpu if self.gpu is not None and self.gpu.dice.random() < 0.7 else None

    def new_salt(self) -> int:
        self._salt += 1
        return self._salt

    def payload(self, space: int, key: bytes, salt: int) -> bytes:
        return payload(space, key, salt, SPACES[space].layout.block_bytes)

    def check_block(self, space: int, key: bytes, data: bytes, began: int, at: float) -> None:
        if not self.oracle.may_be(space, key, data, began, at):
            if self.oracle.may_be(space, key, data, began):
                self.fail("blocks end", f"{key!r} of {SPACES[space]}")
            self.fail("never a wrong block", f"{key!r} of {SPACES[space]}")

    def change_settings(self, none: bool = False) -> None:
        """Other floors and limits, from now on, or none; now and then another policy, other rules."""
        if self.life is not None and self.life.up:
            # Before less room is a reason to lose what was left.
            self._restored()
        self._resize()
        if none:
            self.setup.quotas = {}
        else:
            self.setup.draw_quotas(self.dice)
        if self._policy_dice is not None and self._policy_dice.random() < 0.7:
            self.setup.draw_policy(self._policy_dice)
            self.counts["switched"] += 1
        self.log(f"settings: {self.setup.policy} {self.setup.admission} {self.setup.quotas}")
        if self.life is not None and self.life.up:
            self.life.daemon.reload.apply(self.setup.config(), [])
            self._change_device(none)
        self.quotas = audit.Quotas()

    def _resize(self) -> None:
        """A running daemon's tiers become larger or smaller."""
        life, dice, setup = self.life, self._policy_dice, self.setup
        if dice is None:
            return
        wanted = {"dram": dice.choice((setup.dram_extents, dice.randint(2, 8)))}
        if setup.nvme_extents:
            wanted[FIRST_DEVICE] = dice.choice((setup.nvme_extents, dice.randint(2, 8)))
        if self._device_dice is not None:
            wanted[SECOND_DEVICE] = self._device_dice.randint(2, 8)
        if life is None or not life.up:
            return
        for tier, state in enumerate(life.daemon.placement.residency.tiers):
            if state.leaving or state.spec.tier == Tier.HBM:
                continue
            name, size = state.spec.name, state.extents.extent_bytes
            has = state.extents.limit_bytes // size
            # Of more, the next daemon would cut each into fewer slots: it has few rows here.
            uncut = max(has, composition._MIN_ROWS // state.extents.geometry(ALIGN).slots)
            n = min(wanted[name], state.extents.most_bytes // size, uncut)
            if n != has:
                self.log(f"tier {tier} of {has} extents gets {n}")
                self.counts["grown" if n > has else "shrunk"] += 1
                if tier != DRAM:
                    self.disks[name].room += max(0, n - has)
                life.daemon.core.handle(ev.SetLimit(tier, n * size))
            if name == SECOND_DEVICE:
                setup.second_bytes = n * size
            elif name == FIRST_DEVICE:
                setup.nvme_extents = n
            else:
                setup.dram_extents = n

    def _change_device(self, none: bool) -> None:
        """A device is fenced, drains, or serves again."""
        life = self.life
        for name, dice in ((FIRST_DEVICE, self._policy_dice), (SECOND_DEVICE, self._device_dice)):
            tier = life.tier_of(name) if life is not None else None
            if life is None or tier is None or dice is None:
                continue
            if life.daemon.placement.residency.tiers[tier].leaving:
                continue
            state = SERVING if none else dice.choice((SERVING, SERVING, DRAINING, FENCED))
            self.counts[state] += 1
            self.log(f"{name}: {state}")
            change = {"name": name, "state": state, "instead_of": None}
            life.server.services.commands.run(None, 0, "set_device", change)

    def _come_or_leave(self, dice: random.Random) -> None:
        """The second device leaves, or comes, as a change of the configuration has it."""
        life, setup = self.life, self.setup
        if life is None or not life.up:
            return
        self._restored()
        coming = not setup.second_bytes
        if coming and SECOND_DEVICE in life.daemon.tiers.devices:
            config = replace(setup, second_bytes=self.disks[SECOND_DEVICE].extent_bytes).config()
            self._is_refused(life, config, "refused to come")
            return
        if setup.first_left:
            self._is_refused(life, replace(setup, second_bytes=0).config(), "refused to leave")
            return
        self.coming = SECOND_DEVICE
        opened = self._opened(dice) if coming else {}
        setup.second_bytes = setup.second_bytes if coming else 0
        self.log(f"{SECOND_DEVICE} {'comes' if coming else 'leaves'}")
        life.daemon.reload.apply(setup.config(), [], opened)
        self.quotas = audit.Quotas()

    def _first_comes_or_leaves(self) -> None:
        """The first device leaves, or comes: as it was left, if nothing is on it, else another one."""
        life, setup = self.life, self.setup
        if life is None or not life.up or not setup.second_bytes:
            return
        self._restored()
        if setup.first_left and FIRST_DEVICE in life.daemon.tiers.devices:
            self._is_refused(life, replace(setup, first_left=False).config(), "refused to come")
            return
        setup.first_left = not setup.first_left
        opened: dict[str, NvmeTier] = {}
        if not setup.first_left:
            self.coming = FIRST_DEVICE
            before = self.disks.pop(FIRST_DEVICE, None) or self._first_away
            assert before is not None
            self.disks[FIRST_DEVICE] = before
            try:
                opened = open_new(setup.config(), [FIRST_DEVICE], None)
            except TierError as error:
                self.log(str(error))
                size = setup.extent_bytes
                self.disks[FIRST_DEVICE] = self._new_disk(FIRST_DEVICE, self.dice, setup.nvme_extents, size)
                opened = open_new(setup.config(), [FIRST_DEVICE], None)
        self.log(f"{FIRST_DEVICE} {'leaves' if setup.first_left else 'comes'}")
        self.counts["the first device leaves"] += setup.first_left
        self.counts["the first device comes again"] += not setup.first_left
        life.daemon.reload.apply(setup.config(), [], opened)
        self.quotas = audit.Quotas()

    def _is_refused(self, life: Life, config: Config, what: str) -> None:
        """A device that is still leaving can not come, and the last one can not leave."""
        try:
            life.daemon.reload.consequences(config)
        except ConfigError as error:
            self.log(str(error))
            self.counts[what] += 1
        else:
            self.fail("a device comes once, and one stays", what)

    def _opened(self, dice: random.Random) -> dict[str, NvmeTier]:
        """The second device, as the one before was left, if nothing is on it; else another one."""
        before = self.disks.pop(SECOND_DEVICE, None) or self._away
        if before is not None and dice.random() < 0.7:
            self.disks[SECOND_DEVICE] = before
            self.setup.second_bytes = dice.randint(2, 6) * before.extent_bytes
            try:
                opened = open_new(self.setup.config(), [SECOND_DEVICE], None)
                self.counts["came again"] += 1
                return opened
            except TierError as error:
                self.log(str(error))
        self.disks[SECOND_DEVICE] = self._new_second(dice)
        return open_new(self.setup.config(), [SECOND_DEVICE], None)

    def some_link(self, process: Process) -> Link | None:
        mine = [x for x in self.net.connections.values() if x.owner is process]
        return self.dice.choice(mine) if mine else None

    def may_write(self, room: Reservation) -> bool:
        """Whether a room's slots are still its own; if not, whether this run lets its writer go on."""
        if not room.lease or not room._slots.records:
            return True
        # The next daemon may grant the same slots under the same number.
        if self.life is not None and room.granted_by is self.life:  # type: ignore[attr-defined]
            placement = self.life.daemon.placement
            for number, held in placement.leases.reservations.items():
                if number_on_connection(number) == room.lease:
                    records = placement.residency.tiers[held.tier].slots.record[held.slots]
                    if records.tobytes() == room._slots.records:
                        return True
        self.counts["writers_cut_off"] += 1
        return self.faults.hits(self.dice, "stray")

    # -- the daemon's lives

    def begin(self) -> None:
        self._lives += 1
        self.log(f"daemon {self._lives} starts")
        if not self.setup.second_bytes:
            self._away = self.disks.pop(SECOND_DEVICE, self._away)
        if self.setup.first_left:
            self._first_away = self.disks.pop(FIRST_DEVICE, self._first_away)
        if self._turns is not None and not self.ending:
            self._take_turns(self._turns)
        self.life = Life(self.setup, self._lives, self.disks, self.manager, self.net, self.gpu)
        self.counts[self.setup.policy] += 1
        self.counts["with two devices"] += len(self.disks) == 2
        self.counts["with a pool"] += self.gpu is not None
        self.quotas = audit.Quotas()
        self.life.process.call_soon(self._restored)
        self.life.process.call_soon(self._forgotten)

    def _forgotten(self) -> None:
        """At the same time: nothing is taken in from a device that another one proves to have been away."""
        assert self.life is not None
        for name, disk in self.disks.items():
            if disk.unseen and not self._lacks_witness(self.disks):
                tier = self.life.tier_of(name)
                kept = [who for who, (slots, _) in audit.live(self.life).items() if tier and slots[tier] >= 0]
                if kept:
                    self.fail("a device that was away forgets", f"{kept[0]} is restored from {name}")
                self.counts["a device has forgotten"] += 1

    def _take_turns(self, dice: random.Random) -> None:
        """Both devices are there, or only one of them, which then is the first one."""
        first, second = self._drives
        before = self.disks
        both, alone = (first, second), ((first,), (second,))
        # After the one, the other; then, with what they have missed, both.
        there = both
        if self._cut_generation:
            there = tuple(before.values())  # neither may have missed anything
        elif dice.random() < 0.6 and not (first.unseen and second.unseen):
            there = dice.choice([each for each in alone if each != tuple(before.values())])
        self._cut_generation = False
        self.disks = dict(zip((FIRST_DEVICE, SECOND_DEVICE), there, strict=False))
        for name, disk in self.disks.items():
            disk.name = name
        self._devices_changed = self.disks != before
        if self._devices_changed:
            self.log(f"devices that are there: {[self._drives.index(disk) for disk in there]}")
            # Limits, and what is divided by them, are others now.
            self._left = None
            if self._lacks_witness(before):
                self.manager.forget_all()
        without_witness = self._lacks_witness(self.disks)
        self.oracle.starts(without_witness)
        self.counts["a device is away"] += len(there) == 1
        self.counts["no device knows what was deleted"] += without_witness
        self.counts["away in turn"] += len(there) == 2 and all(disk.unseen for disk in there)

    def _lacks_witness(self, disks: dict[str, Disk]) -> bool:
        """Whether only the device that is away knows of some generation."""
        return len(disks) == 1 and any(disk.unseen for disk in disks.values())

    def _look_at_generations(self, dice: random.Random) -> None:
        """Notes what devices that are away do not see. The power may fail after a generation's commit."""
        for disk in self.disks.values():
            recorded = disk.tables["meta"].get(GENERATIONS)
            if recorded == self._recorded.get(disk):
                continue
            self._recorded[disk] = recorded
            disk.unseen.difference_update(disk.history.names)
            new = set(disk.history.committed) - self._committed
            self._committed |= new
            for away in self._drives:
                if away not in self.disks.values():
                    away.unseen |= new
            if self.life is not None and not self.ending and dice.random() < 0.35:
                self._cut_generation = True
                self.counts["cut between commits of generations"] += 1
                self.crash(POWER)

    def _restored(self) -> None:
        """Right after the daemon has taken in what was left."""
        if self._left is not None and not self.faults.corrupted:
            self._checked("nothing promised is lost", self._left.check, self.life)
            self.counts["restarts_checked"] += 1
        self._left = None

    def crash(self, kind: str, memory_too: bool = False) -> None:
        """The daemon ends; it starts again some time later. `memory_too`: its DRAM is lost in any case."""
        life, self.life = self.life, None
        if life is None:
            return
        self.log(f"{kind} at step {self.loop.steps}")
        self.counts[kind] += 1
        self._count_devices(life)
        self.counts["refused"] += life.daemon.placement.view.counters["refused_blocks"]
        handed_over = kind != POWER and not memory_too and self.dice.random() < 0.75
        life.end()
        # A device that has missed something may not have forgotten its blocks yet: it promises none.
        disks = {name: d for name, d in self.disks.items() if not d.unseen or self._lacks_witness(self.disks)}
        self._left = None if self._will_lose_some(life) else audit.Left.of(life, disks, handed_over)
        if self._left is not None and self._devices_changed:
            # Records beyond the limits that devices have now may not be deleted yet.
            self._left.keep_known(life)
        for disk in self.disks.values() if kind == POWER else ():
            disk.lose_power()
            disk.stalled_until = 0.0
        if not handed_over:
            self.manager.forget_all()
        else:
            self.counts["handed_over"] += 1
        self._audit_disks()
        self.begin_at = self.loop.now + self.dice.choice((0.0, 0.001, 0.05))

    def _count_devices(self, life: Life) -> None:
        tiers = life.daemon.placement.residency.tiers[NVME:]
        self.counts["devices came"] += len(tiers) - life.devices_at_start
        self.counts["devices left"] += sum(state.gone for state in tiers)
        self.counts["ended while a device was leaving"] += any(t.leaving and not t.gone for t in tiers)

    # -- looking

    def audit(self) -> None:
        self.net.check_due()
        self._audit_disks()
        if self.life is not None and self.life.up:
            self._checked(
                "the daemon is sound", audit.daemon_is_sound, self.life, self.disks, self.faults.corrupted
            )
            if not {"stray", "liar"} & self.faults.drawn:
                maps = [e.client._maps for e in self.engines] + [e.strict_client._maps for e in self.engines]
                self._checked("never mixing", audit.old_memory_is_empty, self.life, maps)
            lossy = self.faults.no_memory or self.faults.small_disk or self.faults.commit_error
            self._checked("quotas are kept", self.quotas.check, self.life, bool(lossy))
            if not self.faults.corrupted:
                quarantined = self.life.daemon.placement.view.counters["quarantined_blocks"]
                if quarantined:
                    self.fail("nothing good is quarantined", f"{quarantined} blocks")

    def _will_lose_some(self, life: Life) -> bool:
        """Whether extents may lie beyond a lower limit, or will be cut into fewer slots: of fewer rows."""
        residency, resizing = life.daemon.placement.residency, life.daemon.placement.resizing
        # A pool that is lost is there again.
        back = [state.lost for state in residency.tiers]
        stay = [tier for tier, state in enumerate(residency.tiers) if back[tier] or not state.leaving]
        nbytes = sum(residency.tiers[tier].extents.limit_bytes for tier in stay)
        rows = max(nbytes // composition._MIN_BLOCK_BYTES, composition._MIN_ROWS)
        lost = rows < residency.blocks.capacity
        lost |= any(tier in resizing.shrinking for tier in stay if not back[tier])
        self.counts["crashed_while_resizing"] += lost
        return lost

    def _audit_disks(self) -> None:
        for disk in self.disks.values() if not self.faults.corrupted else ():
            # The second device has a limit of its own: alone, it gets that of the first one.
            prove = audit.records_prove_their_slots
            self._checked("records prove their slots", prove, disk, self.takes_turns)
            if disk.unseen:
                continue  # it has yet to forget
            for (number, key), record in audit.records(disk).items():
                if record.extent not in disk.slabs:
                    continue
                space = self._space(disk, number)
                if self.oracle.is_forgotten(space, key, record.payload(disk)):
                    where = f"{key!r} of {SPACES[space]} on {disk.name}"
                    self.fail("what was invalidated is off the record", where)

    def _space(self, disk: Disk, number: int) -> int:
        """Which layout has this number on record."""
        return _FINGERPRINTS.index(audit.fingerprints(disk)[number])

    def _checked(self, what: str, check: Callable[..., None], *args: object) -> None:
        try:
            check(*args)
        except AssertionError as error:
            self.fail(what, str(error))

    def look_at_complaints(self) -> None:
        for process in [e.process for e in self.engines] + ([self.life.process] if self.life else []):
            if process.complaints:
                self.fail("nobody fails unseen", process.complaints[0])
        if self._errors:
            self.fail("the daemon logs no exception", self._errors[0])
        for engine in self.engines:
            for task in engine.tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    error = task.exception()
                    if isinstance(error, Violation):
                        raise error
                    self.fail("a client raises nothing", repr(error))

    # -- the run

    def run(self) -> None:
        self.begin()
        self.engines = [Engine(self, i) for i in range(self.dice.randint(2, 4))]
        steps = self.dice.randint(300, 1500)
        kinds = (KILL, KILL, KILL, POWER, STOP)
        n = self.dice.choice((0, 1, 1, 2, 3))
        crashes = [(self.dice.randrange(20, steps), self.dice.choice(kinds)) for _ in range(n)]
        if self._turns is not None:
            steps += 1500
            n = self._turns.randint(3, 7)
            crashes += [(self._turns.randrange(20, steps), self._turns.choice(kinds)) for _ in range(n)]
        crashes.sort(reverse=True)
        moves, losses = self._draw_moves(steps, self._device_dice, (0, 1, 2, 4)), self._draw_losses(steps)
        first_moves = self._draw_moves(steps, self._first_dice, (2, 6, 12))
        while self.loop.steps < steps:
            if not self.step():
                break
            if crashes and self.loop.steps >= crashes[-1][0]:
                _, kind = crashes.pop()
                if kind != STOP:
                    self.crash(kind)
                elif self.life is not None and self.life.up:
                    self.log("stop")
                    self.life.stop()
            if moves and self.loop.steps >= moves[-1] and self.life is not None:
                moves.pop()
                self.life.process.call_soon(self._come_or_leave, self._device_dice)
            if first_moves and self.loop.steps >= first_moves[-1] and self.life is not None:
                first_moves.pop()
                self.life.process.call_soon(self._first_comes_or_leaves)
            if losses and self.loop.steps >= losses[-1]:
                losses.pop()
                if self.life is not None and self.life.up and self.life.pool is not None:
                    self.log("the pool is lost")
                    self.life.pool.lose()
        self.come_to_rest()

    def _draw_losses(self, steps: int) -> list[int]:
        """At which steps the GPU is lost, the last one first."""
        if self.gpu is None:
            return []
        dice = self.gpu.dice
        return sorted((dice.randrange(20, steps) for _ in range(dice.choice((0, 0, 1, 1, 2)))), reverse=True)

    def _draw_moves(self, steps: int, dice: random.Random | None, counts: tuple[int, ...]) -> list[int]:
        """At which steps a device comes or leaves, the last one first."""
        if dice is None or self._turns is not None:
            return []
        return sorted((dice.randrange(20, steps) for _ in range(dice.choice(counts))), reverse=True)

    def step(self) -> bool:
        """One callback, and what follows from it in the world outside."""
        if self.life is None and self.loop.now >= self.begin_at:
            self.begin()
        until = self.begin_at if self.life is None else float("inf")
        if not self.loop.step(until):
            self.loop.now = max(self.loop.now, until if until != float("inf") else self.loop.now)
            return self.life is None
        if self.loop.steps_at_once > _AT_ONCE:
            self.fail("time goes on", f"{_AT_ONCE} callbacks at {self.loop.now:.6f}")
        if self._turns is not None:
            self._look_at_generations(self._turns)
        if self.life is not None and self.life.stopped:
            self.crash(STOP)
        if self.loop.steps % self.audit_every == 0:
            for disk in self.disks.values():
                disk.rot()
            if self.life is not None and self.life.up:
                self.life.rot()
            self.audit()
        self.look_at_complaints()
        return True

    def go_on(self, done: Callable[[], bool], within_s: float, what: str) -> None:
        """Runs until `done`."""
        ends = self.loop.now + within_s
        while not done():
            if not self.step() or self.loop.now > ends:
                self.fail("all comes to an end", what)

    def come_to_rest(self) -> None:
        """Faults end, everybody finishes; then a put and a get work, and nothing is left over."""
        self.faults.over = self.ending = True
        self._wait_for_daemon()
        self.go_on(
            lambda: all(t.done() for e in self.engines for t in e.tasks), _REST_S, "a call does not end"
        )
        self.audit()
        self.change_settings(none=True)
        if self.faults.corrupted:
            # Quarantined slots come back with a restart only.
            self.crash(KILL, memory_too=True)
        self._wait_for_daemon()
        last = {name: Engine(self, i, busy=False) for i, name in enumerate(TENANTS)}
        self.engines += last.values()
        for engine in last.values():
            self._wait_for(engine, engine.works())
        self._settle()
        if self.dice.random() < 0.5:
            self.crash(self.dice.choice((KILL, POWER)), memory_too=True)
            promised = self._on_record() if self._left is not None else []
            self._wait_for_daemon()
            for name, engine in last.items():
                mine = [(i, key) for i, key in promised if SPACES[i].owner == name and not SPACES[i].ttl_s]
                self._wait_for(engine, engine.read_back([] if self.faults.corrupted else mine))
                self.counts["read_back"] += len(mine)
        self.audit()

    def _wait_for_daemon(self) -> None:
        self.go_on(lambda: self.life is not None and self.life.up, _REST_S, "the daemon does not start")

    def _wait_for(self, engine: Engine, doing: Coroutine[Any, Any, None]) -> None:
        engine.begin(doing)
        self.go_on(engine.tasks[-1].done, _REST_S, "the last client does not end")
        self.look_at_complaints()

    def _on_record(self) -> list[tuple[int, bytes]]:
        """All blocks on record, as clients name them."""
        kept = [disk for name, disk in self.disks.items() if name in self.setup.config().nvme.limits]
        return [
            (self._space(disk, number), key) for disk in kept for number, key in sorted(audit.records(disk))
        ]

    def _settle(self) -> None:
        """All clients leave; in the end nobody holds anything."""
        for connection in list(self.net.connections.values()):
            connection.close()
        assert self.life is not None
        self.life.daemon.reload.apply(replace(self.setup, scrub_bytes_per_s=0).config(), [])
        ends = self.loop.now + 100
        while self.loop.now < ends and self.loop.waiting and self.step():
            pass
        self.audit()
        self._checked("nothing is held in the end", audit.nothing_is_held, self.life)
        self.life.server.status(Principal(0, "default", Role.ADMIN, operator=True))

    def close(self) -> None:
        """Lets go of descriptors, memory and tasks."""
        self.faults.over = True
        for engine in self.engines:
            for task in asyncio.all_tasks(engine.process):
                task.get_coro().close()  # type: ignore[union-attr]
        if self.life is not None:
            self._count_devices(self.life)
            self.life.end()
        self.manager.forget_all()
        self.loop.clear()


def simulate(
    seed: int,
    trace: Callable[[str], None] | None = None,
    plain: bool = False,
    one_device: bool = False,
    chains: bool = False,
) -> Outcome:
    """Runs one seed. See World."""
    world = World(seed, trace, plain, one_device, chains)
    violation = ""
    with in_simulation(world):
        try:
            world.run()
        except Violation as error:
            violation = str(error)
            world.log(f"VIOLATION {violation}")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            violation = f"{type(error).__name__} in {where.name}, line {where.lineno}: {error}"
            world.log(f"VIOLATION {violation}")
        finally:
            world.close()
    digest = world._hash.hexdigest()
    world.counts.update(world.gpu.happened if world.gpu is not None else ())
    happened = world.faults.happened
    return Outcome(seed, violation, digest, world.loop.steps, happened, world.operations, world.counts)
