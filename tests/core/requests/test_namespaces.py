"""Namespaces at the limit: the oldest unused ones are closed, those that something hangs on stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.placement import Limits
from kvstore.core.policy import POLICIES
from tests.core.world import World, joined

A, B, C = 1, 2, 3
NEXT = 99
SHARED = 70_000
LATER_S = 5.0


def world(per_tenant: int = 3, total: int = 100, **more: object) -> World:
    w = World(4, 2, limits=Limits(namespaces=total, namespaces_per_tenant=per_tenant), **more)  # type: ignore[arg-type]
    for tenant in (A, B):
        w.tenant(tenant, (0, None), (0, None))
    return w


def opening(w: World, number: int, tenant: int = A, **more: object) -> tuple[bool, list[int]]:
    """Whether a namespace could be opened, and which were closed for it."""
    event = ev.OpenNamespace(0, number, 100, tenant, tenant, **more)  # type: ignore[arg-type]
    answer = w.ask(event)
    if isinstance(answer, ac.Answer):
        w.namespaces[number], w.opened[number] = 100, replace(event, request=0)
    w.p.check()
    return isinstance(answer, ac.Answer), [
        a.namespace for a in w.actions if isinstance(a, ac.NamespaceClosed)
    ]


def test_the_oldest_without_blocks_is_closed() -> None:
    w = world()
    for number in (11, 12, 13):
        w.open(number, tenant=A)
    w.put(0, 11, [b"a"])
    assert opening(w, 14) == (True, [12])
    assert opening(w, 15) == (True, [13])
    assert w.lookup(11, [b"a"]) == 1
    w.ask(ev.Lookup(0, 12, joined([b"a"]), A, 0.0))
    assert isinstance(w.actions[-1], ac.Deny)


def test_one_that_has_lost_its_blocks_is_closed_and_its_number_starts_anew() -> None:
    w = world(1)
    w.open(11, tenant=A)
    w.put(0, 11, [b"a", b"b"])
    w.finish_all()
    w.invalidate(11, [b"a"])
    assert opening(w, 12) == (False, [])
    w.invalidate(11, [b"b"])
    assert opening(w, 12) == (True, [11])
    assert opening(w, 11) == (True, [12])
    assert w.lookup(11, [b"a", b"b"]) == 0
    assert not w.ask(ev.Explain(0, (11,), joined([b"a"]))).blocks
    w.put(0, 11, [b"a"])
    assert w.lookup(11, [b"a", b"b"]) == 1


def reserved(w: World) -> Callable[[], object]:
    room = w.reserve(0, 11, [b"k"])
    assert isinstance(room, ac.Reserved)
    return lambda: w.send(ev.Abort(0, room.lease))


def leased(w: World) -> Callable[[], object]:
    w.put(0, 11, [b"k"])
    w.finish_all()
    grant = w.acquire(0, 11, [b"k"])
    assert isinstance(grant, ac.Grant)
    w.invalidate(11, [b"k"])
    return lambda: w.send(ev.Release(0, grant.lease))


def copied(w: World) -> Callable[[], object]:
    w.put(0, 11, [b"k"])
    assert w.copies
    w.invalidate(11, [b"k"])
    return w.finish_all


def pinned(w: World) -> Callable[[], object]:
    w.put(0, 11, [b"k"])
    w.finish_all()
    w.ask(ev.Pin(0, 11, joined([b"k"]), w.now + LATER_S))
    return lambda: w.invalidate(11, [b"k"])


def published(w: World) -> Callable[[], object]:
    w.publish(11, SHARED)
    return lambda: w.publish(11, A)


@pytest.mark.parametrize("use", [reserved, leased, copied, pinned, published])
def test_one_that_is_in_use_stays_until_that_ends(use: Callable[[World], Callable[[], object]]) -> None:
    w = world(1)
    w.open(11, tenant=A)
    end = use(w)
    assert opening(w, NEXT) == (False, [])
    end()
    assert opening(w, NEXT) == (True, [11])
    w.settle()


def test_one_that_is_waited_for_stays() -> None:
    w = world(1)
    w.open(11, tenant=A)
    w.put(0, 11, [b"k"])
    w.finish_all()
    w.tenant(A, (0, 0), (0, None))
    w.ask(ev.Reserve(0, 0, 11, joined([b"x"]), b"", w.now + LATER_S))
    assert opening(w, NEXT) == (False, [])


def test_namespaces_in_use_are_kept_and_none_is_closed_during_start() -> None:
    w = world(2)
    w.open(11, tenant=A)
    w.open(12, tenant=A)
    assert opening(w, 13, may_close=False) == (False, [])
    assert opening(w, 13, in_use=frozenset({11, 12})) == (False, [])
    assert opening(w, 13, in_use=frozenset({11})) == (True, [12])


def test_others_are_closed_only_when_the_node_is_full() -> None:
    w = world(4, 5)
    w.tenant(C, (0, None), (0, None))
    w.open(21, tenant=B)
    for number in (11, 12, 13):
        w.open(number, tenant=A)
    w.put(0, 11, [b"a"])
    w.put(0, 21, [b"a"])
    assert opening(w, 22, B) == (True, [])
    w.put(0, 22, [b"a"])
    assert opening(w, 31, C) == (True, [12])


def test_a_tenant_takes_at_most_half_of_the_free_namespaces() -> None:
    w = world(100, 9)
    for number in range(11, 16):
        w.open(number, tenant=A)
        w.put(0, number, [b"a"])
    assert opening(w, 16) == (False, [])
    for number in (21, 22):
        w.open(number, tenant=B)
        w.put(0, number, [b"a"])
    assert opening(w, 23, B) == (False, [])
    w.tenant(C, (0, None), (0, None))
    assert opening(w, 31, C) == (True, [])


def test_a_lowered_limit_closes_as_many_as_are_too_many() -> None:
    w = world(5)
    for number in range(11, 16):
        w.open(number, tenant=A)
    w.p.limits.namespaces_per_tenant = 2
    assert opening(w, NEXT) == (True, [11, 12, 13, 14])


@pytest.mark.parametrize("policy", POLICIES)
def test_pools_that_come_and_go_leave_nothing_behind(policy: str) -> None:
    world = World(dram=3, nvme=2, policy=policy)
    world.open(1)
    tier = world.p.residency.tiers[0]
    for i in range(120):
        world.publish(1, 70000 + i)
        world.put(1, 1, [b"%016d" % i])
        world.finish_all()
        assert len(tier.policies) <= 2 * len(tier.slots.classes) + 17
    segments = tier.generation.segments
    assert segments._queues < 100, "queues have numbers of their own"
    assert len(segments._all) < 100
