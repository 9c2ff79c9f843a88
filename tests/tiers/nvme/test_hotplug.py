"""Folders of devices that come while the daemon runs: what an earlier life left in them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.config import Config, parse
from kvstore.daemon.operator.devices import Devices, open_new
from kvstore.daemon.runtime.tier_set import TierSet
from kvstore.errors import TierError
from kvstore.tiers.nvme.io.posix_engine import PosixEngine
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.tier import REMOVED, NvmeTier
from tests.tiers.nvme.at_once import make_extents

MIB = 1 << 20
EXTENT, EXTENTS = 2 * MIB, 3


def config(folder: Path) -> Config:
    return parse(
        f'nvme.path = "{folder / "first"}"\n'
        f'[nvme.devices.nvme1]\npath = "{folder / "second"}"\nlimit = "{EXTENT * EXTENTS // MIB}MiB"\n'
    )


def opened(folder: Path) -> NvmeTier:
    """The second device, as an earlier daemon had it."""
    device = NvmeTier.open(folder / "second", EXTENT * EXTENTS, EXTENT, PosixEngine(1))
    device.load()
    return device


def all_of(device: NvmeTier, extents: int) -> list[int]:
    """Has extents made; their numbers."""
    made: list[int] = []
    ended = threading.Event()
    device.grow(extents, made.append, lambda error: ended.set())
    assert ended.wait(10)
    return made


def test_unassigned_slabs_are_counted_once(tmp_path: Path) -> None:
    before = opened(tmp_path)
    make_extents(before)
    before.close()
    device = open_new(config(tmp_path), ["nvme1"], None)["nvme1"]
    assert all_of(device, EXTENTS) == [0, 1, 2]
    slabs = list((tmp_path / "second" / "slabs").iterdir())
    assert sum(slab.stat().st_size for slab in slabs) == EXTENT * EXTENTS
    device.close()


def test_an_added_device_forgets_old_readers_of_namespaces(tmp_path: Path) -> None:
    before = opened(tmp_path)
    before.put_namespace(3, Namespace("one", {"block_bytes": 100}, bytes(16), readers=("two",)))
    before.close()
    device = open_new(config(tmp_path), ["nvme1"], None)["nvme1"]
    device.put_namespace(4, Namespace("one", {"block_bytes": 100}, bytes(16)))
    device.close()
    after = opened(tmp_path)
    assert list(after.load().namespaces) == [4]
    after.close()


def test_a_device_with_blocks_is_not_added(tmp_path: Path) -> None:
    before = opened(tmp_path)
    make_extents(before)
    before.format(0, 4096)
    before.close()
    with pytest.raises(TierError, match="holds a cache already"):
        open_new(config(tmp_path), ["nvme1"], None)
    before = opened(tmp_path)
    assert before.load().slot_bytes == {0: 4096}
    before.close()


def test_a_folder_that_is_still_being_closed_is_waited_for(tmp_path: Path) -> None:
    nothing: Any = None
    removed = opened(tmp_path)

    def retire() -> Path:
        time.sleep(0.3)
        return removed.retire()

    slow = SimpleNamespace(close=removed.close, retire=retire)
    view: Any = SimpleNamespace(tiers=[SimpleNamespace(name="dram"), SimpleNamespace(name="nvme1")])
    tiers = TierSet(view, nothing, {"nvme1": cast("NvmeTier", slow)}, {})
    alone = parse(f'nvme.path = "{tmp_path / "first"}"')
    devices = Devices(nothing, tiers, nothing, nothing, nothing, nothing, lambda: alone)
    tiers.close(1)
    assert not tiers.devices
    with pytest.raises(TierError, match="in use by pid"):
        open_new(config(tmp_path), ["nvme1"], None)
    devices.opener(config(tmp_path))()["nvme1"].close()
    assert not (tmp_path / "second" / REMOVED).exists()
