"""Work that a GPU does one after another: copies, zeros and kernels, until somebody waits for it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvstore.cuda.buffer import DeviceBuffer
from kvstore.errors import MisuseError

if TYPE_CHECKING:
    from kvstore.cuda.device import Gpu

Memory: TypeAlias = memoryview | DeviceBuffer

_SCRATCH_BYTES = 2 << 20
_ALIGN = 256
_EITHER_WAY = 4  # cudaMemcpyDefault: addresses say where they are


class Stream:
    """One thread at a time may call. Every call raises CudaError if CUDA refuses."""

    def __init__(self, gpu: Gpu) -> None:
        """A new stream, which waits for no other. Most call `Gpu.stream`."""
        import cupy  # noqa: PLC0415

        self.gpu = gpu
        self._runtime = cupy.cuda.runtime
        self._stream = gpu.call("no stream", lambda: cupy.cuda.Stream(non_blocking=True))
        self._kernels: dict[str, Any] = {}
        self._moving: list[tuple[Memory, Memory]] = []
        self._chunks: list[DeviceBuffer] = []
        self._used_bytes = 0

    def copy(self, target: Memory, source: Memory) -> None:
        """Has bytes copied, and keeps both alive until `wait`. MisuseError if sizes differ."""
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
        """Has device memory zeroed."""
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
        """Device memory of this stream's own, with anything in it, until the next `wait`."""
        start = -(-self._used_bytes // _ALIGN) * _ALIGN
        if not self._chunks or start + nbytes > self._chunks[-1].nbytes:
            self._chunks.append(self.gpu.allocate(max(nbytes, _SCRATCH_BYTES)))
            start = 0
        self._used_bytes = start + nbytes
        return self._chunks[-1].part(start, start + nbytes)

    def wait(self) -> None:
        """Until everything that was started is done. CudaError if some of it failed: none of it counts."""
        try:
            self.gpu.call("work on a stream", self._runtime.streamSynchronize, self._stream.ptr)
        finally:
            self._moving.clear()
            self._used_bytes = 0
        if len(self._chunks) > 1:
            # What was needed in pieces is had in one the next time.
            total = sum(chunk.nbytes for chunk in self._chunks)
            self.close()
            self._chunks.append(self.gpu.allocate(total))

    def close(self) -> None:
        """Gives the scratch memory back; the stream itself goes with this object."""
        chunks, self._chunks, self._used_bytes = self._chunks, [], 0
        for chunk in chunks:
            self.gpu.free(chunk)

    def __del__(self) -> None:
        # Of a thread that has ended, or of a GPU that is lost, or while the process ends.
        with contextlib.suppress(Exception):
            self.close()


def _address(memory: Memory) -> int:
    if isinstance(memory, DeviceBuffer):
        return memory.address
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _argument(value: Any) -> Any:
    if isinstance(value, DeviceBuffer):
        return np.uint64(value.address)
    if isinstance(value, int):
        return np.int64(value) if value < 0 else np.uint64(value)
    return value
