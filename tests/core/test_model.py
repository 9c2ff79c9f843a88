"""Placement against a plain dictionary, in a world where copies fail, dawdle, overtake each other and rot.

`pytest tests/core/test_model.py --hypothesis-profile=explore` looks further than the same examples each run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.policy import POLICIES
from kvstore.core.policy.admission import DAY_S, Rule
from kvstore.core.queues.device_queue import DRAINING, FENCED, SERVING
from kvstore.types import ALIGN
from tests.core.world import World, granted_of, hash_of, joined, payload

CLIENTS = 3
BLOCK_BYTES = {1: 100, 2: 100, 3: 5000, 4: 100}
INDEPENDENT = 4
"""The namespace whose blocks have no parents."""
WAITS = [0.0, 0.004, 0.02, 1.0]

RULES = [
    Rule(),
    Rule(),
    Rule("twice"),
    Rule("reuse", 0.05),
    Rule("reuse", 0.01, int(DAY_S) * 2 * ALIGN),
    Rule("always", 0.0, int(DAY_S) * 100 * ALIGN),
]
"""What the lower tier takes, with budgets of some blocks a second."""

clients = st.integers(0, CLIENTS - 1)
places = st.sampled_from([0, 0, 1, 2])
"""Where a request is to be served: in DRAM, or in the first or second pool of HBM if there is one."""
some = st.integers(0, 255)


@st.composite
def chains(draw: st.DrawFn, namespaces: tuple[int, ...] = (1, 1, 2, 3, 4, 4)) -> tuple[int, list[bytes]]:
    """(namespace, keys from the root on): prompts that share their beginnings, or independent blocks."""
    namespace = draw(st.sampled_from(namespaces))
    stem, branch, n = draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.integers(1, 5))
    keys = [b"s%db%dk%d" % (stem, branch if i >= 2 else 0, i) for i in range(n)]
    if namespace == INDEPENDENT:
        keys = draw(st.lists(st.sampled_from(keys), min_size=1, unique=True))
    # Keys of one namespace have one length, the other one's are as long as keys get.
    return namespace, [k.ljust(64, b"\0") if namespace == 2 else k for k in keys]


@dataclass
class OpenRoom:
    client: int
    namespace: int
    keys: list[bytes]
    room: ac.Reserved
    salt: int
    dead: set[bytes] = field(default_factory=set)


@dataclass
class OpenLease:
    client: int
    lease: int
    seen: dict[tuple[int, int, int], bytes]


@dataclass
class Asked:
    client: int
    namespace: int
    keys: list[bytes]
    salt: int = 0


class Machine(RuleBasedStateMachine):
    """Every committed value is in `stored`; what a reader gets must be in there, or it is a miss."""

    w: World

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[tuple[int, bytes], bytes] = {}
        self.rooms: list[OpenRoom] = []
        self.leases: list[OpenLease] = []
        self.asked: dict[int, Asked] = {}
        self.pinned: dict[tuple[int, bytes], float] = {}
        self.salt = 0
        self.no_chains = False

    def build(self, world: World) -> None:
        self.w = world
        for namespace, block_bytes in BLOCK_BYTES.items():
            world.open(namespace, block_bytes, independent=namespace == INDEPENDENT)

    # -- what the model makes of answers

    def take_room(self, asked: Asked, room: ac.Action) -> None:
        if not isinstance(room, ac.Reserved):
            assert isinstance(room, ac.Deny)
            assert room.why
            return
        assert len(room.status) == len(asked.keys)
        assert len(room.where) == int((room.status == ac.GRANTED).sum())
        for key, status in zip(asked.keys, room.status.tolist(), strict=True):
            assert status != ac.PRESENT or (asked.namespace, key) in self.stored
        if room.lease:
            self.rooms.append(OpenRoom(asked.client, asked.namespace, asked.keys, room, asked.salt))

    def take_grant(self, asked: Asked, grant: ac.Action) -> None:
        if not isinstance(grant, ac.Grant):
            assert isinstance(grant, ac.Deny)
            assert grant.why
            return
        assert len(grant.where) <= self.prefix(asked.namespace, asked.keys), "a miss was granted"
        places = self.w.places(self.w.tier_of(grant), grant.where)
        for key, place, data in zip(
            asked.keys, places, self.w.read(asked.namespace, asked.keys, grant), strict=False
        ):
            if data is None:
                assert place in self.w.rotten, "other bytes than were put"
            else:
                assert data == self.stored[asked.namespace, key], "another value"
        assert bool(grant.lease) == bool(len(grant.where))
        if grant.lease:
            self.leases.append(OpenLease(asked.client, grant.lease, {p: self.w.bytes[p] for p in places}))

    def prefix(self, namespace: int, keys: list[bytes]) -> int:
        n = 0
        while n < len(keys) and (namespace, keys[n]) in self.stored:
            n += 1
        return n

    def at(self, place: int) -> int:
        """The tier of memory that a request names."""
        return self.w.pools[place - 1] if 0 < place <= len(self.w.pools) else 0

    def forget(self, namespace: int, keys: list[bytes]) -> None:
        for key in keys:
            self.stored.pop((namespace, key), None)

    # -- events

    @rule(client=clients, chain=chains(), cut=some, wait=st.sampled_from(WAITS), place=places)
    def reserve(self, client: int, chain: tuple[int, list[bytes]], cut: int, wait: float, place: int) -> None:
        namespace, keys = chain
        cut %= len(keys)
        self.salt += 1
        asked = Asked(client, namespace, keys[cut:], self.salt)
        parent = keys[cut - 1] if cut and namespace != INDEPENDENT else b""
        answer = self.w.reserve(client, namespace, keys[cut:], parent, wait, self.at(place))
        if answer is None:
            self.asked[self.w.last_request] = asked
        else:
            self.take_room(asked, answer)

    @precondition(lambda self: self.rooms)
    @rule(which=some, skip=st.integers(0, 20))
    def commit(self, which: int, skip: int) -> None:
        o = self.rooms.pop(which % len(self.rooms))
        granted = granted_of(o.keys, o.room)
        sums = self.w.fill(o.namespace, o.keys, o.room, o.salt)
        written = [i != skip for i in range(len(granted))]
        alive = [k for k, w in zip(granted, written, strict=True) if w and k not in o.dead]
        alive = alive if self.w.tier_of(o.room) not in self.w.lost else []
        assert self.w.commit(o.client, o.room, sums, written) == len(alive)
        for key in alive:
            self.stored[o.namespace, key] = payload(o.namespace, key, o.salt)

    @rule(client=clients, chain=chains(), place=places)
    def put(self, client: int, chain: tuple[int, list[bytes]], place: int) -> None:
        before = len(self.rooms)
        self.reserve(client, chain, 0, 0.0, place)
        if len(self.rooms) > before:
            self.commit(before, 99)

    @precondition(lambda self: self.rooms)
    @rule(which=some)
    def abort(self, which: int) -> None:
        o = self.rooms.pop(which % len(self.rooms))
        self.w.send(ev.Abort(o.client, o.room.lease))

    @rule(client=clients, chain=chains(), wait=st.sampled_from(WAITS), place=places)
    def acquire(self, client: int, chain: tuple[int, list[bytes]], wait: float, place: int) -> None:
        namespace, keys = chain
        answer = self.w.acquire(client, namespace, keys, wait, at=self.at(place))
        if answer is None:
            self.asked[self.w.last_request] = Asked(client, namespace, keys)
        else:
            self.take_grant(Asked(client, namespace, keys), answer)

    @precondition(lambda self: self.leases)
    @rule(which=some)
    def release(self, which: int) -> None:
        lease = self.leases.pop(which % len(self.leases))
        self.w.send(ev.Release(lease.client, lease.lease))

    @rule(chain=chains(), place=places)
    def lookup(self, chain: tuple[int, list[bytes]], place: int) -> None:
        if not self.no_chains:
            assert self.w.lookup(*chain, at=self.at(place)) <= self.prefix(*chain), "a miss was promised"

    @rule(chain=chains())
    def contains(self, chain: tuple[int, list[bytes]]) -> None:
        namespace, keys = chain
        mask = self.w.contains(namespace, keys)
        assert all((namespace, key) in self.stored for key, there in zip(keys, mask, strict=True) if there)
        n = self.w.lookup(namespace, keys)
        assert all(mask[:n]), "a block that lookup counts is absent"
        assert namespace != INDEPENDENT or [*mask, False].index(False) == n, "lookup counts the leading keys"

    @rule(chain=chains(), place=places)
    def prefetch(self, chain: tuple[int, list[bytes]], place: int) -> None:
        answer = self.w.ask(ev.Prefetch(0, chain[0], joined(chain[1]), tier=self.at(place)))
        assert isinstance(answer, ac.Answer)
        assert answer.value <= self.prefix(*chain)

    @rule(chain=chains(), for_s=st.sampled_from([0.01, 30.0]))
    def pin(self, chain: tuple[int, list[bytes]], for_s: float) -> None:
        until = self.w.now + for_s
        answer = self.w.ask(ev.Pin(0, chain[0], joined(chain[1]), until))
        assert isinstance(answer, ac.Answer)
        assert answer.value <= self.prefix(*chain)
        for key in chain[1][: answer.value]:
            who = chain[0], key
            self.pinned[who] = max(until, self.pinned.get(who, 0.0))

    @rule(chain=chains())
    def unpin(self, chain: tuple[int, list[bytes]]) -> None:
        answer = self.w.ask(ev.Unpin(0, chain[0], joined(chain[1])))
        assert isinstance(answer, ac.Answer)
        for key in chain[1]:
            self.pinned.pop((chain[0], key), None)

    @precondition(lambda self: self.w.copies)
    @rule(which=some)
    def copy_ends(self, which: int) -> None:
        self.w.finish(list(self.w.copies)[which % len(self.w.copies)], [])

    @rule(name=st.sampled_from(list(POLICIES)))
    def policy_changes(self, name: str) -> None:
        self.w.send(ev.SetPolicy(name))

    @rule(ms=st.integers(0, 50))
    def time_passes(self, ms: int) -> None:
        self.w.now += ms / 1000
        self.w.send(ev.Tick())

    # -- always

    @invariant()
    def answers_come_once_and_are_true(self) -> None:
        for request, asked in list(self.asked.items()):
            answer = self.w.answers.get(request)
            if answer is not None:
                del self.asked[request]
                take = self.take_grant if isinstance(answer, ac.Grant) else self.take_room
                take(asked, answer)

    @invariant()
    def leased_slots_keep_their_bytes(self) -> None:
        for lease in self.leases:
            for place, data in lease.seen.items():
                if place[0] not in self.w.lost:
                    assert self.w.bytes[place] == data or place in self.w.rotten, "a leased slot was reused"

    @invariant()
    def nothing_is_over_its_limit(self) -> None:
        for state in self.w.p.residency.tiers:
            assert state.extents.used_bytes <= state.extents.bound_bytes

    def teardown(self) -> None:
        if hasattr(self, "w"):
            self.w.settle(CLIENTS)


class Faulty(Machine):
    """Anything may go wrong; what is lost is a miss."""

    @initialize(
        dram=st.integers(1, 3),
        nvme=st.sampled_from([0, 1, 4, (2, 3), (1, 1, 2)]),
        hbm=st.sampled_from([0, 1, 3, (1, 2)]),
        missing=st.sampled_from([0, 0, 1]),
        slots=st.sampled_from([2, 4, 7]),
        write_policy=st.sampled_from(["write_through", "on_evict"]),
        policy=st.sampled_from(list(POLICIES)),
        rule=st.sampled_from(RULES),
    )
    def start(
        self,
        dram: int,
        nvme: int | tuple[int, ...],
        hbm: int | tuple[int, ...],
        missing: int,
        slots: int,
        write_policy: str,
        policy: str,
        rule: Rule,
    ) -> None:
        how = {"policy": policy, "write_policy": write_policy, "admission": rule, "hbm": hbm}
        if nvme and missing:
            how["nvme_gets"] = (nvme if isinstance(nvme, int) else nvme[0]) - 1
        self.build(World(dram, nvme, slots=slots, **how))

    @precondition(lambda self: self.w.copies)
    @rule(which=some, results=st.lists(st.sampled_from([ev.OK, ev.CORRUPT, ev.FAILED]), max_size=8))
    def copy_fails(self, which: int, results: list[int]) -> None:
        self.w.finish(list(self.w.copies)[which % len(self.w.copies)], results)

    @precondition(lambda self: self.w.bytes)
    @rule(which=some)
    def slot_rots(self, which: int) -> None:
        self.w.rot(list(self.w.bytes)[which % len(self.w.bytes)])

    @rule(chain=chains(), place=places)
    def reader_complains(self, chain: tuple[int, list[bytes]], place: int) -> None:
        self.w.ask(ev.Suspect(0, chain[0], joined(chain[1]), self.at(place)))

    @precondition(lambda self: self.w.probes)
    @rule(which=some)
    def probe_ends(self, which: int) -> None:
        self.w.probe(list(self.w.probes)[which % len(self.w.probes)])

    @rule(chain=chains(), first=some)
    def invalidate(self, chain: tuple[int, list[bytes]], first: int) -> None:
        namespace, keys = chain[0], chain[1][first % len(chain[1]) :]
        self.w.invalidate(namespace, keys)
        self.forget(namespace, keys)
        for o in self.rooms:
            if o.namespace == namespace:
                o.dead.update(keys)

    @precondition(lambda self: self.rooms)
    @rule(which=some, first=some)
    def invalidate_what_is_being_written(self, which: int, first: int) -> None:
        o = self.rooms[which % len(self.rooms)]
        self.invalidate((o.namespace, o.keys), first)

    @rule(client=clients, chain=chains(), place=places)
    def replace(self, client: int, chain: tuple[int, list[bytes]], place: int) -> None:
        self.invalidate(chain, 0)
        self.put(client, chain, place)

    @rule(client=clients)
    def client_is_lost(self, client: int) -> None:
        self.w.send(ev.ClientLost(client))
        self.leases = [x for x in self.leases if x.client != client]
        self.rooms = [x for x in self.rooms if x.client != client]
        self.asked = {k: x for k, x in self.asked.items() if x.client != client}

    @rule(client=clients, chain=chains(), order=st.permutations(range(3)), parent=some)
    def reserve_what_is_no_chain(
        self, client: int, chain: tuple[int, list[bytes]], order: list[int], parent: int
    ) -> None:
        namespace, keys = chain
        self.no_chains = True
        asked = Asked(client, namespace, [keys[i] for i in order if i < len(keys)], self.salt)
        answer = self.w.reserve(client, namespace, asked.keys, keys[parent % len(keys)])
        assert answer is not None
        assert namespace != INDEPENDENT or isinstance(answer, ac.Deny), "a parent in an independent namespace"
        self.take_room(asked, answer)

    @rule(chain=chains(), wait=st.sampled_from(WAITS), place=places)
    def acquire_twice_the_same(self, chain: tuple[int, list[bytes]], wait: float, place: int) -> None:
        self.acquire(0, (chain[0], [*chain[1], *chain[1]]), wait, place)
        self.prefetch((chain[0], [*chain[1], chain[1][0]]), place)

    @rule()
    def hours_pass(self) -> None:
        self.w.now += 10_000
        self.w.send(ev.Tick())
        waiting = set(self.asked) - set(self.w.answers)
        assert not waiting, "a deadline passed without an answer"

    @rule()
    def flush(self) -> None:
        self.w.send(ev.Flush())

    @rule(handover=st.booleans())
    def crash(self, handover: bool) -> None:
        self.w.restart(handover)
        self.leases, self.rooms, self.asked = [], [], {}

    @rule(tier=st.integers(0, 5), blocks=st.integers(0, 3))
    def scrub(self, tier: int, blocks: int) -> None:
        if tier < len(self.w.p.residency.tiers):
            self.w.send(ev.Scrub(tier, blocks * ALIGN))

    @rule(tier=st.integers(1, 5), state=st.sampled_from([SERVING, SERVING, DRAINING, FENCED]))
    def operator_acts(self, tier: int, state: str) -> None:
        if tier < len(self.w.p.residency.tiers) and not self.w.leaves(tier):
            self.w.send(ev.SetDevice(tier, state))

    @precondition(lambda self: self.w.p.residency.topology.persistent and self.w.p.hotplug.addable > 0)
    @rule(extents=st.integers(1, 3))
    def device_comes(self, extents: int) -> None:
        self.w.add(extents)

    @rule(tier=st.integers(1, 5))
    def device_goes(self, tier: int) -> None:
        first = self.w.p.residency.topology.persistent[:1]
        if tier < len(self.w.p.residency.tiers) and tier not in first and not self.w.leaves(tier):
            self.w.leave(tier)

    @precondition(lambda self: set(self.w.pools) - self.w.lost)
    @rule(which=some)
    def pool_is_lost(self, which: int) -> None:
        there = sorted(set(self.w.pools) - self.w.lost)
        self.w.lose(there[which % len(there)])

    @rule(tier=st.integers(0, 5), extents=st.integers(1, 5))
    def tier_is_resized(self, tier: int, extents: int) -> None:
        if tier < len(self.w.p.residency.tiers) and not self.w.leaves(tier):
            state = self.w.p.residency.tiers[tier].extents
            floors = int(state.holdings.floor.sum())
            self.w.resize(tier, min(max(extents, floors), state.most_bytes // state.extent_bytes))

    @precondition(lambda self: self.w.removals)
    @rule(which=some)
    def extent_is_removed(self, which: int) -> None:
        self.w.remove(which % len(self.w.removals))

    @precondition(lambda self: self.w.wanted)
    @rule(all_of_them=st.booleans())
    def extents_are_made(self, all_of_them: bool) -> None:
        self.w.make(all_of_them)

    @precondition(lambda self: self.w.copies)
    @rule()
    def device_is_quiet(self) -> None:
        devices = [state.device for state in self.w.p.residency.tiers[1:]]
        at_work = [device.moving > 0 for device in devices]
        self.w.now += 20
        self.w.send(ev.Tick())
        assert [device.fenced for device in devices] == at_work


class Crowded(Machine):
    """No faults, room for little: what is pinned stays, whoever presses."""

    @initialize(
        dram=st.integers(1, 2),
        nvme=st.sampled_from([0, 1, 2, (1, 1), (1, 2)]),
        hbm=st.sampled_from([0, 1, (1, 1)]),
        slots=st.sampled_from([4, 7]),
        write_policy=st.sampled_from(["write_through", "on_evict"]),
        policy=st.sampled_from(list(POLICIES)),
        rule=st.sampled_from(RULES),
    )
    def start(
        self,
        dram: int,
        nvme: int | tuple[int, ...],
        hbm: int | tuple[int, ...],
        slots: int,
        write_policy: str,
        policy: str,
        rule: Rule,
    ) -> None:
        how = {"policy": policy, "write_policy": write_policy, "admission": rule, "hbm": hbm}
        self.build(World(dram, nvme, slots=slots, **how))

    @invariant()
    def pinned_blocks_stay(self) -> None:
        r = self.w.p.residency
        for (namespace, key), until in self.pinned.items():
            if until > self.w.now:
                assert len(r.prefix(namespace, joined([key]))) == 1, f"{key!r} left in spite of its pin"


class Peaceful(Machine):
    """No faults, room for everything in the lowest tier: whatever was stored stays stored."""

    @initialize(
        nvme=st.sampled_from([0, 30, (30, 30)]),
        hbm=st.sampled_from([0, 0, 2, (1, 2)]),
        write_policy=st.sampled_from(["write_through", "on_evict"]),
        policy=st.sampled_from(list(POLICIES)),
    )
    def start(
        self, nvme: int | tuple[int, ...], hbm: int | tuple[int, ...], write_policy: str, policy: str
    ) -> None:
        how = {"policy": policy, "write_policy": write_policy, "hbm": hbm}
        self.build(World(2 if nvme else 30, nvme, slots=7, **how))

    @invariant()
    def nothing_is_forgotten(self) -> None:
        r = self.w.p.residency
        for namespace, key in self.stored:
            assert len(r.prefix(namespace, joined([key]))) == 1, f"{key!r} was forgotten"

    @rule()
    def crash_that_keeps_memory(self) -> None:
        r = self.w.p.residency
        others = [tier for tier in range(len(r.tiers)) if tier not in self.w.pools]
        for namespace, key in list(self.stored):
            row = r.index.find_one(namespace, key)
            if (r.blocks.slot[others, row] < 0).all():
                del self.stored[namespace, key]
        self.w.restart(handover=True)
        self.leases, self.rooms, self.asked, self.pinned = [], [], {}, {}

    @rule(chain=chains(), place=places)
    def get(self, chain: tuple[int, list[bytes]], place: int) -> None:
        namespace, keys = chain
        n = self.prefix(namespace, keys)
        if n and not self.leases and not self.rooms and not self.asked and not self.w.p.residency.pins.ends:
            self.w.finish_all()
            want = [self.stored[namespace, key] for key in keys[:n]]
            got = self.w.get(namespace, keys[:n], at=self.at(place))
            # The large blocks' share of the upper tier may be smaller than a chain of them.
            assert got == want[: len(got)]
            assert got == want or BLOCK_BYTES[namespace] > ALIGN


profile = settings()
TestFaulty = Faulty.TestCase
TestFaulty.settings = settings(max_examples=2 * profile.max_examples, stateful_step_count=60)
TestCrowded = Crowded.TestCase
TestCrowded.settings = settings(max_examples=profile.max_examples // 2, stateful_step_count=60)
TestPeaceful = Peaceful.TestCase
TestPeaceful.settings = settings(max_examples=profile.max_examples // 2, stateful_step_count=60)


def test_a_reader_that_verifies_notices_rot() -> None:
    w = World()
    w.open(1)
    w.put(0, 1, [b"a", b"b"])
    grant = w.acquire(0, 1, [b"a", b"b"])
    assert isinstance(grant, ac.Grant)
    w.rot(w.places(0, grant.where)[1])
    assert w.read(1, [b"a", b"b"], grant) == [payload(1, b"a"), None]
    assert hash_of(payload(1, b"b")) == int(grant.checksum[1])
    assert np.array_equal(grant.slots["tier"], [1, 1])
