"""A daemon among those that share a folder: it reports, hears what it may write, and is janitor if none is.

Each has a folder of its own for its temporaries and its report. Whoever is silent for `LEASE_S` loses it.
What is gone can't be renamed into place, so nothing comes of it, even if its daemon only slept; that one
joins again, under another name. Silence is a file that stays the same while this host's clock runs on: hosts'
clocks are never compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import time

from kvstore.tiers.network.base import NetworkError
from kvstore.tiers.network.filesystem.byte_grants import (
    ByteGrants,
    ManagerFile,
    MemberFile,
    lease_of,
    to_note,
)
from kvstore.tiers.network.filesystem.capacity_manager import (
    LEASE_S,
    CapacityManager,
    StallTimer,
    read_note,
    remove_member,
    sweep,
)
from kvstore.tiers.network.filesystem.safe_paths import CONTROL, SafePaths

_log = logging.getLogger(__name__)

BEAT_S = 1.0
IDLE_S = 10.0
"""Who has written nothing for so long gives back what it may write."""

SWEEP_EVERY_S = 3600.0
_READY_BEATS = 3
_LEASE = re.compile(r"lease-(\d{12})")
_LAST_GENERATION = 10**12 - 1


class Membership:
    """This daemon in the folder of a `SafePaths`. Without a limit it only removes leftovers."""

    def __init__(self, tree: SafePaths, limit_bytes: int) -> None:
        """Starts its thread."""
        self.id = _new_name()
        self._tree = tree
        self._limit_bytes = limit_bytes
        self._account = ByteGrants(self.id, bool(limit_bytes))
        self._joined = False
        self._janitor: CapacityManager | None = None
        self._watch = StallTimer()
        self._beats = 0
        self._full = False
        self._wanted_at = time.monotonic()
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvstore-member", daemon=True)
        self._thread.start()

    def ready(self, ends: float) -> None:
        """Returns when something may be written, or it is known that nothing may, or a few beats later."""
        if not self._limit_bytes:
            return
        with self._news:
            now = self._wanted_at = time.monotonic()
            self._news.wait_for(
                lambda: self._account.left or self._full or self._stop.is_set(),
                min(ends - now, _READY_BEATS * BEAT_S),
            )

    def take(self, nbytes: int) -> ByteGrants | None:
        """The account that so many bytes were taken from, None if they may not be written now."""
        account = self._account
        return account if account.take(nbytes) else None

    def close(self) -> None:
        """Leaves, in a second at most. What is under way can't be renamed into place any more."""
        self._stop.set()
        with self._news:
            self._news.notify_all()
        self._thread.join(1.0)

    def _work(self) -> None:
        swept = -SWEEP_EVERY_S
        said = ""
        while not self._stop.is_set():
            beaten = time.monotonic()
            try:
                if beaten - swept >= SWEEP_EVERY_S:
                    swept = beaten
                    sweep(self._tree)
                if self._limit_bytes:
                    self._beat()
                said = ""
            except (OSError, NetworkError) as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("%s: %s", self._tree.folder, said)
            except Exception:
                _log.exception("the limit of %s", self._tree.folder)
            with self._news:
                self._news.notify_all()
            self._pass_time(beaten + BEAT_S)
        with contextlib.suppress(OSError, NetworkError), self._tree.at(CONTROL) as at:
            remove_member(self._tree, at, self._account.name)

    def _pass_time(self, until: float) -> None:
        """Does the janitor's work meanwhile, if it is this one's."""
        while (left := until - time.monotonic()) > 0:
            busy = self._janitor is not None and self._janitor.step()
            if self._stop.wait(min(left, 0.01) if busy else left):
                return

    def _beat(self) -> None:
        self._beats += 1
        with self._tree.at(CONTROL, make=True) as at:
            self._join(at)
            # Only then: a janitor that did not see this member yet has made its lease before.
            entries = [*self._tree.entries(CONTROL)]
            names = [entry.name for entry in entries]
            leases = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
            generation = max(
                (int(found[1]) for name in leases if (found := _LEASE.fullmatch(name))), default=0
            )
            raw = read_note(at, _lease_name(generation))
            silent = self._watch.unchanged_s((generation, raw)) > LEASE_S
            if silent and generation >= _LAST_GENERATION:
                # None can follow it, so nobody made it: without it, the highest of the others counts.
                os.unlink(_lease_name(generation), dir_fd=at)
                return
            if not generation or silent:
                generation, raw = self._take_over(at, generation + 1), b""
            lease = lease_of(raw)
            self._account.hear(generation, lease.grants.get(self._account.name, 0))
            self._full = lease.full
            wants = time.monotonic() - self._wanted_at < IDLE_S
            self._say(at, self._account.report(self._beats, wants), f"{self._account.name}/report")
            if self._janitor is not None and self._janitor.generation != generation:
                self._janitor = None
            if self._janitor is not None:
                lease = self._janitor.beat(at, names, self._beats)
                self._say(at, lease, _lease_name(generation))

    def _join(self, at: int) -> None:
        """Makes this one's folder, under a new name if it was taken away."""
        if self._joined:
            try:
                os.stat(self._account.name, dir_fd=at, follow_symlinks=False)
                return
            except FileNotFoundError:
                _log.warning("%s: this daemon was silent for too long, and joins again", self._tree.folder)
                self._account = ByteGrants(_new_name(), True)
                self._janitor = None
        os.mkdir(self._account.name, 0o700, dir_fd=at)
        self._joined = True

    def _take_over(self, at: int, generation: int) -> int:
        """Makes this one janitor, unless another was first: a lease is made once."""
        try:
            os.close(os.open(_lease_name(generation), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=at))
        except FileExistsError:
            return generation
        _log.info("%s: this daemon keeps the limit now", self._tree.folder)
        self._janitor = CapacityManager(self._tree, self._limit_bytes, generation)
        return generation

    def _say(self, at: int, said: MemberFile | ManagerFile, name: str) -> None:
        """Writes a file as a whole, by way of this one's folder: without that, it may say nothing."""
        draft = f"{self._account.name}/draft"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=at)
        try:
            os.write(fd, to_note(said))
        finally:
            os.close(fd)
        os.rename(draft, name, src_dir_fd=at, dst_dir_fd=at)


def _new_name() -> str:
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def _lease_name(generation: int) -> str:
    return f"lease-{generation:012d}"
