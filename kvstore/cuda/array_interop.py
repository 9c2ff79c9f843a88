"""Device arrays of other libraries, such as cupy and torch, as device buffers."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from kvstore.cuda.device import DeviceBuffer, Gpu
from kvstore.cuda.device_ids import uuids
from kvstore.errors import MisuseError


def is_on_device(array: object) -> bool:
    """Returns whether an array declares that it is in a GPU's memory."""
    return not isinstance(array, bytes | bytearray | memoryview | np.ndarray) and hasattr(
        array, "__cuda_array_interface__"
    )


def wrap(array: Any) -> DeviceBuffer:
    """Returns all bytes of a C-contiguous array with `__cuda_array_interface__`, and keeps it alive.

    Waits for the array's stream if it names one; otherwise its computation must have ended. MisuseError for
    an array that is not in GPU memory or not contiguous.
    """
    if isinstance(array, DeviceBuffer):
        return array
    try:
        told = array.__cuda_array_interface__
    except AttributeError:
        raise MisuseError(f"a {type(array).__name__} is in no GPU's memory", "pass a device array") from None
    shape, item = tuple(told["shape"]), np.dtype(told["typestr"]).itemsize
    dense, expected = item, []
    for size in reversed(shape):
        expected.append(dense)
        dense *= size
    strides = told.get("strides")
    if strides is not None and tuple(strides) != tuple(reversed(expected)):
        raise MisuseError(f"a device array of shape {shape} is not one run of bytes", "make it contiguous")
    gpu = _gpu_of(int(told["data"][0]))
    if told.get("stream") is not None:
        gpu.wait_for(int(told["stream"]))
    return DeviceBuffer(int(told["data"][0]), prod(shape) * item, gpu, array)


def _gpu_of(address: int) -> Gpu:
    """Returns the GPU that has an address."""
    import cupy  # noqa: PLC0415

    try:
        ordinal = int(cupy.cuda.runtime.pointerGetAttributes(address).device)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MisuseError(f"no GPU has the address {address:#x}: {error}") from None
    return Gpu.open(uuids()[ordinal])
