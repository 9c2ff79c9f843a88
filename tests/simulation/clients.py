"""Engines at work: each a process with one `AsyncClient`, doing one thing after another.

Everything read and verified is compared with the oracle; every call has to end by its deadline.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, NamedTuple

from kvstore.client.aio import AsyncClient
from kvstore.client.leases import Lease, Reservation
from kvstore.errors import KVStoreError, MisuseError
from kvstore.types import Layout
from kvstore.wire import messages as m
from tests.simulation.daemon import TENANTS
from tests.simulation.loop import Process


class Space(NamedTuple):
    """A namespace: whose, of which layout, and how long its blocks live (s; 0: for good)."""

    owner: str
    layout: Layout
    ttl_s: float = 0.0

    @property
    def fingerprint(self) -> bytes:
        """What it is called in headers and records."""
        return self.layout.fingerprint(self.owner)


SPACES = (
    Space("one", Layout("a", 4096)),
    Space("one", Layout("b", 3000)),
    Space("one", Layout("c", 8192)),
    Space("one", Layout("d", 4096), ttl_s=3.0),
    Space("two", Layout("a", 4096)),
    Space("two", Layout("c", 3000)),
    Space("two", Layout("d", 4000), ttl_s=0.5),
    Space("one", Layout("e", 4096, kind="independent")),
    Space("two", Layout("e", 3000, kind="independent")),
)
SHARED = (0, 1, 4, 7)
"""Those that are published to the other tenant now and then."""
_GRACE_S = 0.065  # a copy that has begun goes on to its end, and threads take up to 20 ms to notice anything


def chain(dice: random.Random) -> list[bytes]:
    """Keys of a prompt from its root on; prompts share their beginnings."""
    stem, branch, n = dice.randrange(4), dice.randrange(2), dice.randint(1, 20 if dice.random() < 0.1 else 6)
    return [b"s%db%dk%02d" % (stem, branch if i >= 2 else 0, i) for i in range(n)]


def keys_of(dice: random.Random, space: int) -> list[bytes]:
    """Keys of a prompt; of independent blocks, some of them in any order."""
    keys = chain(dice)
    return dice.sample(keys, dice.randint(1, len(keys))) if SPACES[space].layout.independent else keys


class Engine:
    """One client process. `world` is the run it belongs to."""

    def __init__(self, world: Any, number: int, busy: bool = True) -> None:
        """`busy`: it starts to work at once, until the world ends."""
        self.world = world
        self.process = Process(world.loop, f"client{number}")
        self.dice: random.Random = world.dice
        self.tenant = tenant = TENANTS[number % len(TENANTS)]
        deadline_s = self.dice.choice((0.02, 0.5, 5.0)) if busy else 5.0
        self.client = AsyncClient("unix:///simulated", tenant, deadline_s)
        self.strict_client = AsyncClient("unix:///simulated", tenant, deadline_s, strict=True)
        self.own = [i for i in world.spaces if SPACES[i].owner == tenant]
        self.spaces = [self._namespace(self.client, space) for space in SPACES]
        self.strict = [self._namespace(self.strict_client, space) for space in SPACES]
        self.pace_s = self.dice.choice((0.0005, 0.01, 1.0))
        tasks = self.dice.choice((1, 1, 2)) if busy else 0
        self.tasks = [self.process.create_task(self._live()) for _ in range(tasks)]

    def _namespace(self, client: AsyncClient, space: Space) -> Any:
        if space.owner != self.tenant:
            return client.namespace(space.layout, owner=space.owner)
        return client.namespace(space.layout, ttl_s=space.ttl_s)

    def begin(self, doing: Any) -> None:
        """One more thing to do."""
        self.tasks.append(self.process.create_task(doing))

    async def _live(self) -> None:
        more = _WITH_A_GPU if self.world.gpu is not None else {}
        more = more | (_WITH_KINDS if self.world.has_kinds else {})
        more = more | (_IN_TURNS if self.world.takes_turns else {})
        names, weights = zip(*(_WEIGHTS | more).items(), strict=True)
        while not self.world.ending:
            await asyncio.sleep(self.dice.expovariate(1 / self.pace_s))
            away_s = self.client._backoff._until - self.world.loop.now
            if away_s > 0 and self.dice.random() < 0.9:
                await asyncio.sleep(away_s)
                continue
            [name] = self.dice.choices(names, weights)
            if name == "misuse" and not self.world.faults.hits(self.dice, "misuse"):
                continue
            self.world.operations[name] += 1
            await self._cancelled_or_not(getattr(self, name)(), name)

    async def _cancelled_or_not(self, doing: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        if self.world.faults.hits(self.dice, "quitter"):
            await asyncio.sleep(self.dice.expovariate(1 / 0.001))
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self.world.log(f"{name} cancelled")

    async def _timed(self, what: str, call: Any, deadline_s: float | None = None) -> Any:
        """The call's result; it has to come by the deadline."""
        began = self.world.loop.now
        result = await call
        took = self.world.loop.now - began
        shown = result if isinstance(result, int) else getattr(result, "stored", "")
        self.world.log(f"{self.process.name} {what} -> {shown}")
        if took > (deadline_s or self.client.deadline_s) + _GRACE_S:
            self.world.fail("calls end by their deadline", f"{what} took {took:.6f} s")
        return result

    # -- what engines do

    def _some(self, own: bool = False) -> tuple[int, Any, list[bytes]]:
        """(number of a namespace, it, keys): often what somebody has just had to do with."""
        foreign = [i for i in SHARED if i in self.world.spaces and i not in self.own]
        space = self.dice.choice([*self.own, *([] if own else foreign * 2)])
        keys = keys_of(self.dice, space)
        if self.dice.random() < 0.3 and (self.world.recent[0] in self.own or not own):
            space, keys = self.world.recent
        self.world.recent = space, keys
        return space, self.spaces[space], keys

    async def put(self) -> None:
        space, ns, keys = self._some(own=True)
        await self.store(space, ns, keys)

    async def store(self, space: int, ns: Any, keys: list[bytes]) -> int:
        """Puts a chain from a random place on; how many blocks were stored."""
        start = self.dice.randrange(len(keys)) if self.dice.random() < 0.3 else 0
        has_parent = start and not ns.layout.independent
        parent, keys = (keys[start - 1] if has_parent else None), keys[start:]
        salt = self.world.new_salt()
        blocks = [self.world.payload(space, key, salt) for key in keys]
        puts = self.world.oracle.put_begins(space, keys, salt)
        over_at = math.inf
        try:
            result = await self._timed(f"put {space} {keys[-1].decode()}", ns.put(keys, blocks, parent))
            # What nobody answered may be stored later than that was noticed.
            unknown = result.why.startswith(("no answer", "the daemon did not answer"))
            over_at = math.inf if unknown else self._over_at(space)
        finally:
            self.world.oracle.put_ends(puts, over_at)
        self.world.counts["stored"] += result.stored
        self.world.counts["denied"] += result.denied
        if result.why:
            self.world.counts[f"denied: {result.why[:20]}"] += 1
        return int(result.stored)

    async def get(self) -> None:
        space, ns, keys = self._some()
        await self.fetch(space, ns, keys)

    async def fetch(self, space: int, ns: Any, keys: list[bytes], deadline_s: float | None = None) -> int:
        """Gets a chain and compares every byte; how many blocks came."""
        out = bytearray(len(keys) * ns.layout.block_bytes)
        began, at = self.world.oracle.tick(), self.world.loop.now
        n = await self._timed(
            f"get {space} {keys[-1].decode()}", ns.get(keys, out, deadline_s=deadline_s), deadline_s
        )
        size = ns.layout.block_bytes
        for i in range(n):
            self.check(space, keys[i], bytes(out[i * size : (i + 1) * size]), began, at)
        self.world.counts["hits"] += n
        self.world.counts["hits of independent blocks"] += n if ns.layout.independent else 0
        self.world.counts["hits of others"] += n if space not in self.own else 0
        self.world.counts["misses"] += len(keys) - n
        return int(n)

    def check(self, space: int, key: bytes, data: bytes, began: int, at: float) -> None:
        """What a get or a lease that began then has brought."""
        if space not in self.own and not self.world.oracle.may_read(space, began):
            self.world.fail("never mixing", f"{self.tenant} got {key!r} of {SPACES[space]}, not published")
        self.world.check_block(space, key, data, began, at)

    def _over_at(self, space: int) -> float:
        """From when on what is stored now is over; of clocks that were set nothing is promised."""
        ttl_s = SPACES[space].ttl_s
        return self.world.loop.now + ttl_s if ttl_s and not self.world.skewed else math.inf

    async def lease(self) -> None:
        space, ns, keys = self._some()
        began, at = self.world.oracle.tick(), self.world.loop.now
        acquired = ns.acquire(keys, device=self.world.device())
        lease: Lease = await self._timed(f"acquire {space} {keys[-1].decode()}", acquired)
        size = ns.layout.block_bytes
        try:
            for _ in range(self.dice.randint(1, 3)):
                await asyncio.sleep(self.dice.expovariate(1 / self.pace_s))
                if self.dice.random() < 0.5:
                    out = bytearray(len(lease) * size)
                    n = lease.copy_into(out)
                else:
                    n = lease.verify() if self.dice.random() < 0.5 else len(lease)
                    parts = [[bytearray(size // 2), bytearray(size - size // 2)] for _ in range(n)]
                    n = next((i for i in range(n) if not lease.scatter(i, parts[i])), n)
                    out = bytearray(b"".join(b"".join(p) for p in parts))
                for i in range(n):
                    self.check(space, keys[i], bytes(out[i * size : (i + 1) * size]), began, at)
        finally:
            lease.release()

    async def room(self) -> None:
        space, ns, keys = self._some(own=True)
        salt = self.world.new_salt()
        puts = self.world.oracle.put_begins(space, keys, salt)
        over_at = math.inf
        try:
            reserved = ns.reserve(keys, device=self.world.device())
            room: Reservation = await self._timed(f"reserve {space} {keys[-1].decode()}", reserved)
            with room:
                await self._fill(space, keys, room, salt)
                what = self.dice.random()
                if what < 0.7 and await self._timed(f"commit {space} {keys[-1].decode()}", room.commit()):
                    over_at = self._over_at(space)
        finally:
            self.world.oracle.put_ends(puts, over_at)

    async def _fill(self, space: int, keys: list[bytes], room: Reservation, salt: int) -> None:
        for i, wanted in enumerate(room.wanted):
            if self.dice.random() < 0.3:
                await asyncio.sleep(self.dice.expovariate(1 / self.pace_s))
            if not self.world.may_write(room):
                return
            data = self.world.payload(space, keys[wanted], salt)
            half = self.dice.randrange(len(data))
            if self.dice.random() < 0.5:
                room.gather(i, [data[:half], data[half:]])
            else:
                room.write(i, data[half:], half)
                room.write(i, data[:half])
            if self.world.faults.hits(self.dice, "liar"):
                room.fill(i, data[::-1])
                room._checksums[i] ^= 1

    async def lookup(self) -> None:
        space, ns, keys = self._some()
        began, at = self.world.oracle.tick(), self.world.loop.now
        n = await self._timed(f"lookup {space} {keys[-1].decode()}", ns.lookup(keys))
        self._check_stored(space, keys[:n], began, at)
        tables = self.client._maps.presence._tables
        self.world.counts["looked up with a presence table"] += SPACES[space].fingerprint in tables

    async def contains(self) -> None:
        """One question for several namespaces: what is said to be stored may be."""
        spaces = [self._some() for _ in range(self.dice.randint(1, 4))]
        began, at = self.world.oracle.tick(), self.world.loop.now
        asked = self.client.contains([(ns, keys) for _, ns, keys in spaces])
        masks = await self._timed(f"contains {[space for space, _, _ in spaces]}", asked)
        for (space, _, keys), mask in zip(spaces, masks, strict=True):
            there = [key for key, there in zip(keys, mask.tolist(), strict=True) if there]
            self.world.counts["present"] += len(there)
            self._check_stored(space, there, began, at)

    def _check_stored(self, space: int, keys: list[bytes], began: int, at: float) -> None:
        """What a lookup that began then has called stored."""
        for key in keys:
            if space not in self.own and not self.world.oracle.may_read(space, began):
                self.world.fail("never mixing", f"{self.tenant} was told of {key!r} of {SPACES[space]}")
            if not self.world.oracle.may_be_stored(space, key, began, at):
                self.world.fail("what is said to be stored may be", f"{key!r} of {SPACES[space]}")

    async def prefetch(self) -> None:
        space, ns, keys = self._some()
        prefetched = ns.prefetch(keys, device=self.world.device())
        await self._timed(f"prefetch {space} {keys[-1].decode()}", prefetched)

    async def pin(self) -> None:
        space, ns, keys = self._some(own=True)
        ttl_s = self.dice.choice((0.01, 1.0, 60.0))
        await self._timed(f"pin {space} {keys[-1].decode()}", ns.pin(keys, ttl_s))

    async def unpin(self) -> None:
        space, ns, keys = self._some(own=True)
        await self._timed(f"unpin {space} {keys[-1].decode()}", ns.unpin(keys))

    async def invalidate(self) -> None:
        space, _, keys = self._some(own=True)
        keys = keys[self.dice.choice((0, self.dice.randrange(len(keys)))) :]
        began = self.world.oracle.tick()
        try:
            await self._timed(f"invalidate {space} {keys[-1].decode()}", self.strict[space].invalidate(keys))
        except KVStoreError as error:
            self.world.log(f"invalidate: {error}")
        else:
            self.world.oracle.invalidated(space, keys, began)

    async def publish(self) -> None:
        """Lets the other tenant read a namespace, or takes that back."""
        space = self.dice.choice([i for i in SHARED if i in self.own])
        given = self.dice.random() < 0.75
        others = [name for name in TENANTS if name != self.tenant] if given else []
        grant = self.world.oracle.publishes(space, given)
        try:
            await self._timed(f"publish {space} {given}", self.strict[space].publish(others))
        except KVStoreError as error:
            self.world.log(f"publish: {error}")
        else:
            grant.ended = self.world.oracle.tick()

    async def forget(self) -> None:
        """One namespace, or all of one's own, or the tenant: empty from now on."""
        what = self.dice.choice(("space", "space", "all", "tenant"))
        space = self.dice.choice(self.own)
        began = self.world.oracle.tick()
        calls = {
            "space": self.strict[space].invalidate,
            "all": self.strict_client.invalidate,
            "tenant": lambda: self.strict_client.delete_tenant(self.tenant, self.client.deadline_s),
        }
        try:
            await self._timed(f"forget {what} {space}", calls[what]())
        except KVStoreError as error:
            self.world.log(f"forget: {error}")
        else:
            self.world.oracle.forgotten([space] if what == "space" else self.own, began)

    async def reload(self) -> None:
        """Quotas change, and perhaps who goes first."""
        self.world.change_settings()

    async def works(self) -> None:
        """A put, then a get of the same: it has to work within two minutes."""
        space = self.own[0]
        ends = self.world.loop.now + 120
        keys = [b"last%d" % i for i in range(2)]
        while self.world.loop.now < ends:
            stored = await self.store(space, self.spaces[space], keys)
            if await self.fetch(space, self.spaces[space], keys) == len(keys):
                return
            self.world.log(f"stored {stored}, and no hit")
            await asyncio.sleep(1)
        self.world.fail("it works again when faults end", "a put is no hit for two minutes")

    async def read_back(self, keys: list[tuple[int, bytes]]) -> None:
        """Each of these is a hit with the right bytes."""
        for space, key in keys:
            for _ in range(5):
                # While all of DRAM is being scrubbed there is no room to promote to.
                if await self.fetch(space, self.spaces[space], [key]):
                    break
                await asyncio.sleep(1)
            else:
                self.world.fail("what is on record is served", f"{key!r} of {SPACES[space]}")

    async def misuse(self) -> None:
        """What only a broken client sends."""
        _, ns, keys = self._some(own=True)
        kind = self.dice.randrange(6)
        link = self.world.some_link(self.process)
        if kind == 0 and link is not None:
            link.post(self.dice.choice((m.Release, m.Abort))(_UNKNOWN + self.dice.randrange(20)))
        elif kind == 1 and link is not None:
            link.send_raw(self.dice.randbytes(self.dice.randrange(1, 20)))
        elif kind == 2:
            await self._timed("put twice", ns.put([keys[0], keys[0]], [bytes(ns.layout.block_bytes)] * 2))
        elif kind == 3:
            await self._orphan(ns)
        elif kind == 4:
            try:
                await ns.put([b""], [b""])
            except MisuseError:
                return
            self.world.fail("misuse raises", "an empty key was taken")
        elif link is not None:
            link.post(m.Suspect(0, self.dice.randrange(5), len(keys[0]), b"".join(keys)))

    async def _orphan(self, ns: Any) -> None:
        put = ns.put([b"orphan"], [bytes(ns.layout.block_bytes)], b"no such key")
        if not ns.layout.independent:
            await self._timed("put orphan", put)
            return
        try:
            await put
        except MisuseError:
            return
        self.world.fail("misuse raises", "an independent block was given a parent")


_WEIGHTS = {
    "put": 10,
    "get": 10,
    "lease": 5,
    "room": 4,
    "lookup": 10,
    "prefetch": 2,
    "pin": 1,
    "unpin": 1,
    "invalidate": 3,
    "publish": 5,
    "forget": 0.3,
    "reload": 0.5,
    "misuse": 2,
}
_UNKNOWN = 1 << 20
"""Leases and reservations have lower numbers. Those of other connections can't be named."""

_IN_TURNS = {"put": 20, "invalidate": 12, "forget": 1}
"""Where devices are away in turn: much is deleted meanwhile."""

_WITH_A_GPU = {"lease": 20, "room": 15, "prefetch": 5}
_WITH_KINDS = {"contains": 6}
