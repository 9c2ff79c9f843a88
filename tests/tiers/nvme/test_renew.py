"""An NVMe extent that changes hands: nothing of it is left, whenever it is looked at, crash or not."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import arena
from kvstore.errors import TierError
from kvstore.tiers.base import Owner
from kvstore.tiers.nvme.journal import Namespace
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.types import ALIGN
from tests.tiers.nvme import renewing
from tests.tiers.nvme.at_once import AtOnce, make_extents
from tests.tiers.nvme.renewing import OTHER, PAYLOADS, SECRET, SPACES
from tests.tiers.nvme.test_tier import MIB, Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.tier._jobs = AtOnce()
    yield made
    while made.engine.waiting:
        made.engine.move()
    made.tier.close()


class Heard:
    """What was told of renewals."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.failed: list[str] = []

    def renew(self, site: Site, extent: int) -> None:
        site.tier.renew(extent, self.ready.append, lambda error: self.failed.append(str(error)))


@pytest.fixture
def heard() -> Heard:
    return Heard()


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_slab_is_removed_after_its_records(site: Site, heard: Heard, tmp_path: Path) -> None:
    slab = tmp_path / "slabs" / "000000.slab"
    site.write((b"a", 0, 0))
    site.engine.move()
    site.step()
    slab.write_bytes(SECRET)
    site.drop((b"a", 0, 0))
    heard.renew(site, 0)
    assert SECRET in slab.read_bytes()
    assert 0 in site.store.load().extents
    assert heard.ready == []
    site.step()
    assert heard.ready == [0]
    assert slab.read_bytes() == bytes(MIB)
    assert 0 not in site.store.load().extents
    site.tier.format(0, 2 * ALIGN, Owner("b"))
    site.step()
    loaded = site.store.load()
    assert (loaded.extents[0], loaded.owners[0]) == (2 * ALIGN, "b")


def test_no_slab_is_removed_while_deletions_fail(
    site: Site, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = tmp_path / "slabs" / "000000.slab"
    slab.write_bytes(SECRET.ljust(MIB, b"\0"))
    with monkeypatch.context() as patch:
        patch.setattr(site.store, "commit", fail)
        heard.renew(site, 0)
        site.step()
    assert heard.ready == []
    [why] = heard.failed
    assert "extent 0 cannot be taken off the record" in why
    assert SECRET in slab.read_bytes()
    assert 0 in site.store.load().extents


def test_no_room_for_the_new_slab_says_so_and_others_go_on(
    site: Site, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise TierError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Slabs, "allocate", full)
        heard.renew(site, 0)
        site.step()
    assert (heard.ready, heard.failed) == ([], ["no room"])
    number = site.write((b"b", 1, 0))
    site.engine.move()
    site.step()
    assert site.results[number] == [0]


def test_a_removed_slab_is_not_synced(site: Site, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that failed is made up for by the next one, but not for an extent that was renewed since."""

    def broken(*_: object) -> None:
        raise TierError("cannot sync")

    with monkeypatch.context() as patch:
        patch.setattr(Slabs, "sync", broken)
        site.write((b"a", 0, 0))
        site.engine.move()
        site.step()
    synced: list[set[int]] = []
    monkeypatch.setattr(Slabs, "sync", lambda self, extents: synced.append(set(extents)))
    heard.renew(site, 0)
    site.step()
    number = site.write((b"b", 1, 0))
    site.engine.move()
    site.step()
    assert synced == [{1}]
    assert site.results[number] == [0]


def test_extents_that_are_missing_at_start_are_not_those_that_are_renewed(
    tmp_path: Path, heard: Heard
) -> None:
    site = Site(tmp_path)
    site.tier._missing = [3]
    heard.renew(site, 0)
    site.tier.slabs.remove(3)
    made = make_extents(site.tier)
    assert made == [3]
    site.step()
    site.tier.close()


def test_a_namespace_is_forgotten_in_its_turn(site: Site) -> None:
    site.tier.put_namespace(2, Namespace("b", {"block_bytes": 100}, bytes(16)))
    site.tier.forget_namespace(2)
    site.tier.put_namespace(3, Namespace("b", {"block_bytes": 100}, bytes(16)))
    site.step()
    assert sorted(site.store.load().namespaces) == [1, 3]
    site.tier.forget_namespace(1)
    site.tier.put_namespace(1, Namespace("c", {"block_bytes": 100}, bytes(16)))
    site.step()
    assert site.store.load().namespaces[1].tenant == "c"


# -- kills


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a block of tenant a."""
    folder = tmp_path_factory.mktemp("before") / "nvme"
    tier = renewing.open_tier(folder)
    tier.load()
    make_extents(tier)
    renewing.put(tier, 1)
    tier.close()
    assert SECRET in slabs_of(folder)
    return folder


def slabs_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("slabs/*.slab")))


def run(folder: Path, number: int) -> int:
    """The exit code of a process that is killed at its step of that number, if there are so many."""
    command = [sys.executable, "-m", "tests.tiers.nvme.renewing", str(folder), str(number)]
    ended = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode


def after_crash(folder: Path) -> dict[str, Any]:
    """What the next daemon finds and makes, everything compared."""
    tier = renewing.open_tier(folder)
    found = tier.load()
    ready: list[int] = []
    ready += make_extents(tier)
    tier.close()
    data = slabs_of(folder)
    assert sorted([*found.slot_bytes, *ready]) == [0, 1], "the tier is complete"
    assert (SECRET in data) <= (found.owners.get(0) == "a"), "bytes of a, out of its hands"
    numbers = found.restore.namespace.tolist()
    for number, extent, index, checksum in zip(
        numbers,
        found.restore.extent.tolist(),
        found.restore.index.tolist(),
        found.restore.checksum.tolist(),
        strict=True,
    ):
        tenant, fingerprint = SPACES[number]
        assert found.owners[extent] == tenant
        at = extent * MIB + index * ALIGN
        payload = data[at : at + len(PAYLOADS[number])]
        assert payload == PAYLOADS[number]
        assert arena.checksum(payload, arena.seed(fingerprint, b"k", len(payload))) == checksum
    return {"blocks": numbers, "owner": found.owners.get(0), "other": OTHER in data}


def test_a_kill_at_any_step_mixes_no_blocks(before: Path, tmp_path: Path) -> None:
    owners, number, code = set(), 0, -signal.SIGKILL
    while code:
        number += 1
        folder = tmp_path / f"{number}"
        shutil.copytree(before, folder)
        code = run(folder, number)
        found = after_crash(folder)
        owners.add(found["owner"])
    assert number > 15
    assert found == {"blocks": [2], "owner": "b", "other": True}
    assert owners == {"a", None, "b"}, "it changes hands by way of nobody's"


# -- whose is what, at start


def test_blocks_in_another_tenants_extent_are_forgotten(
    before: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "nvme"
    shutil.copytree(before, folder)
    tier = renewing.open_tier(folder)
    assert tier.load().owners == {0: "a"}
    tier.format(0, ALIGN, Owner("b"))
    tier.close()
    for blocks in (1, 0):
        tier = renewing.open_tier(folder)
        caplog.clear()
        found = tier.load()
        assert (found.owners, len(found.restore.index)) == ({0: "b"}, 0)
        assert ("1 blocks are forgotten: they lie in another tenant's extents" in caplog.text) == bool(blocks)
        tier.close()


def test_since_when_blocks_are_stored_is_kept(site: Site, tmp_path: Path) -> None:
    columns: dict[str, Callable[[], np.ndarray[Any, Any] | None]] = {
        "now": lambda: None,
        "given": lambda: np.array([77.5, 0.0, 55.25]),
    }
    for i, (prefix, column) in enumerate(columns.items()):
        blocks = [(f"{prefix}{j}".encode(), 0, 3 * i + j) for j in range(3)]
        site.write(*blocks, stored_at=column())
        site.engine.move()
        site.step()
    site.tier.close()
    again = Site(tmp_path)
    found = again.recovered
    stored = dict(
        zip((k.tobytes().rstrip(b"\0") for k in found.restore.keys), found.stored_at.tolist(), strict=True)
    )
    assert (stored[b"given0"], stored[b"given2"]) == (77.5, 55.25)
    assert all(stored[k] > 999.0 for k in stored if k not in (b"given0", b"given2"))
    assert found.stored_at.tolist() == sorted(stored.values(), reverse=True)
    again.tier.close()
