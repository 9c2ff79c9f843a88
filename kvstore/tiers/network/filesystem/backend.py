"""Blocks in a folder of a parallel filesystem (Lustre, WEKA, GPFS, NFS) that many nodes mount.

```
FOLDER/kvstore-1/NAMESPACE/7f/KEY    a block: a page that begins with its header, whole pages of payload
                 nodes/HOST-PID-ID/  a daemon's temporary files and its report (`membership`)
                 nodes/lease-...     the lease of the daemon that keeps the limit (`capacity_manager`)
```
A block is written under a temporary name and then renamed, so no reader sees half of it. Files are not
synced: this is a cache, and a block that a power cut leaves torn fails its verification. A system call that
hangs blocks a thread of the pool and that thread's memory, never a caller or its slots (`call_pool`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from kvstore import arena, native
from kvstore.errors import ConfigError
from kvstore.tiers.network import objects
from kvstore.tiers.network.base import Backend, Listed, Name, NetworkError, Object, Outcome
from kvstore.tiers.network.filesystem.byte_grants import ByteGrants
from kvstore.tiers.network.filesystem.call_pool import Call, CallPool, ScratchBuffer
from kvstore.tiers.network.filesystem.membership import Membership
from kvstore.tiers.network.filesystem.safe_paths import CONTROL, SafePaths, blocks, is_file, refused
from kvstore.types import ALIGN, slot_bytes

if TYPE_CHECKING:
    from kvstore.tiers.network import BackendSettings

HEAD_BYTES = ALIGN
"""Bytes before the payload in a file. One page, so that direct I/O can read both."""

TOUCH_AFTER_S = 3600.0
"""A use of a block renews the file's time if it is older. Eviction uses this time."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_HINTS = {
    errno.ENOSPC: "free space there, or set network.limit",
    errno.EDQUOT: "the quota is used up: raise it, or set network.limit",
    errno.EROFS: "the folder is mounted read-only: its blocks are still read",
    errno.EACCES: "let the daemon's user write there",
    errno.EPERM: "let the daemon's user write there",
    errno.ESTALE: "the mount is stale: mount the folder again",
}
_FOREIGN = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}

R = TypeVar("R")


def open_url(settings: BackendSettings) -> Filesystem:
    """Returns the backend of a URL such as file:///mnt/lustre/kvstore. Raises ConfigError for others."""
    url = urlsplit(settings.url)
    folder = Path(unquote(url.path))
    if url.netloc not in ("", "localhost") or not folder.is_absolute() or folder == Path("/"):
        hint = "write three slashes: file:///mnt/lustre/kvstore"
        raise ConfigError(f"network.url: {settings.url!r:.120} names no folder", hint)
    return Filesystem(folder, settings.limit_bytes, settings.threads)


class Filesystem(Backend):
    """Blocks as files. All daemons of a folder must have the same `limit_bytes` (0: no limit)."""

    kind = "filesystem"

    def __init__(self, folder: Path, limit_bytes: int = 0, threads: int = 8) -> None:
        """Starts the threads. Does not access the folder yet."""
        self._paths = SafePaths(folder)
        self._direct = True
        self._pool = CallPool("kvstore-files", threads)
        self._membership = Membership(self._paths, limit_bytes)
        self._temporary_numbers = itertools.count()

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        return self._pool.run([partial(self._probe, name) for name in names], ends, Outcome.FAILED)

    def read(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        return self._pool.run([partial(self._read, thing) for thing in objects], ends, Outcome.FAILED)

    def write(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        """Keeps an existing file of the right size."""
        self._membership.ready(ends)
        return self._pool.run([partial(self._write, thing) for thing in objects], ends, Outcome.FAILED)

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        return self._pool.run([partial(self._delete, name) for name in names], ends, Outcome.FAILED)

    def list(self, namespace: bytes | None, ends: float) -> Iterator[Listed]:
        now = self._call(self._paths.now, ends)
        tops = [objects.folder(namespace)] if namespace else self._folders(objects.ROOT, ends)
        for top in tops:
            for folder in self._folders(top, ends):
                for name, found in self._call(partial(self._blocks, folder), ends):
                    yield Listed(name, found.st_size, now - found.st_mtime)

    def health(self, ends: float) -> None:
        self._call(self._check, ends)

    def close(self) -> None:
        self._membership.close()
        self._pool.close()

    # -- one object, on a thread of the pool

    def _probe(self, name: Name, call: Call[Outcome], scratch: ScratchBuffer) -> Outcome:
        try:
            with self._paths.parent(name) as (at, file):
                found = os.stat(file, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            return Outcome.MISSING
        except OSError as error:
            return Outcome.MISSING if error.errno in _FOREIGN else Outcome.FAILED
        return Outcome.OK if is_file(found) else Outcome.MISSING

    def _read(self, thing: Object, call: Call[Outcome], scratch: ScratchBuffer) -> Outcome:
        raw = scratch.take(HEAD_BYTES + slot_bytes(thing.length))
        try:
            if not self._with_direct_io(partial(self._load, thing.name, raw)):
                return Outcome.TORN
        except FileNotFoundError:
            return Outcome.MISSING
        except OSError as error:
            return Outcome.TORN if error.errno in _FOREIGN else Outcome.FAILED
        got = Object(thing.name, thing.length, raw[HEAD_BYTES:], fingerprint=thing.fingerprint)
        outcome = objects.settle(got, raw[: objects.HEADER_BYTES])
        if outcome is Outcome.OK:
            with call.touching():
                arena.copy(thing.memory[: thing.length], got.memory[: thing.length])
                thing.checksum, thing.parent = got.checksum, got.parent
        return outcome

    def _write(self, thing: Object, call: Call[Outcome], scratch: ScratchBuffer) -> Outcome:
        raw = scratch.take(HEAD_BYTES + slot_bytes(thing.length))
        try:
            if self._is_there(thing.name, len(raw)):
                return Outcome.OK
        except OSError:
            return Outcome.FAILED
        grants = self._membership.take(len(raw))
        if grants is None:
            return Outcome.FULL
        try:
            with call.touching():
                _pack(thing, raw)
            self._with_direct_io(partial(self._store, thing.name, raw, grants, call))
        except OSError as error:
            return Outcome.FULL if error.errno in _FULL else Outcome.FAILED
        finally:
            grants.settle(len(raw))
        return Outcome.OK

    def _delete(self, name: Name, call: Call[Outcome], scratch: ScratchBuffer) -> Outcome:
        try:
            self._paths.unlink(name)
        except OSError:
            return Outcome.FAILED
        return Outcome.OK

    # -- files

    def _load(self, name: Name, raw: memoryview) -> bool:
        """Reads a file into memory. Returns False if it is not a regular file of this size."""
        with self._paths.parent(name) as (at, file):
            fd = self._open(file, os.O_RDONLY | os.O_NONBLOCK, at)  # opening a FIFO would wait for a writer
            try:
                found = os.fstat(fd)
                if not is_file(found) or found.st_size != len(raw):
                    return False
                _move(fd, raw, write=False)
                self._touch(fd, found)
            finally:
                os.close(fd)
        return True

    def _store(self, name: Name, raw: memoryview, grants: ByteGrants, call: Call[Outcome]) -> None:
        """Writes a file under a temporary name and renames it."""
        temporary = str(next(self._temporary_numbers))
        with self._paths.at(grants.folder, make=not grants.counted) as here:
            try:
                fd = self._open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, here)
                try:
                    _move(fd, raw, write=True)
                finally:
                    os.close(fd)  # NFS reports a full disk only now
                call.check()
                with self._paths.parent(name, make=True) as (there, file):
                    os.rename(temporary, file, src_dir_fd=here, dst_dir_fd=there)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=here)
                raise

    def _is_there(self, name: Name, nbytes: int) -> bool:
        """Returns whether a block has a file of this size. This counts as a use of the block."""
        with contextlib.suppress(FileNotFoundError), self._paths.parent(name) as (at, file):
            found = os.stat(file, dir_fd=at, follow_symlinks=False)
            if is_file(found) and found.st_size == nbytes:
                self._touch(file, found, at)
                return True
        return False

    def _touch(self, file: int | str, found: os.stat_result, at: int | None = None) -> None:
        if self._paths.now() - found.st_mtime > TOUCH_AFTER_S:
            # The filesystem may be read-only, or the file deleted.
            with contextlib.suppress(OSError):
                os.utime(file, dir_fd=at)

    def _with_direct_io(self, work: Callable[[], R]) -> R:
        """Runs work with direct I/O, and without it on filesystems that refuse it."""
        direct = self._direct
        try:
            return work()
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
        self._direct = False
        return work()

    def _open(self, file: str, flags: int, at: int) -> int:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
        return os.open(file, flags, 0o600, dir_fd=at)

    # -- the folder

    def _check(self) -> bool:
        name = f"health-{self._membership.id}"
        with self._paths.at(CONTROL, make=True) as at:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=at)
            try:
                said = str(time.time()).encode()
                os.pwrite(fd, said, 0)
                if os.pread(fd, len(said) + 1, 0) != said:
                    raise OSError(errno.EIO, "the bytes read differ from the bytes written")
            finally:
                os.close(fd)
                os.unlink(name, dir_fd=at)
        return True

    def _blocks(self, folder: str) -> Sequence[tuple[Name, os.stat_result]]:
        return [*blocks(self._paths, folder)]

    def _folders(self, path: str, ends: float) -> Iterator[str]:
        yield from self._call(lambda: [f"{path}/{entry.name}" for entry in self._paths.entries(path)], ends)

    def _call(self, what: Callable[[], R], ends: float) -> R:
        """Runs a function on a thread of the pool. Raises NetworkError if it fails or is late."""

        def job(call: Call[R | None], scratch: ScratchBuffer) -> R:
            try:
                return what()
            except OSError as error:
                hint = _HINTS.get(error.errno or 0, "see this node's kernel log")
                raise refused(f"{self._paths.folder} cannot be used", error, hint) from None

        [answer] = self._pool.run([job], ends, None)
        if answer is None:
            raise NetworkError(f"{self._paths.folder} did not answer in time", "is its server reachable?")
        return answer


def _pack(thing: Object, raw: memoryview) -> None:
    """Fills `raw` with a file's bytes. Padding is zeroed: a thread's memory has bytes of other blocks."""
    end = HEAD_BYTES + thing.length
    raw[: objects.HEADER_BYTES] = objects.header(thing)
    raw[objects.HEADER_BYTES : HEAD_BYTES] = bytes(HEAD_BYTES - objects.HEADER_BYTES)
    arena.copy(raw[HEAD_BYTES:end], thing.memory[: thing.length])
    raw[end:] = bytes(len(raw) - end)


def _move(fd: int, raw: memoryview, write: bool) -> None:
    """Reads or writes the bytes at the start of a file. Raises OSError."""
    [error] = native.move_files([(fd, 0, raw, write)])
    if error:
        # A file that is shorter than it was has no error of its own.
        error = errno.EIO if error == native.END_OF_FILE else error
        raise OSError(error, os.strerror(error))
