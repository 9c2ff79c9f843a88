"""Work of a request that is done in steps after its answer."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.transfers import transfers
from tests.core.world import World


def chain(name: str, n: int) -> list[bytes]:
    return [b"%s%d" % (name.encode(), i) for i in range(n)]


def commit(w: World, keys: list[bytes]) -> list[ac.Action]:
    room = w.reserve(0, 1, keys)
    assert isinstance(room, ac.Reserved)
    return w.send(ev.Commit(99, 0, room.lease, w.fill(1, keys, room), np.ones(len(keys), np.bool_)))


@pytest.mark.parametrize("at_once", [3, 4])
def test_writes_of_many_blocks_start_after_the_answer(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(transfers, "_AT_ONCE", at_once)
    w = World()
    w.open(1)
    kinds = [type(action) for action in commit(w, chain("a", 4))]
    assert ac.Answer in kinds
    assert (ac.Copy in kinds) is (at_once == 4)
    if at_once == 3:
        assert w.p.next_wakeup() == w.now
        assert ac.Copy in [type(action) for action in w.send(ev.Tick())]
        assert w.p.next_wakeup() != w.now
    w.finish_all()
    assert len(w.records) == 4
    w.settle()
