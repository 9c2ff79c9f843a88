"""Turns of requests on a loop with virtual time: nobody holds it, nobody is overtaken, who floods is told."""

from __future__ import annotations

import heapq
import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Client
from kvstore.daemon.operator.latency import Calls
from kvstore.daemon.server.connection import Connection
from kvstore.daemon.server.request_scheduler import (
    _READ_BURST_BYTES,
    QUEUED_BYTES,
    READ_BYTES_PER_S,
    SLICE_S,
    ConnectionQueue,
    RequestScheduler,
    cost,
    nbytes,
)
from kvstore.errors import RemoteProtocolError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.daemons import SMALL, eventually
from tests.daemons import Peer as Wire

MICRO = 1e-6
MIB = 1 << 20
DECODE_S, REFUSE_S, RUN_S = 2 * MICRO, 2 * MICRO, 20 * MICRO
STEP_S = 16 * (DECODE_S + REFUSE_S) + RUN_S + MICRO
"""What is not cut: reading some messages, then running one."""
LIMIT = 32


class Loop:
    """Rounds of a loop: what is read, then what was ready when the round began."""

    def __init__(self) -> None:
        self.now = 100.0
        self.longest_s = 0.0
        self._ready: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timers: list[tuple[float, int, SimpleNamespace]] = []
        self._numbers = itertools.count()

    def stopwatch(self) -> float:
        return self.now

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self._ready.append((call, args))

    def call_later(self, delay_s: float, call: Callable[..., None]) -> SimpleNamespace:
        assert delay_s >= 0
        timer = SimpleNamespace(call=call)
        timer.cancel = lambda: setattr(timer, "call", lambda: None)
        heapq.heappush(self._timers, (self.now + delay_s, next(self._numbers), timer))
        return timer

    def do(self, call: Callable[..., None], *args: Any) -> None:
        """One callback, watched."""
        began = self.now
        call(*args)
        self.longest_s = max(self.longest_s, self.now - began)

    def round(self) -> bool:
        """What is ready now; False if nothing was."""
        while self._timers and self._timers[0][0] <= self.now:
            self._ready.append((heapq.heappop(self._timers)[2].call, ()))
        ready, self._ready = self._ready, []
        for call, args in ready:
            self.do(call, *args)
        return bool(ready)

    def run(self, until: float = float("inf")) -> None:
        """Until nothing is ready or to come."""
        while self.now < until and (self.round() or self._timers):
            if not self._ready and self._timers:
                self.now = max(self.now, self._timers[0][0])


class Peer:
    """A connection of a tenant, on which messages are numbers or real ones."""

    def __init__(self, world: World, name: str, tenant: int | None) -> None:
        self.world = world
        self.name = name
        self.ran: list[Any] = []
        self.waited: list[float] = []
        self.refused: list[Any] = []
        self.retry_s: list[float] = []
        self.errors: list[Exception] = []
        self.run_s = RUN_S
        self.closing = False
        self.paused = 0
        self.queue = ConnectionQueue(self, self)  # type: ignore[arg-type]
        if tenant is not None:
            world.scheduler.join(self.queue, tenant)

    # what the scheduler uses of a peer and of its transport

    def run(self, message: Any, waited_s: float) -> None:
        self.world.loop.now += self.run_s
        if isinstance(message, Exception):
            raise message
        if isinstance(message, m.Hello):
            self.world.scheduler.join(self.queue, int(message.token))
        self.ran.append(message)
        self.waited.append(waited_s)
        self.world.log.append(self)

    def busy(self, message: Any, retry_s: float) -> None:
        self.world.loop.now += REFUSE_S
        self.refused.append(message)
        self.retry_s.append(retry_s)

    def failed(self, error: Exception) -> None:
        self.errors.append(error)
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused += 1

    def resume_reading(self) -> None:
        assert self.paused
        self.paused -= 1

    # what a test does

    def send(self, *messages: Any) -> None:
        """One read of the socket."""

        def decoded() -> Iterator[Any]:
            for message in messages:
                self.world.loop.now += DECODE_S
                if isinstance(message, RemoteProtocolError):
                    raise message
                yield message

        self.world.loop.do(self.world.scheduler.feed, self.queue, decoded())

    def leave(self) -> None:
        self.closing = True
        self.world.scheduler.leave(self.queue)


class World:
    def __init__(self, limit: int = LIMIT) -> None:
        self.loop = Loop()
        self.scheduler = RequestScheduler(self.loop, self.loop.stopwatch, limit)  # type: ignore[arg-type]
        self.log: list[Peer] = []

    def peer(self, tenant: int | None = 0, name: str = "") -> Peer:
        return Peer(self, name, tenant)


def pings(n: int, first: int = 1) -> list[m.Ping]:
    return [m.Ping(i) for i in range(first, first + n)]


@pytest.fixture
def world() -> World:
    return World()


def test_with_empty_queues_a_message_runs_at_once(world: World) -> None:
    mine, other = world.peer(0), world.peer(1)
    for peer in (mine, other):
        peer.send(*pings(3))
        assert peer.ran == pings(3)
        assert peer.waited == [0.0] * 3
        world.loop.now += 1.0
    assert not world.loop.round()


def test_a_single_tenant_does_not_wait(world: World) -> None:
    peers = [world.peer(0) for _ in range(100)]
    for peer in peers:
        peer.run_s = 0.001
        peer.send(m.Ping(1))
    assert [peer.ran for peer in peers] == [[m.Ping(1)]] * 100


@pytest.mark.parametrize("others", [0, 1])
def test_a_long_read_does_not_hold_the_loop(others: int) -> None:
    world = World(limit=1 << 20)
    for tenant in range(others):
        world.peer(1 + tenant)
    peer = world.peer(0)
    peer.send(*[m.Release(i) for i in range(26_000)])
    assert len(peer.ran) < 15
    world.loop.run()
    assert [message.lease for message in peer.ran] == list(range(26_000))
    assert world.loop.longest_s <= SLICE_S + STEP_S


def test_a_newcomer_waits_for_two_slices_at_most_behind_a_hundred_greedy_connections(world: World) -> None:
    greedy = [world.peer(0) for _ in range(100)]
    mine = world.peer(1)
    for _ in range(20):
        for peer in greedy:
            if not peer.paused:
                peer.send(*pings(500))
        began = world.loop.now
        mine.send(m.Ping(1))
        rounds = 0
        while not mine.ran:
            assert world.loop.round()
            rounds += 1
        assert rounds <= 2
        assert world.loop.now - began <= 2 * (SLICE_S + STEP_S)
        mine.ran.clear()
        world.loop.round()
    # Only the first ones run before the loop gets to read what others have sent.
    assert world.loop.longest_s <= SLICE_S + STEP_S


def test_requests_that_come_one_a_connection_take_turns_too(world: World) -> None:
    """A hundred sockets are read in one round of the loop before the last one's turn comes."""
    greedy = [world.peer(0) for _ in range(100)]
    mine = world.peer(1)
    began = world.loop.now
    for peer in greedy:
        peer.send(m.Ping(1))
    mine.send(m.Ping(1))
    assert world.loop.now - began < 2 * SLICE_S
    world.loop.round()
    assert mine.ran
    assert world.loop.now - began < 3 * SLICE_S
    world.loop.run()
    assert all(peer.ran == [m.Ping(1)] for peer in greedy)


def test_tenants_share_by_weight() -> None:
    world = World(limit=1 << 20)
    world.scheduler.set(1, 3.0)
    peers = [world.peer(0), world.peer(0), world.peer(1)]
    for peer in peers:
        peer.send(*pings(4000))
    # All are known and waiting before the first turn.
    assert sum(len(peer.ran) for peer in peers) < 20
    world.loop.run(until=world.loop.now + 0.02)
    by_tenant = len(peers[0].ran) + len(peers[1].ran), len(peers[2].ran)
    assert by_tenant[1] / by_tenant[0] == pytest.approx(3.0, rel=0.1)


@given(st.integers(0, 1 << 32).map(Random), st.integers(1, 40), st.booleans())
def test_order_within_a_connection_is_kept_and_nothing_is_lost(
    dice: Random, limit: int, capped: bool
) -> None:
    world = World(limit)
    if capped:
        world.scheduler.set(1, 1.0, requests_per_s=5000.0)
    peers = [world.peer(None, f"{i}") for i in range(6)]
    sent: dict[str, list[Any]] = {peer.name: [] for peer in peers}
    for peer in peers:
        hello = m.Hello(m.MAGIC, m.VERSION, str(dice.randrange(3)))
        sent[peer.name].append(hello)
        peer.send(hello, *(some := pings(dice.randrange(30))))
        sent[peer.name] += some
    for _ in range(30):
        peer = dice.choice(peers)
        if not peer.paused:
            first = 1 + len(sent[peer.name])
            some = [
                dice.choice((m.Ping(n), m.Release(n), m.Commit(n, 0, b"", b""), m.Abort(n)))
                for n in range(first, first + dice.randrange(40))
            ]
            sent[peer.name] += some
            peer.send(*some)
        if dice.random() < 0.5:
            world.loop.round()
    world.loop.run()
    for peer in peers:
        mine = sent[peer.name]
        numbers = {id(message): n for n, message in enumerate(mine)}
        order = [numbers[id(message)] for message in peer.ran]
        assert order == sorted(order)
        assert isinstance(peer.ran[0], m.Hello)
        refused = {numbers[id(message)] for message in peer.refused}
        assert {*order} | refused == {*range(len(mine))}
        assert len(order) + len(refused) == len(mine)
        assert {type(message) for message in peer.refused} <= {m.Ping}
        assert not peer.paused
        assert peer.queue.decoded == 0
    assert world.scheduler.waiting == 0
    assert world.scheduler.refused == sum(len(peer.refused) for peer in peers)


def test_a_second_read_waits_for_the_first(world: World) -> None:
    world.peer(1)
    peer = world.peer(0)
    peer.send(*pings(100))
    assert not peer.paused
    peer.send(*pings(100, 101))
    assert peer.paused
    world.loop.run()
    assert not peer.paused
    done = sorted([*peer.ran, *peer.refused], key=lambda ping: int(ping.id))
    assert done == pings(200)


def test_connections_that_send_much_are_read_one_at_a_time_each_tenants_in_turn(world: World) -> None:
    crowd, other = [world.peer(0) for _ in range(50)], world.peer(1)
    for peer in [*crowd, other]:
        world.scheduler.throttle(peer.queue, 64 << 10)
        assert peer.paused
    rounds = 0
    while other.paused:
        world.loop.round()
        rounds += 1
        assert 50 - sum(peer.paused for peer in crowd) <= rounds, "one in a round"
    assert rounds <= 8, "another tenant's are not behind all of a crowd"
    world.loop.run()
    assert not any(peer.paused for peer in crowd)


def test_a_tenants_long_requests_are_read_at_a_bounded_rate(world: World) -> None:
    world.scheduler.set(0, 1.0)
    peer, other = world.peer(0), world.peer(1)
    began, nbytes = world.loop.now, 0
    while nbytes < _READ_BURST_BYTES + 64 * MIB:
        world.scheduler.throttle(peer.queue, 64 << 10)
        nbytes += 64 << 10
        world.loop.run()
        assert not peer.paused
    assert world.loop.now - began == pytest.approx(64 * MIB / READ_BYTES_PER_S, rel=0.05)
    other.send(m.Ping(1))
    assert other.ran


def test_a_single_tenant_is_not_throttled(world: World) -> None:
    peer = world.peer(0)
    world.scheduler.throttle(peer.queue, 1 << 30)
    assert not peer.paused


def test_a_throttled_connection_is_read_again_once_its_requests_have_run(world: World) -> None:
    world.peer(1)
    peer = world.peer(0)
    peer.send(*pings(100))
    world.scheduler.throttle(peer.queue, 64 << 10)
    assert peer.paused
    world.loop.run()
    assert not peer.paused
    assert len(peer.ran) + len(peer.refused) == 100


def test_a_throttled_connection_that_ends_is_not_read(world: World) -> None:
    world.peer(1)
    peer = world.peer(0)
    world.scheduler.throttle(peer.queue, 64 << 10)
    peer.leave()
    world.loop.run()
    assert peer.paused == 1


def test_a_connection_that_sends_faster_than_its_requests_run_is_held_up_not_refused() -> None:
    world = World(limit=256)
    peers = [world.peer(0), world.peer(1)]
    for peer in peers:
        peer.send(*pings(2000))
    while world.loop.round():
        assert world.scheduler.waiting <= 2 * 64
    assert [peer.ran for peer in peers] == [pings(2000)] * 2


def test_queued_requests_of_a_tenant_are_bounded_over_all_connections() -> None:
    world = World(limit=256)
    peers = [world.peer(0) for _ in range(20)]
    other = world.peer(1)
    for peer in peers:
        peer.send(*pings(100))
    most = 0
    while world.loop.round():
        most = max(most, world.scheduler.waiting)
    assert 250 <= most <= 256
    assert world.scheduler.refused == sum(len(peer.refused) for peer in peers) > 0
    assert all(0.001 <= s <= 0.1 for peer in peers for s in peer.retry_s)
    assert sum(len(peer.ran) for peer in peers) == 2000 - world.scheduler.refused
    other.send(m.Ping(1))
    assert other.ran


def test_a_tenant_with_a_full_queue_gets_busy_and_loses_no_release(world: World) -> None:
    world.scheduler.set(0, 1.0, requests_per_s=10.0)
    peer, other = world.peer(0), world.peer(1)
    peer.send(*pings(LIMIT + 5), m.Release(1), m.Abort(2), m.Commit(99, 3, b"", b""), m.Suspect(0, 1, 1, b""))
    peer.send(m.BlocksRead(1, 1, b"", 0), m.TraceContext(7, bytes([1] * 16), bytes([1] * 8), 1))
    for _ in range(5):
        world.loop.round()
    # One was in the bucket.
    assert len(peer.ran) == 1
    assert peer.refused == pings(5, LIMIT + 1) or peer.refused == pings(4, LIMIT + 2)
    assert peer.retry_s == [pytest.approx(LIMIT / 10.0, rel=0.1)] * len(peer.refused)
    assert world.scheduler.refused == len(peer.refused) + 3, "reports that are dropped are counted"
    assert not peer.errors
    assert LIMIT <= world.scheduler.waiting <= LIMIT + 3
    other.send(m.Ping(1))
    assert other.ran == [m.Ping(1)]
    world.loop.run()
    assert [type(message) for message in peer.ran[-3:]] == [m.Release, m.Abort, m.Commit]


@pytest.mark.parametrize("rate", [0.0, 1000.0])
def test_large_requests_of_a_tenant_pile_up_only_so_far_on_all_connections_together(
    world: World, rate: float
) -> None:
    world.scheduler.set(0, 1.0, rate)
    commits = [m.Commit(0, i, bytes(8 << 17), bytes(1 << 17)) for i in range(30)]
    peers, other = [world.peer(0) for _ in range(5)], world.peer(1)
    for peer in peers:
        peer.send(*commits)
    most = 0
    while len(other.ran) < 10 or any(len(peer.ran) < 30 for peer in peers):
        world.loop.run(until=world.loop.now + 0.001)
        if len(other.ran) < 10:
            other.send(m.Ping(1))
        most = max(most, sum(nbytes(taken[1]) for taken in _queued(world)))
    assert QUEUED_BYTES - nbytes(commits[0]) <= most < QUEUED_BYTES + 2 * nbytes(commits[0])
    assert all(peer.ran == commits for peer in peers)


def _queued(world: World) -> list[Any]:
    flows = world.scheduler._to_run._classes[0].flows.values()
    return [item for flow in flows for _, item in flow.items]


def test_the_queue_of_messages_that_cannot_be_refused_is_bounded(world: World) -> None:
    world.scheduler.set(0, 1.0, requests_per_s=1000.0)
    peer = world.peer(0)
    peer.send(*[m.Release(i) for i in range(1000)])
    peer.send(*[m.Release(i) for i in range(1000, 2000)])
    most = 0
    while len(peer.ran) < 2000:
        world.loop.run(until=world.loop.now + 0.001)
        most = max(most, world.scheduler.waiting)
        assert peer.paused or len(peer.ran) + world.scheduler.waiting == 2000
    assert most == 4 * LIMIT
    assert [message.lease for message in peer.ran] == list(range(2000))


def test_a_cap_holds_and_the_time_spent_waiting_is_told() -> None:
    world = World(limit=1000)
    world.scheduler.set(0, 1.0, requests_per_s=100.0)
    world.loop.round()
    peer, began = world.peer(0), world.loop.now
    peer.send(*pings(200))
    world.loop.run()
    took_s = world.loop.now - began
    # A tenth of a second's worth is in the bucket at first.
    assert took_s == pytest.approx((200 - 10) / 100.0, rel=0.02)
    assert peer.waited == sorted(peer.waited)
    assert peer.waited[-1] == pytest.approx(took_s, rel=0.01)
    world.scheduler.set(0, 1.0)
    peer.send(m.Ping(1))
    world.loop.round()
    assert len(peer.ran) == 201


def test_removing_a_cap_runs_the_requests_that_it_delayed(world: World) -> None:
    world.scheduler.set(0, 1.0, requests_per_s=0.001)
    peer = world.peer(0)
    peer.send(*pings(10))
    world.loop.round()
    world.loop.round()
    assert len(peer.ran) == 1
    world.scheduler.set(0, 1.0)
    world.loop.round()
    assert peer.ran == pings(10)


def test_nothing_of_a_connection_that_has_ended_runs(world: World) -> None:
    world.scheduler.set(0, 1.0, requests_per_s=1.0)
    gone, stays = world.peer(0), world.peer(0)
    gone.send(*pings(20))
    world.loop.round()
    world.loop.round()
    stays.send(m.Ping(7))
    gone.send(*pings(20, 21))
    ran = len(gone.ran)
    gone.leave()
    began = world.loop.now
    world.loop.run()
    assert len(gone.ran) == ran
    assert stays.ran == [m.Ping(7)]
    assert world.loop.now - began < 2.5
    assert world.scheduler.waiting == 0
    stays.leave()
    assert not world.scheduler.connected


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), RemoteProtocolError("no frame")])
@pytest.mark.parametrize("contended", [False, True])
def test_a_message_that_fails_ends_its_connection_only(
    world: World, error: Exception, contended: bool
) -> None:
    bad, good, flood = world.peer(0), world.peer(0), world.peer(1)
    if contended:
        flood.send(*pings(200))
    bad.send(m.Ping(1), error, m.Ping(2))
    good.send(m.Ping(1))
    world.loop.run()
    assert bad.errors == [error]
    assert bad.ran == [m.Ping(1)] or (contended and not bad.ran)
    assert good.ran == [m.Ping(1)]
    assert len(flood.ran) + len(flood.refused) == (200 if contended else 0)


def test_strangers_share_one_turn(world: World) -> None:
    """Whoever has not said Hello cannot take more by connecting more often."""
    known, flood = world.peer(0), [world.peer(None) for _ in range(50)]
    world.peer(2).send(*pings(40))
    for peer in flood:
        peer.send(*[m.Hello(m.MAGIC, m.VERSION, "1")])
    known.send(m.Ping(1))
    before = len(world.log)
    while not known.ran:
        assert world.loop.round()
    assert Counter(peer in flood for peer in world.log[before:])[True] <= 12
    world.loop.run()
    assert all(len(peer.ran) == 1 for peer in flood)


def test_requests_cost_by_their_keys() -> None:
    def lookup(keys: int) -> m.Lookup:
        return m.Lookup(1, 1, 32, bytes(32 * keys), 1.0, 0.0)

    assert [cost(lookup(n)) for n in (0, 1, 255, 256, 1024, 4096)] == [1, 1, 1, 2, 5, 17]
    assert cost(m.Ping(1)) == cost(m.Release(1)) == cost(m.Hello("", 1, "")) == 1
    assert cost(m.Explain(1, "", "", 32, bytes(32))) == 64, "a key is asked for in many namespaces"


def test_time_in_the_queue_is_part_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[Any] = []
    monkeypatch.setattr(
        "kvstore.daemon.server.connection.run_request", lambda _, message: handled.append(message)
    )
    latency = Calls()
    tracing = SimpleNamespace(of_connection=lambda: None)
    services = SimpleNamespace(calls=latency, stopwatch=lambda: 5.0, tracing=tracing)
    connection = Connection(None, services)  # type: ignore[arg-type]
    connection.session = SimpleNamespace(principal=SimpleNamespace(expires=math.inf))  # type: ignore[assignment]
    connection._transport = SimpleNamespace(is_closing=lambda: False)  # type: ignore[assignment]
    for waited_s in (0.0, 0.25, 2.0):
        connection.run(m.Acquire(1, 1, 1, b"", 1.0, 0.0), waited_s)
        connection.run(m.Release(1), waited_s)
    assert [message.timeout_s for message in handled[::2]] == [1.0, 0.75, 0.0]
    connection._timer.answered(m.Denied(1, "", ""))
    [figures] = latency.plain()
    assert (figures["call"], figures["waited"], figures["sum_s"]) == ("acquire", True, 2.0)


def test_messages_of_an_ended_connection_are_freed() -> None:
    """A real daemon: its garbage collector runs seldom, so nothing may wait for it."""
    with LocalDaemon(SMALL) as daemon:
        before = _rss(daemon)
        for _ in range(200):
            with Wire(daemon.socket) as peer:
                peer.hello()
                peer.send(struct.pack("<I", MIB), bytes(MIB - 1))
        with Client(daemon.url, strict=True, deadline_s=10) as client:
            eventually(lambda: client.status()["connections"] == 1)
        assert _rss(daemon) - before < 64 * MIB


def _rss(daemon: LocalDaemon) -> int:
    return int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[1]) * 4096
