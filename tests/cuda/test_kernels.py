"""Kernels against what they stand for, emulated on the CPU: arithmetic and indexing, no GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cuda import kernels
from kvstore.cuda.kernels import checksums, copy_pieces, spans
from tests.cuda.checks import (
    LENGTHS,
    SEEDS,
    UNEVEN,
    UNEVEN_ROOM,
    back,
    check_a_flipped_bit,
    check_checksums,
    check_pieces,
    noise,
    on,
    pages,
)
from tests.cuda.emulate import Module
from tests.cuda.host import HostGpu


@pytest.fixture
def gpu() -> HostGpu:
    return HostGpu()


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_checksums_are_those_of_xxhash(gpu: HostGpu, nbytes: int) -> None:
    check_checksums(gpu, [noise(nbytes)] * len(SEEDS), SEEDS)


@given(st.integers(1, 70_000), st.integers(0, 2**64 - 1))
def test_of_any_length_under_any_seed(nbytes: int, seed: int) -> None:
    check_checksums(HostGpu(), [noise(nbytes, seed)], [seed])


def test_blocks_of_many_lengths_at_once(gpu: HostGpu) -> None:
    lengths = [LENGTHS[i * 7 % len(LENGTHS)] for i in range(3 * len(LENGTHS))]
    check_checksums(
        gpu, [noise(n, i) for i, n in enumerate(lengths)], [i * SEEDS[2] % 2**64 for i in range(len(lengths))]
    )


@pytest.mark.parametrize(("rows", "steps"), [(1, 63), (14, 32), (7 * 16, 4), (7 * 63, 1), (1000, 1)])
def test_rows_are_summed_some_at_a_time(
    gpu: HostGpu, monkeypatch: pytest.MonkeyPatch, rows: int, steps: int
) -> None:
    """Of blocks that end at, before and behind the last row of a launch, and of two without a full row."""
    monkeypatch.setattr(kernels, "ROWS", rows)
    stream = gpu.stream()
    datas = [noise(n, n) for n in (16 << 10, 300, 64 << 10, (16 << 10) + 1, 5000, (32 << 10) + 1, 1024)]
    checksums(stream, *spans([on(gpu, data) for data in datas]), range(7))
    check_checksums(gpu, datas, range(7))
    assert stream.launched == ["xxh3_rows", "xxh3_chain"] * steps


def test_blocks_without_a_full_row(gpu: HostGpu) -> None:
    check_checksums(gpu, [noise(n, n) for n in (241, 1024, 300)], range(3))


@given(st.lists(st.integers(241, 9000), min_size=1, max_size=40), st.integers(1, 60))
def test_blocks_of_any_lengths_in_any_steps(lengths: list[int], rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ROWS", rows)
        check_checksums(HostGpu(), [noise(n, i) for i, n in enumerate(lengths)], range(len(lengths)))


def test_no_blocks_and_too_few_seeds(gpu: HostGpu) -> None:
    assert checksums(gpu.stream(), *spans([]), []).tolist() == []
    with pytest.raises(ValueError, match="1 addresses, 1 lengths, 0 seeds"):
        checksums(gpu.stream(), *spans([gpu.allocate(1)]), [])


@pytest.mark.parametrize("nbytes", [1, 240, 241, 1024, 1025, 66_000])
def test_a_flipped_bit_shows(gpu: HostGpu, nbytes: int) -> None:
    check_a_flipped_bit(gpu, nbytes)


def test_pieces_with_odd_ends(gpu: HostGpu) -> None:
    check_pieces(gpu, UNEVEN, UNEVEN_ROOM)


@pytest.mark.parametrize("page_bytes", [4 << 10, 24 << 10, 64 << 10])
def test_pages_are_scattered(gpu: HostGpu, page_bytes: int) -> None:
    check_pieces(gpu, pages(page_bytes, 37), 37 * page_bytes)


def test_pieces_of_one_odd_length(gpu: HostGpu) -> None:
    check_pieces(gpu, [(i * 20_000 + i % 3, i * 19_999, 17_001) for i in range(5)], 100_000)


def test_no_pieces(gpu: HostGpu) -> None:
    stream = gpu.stream()
    none = np.zeros(0, np.uint64)
    copy_pieces(stream, none, none, none)
    copy_pieces(stream, np.full(3, 64, np.uint64), np.full(3, 64, np.uint64), np.zeros(3, np.uint64))
    assert stream.launched == []
    with pytest.raises(ValueError, match="0 targets, 0 sources, 1 lengths"):
        copy_pieces(stream, none, none, np.ones(1, np.uint64))


@st.composite
def _pieces(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Pieces that don't overlap where they go."""
    at, pieces = 0, []
    for gap, skip, nbytes in draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20_000)), max_size=8)
    ):
        pieces.append((at + gap, at + skip, nbytes))
        at += max(gap, skip) + nbytes
    return pieces


@given(_pieces())
def test_any_pieces(pieces: list[tuple[int, int, int]]) -> None:
    check_pieces(HostGpu(), pieces, 8 * 20_040)


def test_the_emulation_has_the_interface_of_cupy() -> None:
    code = """
    __global__ void add(const unsigned *from, unsigned short more, unsigned long long n, unsigned *to)
    {
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n)
            to[i] = from[i] + more;
    }
    """
    add = Module(code).get_function("add")
    gpu = HostGpu()
    source, target = on(gpu, np.arange(10, dtype=np.uint32)), gpu.allocate(40)
    add((2,), (8,), (source, np.uint16(3), 9, target), stream=None)
    assert back(gpu, target).view(np.uint32).tolist() == [*range(3, 12), 0]
    with pytest.raises(TypeError, match="add takes 4 arguments, not 3"):
        add((1,), (1,), (source, 1, target))
    with pytest.raises(ValueError, match=r"add is launched with \(0,\)"):
        add((0,), (1,), (source, 1, 1, target))
    with pytest.raises(ValueError, match="no kernel sub"):
        Module(code).get_function("sub")
    with pytest.raises(ValueError, match="gcc refuses"):
        Module(code.replace("more;", "less;"))
