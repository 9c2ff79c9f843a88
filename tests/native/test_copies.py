"""One contract for both implementations of copies and checksums: the same bytes, sums and errors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.native import PIECE, pieces, portable, whole
from tests.programs import skip_for_cpu

COPIES = ("copy", "copy_in", "copy_out")
LENGTHS = (
    *range(0, 10), 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 143, 144, 239, 240, 241, 255, 256, 257, 511, 512,
    1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 3072, 3105, 4096, 65536, 65537, 300_000,
    (1 << 20) + 63,
)  # fmt: skip


try:
    from kvstore.native import _native
except ImportError:
    _native = None  # type: ignore[assignment]

SETS = range(4)
"""Instruction sets, from this machine's best one to plain C: x86 has up to four, Arm two."""


@pytest.fixture(scope="module", params=["portable", *SETS])
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One implementation."""
    if request.param == "portable":
        yield portable
        return
    if _native is None:
        pytest.skip("the C extension was not built: no compiler, or no Python.h")
    try:
        _native.choose(request.param)
    except ValueError as error:
        skip_for_cpu(str(error))
    copies = {"copy_in": _native.copy_and_sum, "copy_out": _native.copy_and_sum}
    yield SimpleNamespace(copy=_native.copy, sums=_native.sums, checksum=_native.checksum, **copies)
    _native.choose(0)


def noise(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_those_of_xxhash(native: Any, length: int) -> None:
    data = noise(length)
    for seed in (0, 1, 0x13D7ED404712886A, (1 << 64) - 1):
        table = whole([length], seed)
        native.sums([data], table)
        assert int(table["sum"][0]) == native.checksum(data, seed) == xxh3_64_intdigest(data, seed)


@pytest.mark.parametrize("call", COPIES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_batch_delivers_bytes_and_sums(native: Any, call: str, length: int) -> None:
    sources = [noise(length, i) for i in range(3)]
    targets = [bytearray(length) for _ in sources]
    table = whole([length] * 3, [5, 6, 7])
    getattr(native, call)(targets, sources, table)
    assert targets == sources
    sums = [xxh3_64_intdigest(data, seed) for data, seed in zip(sources, (5, 6, 7), strict=True)]
    assert table["sum"].tolist() == ([0, 0, 0] if call == "copy" else sums)


@pytest.mark.parametrize("call", ["copy_in", "copy_out"])
@given(parts=st.lists(st.integers(0, 5000), min_size=1, max_size=8), seed=st.integers(0, (1 << 64) - 1))
def test_a_block_of_pieces_has_the_sum_of_its_bytes_in_order(
    native: Any, call: str, parts: list[int], seed: int
) -> None:
    sources = [noise(part, i) for i, part in enumerate(parts)]
    joined, table = b"".join(sources), pieces(len(parts))
    table["source"], table["length"], table["more"] = range(len(parts)), parts, 1
    table["target_offset"] = np.cumsum([0, *parts[:-1]])
    table["more"][-1], table["seed"][0] = 0, seed
    target = bytearray(len(joined))
    getattr(native, call)([target], sources, table)
    assert (target, int(table["sum"][-1])) == (joined, xxh3_64_intdigest(joined, seed))


@pytest.mark.parametrize("call", COPIES)
@given(st.data())
def test_any_batch_gives_what_the_oracle_gives(native: Any, call: str, data: st.DataObject) -> None:
    draw = data.draw
    size = draw(st.sampled_from([1, 64, 4096, 20_000]))
    rows = draw(
        st.lists(st.tuples(*[st.integers(0, size)] * 3, st.booleans(), st.integers(0, 99)), max_size=6)
    )
    source, target = noise(size), bytearray(noise(size, 2))
    expected, table, block, seed = bytearray(target), pieces(len(rows)), b"", None
    for row, (start, at, length, more, number) in zip(table, rows, strict=True):
        row["source_offset"], row["target_offset"] = start, at
        row["length"] = min(length, size - start, size - at)
        row["more"], row["seed"] = more, number
    if rows:
        table["more"][-1] = 0
    sums = []
    for row in table:
        start, at, length = int(row["source_offset"]), int(row["target_offset"]), int(row["length"])
        expected[at : at + length] = source[start : start + length]
        block, seed = block + source[start : start + length], int(row["seed"]) if seed is None else seed
        done = not row["more"] and call != "copy"
        sums.append(xxh3_64_intdigest(block, seed) if done else 0)
        if not row["more"]:
            block, seed = b"", None
    getattr(native, call)([target], [source], table)
    assert (target, table["sum"].tolist()) == (expected, sums)


@pytest.mark.parametrize("call", COPIES)
@pytest.mark.parametrize("skew", [(0, 0), (0, 1), (3, 0), (5, 16), (0, 48), (8, 8), (63, 33)])
@pytest.mark.parametrize("length", [100_000, 1 << 20, (1 << 20) - 37, (1 << 20) + 1024 + 5])
def test_addresses_of_any_alignment(native: Any, call: str, skew: tuple[int, int], length: int) -> None:
    data = np.frombuffer(noise(length), np.uint8)
    source, target = (_aligned(length + 128)[at : at + length + 64] for at in skew)
    source[:length], target[:] = data, 77
    table = whole([length], 9)
    getattr(native, call)([target], [source], table)
    assert np.array_equal(target[:length], data)
    assert (target[length:] == 77).all()
    assert int(table["sum"][0]) == (0 if call == "copy" else xxh3_64_intdigest(data, 9))


def _aligned(nbytes: int) -> Any:
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes]


def test_a_changed_byte_changes_the_sum_of_its_block_alone(native: Any) -> None:
    sources = [bytearray(noise(70_000, i)) for i in range(4)]
    good = whole([70_000] * 4, range(4))
    native.sums(sources, good)
    for place in (0, 1, 1023, 1024, 69_999 - 64, 69_999):
        sources[2][place] ^= 1
        table, targets = whole([70_000] * 4, range(4)), [bytearray(70_000) for _ in sources]
        native.copy_out(targets, sources, table)
        assert (table["sum"] == good["sum"]).tolist() == [True, True, False, True]
        assert targets == sources
        sources[2][place] ^= 1


@pytest.mark.parametrize("length", [70_000, (1 << 20) + 1024 * 5 + 37])
def test_the_sum_of_a_reader_is_that_of_its_copy_while_others_write(native: Any, length: int) -> None:
    """A slot may be lapped by its next writer: the bytes that were delivered must be those of the sum."""
    versions = [np.frombuffer(noise(length, i), np.uint8) for i in range(2)]
    slot, target, torn = versions[0].copy(), np.zeros(length, np.uint8), 0
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            for version in versions:
                np.copyto(slot, version)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until = time.monotonic() + 20
        while torn < 20 and time.monotonic() < until:
            table = whole([length], 3)
            native.copy_out([target], [slot], table)
            assert int(table["sum"][0]) == xxh3_64_intdigest(target, 3)
            torn += not any(np.array_equal(target, version) for version in versions)
    finally:
        ended.set()
        writer.join()
    assert torn


BAD = {
    "a source out of bounds": {"source_offset": 1},
    "a target out of bounds": {"target_offset": 1},
    "an offset beyond 64 bits": {"source_offset": (1 << 64) - 1},
    "a length beyond 64 bits": {"length": (1 << 64) - 1},
    "no such source": {"source": 2},
    "no such target": {"target": 2},
    "no end": {"more": 1},
}


@pytest.mark.parametrize("call", COPIES)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_piece_is_an_error_and_nothing_is_copied(native: Any, call: str, name: str) -> None:
    sources, targets = [noise(4096, 1), noise(4096, 2)], [bytearray(4096), bytearray(4096)]
    table = whole([4096, 4096])
    for field, value in BAD[name].items():
        table[field][1] = value
    with pytest.raises(ValueError, match="piece"):
        getattr(native, call)(targets, sources, table)
    assert targets == [bytes(4096)] * 2


@pytest.mark.parametrize("call", COPIES)
@pytest.mark.parametrize("shift", [0, 1, 63, 4095])
def test_source_and_target_that_overlap_are_an_error(native: Any, call: str, shift: int) -> None:
    memory = bytearray(noise(8192))
    before, view = bytes(memory), memoryview(memory)
    for a, b in ((view[shift : shift + 4096], view[:4096]), (view[:4096], view[shift : shift + 4096])):
        with pytest.raises(ValueError, match="piece 0: source and target overlap"):
            getattr(native, call)([a], [b], whole([4096]))
    assert memory == before
    getattr(native, call)([view[4096:]], [view[:4096]], whole([4096]))
    assert view[4096:] == before[:4096]


@pytest.mark.parametrize("call", COPIES)
def test_unsuitable_buffers_are_an_error(native: Any, call: str) -> None:
    copy, table = getattr(native, call), whole([8])
    strided, fixed = np.zeros(16, np.uint8)[::2], np.zeros(8, np.uint8)
    for targets, sources in (([bytes(8)], [bytes(8)]), ([strided], [bytes(8)]), ([fixed], [strided])):
        with pytest.raises((BufferError, ValueError)):
            copy(targets, sources, table)
    with pytest.raises(TypeError):
        copy([fixed], ["text"], table)
    with pytest.raises(ValueError, match="table"):
        copy([fixed], [bytes(8)], bytearray(PIECE.itemsize + 1))
    with pytest.raises((BufferError, ValueError)):
        copy([fixed], [bytes(8)], table.tobytes())
    assert not fixed.any()


def test_an_empty_batch_does_nothing(native: Any) -> None:
    for call in COPIES:
        getattr(native, call)([], [], pieces(0))
    native.sums([], pieces(0))


def _implementation(**env: str) -> str:
    command = [sys.executable, "-c", "from kvstore import native; print(native.IMPLEMENTATION)"]
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_the_environment_turns_the_extension_off() -> None:
    assert _implementation(KVSTORE_NATIVE="0") == "numpy and xxhash"
    if _native is not None:
        assert _implementation(KVSTORE_NATIVE="1").startswith("native, ")
