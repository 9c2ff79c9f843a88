"""One GPU: its memory, its streams, memory shared with other processes, and the kernels.

The three classes know each other: a buffer belongs to a GPU, a stream allocates scratch memory on it. CUDA's
current device belongs to a thread, so every call sets it. An allocation takes whole pages of the device (2
MiB), so a handle of an allocation maps nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from kvstore.cuda.device_ids import resolve, uuids, why_not
from kvstore.cuda.errors import ALREADY_REGISTERED, OUT_OF_MEMORY, CudaError, failure, no_ipc
from kvstore.errors import MisuseError

__all__ = ["CudaError", "DeviceBuffer", "Gpu", "Stream", "resolve", "uuids", "why_not"]

PAGE_BYTES = 2 << 20
HANDLE_BYTES = 64

_DLPACK_CUDA = 2
_PORTABLE, _READ_ONLY = 0x01, 0x08
_OPTIONS = ("-std=c++17",)
_SCRATCH_BYTES = 2 << 20
_ALIGN = 256
_EITHER_WAY = 4  # cudaMemcpyDefault: addresses say where they are
_T = TypeVar("_T")

_module: Any = None
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBuffer:
    """`nbytes` of a GPU's memory from `address` on. `base` keeps the memory alive."""

    address: int
    nbytes: int
    gpu: Gpu
    base: Any = None

    # As a memoryview of bytes has them, so that both pass the same checks.
    c_contiguous: ClassVar[bool] = True
    readonly: ClassVar[bool] = False
    format: ClassVar[str] = "B"

    @property
    def shape(self) -> tuple[int]:
        """As a memoryview of bytes has it."""
        return (self.nbytes,)

    def __len__(self) -> int:
        return self.nbytes

    def part(self, start: int, stop: int) -> DeviceBuffer:
        """Returns bytes `start` to `stop`. MisuseError if out of bounds."""
        if not 0 <= start <= stop <= self.nbytes:
            raise MisuseError(f"bytes {start} to {stop} of a device buffer of {self.nbytes}")
        return DeviceBuffer(self.address + start, stop - start, self.gpu, self)

    def __getitem__(self, which: slice) -> DeviceBuffer:
        """Returns a part, with bounds clipped as for a memoryview. Steps must be 1."""
        start, stop, step = which.indices(self.nbytes)
        if step != 1:
            raise MisuseError(f"every {step}th byte of a device buffer", "parts are contiguous")
        return self.part(start, max(start, stop))

    @property
    def root(self) -> DeviceBuffer:
        """The whole allocation."""
        whole = self
        while isinstance(whole.base, DeviceBuffer):
            whole = whole.base
        return whole

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # Stream None: consumers need not wait.
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self.gpu.ordinal

    def __dlpack__(self, **options: Any) -> Any:
        import cupy  # noqa: PLC0415

        memory = cupy.cuda.UnownedMemory(self.address, self.nbytes, self, self.gpu.ordinal)
        self.gpu.select()
        return cupy.ndarray((self.nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)).__dlpack__(
            **options
        )


Memory: TypeAlias = memoryview | DeviceBuffer
"""Host or device memory."""


class Stream:
    """A CUDA stream. One thread at a time may call. Every call may raise CudaError."""

    def __init__(self, gpu: Gpu) -> None:
        """Makes a stream that waits for no other. Most callers use `Gpu.stream`."""
        import cupy  # noqa: PLC0415

        self.gpu = gpu
        self._runtime = cupy.cuda.runtime
        self._stream = gpu.call("no stream", lambda: cupy.cuda.Stream(non_blocking=True))
        self._kernels: dict[str, Any] = {}
        self._moving: list[tuple[Memory, Memory]] = []
        self._chunks: list[DeviceBuffer] = []
        self._used_bytes = 0

    def copy(self, target: Memory, source: Memory) -> None:
        """Starts a copy, and keeps both buffers alive until `wait`. MisuseError if sizes differ."""
        if target.nbytes != source.nbytes:
            raise MisuseError(f"a copy of {source.nbytes} bytes to {target.nbytes}")
        if not isinstance(target, DeviceBuffer) and target.readonly:
            raise MisuseError("a copy into a read-only buffer")
        if not target.nbytes:
            return
        self._moving.append((target, source))
        places = _address(target), _address(source)
        self.gpu.call(
            f"a copy of {target.nbytes} bytes",
            self._runtime.memcpyAsync,
            *places,
            target.nbytes,
            _EITHER_WAY,
            self._stream.ptr,
        )

    def zero(self, target: DeviceBuffer) -> None:
        """Starts to zero device memory."""
        self.gpu.call("zeros", self._runtime.memsetAsync, target.address, 0, target.nbytes, self._stream.ptr)

    def launch(self, name: str, blocks: int, threads: int, *args: Any) -> None:
        """Starts one kernel of kernels.cu. Integers are 64 bits unless numpy's, buffers their addresses."""
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = self.gpu.function(name)
        given = tuple(_argument(arg) for arg in args)

        def start() -> None:
            kernel((blocks,), (threads,), given, stream=self._stream)

        self.gpu.call(f"kernel {name}", start)

    def scratch(self, nbytes: int) -> DeviceBuffer:
        """Returns memory of this stream with undefined contents, valid until the next `wait`."""
        start = -(-self._used_bytes // _ALIGN) * _ALIGN
        if not self._chunks or start + nbytes > self._chunks[-1].nbytes:
            self._chunks.append(self.gpu.allocate(max(nbytes, _SCRATCH_BYTES)))
            start = 0
        self._used_bytes = start + nbytes
        return self._chunks[-1].part(start, start + nbytes)

    def wait(self) -> None:
        """Returns when all started work is done. After a CudaError none of it is valid."""
        try:
            self.gpu.call("work on a stream", self._runtime.streamSynchronize, self._stream.ptr)
        finally:
            self._moving.clear()
            self._used_bytes = 0
        if len(self._chunks) > 1:
            # One chunk for the next time.
            total = sum(chunk.nbytes for chunk in self._chunks)
            self.close()
            self._chunks.append(self.gpu.allocate(total))

    def close(self) -> None:
        """Frees the scratch memory. The stream itself ends with this object."""
        chunks, self._chunks, self._used_bytes = self._chunks, [], 0
        for chunk in chunks:
            self.gpu.free(chunk)

    def __del__(self) -> None:
        # The thread or the process may have ended, or the GPU may be lost.
        with contextlib.suppress(Exception):
            self.close()


class Gpu:
    """One GPU. Any thread may call, and every call may raise CudaError. Most callers use `open`."""

    _opened: ClassVar[dict[str, Gpu]] = {}
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, uuid: str, ordinal: int) -> None:
        import cupy  # noqa: PLC0415

        self.uuid = uuid
        self.ordinal = ordinal
        self._runtime = cupy.cuda.runtime
        self._streams = threading.local()

    @classmethod
    def open(cls, uuid: str) -> Gpu:
        """Returns the GPU of a UUID, always the same object. MisuseError if it is not visible."""
        with cls._opening:
            if uuid not in cls._opened:
                there = uuids()
                if uuid not in there:
                    hint = f"there are: {', '.join(there) or 'none'}"
                    raise MisuseError(f"there is no GPU {uuid}", hint)
                cls._opened[uuid] = cls(uuid, there.index(uuid))
            return cls._opened[uuid]

    @classmethod
    def named(cls, device: int | str) -> Gpu:
        """Returns the GPU of an index, a UUID or a unique prefix of one. MisuseError.

        Asks CUDA once for each name: that takes 10 ms.
        """
        name = str(device)
        found = cls._opened.get(name)
        if found is None:
            found = cls.open(resolve(device))
            with cls._opening:
                cls._opened[name] = found
        return found

    def __repr__(self) -> str:
        return f"Gpu({self.uuid!r})"

    def call(self, what: str, function: Callable[..., _T], *args: Any) -> _T:
        """Calls CUDA on this device. `what` begins the message of a CudaError."""
        try:
            self._runtime.setDevice(self.ordinal)
            return function(*args)
        except RuntimeError as error:
            # An error of the runtime or of the driver. Their numbers agree.
            code = getattr(error, "status", None)
            if code is None:
                raise
            raise failure(f"{self.uuid}: {what}", int(code), str(error)) from None

    def select(self) -> None:
        """Makes this the calling thread's current device, for libraries that require it."""
        self.call("cannot be selected", lambda: None)

    # -- memory

    def memory(self) -> tuple[int, int]:
        """Returns free and total bytes."""
        free, total = self.call("cannot tell its memory", self._runtime.memGetInfo)
        return int(free), int(total)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Allocates zeroed memory. CudaError with the free bytes and a hint if memory is short."""
        if nbytes < 1:
            raise MisuseError(f"{nbytes} bytes of device memory")
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        try:
            address = self.call(f"cannot allocate {size} bytes", self._runtime.malloc, size)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            free, total = self.memory()
            raise CudaError(
                f"{self.uuid} has no {size} bytes left: {free} of {total} are free",
                "lower hbm.limit, or have engines take less of this GPU",
                code=OUT_OF_MEMORY,
            ) from None
        whole = DeviceBuffer(address, size, self)
        try:
            stream = self.stream()
            stream.zero(whole)
            stream.wait()
        except CudaError as error:
            if not error.lost:
                self.free(whole)
            raise
        return DeviceBuffer(address, nbytes, self)

    def free(self, buffer: DeviceBuffer) -> None:
        """Frees an allocation. No process may use it any more."""
        self.call("cannot free memory", self._runtime.free, buffer.address)

    # -- sharing

    def export(self, buffer: DeviceBuffer) -> bytes:
        """Returns the 64-byte handle by which other processes map an allocation. MisuseError for a part."""
        if buffer.root is not buffer:
            raise MisuseError(f"{buffer.nbytes} bytes of a larger allocation", "export the whole of it")
        try:
            handle = self.call("no handle", self._runtime.ipcGetMemHandle, buffer.address)
        except CudaError as error:
            raise no_ipc(error, f"{buffer.nbytes} bytes cannot be exported") from None
        return bytes(handle)

    def open_export(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        """Maps the export of another process, until `close_export` or the end of this process."""
        if len(handle) != HANDLE_BYTES or nbytes < 1:
            raise MisuseError(f"a handle of {len(handle)} bytes for {nbytes} bytes of device memory")
        try:
            address = self.call("not opened", self._runtime.ipcOpenMemHandle, handle)
        except CudaError as error:
            why = "what was exported cannot be opened, if its process still has it"
            raise no_ipc(error, why) from None
        return DeviceBuffer(address, nbytes, self)

    def close_export(self, buffer: DeviceBuffer) -> None:
        """Undoes `open_export`."""
        self.call("cannot close an export", self._runtime.ipcCloseMemHandle, buffer.address)

    def register(self, view: memoryview, readonly: bool = False) -> bool:
        """Pins host memory for all GPUs of this process, which makes copies fast. Slow; once a mapping.

        `readonly` for memory that is mapped read-only. Returns False if the driver refuses: copies are slower
        then. CudaError only for a lost GPU.
        """
        flags = _PORTABLE | (_READ_ONLY if readonly else 0)
        try:
            self.call("not pinned", self._runtime.hostRegister, address_of(view), view.nbytes, flags)
        except CudaError as error:
            if error.lost:
                raise
            return error.code == ALREADY_REGISTERED
        return True

    def unregister(self, view: memoryview) -> None:
        """Undoes `register`."""
        self.call("cannot unpin memory", self._runtime.hostUnregister, address_of(view))

    # -- work

    def stream(self) -> Stream:
        """Returns a new stream that waits for no other."""
        return Stream(self)

    def thread_stream(self) -> Stream:
        """Returns the calling thread's stream."""
        known = getattr(self._streams, "stream", None)
        if known is None:
            known = self._streams.stream = self.stream()
        return known

    def wait_for(self, stream: int) -> None:
        """Returns when the work on another library's stream, by its number, is done."""
        self.call("work on another's stream", self._runtime.streamSynchronize, stream)

    def function(self, name: str) -> Any:
        """Returns a kernel of kernels.cu: f((grid,), (block,), args, stream=...). The first call compiles."""
        global _module  # noqa: PLW0603
        try:
            with _compiling:
                if _module is None:
                    import cupy  # noqa: PLC0415

                    code = files("kvstore.cuda").joinpath("kernels.cu").read_text()
                    _module = cupy.RawModule(code=code, options=_OPTIONS)
                return self.call(f"no kernel {name}", _module.get_function, name)
        except CudaError:
            raise
        except Exception as error:
            # NVRTC or its headers are missing, or the code does not compile.
            raise CudaError(f"kernels.cu cannot be compiled: {error}"[:2000]) from None


def _address(memory: Memory) -> int:
    return memory.address if isinstance(memory, DeviceBuffer) else address_of(memory)


def _argument(value: Any) -> Any:
    if isinstance(value, DeviceBuffer):
        return np.uint64(value.address)
    if isinstance(value, int):
        return np.int64(value) if value < 0 else np.uint64(value)
    return value


def address_of(view: memoryview) -> int:
    """Returns the address of host memory, writable or not."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
