"""Files that were altered while no daemon ran: what is damaged is a miss, what is served is right."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.client.sync import Namespace
from kvstore.errors import DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import Layout
from tests.crash import files
from tests.daemons import (
    BLOCK,
    WITH_NVME,
    check_limits,
    eventually,
    idle,
    log_of,
    names,
    payload,
    payloads,
    room_for,
)

LAYOUT = Layout(model="damage", block_bytes=BLOCK)
SETTINGS = {"dram": WITH_NVME["dram"], "nvme": {"limit": 16 << 20, "io_threads": 2}}
"""NVMe in extents of 2 MiB, 128 blocks each."""

PAGE = 4096


def served(ns: Namespace, keys: list[bytes]) -> list[int]:
    """Which of these keys are served, each asked for alone and compared."""
    found, out = [], room_for(1)
    for i, key in enumerate(keys):
        if ns.get([key], out):
            assert out[0].tobytes() == payload(key), f"wrong bytes of block {i}"
            found.append(i)
    return found


def store(daemon: LocalDaemon, keys: list[bytes]) -> None:
    """Puts blocks and returns when they are on record."""
    with Client(daemon.url, deadline_s=20, strict=True) as client:
        assert client.namespace(LAYOUT).put(keys, payloads(keys)).stored == len(keys)
        eventually(lambda: client.status()["counters"].get("written_blocks", 0) >= len(keys))


def test_every_flipped_bit_is_found() -> None:
    keys, dice = names(1000), random.Random(1)
    with LocalDaemon(WITH_NVME) as daemon:
        folder = daemon.folder / "nvme"
        store(daemon, keys)
        daemon.stop()
        on_record = files.records(folder)
        assert {record.key for record in on_record} == set(keys)
        for record in on_record:
            files.flip_bit(files.slab(folder, record.extent), dice, record.offset, record.length)
        daemon.start()
        with Client(daemon.url, deadline_s=60, strict=True) as client:
            ns = client.namespace(LAYOUT)
            assert ns.lookup(keys) == len(keys)
            started_s = time.monotonic()
            assert served(ns, keys) == []
            assert time.monotonic() - started_s < 40, "a bad block is a miss at once, not at its deadline"
            assert client.status()["counters"].get("quarantined_blocks", 0) == len(keys)
            check_limits(client.status())
        store(daemon, keys)
        daemon.kill()
        assert {record.key for record in files.records(folder)} == set(keys)
        daemon.start()
        with Client(daemon.url, deadline_s=20, strict=True) as client:
            assert len(served(client.namespace(LAYOUT), keys)) == len(keys)


def _cut(to: Callable[[int], int]) -> Callable[[Path, random.Random], None]:
    def damage(file: Path, _: random.Random) -> None:
        os.truncate(file, to(file.stat().st_size))

    return damage


def _flip(bits: int) -> Callable[[Path, random.Random], None]:
    def damage(file: Path, dice: random.Random) -> None:
        for _ in range(bits):
            files.flip_bit(file, dice, 0, file.stat().st_size)

    return damage


def _overwrite(file: Path, dice: random.Random) -> None:
    """A page of the file becomes noise."""
    with file.open("r+b") as opened:
        opened.seek(PAGE * dice.randrange(file.stat().st_size // PAGE))
        opened.write(dice.randbytes(PAGE))


DAMAGE = {
    "1 bit": _flip(1),
    "100 bits": _flip(100),
    "1000 bits": _flip(1000),
    "a page of noise": _overwrite,
    "empty": _cut(lambda nbytes: 0),
    "one byte": _cut(lambda nbytes: 1),
    "half and a bit": _cut(lambda nbytes: nbytes // 2 // PAGE * PAGE + 1234),
    "all but a page": _cut(lambda nbytes: nbytes - PAGE),
    "all but a byte": _cut(lambda nbytes: nbytes - 1),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """An NVMe folder that a daemon has left, and the keys in it: enough for records of many pages."""
    keys = names(300)
    folder = tmp_path_factory.mktemp("stored") / "nvme"
    with LocalDaemon({**SETTINGS, "nvme": {**SETTINGS["nvme"], "path": folder}}) as daemon:
        store(daemon, keys)
        with Client(daemon.url, deadline_s=20, strict=True) as client:
            assert client.namespace(LAYOUT).invalidate(keys[100:200]) == 100
    return folder, keys[:100] + keys[200:]


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_records_never_keep_a_daemon_from_serving(
    stored: tuple[Path, list[bytes]], tmp_path: Path, name: str
) -> None:
    pristine, keys = stored
    folder = tmp_path / "nvme"
    shutil.copytree(pristine, folder)
    DAMAGE[name](folder / "records" / "data.mdb", random.Random(name))
    # LMDB may die where it changes a damaged page. After two deaths, the records are written anew.
    survived = [_survives(folder, keys), _survives(folder, keys)]
    while not all(survived[-2:]):
        survived.append(_survives(folder, keys))
        assert survived.count(False) <= 2


REFUSED = ("holds format", "a history of generations", "move the folder away to start empty")
"""A daemon refuses a folder of an unknown format or history, which may be a later version's."""


def _survives(folder: Path, keys: list[bytes]) -> bool:
    """Whether a daemon starts on this folder, serves nothing wrong, and lives through writes of all kinds.

    It also does if it refuses the folder by name.
    """
    fresh, aside = names(50, "fresh"), set(folder.glob("records.corrupt-*"))
    try:
        with LocalDaemon({**SETTINGS, "nvme": {**SETTINGS["nvme"], "path": folder}}) as daemon:
            with Client(daemon.url, deadline_s=20, strict=True) as client:
                ns = client.namespace(LAYOUT)
                served(ns, keys + fresh)
                ns.put(fresh, payloads(fresh))
                with suppress(DeniedError):  # where LMDB can read and not write, deletions can't be promised
                    ns.invalidate([*keys[:50], *fresh])
                ns.put(fresh, payloads(fresh))
                eventually(lambda: idle(client.status()))
                check_limits(client.status())
            log = log_of(daemon)
            daemon.kill()
    except UnavailableError as error:
        *what, hint = (word in str(error) for word in REFUSED)
        return "exit code 2" in str(error) and any(what) and hint
    assert all(path.name in log for path in set(folder.glob("records.corrupt-*")) - aside)
    return True


def test_a_short_slab_keeps_the_blocks_before_the_cut() -> None:
    keys = names(200)
    with LocalDaemon(SETTINGS) as daemon:
        folder = daemon.folder / "nvme"
        store(daemon, keys)
        daemon.kill()
        on_record = files.records(folder)
        extent = on_record[0].extent
        cut = 37 * BLOCK + 100
        os.truncate(files.slab(folder, extent), cut)
        beyond = {r.key for r in on_record if r.extent == extent and r.offset + r.length > cut}
        assert 0 < len(beyond) < 128
        daemon.start()
        with Client(daemon.url, deadline_s=20, strict=True) as client:
            ns = client.namespace(LAYOUT)
            assert {keys[i] for i in served(ns, keys)} == set(keys) - beyond
            assert "quarantined_blocks" not in client.status()["counters"]
            check_limits(client.status())
            again = [key for key in keys if key in beyond]
            store(daemon, again)
            assert len(served(ns, keys)) == len(keys)
        _is_whole(daemon, keys)


def test_blocks_of_a_missing_slab_can_be_stored_again() -> None:
    keys = names(200)
    with LocalDaemon(SETTINGS) as daemon:
        folder = daemon.folder / "nvme"
        store(daemon, keys)
        daemon.kill()
        on_record = files.records(folder)
        extent = on_record[0].extent
        files.slab(folder, extent).unlink()
        gone = {r.key for r in on_record if r.extent == extent}
        daemon.start()
        with Client(daemon.url, deadline_s=20, strict=True) as client:
            ns = client.namespace(LAYOUT)
            assert {keys[i] for i in served(ns, keys)} == set(keys) - gone
            store(daemon, [key for key in keys if key in gone])
            assert len(served(ns, keys)) == len(keys)
        _is_whole(daemon, keys)


def _is_whole(daemon: LocalDaemon, keys: list[bytes]) -> None:
    """All is there after one more crash, and the slabs have their full size."""
    daemon.kill()
    folder = daemon.folder / "nvme"
    assert {record.key for record in files.records(folder)} == set(keys)
    assert files.slab_bytes(folder) == SETTINGS["nvme"]["limit"]
    daemon.start()
    with Client(daemon.url, deadline_s=20, strict=True) as client:
        assert len(served(client.namespace(LAYOUT), keys)) == len(keys)
        assert "quarantined_blocks" not in client.status()["counters"]
