"""Safe paths below a shared folder: no path leads out of the folder.

Paths are opened part by part without following symbolic links. Only the folder itself may be behind one. Each
call opens the folder again, so a filesystem that was away is used again when it is back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.tiers.network.base import Name, NetworkError
from kvstore.tiers.network.objects import ROOT, name_of
from kvstore.tiers.network.objects import path as object_path

CONTROL = f"{ROOT}/nodes"
"""The folder for all files but objects: temporary files, reports, leases."""

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CLOCK_HOLDS_S = 600.0


class SafePaths:
    """The folder of one URL. Any thread may call. Calls block as long as the filesystem does.

    They raise OSError, and NetworkError if the folder itself cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        """Does not access the folder yet."""
        self.folder = folder
        self._existed = False
        self._clock: tuple[float, float] | None = None  # offset to the monotonic clock (s), valid until

    @contextlib.contextmanager
    def at(self, path: str = "", make: bool = False) -> Iterator[int]:
        """Opens a descriptor of a folder below this one. `make` creates missing folders."""
        fd = self._open()
        try:
            for part in path.split("/") if path else ():
                below = _enter(fd, part, make)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def parent(self, name: Name, make: bool = False) -> Iterator[tuple[int, str]]:
        """Opens a descriptor of the folder of a block. Yields it and the name of the block's file."""
        folder, file = os.path.split(object_path(name))
        with self.at(folder, make) as at:
            yield at, file

    def unlink(self, name: Name) -> bool:
        """Deletes a block's file. Returns False if there is none."""
        try:
            with self.parent(name) as (at, file):
                os.unlink(file, dir_fd=at)
        except FileNotFoundError:
            return False
        return True

    def entries(self, path: str = "") -> Iterator[os.DirEntry[str]]:
        """Yields the entries of a folder in no order, none if there is no such folder."""
        with contextlib.ExitStack() as opened:
            try:
                fd = os.open(".", _LIST, dir_fd=opened.enter_context(self.at(path)))
            except (FileNotFoundError, NotADirectoryError):
                return
            opened.callback(os.close, fd)
            yield from opened.enter_context(os.scandir(fd))

    def now(self) -> float:
        """Returns the filesystem's Unix time (s), measured with a new file; this host's if that fails.

        Clocks of hosts may be hours apart. File times are therefore compared with this clock only.
        """
        if self._clock is None or time.monotonic() > self._clock[1]:
            try:
                beyond = self._measure()
            except OSError:
                beyond = time.time() - time.monotonic()
            self._clock = beyond, time.monotonic() + _CLOCK_HOLDS_S
        return time.monotonic() + self._clock[0]

    def _measure(self) -> float:
        name = f"clock-{secrets.token_hex(8)}"
        with self.at(CONTROL, make=True) as folder:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                return os.fstat(fd).st_mtime - time.monotonic()
            finally:
                os.close(fd)
                os.unlink(name, dir_fd=folder)

    def _open(self) -> int:
        existed = self._existed  # read first: another thread may create the folder meanwhile
        try:
            try:
                fd = os.open(self.folder, _FOLDER)
            except FileNotFoundError:
                # Never create it again: without the mount, blocks would fill this node's own disk.
                if existed:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)
                fd = os.open(self.folder, _FOLDER)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN):
                hint = f"is {self.folder if existed else self.folder.parent} mounted?"
                raise refused(f"there is no folder {self.folder}", error, hint) from None
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP):
                hint = "name a folder in which the daemon's user may write"
                raise refused(f"{self.folder} cannot be used", error, hint, fatal=True) from None
            raise
        self._existed = True
        return fd


def blocks(paths: SafePaths, folder: str) -> Iterator[tuple[Name, os.stat_result]]:
    """Yields the blocks in one of a namespace's 256 folders. Skips files with other names."""
    for entry in paths.entries(folder):
        name = name_of(f"{folder}/{entry.name}")
        if name is not None and entry.is_file(follow_symlinks=False):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield name, found


def refused(what: str, error: OSError, hint: str = "", fatal: bool = False) -> NetworkError:
    """Returns the NetworkError for an OSError of the folder as a whole, with the error's name."""
    name = errno.errorcode.get(error.errno or 0, "an error")
    return NetworkError(f"{what}: {name}, {error.strerror or error}", hint, fatal)


def is_file(found: os.stat_result) -> bool:
    """Returns whether this is a regular file: no link, folder or FIFO."""
    return stat.S_ISREG(found.st_mode)


def _enter(fd: int, name: str, make: bool) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=fd)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
