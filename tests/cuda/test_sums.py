"""Checksums of device memory in groups, and where the GPU has no memory left for them."""

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

KIB = 1 << 10


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with fake_cuda(each_bytes=64 << 20):
        yield Gpu.open(uuids()[0])


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([], []),
        ([9], [1]),
        ([90], [1]),
        ([5] * 6, [2, 2, 2]),
        ([1, 1, 1, 9, 1, 1], [3, 1, 2]),
        ([10, 1, 5, 5], [1, 2, 1]),
    ],
)
def test_no_group_needs_more_than_there_is(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, lengths: list[int], groups: list[int]
) -> None:
    seen: list[int] = []
    hashed = checksums.hashed

    def spy(stream: Any, addresses: Any, lengths: Any, seeds: Any) -> Any:
        seen.append(len(addresses))
        return hashed(stream, addresses, lengths, seeds)

    monkeypatch.setattr(checksums, "hashed", spy)
    monkeypatch.setattr(checksums, "GROUP_BYTES", 10 * KIB)
    data = [noise(n * KIB, i) for i, n in enumerate(lengths)]
    slots = filled(gpu, *data, slot=96 * KIB)
    blocks = [slot[: len(block)] for slot, block in zip(slots, data, strict=True)]
    got = checksums.checksums(gpu.stream(), *spans(blocks), range(len(blocks)))
    assert got.tolist() == [arena.checksum(memoryview(block), i) for i, block in enumerate(data)]
    assert seen == groups


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
    stream = gpu.stream()
    checksums.reserve(stream)
    before = gpu.memory()
    stream.scratch(checksums.GROUP_BYTES // 16)
    stream.scratch(100 * KIB)
    stream.wait()
    assert gpu.memory() == before
