"""What kernels need of a device: the seam under which cupy's device and a C compiler's emulation fit."""

from __future__ import annotations

from typing import Any, Protocol


class Buffer(Protocol):
    """A run of device memory."""

    @property
    def address(self) -> int:
        """Its first byte, on the device."""

    @property
    def nbytes(self) -> int:
        """How long it is."""

    def part(self, start: int, stop: int) -> Buffer:
        """Some of its bytes."""


class Stream(Protocol):
    """Work that a device does in order. Its errors come out of any method, those of `wait` at the latest."""

    def copy(self, target: Any, source: Any) -> None:
        """Copies between `Buffer`s and memoryviews of the same size, which the caller keeps until `wait`."""

    def launch(self, name: str, blocks: int, threads: int, /, *args: Any) -> None:
        """Starts a kernel of kernels.cu: `int` is 64 bits wide, numpy scalars as wide as they are, and
        a `Buffer` is its address.
        """

    def scratch(self, nbytes: int, /) -> Buffer:
        """Device memory that is the caller's until the next `wait`, at a multiple of 16 bytes."""

    def wait(self) -> None:
        """Returns when all of it is done."""
