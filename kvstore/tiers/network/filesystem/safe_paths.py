"""A folder that many nodes mount, and the way to what is in it: no name leads out of it.

Paths are walked part by part, and a symbolic link is never followed. The folder itself may be behind one. It
is opened anew each time, so a file system that comes back is used again.
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

CONTROL = f"{ROOT}/nodes"
"""Where daemons have what is not an object: temporaries, reports, leases."""

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CLOCK_HOLDS_S = 600.0


class SafePaths:
    """The folder of one URL. Any thread may call; all calls take as long as the file system does.

    They raise OSError, and NetworkError if it is the folder itself that can't be reached.
    """

    def __init__(self, folder: Path) -> None:
        """Looks at nothing yet."""
        self.folder = folder
        self._seen = False
        self._clock: tuple[float, float] | None = None  # what it says beyond monotonic time, and until when

    @contextlib.contextmanager
    def at(self, path: str = "", make: bool = False) -> Iterator[int]:
        """A descriptor of a folder in here, for names below it. `make`: what lacks is made."""
        fd = self._open()
        try:
            for part in path.split("/") if path else ():
                below = _enter(fd, part, make)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def entries(self, path: str = "") -> Iterator[os.DirEntry[str]]:
        """What is in a folder in here, in no order; nothing if there is no such folder."""
        with contextlib.ExitStack() as opened:
            try:
                fd = os.open(".", _LIST, dir_fd=opened.enter_context(self.at(path)))
            except (FileNotFoundError, NotADirectoryError):
                return
            opened.callback(os.close, fd)
            yield from opened.enter_context(os.scandir(fd))

    def now(self) -> float:
        """The time (s since 1970) by the clock that the files' times are of; this host's if none can be made.

        Hosts' clocks may be hours apart, so theirs are never compared.
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
        seen = self._seen  # by then: another thread may be making it
        try:
            try:
                fd = os.open(self.folder, _FOLDER)
            except FileNotFoundError:
                # Only at first: under a mount that went away, blocks would fill this node's own disk.
                if seen:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)
                fd = os.open(self.folder, _FOLDER)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN):
                hint = f"is {self.folder if seen else self.folder.parent} mounted?"
                raise refused(f"no folder {self.folder}", error, hint) from None
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP):
                hint = "name a folder that the daemon's user may write"
                raise refused(f"can't use {self.folder}", error, hint, fatal=True) from None
            raise
        self._seen = True
        return fd


def blocks(tree: SafePaths, folder: str) -> Iterator[tuple[Name, os.stat_result]]:
    """The files in one of the 256 folders of a namespace that have names of blocks, and only these."""
    for entry in tree.entries(folder):
        name = name_of(f"{folder}/{entry.name}")
        if name is not None and entry.is_file(follow_symlinks=False):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield name, found


def refused(what: str, error: OSError, hint: str = "", fatal: bool = False) -> NetworkError:
    """What is said of a system that as a whole refuses, with the error's name."""
    name = errno.errorcode.get(error.errno or 0, "an error")
    return NetworkError(f"{what}: {name}, {error.strerror or error}", hint, fatal)


def is_file(found: os.stat_result) -> bool:
    """Whether that is a regular file: no link, folder, FIFO."""
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
