"""The files that hold NVMe blocks: one slab file an extent, opened for direct I/O.

A file is `slabs/000012.slab` in the tier's folder. It has its full size from the start, so block writes never
meet a full disk. Not covered here: the contents of slots, which the journal records.
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
    """Slab files of one folder. `direct`: all files opened so far allow direct I/O.

    An extent is removed only without I/O under way.
    """

    def __init__(
        self, folder: Path, extent_bytes: int, closes: Callable[[int], None] = lambda fd: None
    ) -> None:
        """Makes `folder`/slabs, or raises TierError. `closes` is called before a descriptor is closed."""
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
        """Makes the extent's file in full size and opens it. Reuses a file that a crash left.

        TierError names folder, wanted and free bytes if the disk is full. No file is left then.
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
            sync_folder(self.folder)
            self._fds[extent] = self._open(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise self._no_room(error) from error

    def open_existing(self, extent: int) -> int:
        """Opens a file that `allocate` made earlier, and returns its size. A short file is extended.

        TierError if it is missing or the disk is full.
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
        """Returns the descriptor of an extent, for reads and writes."""
        return self._fds[extent]

    def stored(self) -> list[int]:
        """Returns all extents with a file, open or not. Files without a record are leftovers."""
        return sorted(int(path.stem) for path in self.folder.glob("*.slab") if path.stem.isdecimal())

    def free_bytes(self) -> int:
        """Returns the bytes of the file system that are free for this user."""
        space = os.statvfs(self.folder)
        return space.f_bavail * space.f_frsize

    def sync(self, extents: Iterable[int]) -> None:
        """Returns when all writes to these extents are on the device. TierError if they may not be."""
        for extent in extents:
            try:
                os.fdatasync(self._fds[extent])
            except OSError as error:
                raise TierError(f"cannot sync {self._path(extent)}: {error.strerror}") from error

    def remove(self, extent: int) -> None:
        """Closes and deletes the extent's file, if any. TierError if it cannot be deleted."""
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

    def _no_room(self, error: OSError) -> TierError:
        what = f"cannot allocate {self.extent_bytes} bytes in {self.folder}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return TierError(f"{what}: {error.strerror}")
        hint = f"lower nvme.limit, or make room: df -h {self.folder}"
        why = error.strerror if error.errno == errno.EFBIG else "the disk is full"
        return TierError(f"{what}: {why}, {self.free_bytes()} bytes free", hint)


def sync_folder(folder: Path) -> None:
    """Makes names of files in a folder durable. OSError if that fails."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_file(path: Path, flags: int = 0) -> int:
    """Opens a regular file to read and write. OSError for a link, folder or FIFO."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EEXIST, f"{path} is no regular file")
    return fd
