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

from kvstore.client.holds import Room
from kvstore.core import events as ev
from kvstore.core.devices import DRAINING, FENCED, SERVING
from kvstore.daemon import shell
from kvstore.daemon.tenants import Identity, Role
from kvstore.types import ALIGN
from tests.simulation import audit
from tests.simulation.clients import SPACES, Engine
from tests.simulation.daemon import DRAM, NVME, TENANTS, Life, Manager, Setup
from tests.simulation.device import Disk
from tests.simulation.faults import Faults
from tests.simulation.loop import Loop, Process
from tests.simulation.network import Link, Network
from tests.simulation.oracle import Oracle, payload
from tests.simulation.seams import in_simulation

KILL, POWER, STOP = "kill", "power cut", "stop"
_AUDIT_EVERY = 25
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
    """Everything of one run. `plain`: blocks leave by LRU, and all are written down."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None, plain: bool = False) -> None:
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
        room = self.setup.nvme_extents if dice.random() < 0.8 else dice.randint(0, self.setup.nvme_extents)
        self.disk = Disk(self.loop, dice, self.faults, self.setup.extent_bytes, room)
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

    # -- what everybody uses

    def log(self, text: str) -> None:
        line = f"{self.loop.now:.6f} {text}" if hasattr(self, "loop") else text
        self._hash.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def fail(self, what: str, why: str) -> None:
        raise Violation(f"{what}: {why}")

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
            self.life.server._reconfigure(self.setup.config(), [])
            self._change_device(none)
        self.quotas = audit.Quotas()

    def _resize(self) -> None:
        """A running daemon's tiers become larger or smaller."""
        life, dice, setup = self.life, self._policy_dice, self.setup
        if dice is None:
            return
        wanted = [dice.choice((setup.dram_extents, dice.randint(2, 8)))]
        if setup.nvme_extents:
            wanted.append(dice.choice((setup.nvme_extents, dice.randint(2, 8))))
        if life is None or not life.up:
            return
        for tier, (most, state) in enumerate(zip(wanted, life.shell.placement.residency.tiers, strict=True)):
            size, has = setup.extent_bytes, state.extents.limit_bytes // setup.extent_bytes
            # Of more, the next daemon would cut each into fewer slots: it has few rows here.
            uncut = max(has, shell._MIN_ROWS // state.extents.geometry(ALIGN).slots)
            n = min(most, state.extents.most_bytes // size, uncut)
            if n != has:
                self.log(f"tier {tier} of {has} extents gets {n}")
                self.counts["grown" if n > has else "shrunk"] += 1
                if tier == NVME:
                    self.disk.room += max(0, n - has)
                life.shell.handle(ev.SetLimit(tier, n * size))
            if tier == NVME:
                setup.nvme_extents = n
            else:
                setup.dram_extents = n

    def _change_device(self, none: bool) -> None:
        """NVMe is fenced, drains, or serves again."""
        life, dice = self.life, self._policy_dice
        if life is None or life.nvme is None or dice is None:
            return
        state = SERVING if none else dice.choice((SERVING, SERVING, DRAINING, FENCED))
        self.counts[state] += 1
        self.log(f"nvme: {state}")
        life.server.control.machinery.set_device("nvme", state, None)

    def some_link(self, process: Process) -> Link | None:
        mine = [x for x in self.net.connections.values() if x.owner is process]
        return self.dice.choice(mine) if mine else None

    def may_write(self, room: Room) -> bool:
        """Whether a room's slots are still its own; if not, whether this run lets its writer go on."""
        if not room.lease or not room._slots.records:
            return True
        if self.life is not None:
            held = self.life.shell.placement.ledger.reservations.get(room.lease)
            if held is not None:
                records = self.life.shell.placement.residency.tiers[DRAM].extents.record[held.slots]
                if records.tobytes() == room._slots.records:
                    return True
        self.counts["writers_cut_off"] += 1
        return self.faults.hits(self.dice, "stray")

    # -- the daemon's lives

    def begin(self) -> None:
        self._lives += 1
        self.log(f"daemon {self._lives} starts")
        self.life = Life(self.setup, self._lives, self.disk, self.manager, self.net)
        self.counts[self.setup.policy] += 1
        self.quotas = audit.Quotas()
        self.life.process.call_soon(self._restored)

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
        self.counts["refused"] += life.shell.placement.counters["refused_blocks"]
        handed_over = kind != POWER and not memory_too and self.dice.random() < 0.75
        life.end()
        self._left = None if self._will_lose_some(life) else audit.Left.of(life, self.disk, handed_over)
        if kind == POWER:
            self.disk.lose_power()
            self.disk.stalled_until = 0.0
        if not handed_over:
            self.manager.forget_all()
        else:
            self.counts["handed_over"] += 1
        self._audit_disk()
        self.begin_at = self.loop.now + self.dice.choice((0.0, 0.001, 0.05))

    # -- looking

    def audit(self) -> None:
        self.net.check_due()
        self._audit_disk()
        if self.life is not None and self.life.up:
            self._checked(
                "the daemon is sound", audit.daemon_is_sound, self.life, self.disk, self.faults.corrupted
            )
            if not {"stray", "liar"} & self.faults.drawn:
                maps = [e.client._maps for e in self.engines] + [e.strict_client._maps for e in self.engines]
                self._checked("never mixing", audit.old_memory_is_empty, self.life, maps)
            lossy = self.faults.no_memory or self.faults.small_disk or self.faults.commit_error
            self._checked("quotas are kept", self.quotas.check, self.life, bool(lossy))
            if not self.faults.corrupted:
                quarantined = self.life.shell.placement.counters["quarantined_blocks"]
                if quarantined:
                    self.fail("nothing good is quarantined", f"{quarantined} blocks")

    def _will_lose_some(self, life: Life) -> bool:
        """Whether extents may lie beyond a lower limit."""
        resizing = life.shell.placement.resizing
        lost = any(resizing.is_at_work(tier) for tier in range(len(life.shell.placement.residency.tiers)))
        self.counts["crashed_while_resizing"] += lost
        return lost

    def _audit_disk(self) -> None:
        if not self.faults.corrupted:
            self._checked("records prove their slots", audit.records_prove_their_slots, self.disk)
            for (number, key), record in audit.records(self.disk).items():
                space = self._space(number)
                if self.oracle.is_forgotten(space, key, record.payload(self.disk)):
                    self.fail("what was invalidated is off the record", f"{key!r} of {SPACES[space]}")

    def _space(self, number: int) -> int:
        """Which layout has this number on record."""
        return _FINGERPRINTS.index(audit.fingerprints(self.disk)[number])

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
        crashes.sort(reverse=True)
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
        self.come_to_rest()

    def step(self) -> bool:
        """One callback, and what follows from it in the world outside."""
        if self.life is None and self.loop.now >= self.begin_at:
            self.begin()
        until = self.begin_at if self.life is None else float("inf")
        if not self.loop.step(until):
            self.loop.now = max(self.loop.now, until if until != float("inf") else self.loop.now)
            return self.life is None
        if self.life is not None and self.life.stopped:
            self.crash(STOP)
        if self.loop.steps % _AUDIT_EVERY == 0:
            self.disk.rot()
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
            promised = self._on_record()
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
        return [(self._space(number), key) for number, key in sorted(audit.records(self.disk))]

    def _settle(self) -> None:
        """All clients leave; in the end nobody holds anything."""
        for connection in list(self.net.connections.values()):
            connection.close()
        assert self.life is not None
        self.life.shell.reconfigure(replace(self.setup, scrub_bytes_per_s=0).config())
        ends = self.loop.now + 100
        while self.loop.now < ends and self.loop.waiting and self.step():
            pass
        self.audit()
        self._checked("nothing is held in the end", audit.nothing_is_held, self.life)
        self.life.server.status(Identity(0, "default", Role.ADMIN, operator=True))

    def close(self) -> None:
        """Lets go of descriptors, memory and tasks."""
        self.faults.over = True
        for engine in self.engines:
            for task in asyncio.all_tasks(engine.process):
                task.get_coro().close()  # type: ignore[union-attr]
        if self.life is not None:
            self.life.end()
        self.manager.forget_all()
        self.loop.clear()


def simulate(seed: int, trace: Callable[[str], None] | None = None, plain: bool = False) -> Outcome:
    """Runs one seed. See World."""
    world = World(seed, trace, plain)
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
    happened = world.faults.happened
    return Outcome(seed, violation, digest, world.loop.steps, happened, world.operations, world.counts)
