"""Extents of DRAM that GPUs know: pinned while they are there, never while they are given back."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from kvstore.core.actions import Where
from kvstore.daemon.operator.gpus import Pinner
from kvstore.tiers.dram import DramTier
from kvstore.types import LABEL_BYTES
from tests.cuda.faking import fake_cuda
from tests.tiers.nvme.at_once import make_extents
from tests.tiers.test_hbm import MIB, Site


class Pins:
    """Remembers what it is told, and whether memory was still there."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.views: dict[int, memoryview] = {}

    def pin(self, number: int, view: memoryview) -> None:
        self.told.append(("pin", number))
        self.views[number] = view

    def unpin(self, number: int) -> None:
        assert self.views.pop(number)[LABEL_BYTES] == 7, "it was given back while it was pinned"
        self.told.append(("unpin", number))


def test_extents_are_pinned_when_they_are_made_and_let_go_before_they_are_given_back() -> None:
    pins = Pins()
    tier = DramTier(3 * 2 * MIB, 2 * MIB, False, pins=pins)
    make_extents(tier)
    assert pins.told == [("pin", 0), ("pin", 1), ("pin", 2)]
    for number in range(3):
        tier.format(number, 4096)
        pins.views[number][LABEL_BYTES] = 7
    over = threading.Event()
    tier.renew(1, lambda _: over.set(), lambda _: None)
    assert over.wait(10)
    assert pins.told[3:] == [("unpin", 1), ("pin", 3)]
    gone = threading.Event()
    tier.remove(0, lambda _: gone.set())
    assert gone.wait(10)
    assert pins.told[5:] == [("unpin", 0)]
    tier.close()


def test_inherited_extents_are_registered_too() -> None:
    first = DramTier(2 * 2 * MIB, 2 * MIB, False, keeper := _Keeper())
    make_extents(first)
    pins, over = Pins(), threading.Event()
    second = DramTier(2 * 2 * MIB, 2 * MIB, False, None, dict(keeper.kept), pins)
    second.load()
    second.start(lambda _: None, lambda error: None)
    second._jobs.submit(over.set)
    assert over.wait(10)
    assert sorted(pins.told) == [("pin", 0), ("pin", 1)]
    first.close()
    second.close()


class _Keeper:
    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def keep(self, name: str, fd: int) -> None:
        self.kept[name] = os.dup(fd)

    def forget(self, name: str) -> None:
        del self.kept[name]


@pytest.mark.parametrize("refused", [False, True])
def test_extents_that_cuda_refuses_stay_unregistered(refused: bool) -> None:
    more = {"register": "no"} if refused else {}
    with fake_cuda(**more):
        import cupy  # noqa: PLC0415

        pinned: dict[int, Any] = cupy.cuda.runtime._pinned
        site = Site().start()
        pinner = Pinner([site.tier])
        tier = DramTier(2 * 2 * MIB, 2 * MIB, False, pins=pinner)
        make_extents(tier)
        assert len(pinned) == (0 if refused else 2)
        tier.format(0, 4096)
        assert len(tier.slots(Where(_places(0)))) == 1
        done = threading.Event()
        tier.remove(0, lambda _: done.set())
        assert done.wait(10)
        assert len(pinned) == (0 if refused else 1)
        tier.close()
        site.tier.close()


def _places(*places: int) -> Any:
    return np.array(places, np.uint64)
