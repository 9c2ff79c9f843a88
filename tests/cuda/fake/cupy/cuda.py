"""Streams, and memory that cupy does not own."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy

from cupy import runtime

__all__ = ["MemoryPointer", "Stream", "UnownedMemory", "runtime"]


class Stream:
    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "it would wait for every other stream"
        self.ptr = runtime.new_stream()

    def __del__(self) -> None:
        runtime.end_stream(self.ptr)


@dataclass
class UnownedMemory:
    ptr: int
    size: int
    owner: Any
    device_id: int

    def bytes(self) -> Any:
        return numpy.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.ptr))


@dataclass
class MemoryPointer:
    mem: UnownedMemory
    offset: int
