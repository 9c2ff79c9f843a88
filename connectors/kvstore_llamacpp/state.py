"""llama.cpp's state as bytes: read, cut into blocks of tokens, and built from blocks.

    state  head, caches       head: magic u32 and sequence i32, or the architecture's name (length u32, bytes)
    cache  streams u32 (1), cells u32; for each cell: position i32, sequences u32 (1), sequence i32;
           transposed u32, layers u32; the keys of each layer, the values of each layer
    keys, values by token     type i32, bytes a row u64; a row for each cell
    values transposed         type i32, bytes an element u32, columns u32; for each column an element a cell

A model with sliding windows has two caches, any other one. Cells may be in any order. A block has the rows of
its tokens of all tensors, in the order of the state, and nothing else: positions follow from its number. A
column of a transposed tensor is kept whole, so every tensor is (columns, tokens, bytes), with one column if
its rows are by token.

Every length in the bytes is checked before it is used. Not covered: states of recurrent and hybrid models,
cells with more than a position (M-RoPE), models whose values are a part of their keys (MLA). `slot_file` has
the files of llama-server, which have the caches of a slot behind its tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import MisuseError

Bytes = npt.NDArray[np.uint8]

SERVED_VERSIONS = ((10, 3),)
"""Versions of llama.cpp's formats of a whole state and of a sequence's state that this module reads."""

_MAGIC = 0xAF143CD8
SEQUENCE = struct.pack("<Ii", _MAGIC, 0)
"""The head of the state of sequence 0."""

_TYPES = {0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 8: ("q8_0", 32, 34), 30: ("bf16", 1, 2)}
"""Served types by ggml's number: the name, and the elements and bytes of a piece of a row."""

_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_MOST_CACHES = 2
_U32 = struct.Struct("<I")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")


class StateError(MisuseError):
    """The bytes are not a state that this connector serves."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "served are causal models whose state is one or two plain KV caches")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Keys or values of one layer: `columns` columns, in each of which a token has `nbytes` bytes.

    `header` is the type and the sizes, as llama.cpp writes them.
    """

    header: bytes
    columns: int
    nbytes: int

    @property
    def dtype(self) -> str:
        """The name of its type."""
        return _TYPES[struct.unpack_from("<i", self.header)[0]][0]

    @property
    def token_bytes(self) -> int:
        """The bytes of a token."""
        return self.columns * self.nbytes


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The tensors of one cache, keys first. `header` tells whether values are transposed, and the layers."""

    header: bytes
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StateForm:
    """What all states of a context have in common."""

    caches: tuple[CacheForm, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all caches."""
        return [tensor for cache in self.caches for tensor in cache.tensors]

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in all tensors."""
        return sum(tensor.token_bytes for tensor in self.tensors)

    @property
    def dtypes(self) -> list[str]:
        """The types of its tensors, each once."""
        return list(dict.fromkeys(tensor.dtype for tensor in self.tensors))


_Cache: TypeAlias = tuple[CacheForm, npt.NDArray[np.int32], list[Bytes]]
"""The form of a cache, the position of each cell, and the tensors (columns, cells, bytes)."""


class State:
    """A state that was read: its `form`, its `head`, and the tokens from the first on that all caches have.

    With a `head`, `raw` has the caches alone. Its cells belong to `sequence`. Raises StateError unless `raw`
    is a state that is served, in full.
    """

    def __init__(self, raw: Bytes, head: bytes | None = None, sequence: int = 0) -> None:
        reader = _Reader(raw)
        self.head = _read_head(reader) if head is None else head
        caches: list[_Cache] = []
        while not caches or (reader.left and len(caches) < _MOST_CACHES):
            caches.append(_read_cache(reader, sequence))
        if reader.left:
            raise StateError(f"{reader.left} bytes follow the caches of a state")
        self.form = StateForm(tuple(form for form, _, _ in caches))
        self.n_tokens = min(_leading(positions) for _, positions, _ in caches)
        self._tensors = [(each, _order(positions)) for _, positions, tensors in caches for each in tensors]

    def blocks(self, block_tokens: int, first: int, count: int) -> Bytes:
        """Returns `count` blocks from block `first` on, as bytes (count, block_bytes).

        Raises MisuseError for blocks that the state does not have.
        """
        start, stop = first * block_tokens, (first + count) * block_tokens
        if block_tokens < 1 or first < 0 or count < 0 or stop > self.n_tokens:
            raise MisuseError(
                f"tokens {start} to {stop} of a state of {self.n_tokens}", "ask for what it has"
            )
        out = np.empty((count, block_tokens * self.form.token_bytes), np.uint8)
        for (rows, order), part in zip(self._tensors, parts(self.form, out, block_tokens), strict=True):
            tokens = rows[:, start:stop] if order is None else rows[:, order[start:stop]]
            part[:] = _by_block(tokens, block_tokens)
        return out


class NewState:
    """The state of the first `n_tokens` tokens of a sequence, filled block by block; `raw` is its bytes.

    `head`: see State. `memory` returns the memory for that many bytes.
    """

    def __init__(
        self,
        form: StateForm,
        n_tokens: int,
        head: bytes = SEQUENCE,
        memory: Callable[[int], Bytes] = lambda nbytes: np.empty(nbytes, np.uint8),
    ) -> None:
        cells = np.zeros(n_tokens, _CELL)
        cells["position"], cells["sequences"] = np.arange(n_tokens), 1
        counts = _U32.pack(1) + _U32.pack(n_tokens)
        pieces: list[Any] = [head]
        for cache in form.caches:
            pieces += [counts, cells.tobytes(), cache.header]
            for tensor in cache.tensors:
                pieces += [tensor.header, tensor]
        sizes = [n_tokens * p.token_bytes if isinstance(p, Tensor) else len(p) for p in pieces]
        self.raw = memory(sum(sizes))
        self.form = form
        self._tensors, at = [], 0
        for piece, size in zip(pieces, sizes, strict=True):
            if isinstance(piece, Tensor):
                self._tensors.append(self.raw[at : at + size].reshape(piece.columns, n_tokens, piece.nbytes))
            else:
                self.raw[at : at + size] = np.frombuffer(piece, np.uint8)
            at += size

    def fill(self, block_tokens: int, first: int, blocks: Bytes) -> None:
        """Copies blocks, bytes (n, block_bytes), to where block `first` and those behind it belong."""
        start, stop = first * block_tokens, (first + len(blocks)) * block_tokens
        for rows, part in zip(self._tensors, parts(self.form, blocks, block_tokens), strict=True):
            _by_block(rows[:, start:stop], block_tokens)[:] = part


def parts(form: StateForm, blocks: Bytes, block_tokens: int) -> list[Bytes]:
    """Returns the part of each tensor in blocks, bytes (n, block_bytes).

    A part is a view (n, columns, block_tokens, bytes).
    """
    views, at = [], 0
    for tensor in form.tensors:
        size = block_tokens * tensor.token_bytes
        shape = (len(blocks), tensor.columns, block_tokens, tensor.nbytes)
        views.append(blocks[:, at : at + size].reshape(shape))
        at += size
    return views


def _by_block(rows: Bytes, block_tokens: int) -> Bytes:
    """Returns rows (columns, tokens, bytes) as a view (blocks, columns, block_tokens, bytes)."""
    columns, tokens, nbytes = rows.shape
    return rows.reshape(columns, tokens // block_tokens, block_tokens, nbytes).transpose(1, 0, 2, 3)


class _Reader:
    """Takes bytes from the front. Raises StateError for more than there are."""

    def __init__(self, raw: Bytes) -> None:
        self._raw = raw
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._raw) - self._at

    def take(self, nbytes: int, what: str) -> Bytes:
        if nbytes > self.left:
            raise StateError(f"a state ends in its {what}: {nbytes} bytes are told, {self.left} are there")
        self._at += nbytes
        return self._raw[self._at - nbytes : self._at]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what).tobytes())[0])


def _read_head(reader: _Reader) -> bytes:
    first = reader.u32("head")
    return _U32.pack(first) + reader.take(4 if first == _MAGIC else first, "head").tobytes()


def _read_cache(reader: _Reader, sequence: int) -> _Cache:
    if (streams := reader.u32("streams")) != 1:
        raise StateError(f"a state has {streams} streams of KV instead of one")
    if not (n_cells := reader.u32("cells")):
        raise StateError("a state has no tokens")
    cells = reader.take(n_cells * _CELL.itemsize, "cells").view(_CELL)
    if (cells["sequences"] != 1).any() or (cells["sequence"] != sequence).any():
        raise StateError(f"a cell of a state is not of sequence {sequence} alone")
    header = reader.take(8, "layers").tobytes()
    transposed, layers = struct.unpack("<II", header)
    if transposed > 1 or not layers:
        raise StateError(f"a cache has {layers} layers, transposed {transposed}")
    tensors, rows = [], []
    for number in range(2 * layers):
        tensor = _read_tensor(reader, transposed=bool(transposed) and number >= layers)
        data = reader.take(n_cells * tensor.token_bytes, "rows")
        tensors.append(tensor)
        rows.append(data.reshape(tensor.columns, n_cells, tensor.nbytes))
    return CacheForm(header, tuple(tensors)), cells["position"], rows


def _read_tensor(reader: _Reader, transposed: bool) -> Tensor:
    form = _COLUMNS if transposed else _ROWS
    header = reader.take(form.size, "types").tobytes()
    kind, nbytes, *more = form.unpack(header)
    columns = more[0] if transposed else 1
    if kind not in _TYPES:
        names = ", ".join(name for name, _, _ in _TYPES.values())
        raise StateError(f"keys or values have ggml's type {kind}, served are {names}")
    name, _, piece = _TYPES[kind]
    if not columns or not nbytes or nbytes % piece or (transposed and nbytes != piece):
        raise StateError(f"{columns} columns of {nbytes} bytes a token are no tensor of {name}")
    return Tensor(header, columns, nbytes)


def _leading(positions: npt.NDArray[np.int32]) -> int:
    """Returns how many positions from 0 on are there. Raises StateError for equal or negative ones."""
    ordered = np.sort(positions)
    if ordered[0] < 0 or (np.diff(ordered) == 0).any():
        raise StateError("two cells of a state have the same position, or one has none")
    return int((ordered == np.arange(len(ordered))).sum())


def _order(positions: npt.NDArray[np.int32]) -> npt.NDArray[np.intp] | None:
    """Returns the cells in the order of positions; None if they are in it."""
    return None if (np.diff(positions) > 0).all() else np.argsort(positions)
