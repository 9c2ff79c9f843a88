"""Stores KV blocks of BF16 or FP16 as FP8 (E4M3) with a scale for each head: half the bytes in every tier.

Each head of each layer's keys or values in a block is a group. Its scale is the least power of two for which
its largest magnitude is at most 448, the largest of E4M3. The scale is at least 2**-124 for BF16 and 2**-15
for FP16, so that the type can hold every code. So only the conversion to E4M3 rounds, to nearest even:

    |decoded - value| <= max(|value| / 16, scale / 1024)

A stored block has its scales (float32, little-endian), then a byte a value in the order of the plain block.
Signs are kept, also of zeros. Infinities and NaN are decoded as NaN, because E4M3 has no infinity. Finite
values stay finite. CPU and GPU compute the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvstore.cuda import kernels
from kvstore.cuda.base import Buffer, Stream
from kvstore.errors import MisuseError
from kvstore.types import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

Order = Literal["NHD", "HND"]
"""The order of axes: (tokens, heads, dim) or (heads, tokens, dim)."""

_DTYPES = {"bfloat16": True, "float16": False}
_STEP_VALUES = 64 << 10  # at a time on the CPU: all their forms fit its cache
_LARGEST = np.float32(448)
_NAN = 0x7F


class Fp8:
    """Converts between plain blocks and stored blocks, which have the layout `layout`.

    A connector that uses it opens the namespace of `layout`. Plain blocks have another namespace, so the two
    never mix.
    """

    def __init__(self, layout: Layout, heads: int, dim: int, order: Order = "NHD") -> None:
        """`layout` is that of plain blocks: dtype bfloat16 or float16, and `block_tokens` tokens a head.

        A block is a number of arrays (tokens, heads, dim) or (heads, tokens, dim), such as
        [layers, 2, tokens, heads, dim]. MisuseError for another size.
        """
        tokens = layout.block_tokens
        if layout.dtype not in _DTYPES:
            raise MisuseError(f"FP8 of dtype {layout.dtype!r}", f"one of {', '.join(_DTYPES)}")
        if order not in ("NHD", "HND"):
            raise MisuseError(f"FP8 of order {order!r}", "NHD or HND")
        if min(heads, dim, tokens) < 1 or dim % 8:
            raise MisuseError(
                f"FP8 of {tokens} tokens, {heads} heads, dim {dim}",
                "none of them is 0, and dim is a multiple of 8; tokens are layout.block_tokens",
            )
        outer, rest = divmod(layout.block_bytes, 2 * tokens * heads * dim)
        if rest or not outer:
            raise MisuseError(
                f"FP8 of {layout.block_bytes} bytes in arrays of {tokens} tokens, {heads} heads, dim {dim}",
                f"a multiple of {2 * tokens * heads * dim} bytes",
            )
        runs, values = (tokens, dim) if order == "NHD" else (1, tokens * dim)
        self.plain = layout
        self.shape = kernels.Fp8Shape(outer, runs, heads, values, _DTYPES[layout.dtype])
        words = f"fp8 {order}, {heads} heads, dim {dim}"
        self.layout = replace(
            layout,
            dtype=f"fp8_e4m3 of {layout.dtype}",
            block_bytes=4 * self.shape.groups + self.shape.count,
            kv_layout=f"{layout.kv_layout}; {words}" if layout.kv_layout else words,
        )

    def encode(self, blocks: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Converts plain blocks (n, plain.block_bytes) to stored ones (n, layout.block_bytes)."""
        for plain, scales, codes in self._pieces(blocks, out):
            _encode(plain, scales, codes, self.shape.bfloat16)

    def decode(self, blocks: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Converts stored blocks (n, layout.block_bytes) to plain ones (n, plain.block_bytes)."""
        for plain, scales, codes in self._pieces(out, blocks):
            _decode(plain, scales, codes, self.shape.bfloat16)

    def encode_on(self, stream: Stream, blocks: Sequence[Buffer], out: Sequence[Buffer]) -> None:
        """Starts `encode` for blocks in device memory, at multiples of 16 bytes."""
        self._check(blocks, out, self.plain.block_bytes, self.layout.block_bytes)
        kernels.fp8_encode(stream, self.shape, blocks, out)

    def decode_on(self, stream: Stream, blocks: Sequence[Buffer], out: Sequence[Buffer]) -> None:
        """Starts `decode` for blocks in device memory, at multiples of 16 bytes."""
        self._check(blocks, out, self.layout.block_bytes, self.plain.block_bytes)
        kernels.fp8_decode(stream, self.shape, blocks, out)

    def _check(self, sources: Sequence[Buffer], targets: Sequence[Buffer], *nbytes: int) -> None:
        """Raises MisuseError for buffers of another number, size or alignment."""
        if len(sources) != len(targets):
            raise MisuseError(f"{len(sources)} blocks into {len(targets)}")
        for buffers, size in zip((sources, targets), nbytes, strict=True):
            for buffer in buffers:
                if buffer.nbytes != size or buffer.address % 16:
                    raise MisuseError(
                        f"a block of {buffer.nbytes} bytes at {buffer.address:#x}",
                        f"{size} bytes at a multiple of 16",
                    )

    def _pieces(self, plain: NDArray[np.uint8], stored: NDArray[np.uint8]) -> Iterator[tuple[Any, Any, Any]]:
        """(patterns, scales, codes) of all blocks, some layers at a time: (outer, runs, heads, values),
        scales (outer, heads).
        """
        for array, layout in ((plain, self.plain), (stored, self.layout)):
            if array.dtype != np.uint8 or array.shape[1:] != (layout.block_bytes,):
                raise MisuseError(
                    f"blocks of {layout.dtype} as {array.dtype} {array.shape}",
                    f"uint8 (n, {layout.block_bytes})",
                )
            if array.strides[-1] != 1:
                raise MisuseError("blocks whose bytes lie apart", "each row is contiguous")
        if len(plain) != len(stored):
            raise MisuseError(f"{len(plain)} plain blocks, {len(stored)} stored ones")
        shape = self.shape
        whole = shape.outer, shape.runs, shape.heads, shape.values
        step = max(1, _STEP_VALUES * shape.outer // shape.count)
        for one, other in zip(plain, stored, strict=True):
            patterns = one.view("<u2").reshape(whole)
            scales = other[: 4 * shape.groups].view("<f4").reshape(shape.outer, shape.heads)
            codes = other[4 * shape.groups :].reshape(whole)
            for start in range(0, shape.outer, step):
                part = slice(start, start + step)
                yield patterns[part], scales[part], codes[part]


def _encode(patterns: NDArray[Any], scales: NDArray[Any], codes: NDArray[Any], bfloat16: bool) -> None:
    """Fills scales and codes; the same as `fp8_encode` in kernels.cu."""
    rest = patterns & np.uint16(0x7FFF)
    finite = rest < (0x7F80 if bfloat16 else 0x7C00)
    all_finite = bool(finite.all())
    if not all_finite:
        rest *= finite
    # Among floats without a sign, the order is that of their bits.
    largest = _widened(rest.max(axis=(1, 3)), bfloat16).view(np.uint32)
    over = (largest + np.uint32(0x1FFFFF)) >> np.uint32(23)
    exponent = np.maximum(over, 11 if bfloat16 else 120) - np.uint32(8)
    scales[:] = (exponent << np.uint32(23)).view(np.float32)
    inverse = ((254 - exponent) << np.uint32(23)).view(np.float32)
    # With the largest scale, the type cannot hold 256.
    limit = np.where(exponent == (247 if bfloat16 else 135), np.float32(240), _LARGEST)
    scaled = _widened(rest, bfloat16)
    scaled *= inverse[:, None, :, None]
    np.minimum(scaled, limit[:, None, :, None], out=scaled)
    bits = scaled.view(np.uint32)
    little = scaled < 2**-6
    # Steps of 2**-9 are those of floats from 2**14 on.
    steps = (scaled + np.float32(2**14)).view(np.uint32) - np.float32(2**14).view(np.uint32)
    bits += (bits >> np.uint32(20) & np.uint32(1)) + np.uint32(0x7FFFF)
    bits >>= np.uint32(20)
    bits -= np.uint32(120 << 3)
    np.copyto(bits, steps, where=little)
    if not all_finite:
        bits[~finite] = _NAN
    bits |= patterns >> np.uint16(8) & np.uint16(0x80)
    codes[:] = bits


def _decode(patterns: NDArray[Any], scales: NDArray[Any], codes: NDArray[Any], bfloat16: bool) -> None:
    """Fills patterns, as `fp8_decode` in kernels.cu does."""
    values = _VALUES[codes]
    values *= scales[:, None, :, None]
    if bfloat16:
        np.right_shift(values.view(np.uint32), np.uint32(16), out=patterns, casting="unsafe")
    else:
        patterns[:] = values.astype(np.float16).view(np.uint16)
    nan = codes & _NAN == _NAN
    if nan.any():
        patterns[nan] = (codes[nan].astype(np.uint16) & 0x80) << 8 | (0x7FC0 if bfloat16 else 0x7E00)


def _widened(rest: NDArray[np.uint16], bfloat16: bool) -> NDArray[np.float32]:
    """Returns 16-bit magnitudes as floats, exactly."""
    if bfloat16:
        return (rest.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rest.view(np.float16).astype(np.float32)


def _values() -> NDArray[np.float32]:
    """Returns the value of each code for a scale of 1, 0 for NaN."""
    rest = np.arange(128, dtype=np.uint32)
    values = ((rest << np.uint32(20)) + np.uint32(120 << 23)).view(np.float32)
    values = np.where(rest < 8, rest.astype(np.float32) * np.float32(2**-9), values)
    values[_NAN] = 0
    return np.concatenate([values, -values])


_VALUES = _values()
