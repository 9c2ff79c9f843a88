from __future__ import annotations

from tests.crash.load import Tally
from tests.crash.world import World


def test_nothing_wrong_nothing_lost_through_kills() -> None:
    tally = Tally()
    with World(7, tally) as world:
        for _ in range(6):
            world.run()
    assert not tally.violations
    assert tally.counts["compared"]
    assert tally.counts["served from NVMe"]
