"""Converts between blocks (bytes in the store) and columns (tensors of a DynamicCache).

A block holds, for each layer with attention, keys (heads, block_tokens, dim) and then values of the same
shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvstore.errors import MisuseError
from kvstore_transformers.caches import attention_layers, new_cache
from kvstore_transformers.checks import check_layers
from kvstore_transformers.states import StateShape


@dataclass(frozen=True, slots=True)
class Part:
    """Keys or values of one layer: the shape of a token, the device, and the byte range in a block."""

    heads: int
    dim: int
    device: Any
    start: int
    stop: int


class BlockShape:
    """The shape of a model's blocks: `block_bytes`, `dtype`, and `parts` in order. `states`: of its states.

    The constructor runs the model on one token and inspects its cache, because configurations name heads and
    sizes in many ways. Raises MisuseError if the cache differs from the expected form.
    """

    def __init__(self, model: Any, block_tokens: int) -> None:
        if block_tokens < 1:
            raise MisuseError(f"block_tokens is {block_tokens}", "at least 1 token a block")
        past = _probe(model)
        tensors = _tensors(past)
        self.states = StateShape(past)
        self.block_tokens = block_tokens
        self.dtype = tensors[0].dtype
        self.parts: list[Part] = []
        self.block_bytes = 0
        for tensor in tensors:
            start, self.block_bytes = self.block_bytes, self.block_bytes + block_tokens * tensor.nbytes
            _, heads, _, dim = tensor.shape
            self.parts.append(Part(heads, dim, tensor.device, start, self.block_bytes))

    def part_of(self, blocks: Any, part: Part) -> Any:
        """Returns one part of blocks, uint8 (n, block_bytes), as a view (heads, n, block_tokens, dim)."""
        typed = blocks[:, part.start : part.stop].view(self.dtype)
        return typed.unflatten(-1, (part.heads, self.block_tokens, part.dim)).transpose(0, 1)

    def blocks(self, past: DynamicCache, row: int, column: int, count: int) -> np.ndarray:
        """Returns `count` blocks of a row from `column` on, as bytes (count, block_bytes)."""
        out = torch.empty((count, self.block_bytes), dtype=torch.uint8)
        for part, tensor in zip(self.parts, _tensors(past), strict=True):
            tokens = tensor[row, :, column : column + count * self.block_tokens]
            self.part_of(out, part).copy_(tokens.unflatten(1, (count, self.block_tokens)))
        return np.asarray(out)


class Columns:
    """The first `width` columns of a batch. Unfilled columns, such as padding, are zero."""

    def __init__(self, shape: BlockShape, rows: int, width: int) -> None:
        self.width = width
        self._shape = shape
        # The last block of a row may extend beyond the width.
        room = width + shape.block_tokens if width else 0
        self._tensors = [
            torch.zeros((rows, part.heads, room, part.dim), dtype=shape.dtype, device=part.device)
            for part in shape.parts
        ]

    def fill(self, row: int, column: int, blocks: np.ndarray) -> None:
        """Copies blocks, bytes (n, block_bytes), into a row from `column` on."""
        raw, tokens = torch.from_numpy(blocks), len(blocks) * self._shape.block_tokens
        for part, tensor in zip(self._shape.parts, self._tensors, strict=True):
            target = tensor[row, :, column : column + tokens]
            target.unflatten(1, (len(blocks), self._shape.block_tokens)).copy_(self._shape.part_of(raw, part))

    def take(self, rows: list[int], column: int, past: DynamicCache) -> None:
        """Copies the rows of a cache into `rows` from `column` on."""
        for target, tensor in zip(self._tensors, _tensors(past), strict=True):
            target[rows, :, column : column + tensor.shape[2]] = tensor

    def cut(self, width: int) -> None:
        """Cuts the batch to at most `width` columns."""
        self.width = min(self.width, width)

    def to_cache(self, past: Any) -> Any:
        """Returns the empty cache `past`, with these columns."""
        if self.width:
            cut = [tensor[:, :, : self.width] for tensor in self._tensors]
            for layer, keys, values in zip(attention_layers(past), cut[::2], cut[1::2], strict=True):
                layer.update(keys, values)
        return past


def _tensors(past: DynamicCache) -> list[Any]:
    """Returns keys and values of each layer with attention, (rows, heads, columns, dim) each."""
    return [tensor for layer in attention_layers(past) for tensor in (layer.keys, layer.values)]


@torch.no_grad()
def _probe(model: Any) -> DynamicCache:
    """Returns a cache with one token, whose keys and values are (1, heads, 1, dim)."""
    past = new_cache(model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, past_key_values=past, use_cache=True)
    check_layers(past)
    tensors = _tensors(past)
    if any(tensor is None or tensor.shape[::2] != (1, 1) for tensor in tensors):
        raise MisuseError(
            f"{type(model).__name__} did not put one token's keys and values into each layer of its cache",
            "only models that fill a DynamicCache can be served",
        )
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise MisuseError(
            f"layers of {type(model).__name__} keep keys and values in several dtypes", "convert it to one"
        )
    return past
