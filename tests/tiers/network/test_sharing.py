"""Daemons that share a folder: under one limit, whoever writes, sleeps or dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.tiers.network import objects
from kvstore.tiers.network.base import Name, Outcome
from kvstore.tiers.network.filesystem import capacity_manager
from kvstore.tiers.network.filesystem.backend import Filesystem
from kvstore.tiers.network.filesystem.byte_grants import (
    ByteGrants,
    ManagerFile,
    MemberFile,
    encode,
    parse_lease,
    parse_report,
)
from kvstore.tiers.network.filesystem.safe_paths import CONTROL, SafePaths
from tests.tiers.network.contract import SPACE, block, ends, wanted
from tests.tiers.network.sharing import BLOCK_BYTES, LEASE_S, hurry

OK, MISSING, TORN, FULL, FAILED = Outcome
LIMIT = 4 << 20
A, B = "a-host-1-00aa00aa", "b-host-2-00bb00bb"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


class Daemon:
    """A process with a part in the folder (`sharing.main`)."""

    def __init__(self, role: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.tiers.network.sharing", role, f"file://{folder}", str(LIMIT)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())

    def kill(self, by: int = signal.SIGKILL) -> None:
        self.process.send_signal(by)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        self.process.stdout.close()


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[str], Daemon]]:
    started: list[Daemon] = []

    def start(role: str) -> Daemon:
        started.append(Daemon(role, folder))
        return started[-1]

    yield start
    for daemon in started:
        daemon.end()


def until(what: Callable[[], object], within_s: float = 30.0) -> None:
    ends = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.01)


def nbytes(folder: Path) -> int:
    """All of our files, temporaries too. One that is renamed meanwhile may be in it once or twice, so each
    counts once."""
    sizes: dict[int, int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            if name.isdecimal() or re.fullmatch("[0-9a-f]+", name):
                with suppress(FileNotFoundError):
                    found = os.stat(f"{path}/{name}")
                    sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def janitor_of(folder: Path) -> int:
    """The number of the latest lease."""
    return max((int(path.name[6:]) for path in folder.glob("kvstore-1/nodes/lease-*")), default=0)


def members(folder: Path) -> list[int]:
    """The processes that have a folder there."""
    return [int(path.parent.name.split("-")[-2]) for path in folder.glob("kvstore-1/nodes/*/report")]


def most(folder: Path, seconds: float) -> int:
    """The most bytes that were there at any time meanwhile, as far as one sees."""
    seen, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        seen = max(seen, nbytes(folder))
    return seen


class TestLimit:
    def test_one_daemon(self, folder: Path) -> None:
        backend = Filesystem(folder, LIMIT)
        for i in range(300):
            until(lambda: backend.write([block(f"{i}".encode(), BLOCK_BYTES)], ends()) == [OK])  # noqa: B023
            assert nbytes(folder) <= LIMIT
        assert nbytes(folder) > LIMIT // 2
        backend.close()

    def test_existing_files_count(self, folder: Path) -> None:
        before = Filesystem(folder)
        blocks = [block(f"{i}".encode(), BLOCK_BYTES) for i in range(LIMIT // BLOCK_BYTES * 2)]
        assert {*before.write(blocks, ends())} == {OK}
        before.close()
        backend = Filesystem(folder, LIMIT)
        until(lambda: nbytes(folder) <= LIMIT * 9 // 10)
        assert nbytes(folder) > LIMIT * 8 // 10
        until(lambda: backend.write([block(b"new", BLOCK_BYTES)], ends()) == [OK])
        backend.close()

    def test_recently_used_blocks_are_kept(self, folder: Path) -> None:
        before = Filesystem(folder)
        blocks = [block(f"{i}".encode(), BLOCK_BYTES) for i in range(LIMIT // BLOCK_BYTES * 3 // 2)]
        before.write(blocks, ends())
        for i, put in enumerate(blocks):
            then = time.time() - 7200 - i * 120
            os.utime(folder / objects.path(put.name), (then, then))
        used = blocks[-10:]
        assert before.read([wanted(b) for b in used], ends()) == [OK] * 10
        before.close()
        backend = Filesystem(folder, LIMIT)
        until(lambda: nbytes(folder) <= LIMIT * 9 // 10)
        outcomes = backend.probe([b.name for b in blocks], ends())
        assert outcomes[-10:] == [OK] * 10
        left = [outcome is OK for outcome in outcomes[:-10]]
        assert left == sorted(left, reverse=True)
        assert any(left)
        assert not all(left)
        backend.close()

    def test_times_of_a_wrong_clock(self, folder: Path) -> None:
        """Files from far ahead and long ago: the limit holds all the same."""
        before = Filesystem(folder)
        blocks = [block(f"{i}".encode(), BLOCK_BYTES) for i in range(LIMIT // BLOCK_BYTES * 2)]
        before.write(blocks, ends())
        for i, put in enumerate(blocks):
            then = time.time() + (1e9 if i % 3 else -1e9)
            os.utime(folder / objects.path(put.name), (then, then))
        before.close()
        backend = Filesystem(folder, LIMIT)
        until(lambda: nbytes(folder) <= LIMIT * 9 // 10)
        until(lambda: backend.write([block(b"new", BLOCK_BYTES)], ends()) == [OK])
        backend.close()

    def test_foreign_files_stay(self, folder: Path) -> None:
        before = Filesystem(folder)
        blocks = [block(f"{i}".encode(), BLOCK_BYTES) for i in range(LIMIT // BLOCK_BYTES * 2)]
        before.write(blocks, ends())
        file = folder / objects.path(blocks[0].name)
        foreign = [
            folder / "README",
            folder / "kvstore-1" / "nodes" / "notes",
            folder / "kvstore-1" / "notes",
            file.parent / "notes",
            file.with_suffix(".old"),
        ]
        for path in foreign:
            path.write_bytes(bytes(BLOCK_BYTES))
            os.utime(path, (0, 0))
        before.close()
        backend = Filesystem(folder, LIMIT)
        until(lambda: nbytes(folder) <= LIMIT * 9 // 10)
        backend.close()
        assert all(path.exists() for path in foreign)

    def test_several_daemons_at_once(self, folder: Path, start) -> None:
        daemons = [start("writes") for _ in range(3)]
        until(lambda: all(len(daemon.said) > 1 for daemon in daemons))
        seen, ends = 0, time.monotonic() + 40
        while sum(len(daemon.said) for daemon in daemons) * BLOCK_BYTES < 1.5 * LIMIT:
            seen = max(seen, nbytes(folder))
            assert time.monotonic() < ends
        assert 0 < seen <= LIMIT

    def test_full_where_nothing_may_be_written(self, folder: Path) -> None:
        """A janitor that grants nothing."""
        made = Filesystem(folder, LIMIT)
        assert made.write([block(b"k", BLOCK_BYTES)], ends()) == [OK]
        assert made.write([block(b"large", 2 * LIMIT)], ends()) == [FULL]
        got = wanted(block(b"k", BLOCK_BYTES))
        assert made.read([got], ends()) == [OK]
        made.close()


class TestCapacityManager:
    def test_another_takes_over(self, folder: Path, start) -> None:
        first = start("writes")
        until(lambda: len(first.said) > 3)
        second = start("writes")
        until(lambda: len(second.said) > 3)
        assert janitor_of(folder) == 1
        first.kill()
        killed, said = time.monotonic(), len(second.said)
        seen = 0
        while janitor_of(folder) == 1 or len(second.said) < said + 100:
            seen = max(seen, nbytes(folder))
            assert time.monotonic() < killed + 15 * LEASE_S
        assert seen <= LIMIT
        assert members(folder) == [second.process.pid]

    @pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
    def test_a_lease_that_none_can_follow_does_not_end_writes(
        self, folder: Path, make: Callable[[Path], None]
    ) -> None:
        nodes = folder / CONTROL
        nodes.mkdir(parents=True)
        make(nodes / "lease-999999999999")
        made = Filesystem(folder, LIMIT)
        until(lambda: made.write([block(b"k", BLOCK_BYTES)], ends()) == [OK])
        assert janitor_of(folder) == 1 or make is Path.mkdir
        made.close()

    def test_all_are_killed_and_start_again(self, folder: Path, start) -> None:
        for _ in range(2):
            daemons = [start("writes") for _ in range(2)]
            until(lambda: all(len(daemon.said) > 3 for daemon in daemons))  # noqa: B023
            for daemon in daemons:
                daemon.kill()
        last = start("writes")
        until(lambda: len(last.said) > 5)
        assert most(folder, 2) <= LIMIT
        assert members(folder) == [last.process.pid]

    def test_a_lease_of_garbage(self, folder: Path) -> None:
        control = folder / "kvstore-1" / "nodes"
        control.mkdir(parents=True)
        (control / "lease-000000000007").write_bytes(b'{"grants": {"x": "y"}, \xff')
        backend = Filesystem(folder, LIMIT)
        until(lambda: janitor_of(folder) >= 8)
        assert backend.write([block(b"k", BLOCK_BYTES)], ends()) == [OK]
        backend.close()

    def test_a_closed_member_removes_its_folder(self, folder: Path) -> None:
        backend = Filesystem(folder, LIMIT)
        assert backend.write([block(b"k", BLOCK_BYTES)], ends()) == [OK]
        assert members(folder) == [os.getpid()]
        backend.close()
        assert members(folder) == []

    def test_a_suspended_member_has_no_grants_afterwards(self, folder: Path, start) -> None:
        """A daemon is stopped where it would rename, others fill its room, and it wakes."""
        backend = Filesystem(folder, LIMIT)
        assert backend.write([block(b"k", BLOCK_BYTES)], ends()) == [OK]
        sleeper = start("stops")
        until(lambda: "here" in sleeper.said)
        assert sleeper.process.pid in members(folder)
        # Its report goes before its temporary file: only without its folder can it rename nothing.
        until(lambda: not list(folder.glob(f"kvstore-1/nodes/*-{sleeper.process.pid}-*")))
        sleeper.kill(signal.SIGCONT)
        until(lambda: len(sleeper.said) > 1)
        assert sleeper.said == ["here", "FAILED"]
        assert backend.probe([block(b"late", BLOCK_BYTES).name], ends()) == [MISSING]
        backend.close()

    def test_one_that_lost_its_folder_joins_again(self, folder: Path) -> None:
        backend = Filesystem(folder, LIMIT)
        assert backend.write([block(b"k", BLOCK_BYTES)], ends()) == [OK]
        [report] = folder.glob("kvstore-1/nodes/*/report")
        while report.parent.exists():
            # Something new may be written there meanwhile.
            shutil.rmtree(report.parent, ignore_errors=True)
        until(lambda: backend.write([block(b"new", BLOCK_BYTES)], ends()) == [OK])
        assert len(members(folder)) == 1
        assert not report.exists()
        backend.close()


class TestCounting:
    """A janitor, and reports as daemons would write them."""

    @pytest.fixture
    def tree(self, folder: Path) -> SafePaths:
        (folder / "kvstore-1" / "nodes").mkdir(parents=True)
        return SafePaths(folder)

    def say(self, tree: SafePaths, name: str, report: MemberFile) -> None:
        folder = tree.folder / "kvstore-1" / "nodes" / name
        folder.mkdir(exist_ok=True)
        (folder / "report").write_bytes(encode(report))

    def beat(self, tree: SafePaths, made: capacity_manager.CapacityManager) -> ManagerFile:
        with tree.at(CONTROL) as at:
            return made.beat(at, [entry.name for entry in tree.entries(CONTROL)], 1)

    def count(self, made: capacity_manager.CapacityManager) -> None:
        while made.step():
            pass

    def put(self, tree: SafePaths, key: bytes) -> int:
        file = tree.folder / objects.path(Name(SPACE, key))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(BLOCK_BYTES))
        return BLOCK_BYTES

    def test_nothing_is_granted_before_all_have_answered(self, tree: SafePaths) -> None:
        made = capacity_manager.CapacityManager(tree, LIMIT, 2)
        self.say(tree, A, MemberFile(1, 2, 0, True))
        self.say(tree, B, MemberFile(1, 1, 0, True))
        self.beat(tree, made)
        self.count(made)
        assert self.beat(tree, made).grants == {A: 0}
        self.say(tree, B, MemberFile(2, 2, 0, True))
        self.beat(tree, made)
        self.count(made)
        assert self.beat(tree, made).grants == {A: LIMIT // 40, B: LIMIT // 40}

    def test_no_grants_before_silent_members_are_removed(self, tree: SafePaths) -> None:
        made = capacity_manager.CapacityManager(tree, LIMIT, 2)
        self.say(tree, B, MemberFile(1, 1, 0, True))
        for beat in range(1000):
            self.say(tree, A, MemberFile(beat, 2, 0, True))
            lease = self.beat(tree, made)
            self.count(made)
            if not (tree.folder / CONTROL / B).exists():
                break
            assert lease.grants == {A: 0}
            time.sleep(0.01)
        assert self.beat(tree, made).grants == {A: LIMIT // 20}

    def test_grants_count_until_the_next_count(self, tree: SafePaths) -> None:
        made = capacity_manager.CapacityManager(tree, LIMIT, 1)
        there = self.put(tree, b"there")
        self.say(tree, A, MemberFile(1, 1, -10, True))
        self.beat(tree, made)
        self.count(made)
        granted = self.beat(tree, made).grants[A]
        assert made.bound() == there + 10 + granted
        self.put(tree, b"new")
        self.say(tree, A, MemberFile(2, 1, BLOCK_BYTES, True))
        more = self.beat(tree, made).grants[A]
        assert more == granted + BLOCK_BYTES + 10
        assert made.bound() == there + 10 + more

    def test_grants_of_dead_members_count_until_the_next_count(self, tree: SafePaths) -> None:
        made = capacity_manager.CapacityManager(tree, LIMIT, 1)
        for name in (A, B):
            self.say(tree, name, MemberFile(1, 1, 0, True))
        self.beat(tree, made)
        self.count(made)
        granted = self.beat(tree, made).grants
        shutil.rmtree(tree.folder / CONTROL / B)
        self.put(tree, b"of b")
        now = self.beat(tree, made).grants
        assert made.bound() == now[A] + granted[B]


class TestLeftovers:
    def test_dying_within_a_write(self, folder: Path, start) -> None:
        dead = start("dies")
        until(lambda: dead.process.poll() is not None)
        assert dead.said == ["here"]
        backend = Filesystem(folder, LIMIT)
        assert backend.read([wanted(block(b"late", BLOCK_BYTES))], ends()) == [MISSING]
        assert list(backend.list(None, ends())) == []
        until(lambda: members(folder) == [os.getpid()])
        until(lambda: not nbytes(folder))
        backend.close()

    def test_without_a_limit_they_go_after_an_hour(self, folder: Path) -> None:
        """By the files' times: what is young stays, also of one that seems dead."""
        nodes = folder / "kvstore-1" / "nodes"
        old, young, foreign = nodes / "a-host-1-00aa00aa", nodes / "b-host-2-00bb00bb", nodes / "backup"
        for path in (old, young, foreign):
            path.mkdir(parents=True)
            (path / "17").write_bytes(b"torn")
        (nodes / "clock-1").write_bytes(b"")
        for path in (old / "17", foreign / "17", nodes / "clock-1"):
            os.utime(path, (time.time() - 3700,) * 2)
        (old / "18").write_bytes(b"torn")
        capacity_manager.sweep(SafePaths(folder))
        assert sorted(path.name for path in nodes.glob("*/*")) == ["17", "17", "18"]
        assert not (old / "17").exists()
        assert not (nodes / "clock-1").exists()
        (old / "18").unlink()
        os.utime(old, (time.time() - 3700,) * 2)
        capacity_manager.sweep(SafePaths(folder))
        assert not old.exists()
        assert young.exists()


class TestAccount:
    def test_granted_bytes_are_written_once(self) -> None:
        account = ByteGrants("a", counted=True)
        assert not account.take(1)
        account.update(1, 100)
        assert account.take(60)
        assert not account.take(60)
        assert account.report(1, True) == MemberFile(1, 1, 0, True)
        account.settle(60)
        assert account.report(2, True) == MemberFile(2, 1, 60, True)
        account.update(1, 120)
        assert account.left == 60
        assert account.report(3, False) == MemberFile(3, 1, 120, False)
        assert not account.take(1)

    def test_bytes_in_flight_count_for_the_next_manager(self) -> None:
        account = ByteGrants("a", counted=True)
        account.update(1, 100)
        assert account.take(60)
        account.update(2, 0)
        assert account.left == 0
        assert account.report(1, True) == MemberFile(1, 2, -60, True)
        account.settle(60)
        assert account.report(2, True) == MemberFile(2, 2, 0, True)

    def test_notes(self) -> None:
        report, lease = MemberFile(1, 2, -3, True), ManagerFile(4, 5, True, {"a": 6})
        assert parse_report(encode(report)) == report
        assert parse_lease(encode(lease)).grants == {"a": 6}
        assert parse_lease(encode(lease)).full
        for raw in (b"", b"[1]", b"\xff", b'{"beat": 1}', encode(report)[:-3]):
            assert parse_report(raw) is None
            assert parse_lease(raw).grants == {}
