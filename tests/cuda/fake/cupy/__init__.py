"""A fake of the few calls of cupy that kvstore makes, for control flow only: of GPUs it shows nothing.

Put tests/cuda/fake on PYTHONPATH to have it, in child processes too. "Device memory" is files in /dev/shm,
mapped into the processes that have them, so that a handle given to another process works, and a process that
has one mapped keeps its pages. Work on a stream is done when somebody waits for it, not before. Variables:

    FAKE_CUDA_WORLD     processes with the same one share GPUs
    FAKE_CUDA_GPUS      how many there are (1)
    FAKE_CUDA_BYTES     memory of each (1 GiB)
    FAKE_CUDA_DRIVER    "none", "old", "new" (new)
    FAKE_CUDA_IPC       "no": refused
    FAKE_CUDA_REGISTER  "no": no host memory is pinned; "writable": none that is mapped read-only

`cupy.control.lose` has a GPU fall off while it works.
"""

from __future__ import annotations

from typing import Any

import numpy

from cupy import control, cuda

__all__ = ["RawModule", "control", "cuda", "ndarray", "uint8"]

uint8 = numpy.uint8


class RawModule:
    """Kernels, run by the emulation on the CPU when the stream is waited for."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        from tests.cuda import emulate  # noqa: PLC0415

        self._module = emulate.Module(code, options)

    def get_function(self, name: str) -> Any:
        function = self._module.get_function(name)

        def launch(grid: Any, block: Any, args: Any, *, shared_mem: int = 0, stream: Any = None) -> None:
            def run() -> None:
                function(grid, block, args, shared_mem=shared_mem)

            cuda.runtime.enqueue(0 if stream is None else stream.ptr, run)

        return launch


class ndarray:
    """Only good for DLPack: of the pages themselves, as if they were the host's."""

    def __init__(self, shape: tuple[int], dtype: Any, memory: Any) -> None:
        self.memory, self.shape = memory, shape

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.mem.bytes().__dlpack__()
