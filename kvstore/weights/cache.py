"""Remembers digests of files between processes of a user: a small file in the user's cache folder.

A wrong digest would be wrong KV. The file is believed only if this user owns it and its folder, nobody else
may write them, and its checksum is right. Without a usable folder nothing is remembered, which costs time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from blake3 import blake3

from kvstore.weights.files import FileState

MOST_FILES = 4096
_FORMAT = b"kvstore-weights-1"
_MOST_BYTES = MOST_FILES * 200
_OTHERS_WRITE = 0o022

_POLL_S = 0.05
_REPORT_S = 10.0
_PATIENCE_S = 600.0
_WRITING = 0
"""The byte of the lock file that is locked while the cache is written. Work has the others."""


def cache_folder() -> Path | None:
    """Returns `kvstore/weights` in the user's cache folder; None if the user has none."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = given if given.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "kvstore" / "weights"


class DigestCache:
    """The digests of files by their states. Use it as a context, whose end gives locks back.

    Safe for concurrent processes; threads of one process may do the same work twice.
    """

    def __init__(self, folder: Path | None, logger: logging.Logger) -> None:
        self._folder = folder
        self._logger = logger
        self._locks = -1

    def __enter__(self) -> DigestCache:
        if self._folder is not None:
            try:
                self._locks = self._opened(self._folder)
            except OSError as error:
                self._logger.debug("remembers no digests in %s: %s", self._folder, error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._locks >= 0:
            os.close(self._locks)
            self._locks = -1

    def read(self) -> dict[FileState, bytes]:
        """Returns what is remembered, the oldest first; nothing if the file is not trusted."""
        if self._folder is None or self._locks < 0:
            return {}
        try:
            descriptor = os.open(self._folder / "digests", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not _is_ours(os.fstat(descriptor), stat.S_IFREG):
                    self._logger.warning("%s is ignored: other users may write it", file.name)
                    return {}
                return _parsed(file.read(_MOST_BYTES))
        except OSError:
            return {}

    def lock(self, work: bytes) -> None:
        """Waits until no other process does the work of this name, at most 10 minutes."""
        byte = 1 + int.from_bytes(blake3(work).digest(7), "little")
        began_s, report_s = time.monotonic(), _REPORT_S
        while self._locks >= 0 and not self._try_lock(byte):
            waited_s = time.monotonic() - began_s
            if waited_s > _PATIENCE_S:
                return
            if waited_s > report_s:
                self._logger.info("has waited %.0f s for another process that digests weights", waited_s)
                report_s += _REPORT_S
            time.sleep(_POLL_S)

    def add(self, digests: Mapping[FileState, bytes]) -> None:
        """Remembers digests beside those of other processes. More than 4,096 are not kept: the oldest go."""
        if self._folder is None or self._locks < 0:
            return
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, _WRITING)
            kept = {state: digest for state, digest in self.read().items() if state not in digests}
            self._write(self._folder, kept | dict(digests))
        except OSError as error:
            self._logger.debug("remembers no digests in %s: %s", self._folder, error)

    def _write(self, folder: Path, digests: dict[FileState, bytes]) -> None:
        last = list(digests.items())[-MOST_FILES:]
        body = b"".join(b"%d %d %d %d %d " % state + digest.hex().encode() + b"\n" for state, digest in last)
        new = folder / "digests.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o600), "wb") as file:
            file.write(_head(body) + body)
        new.replace(folder / "digests")

    def _opened(self, folder: Path) -> int:
        """Returns a descriptor of the lock file. Raises OSError if the folder is not ours alone."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(folder.lstat(), stat.S_IFDIR):
            self._logger.warning("%s is ignored: other users may write it", folder)
            raise PermissionError(f"{folder} is not only this user's")
        return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def _try_lock(self, byte: int) -> bool:
        """Returns whether the lock is held, or cannot be had on this file system."""
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            pass
        return True


def _is_ours(status: os.stat_result, kind: int) -> bool:
    """Returns whether it is of this kind, this user owns it and no other user may write it."""
    ours = stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid()
    return ours and not status.st_mode & _OTHERS_WRITE


def _head(body: bytes) -> bytes:
    return _FORMAT + b" " + blake3(body).hexdigest().encode() + b"\n"


def _parsed(raw: bytes) -> dict[FileState, bytes]:
    """Returns the entries of a cache file; nothing if its format or checksum is wrong."""
    head, newline, body = raw.partition(b"\n")
    if head + newline != _head(body):
        return {}
    rows = (line.split() for line in body.splitlines())
    return {FileState(*map(int, row[:5])): bytes.fromhex(row[5].decode()) for row in rows}
