"""Membership of a daemon in a shared folder: reports, grants, and election of the capacity manager.

Each member has a folder for its temporary files and its report. A member that is silent for `LEASE_S` loses
its folder. Its temporary files are gone then, so none of its writes can still be renamed into place, even if
the daemon was only suspended. Such a daemon joins again under another name. A member is silent if its report
does not change while the observer's clock advances. Clocks of hosts are never compared.
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
    encode,
    parse_lease,
)
from kvstore.tiers.network.filesystem.capacity_manager import (
    LEASE_S,
    CapacityManager,
    StallTimer,
    read_small,
    remove_member,
    sweep,
)
from kvstore.tiers.network.filesystem.safe_paths import CONTROL, SafePaths

_log = logging.getLogger(__name__)

BEAT_S = 1.0
IDLE_S = 10.0
"""A member that has written nothing for this time gives back its grants."""

SWEEP_EVERY_S = 3600.0
_READY_BEATS = 3
_LEASE = re.compile(r"lease-(\d{12})")
_LAST_GENERATION = 10**12 - 1


class Membership:
    """This daemon's membership. Without a limit it only removes leftovers of crashed daemons."""

    def __init__(self, paths: SafePaths, limit_bytes: int) -> None:
        """Starts its thread."""
        self.id = _new_name()
        self._paths = paths
        self._limit_bytes = limit_bytes
        self._grants = ByteGrants(self.id, bool(limit_bytes))
        self._joined = False
        self._manager: CapacityManager | None = None
        self._lease_stall = StallTimer()
        self._beats = 0
        self._full = False
        self._wanted_at = time.monotonic()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvstore-member", daemon=True)
        self._thread.start()

    def ready(self, ends: float) -> None:
        """Waits until there is a grant or the folder is known to be full, three beats (3 s) at most."""
        if not self._limit_bytes:
            return
        with self._changed:
            now = self._wanted_at = time.monotonic()
            self._changed.wait_for(
                lambda: self._grants.left or self._full or self._stop.is_set(),
                min(ends - now, _READY_BEATS * BEAT_S),
            )

    def take(self, nbytes: int) -> ByteGrants | None:
        """Takes bytes for a write. Returns the grants to settle, None if the write is not allowed now."""
        grants = self._grants
        return grants if grants.take(nbytes) else None

    def close(self) -> None:
        """Ends the membership, within 1 s. Writes under way fail, because their temporary files are gone."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(1.0)

    def _work(self) -> None:
        swept_at = -SWEEP_EVERY_S
        last_error = ""
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                if began - swept_at >= SWEEP_EVERY_S:
                    swept_at = began
                    sweep(self._paths)
                if self._limit_bytes:
                    self._beat()
                last_error = ""
            except (OSError, NetworkError) as error:
                if str(error) != last_error:
                    last_error = str(error)
                    _log.warning("%s: %s", self._paths.folder, last_error)
            except Exception:
                _log.exception("the membership in %s failed", self._paths.folder)
            with self._changed:
                self._changed.notify_all()
            self._manage_until(began + BEAT_S)
        with contextlib.suppress(OSError, NetworkError), self._paths.at(CONTROL) as at:
            remove_member(self._paths, at, self._grants.name)

    def _manage_until(self, until: float) -> None:
        """Waits until a time. Does the manager's work meanwhile if this daemon is the manager."""
        while (left := until - time.monotonic()) > 0:
            busy = self._manager is not None and self._manager.step()
            if self._stop.wait(min(left, 0.01) if busy else left):
                return

    def _beat(self) -> None:
        self._beats += 1
        with self._paths.at(CONTROL, make=True) as at:
            self._join(at)
            # Read the leases after joining: a manager that has not seen this member made its lease before.
            entries = [*self._paths.entries(CONTROL)]
            names = [entry.name for entry in entries]
            leases = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
            generation = max(
                (int(found[1]) for name in leases if (found := _LEASE.fullmatch(name))), default=0
            )
            raw = read_small(at, _lease_name(generation))
            silent = self._lease_stall.unchanged_s((generation, raw)) > LEASE_S
            if silent and generation >= _LAST_GENERATION:
                # No lease can follow this one, so no daemon made it. Without it the next highest is valid.
                os.unlink(_lease_name(generation), dir_fd=at)
                return
            if not generation or silent:
                generation, raw = self._take_over(at, generation + 1), b""
            lease = parse_lease(raw)
            self._grants.update(generation, lease.grants.get(self._grants.name, 0))
            self._full = lease.full
            wants = time.monotonic() - self._wanted_at < IDLE_S
            self._write_file(at, self._grants.report(self._beats, wants), f"{self._grants.name}/report")
            if self._manager is not None and self._manager.generation != generation:
                self._manager = None
            if self._manager is not None:
                lease = self._manager.beat(at, names, self._beats)
                self._write_file(at, lease, _lease_name(generation))

    def _join(self, at: int) -> None:
        """Makes this member's folder, under a new name if the folder was removed."""
        if self._joined:
            try:
                os.stat(self._grants.name, dir_fd=at, follow_symlinks=False)
                return
            except FileNotFoundError:
                _log.warning("%s: this daemon was silent for too long and joins again", self._paths.folder)
                self._grants = ByteGrants(_new_name(), True)
                self._manager = None
        os.mkdir(self._grants.name, 0o700, dir_fd=at)
        self._joined = True

    def _take_over(self, at: int, generation: int) -> int:
        """Makes this daemon the manager, unless another daemon creates the lease file first."""
        try:
            os.close(os.open(_lease_name(generation), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=at))
        except FileExistsError:
            return generation
        _log.info("%s: this daemon is the capacity manager now", self._paths.folder)
        self._manager = CapacityManager(self._paths, self._limit_bytes, generation)
        return generation

    def _write_file(self, at: int, content: MemberFile | ManagerFile, name: str) -> None:
        """Writes a file atomically. A member whose folder was removed cannot write any."""
        draft = f"{self._grants.name}/draft"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=at)
        try:
            os.write(fd, encode(content))
        finally:
            os.close(fd)
        os.rename(draft, name, src_dir_fd=at, dst_dir_fd=at)


def _new_name() -> str:
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def _lease_name(generation: int) -> str:
    return f"lease-{generation:012d}"
