"""A device and its streams in this process's own memory, under emulated kernels; everything is done at once.

Buffers lie between bytes that nobody may write, at the end of what can be read: whoever reads on dies of it.
Scratch is anything but zero at first.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvstore.cuda
from tests.cuda.emulate import Module

SOURCE = Path(kvstore.cuda.__file__).with_name("kernels.cu")
_EDGE_BYTES = 256
_EDGE = 0xA5
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Memory that stands for a device's."""

    address: int
    nbytes: int
    base: Any = field(default=None, repr=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def part(self, start: int, stop: int) -> HostBuffer:
        """See Buffer."""
        assert 0 <= start <= stop <= self.nbytes
        return HostBuffer(self.address + start, stop - start, self.base)


class HostGpu:
    """What `kvstore.cuda.device.Gpu` is to the kernels' tests."""

    def __init__(self) -> None:
        self._module = Module(SOURCE.read_text())
        self._edges: list[np.ndarray[Any, Any]] = []

    def allocate(self, nbytes: int) -> HostBuffer:
        """Memory at a multiple of 16 bytes, all zeros; no page comes after its last 16 bytes."""
        whole = -(-(nbytes + _EDGE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        room = np.frombuffer(mmap.mmap(-1, whole + mmap.PAGESIZE), np.uint8)
        if _libc.mprotect(room.ctypes.data + whole, mmap.PAGESIZE, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        start = (whole - nbytes) // 16 * 16
        room[:start] = room[start + nbytes : whole] = _EDGE
        self._edges += [room[:start], room[start + nbytes : whole]]
        return HostBuffer(room.ctypes.data + start, nbytes, room)

    def free(self, buffer: HostBuffer) -> None:
        """Nothing to do: nobody holds it any more."""

    def function(self, name: str) -> Any:
        """See Gpu."""
        return self._module.get_function(name)

    def stream(self) -> HostStream:
        """See Gpu."""
        return HostStream(self)

    def check_edges(self) -> None:
        """Fails if anything was written beside a buffer."""
        for edge in self._edges:
            assert (edge == _EDGE).all(), "written beside a buffer"


class HostStream:
    """See `kvstore.cuda.base.Stream`."""

    def __init__(self, gpu: HostGpu) -> None:
        self.gpu = gpu
        self.launched: list[str] = []

    def copy(self, target: HostBuffer | memoryview, source: HostBuffer | memoryview) -> None:
        """See Stream."""
        if target.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes} bytes into {target.nbytes}")
        ctypes.memmove(_address(target), _address(source), target.nbytes)

    def launch(self, name: str, blocks: int, threads: int, /, *args: Any) -> None:
        """See Stream."""
        self.launched.append(name)
        self.gpu.function(name)((blocks,), (threads,), args)

    def scratch(self, nbytes: int, /) -> HostBuffer:
        """See Stream."""
        buffer = self.gpu.allocate(nbytes)
        ctypes.memset(buffer.address, 0xC3, nbytes)
        return buffer

    def wait(self) -> None:
        """See Stream."""
        self.gpu.check_edges()


def _address(of: HostBuffer | memoryview) -> int:
    return of.address if isinstance(of, HostBuffer) else np.frombuffer(of, np.uint8).ctypes.data
