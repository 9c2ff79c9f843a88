"""A real device, or an end that says why there is none. Run by `make test-gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.cuda import device


def pytest_sessionstart() -> None:
    """Without a GPU nothing here means anything: better no run than one of skips."""
    if why := device.why_not():
        pytest.exit(f"tests/gpu need a GPU, and there is none to use: {why}", returncode=2)


class Lent:
    """A device whose memory is given back when the test is over."""

    def __init__(self, gpu: device.Gpu) -> None:
        self.gpu = gpu
        self._buffers: list[device.DeviceBuffer] = []

    def allocate(self, nbytes: int) -> device.DeviceBuffer:
        """See Gpu."""
        self._buffers.append(self.gpu.allocate(nbytes))
        return self._buffers[-1]

    def stream(self) -> Any:
        """See Gpu."""
        return self.gpu.stream()

    def give_back(self) -> None:
        """Frees what was allocated."""
        while self._buffers:
            self.gpu.free(self._buffers.pop())


@pytest.fixture
def gpu() -> Iterator[Lent]:
    """The first device that this process sees."""
    lent = Lent(device.Gpu.open(device.uuids()[0]))
    yield lent
    lent.give_back()
