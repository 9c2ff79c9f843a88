"""Folders that a real daemon filled, damaged on disk, checked, repaired, and served again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.tiers.nvme import fsck as module
from kvstore.tiers.nvme.fsck import Finding, Kind, fsck
from kvstore.tiers.nvme.key_files import MasterKey
from kvstore.tiers.nvme.records import ID, PAGE_SLOTS, RecordBatch, deletions
from kvstore.tiers.nvme.store import Changes, RecordStore, pack_extent
from kvstore.types import ENCRYPTION_BYTES
from tests.daemons import cli, names, payloads
from tests.tiers.nvme.encrypted import BLOCK, MASTER, OTHER_MASTER, SEALED_SLOT, opened

SMALL, LARGE = 16 << 10, 40 << 10
LIMIT, EXTENT = 16 << 20, 2 << 20
FREE = EXTENT // SMALL - 1  # the last slot of an extent of small blocks
LAYOUTS = {size: Layout(model="fsck", block_bytes=size) for size in (SMALL, LARGE)}
KEYS = {size: names(40, f"{size}") for size in LAYOUTS}
TOTAL = 40 * (SMALL + LARGE)

Damaged = tuple[set[bytes], dict[Kind, int]]


def daemon_on(folder: Path) -> LocalDaemon:
    dram = {"limit": "16MiB", "huge_pages": False}
    return LocalDaemon({"dram": dram, "nvme": {"path": folder, "limit": LIMIT, "io_threads": 2}})


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled") / "nvme"
    with daemon_on(folder) as daemon, Client(daemon.url) as client:
        for size, layout in LAYOUTS.items():
            put = client.namespace(layout).put(KEYS[size], payloads(KEYS[size], size))
            assert put.stored == len(KEYS[size]), put
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "nvme"
    shutil.copytree(filled, copy)
    yield copy
    shutil.rmtree(copy)


class Records:
    """The records of a folder, to look at and to falsify. `of` gives the rows of a block size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with closing(self._open()) as store:
            self.loaded = store.load()
        blocks = self.loaded.blocks
        self.of = {size: np.flatnonzero(blocks.length == size).tolist() for size in LAYOUTS}
        assert {size: len(rows) for size, rows in self.of.items()} == {SMALL: 40, LARGE: 40}

    def _open(self) -> RecordStore:
        return RecordStore(self.folder, EXTENT, 1 << 30)

    def key(self, row: int) -> bytes:
        return self.loaded.blocks.key(row)

    def extent(self, row: int) -> int:
        return int(self.loaded.blocks.extent[row])

    def slab(self, extent: int) -> Path:
        return self.folder / "slabs" / f"{extent:06d}.slab"

    def write(self, row: int, **changed: Any) -> None:
        """Changes a record. Another extent or index moves it."""
        self.commit(Changes(slots=[deletions(self.loaded.blocks.places[[row]])]))
        self.add(row, **changed)

    def add(self, row: int, **changed: Any) -> None:
        """A record like that of `row`, but for what is changed."""
        blocks = self.loaded.blocks
        columns = ("ns", "extent", "index", "version", "length", "checksum", "stored_at")
        values = {name: getattr(blocks, name)[row].item() for name in columns}
        values |= {"keys": self.key(row), "parents": b"", **changed}
        batch = RecordBatch(**{name: [value] for name, value in values.items()})
        self.commit(Changes(slots=[batch.pack()]))

    def page(self, row: int) -> tuple[bytes, bytearray]:
        """Key and bytes of the page of a record."""
        key = struct.pack(">II", self.extent(row), int(self.loaded.blocks.index[row]) // PAGE_SLOTS)
        with lmdb.open(str(self.folder / "records"), max_dbs=5) as env, env.begin() as txn:
            return key, bytearray(txn.get(key, db=env.open_db(b"slots", txn)))

    def commit(self, changes: Any) -> None:
        with closing(self._open()) as store:
            store.commit(changes)


def whole_slab(records: Records) -> Damaged:
    extent = records.extent(records.of[SMALL][0])
    lost = {records.key(row) for row in records.of[SMALL] if records.extent(row) == extent}
    records.slab(extent).unlink()
    return lost, {Kind.NO_SLAB: 1, Kind.MISSING: len(lost)}


def end_of_slab(records: Records) -> Damaged:
    extent = records.extent(records.of[LARGE][0])
    os.truncate(records.slab(extent), 5 * LARGE + 1)
    index = records.loaded.blocks.index
    rows = [row for row in records.of[LARGE] if records.extent(row) == extent and index[row] >= 5]
    assert rows
    return {records.key(row) for row in rows}, {Kind.SHORT_SLAB: 1, Kind.BEYOND: len(rows)}


def leftover_slab(records: Records) -> Damaged:
    assert 7 not in records.loaded.extents, "no daemon has given it to a size of blocks"
    os.truncate(records.slab(7), 4096)
    return set(), {Kind.ORPHAN: 1}


def falsified(kind: Kind, **changed: Any) -> Callable[[Records], Damaged]:
    def falsify(records: Records) -> Damaged:
        row = records.of[SMALL][3]
        records.write(row, **changed)
        return {records.key(row)}, {kind: 1}

    return falsify


def unknown_namespace(records: Records) -> Damaged:
    records.add(records.of[SMALL][3], ns=99, index=FREE)
    return set(), {Kind.NAMESPACE: 1}


def another_size(records: Records) -> Damaged:
    row, other = records.of[SMALL][3], records.of[LARGE][0]
    records.write(row, extent=records.extent(other), index=EXTENT // LARGE - 1)
    return {records.key(row)}, {Kind.SLOT_BYTES: 1}


def strangers(records: Records) -> Damaged:
    extent = records.extent(records.of[SMALL][3])
    records.commit(Changes({"extents": {ID.pack(extent): pack_extent(SMALL, "somebody else")}}))
    theirs = {records.key(row) for row in records.of[SMALL] if records.extent(row) == extent}
    return theirs, {Kind.TENANT: len(theirs)}


def one_bit(records: Records) -> Damaged:
    row = records.of[LARGE][7]
    offset = int(records.loaded.blocks.index[row]) * LARGE + LARGE - 1
    with records.slab(records.extent(row)).open("r+b") as slab:
        slab.seek(offset)
        byte = slab.read(1)[0]
        slab.seek(offset)
        slab.write(bytes([byte ^ 1]))
    return {records.key(row)}, {Kind.CHECKSUM: 1}


def altered_record(records: Records) -> Damaged:
    row = records.of[SMALL][11]
    key, page = records.page(row)
    each = len(page) // PAGE_SLOTS
    page[each * (int(records.loaded.blocks.index[row]) % PAGE_SLOTS) + 9] ^= 1
    records.commit(Changes({"slots": {key: bytes(page)}}))
    return {records.key(row)}, {Kind.DAMAGED: 1}


def altered_page(records: Records) -> Damaged:
    key, page = records.page(records.of[SMALL][11])
    records.commit(Changes({"slots": {key: bytes(page[1:])}}))
    blocks = records.loaded.blocks
    theirs = (blocks.extent == int.from_bytes(key[:4])) & (
        blocks.index // PAGE_SLOTS == int.from_bytes(key[4:])
    )
    return {records.key(row) for row in np.flatnonzero(theirs).tolist()}, {Kind.DAMAGED: 1}


def two_slots(records: Records) -> Damaged:
    row = records.of[SMALL][5]
    records.add(row, index=FREE, stored_at=float(records.loaded.blocks.stored_at[row]) - 1)
    return set(), {Kind.SUPERSEDED: 1}


DAMAGES = {
    "whole slab": whole_slab,
    "end of slab": end_of_slab,
    "leftover slab": leftover_slab,
    "namespace": unknown_namespace,
    "extent": falsified(Kind.NO_EXTENT, extent=200),
    "another size": another_size,
    "another tenant": strangers,
    "length": falsified(Kind.LENGTH, length=SMALL - 1),
    "outside": falsified(Kind.OUTSIDE, index=EXTENT // SMALL),
    "one bit": one_bit,
    "altered record": altered_record,
    "altered page": altered_page,
    "two slots": two_slots,
}


def quiet(_done: int, _total: int) -> None:
    pass


def run(*args: str, code: int) -> dict[str, Any]:
    ran = cli("fsck", "--json", *args)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return dict(json.loads(ran.stdout))


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in folder.rglob("*")}


def served(folder: Path) -> dict[int, set[bytes]]:
    """By size of blocks, the keys that a daemon on this folder serves, each byte compared."""
    found: dict[int, set[bytes]] = {}
    with daemon_on(folder) as daemon, Client(daemon.url, deadline_s=10) as client:
        for size, layout in LAYOUTS.items():
            ns, out = client.namespace(layout), np.zeros((1, size), np.uint8)
            found[size] = {key for key in KEYS[size] if ns.get([key], out)}
            for key in sorted(found[size]):
                assert ns.get([key], out) == 1
                assert np.array_equal(out, payloads([key], size))
    return found


def test_a_clean_folder_is_clean_and_stays_as_it_is(folder: Path) -> None:
    before = listing(folder)
    steps: list[tuple[int, int]] = []
    report = fsck(folder, LIMIT, True, lambda done, total: steps.append((done, total)))
    assert report.counts() == {}
    assert list(report.findings()) == []
    assert report.checked_bytes == TOTAL
    assert steps == sorted(steps)
    assert steps[-1] == (TOTAL, TOTAL)
    found = run(str(folder), code=0)
    assert (found["records"], found["checked_bytes"], found["problems"]) == (80, TOTAL, 0)
    assert listing(folder) == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_repaired_and_gone(folder: Path, damage: str) -> None:
    lost, kinds = DAMAGES[damage](Records(folder))
    report = fsck(folder, None, False, quiet)
    assert report.counts() == kinds
    assert Counter(f.kind for f in report.findings()) == kinds
    told = {f.key for f in report.findings() if f.kind not in (Kind.DAMAGED, Kind.NAMESPACE, Kind.SUPERSEDED)}
    assert told - {b""} == (lost if Kind.DAMAGED not in kinds else set())

    repaired = fsck(folder, None, True, quiet)
    assert repaired.counts() == kinds
    assert repaired.repaired
    assert fsck(folder, None, False, quiet).counts() == {}
    assert served(folder) == {size: set(keys) - lost for size, keys in KEYS.items()}


def test_exit_codes_say_what_was_repaired(folder: Path) -> None:
    lost, kinds = one_bit(Records(folder))
    found = run(str(folder), code=1)
    assert (found["kinds"], found["problems"], found["repaired"]) == (kinds, 1, 0)
    assert {bytes.fromhex(finding["key"]) for finding in found["findings"]} == lost
    assert run(str(folder), "--repair", code=3)["repaired"] == 1
    assert run(str(folder), code=0)["records"] == 79


def test_slabs_beyond_the_limit_are_orphans_where_the_limit_is_known(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "slabs" / "000007.slab", folder / "slabs" / "000099.slab")
    assert run(str(folder), code=0)["problems"] == 0
    config = tmp_path / "kvstore.toml"
    config.write_text(f'[nvme]\npath = "{folder}"\nlimit = {LIMIT}\n')
    [finding] = run("-c", str(config), "--repair", code=3)["findings"]
    assert (finding["kind"], finding["extent"]) == (Kind.ORPHAN, 99)
    assert sorted(path.name for path in (folder / "slabs").iterdir()) == [f"{i:06d}.slab" for i in range(8)]


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """Three blocks of an encrypted tenant and one of another, which is not."""
    folder = tmp_path / "nvme"
    with opened(folder) as tier:
        for number, key, index in [(1, b"a", 0), (1, b"b", 1), (2, b"a", 0), (3, b"a", 0)]:
            tier.write(number, key, index)
    return folder


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, BLOCK + 16, BLOCK + 27])
def test_sealed_blocks_are_opened_with_the_key(sealed: Path, at: int) -> None:
    assert fsck(sealed, None, False, quiet, MASTER).counts() == {}
    with (sealed / "slabs" / "000000.slab").open("r+b") as slab:
        slab.seek(SEALED_SLOT + at)
        byte = slab.read(1)[0]
        slab.seek(SEALED_SLOT + at)
        slab.write(bytes([byte ^ 4]))
    report = fsck(sealed, None, True, quiet, MASTER)
    assert report.unchecked == 0
    assert list(report.findings()) == [Finding(Kind.CHECKSUM, 0, 1, 1, b"b")]
    assert len(fsck(sealed, None, False, quiet, MASTER).blocks) == 3


def test_without_the_key_sealed_blocks_are_not_checked_and_stay(sealed: Path, tmp_path: Path) -> None:
    with (sealed / "slabs" / "000000.slab").open("r+b") as slab:
        slab.write(b"not what was sealed")
    before = listing(sealed)
    ran = cli("fsck", "--json", "--repair", str(sealed))
    found = json.loads(ran.stdout)
    assert (ran.returncode, found["problems"], found["encrypted_blocks_not_checked"]) == (0, 0, 3)
    assert found["checked_bytes"] == BLOCK, "what is plain was"
    assert "3 encrypted blocks were not checked: pass --key-file" in ran.stderr
    assert listing(sealed) == before
    key = tmp_path / "key"
    key.write_text(MASTER.key.hex())
    key.chmod(0o600)
    config = tmp_path / "kvstore.toml"
    config.write_text(f'[nvme]\npath = "{sealed}"\n[encryption]\nkey_file = "{key}"\n')
    for args in (("--key-file", str(key), str(sealed)), ("-c", str(config))):
        found = run(*args, code=1)
        assert (found["kinds"], found["encrypted_blocks_not_checked"]) == ({Kind.CHECKSUM: 1}, 0)


def test_the_wrong_key_finds_no_damage(sealed: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(OTHER_MASTER.key.hex())
    key.chmod(0o600)
    before = listing(sealed)
    ran = cli("fsck", "--repair", "--key-file", str(key), str(sealed))
    assert ran.returncode == 2
    assert f"{key} does not open the data key of tenant team" in ran.stderr
    assert listing(sealed) == before


@pytest.mark.parametrize("master", [MASTER, None], ids=["key", "no key"])
def test_blocks_without_a_key_are_reported(sealed: Path, master: MasterKey | None) -> None:
    (sealed / "keys" / "team.key").unlink()
    assert fsck(sealed, None, True, quiet, master).counts() == {Kind.NO_KEY: 3}
    assert len(fsck(sealed, None, False, quiet).blocks) == 1


def test_sealed_blocks_need_sealed_slots(sealed: Path) -> None:
    with closing(RecordStore(sealed, None, 1 << 30)) as store:
        row = store.load().namespaces[1]
        plain = replace(row, layout={**row.layout, "block_bytes": SEALED_SLOT - ENCRYPTION_BYTES + 1})
        store.commit(Changes({"namespaces": {ID.pack(1): plain.pack()}}))
    assert fsck(sealed, None, False, quiet, MASTER).counts() == {Kind.SLOT_BYTES: 2}


def test_an_unreadable_block_affects_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(folder)
    row = records.of[SMALL][9]
    bad = int(records.loaded.blocks.index[row]) * SMALL
    inode, read = records.slab(records.extent(row)).stat().st_ino, os.pread

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == inode and offset <= bad < offset + nbytes:
            raise OSError(errno.EIO, "injected")
        return read(fd, nbytes, offset)

    monkeypatch.setattr(module.os, "pread", pread)
    [finding] = fsck(folder, None, False, quiet).findings()
    number, index = int(records.loaded.blocks.ns[row]), bad // SMALL
    assert finding == Finding(Kind.UNREADABLE, records.extent(row), index, number, records.key(row))


def test_runs_are_cut_at_gaps_and_at_their_size() -> None:
    index = np.array([0, 1, 3, 4, 4, 5, 6, 7, 8, 9], np.uint32)
    runs = module._runs(np.arange(10), index, slot_bytes=2 << 20)
    assert [index[run].tolist() for run in runs] == [[0, 1], [3], [4, 4, 5, 6, 7], [8, 9]]


def test_records_that_no_daemon_has_signed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    with lmdb.open(str(tmp_path / "records"), max_dbs=1) as env:
        env.open_db(b"meta")
    ran = cli("fsck", "--repair", str(tmp_path))
    assert ran.returncode == 2
    assert f"the records in {tmp_path} are unfinished" in ran.stderr


@pytest.mark.parametrize("what", ["nothing", "empty", "a file", "no data"])
def test_where_no_daemon_stored_anything_nothing_is_made(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "nvme"
    if what == "a file":
        folder.write_text("no folder")
    elif what != "nothing":
        (folder / "records").mkdir(parents=True)
    if what == "no data":
        (folder / "records" / "data.mdb").touch()
    before = listing(tmp_path)
    ran = cli("fsck", "--repair", str(folder))
    assert ran.returncode == 2
    assert f"{folder} holds no records of a kvstore daemon" in ran.stderr
    assert listing(tmp_path) == before


def test_records_that_lmdb_cannot_read_are_left_to_the_daemon(folder: Path) -> None:
    file = folder / "records" / "data.mdb"
    os.truncate(file, 2 * 4096)
    before = listing(folder)
    ran = cli("fsck", "--repair", str(folder))
    assert ran.returncode == 2
    assert f"the records in {folder} are corrupt: " in ran.stderr
    assert listing(folder) == before


def test_a_folder_in_use_is_left_alone(folder: Path) -> None:
    with daemon_on(folder) as daemon:
        ran = cli("fsck", "--repair", str(folder))
        assert ran.returncode == 2
        assert f"folder {folder} is in use by pid {daemon.pid}" in ran.stderr


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((), "fsck needs a folder or a configuration"),
        (("/tmp", "-c", "/nowhere.toml"), "fsck needs a folder or a configuration"),
        (("-c", "/nowhere.toml"), "cannot read /nowhere.toml"),
    ],
)
def test_folders_that_cannot_be_checked_are_named(args: tuple[str, ...], why: str) -> None:
    ran = cli("fsck", *args)
    assert ran.returncode == 2
    assert why in ran.stderr


def test_a_config_without_a_folder_is_refused(tmp_path: Path) -> None:
    ran = cli("fsck", config="[dram]\nlimit = '16MiB'\n", folder=tmp_path)
    assert ran.returncode == 2
    assert "sets no nvme.path" in ran.stderr


def test_people_read_a_table(folder: Path) -> None:
    one_bit(Records(folder))
    ran = cli("fsck", str(folder))
    assert ran.returncode == 1
    assert "\nwrong checksum " in ran.stdout
    assert "\nchecked " in ran.stdout


def test_help_has_the_exit_codes() -> None:
    text = " ".join(cli("fsck", "--help", COLUMNS="200").stdout.split())
    assert "0 no problems, 1 problems remain, 2 could not check, 3 all problems were repaired" in text
