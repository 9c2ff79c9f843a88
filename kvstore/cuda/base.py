"""Device memory and streams as kernels use them. Implemented by cupy and by an emulation in C for tests."""

from __future__ import annotations

from typing import Any, Protocol


class Buffer(Protocol):
    """A run of device memory."""

    @property
    def address(self) -> int:
        """The address of the first byte, on the device."""

    @property
    def nbytes(self) -> int:
        """The length in bytes."""

    def part(self, start: int, stop: int) -> Buffer:
        """Returns bytes `start` to `stop`."""


class Stream(Protocol):
    """Work that a device does in order. Any method may raise its errors, `wait` at the latest."""

    def copy(self, target: Any, source: Any) -> None:
        """Copies between `Buffer`s and memoryviews of the same size, which the caller keeps until `wait`."""

    def launch(self, name: str, blocks: int, threads: int, /, *args: Any) -> None:
        """Starts a kernel of kernels.cu: `int` is 64 bits wide, numpy scalars as wide as they are, and
        a `Buffer` is its address.
        """

    def scratch(self, nbytes: int, /) -> Buffer:
        """Returns device memory, valid until the next `wait`, at a multiple of 16 bytes."""

    def wait(self) -> None:
        """Returns when all work is done."""
