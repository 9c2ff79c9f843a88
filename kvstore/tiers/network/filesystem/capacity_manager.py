"""The capacity manager of a shared folder: counts bytes, grants bytes to daemons, deletes old blocks.

One daemon is the manager. Another daemon takes over with a lease of a higher *generation*. It then waits
until each member has either reported under that generation or lost its folder. So no member writes with
grants of an earlier manager. From then on this holds at every moment:

    bytes in the folder  <=  counted + sum over members (granted - used when the count began) - deleted since

Bytes that were used when the count began are in the count, and all later bytes were granted. The manager
grants bytes only while the right side is below the limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.tiers.network.base import Name, NetworkError
from kvstore.tiers.network.filesystem.byte_grants import MAX_FILE_BYTES, ManagerFile, MemberFile, parse_report
from kvstore.tiers.network.filesystem.safe_paths import CONTROL, SafePaths, blocks
from kvstore.tiers.network.objects import ROOT

_log = logging.getLogger(__name__)

LEASE_S = 6.0
"""A manager or member whose file has not changed for this time loses its role."""

RECOUNT_EVERY_S = 300.0
LEFTOVER_S = 3600.0
_STEP_FILES = 256
_STEP_S = 0.003
_MEMBER = re.compile(r"[A-Za-z0-9-]+-\d+-[0-9a-f]{8}")
_LEFTOVER = re.compile(r"(clock|health)-.+")


class StallTimer:
    """Measures for how long a value has not changed, by this host's monotonic clock."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def unchanged_s(self, seen: object) -> float:
        """Takes the current value. Returns for how long (s) it has been seen unchanged."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


@dataclass
class _Count:
    """One count of the folder's bytes.

    `base`: bytes that each member had used before the count began. `lost`: bytes that members that have left
    since may have added.
    """

    base: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    nbytes: int = 0


class CapacityManager:
    """One generation of the manager. Not thread-safe. Raises OSError and NetworkError like `SafePaths`."""

    def __init__(self, paths: SafePaths, limit_bytes: int, generation: int) -> None:
        self.generation = generation
        self._paths = paths
        self._limit_bytes = limit_bytes
        self._stall_timers: dict[str, StallTimer] = {}
        self._reports: dict[str, MemberFile] = {}
        self._grants: dict[str, int] = {}
        self._counts: list[_Count] = []  # the valid one, if any, and the one in progress
        self._counted = False
        self._counted_at = 0.0
        self._work = self._rounds()

    def beat(self, at: int, names: list[str], beat: int) -> ManagerFile:
        """Reads all reports, removes silent members and returns the next lease.

        `at` is a descriptor of the control folder, `names` its entries.
        """
        members = {name for name in names if _MEMBER.fullmatch(name)}
        for name in members:
            raw = read_small(at, f"{name}/report")
            silent_s = self._stall_timers.setdefault(name, StallTimer()).unchanged_s(raw)
            report = parse_report(raw)
            if report is not None and report.generation == self.generation:
                self._reports[name] = report
                self._grants.setdefault(name, 0)
            if silent_s > LEASE_S and remove_member(self._paths, at, name):
                _log.info("%s: member %s was silent for too long and is removed", self._paths.folder, name)
                self._forget(name)
        for name in set(self._stall_timers) - members:
            self._forget(name)
        for name in names:
            if re.fullmatch(r"lease-\d{12}", name) and name < f"lease-{self.generation:012d}":
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=at)
        if self._counted:
            self._grant()
        bound = self.bound()
        full = self._counted and self._limit_bytes - bound < self._limit_bytes // 100
        return ManagerFile(beat, bound, full, dict(self._grants))

    def bound(self) -> int:
        """Returns an upper bound of the folder's bytes, with all grants. 0 before the first count."""
        return self._bound(self._counts[0]) if self._counted else 0

    def step(self) -> bool:
        """Counts or evicts for about 3 ms. Returns False if there is nothing to do now."""
        ends = time.monotonic() + _STEP_S
        try:
            while busy := next(self._work):
                if time.monotonic() > ends:
                    break
            return busy
        except (OSError, NetworkError) as error:
            # An incomplete count is not an upper bound.
            _log.warning("the bytes in %s cannot be counted: %s", self._paths.folder, error)
            self._counts = self._counts[:1] if self._counted else []
            self._counted_at = time.monotonic()
            self._work = self._rounds()
            return False

    def _rounds(self) -> Iterator[bool]:
        while True:
            while not self._due():
                yield False
            count = _Count({name: report.used for name, report in self._reports.items()})
            self._counts.append(count)
            ages: Counter[int] = Counter()
            for block in self._walk():
                if block is None:
                    yield True
                else:
                    count.nbytes += block[1].st_size
                    ages[_minute(block[1])] += block[1].st_size
            self._counts, self._counted = [count], True
            self._counted_at = time.monotonic()
            yield from self._evict(count, ages)

    def _evict(self, count: _Count, ages: Counter[int]) -> Iterator[bool]:
        """Deletes the least recently used blocks until a tenth of the limit is free.

        Uses the likely number of bytes. The upper bound would delete too much: it has bytes that were
        written during the count twice.
        """
        surplus = count.nbytes - self._limit_bytes * 9 // 10
        surplus += sum(self._grants[name] - report.used for name, report in self._reports.items())
        if surplus <= 0:
            return
        last = _last_minute(ages, surplus)
        for block in self._walk():
            if block is None:
                yield True
            elif _minute(block[1]) <= last and self._paths.unlink(block[0]):
                count.nbytes -= block[1].st_size
                surplus -= block[1].st_size
                if surplus <= 0:
                    return

    def _walk(self) -> Iterator[tuple[Name, os.stat_result] | None]:
        """Yields all blocks, and None now and then so that the caller can pause."""
        seen = 0
        for namespace in self._paths.entries(ROOT):
            for folder in self._paths.entries(f"{ROOT}/{namespace.name}"):
                yield None
                for block in blocks(self._paths, f"{ROOT}/{namespace.name}/{folder.name}"):
                    seen += 1
                    if seen % _STEP_FILES == 0:
                        yield None
                    yield block

    def _due(self) -> bool:
        """Returns whether to count now. The first count waits for a report of each member."""
        if not self._stall_timers or any(name not in self._reports for name in self._stall_timers):
            return False
        if not self._counted_at or time.monotonic() - self._counted_at > RECOUNT_EVERY_S:
            return True
        if not self._counted:
            return False
        [count] = self._counts
        used = count.lost + sum(
            report.used - count.base.get(name, 0) for name, report in self._reports.items()
        )
        free = self._limit_bytes - self._bound(count)
        return free < self._limit_bytes // 20 and used >= self._limit_bytes // 50

    def _bound(self, count: _Count) -> int:
        granted = sum(grant - count.base.get(name, 0) for name, grant in self._grants.items())
        return count.nbytes + count.lost + granted

    def _grant(self) -> None:
        """Tops up the grants of writing members: together they have up to a twentieth of the limit left."""
        writers = [name for name, report in self._reports.items() if report.wants]
        free = max(0, self._limit_bytes - self.bound())
        for name in writers:
            share = min(free, self._limit_bytes // 20) // len(writers)
            has = self._grants[name] - self._reports[name].used
            self._grants[name] += max(0, share - has)

    def _forget(self, name: str) -> None:
        """Forgets a member that has left. The next count includes what it has written."""
        self._stall_timers.pop(name, None)
        self._reports.pop(name, None)
        granted = self._grants.pop(name, 0)
        for count in self._counts:
            count.lost += granted - count.base.pop(name, 0)


def remove_member(paths: SafePaths, at: int, name: str) -> bool:
    """Removes a member's folder, with all files that it could still rename into place. Returns success."""
    for _ in range(3):  # the member may still create files
        with contextlib.suppress(OSError):
            with paths.at(f"{CONTROL}/{name}") as folder:
                for entry in paths.entries(f"{CONTROL}/{name}"):
                    os.unlink(entry.name, dir_fd=folder)
            os.rmdir(name, dir_fd=at)
            return True
    return False


def sweep(paths: SafePaths) -> None:
    """Removes leftovers of crashed daemons that are older than `LEFTOVER_S` by the filesystem's clock."""
    if not any(True for _ in paths.entries(CONTROL)):
        return
    before = paths.now() - LEFTOVER_S
    with paths.at(CONTROL) as at:
        for entry in paths.entries(CONTROL):
            with contextlib.suppress(OSError):
                old = entry.stat(follow_symlinks=False).st_mtime < before
                if _MEMBER.fullmatch(entry.name):
                    _sweep_member(paths, at, entry.name, before, old)
                elif _LEFTOVER.fullmatch(entry.name) and old:
                    os.unlink(entry.name, dir_fd=at)


def _sweep_member(paths: SafePaths, at: int, name: str, before: float, old: bool) -> None:
    with paths.at(f"{CONTROL}/{name}") as folder:
        for entry in paths.entries(f"{CONTROL}/{name}"):
            if entry.stat(follow_symlinks=False).st_mtime < before:
                os.unlink(entry.name, dir_fd=folder)
    if old:
        os.rmdir(name, dir_fd=at)


def read_small(at: int, name: str) -> bytes:
    """Returns a small file's bytes, empty if there is no such file."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    try:
        return os.read(fd, MAX_FILE_BYTES)
    finally:
        os.close(fd)


def _minute(found: os.stat_result) -> int:
    return int(found.st_mtime) // 60


def _last_minute(ages: Counter[int], surplus: int) -> int:
    """Returns the newest minute to delete so that `surplus` bytes are deleted."""
    for minute in sorted(ages):
        surplus -= ages[minute]
        if surplus <= 0:
            return minute
    return max(ages, default=0)
