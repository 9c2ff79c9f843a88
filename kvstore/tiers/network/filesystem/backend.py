"""Blocks in a folder of a parallel filesystem (Lustre, WEKA, GPFS, NFS) that many nodes mount.

```
FOLDER/kvstore-1/NAMESPACE/7f/KEY    a block: a page that begins with its header, whole pages of payload
                 nodes/HOST-PID-ID/  a daemon's temporaries and report (`member`)
                 nodes/lease-...     who keeps the folder under its limit (`janitor`)
```
A block is written under another name and renamed, so nobody sees half of one. Nothing is synced to disks:
this is a cache, and what a power cut leaves torn does not verify. System calls that hang hold threads of the
pool and memory of its own, never a caller or its slots (`pool`).
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
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from kvstore import arena
from kvstore.errors import ConfigError, TierError
from kvstore.tiers.base import BlockIO
from kvstore.tiers.network import objects
from kvstore.tiers.network.base import Listed, Name, NetworkError, Object, Outcome
from kvstore.tiers.network.filesystem.byte_grants import ByteGrants
from kvstore.tiers.network.filesystem.call_pool import Call, CallPool, ScratchBuffer
from kvstore.tiers.network.filesystem.membership import Membership
from kvstore.tiers.network.filesystem.safe_paths import CONTROL, SafePaths, blocks, is_file, refused
from kvstore.tiers.nvme.engines import best_engine
from kvstore.types import ALIGN, slot_bytes

if TYPE_CHECKING:
    from kvstore.tiers.network import BackendSettings

HEAD_BYTES = ALIGN
"""What a file has before its payload, so that direct I/O reaches both."""

TOUCH_AFTER_S = 3600.0
"""A block that is used gets a new time if its last one is older: who deletes goes by that."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_HINTS = {
    errno.ENOSPC: "make room there, or set network.limit",
    errno.EDQUOT: "its quota is used up: raise it, or set network.limit",
    errno.EROFS: "it is mounted read-only; blocks that are there are read all the same",
    errno.EACCES: "let the daemon's user write there",
    errno.EPERM: "let the daemon's user write there",
    errno.ESTALE: "its server has forgotten the folder: mount it again",
}
_FOREIGN = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}

R = TypeVar("R")


def open_url(settings: BackendSettings) -> Filesystem:
    """The folder of a URL such as file:///mnt/lustre/kvstore. ConfigError if it names none."""
    url = urlsplit(settings.url)
    folder = Path(unquote(url.path))
    if url.netloc not in ("", "localhost") or not folder.is_absolute() or folder == Path("/"):
        raise ConfigError(
            f"network.url: {settings.url!r:.120} names no folder", "three slashes: file:///mnt/lustre/kvstore"
        )
    return Filesystem(folder, settings.limit_bytes, settings.threads)


class Filesystem:
    """A `Backend` of files. With `limit_bytes`, all daemons of a folder are to be given the same."""

    kind = "filesystem"

    def __init__(self, folder: Path, limit_bytes: int = 0, threads: int = 8) -> None:
        """Starts the threads; looks at nothing yet."""
        self._tree = SafePaths(folder)
        self._direct = True
        self._engine = best_engine(threads)
        self._pool = CallPool("kvstore-files", threads)
        self._member = Membership(self._tree, limit_bytes)
        self._numbers = itertools.count()

    def probe(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """See `Backend.probe`."""
        return self._pool.run([partial(self._probe, name) for name in names], ends, Outcome.FAILED)

    def read(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        """See `Backend.read`."""
        return self._pool.run([partial(self._read, thing) for thing in objects], ends, Outcome.FAILED)

    def write(self, objects: Sequence[Object], ends: float) -> list[Outcome]:
        """See `Backend.write`. One that is there already, with the right size, stays."""
        self._member.ready(ends)
        return self._pool.run([partial(self._write, thing) for thing in objects], ends, Outcome.FAILED)

    def delete(self, names: Sequence[Name], ends: float) -> list[Outcome]:
        """See `Backend.delete`."""
        return self._pool.run([partial(self._delete, name) for name in names], ends, Outcome.FAILED)

    def list(self, namespace: bytes | None, ends: float) -> Iterator[Listed]:
        """See `Backend.list`. NetworkError if the time is up before its end."""
        now = self._ask(self._tree.now, ends)
        for space in [objects.folder(namespace)] if namespace else self._folders(objects.ROOT, ends):
            for folder in self._folders(space, ends):
                for name, found in self._ask(partial(self._blocks, folder), ends):
                    yield Listed(name, found.st_size, now - found.st_mtime)

    def health(self, ends: float) -> None:
        """See `Backend.health`."""
        self._ask(self._check, ends)

    def close(self) -> None:
        """See `Backend.close`."""
        self._member.close()
        self._pool.close()
        # It waits for what is under way, which may hang.
        Thread(target=self._engine.close, name="kvstore-files-close", daemon=True).start()

    # -- one object, on a thread of the pool

    def _probe(self, name: Name, call: Call[Outcome], room: ScratchBuffer) -> Outcome:
        folder, file = os.path.split(objects.path(name))
        try:
            with self._tree.at(folder) as at:
                found = os.stat(file, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            return Outcome.MISSING
        except OSError as error:
            return Outcome.MISSING if error.errno in _FOREIGN else Outcome.FAILED
        return Outcome.OK if is_file(found) else Outcome.MISSING

    def _read(self, thing: Object, call: Call[Outcome], room: ScratchBuffer) -> Outcome:
        raw = room.take(HEAD_BYTES + slot_bytes(thing.length))
        try:
            if not self._directly(partial(self._load, thing.name, raw)):
                return Outcome.TORN
        except FileNotFoundError:
            return Outcome.MISSING
        except OSError as error:
            return Outcome.TORN if error.errno in _FOREIGN else Outcome.FAILED
        got = Object(thing.name, thing.length, raw[HEAD_BYTES:])
        outcome = objects.settle(got, raw[: objects.HEADER_BYTES])
        if outcome is Outcome.OK:
            with call.touching():
                arena.copy(thing.memory[: thing.length], got.memory[: thing.length])
                thing.checksum, thing.parent = got.checksum, got.parent
        return outcome

    def _write(self, thing: Object, call: Call[Outcome], room: ScratchBuffer) -> Outcome:
        raw = room.take(HEAD_BYTES + slot_bytes(thing.length))
        try:
            if self._is_there(thing.name, len(raw)):
                return Outcome.OK
        except OSError:
            return Outcome.FAILED
        account = self._member.take(len(raw))
        if account is None:
            return Outcome.FULL
        try:
            with call.touching():
                _pack(thing, raw)
            self._directly(partial(self._store, thing.name, raw, account, call))
        except OSError as error:
            return Outcome.FULL if error.errno in _FULL else Outcome.FAILED
        finally:
            account.settle(len(raw))
        return Outcome.OK

    def _delete(self, name: Name, call: Call[Outcome], room: ScratchBuffer) -> Outcome:
        folder, file = os.path.split(objects.path(name))
        try:
            with self._tree.at(folder) as at:
                os.unlink(file, dir_fd=at)
        except FileNotFoundError:
            return Outcome.OK
        except OSError:
            return Outcome.FAILED
        return Outcome.OK

    # -- files

    def _load(self, name: Name, raw: memoryview) -> bool:
        """Fills memory with a file of that size; False if there is something else."""
        folder, file = os.path.split(objects.path(name))
        with self._tree.at(folder) as at:
            fd = self._open(file, os.O_RDONLY | os.O_NONBLOCK, at)  # of a FIFO, opening waits for a writer
            try:
                found = os.fstat(fd)
                if not is_file(found) or found.st_size != len(raw):
                    return False
                self._move(BlockIO(fd, 0, raw, write=False))
                self._touch(fd, found)
            finally:
                self._close(fd)
        return True

    def _store(self, name: Name, raw: memoryview, account: ByteGrants, call: Call[Outcome]) -> None:
        """Writes a file under a temporary name, and has it there under its own as a whole."""
        folder, file = os.path.split(objects.path(name))
        temporary = str(next(self._numbers))
        with self._tree.at(account.folder, make=not account.counted) as here:
            try:
                fd = self._open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, here)
                try:
                    self._move(BlockIO(fd, 0, raw, write=True))
                finally:
                    self._close(fd)  # NFS tells only now of a full disk
                call.check()
                with self._tree.at(folder, make=True) as there:
                    os.rename(temporary, file, src_dir_fd=here, dst_dir_fd=there)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=here)
                raise

    def _is_there(self, name: Name, nbytes: int) -> bool:
        """Whether a file of that size is under a name; that counts as a use of it."""
        folder, file = os.path.split(objects.path(name))
        try:
            with self._tree.at(folder) as at:
                found = os.stat(file, dir_fd=at, follow_symlinks=False)
                if is_file(found) and found.st_size == nbytes:
                    self._touch(file, found, at)
                    return True
        except FileNotFoundError:
            pass
        return False

    def _touch(self, file: int | str, found: os.stat_result, at: int | None = None) -> None:
        if self._tree.now() - found.st_mtime > TOUCH_AFTER_S:
            # Of a file system that is read only, or a file that is gone by now.
            with contextlib.suppress(OSError):
                os.utime(file, dir_fd=at)

    def _directly(self, work: Callable[[], R]) -> R:
        """Does something with direct I/O, or without where the file system refuses that."""
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

    def _move(self, io: BlockIO) -> None:
        done: SimpleQueue[list[OSError | None]] = SimpleQueue()
        try:
            self._engine.submit([io], done.put, urgent=not io.write)
        except TierError as closed:
            raise OSError(errno.ESHUTDOWN, str(closed)) from None
        [error] = done.get()
        if error is not None:
            raise error

    def _close(self, fd: int) -> None:
        self._engine.release(fd)
        os.close(fd)

    # -- the folder

    def _check(self) -> bool:
        name = f"health-{self._member.id}"
        with self._tree.at(CONTROL, make=True) as at:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=at)
            try:
                said = str(time.time()).encode()
                os.pwrite(fd, said, 0)
                if os.pread(fd, len(said) + 1, 0) != said:
                    raise OSError(errno.EIO, "what was written is not what was read")
            finally:
                os.close(fd)
                os.unlink(name, dir_fd=at)
        return True

    def _blocks(self, folder: str) -> Sequence[tuple[Name, os.stat_result]]:
        return [*blocks(self._tree, folder)]

    def _folders(self, path: str, ends: float) -> Iterator[str]:
        yield from self._ask(lambda: [f"{path}/{entry.name}" for entry in self._tree.entries(path)], ends)

    def _ask(self, what: Callable[[], R], ends: float) -> R:
        """What a call answers on a thread of the pool. NetworkError if it does not in time, or fails."""

        def job(call: Call[R | None], room: ScratchBuffer) -> R:
            try:
                return what()
            except OSError as error:
                hint = _HINTS.get(error.errno or 0, "see what this node's kernel logged")
                raise refused(f"{self._tree.folder} can't be used", error, hint) from None

        [answer] = self._pool.run([job], ends, None)
        if answer is None:
            raise NetworkError(f"{self._tree.folder} did not answer in time", "is its server away?")
        return answer


def _pack(thing: Object, raw: memoryview) -> None:
    """A file's bytes. What pads them is zeros: a thread's memory has other blocks' bytes."""
    end = HEAD_BYTES + thing.length
    raw[: objects.HEADER_BYTES] = objects.header(thing)
    raw[objects.HEADER_BYTES : HEAD_BYTES] = bytes(HEAD_BYTES - objects.HEADER_BYTES)
    arena.copy(raw[HEAD_BYTES:end], thing.memory[: thing.length])
    raw[end:] = bytes(len(raw) - end)
