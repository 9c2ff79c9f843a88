"""The LMDB environment of a tier's folder: locks it, reads it whole and changes it in transactions.

Tables, with ids as u32 big-endian and numbers as u64 little-endian. Older daemons refuse a namespace with
another column, and ignore unknown keys of `meta`:

    meta          "format", "extent_bytes" -> number; "generations" -> history (`generations.py`);
                  "epoch" fingerprint -> epoch of the namespaces with this fingerprint
    namespaces    id -> MessagePack [tenant, layout map, fingerprint, encrypted, readers, TTL (s)]
    extents       id -> slot bytes | name of the tenant in UTF-8
    slots         extent, number of a page -> records of its slots (`records.py`)

Not covered here: the order of writes (`journal.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import lmdb
import msgpack

from kvstore.errors import TierError
from kvstore.tiers.base import DEFAULT_TENANT
from kvstore.tiers.nvme import generations, old_records
from kvstore.tiers.nvme.generations import History
from kvstore.tiers.nvme.records import ID, Blocks, Damaged, SlotRecords, rewritten, unpack
from kvstore.tiers.nvme.slabs import sync_folder
from kvstore.types import ENCRYPTION_BYTES

_log = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 5
"""The format of everything in the tier's folder."""

_READ_FORMATS = (2, 3, 4, FORMAT)
"""Formats that a daemon reads. Formats 2 to 4 have a record for each key, see `old_records.py`.

Formats 2 and 3 have one generation, a number. Format 2 has one tenant and no names of tenants in extents.
"""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCK_FILE_BYTES = 8192  # of LMDB, for 126 readers
_DEATHS_AT = 20
"""The byte of the lock file, behind the process id, that counts daemons which died in a commit."""
_MOST_DEATHS = 2  # one may be a kill or a power cut
_DAMAGE = (
    struct.error, lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.PageFullError,
    lmdb.CursorFullError, lmdb.IncompatibleError, lmdb.BadDbiError,
)  # fmt: skip
"""Errors that say that records are damaged."""

GENERATIONS = b"generations"
_GENERATION_NUMBER = b"generation"
_EPOCH = b"epoch"
_EPOCH_BYTES = 16
NUMBER = struct.Struct("<Q")
TABLES = ("meta", "namespaces", "extents", "slots")
_OLD_TABLE = "blocks"
_COMMITTED_AT_ONCE = 1 << 16
_NEW = "records.new"

Items: TypeAlias = dict[bytes, bytes | None]
"""New values by key; None deletes the key."""


@dataclass(slots=True)
class Changes:
    """Changes of records: items by table, then records of slots in order."""

    tables: dict[str, Items] = field(default_factory=dict)
    slots: list[SlotRecords] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(self.tables.values()) or any(map(len, self.slots))


@dataclass(frozen=True, slots=True)
class Namespace:
    """The namespace of an id. `encrypted`: blocks are encrypted under the tenant's data key.

    `readers` are tenants that it is published to. Blocks expire `ttl_s` after the put (0: never). `epoch` is
    the epoch of its blocks (see `kvstore.daemon.network.epochs`; empty: unknown). It has a record of its own.
    """

    tenant: str
    layout: dict[str, Any]
    fingerprint: bytes
    encrypted: bool = False
    readers: tuple[str, ...] = ()
    ttl_s: float = 0.0
    epoch: bytes = b""

    def pack(self) -> bytes:
        """Returns the value of the record, without the epoch."""
        columns = [self.tenant, self.layout, self.fingerprint, self.encrypted, self.readers, self.ttl_s]
        packed: bytes = msgpack.packb(columns)
        return packed

    @property
    def stored_bytes(self) -> int:
        """The bytes of one block in a slab, before rounding up to a slot."""
        return int(self.layout["block_bytes"]) + ENCRYPTION_BYTES * self.encrypted


@dataclass(frozen=True, slots=True)
class Loaded:
    """All records of a folder. `extents` has the slot size of each extent, `owners` its tenant.

    `damaged` has what is no valid record of a block. `suspect`: daemons died while they changed records.
    """

    namespaces: dict[int, Namespace]
    extents: dict[int, int]
    owners: dict[int, str]
    blocks: Blocks
    damaged: Damaged
    suspect: bool = False


class RecordStore:
    """One folder's records. Any thread may call; calls exclude each other."""

    def __init__(self, folder: Path, extent_bytes: int | None, map_bytes: int) -> None:
        """Makes the folder if absent, locks it and opens `folder`/records.

        A new folder keeps `extent_bytes` as its extent size; the attribute has the folder's size,
        `history` the generations on record. `map_bytes` is address space, and grows. Records that LMDB
        cannot read are moved aside and reported in `problems`. With `extent_bytes` None nothing is made or
        moved, and the folder must have readable records. TierError names a folder in use, not writable or
        of another format.
        """
        self._folder = folder
        self._turn = threading.Lock()
        self._env: Any = None
        self.problems: list[str] = []
        with contextlib.ExitStack() as held:
            if extent_bytes is None and not _has_records(folder):
                raise TierError(
                    f"{folder} holds no records of a kvstore daemon", "name the folder of nvme.path"
                )
            self._lock_fd = _lock(folder)
            held.callback(os.close, self._lock_fd)
            digit = os.pread(self._lock_fd, 1, _DEATHS_AT)
            self._deaths = int(digit) if digit.isdigit() else 0
            if extent_bytes is not None:
                self._remove_unfinished()
            why = _damage(folder)
            if why and extent_bytes is None:
                hint = "the next daemon moves them aside and starts empty"
                raise TierError(f"the records in {folder} are corrupt: {why}", hint)
            if why:
                self._move_aside(why)
            held.callback(self._close_records)
            try:
                try:
                    self._begin(extent_bytes, map_bytes)
                except _DAMAGE as error:
                    if extent_bytes is None:
                        raise
                    self._close_records()
                    self._move_aside(f"{type(error).__name__}: {error}")
                    self._begin(extent_bytes, map_bytes)
            except (lmdb.Error, OSError, ValueError, struct.error) as error:
                raise _unusable(folder, error) from error
            self._held = held.pop_all()

    def load(self) -> Loaded:
        """Returns all records. Takes about 0.5 s a million records. TierError if LMDB fails."""
        tables = self._tables
        try:
            with self._turn, self._env.begin() as txn:
                namespaces, bad_namespaces = self._decoded(txn.cursor(tables["namespaces"]), _namespace)
                meta = tables["meta"]
                for number, each in namespaces.items():
                    found = txn.get(_EPOCH + each.fingerprint, db=meta)
                    if found is not None and len(found) == _EPOCH_BYTES:
                        namespaces[number] = replace(each, epoch=found)
                extents, bad_extents = self._decoded(txn.cursor(tables["extents"]), unpack_extent)
            # A million records are not copied to be decoded.
            with self._turn, self._env.begin(buffers=True) as txn:
                blocks, damaged = unpack(txn.cursor(tables["slots"]))
        except lmdb.Error as error:
            raise _unusable(self._folder, error) from error
        damaged.others = bad_namespaces + bad_extents
        sizes = {extent: size for extent, (size, _) in extents.items()}
        owners = {extent: owner for extent, (_, owner) in extents.items()}
        return Loaded(namespaces, sizes, owners, blocks, damaged, self._deaths >= _MOST_DEATHS)

    def _decoded(
        self, pairs: Iterable[tuple[bytes, bytes]], decode: Callable[[bytes], T]
    ) -> tuple[dict[int, T], list[bytes]]:
        """Returns a table by id, and the keys of invalid records. Their blocks are misses."""
        found, bad = {}, []
        for key, value in pairs:
            try:
                found[ID.unpack(key)[0]] = decode(value)
            except (struct.error, ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
                _log.error("%s: a record of %d bytes makes no sense: %s", self._folder, len(value), error)
                bad.append(key)
        return found, bad

    def renew(self, loaded: Loaded) -> None:
        """Replaces all records by those loaded, at once, also if it crashes. No other call may run.

        LMDB may crash when it changes a damaged page, in each daemon anew. Damaged records are a sign of
        that, and so are daemons that died in commits. If there is no room for a new file, the old one stays.
        """
        records, new = self._folder / "records", self._folder / _NEW
        meta = {b"extent_bytes": NUMBER.pack(self.extent_bytes), GENERATIONS: self._history().pack()}
        sizes, owners = loaded.extents, loaded.owners
        tables: dict[str, Items] = {
            "meta": {b"format": NUMBER.pack(FORMAT), **meta, **_epochs(loaded.namespaces.values())},
            "namespaces": {ID.pack(n): each.pack() for n, each in loaded.namespaces.items()},
            "extents": {ID.pack(n): pack_extent(size, owners[n]) for n, size in sizes.items()},
        }
        map_bytes = self._env.info()["map_size"]
        self._env.close()
        try:
            self._remove_unfinished()
            self._open(new, map_bytes)
            self.commit(Changes(tables))
            self._commit_in_parts(loaded.blocks.pack())
            self._env.close()
            (new / "data.mdb").replace(records / "data.mdb")
            sync_folder(records)
            self._deaths = 0
            self._note_deaths(0)
        except (lmdb.Error, OSError) as error:
            _log.error("%s: damaged records were not replaced: %s", self._folder, error)
        finally:
            self._env.close()
            self._remove_unfinished()
            self._open(records, map_bytes)

    def _note_deaths(self, deaths: int) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._lock_fd, b"%d" % min(deaths, 9), _DEATHS_AT)

    def _remove_unfinished(self) -> None:
        shutil.rmtree(self._folder / _NEW, ignore_errors=True)

    def _begin(self, extent_bytes: int | None, map_bytes: int) -> None:
        self._open(self._folder / "records", map_bytes)
        self.extent_bytes = self._sign(extent_bytes)
        self.history = self._history()

    def _close_records(self) -> None:
        if self._env is not None:
            self._env.close()

    def _open(self, path: Path, map_bytes: int) -> None:
        self._env = _open(path, map_bytes)
        self._tables = {name: self._env.open_db(name.encode()) for name in TABLES}

    def _commit_in_parts(self, records: SlotRecords) -> None:
        for first in range(0, len(records), _COMMITTED_AT_ONCE):
            part = slice(first, first + _COMMITTED_AT_ONCE)
            self.commit(Changes(slots=[SlotRecords(records.places[part], records.rows[part])]))

    def commit(self, changes: Changes) -> None:
        """Makes all changes durable in one transaction, or none. Raises errors of LMDB."""

        def change(txn: Any) -> None:
            for table, items in changes.tables.items():
                _apply(txn, self._tables[table], items)
            slots = self._tables["slots"]
            _apply(txn, slots, dict(rewritten(partial(txn.get, db=slots), changes.slots)))

        if changes:
            self._transact(change)

    def _transact(self, change: Callable[[Any], None]) -> None:
        """Commits one transaction. Repeats it with a larger map if the map is full."""
        while True:
            with self._turn:
                self._note_deaths(self._deaths + 1)
                try:
                    with self._env.begin(write=True) as txn:
                        change(txn)
                    return
                except lmdb.MapFullError:
                    self._env.set_mapsize(2 * self._env.info()["map_size"])
                finally:
                    self._note_deaths(self._deaths)

    def close(self) -> None:
        """Closes the environment, then unlocks the folder. A second call does nothing."""
        self._lock_fd = -1
        self._held.close()

    def _move_aside(self, why: str) -> None:
        aside = self._folder / time.strftime("records.corrupt-%Y%m%d-%H%M%S")
        try:
            (self._folder / "records").rename(aside)
        except OSError as error:
            raise _unusable(self._folder, error) from error
        self.problems.append(f"corrupt records ({why}) were moved to {aside}: the NVMe tier starts empty")

    def _sign(self, extent_bytes: int | None) -> int:
        """Records format and extent size in a new folder. Returns the folder's extent size."""
        with self._env.begin() as txn:
            found = txn.get(b"format", db=self._tables["meta"])
            signed = txn.get(b"extent_bytes", db=self._tables["meta"])
        if found is None or signed is None:
            if extent_bytes is None:
                raise TierError(f"the records in {self._folder} are unfinished", "start the daemon once")
            signature = {b"format": NUMBER.pack(FORMAT), b"extent_bytes": NUMBER.pack(extent_bytes)}
            self.commit(Changes({"meta": dict(signature)}))
            return extent_bytes
        if _number(found) not in _READ_FORMATS:
            raise TierError(
                f"{self._folder} holds format {_number(found)}, this daemon reads 2 to {FORMAT}",
                "run the version that wrote it, or move the folder away to start empty",
            )
        if _number(found) != FORMAT:
            if extent_bytes is None:
                raise TierError(
                    f"{self._folder} holds format {_number(found)}, not {FORMAT}",
                    "start the daemon once: it converts the records",
                )
            self._convert()
        return _number(signed)

    def _convert(self) -> None:
        """Converts a folder of an earlier format. Its records stay until the last commit, which signs it."""
        old = self._env.open_db(_OLD_TABLE.encode())
        self._transact(lambda txn: txn.drop(self._tables["slots"], delete=False))
        with self._env.begin() as txn:
            records, damaged = old_records.read(txn.cursor(old))
        if damaged:
            _log.error("%s: %d records are damaged: their blocks are lost", self._folder, damaged)
        self._commit_in_parts(records)
        meta = {b"format": NUMBER.pack(FORMAT), GENERATIONS: self._history().pack(), _GENERATION_NUMBER: None}

        def sign(txn: Any) -> None:
            _apply(txn, self._tables["meta"], meta)
            txn.drop(old, delete=False)  # deleting it would end the handle, also where the map is full

        self._transact(sign)
        _log.info("%s: %d records were converted to format %d", self._folder, len(records), FORMAT)

    def _history(self) -> History:
        """Returns the generations on record, of this format or an earlier one. ValueError if damaged."""
        with self._env.begin() as txn:
            found = txn.get(GENERATIONS, db=self._tables["meta"])
            number = txn.get(_GENERATION_NUMBER, db=self._tables["meta"])
        if found is not None:
            return generations.unpack(found)
        return generations.from_number(_number(number)) if number is not None else History()


def epoch_item(namespace: Namespace) -> Items:
    """Returns the record of a namespace's epoch, which is deleted where the epoch is unknown."""
    return {_EPOCH + namespace.fingerprint: namespace.epoch or None}


def _epochs(namespaces: Iterable[Namespace]) -> Items:
    return {key: value for each in namespaces if each.epoch for key, value in epoch_item(each).items()}


def pack_extent(slot_bytes: int, tenant: str) -> bytes:
    """Returns the value of an extent's record."""
    return NUMBER.pack(slot_bytes) + tenant.encode()


def unpack_extent(value: bytes) -> tuple[int, str]:
    """Returns slot bytes and tenant of an extent's record. struct.error or ValueError if invalid."""
    return int(NUMBER.unpack_from(value)[0]), value[NUMBER.size :].decode() or DEFAULT_TENANT


def _namespace(value: bytes) -> Namespace:
    namespace = Namespace(*msgpack.unpackb(value))
    if not isinstance(namespace.layout["block_bytes"], int) or len(namespace.fingerprint) != 16:
        raise ValueError("no layout, or no fingerprint")
    return replace(namespace, readers=tuple(namespace.readers))


def _number(value: bytes) -> int:
    return int(NUMBER.unpack(value)[0])


def _has_records(folder: Path) -> bool:
    try:
        found = (folder / "records" / "data.mdb").lstat()
        if not stat.S_ISREG(found.st_mode):
            raise TierError(
                f"{folder}/records/data.mdb is no regular file", "move it away, or name another folder"
            )
        return bool(found.st_size)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unusable(folder, error) from error


def _damage(folder: Path) -> str:
    """Returns why LMDB cannot read or write `folder`/records, empty if it can. TierError if unknown.

    Tries in a separate process, because LMDB may crash on a damaged page.
    """
    if not _has_records(folder):
        return ""
    # Without `site`, Python starts in half the time.
    packages = str(Path(lmdb.__file__).parent.parent)
    command = [sys.executable, "-ISc", _READ_ALL, packages, str(folder / "records"), *TABLES, _OLD_TABLE]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    said = ran.stderr.strip().rpartition("\n")[2]
    if -ran.returncode in _DEATHS:
        return f"reading them ends by {signal.Signals(-ran.returncode).name}"
    if ran.returncode == _CORRUPT:
        return said
    if ran.returncode:
        # Lack of access or memory, or a failing device, does not prove that the records are damaged.
        raise TierError(f"cannot read the records in {folder}: {said}", "nothing was changed: try again")
    return ""


_CORRUPT = 4
_DEATHS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_READ_ALL = """
import os, struct, sys
sys.path.append(sys.argv.pop(1))
import lmdb

def complain(kind, error, trace):
    # LMDB's own errors say what is wrong with the file; the others come from the system.
    system = (lmdb.MemoryError, lmdb.DiskError, lmdb.ReadonlyError, lmdb.LockError, lmdb.MapFullError)
    corrupt = issubclass(kind, lmdb.Error) and kind is not lmdb.Error and not issubclass(kind, system)
    print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(4 if corrupt else 3)

sys.excepthook = complain
there = os.path.getsize(os.path.join(sys.argv[1], "data.mdb"))
with open(os.path.join(sys.argv[1], "data.mdb"), "rb") as file:
    start = file.read(1 << 16) + bytes(1 << 16)
# LMDB takes damaged numbers of its first two pages for another version, or a lack of memory.
[page_bytes] = struct.unpack_from("<I", start, 40)
if page_bytes not in (1 << 12, 1 << 13, 1 << 14, 1 << 15):
    raise lmdb.CorruptedError(f"pages of {page_bytes} bytes")
versions, last = zip(*(struct.unpack_from("<Q112xQ", start, at + 16) for at in (0, page_bytes)))
if versions[0] != versions[1]:
    raise lmdb.CorruptedError("its first pages differ in their versions")
if there < page_bytes * (1 + max(last)):
    raise lmdb.CorruptedError("the file is shorter than its first pages say")
room = there + (64 << 20)  # to write, where no page is free
with lmdb.open(sys.argv[1], map_size=room, max_dbs=8, lock=False) as env, env.begin(
    write=True, buffers=True
) as txn:
    nbytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if there < nbytes:
        raise lmdb.CorruptedError(f"the file should have {nbytes} bytes")
    for name in sys.argv[2:]:
        try:
            table = env.open_db(name.encode(), txn, create=False)
        except lmdb.NotFoundError:
            continue
        for _, value in txn.cursor(table).iternext(keys=True, values=True):
            if len(value) >= page_bytes:
                value[::page_bytes].tobytes()  # reads each page
        txn.put(b"tried", b"", db=table)
    txn.abort()
"""


def _apply(txn: Any, table: Any, items: Items) -> None:
    """Applies changes in the order of keys, which touches fewest pages."""
    txn.cursor(table).putmulti(sorted(item for item in items.items() if item[1] is not None))
    for key in sorted(key for key, value in items.items() if value is None):
        txn.delete(key, db=table)


def _lock(folder: Path) -> int:
    """Makes and locks the folder. Returns the descriptor that holds the lock, until closed or a crash."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & stat.S_IWOTH:
            _log.warning("%s may be written by everybody, and so may all blocks there: chmod o-w", folder)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _folder_unusable(folder, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 20, 0).decode(errors="replace").strip()
        os.close(fd)
        if isinstance(error, BlockingIOError):
            stop = f"stop that daemon: `kill {owner}`" if owner else "stop that daemon"
            hint = f"{stop}; or set nvme.path to another folder"
            raise TierError(f"folder {folder} is in use by pid {owner or 'unknown'}", hint) from error
        raise TierError(f"cannot lock folder {folder}: {error.strerror}", "name a local folder") from error
    with contextlib.suppress(OSError):  # a full disk must not prevent reads
        os.pwrite(fd, f"{os.getpid():<19}\n".encode(), 0)
    return fd


def _allocate(file: Path) -> None:
    """Allocates LMDB's lock file, which LMDB maps and writes: on a full disk, that ends by SIGBUS."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)


def _open(path: Path, map_bytes: int) -> Any:
    # Commits are synchronous. Otherwise a power cut can leave LMDB's root ahead of its pages, and a commit
    # with a failed sync stays visible. Measured cost: 3 % of puts under load, 30 us for a single put.
    path.mkdir(mode=0o700, exist_ok=True)  # LMDB would make it with the mode of its files
    _allocate(path / "lock.mdb")
    env = lmdb.open(str(path), map_size=map_bytes, max_dbs=len(TABLES) + 1, mode=0o600, sync=True)
    env.reader_check()
    return env


def _folder_unusable(folder: Path, error: OSError) -> TierError:
    failed, hint = f"cannot use folder {folder}", "set nvme.path to a folder that this user may write"
    if isinstance(error, PermissionError):
        uid = os.geteuid()
        hint = f"give it to this user: `sudo install -d -m 700 -o {uid} {folder}`; or {hint}"
        return TierError(f"{failed}: permission denied, uid {uid} may not write there", hint)
    if isinstance(error, NotADirectoryError | FileExistsError):
        return TierError(f"{failed}: a part of this path is a file, not a folder", hint)
    if error.errno in _FULL:
        return TierError(f"{failed}: the disk is full", _full_hint(folder))
    return TierError(f"{failed}: {error.strerror}", hint)


def _full_hint(folder: Path) -> str:
    return f"make room: df -h {folder.parent}; or set nvme.path to a folder on another disk"


def _unusable(folder: Path, error: Exception) -> TierError:
    if (isinstance(error, OSError) and error.errno in _FULL) or isinstance(error, lmdb.DiskError):
        return TierError(f"cannot write the records in {folder}: the disk is full", _full_hint(folder))
    return TierError(f"cannot use the records in {folder}: {error}", "move the folder away to start empty")
