from __future__ import annotations

import pytest

from tests.crash.load import Tally
from tests.crash.world import RUNS, World

SEED = 4
"""A world with a supervisor and a full NVMe tier."""


@pytest.mark.long
def test_nothing_wrong_nothing_lost_through_kills() -> None:
    tally = Tally()
    with World(SEED, tally) as world:
        for _ in range(RUNS):
            world.run()
    assert not tally.violations
    assert tally.counts["compared"]
    assert tally.counts["answered, served from DRAM"]
    assert tally.counts["served from NVMe"]
