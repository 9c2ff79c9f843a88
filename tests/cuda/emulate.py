"""kernels.cu without a GPU: compiled as C by gcc, its threads run one after another on the CPU.

It stands for `cupy.RawModule` and has its calling convention. What it proves is arithmetic and indexing, and
that no vector is misaligned and nothing overflows or shifts too far (the process dies of SIGILL, as a context
would). Not: time, races, what a GPU's compiler makes of the source, or memory that is not there.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

HEADER = Path(__file__).with_name("emulate.h")
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)\s*\{")
_FLAGS = [
    "-std=gnu99", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off",
    "-fno-strict-aliasing", "-Wno-unused-function", "-Wno-int-to-pointer-cast",
    "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error",
]  # fmt: skip
_RUN = """
int run_{name}(const unsigned *grid, const unsigned *block, void **args)
{{
    gridDim = (dim3){{grid[0], grid[1], grid[2]}}, blockDim = (dim3){{block[0], block[1], block[2]}};
    unsigned mode = flush_subnormals();
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
    for (threadIdx.z = 0; threadIdx.z < blockDim.z; threadIdx.z++)
    for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
        {name}({args});
    restore(mode);
    return {count};
}}
const int count_{name} = {count};
"""

Kernel = Callable[..., None]


class Module:
    """Kernels of one source. `options` are a GPU compiler's, and don't matter here."""

    def __init__(self, code: str, options: Sequence[str] = (), **_: Any) -> None:
        parameters = {name: _split(inside) for name, inside in _KERNEL.findall(code)}
        runs = [
            _RUN.format(
                name=name,
                count=len(types),
                args=", ".join(f"*({kind} *)args[{i}]" for i, kind in enumerate(types)),
            )
            for name, types in parameters.items()
        ]
        self._library = ctypes.CDLL(str(_compiled(code + "".join(runs))))

    def get_function(self, name: str) -> Kernel:
        """The kernel of that name: called with grid, block, args."""
        try:
            run = getattr(self._library, f"run_{name}")
        except AttributeError:
            raise ValueError(f"no kernel {name}") from None
        count = ctypes.c_int.in_dll(self._library, f"count_{name}").value

        def kernel(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: Sequence[Any],
            *,
            shared_mem: int = 0,
            stream: Any = None,
        ) -> None:
            if len(args) != count:
                raise TypeError(f"{name} takes {count} arguments, not {len(args)}")
            values = [_value(arg) for arg in args]
            pointers = (ctypes.c_void_p * max(1, count))(*(value.ctypes.data for value in values))
            run(_dim3(grid, name), _dim3(block, name), pointers)

        return kernel


def _split(parameters: str) -> list[str]:
    """The types of a kernel's parameters, in order."""
    inside = " ".join(parameters.split())
    if inside in ("", "void"):
        return []
    return [re.sub(r"\w+$", "", parameter.strip()).strip() for parameter in inside.split(",")]


def _dim3(sizes: tuple[int, ...], name: str) -> Any:
    """Three sizes; ValueError for a launch that every device would refuse."""
    if not all(sizes):
        raise ValueError(f"{name} is launched with {sizes}")
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))


def _value(arg: Any) -> np.ndarray[Any, Any]:
    """One argument, in memory."""
    if isinstance(arg, np.generic):
        return np.array([arg])
    if isinstance(arg, int):
        return np.array([arg], np.int64)
    if hasattr(arg, "__cuda_array_interface__"):
        return np.array([arg.__cuda_array_interface__["data"][0]], np.uint64)
    return np.array([arg.ptr if hasattr(arg, "ptr") else arg.data.ptr], np.uint64)


def _compiled(source: str) -> Path:
    """The library made of a source, kept beside this file's own byte code."""
    digest = blake3((source + HEADER.read_text() + " ".join(_FLAGS)).encode()).hexdigest(16)
    library = Path(__file__).parent / "__pycache__" / f"kernels-{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.c"
        file.write_text(source)
        made = library.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        command = ["gcc", *_FLAGS, "-include", str(HEADER), str(file), "-o", str(made)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise ValueError(f"gcc refuses the kernels:\n{ran.stderr}")
    made.replace(library)
    return library
