"""What an extent of memory says of blocks that the next daemon does not take in."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.core import events as ev
from kvstore.core.actions import Where
from kvstore.core.placement import Placement
from kvstore.core.queues.device_queue import TierSpec
from kvstore.daemon.tenancy.recovery import dram_restore, void_unrestored
from kvstore.tiers.dram import DramTier
from kvstore.types import ALIGN, Tier
from tests.tiers.test_dram import MIB, Keeper, make, stamp, tier_of


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    for fd in made.kept.values():
        os.close(fd)


def taken_in(tier: DramTier, rows: int, known: bool = True) -> int:
    """How many of what a tier has are blocks of a core with so many rows; whether others stay is checked."""
    placement = Placement([TierSpec(Tier.DRAM, MIB, MIB, table=True)], max_blocks=rows)
    found = tier.load()
    placement.handle(ev.OpenNamespace(0, 1, ALIGN), 0.0)
    for extent, size in found.slot_bytes.items():
        placement.handle(ev.ExtentReady(0, extent, size, found.versions[extent]), 0.0)
    ends = np.full(len(found.headers), np.inf)
    owners = dict.fromkeys(found.slot_bytes, 0 if known else -1)
    placement.handle(dram_restore(found, owners, lambda *_: 1, ends), 0.0)
    void_unrestored(placement.view, tier, found)
    placement.check()
    return int((placement.residency.tiers[0].slots.owner >= 0).sum())


def test_a_header_that_is_altered_changes_no_payload_size(keeper: Keeper) -> None:
    tier = tier_of(keeper, MIB)
    make(tier)
    tier.format(0, ALIGN)
    stamp(tier, Where(np.arange(5, dtype=np.uint64)))
    tier.close()
    after = tier_of(keeper, MIB)
    found = after.load()
    found.headers["length"][0] = ALIGN - 1
    sizes: list[int] = []

    def number_of(tenant: int, fingerprint: bytes, size: int) -> int:
        sizes.append(size)
        return 1

    restore = dram_restore(found, dict.fromkeys(found.slot_bytes, 0), number_of, np.full(5, np.inf))
    assert sizes == [ALIGN]
    assert len(restore.index) == 4, "without the one that is altered"
    after.close()


@pytest.mark.parametrize(("rows", "known", "kept"), [(512, True, 5), (3, True, 3), (512, False, 0)])
def test_unrestored_blocks_are_never_restored_later(
    keeper: Keeper, rows: int, known: bool, kept: int
) -> None:
    before = tier_of(keeper, MIB)
    make(before)
    before.format(0, ALIGN)
    stamp(before, Where(np.arange(5, dtype=np.uint64)))
    before.close()
    fewer = tier_of(keeper, MIB)
    assert taken_in(fewer, rows, known) == kept
    fewer.close()
    after = tier_of(keeper, MIB)
    assert taken_in(after, 512) == kept
    after.close()
