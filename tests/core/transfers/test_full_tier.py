"""A lower tier that cannot free anything, because all of its blocks are parents of blocks above it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvstore.core.transfers.eviction import Eviction
from tests.core.world import World


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "hazard"])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_looked_at_once_a_step(monkeypatch: pytest.MonkeyPatch, policy: str, seed: int) -> None:
    vain: Counter[float] = Counter()
    make_room = Eviction.make_room

    def counted(self: Eviction, tier: int, *args: Any, **more: Any) -> int:
        room = make_room(self, tier, *args, **more)
        if tier and not room:
            vain[self._r.now] += 1
        return room

    monkeypatch.setattr(Eviction, "make_room", counted)
    w, dice, stored = World(dram=16, nvme=2, policy=policy, write_policy="on_evict"), random.Random(seed), 0
    w.open(1)
    for _ in range(400):
        w.now += 0.1
        name, turns = int(dice.paretovariate(0.7)) % 40, dice.randint(1, 12)
        keys = [b"%02d/%03d" % (name, i) for i in range(4 * turns)]
        found = len(w.get(1, keys[: w.lookup(1, keys)]))
        w.now += 0.1
        if found < len(keys):
            stored += w.put(0, 1, keys[found:], keys[found - 1] if found else b"")
        w.finish_all()
        w.settle()
    assert stored > 400
    assert set(vain.values()) <= {1}
    assert policy == "hazard" or len(vain) > 20
