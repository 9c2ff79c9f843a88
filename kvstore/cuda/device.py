"""One GPU as this process sees it: its memory, what is shared of it, the kernels that run on it.

CUDA's current device is a thread's own, so every call sets it first. An allocation takes whole pages of the
device (2 MiB): who is given a handle of it can map these pages, and nothing else is in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.resources import files
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvstore.cuda.buffer import DeviceBuffer
from kvstore.cuda.device_ids import resolve, uuids, why_not
from kvstore.cuda.errors import ALREADY_REGISTERED, OUT_OF_MEMORY, CudaError, failure, no_ipc
from kvstore.cuda.stream import Stream
from kvstore.errors import MisuseError

__all__ = ["CudaError", "DeviceBuffer", "Gpu", "Stream", "resolve", "uuids", "why_not"]

PAGE_BYTES = 2 << 20
HANDLE_BYTES = 64

_PORTABLE, _READ_ONLY = 0x01, 0x08
_OPTIONS = ("-std=c++17",)
_T = TypeVar("_T")

_module: Any = None
_compiling = threading.Lock()


class Gpu:
    """Any thread may call; every call raises CudaError if CUDA refuses. Most get one by `open`."""

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
        """The GPU of that UUID, the same object each time. MisuseError if this process sees none."""
        with cls._opening:
            if uuid not in cls._opened:
                there = uuids()
                if uuid not in there:
                    hint = f"there are: {', '.join(there) or 'none'}"
                    raise MisuseError(f"there is no GPU {uuid}", hint)
                cls._opened[uuid] = cls(uuid, there.index(uuid))
            return cls._opened[uuid]

    def __repr__(self) -> str:
        return f"Gpu({self.uuid!r})"

    def call(self, what: str, function: Callable[..., _T], *args: Any) -> _T:
        """A call into CUDA on this device. `what` begins the message of the CudaError if it fails."""
        try:
            self._runtime.setDevice(self.ordinal)
            return function(*args)
        except RuntimeError as error:
            # Of the runtime or of the driver, which number alike what is looked at here.
            code = getattr(error, "status", None)
            if code is None:
                raise
            raise failure(f"{self.uuid}: {what}", int(code), str(error)) from None

    def select(self) -> None:
        """Makes this the calling thread's current device, for a library that asks for that."""
        self.call("cannot be selected", lambda: None)

    # -- memory

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self.call("cannot tell its memory", self._runtime.memGetInfo)
        return int(free), int(total)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """New memory of zeros. CudaError with the free bytes and a hint if there is not so much."""
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
        """Gives an allocation back. Nothing of it may be in use, here or in a process that was given it."""
        self.call("cannot free memory", self._runtime.free, buffer.address)

    # -- sharing

    def export(self, buffer: DeviceBuffer) -> bytes:
        """A handle of an allocation, 64 bytes, by which other processes open it. MisuseError for a part."""
        if buffer.root is not buffer:
            raise MisuseError(f"{buffer.nbytes} bytes of a larger allocation", "export the whole of it")
        try:
            handle = self.call("no handle", self._runtime.ipcGetMemHandle, buffer.address)
        except CudaError as error:
            raise no_ipc(error, f"{buffer.nbytes} bytes cannot be exported") from None
        return bytes(handle)

    def open_export(self, handle: bytes, nbytes: int) -> DeviceBuffer:
        """Maps what another process has exported, until `close_export` or this process's end."""
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
        """Pins host memory, so that all GPUs of this process reach it at full speed; slow, once a mapping.

        `readonly` for memory that is mapped so. False if the driver refuses: copies still work, slower.
        CudaError only for a GPU that is lost.
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
        """A new stream that waits for no other."""
        return Stream(self)

    def thread_stream(self) -> Stream:
        """The calling thread's own stream, the same each time."""
        known = getattr(self._streams, "stream", None)
        if known is None:
            known = self._streams.stream = self.stream()
        return known

    def wait_for(self, stream: int) -> None:
        """Until the work on somebody's stream, by its number, is done."""
        self.call("work on another's stream", self._runtime.streamSynchronize, stream)

    def function(self, name: str) -> Any:
        """A kernel of kernels.cu, called as f((grid,), (block,), args, stream=...); compiled at first."""
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
            # No NVRTC, headers that it does not find, code that it does not compile.
            raise CudaError(f"kernels.cu cannot be compiled: {error}"[:2000]) from None


def address_of(view: memoryview) -> int:
    """Where host memory is, writable or not."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
