"""What holds of the kernels on any device: run under the emulation in tests/cuda, on a GPU in tests/gpu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore import Fp8
from kvstore.cuda.kernels import checksums, copy_pieces, spans

LENGTHS = [1, 16, 128, 129, 240, 241, 255, 256, 1023, 1024, 1025, 1088, 1089, 17 << 10, (17 << 10) + 1]
LENGTHS += [(64 << 10) - 1, 64 << 10, (64 << 10) + 1, 2 << 20]
SEEDS = [0, 1, 0x9E3779B97F4A7C15, 2**64 - 1]

Array = np.ndarray[Any, Any]


def noise(nbytes: int, seed: int = 1) -> Array:
    """Bytes that are told apart."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def on(gpu: Any, data: Array) -> Any:
    """A buffer of its own that holds these bytes."""
    buffer, stream = gpu.allocate(data.nbytes), gpu.stream()
    stream.copy(buffer, data.view(np.uint8).reshape(-1).data)
    stream.wait()
    return buffer


def back(gpu: Any, buffer: Any) -> Array:
    """What a buffer holds."""
    data, stream = np.empty(buffer.nbytes, np.uint8), gpu.stream()
    stream.copy(data.data, buffer)
    stream.wait()
    return data


def check_checksums(gpu: Any, datas: Sequence[Array], seeds: Sequence[int]) -> None:
    """They are xxhash's, all in one call."""
    sums = checksums(gpu.stream(), *spans([on(gpu, data) for data in datas]), seeds)
    assert sums.tolist() == [xxh3_64_intdigest(d.data, s) for d, s in zip(datas, seeds, strict=True)]


def check_a_flipped_bit(gpu: Any, nbytes: int) -> None:
    """Whichever bit of a block is flipped, the checksum is another."""
    data, stream = noise(nbytes), gpu.stream()
    buffer = on(gpu, data)
    [right] = checksums(stream, *spans([buffer]), [7])
    for at in {0, nbytes // 2, nbytes - 1} | {i * nbytes // 9 for i in range(9)}:
        other = data[at : at + 1] ^ 1 << at % 8
        stream.copy(buffer.part(at, at + 1), other.astype(np.uint8).data)
        [wrong] = checksums(stream, *spans([buffer]), [7])
        assert wrong != right, at
        stream.copy(buffer.part(at, at + 1), data[at : at + 1].data)
    assert checksums(stream, *spans([buffer]), [7])[0] == right


def check_pieces(gpu: Any, pieces: Sequence[tuple[int, int, int]], room: int) -> None:
    """Pieces (target, source, bytes, as offsets) get where they go, and nothing else changes."""
    source, expected = noise(room, 2), noise(room, 3)
    there, here = on(gpu, source), on(gpu, expected)
    targets, sources, nbytes = np.array(pieces, np.uint64).reshape(-1, 3).T
    stream = gpu.stream()
    copy_pieces(stream, targets + np.uint64(here.address), sources + np.uint64(there.address), nbytes)
    stream.wait()
    for target, start, length in pieces:
        expected[target : target + length] = source[start : start + length]
    assert np.array_equal(back(gpu, here), expected)
    assert np.array_equal(back(gpu, there), source)


def pages(page_bytes: int, n: int) -> list[tuple[int, int, int]]:
    """n pages scattered in another order than they come in."""
    order = np.random.default_rng(4).permutation(n)
    return [(int(to) * page_bytes, i * page_bytes, page_bytes) for i, to in enumerate(order)]


UNEVEN = [
    (16, 0, 1), (33, 7, 15), (64, 64, 16), (96, 96, 17), (129, 144, 100), (257, 257, 64), (336, 336, 4095),
    (4500, 4500, 0), (4608, 4608, 16 << 10), (21008, 21008, (16 << 10) + 1), (37408, 37404, (32 << 10) + 3),
    (70192, 70192, (48 << 10) - 1), (120000, 120016, 777),
]  # fmt: skip
"""Odd lengths, ends that are misaligned alone or together, none at all, and those around a chunk's."""
UNEVEN_ROOM = 128 << 10


def check_fp8(gpu: Any, fp8: Fp8, blocks: Array) -> None:
    """The device makes the same bytes of plain blocks as the CPU, and of these again."""
    stored = np.zeros((len(blocks), fp8.layout.block_bytes), np.uint8)
    fp8.encode(blocks, stored)
    decoded = np.zeros_like(blocks)
    fp8.decode(stored, decoded)
    stream = gpu.stream()
    plain = [on(gpu, block) for block in blocks]
    there = [gpu.allocate(fp8.layout.block_bytes) for _ in blocks]
    again = [gpu.allocate(fp8.plain.block_bytes) for _ in blocks]
    fp8.encode_on(stream, plain, there)
    fp8.decode_on(stream, there, again)
    stream.wait()
    for i in range(len(blocks)):
        assert np.array_equal(back(gpu, there[i]), stored[i])
        assert np.array_equal(back(gpu, again[i]), decoded[i])
