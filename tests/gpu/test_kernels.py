"""Kernels on a real device, as its compiler makes them: bytes are those of xxhash, numpy, FP8 on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore import Fp8, Layout
from tests.cuda.checks import (
    LENGTHS,
    SEEDS,
    UNEVEN,
    UNEVEN_ROOM,
    check_a_flipped_bit,
    check_checksums,
    check_fp8,
    check_pieces,
    noise,
    pages,
)

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [*LENGTHS, 64 * MIB - 1, 64 * MIB])
def test_checksums_are_those_of_xxhash(gpu: Any, nbytes: int) -> None:
    check_checksums(gpu, [noise(nbytes)] * len(SEEDS), SEEDS)


def test_blocks_of_many_lengths_at_once(gpu: Any) -> None:
    lengths = np.random.default_rng(5).integers(1, 200_000, 300)
    check_checksums(gpu, [noise(int(n), i) for i, n in enumerate(lengths)], range(300))


def test_more_than_a_gib_at_once(gpu: Any) -> None:
    check_checksums(gpu, [noise(2 * MIB, i) for i in range(600)], [i * SEEDS[2] % 2**64 for i in range(600)])


@pytest.mark.parametrize("nbytes", [1, 240, 241, 1025, 2 * MIB])
def test_a_flipped_bit_shows(gpu: Any, nbytes: int) -> None:
    check_a_flipped_bit(gpu, nbytes)


def test_pieces_with_odd_ends(gpu: Any) -> None:
    check_pieces(gpu, UNEVEN, UNEVEN_ROOM)


@pytest.mark.parametrize("page_bytes", [4 << 10, 24 << 10, 64 << 10])
def test_pages_are_scattered(gpu: Any, page_bytes: int) -> None:
    check_pieces(gpu, pages(page_bytes, 4000), 4000 * page_bytes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_fp8_is_the_same_as_on_the_cpu(gpu: Any, dtype: str, order: Any) -> None:
    layout = Layout("m", 2 * 8 * 2 * 16 * 8 * 128, dtype=dtype, block_tokens=16)
    # Any pattern there is, infinities and NaNs too; then what is like KV, of all magnitudes.
    wild = noise(4 * layout.block_bytes).reshape(4, -1)
    rng = np.random.default_rng(6)
    values = rng.standard_normal(wild.size // 2, np.float32) * np.exp2(rng.integers(-14, 8, wild.size // 2))
    upper = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tame = upper if dtype == "bfloat16" else values.astype(np.float16)
    check_fp8(gpu, Fp8(layout, 8, 128, order), np.concatenate([wild, tame.view(np.uint8).reshape(4, -1)]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fp8_of_every_pattern_under_many_scales(gpu: Any, dtype: str) -> None:
    fp8 = Fp8(Layout("m", 2 * 65544, dtype=dtype, block_tokens=1), 1, 65544)
    limit = 0x7F80 if dtype == "bfloat16" else 0x7C00
    blocks = np.zeros((64, 65544), np.uint16)
    for block, outlier in zip(blocks, np.linspace(0, limit - 1, 64).astype(np.uint16), strict=True):
        block[:65536] = np.arange(65536)
        block[:65536][(block[:65536] & 0x7FFF) > outlier] = 0
        block[-1] = outlier
    check_fp8(gpu, fp8, blocks.view(np.uint8))
