"""The order in which bytes and records reach the device, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.core.events import CORRUPT, FAILED, OK
from kvstore.errors import TierError
from kvstore.tiers.base import BlockIO
from kvstore.tiers.nvme.encryption import TenantKeys
from kvstore.tiers.nvme.journal import Journal, Namespace
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.tiers.nvme.store import RecordStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.slot_views import SlotViews
from kvstore.types import ALIGN
from tests.tiers.nvme.at_once import make_extents

MIB = 1 << 20
NO_KEYS = TenantKeys(Path(os.devnull), None, {})


class Engine:
    """Moves nothing before it is told to."""

    name = "by hand"
    device_memory = False

    def __init__(self) -> None:
        self.waiting: list[tuple[Sequence[BlockIO], Callable[[list[OSError | None]], None]]] = []
        self.urgent: list[bool] = []

    def submit(
        self, ios: Sequence[BlockIO], done: Callable[[list[OSError | None]], None], urgent: bool = False
    ) -> None:
        self.waiting.append((ios, done))
        self.urgent.append(urgent)

    def move(self, *errors: OSError | None) -> None:
        """Ends the oldest batch."""
        ios, done = self.waiting.pop(0)
        done(list(errors) or [None] * len(ios))

    def release(self, fd: int) -> None:
        pass

    register = unregister = release

    def close(self) -> None:
        assert not self.waiting


class Site:
    """A tier whose journal writes when it is told to."""

    def __init__(self, folder: Path, keep: bool = True) -> None:
        self.engine = Engine()
        self.store = RecordStore(folder, MIB, 8 << 20)
        self.journal = Journal(folder, self.store, wake=lambda: None)
        self.now = 1000.0
        self.tier = NvmeTier(
            self.journal, Slabs(folder, MIB), self.engine, 4 * MIB, NO_KEYS, lambda: self.now
        )
        self.recovered = self.tier.load(keep)
        self.on_record = self.records()
        make_extents(self.tier)
        self.tier.put_namespace(1, Namespace("default", {"block_bytes": 100}, bytes(16)))
        for extent in range(4):
            self.tier.format(extent, ALIGN)
        self.step()
        self.results: dict[int, list[int]] = {}
        self._last = 0

    def step(self) -> None:
        while self.journal.step():
            pass

    def write(self, *blocks: tuple[bytes, int, int], stored_at: Any = None) -> int:
        """Starts writing (key, extent, index); the number under which `results` has the outcome."""
        self._last += 1
        number = self._last
        copy = Copy(
            number, 0, 1, who(*(b[0] for b in blocks)), [b""] * len(blocks), where(*(b[1:] for b in blocks)),
            where(*(b[1:] for b in blocks)), np.ones(len(blocks), np.uint32), False, None,
        )  # fmt: skip
        slots = [memoryview(bytearray(ALIGN)) for _ in blocks]
        self.tier.writer.write(
            copy, slots, {1: 100}, lambda r: self.results.update({number: r.tolist()}), stored_at
        )
        return number

    def drop(self, *blocks: tuple[bytes, int, int]) -> None:
        self.tier.drop(who(*(b[0] for b in blocks)), where(*(b[1:] for b in blocks)))

    def records(self) -> dict[bytes, tuple[int, int]]:
        """What is on record: key to (extent, index)."""
        blocks = self.store.load().blocks
        places = zip(blocks.extent.tolist(), blocks.index.tolist(), strict=True)
        return {k.tobytes().rstrip(b"\0"): p for k, p in zip(blocks.keys, places, strict=True)}


def who(*keys: bytes) -> BlockIds:
    words = np.frombuffer(b"".join(k.ljust(64, b"\0") for k in keys), np.uint64).reshape(-1, 8)
    n = len(keys)
    sizes = np.array([len(k) for k in keys], np.uint8)
    return BlockIds(np.ones(n, np.uint16), words, sizes, np.zeros(n, np.uint64))


def where(*places: tuple[int, int]) -> Where:
    return Where(np.array([e << 32 | i for e, i in places], np.uint64))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    while made.engine.waiting:
        made.engine.move()
    made.tier.close()


def test_a_record_follows_its_bytes(site: Site) -> None:
    number = site.write((b"a", 0, 0), (b"b", 0, 1))
    site.step()
    assert site.records() == {}
    site.engine.move(None, OSError(5, "no"))
    assert site.results == {}
    site.step()
    assert site.records() == {b"a": (0, 0)}
    assert site.results == {number: [OK, FAILED]}


def test_a_slot_is_written_again_only_when_its_old_record_is_durably_gone(site: Site) -> None:
    site.write((b"a", 0, 0))
    site.engine.move()
    site.step()
    site.drop((b"a", 0, 0))
    again = site.write((b"b", 0, 0))
    other = site.write((b"c", 1, 0))
    assert len(site.engine.waiting) == 1, "only what goes elsewhere has started"
    site.engine.move()
    assert site.records() == {b"a": (0, 0)}
    site.step()
    assert site.results[other] == [OK]
    assert site.records() == {b"c": (1, 0)}
    assert len(site.engine.waiting) == 1
    site.engine.move()
    site.step()
    assert site.results[again] == [OK]
    site.write((b"d", 0, 1))
    assert len(site.engine.waiting) == 1, "nothing is waited for any more"


def test_it_is_not_written_if_the_deletion_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write((b"a", 0, 0))
    site.engine.move()
    site.step()
    site.drop((b"a", 0, 0))
    number = site.write((b"b", 0, 0))

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(site.store, "commit", full)
        site.step()
    assert not site.engine.waiting
    assert site.results == {1: [OK], number: [FAILED]}
    assert site.records() == {b"a": (0, 0)}
    # What is owed is made up for by the next commit, and then the slot can be written.
    again = site.write((b"b", 0, 0))
    site.step()
    site.engine.move()
    site.step()
    assert site.results[again] == [OK]
    assert site.records() == {b"b": (0, 0)}


@pytest.mark.parametrize("moment", ["moving", "moved"])
def test_blocks_dropped_during_a_write_get_no_record(site: Site, moment: str) -> None:
    number = site.write((b"a", 0, 0), (b"b", 0, 1))
    if moment == "moved":
        site.engine.move()
    site.drop((b"a", 0, 0))
    if moment == "moving":
        site.engine.move()
    again = site.write((b"a", 1, 0))
    site.engine.move()
    site.step()
    assert site.records() == {b"b": (0, 1), b"a": (1, 0)}, "the later one of the two, whoever ended first"
    assert site.results[again] == [OK]
    assert site.results[number][1] == OK
    assert site.results[number][0] == (FAILED if moment == "moving" else OK)


def test_when_durable_waits_for_all_earlier_work(site: Site) -> None:
    told: list[Exception | None] = []
    site.write((b"a", 0, 0))
    site.engine.move()
    site.drop((b"a", 0, 0))
    site.tier.journal.when_durable(told.append)
    assert told == []
    site.step()
    assert told == [None]
    assert site.records() == {}


def test_recorded_times_increase_if_the_clock_is_set_back(site: Site, tmp_path: Path) -> None:
    for i, now in enumerate([1000.0, 5000.0, 10.0, -1e9, 20.0]):
        site.now = now
        site.write((b"%d" % i, 0, i))
        site.engine.move()
        site.step()
    blocks = site.store.load().blocks
    assert [k.tobytes().rstrip(b"\0") for k in blocks.keys] == [b"4", b"3", b"2", b"1", b"0"], "latest first"
    assert np.all(np.diff(blocks.stored_at) < 0)


def test_after_a_restart_the_clock_continues_from_the_latest_record(tmp_path: Path) -> None:
    first = Site(tmp_path)
    first.now = 9e9
    first.write((b"future", 0, 0))
    first.engine.move()
    first.step()
    first.tier.close()
    second = Site(tmp_path)
    second.write((b"now", 0, 1))
    second.engine.move()
    second.step()
    assert [k.tobytes().rstrip(b"\0") for k in second.store.load().blocks.keys] == [b"now", b"future"]
    second.tier.close()


def test_slabs_are_kept_until_no_record_refers_to_them(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.write((b"a", 2, 0))
    site.engine.move()
    site.step()
    site.tier.close()
    slab = tmp_path / "slabs" / "000002.slab"
    before = slab.stat()
    site = Site(tmp_path, keep=False)
    assert site.on_record == {b"a": (2, 0)}
    assert (slab.stat().st_ino, slab.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not site.recovered.namespaces
    assert not len(site.recovered.restore.index)
    assert sorted(site.recovered.slot_bytes) == [0, 1, 2, 3], "these are to be made anew"
    site.step()
    assert site.records() == {}
    site.tier.close()


def test_a_probe_reads_aside_and_tells_bad_from_unreadable(site: Site) -> None:
    probe = Probe(1, 1, ALIGN, who(b"a", b"b"), where((0, 0), (0, 1)))
    told: list[list[int]] = []
    site.tier.probe(probe, {1: bytes(16)}, {1: 100}, lambda r: told.append(r.tolist()))
    [(ios, _)] = site.engine.waiting
    assert not any(io.write for io in ios)
    site.engine.move(None, OSError(5, "no"))
    assert told == [[CORRUPT, FAILED]]


def test_neighbours_are_one_io_and_only_the_bad_block_of_a_run_fails(site: Site) -> None:
    memory = memoryview(bytearray(8 * ALIGN))
    blocks = [(b"%d" % i, 0, i) for i in (0, 1, 2, 5, 6)]
    to, held = where(*(b[1:] for b in blocks)), where((9, 0), (9, 1), (9, 2), (9, 3), (9, 5))
    slots = SlotViews(held, lambda at, n: memory[(at & 7) * ALIGN : ((at & 7) + n) * ALIGN])
    copy = Copy(
        1, 0, 1, who(*(b[0] for b in blocks)), [b""] * 5, held, to, np.ones(5, np.uint32), False, None
    )
    results: list[list[int]] = []
    site.tier.writer.write(copy, slots, {1: 100}, lambda r: results.append(r.tolist()))
    [(ios, _)] = site.engine.waiting
    assert [(io.blocks, io.offset // ALIGN) for io in ios] == [(3, 0), (1, 5), (1, 6)]
    assert bytes(ios[0].buffer) == bytes(memory[: 3 * ALIGN])
    site.engine.move(OSError(5, "no"), None, OSError(5, "no"))
    [(again, _)] = site.engine.waiting
    assert [(io.blocks, io.offset // ALIGN, len(io.buffer)) for io in again] == [
        (1, i, ALIGN) for i in range(3)
    ]
    site.engine.move(None, OSError(5, "no"), None)
    site.step()
    assert results == [[OK, FAILED, OK, OK, FAILED]]
    assert site.records() == {b"0": (0, 0), b"2": (0, 2), b"5": (0, 5)}


def test_only_reads_for_requests_are_urgent(site: Site) -> None:
    site.write((b"a", 0, 0))
    site.tier.probe(Probe(1, 1, ALIGN, who(b"a"), where((0, 0))), {}, {}, lambda _: None)
    copy = Copy(
        2, 1, 0, who(b"a"), [b""], where((0, 0)), where((0, 0)), np.ones(1, np.uint32), True, None
    )  # fmt: skip
    for urgent in ({}, {"urgent": True}, {"urgent": False}):
        site.tier.reader.read(copy, [memoryview(bytearray(ALIGN))], {}, {}, lambda _: None, **urgent)
    assert site.engine.urgent == [False, False, True, True, False]
    site.engine.waiting.clear()


def test_a_sync_that_fails_records_nothing_and_is_made_up_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = site.write((b"a", 0, 0))
    site.engine.move()

    def broken(_: object) -> None:
        raise TierError("cannot sync")

    with monkeypatch.context() as patch:
        patch.setattr(Slabs, "sync", lambda self, extents: broken(extents))
        site.step()
    assert site.results[number] == [FAILED]
    assert site.records() == {}
    synced: list[set[int]] = []
    monkeypatch.setattr(Slabs, "sync", lambda self, extents: synced.append(set(extents)))
    site.write((b"b", 1, 0))
    site.engine.move()
    site.step()
    assert synced == [{0, 1}]
