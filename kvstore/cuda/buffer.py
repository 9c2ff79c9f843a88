"""A piece of a GPU's memory, named by its address: what a memoryview is for host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvstore.errors import MisuseError

if TYPE_CHECKING:
    from kvstore.cuda.device import Gpu

_DLPACK_CUDA = 2


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBuffer:
    """`nbytes` of `gpu`'s memory from `address` on. `base` is whatever keeps it there."""

    address: int
    nbytes: int
    gpu: Gpu
    base: Any = None

    # What a memoryview says of bytes, so that either passes the same checks.
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
        """Bytes `start` to `stop`. MisuseError if they are not all within."""
        if not 0 <= start <= stop <= self.nbytes:
            raise MisuseError(f"bytes {start} to {stop} of a device buffer of {self.nbytes}")
        return DeviceBuffer(self.address + start, stop - start, self.gpu, self)

    def __getitem__(self, which: slice) -> DeviceBuffer:
        """A part, with bounds clipped as for a memoryview; steps are of one byte."""
        start, stop, step = which.indices(self.nbytes)
        if step != 1:
            raise MisuseError(f"every {step}th byte of a device buffer", "parts are contiguous")
        return self.part(start, max(start, stop))

    @property
    def root(self) -> DeviceBuffer:
        """The allocation that this is a part of."""
        whole = self
        while isinstance(whole.base, DeviceBuffer):
            whole = whole.base
        return whole

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # Stream None: whoever takes it need not wait, the bytes are there.
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
