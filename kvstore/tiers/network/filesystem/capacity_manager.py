"""Keeps a shared folder under its limit: grants bytes to daemons, counts what there is, deletes the oldest.

One daemon is janitor. Another takes over by a lease of a higher *generation*, and waits until each daemon
has either answered under it or lost its folder; so none goes on with what an earlier janitor granted. Then

    bytes there  <=  counted + granted to each, less what it had used when the count began - deleted since

holds at every moment: what was used by then was in place before the count, and whatever comes later was
granted. Grants are given only as long as the right side stays under the limit.
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
from kvstore.tiers.network.filesystem.byte_grants import MAX_NOTE_BYTES, ManagerFile, MemberFile, report_of
from kvstore.tiers.network.filesystem.safe_paths import CONTROL, SafePaths, blocks
from kvstore.tiers.network.objects import ROOT, path

_log = logging.getLogger(__name__)

LEASE_S = 6.0
"""Whoever is silent for so long is no janitor any more, or no member."""

RECOUNT_EVERY_S = 300.0
LEFTOVER_S = 3600.0
_STEP_FILES = 256
_STEP_S = 0.003
_MEMBER = re.compile(r"[A-Za-z0-9-]+-\d+-[0-9a-f]{8}")
_LEFTOVER = re.compile(r"(clock|health)-.+")


class StallTimer:
    """How long (s) something stays the same, by this host's clock since it was first seen so."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def unchanged_s(self, seen: object) -> float:
        """What it looks like now."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


@dataclass
class _Count:
    """What a walk through the folder found. `base`: what members had used before it began.

    `lost`: what those that are gone since may have put there meanwhile.
    """

    base: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    nbytes: int = 0


class CapacityManager:
    """One generation of the manager. One thread calls. OSError and NetworkError as in `SafePaths`."""

    def __init__(self, tree: SafePaths, limit_bytes: int, generation: int) -> None:
        self.generation = generation
        self._tree = tree
        self._limit_bytes = limit_bytes
        self._watches: dict[str, StallTimer] = {}
        self._reports: dict[str, MemberFile] = {}
        self._grants: dict[str, int] = {}
        self._counts: list[_Count] = []  # the one in force, if there is one; while one is made, that too
        self._counted = False
        self._counted_at = 0.0
        self._work = self._rounds()

    def beat(self, at: int, names: list[str], beat: int) -> ManagerFile:
        """Hears all members, and answers what to tell them. `at`, `names`: the control folder's."""
        members = {name for name in names if _MEMBER.fullmatch(name)}
        for name in members:
            raw = read_note(at, f"{name}/report")
            silent_s = self._watches.setdefault(name, StallTimer()).unchanged_s(raw)
            report = report_of(raw)
            if report is not None and report.generation == self.generation:
                self._reports[name] = report
                self._grants.setdefault(name, 0)
            if silent_s > LEASE_S and remove_member(self._tree, at, name):
                _log.info("%s: %s was silent and is out", self._tree.folder, name)
                self._forget(name)
        for name in set(self._watches) - members:
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
        """At most how many bytes there are, with all that was granted; 0 before the first count."""
        return self._bound(self._counts[0]) if self._counted else 0

    def step(self) -> bool:
        """Does a little of what takes long; False if nothing is to be done now."""
        ends = time.monotonic() + _STEP_S
        try:
            while busy := next(self._work):
                if time.monotonic() > ends:
                    break
            return busy
        except (OSError, NetworkError) as error:
            # A count that is not whole is none.
            _log.warning("%s can't be counted: %s", self._tree.folder, error)
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
        """Deletes what was used least lately, until a tenth of the limit can be granted.

        By what is likely there. The bound has twice what was written during the count: the next one tells.
        """
        surplus = count.nbytes - self._limit_bytes * 9 // 10
        surplus += sum(self._grants[name] - report.used for name, report in self._reports.items())
        if surplus <= 0:
            return
        last = _last_minute(ages, surplus)
        for block in self._walk():
            if block is None:
                yield True
            elif _minute(block[1]) <= last and self._delete(block[0]):
                count.nbytes -= block[1].st_size
                surplus -= block[1].st_size
                if surplus <= 0:
                    return

    def _walk(self) -> Iterator[tuple[Name, os.stat_result] | None]:
        """All blocks, and None every now and then in between."""
        seen = 0
        for space in self._tree.entries(ROOT):
            for folder in self._tree.entries(f"{ROOT}/{space.name}"):
                yield None
                for block in blocks(self._tree, f"{ROOT}/{space.name}/{folder.name}"):
                    seen += 1
                    if seen % _STEP_FILES == 0:
                        yield None
                    yield block

    def _delete(self, name: Name) -> bool:
        folder, file = os.path.split(path(name))
        try:
            with self._tree.at(folder) as at:
                os.unlink(file, dir_fd=at)
        except FileNotFoundError:
            return False
        return True

    def _due(self) -> bool:
        """Whether to count now: not before each member has heard who is janitor."""
        if not self._watches or any(name not in self._reports for name in self._watches):
            return False
        if not self._counted_at or time.monotonic() - self._counted_at > RECOUNT_EVERY_S:
            return True
        if not self._counted:
            return False
        [count] = self._counts
        used = count.lost + sum(
            report.used - count.base.get(name, 0) for name, report in self._reports.items()
        )
        room = self._limit_bytes - self._bound(count)
        return room < self._limit_bytes // 20 and used >= self._limit_bytes // 50

    def _bound(self, count: _Count) -> int:
        granted = sum(given - count.base.get(name, 0) for name, given in self._grants.items())
        return count.nbytes + count.lost + granted

    def _grant(self) -> None:
        """Those that write share a twentieth of the limit, which is filled up as they use it."""
        asking = [name for name, report in self._reports.items() if report.wants]
        room = max(0, self._limit_bytes - self.bound())
        for name in asking:
            share = min(room, self._limit_bytes // 20) // len(asking)
            has = self._grants[name] - self._reports[name].used
            self._grants[name] += max(0, share - has)

    def _forget(self, name: str) -> None:
        """A member is gone. What it may have put there is known with the next count."""
        self._watches.pop(name, None)
        self._reports.pop(name, None)
        given = self._grants.pop(name, 0)
        for count in self._counts:
            count.lost += given - count.base.pop(name, 0)


def remove_member(tree: SafePaths, at: int, name: str) -> bool:
    """Takes a daemon's folder away, and with it all that it could still rename into place."""
    for _ in range(3):  # it may be at work in there
        with contextlib.suppress(OSError):
            with tree.at(f"{CONTROL}/{name}") as folder:
                for entry in tree.entries(f"{CONTROL}/{name}"):
                    os.unlink(entry.name, dir_fd=folder)
            os.rmdir(name, dir_fd=at)
            return True
    return False


def sweep(tree: SafePaths) -> None:
    """Removes what was left behind `LEFTOVER_S` ago, by the file system's clock."""
    if not any(True for _ in tree.entries(CONTROL)):
        return
    before = tree.now() - LEFTOVER_S
    with tree.at(CONTROL) as at:
        for entry in tree.entries(CONTROL):
            with contextlib.suppress(OSError):
                old = entry.stat(follow_symlinks=False).st_mtime < before
                if _MEMBER.fullmatch(entry.name):
                    _sweep_member(tree, at, entry.name, before, old)
                elif _LEFTOVER.fullmatch(entry.name) and old:
                    os.unlink(entry.name, dir_fd=at)


def _sweep_member(tree: SafePaths, at: int, name: str, before: float, old: bool) -> None:
    with tree.at(f"{CONTROL}/{name}") as folder:
        for entry in tree.entries(f"{CONTROL}/{name}"):
            if entry.stat(follow_symlinks=False).st_mtime < before:
                os.unlink(entry.name, dir_fd=folder)
    if old:
        os.rmdir(name, dir_fd=at)


def read_note(at: int, name: str) -> bytes:
    """A small file's bytes; none if there is no such file."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    try:
        return os.read(fd, MAX_NOTE_BYTES)
    finally:
        os.close(fd)


def _minute(found: os.stat_result) -> int:
    return int(found.st_mtime) // 60


def _last_minute(ages: Counter[int], surplus: int) -> int:
    """Up to which minute all has to go for so many bytes."""
    for minute in sorted(ages):
        surplus -= ages[minute]
        if surplus <= 0:
            return minute
    return max(ages, default=0)
