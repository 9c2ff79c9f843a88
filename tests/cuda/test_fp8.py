"""FP8 of KV blocks: how far off, the same bytes on CPU and (emulated) GPU, and through a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore import Client, Fp8, Layout
from kvstore.errors import MisuseError
from kvstore.fp8 import Order
from kvstore.lab.local_daemon import LocalDaemon
from tests.cuda.checks import Array, check_fp8
from tests.cuda.host import HostGpu
from tests.daemons import SMALL, names, new_layout

TOKENS, HEADS, DIM = 4, 3, 8
OUTER = 2  # keys and values of one layer
PLAIN_BYTES = 2 * OUTER * TOKENS * HEADS * DIM

DTYPES = ("bfloat16", "float16")
ORDERS: tuple[Order, ...] = ("NHD", "HND")


def make(dtype: str, order: Order = "NHD") -> Fp8:
    plain = Layout("m", PLAIN_BYTES, dtype=dtype, block_tokens=TOKENS)
    return Fp8(plain, HEADS, DIM, order)


def grouped(array: Array, order: str) -> Array:
    """(groups, values of a group) of a block's values."""
    if order == "NHD":
        array = array.reshape(-1, TOKENS, HEADS, DIM).swapaxes(1, 2)
    return array.reshape(OUTER * HEADS, TOKENS * DIM)


def numbers(patterns: Array, dtype: str) -> Array:
    """What 16-bit patterns stand for, as float64."""
    if dtype == "float16":
        return patterns.view(np.float16).astype(np.float64)
    return (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def round_trip(fp8: Fp8, patterns: Array) -> tuple[Array, Array]:
    """(scales, decoded patterns) of one block; the emulated kernels agree on every byte."""
    plain = patterns.view(np.uint8).reshape(1, -1)
    stored = np.full((1, fp8.layout.block_bytes), 0xEE, np.uint8)
    fp8.encode(plain, stored)
    decoded = np.full_like(plain, 0xEE)
    fp8.decode(stored, decoded)
    check_fp8(HostGpu(), fp8, plain)
    return stored[0, : 4 * OUTER * HEADS].view("<f4"), decoded[0].view(np.uint16)


def check(fp8: Fp8, dtype: str, order: Order, patterns: Array) -> None:
    """What kvstore.fp8 promises: the bound, NaN for what is not finite, signs, the least scale."""
    scales, decoded = round_trip(fp8, patterns)
    with np.errstate(over="ignore", invalid="ignore"):
        before, after = (grouped(numbers(p, dtype), order) for p in (patterns, decoded))
    finite = np.isfinite(before)
    assert np.isnan(after[~finite]).all()
    assert np.isfinite(after[finite]).all()
    before[~finite] = after[~finite] = 0
    bound = np.maximum(np.abs(before) / 16, scales[:, None].astype(np.float64) / 1024)
    assert (np.abs(after - before) <= bound).all()
    assert np.array_equal(patterns & 0x8000, decoded & 0x8000)
    # A scale is no larger than it has to be, so that little values beside a large one stay what they can.
    largest = np.abs(before).max(axis=1)
    least = 2.0**-124 if dtype == "bfloat16" else 2.0**-15
    expected = 2.0 ** np.ceil(np.log2(np.maximum(largest / 448, least)))
    assert np.array_equal(scales.astype(np.float64), np.maximum(expected, least))


NASTY = [0, 1, 2, 0x7F, 0x80, 0x3FF, 0x400, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0x7C01]
NASTY += [0x7F7F, 0x7F80, 0x7FC0, 0x7FFF]
"""Zero, the least numbers, one, the largest, infinity and NaN of either type."""
_pattern = st.builds(
    lambda value, sign: value | sign << 15,
    st.one_of(st.sampled_from(NASTY), st.integers(0, 0x7FFF), st.integers(0x3F00, 0x4080)),
    st.integers(0, 1),
)


@st.composite
def _blocks(draw: st.DrawFn) -> Array:
    """A block of few different values, some of them changed to anything: an outlier in a head, all equal."""
    some = np.array(draw(st.lists(_pattern, min_size=1, max_size=12)), np.uint16)
    patterns = np.resize(some, PLAIN_BYTES // 2)
    for at, value in draw(st.lists(st.tuples(st.integers(0, PLAIN_BYTES // 2 - 1), _pattern), max_size=6)):
        patterns[at] = value
    return patterns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@given(patterns=_blocks())
@example(patterns=np.full(PLAIN_BYTES // 2, 0x7F7F, np.uint16))
@example(patterns=np.full(PLAIN_BYTES // 2, 0x7BFF, np.uint16))
@example(patterns=np.zeros(PLAIN_BYTES // 2, np.uint16))
def test_no_value_is_further_off_than_promised(dtype: str, order: Order, patterns: Array) -> None:
    check(make(dtype, order), dtype, order, patterns)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_under_many_scales(dtype: str) -> None:
    """All 65,536, a block of one group each beside an outlier that sets the scale."""
    fp8 = Fp8(Layout("m", 2 * 65544, dtype=dtype, block_tokens=1), 1, 65544)
    limit = 0x7F80 if dtype == "bfloat16" else 0x7C00
    for outlier in [0, 1, 0x80, 0x3C00, 0x3F81, limit // 2 + 77, limit - 0x81, limit - 1]:
        patterns = np.zeros(65544, np.uint16)
        patterns[:65536] = np.arange(65536)
        patterns[:65536][(patterns[:65536] & 0x7FFF) > outlier] = 0
        patterns[-1] = outlier
        plain = patterns.view(np.uint8).reshape(1, -1)
        stored = np.zeros((1, fp8.layout.block_bytes), np.uint8)
        fp8.encode(plain, stored)
        decoded = np.zeros_like(plain)
        fp8.decode(stored, decoded)
        check_fp8(HostGpu(), fp8, plain)
        before, after = numbers(patterns, dtype), numbers(decoded[0].view(np.uint16), dtype)
        scale = float(stored[0, :4].view("<f4")[0])
        largest = 240 if scale in (2.0**120, 2.0**8) else 448
        assert np.array_equal(after, nearest(before / scale, largest) * scale)


def nearest(values: Array, limit: float) -> Array:
    """E4M3's number that is nearest, of two the one with an even last bit: by looking at all of them."""
    codes = np.arange(127)
    table = np.where(codes < 8, codes * 2.0**-9, (1 + codes % 8 / 8) * 2.0 ** (codes // 8 - 7.0))
    magnitude = np.minimum(np.abs(values), limit)
    above = np.minimum(np.searchsorted(table, magnitude), 126)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.asarray(np.copysign(table[code], values))


def test_several_blocks_at_once_in_layers_that_are_more_than_a_step() -> None:
    plain = Layout("m", 2 * 5 * 2 * 16 * 4 * 128, dtype="bfloat16", block_tokens=16)
    rng = np.random.default_rng(1)
    values = rng.standard_normal((3, 5 * 2 * 16 * 4 * 128), np.float32)
    blocks = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    for order in ORDERS:
        fp8 = Fp8(plain, 4, 128, order)
        check_fp8(HostGpu(), fp8, blocks)
        stored = np.zeros((3, fp8.layout.block_bytes), np.uint8)
        fp8.encode(blocks, stored)
        for i in range(3):
            one = np.zeros((1, fp8.layout.block_bytes), np.uint8)
            fp8.encode(blocks[i : i + 1], one)
            assert np.array_equal(one[0], stored[i])


def test_an_outlier_is_its_own_heads_affair() -> None:
    for order, axes in (("NHD", (OUTER, TOKENS, HEADS, DIM)), ("HND", (OUTER, HEADS, TOKENS, DIM))):
        fp8 = make("float16", order)
        patterns = np.full(PLAIN_BYTES // 2, 0x3C00, np.uint16)
        patterns.reshape(axes)[(1, 2, 1, 3) if order == "NHD" else (1, 1, 2, 3)] = 0x7000  # 8192
        scales, decoded = round_trip(fp8, patterns)
        expected = np.full((OUTER, HEADS), 2.0**-8)
        expected[1, 1] = 2.0**5
        assert np.array_equal(scales.reshape(OUTER, HEADS), expected)
        assert np.array_equal(decoded, patterns), "powers of two"


def test_the_stored_layout_names_its_encoding() -> None:
    plain = Layout("m", PLAIN_BYTES, dtype="bfloat16", block_tokens=TOKENS, kv_layout="layers 2")
    stored = Fp8(plain, HEADS, DIM, "HND").layout
    assert stored == replace(
        plain,
        dtype="fp8_e4m3 of bfloat16",
        block_bytes=4 * OUTER * HEADS + PLAIN_BYTES // 2,
        kv_layout="layers 2; fp8 HND, 3 heads, dim 8",
    )
    others = [Fp8(plain, heads, dim, order).layout for heads, dim in ((1, 24), (3, 8)) for order in ORDERS]
    assert len({layout.fingerprint() for layout in (plain, *others)}) == 5


def test_impossible_block_shapes_are_refused() -> None:
    plain = Layout("m", PLAIN_BYTES, dtype="bfloat16", block_tokens=TOKENS)
    for layout, shape, why in [
        (replace(plain, dtype="float32"), (HEADS, DIM), "dtype 'float32'"),
        (replace(plain, block_tokens=0), (HEADS, DIM), "0 tokens"),
        (plain, (HEADS, 12), "dim 12"),
        (plain, (0, DIM), "0 heads"),
        (plain, (5, DIM), "384 bytes"),
        (plain, (HEADS, DIM, "NDH"), "order 'NDH'"),
    ]:
        with pytest.raises(MisuseError, match=why):
            Fp8(layout, *shape)  # type: ignore[arg-type]
    fp8 = make("bfloat16")
    stored, blocks = np.zeros((2, fp8.layout.block_bytes), np.uint8), np.zeros((2, PLAIN_BYTES), np.uint8)
    wide = blocks.view(np.uint16)
    for one, other in [(blocks[:1], stored), (stored, blocks), (wide, stored), (blocks[0], stored)]:
        with pytest.raises(MisuseError):
            fp8.encode(one, other)
        with pytest.raises(MisuseError):
            fp8.decode(other, one)
    apart = np.zeros((2, 2 * fp8.layout.block_bytes), np.uint8)[:, ::2]
    with pytest.raises(MisuseError, match="lie apart"):
        fp8.encode(blocks, apart)
    gpu = HostGpu()
    block, code = gpu.allocate(PLAIN_BYTES), gpu.allocate(fp8.layout.block_bytes)
    for sources, targets in [([block], []), ([code], [block]), ([block], [code.part(0, code.nbytes - 1)])]:
        with pytest.raises(MisuseError):
            fp8.encode_on(gpu.stream(), sources, targets)
        with pytest.raises(MisuseError):
            fp8.decode_on(gpu.stream(), targets, sources)
    odd = gpu.allocate(PLAIN_BYTES + 8).part(8, PLAIN_BYTES + 8)
    with pytest.raises(MisuseError, match="multiple of 16"):
        fp8.encode_on(gpu.stream(), [odd], [code])


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(SMALL) as served:
        yield served


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_go_through_a_daemon_and_plain_ones_never_meet_them(daemon: LocalDaemon, dtype: str) -> None:
    plain = replace(new_layout(2 * 2 * 2 * 16 * 4 * 32), dtype=dtype, block_tokens=16)
    fp8, keys = Fp8(plain, 4, 32), names(5)
    values = np.random.default_rng(2).standard_normal((5, plain.block_bytes // 2), np.float32)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    blocks = (upper if dtype == "bfloat16" else values.astype(np.float16)).view(np.uint8)
    stored = np.empty((5, fp8.layout.block_bytes), np.uint8)
    fp8.encode(blocks, stored)
    with Client(daemon.url, deadline_s=5.0, strict=True) as client:
        assert client.namespace(fp8.layout).put(keys, stored).stored == 5
        fetched, decoded = np.zeros_like(stored), np.zeros_like(blocks)
        assert client.namespace(fp8.layout).get(keys, fetched) == 5
        fp8.decode(fetched, decoded)
        before, after = (numbers(b.view(np.uint16), dtype) for b in (blocks, decoded))
        assert (np.abs(after - before) <= np.maximum(np.abs(before) / 16, 2.0**-6 / 1024)).all()
        assert client.namespace(plain).lookup(keys) == 0
        assert client.namespace(plain).get(keys, np.zeros_like(blocks)) == 0
