"""What the core tells of blocks that come to a tier and leave it. That it tells all, `World` sees to."""

from __future__ import annotations

from kvstore.core import actions as ac
from kvstore.core import events as ev
from tests.core.world import World, joined

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def moved(actions: list[ac.Action]) -> list[tuple[int, list[bytes], list[bytes] | None]]:
    """(tier, keys, their parents) of each move; no parents: the blocks have left."""
    told = []
    for action in actions:
        if isinstance(action, ac.CopyReport):
            keys = [action.identity.key(i) for i in range(len(action.identity))]
            above = action.parents
            told.append(
                (action.tier, keys, None if above is None else list(map(above.key, range(len(keys)))))
            )
    return told


def test_a_chain_is_announced_parents_first() -> None:
    world = World()
    world.open(1)
    world.put(1, 1, [A, B])
    assert moved(world.actions) == [(0, [A, B], [b"", A])]
    world.put(1, 1, [C], B)
    assert moved(world.actions) == [(0, [C], [B])]


def test_deleted_blocks_are_announced_for_every_tier() -> None:
    world = World(nvme=2)
    world.open(1)
    world.put(1, 1, [A, B])
    [copy] = world.copies
    world.finish(copy, [ev.OK, ev.OK])
    assert moved(world.actions) == [(1, [A, B], [b"", A])]
    world.invalidate(1, [B])
    assert moved(world.actions) == [(0, [B], None), (1, [B], None)]


def test_tell_announces_stored_blocks_again() -> None:
    world = World(nvme=2)
    world.open(1)
    world.put(1, 1, [A, B])
    world.finish_all()
    assert moved(world.send(ev.Tell(1, joined([A, C, B])))) == [(0, [A, B], [b"", A]), (1, [A, B], [b"", A])]


def test_uncommitted_blocks_are_not_announced() -> None:
    world = World()
    world.open(1)
    room = world.reserve(1, 1, [A])
    assert isinstance(room, ac.Reserved)
    assert not moved(world.actions)
    assert not moved(world.send(ev.Tell(1, joined([A]))))
    world.send(ev.Abort(1, room.lease))
    assert not moved(world.actions)


def test_nothing_is_announced_without_a_watcher() -> None:
    world = World()
    world.open(1)
    world.p.residency.outbox.telling = False
    actions = world.p.handle(ev.Reserve(9, 1, 1, joined([A]), b"", world.now), world.now)
    [room] = [action for action in actions if isinstance(action, ac.Reserved)]
    sums = world.fill(1, [A], room)
    assert not moved(world.p.handle(ev.Commit(10, 1, room.lease, sums, sums > 0), world.now))
    assert not moved(world.p.handle(ev.Tell(1, joined([A])), world.now))
