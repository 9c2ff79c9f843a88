"""The files that hold NVMe blocks: one slab file an extent, opened for direct I/O.

A file is `slabs/000012.slab` in the tier's folder and has its full size from the start, so that a block write
never meets a full disk. What is in a slot, the journal knows.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from kvstore.errors import TierError

_log = logging.getLogger(__name__)


class Slabs:
    """Slab files of one folder. An extent is removed only when none of its blocks is moving.

    `direct` says whether the file system takes direct I/O, as far as the files opened so far tell.
    """

    def __init__(
        self, folder: Path, extent_bytes: int, closes: Callable[[int], None] = lambda fd: None
    ) -> None:
        """Makes `folder`/slabs. TierError if that cannot be done. `closes` hears of descriptors before."""
        self._closes = closes
        self.folder = folder / "slabs"
        self.extent_bytes = extent_bytes
        self.direct = True
        self._fds: dict[int, int] = {}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TierError(
                f"cannot make {self.folder}: {error.strerror}", "name a writable folder"
            ) from error

    def allocate(self, extent: int) -> None:
        """Makes the extent's file in full size and opens it; what a crash left there is taken over.

        TierError names folder, wanted and free bytes if there is no room; then no file is left behind.
        """
        assert extent not in self._fds, f"extent {extent} is in use"
        path = self._path(extent)
        try:
            fd = _open_file(path, os.O_CREAT)
            try:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, self.extent_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            self._sync_folder()
            self._fds[extent] = self._open(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise self._no_room(error) from error

    def open_existing(self, extent: int) -> int:
        """Opens a file that `allocate` made earlier, and answers how many bytes of it are left.

        One that was cut short gets its full size again. TierError if it is missing, or has no room for that.
        """
        path = self._path(extent)
        try:
            fd = self._open(path)
        except OSError as error:
            raise TierError(f"cannot open {path}: {error.strerror}") from error
        nbytes = min(os.fstat(fd).st_size, self.extent_bytes)
        try:
            if nbytes < self.extent_bytes:
                _log.error("%s has %d bytes instead of %d", path, nbytes, self.extent_bytes)
                os.posix_fallocate(fd, 0, self.extent_bytes)
                os.fsync(fd)
        except OSError as error:
            os.close(fd)
            raise self._no_room(error) from error
        self._fds[extent] = fd
        return nbytes

    def fd(self, extent: int) -> int:
        """The open descriptor of an extent, for reads and writes."""
        return self._fds[extent]

    def stored(self) -> list[int]:
        """Every extent that has a file, open or not. One that the journal does not know is a leftover."""
        return sorted(int(path.stem) for path in self.folder.glob("*.slab") if path.stem.isdecimal())

    def free_bytes(self) -> int:
        """What the file system has free for this user."""
        space = os.statvfs(self.folder)
        return space.f_bavail * space.f_frsize

    def sync(self, extents: Iterable[int]) -> None:
        """Returns when all that was written to these extents is on the device. TierError if it may not be."""
        for extent in extents:
            try:
                os.fdatasync(self._fds[extent])
            except OSError as error:
                raise TierError(f"cannot sync {self._path(extent)}: {error.strerror}") from error

    def remove(self, extent: int) -> None:
        """Closes the extent's file, if open, and deletes it, if there. TierError if it cannot be deleted."""
        fd = self._fds.pop(extent, -1)
        if fd >= 0:
            self._closes(fd)
            os.close(fd)
        try:
            self._path(extent).unlink(missing_ok=True)
        except OSError as error:
            raise TierError(f"cannot remove {self._path(extent)}: {error.strerror}") from error

    def close(self) -> None:
        """Closes all files."""
        while self._fds:
            _, fd = self._fds.popitem()
            self._closes(fd)
            os.close(fd)

    def _path(self, extent: int) -> Path:
        return self.folder / f"{extent:06d}.slab"

    def _open(self, path: Path) -> int:
        if self.direct:
            try:
                return _open_file(path, os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        fd = _open_file(path)
        self.direct = False
        return fd

    def _sync_folder(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _no_room(self, error: OSError) -> TierError:
        what = f"cannot allocate {self.extent_bytes} bytes in {self.folder}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return TierError(f"{what}: {error.strerror}")
        hint = "give the tier less, or make room there"
        return TierError(f"{what}: {error.strerror}, {self.free_bytes()} bytes free", hint)


def _open_file(path: Path, flags: int = 0) -> int:
    """A regular file, opened to read and write. OSError if something else is there: a link, folder, FIFO."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EEXIST, f"{path} is no regular file")
    return fd
