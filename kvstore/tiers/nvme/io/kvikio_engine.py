"""Moves blocks between memory and files by kvikio: GPUDirect Storage where available, else its POSIX path.

The queue is the one in Python, the threads are those of the posix engine. Each piece is one task of kvikio,
which has threads of its own and no errno. kvikio needs libcuda: see `why_not`. With GPUDirect, GPU memory
goes straight to the device, otherwise through kvikio's host buffers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import threading
from typing import Any

import numpy as np

from kvstore import native
from kvstore.cuda.device import CudaError, DeviceBuffer
from kvstore.tiers.base import OTHERS_EVERY
from kvstore.tiers.nvme.io.posix_engine import PosixEngine

_log = logging.getLogger(__name__)

_ERRNO = {os.strerror(number): number for number in errno.errorcode}
_threads = 0
_counting = threading.Lock()


def why_not() -> str:
    """Returns why kvikio cannot be used here, empty if it can."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no libcuda.so.1"
    try:
        import kvikio.defaults  # noqa: F401, PLC0415
    except Exception as error:
        # An old driver or an incomplete package raises errors of many types.
        return f"kvikio cannot be used: {error}"[:200]
    return ""


class KvikioEngine(PosixEngine):
    """An `IOEngine` for any file. Requires that `why_not` is empty."""

    device_memory = True

    def __init__(self, threads: int = 4, task_bytes: int = 512 << 10, queue_pieces: int = 1 << 14) -> None:
        """Starts the threads. See `PosixEngine`."""
        self._files: dict[int, tuple[bool, Any]] = {}
        self._opening = threading.Lock()
        self._counted = threads
        _use(threads, task_bytes)
        super().__init__(threads, task_bytes, queue_pieces)
        self.name = "kvikio"

    def release(self, fd: int) -> None:
        """See `IOEngine.release`: kvikio's own descriptors of the file are closed."""
        with self._opening:
            known = self._files.pop(fd, None)
        if known is not None:
            known[1].close()

    def register(self, buffer: DeviceBuffer) -> None:
        """See `IOEngine.register`. cuFile then needs no buffer of its own."""
        self._tell("memory_register", buffer)

    def unregister(self, buffer: DeviceBuffer) -> None:
        """See `IOEngine.unregister`."""
        self._tell("memory_deregister", buffer)

    def _tell(self, call: str, buffer: DeviceBuffer) -> None:
        import kvikio.buffer  # noqa: PLC0415

        try:
            buffer.gpu.select()
            getattr(kvikio.buffer, call)(buffer)
        except (CudaError, RuntimeError) as error:
            # Unregistered memory works too, slower.
            _log.info("%s of %d bytes of device memory: %s", call, buffer.nbytes, error)

    def close(self) -> None:
        """See `IOEngine.close`."""
        super().close()
        for fd in list(self._files):
            self.release(fd)
        counted, self._counted = self._counted, 0
        _use(-counted)

    def _make_queue(self, threads: int, task_bytes: int, queue_pieces: int) -> native.PortableQueue:
        return native.PortableQueue(threads, task_bytes, queue_pieces, OTHERS_EVERY, self._move)

    def _move(self, pieces: list[native.FilePiece]) -> list[native.Outcome]:
        outcomes: list[native.Outcome] = []
        for piece in pieces:
            outcome: native.Outcome = 0
            try:
                self._move_one(*piece)
            except OSError as error:
                outcome = error.with_traceback(None)  # its frames hold the buffers
            except Exception as error:
                outcome = OSError(errno.EINVAL, repr(error))
            outcomes.append(outcome)
        return outcomes

    def _move_one(self, fd: int, offset: int, part: Any, write: bool) -> None:
        writable, file = self._file(fd)
        if write and not writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        size = len(part)
        if isinstance(part, DeviceBuffer):
            try:
                part.gpu.select()
            except CudaError as error:
                raise OSError(errno.EIO, str(error)) from None
        else:
            part = np.frombuffer(part, np.uint8)
        call = file.pwrite if write else file.pread
        try:
            # The future does not keep the buffer alive, this frame does.
            moved = call(part, size, offset, task_size=size).get()
        except RuntimeError as error:
            raise _error(str(error)) from None
        if moved != size:
            raise OSError(errno.EIO, f"the file ends at {offset + moved}")

    def _file(self, fd: int) -> tuple[bool, Any]:
        """Returns whether a descriptor is writable, and kvikio's file for it."""
        known = self._files.get(fd)
        if known is None:
            from kvikio import CuFile  # noqa: PLC0415

            os.fstat(fd)  # EBADF for an invalid descriptor
            writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            with self._opening:
                known = self._files.get(fd)
                if known is None:
                    known = writable, CuFile(f"/proc/self/fd/{fd}", "r+" if writable else "r")
                    self._files[fd] = known
        return known


def _use(threads: int, task_bytes: int = 0) -> None:
    """Adds threads to kvikio's pool, which all engines share, or removes them if negative."""
    import kvikio.defaults  # noqa: PLC0415

    global _threads  # noqa: PLW0603
    with _counting:
        _threads += threads
        wanted = {"num_threads": max(1, _threads)}
        if task_bytes:
            wanted |= {"task_size": task_bytes, "auto_direct_io_read": True, "auto_direct_io_write": True}
        kvikio.defaults.set(wanted)


def _error(said: str) -> OSError:
    """Returns kvikio's error with an errno. Its messages end with the words of an errno, or with EOF."""
    last = said.rpartition(": ")[2].strip()
    number = errno.EIO if last == "EOF" else _ERRNO.get(last, errno.EIO)
    return OSError(number, "the file ends" if last == "EOF" else said)
