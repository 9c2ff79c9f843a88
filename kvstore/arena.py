"""Extents in shared memory, made by the daemon and mapped by clients, with one header a slot.

An extent is a memfd: a label, a table of slot headers, and payload slots (`Geometry` has the offsets). The
seed of a payload's checksum names its block, so the bytes of another block never verify. Not covered here:
the contents of slots, and access to extents.

A mapping lives as long as its last view: `close` drops one reference, and the last view unmaps. So a view
that outlives `close` stays readable and never faults.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore import native
from kvstore.errors import TierError
from kvstore.types import HEADER_BYTES, LABEL_BYTES, Geometry

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = bytes | bytearray | memoryview

MAGIC = int.from_bytes(b"KVSLOT02", "little")
"""The first field of every label and header. Another layout of either gets another number."""

LABEL = np.dtype({"names": ["magic", "number", "slot_bytes"], "formats": ["<u8"] * 3})
"""The label of an extent. `tiers/ownership.py` has the valid slot size: `slot_bytes` only counts for extents
of early daemons without that table, which had one tenant."""

HEADER = np.dtype(
    {
        "names": [
            "magic", "version", "namespace", "key", "parent", "key_bytes", "parent_bytes", "length",
            "checksum", "last", "stamp", "expires",
        ],
        "formats": [
            "<u8", "<u8", ("u1", (16,)), ("u1", (64,)), ("u1", (64,)), "u1", "u1", "<u4",
            "<u8", "<u4", "<u4", "<f8",
        ],
        "offsets": [0, 8, 16, 32, 96, 160, 161, 164, 168, 176, 180, 184],
        "itemsize": HEADER_BYTES,
    }
)  # fmt: skip
"""One slot's header. `version` 0 means not readable, `last` is the slot's last version; `length` is bytes of
payload; `stamp` orders blocks by time; `expires` is in s since 1970, 0: never. Written by numpy only: its
aligned 8-byte stores never tear, those of `struct.pack_into` do."""

HUGE_BYTES = 2 << 20
_STEP_BYTES = 16 << 20

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def seed(namespace: bytes, key: bytes, length: int) -> int:
    """Returns the 64-bit seed of a block's checksum, from namespace (16 bytes), key and length."""
    return xxh3_64_intdigest(namespace + key + length.to_bytes(8, "little"))


def seeds(namespace: bytes, keys: Sequence[bytes], length: int) -> list[int]:
    """Returns the seeds of blocks of one namespace and length."""
    end = length.to_bytes(8, "little")
    return [xxh3_64_intdigest(b"".join((namespace, key, end))) for key in keys]


def checksum(payload: Bytes, seed: int) -> int:
    """Returns xxh3_64 of `payload` under `seed`. Releases the GIL for large payloads."""
    return native.checksum(payload, seed)


def copy(target: bytearray | memoryview, source: Bytes) -> None:
    """Copies `source` over `target` at memcpy speed, without the GIL. ValueError if sizes differ."""
    into, data = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    _check_sizes(into.size, data.size)
    np.copyto(into, data)


def copy_digest(target: bytearray | memoryview, source: Bytes, digest: xxh3_64) -> None:
    """Copies as `copy` does, and adds the bytes of `source` to a digest.

    For writers whose block comes in several calls. Other writers of `target`, such as a client that lost its
    slot, can damage it, but the checksum shows that.
    """
    into, data = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    _check_sizes(into.size, data.size)
    for step in native.copied(into, data):
        digest.update(data[step].data)


def _check_sizes(target_bytes: int, source_bytes: int) -> None:
    if target_bytes != source_bytes:
        raise ValueError(f"target has {target_bytes} bytes, source {source_bytes}")


class Extent:
    """The daemon's side of one extent: owns the memfd, maps it writable, provides descriptors."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over `fd`, a memfd of `nbytes`, and maps it. TierError if it cannot be mapped."""
        try:
            memory = _Memory(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
        except OSError as error:
            raise _failed(f"cannot map an extent of {nbytes} bytes", error) from error
        self._memory: _Memory | None = memory
        self.nbytes = nbytes
        self.fd = fd
        self.view = memory.view()

    @classmethod
    def create(cls, name: str, nbytes: int) -> Extent:
        """Makes an extent of zeros with mode 0600 and a sealed size. TierError if memory is short.

        The caller writes the label.
        """
        fd = -1
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, nbytes)
            # No F_SEAL_WRITE: the daemon could not empty the extent.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd, nbytes)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError):
                raise _failed(f"cannot create an extent of {nbytes} bytes", error) from error
            raise

    def populate(self, huge: bool) -> bool:
        """Allocates every page of the extent now, with `huge` in 2 MiB pages. Returns whether all are huge.

        Takes about 1 s a GiB, in steps and without the GIL, so run it on a thread. Safe beside readers and
        writers. Returns False once the extent is closed. If the kernel refuses, pages are small or are
        allocated on first touch. TierError if memory ran out.
        """
        for start in range(0, self.nbytes, _STEP_BYTES):
            memory = self._memory
            if memory is None:
                return False
            step = min(_STEP_BYTES, self.nbytes - start)
            refused = memory.advise(start, step, _MADV_POPULATE_WRITE)
            if refused == errno.ENOMEM:
                raise _failed(f"cannot populate an extent of {self.nbytes} bytes", OSError(refused, ""))
            if refused:
                return False
            huge = huge and not memory.advise(start, step, _MADV_COLLAPSE)
        return huge

    def punch(self) -> None:
        """Frees all memory: every process that maps the extent reads zeros.

        No access faults, and later writes of other processes allocate new pages. TierError if the kernel
        refuses.
        """
        flags = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate(self.fd, flags, 0, self.nbytes):
            raise _failed(f"cannot empty an extent of {self.nbytes} bytes", OSError(ctypes.get_errno(), ""))

    def readonly_fd(self) -> int:
        """Returns a descriptor that allows no writable map. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def label(self) -> NDArray[Any]:
        """The extent's label, shape (1,) of `LABEL`, writable."""
        return np.frombuffer(self.view, LABEL, count=1)

    def headers(self, geometry: Geometry) -> NDArray[Any]:
        """The table of slot headers, shape (slots,) of `HEADER`, writable."""
        return _headers(self.view, geometry)

    def close(self) -> None:
        """Closes the descriptor. The last view, in any process, frees the memory."""
        if self._memory is not None:
            self._memory = None
            self.view = memoryview(b"")
            os.close(self.fd)
            self.fd = -1


class Mapping:
    """The client's side of one extent: maps a received descriptor."""

    def __init__(self, fd: int, nbytes: int, writable: bool) -> None:
        """Maps `nbytes` of `fd`, which the caller may close afterwards.

        TierError if `fd` is smaller, or does not grant what `writable` asks for.
        """
        status = os.fstat(fd)
        if status.st_size < nbytes:
            raise TierError(f"an extent has {status.st_size} bytes, {nbytes} were announced")
        flags = mmap.MAP_SHARED
        # A writer's first touches fault page by page and cost 10 times as much as populating (220 against
        # 20 ms a GiB of small pages). A reader's faults map 16 pages at a time and cost no more than that.
        # Pages that the daemon has not populated yet would count as the client's memory.
        if writable and status.st_blocks * 512 >= nbytes:
            flags |= _MAP_POPULATE
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            view = _Memory(fd, nbytes, prot, flags).view()
        except OSError as error:
            how = "writable" if writable else "read-only"
            raise _failed(f"cannot map {nbytes} bytes {how}", error) from error
        self.nbytes = nbytes
        self.view = view if writable else view.toreadonly()

    def headers(self, geometry: Geometry) -> NDArray[Any]:
        """The table of slot headers, shape (slots,) of `HEADER`, writable if the mapping is."""
        return _headers(self.view, geometry)

    def close(self) -> None:
        """Drops this reference. Existing views stay valid; the last one unmaps."""
        self.view = memoryview(b"")


class _Memory:
    """A shared map of a whole descriptor at a 2 MiB aligned address, unmapped with its last view.

    `mmap.mmap` takes no address, and keeps a duplicate of the descriptor.
    """

    def __init__(self, fd: int, nbytes: int, prot: int, flags: int) -> None:
        """Maps at once. Raises the kernel's OSError."""
        room = nbytes + HUGE_BYTES
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        reserved = _mmap(None, room, _PROT_NONE, private, -1)
        self._address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        end = self._address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            _mmap(self._address, nbytes, prot, flags | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(reserved, room)
            raise
        if self._address > reserved:
            _libc.munmap(reserved, self._address - reserved)
        if reserved + room > end:
            _libc.munmap(end, reserved + room - end)
        self._bytes = (ctypes.c_char * nbytes).from_address(self._address)
        # Views hold the ctypes array, not this object. Never at exit: other threads may still be copying.
        weakref.finalize(self._bytes, _libc.munmap, self._address, nbytes).atexit = False

    def view(self) -> memoryview:
        return memoryview(self._bytes).cast("B")

    def advise(self, start: int, nbytes: int, advice: int) -> int:
        """Returns 0, or the errno of madvise."""
        if _libc.madvise(self._address + start, nbytes, advice) == 0:
            return 0
        return ctypes.get_errno()


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if got is None or got == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(got)


def _headers(view: memoryview, geometry: Geometry) -> NDArray[Any]:
    assert geometry.table, "the extent has no table of headers"
    return np.frombuffer(view, HEADER, count=geometry.slots, offset=LABEL_BYTES)


def _failed(what: str, error: OSError) -> TierError:
    hints = {
        errno.ENOMEM: "give the tier less DRAM, or the machine or its control group more",
        errno.EMFILE: "raise the limit of open files (LimitNOFILE=)",
        errno.ENFILE: "raise the limit of open files (fs.file-max)",
        errno.EACCES: "the descriptor was opened read-only",
        errno.EPERM: "the extent is sealed against writing",
    }
    code = error.errno or 0
    return TierError(f"{what}: {os.strerror(code)}", hints.get(code, ""))
