"""Checksums of device memory, and where the GPU has no memory left for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import arena
from kvstore.cuda import checksums
from kvstore.cuda.device import CudaError, Gpu, uuids
from kvstore.cuda.kernels import spans
from tests.cuda.faking import fake_cuda
from tests.tiers.nvme.test_device_io import filled
from tests.tiers.test_io_engine import noise


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with fake_cuda(each_bytes=64 << 20):
        yield Gpu.open(uuids()[0])


@pytest.mark.parametrize(("code", "computed"), [(2, True), (1, False), (719, False)])
def test_without_memory_the_processor_does_it(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, code: int, computed: bool
) -> None:
    def none_left(*_: Any) -> None:
        raise CudaError("none left", code=code)

    monkeypatch.setattr(checksums, "hashed", none_left)
    blocks = filled(gpu, noise(5000, 1), noise(5000, 2), slot=5000)
    if computed:
        got = checksums.checksums(gpu.stream(), *spans(blocks), [7, 1 << 63])
        want = [arena.checksum(memoryview(noise(5000, i)), s) for i, s in ((1, 7), (2, 1 << 63))]
        assert np.array_equal(got, np.array(want, np.uint64))
    else:
        with pytest.raises(CudaError, match="none left"):
            checksums.checksums(gpu.stream(), *spans(blocks), [7, 8])


def test_reserved_memory_is_used(gpu: Gpu) -> None:
    [block] = filled(gpu, noise(2 << 20), slot=2 << 20)
    stream = gpu.stream()
    checksums.reserve(stream)
    before = gpu.memory()
    sums = checksums.checksums(stream, *spans([block] * 70), [5] * 70)
    assert gpu.memory() == before
    assert set(sums.tolist()) == {arena.checksum(memoryview(noise(2 << 20)), 5)}
