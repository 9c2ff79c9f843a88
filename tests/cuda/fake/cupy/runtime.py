"""The calls of the runtime. Errors have CUDA's numbers."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cupy import control

_NAMES = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    201: "cudaErrorDeviceUninitialized: invalid device context",
    214: "cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
    304: "cudaErrorOperatingSystem: OS call failed or operation not supported on this OS",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    712: "cudaErrorHostMemoryAlreadyRegistered: part or all of the requested memory range is already mapped",
    713: "cudaErrorHostMemoryNotRegistered: pointer does not correspond to a registered memory region",
    719: "cudaErrorLaunchFailure: unspecified launch failure",
    801: "cudaErrorNotSupported: operation not supported",
}
_PAGE = 2 << 20
_READ_ONLY = 0x08


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(_NAMES[status])
        self.status = status


class _Mapped:
    """A file of device memory, mapped here."""

    def __init__(self, path: Path, size: int, ordinal: int, own: bool) -> None:
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if own else 0), 0o600)
        try:
            if own:
                os.ftruncate(fd, size)
            self.size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.size)
        finally:
            os.close(fd)
        self._first: Any = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first)
        self.path, self.ordinal, self.own = path, ordinal, own

    def close(self) -> None:
        del self._first
        self._map.close()
        if self.own:
            self.path.unlink(missing_ok=True)


_memory: dict[int, _Mapped] = {}
_pinned: dict[int, int] = {}
_queues: dict[int, tuple[int, deque[Callable[[], None]]]] = {}
_numbers, _streams = itertools.count(), itertools.count(1)
_lock = threading.RLock()
_current = threading.local()


def _total() -> int:
    return int(os.environ.get("FAKE_CUDA_BYTES", str(1 << 30)))


def _device() -> int:
    """The current device; raises what it has if it is lost."""
    ordinal = getattr(_current, "ordinal", 0)
    why = control.why_lost(ordinal)
    if why:
        raise CUDARuntimeError(why)
    return ordinal


def _within(address: int, size: int) -> None:
    """Of device memory, all bytes must be of one allocation."""
    for start, mapped in list(_memory.items()):
        if start <= address < start + mapped.size and address + size > start + mapped.size:
            raise CUDARuntimeError(1)


# -- devices


def driverGetVersion() -> int:
    return {"none": 0, "old": 12020, "new": 13000}[os.environ.get("FAKE_CUDA_DRIVER", "new")]


def runtimeGetVersion() -> int:
    return 13000


def getDeviceCount() -> int:
    if driverGetVersion() < runtimeGetVersion():
        raise CUDARuntimeError(35)
    count = int(os.environ.get("FAKE_CUDA_GPUS", "1"))
    if not count:
        raise CUDARuntimeError(100)
    return count


def getDeviceProperties(ordinal: int) -> dict[str, Any]:
    return {"name": b"a fake", "uuid": bytes([ordinal + 1]) * 16, "totalGlobalMem": _total()}


def setDevice(ordinal: int) -> None:
    if ordinal >= getDeviceCount():
        raise CUDARuntimeError(101)
    _current.ordinal = ordinal
    _device()


class _Attributes:
    def __init__(self, device: int) -> None:
        self.device = device


def pointerGetAttributes(address: int) -> _Attributes:
    for start, mapped in list(_memory.items()):
        if start <= address < start + mapped.size:
            return _Attributes(mapped.ordinal)
    raise CUDARuntimeError(1)


def memGetInfo() -> tuple[int, int]:
    return _total() - control.used_bytes(_device()), _total()


# -- memory


def malloc(size: int) -> int:
    with _lock:
        ordinal = _device()
        if control.used_bytes(ordinal) + size > _total():
            raise CUDARuntimeError(2)
        name = f"{control.prefix()}memory-{ordinal}-{os.getpid()}-{next(_numbers)}"
        mapped = _Mapped(Path("/dev/shm", name), size, ordinal, own=True)
        # What somebody else had may still be in there.
        ctypes.memset(mapped.address, 0xA5, size)
        _memory[mapped.address] = mapped
        return mapped.address


def free(address: int) -> None:
    with _lock:
        _device()
        if address not in _memory or not _memory[address].own:
            raise CUDARuntimeError(1)
        for stream in list(_queues):  # it waits for everything, as CUDA's does
            streamSynchronize(stream)
        _memory.pop(address).close()


def memcpyAsync(target: int, source: int, size: int, kind: int, stream: int) -> None:
    _device()
    assert kind == 4, "cudaMemcpyDefault"
    _within(target, size)
    _within(source, size)
    enqueue(stream, lambda: ctypes.memmove(target, source, size))


def memsetAsync(target: int, value: int, size: int, stream: int) -> None:
    _device()
    _within(target, size)
    enqueue(stream, lambda: ctypes.memset(target, value, size))


def hostRegister(address: int, size: int, flags: int) -> None:
    _device()
    refuses = os.environ.get("FAKE_CUDA_REGISTER", "")
    if refuses == "no" or (refuses == "writable" and flags & _READ_ONLY):
        raise CUDARuntimeError(801)
    if address in _pinned:
        raise CUDARuntimeError(712)
    if not flags & _READ_ONLY and not _writable(address):
        raise CUDARuntimeError(1)
    _pinned[address] = size


def hostUnregister(address: int) -> None:
    _device()
    if _pinned.pop(address, None) is None:
        raise CUDARuntimeError(713)


def _writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, how = line.split()[:2]
        start, stop = (int(each, 16) for each in where.split("-"))
        if start <= address < stop:
            return "w" in how
    return False


# -- sharing


def ipcGetMemHandle(address: int) -> bytes:
    _device()
    if os.environ.get("FAKE_CUDA_IPC") == "no":
        raise CUDARuntimeError(304)
    if address not in _memory:
        raise CUDARuntimeError(1)
    mapped = _memory[address]
    assert mapped.size % _PAGE == 0, "others' memory would be seen with it"
    return mapped.path.name.encode().ljust(64, b"\0")


def ipcOpenMemHandle(handle: bytes) -> int:
    ordinal = _device()
    if os.environ.get("FAKE_CUDA_IPC") == "no":
        raise CUDARuntimeError(400)
    name = handle.rstrip(b"\0").decode(errors="replace")
    if "/" in name or not name.startswith(control.prefix()):
        raise CUDARuntimeError(1)
    if name.split("-")[-2] == str(os.getpid()):
        raise CUDARuntimeError(201)
    try:
        mapped = _Mapped(Path("/dev/shm", name), 0, ordinal, own=False)
    except FileNotFoundError:
        raise CUDARuntimeError(400) from None
    _memory[mapped.address] = mapped
    return mapped.address


def ipcCloseMemHandle(address: int) -> None:
    _device()
    if address not in _memory or _memory[address].own:
        raise CUDARuntimeError(1)
    _memory.pop(address).close()


# -- streams


def new_stream() -> int:
    number = next(_streams)
    _queues[number] = _device(), deque()
    return number


def end_stream(number: int) -> None:
    _queues.pop(number, None)


def enqueue(stream: int, work: Callable[[], Any]) -> None:
    """Has work done when somebody waits for the stream."""
    if stream == 0:
        work()
        return
    ordinal, queue = _queues[stream]
    assert ordinal == _current.ordinal, "the stream is another device's"
    queue.append(work)


def streamSynchronize(stream: int) -> None:
    _device()
    ordinal, queue = _queues[stream]
    control.waited(ordinal)
    _device()
    with _lock:
        while queue:
            queue.popleft()()


@atexit.register
def _end() -> None:
    # The maps stay: other threads may still be at work.
    for mapped in _memory.values():
        if mapped.own:
            mapped.path.unlink(missing_ok=True)
