"""Stored chunks of documents: their keys, and their blocks in an independent namespace.

A chunk has as many blocks as it needs; the last one may be filled in part.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from transformers import DynamicCache

from kvstore import Key, Layout, Namespace, chain_keys
from kvstore_transformers.blocks import BlockShape, Columns
from kvstore_transformers.prefix import Figures

_PIECE_BYTES = 64 << 20
"""The most bytes in transit between a cache and the store."""


def lossy_layout(layout: Layout) -> Layout:
    """Returns the layout of a model's chunks, from the layout of its exact blocks."""
    return replace(
        layout, kind="independent", kv_layout=f"lossy: chunks at position zero; {layout.kv_layout}"
    )


def chunk_keys(tokens: list[int], block_tokens: int, salt: bytes) -> list[Key]:
    """Returns the keys of a chunk's blocks: digests of its tokens up to the end of each block."""
    keys = chain_keys(tokens, block_tokens, salt)
    if rest := tokens[len(keys) * block_tokens :]:
        # No whole block has this key: it is of fewer tokens.
        before = b"behind " + keys[-1] if keys else b"first "
        keys += chain_keys(rest, len(rest), before + salt)
    return keys


class ChunkStore:
    """The chunks of one model, by the digests of their tokens."""

    def __init__(self, ns: Namespace, shape: BlockShape, salt: bytes) -> None:
        self._ns, self._shape, self._salt = ns, shape, salt

    def keys(self, tokens: list[int]) -> list[Key]:
        """Returns the keys of a chunk's blocks."""
        return chunk_keys(tokens, self._shape.block_tokens, self._salt)

    def stored(self, keys: list[Key]) -> int:
        """Returns the number of leading blocks that are stored."""
        there = self._ns.contains(keys)
        return len(keys) if there.all() else int((~there).argmax())

    def load(self, columns: Columns, start: int, tokens: list[int], ends_s: float) -> int:
        """Copies the stored leading blocks of a chunk into columns from `start` on, until a monotonic time.

        Returns the number of tokens that were loaded. The columns behind them are undefined, up to a block.
        """
        keys, size, found = self.keys(tokens), self._shape.block_tokens, 0
        step = min(self._piece_blocks(), len(keys))
        blocks = np.empty((step, self._shape.block_bytes), np.uint8)
        for at in range(0, len(keys), step):
            piece = keys[at : at + step]
            # A deadline of 0 would be misuse.
            left_s = max(0.001, ends_s - time.monotonic())
            # A chunk counts as one prompt for the daemon's hit ratio.
            prompt = 0 if at else len(keys)
            n = self._ns.get(piece, blocks[: len(piece)], deadline_s=left_s, prompt=prompt)
            columns.fill(0, start + at * size, blocks[:n])
            found += n
            if n < len(piece):
                break
        return min(found * size, len(tokens))

    def put(self, past: DynamicCache, keys: list[Key], first: int, figures: Figures) -> None:
        """Stores the blocks of a chunk from `first` on, and counts them. `past` has whole blocks."""
        step = self._piece_blocks()
        for at in range(first, len(keys), step):
            piece = keys[at : at + step]
            blocks = self._shape.blocks(past, 0, at * self._shape.block_tokens, len(piece))
            result = self._ns.put(piece, blocks)
            figures.stored_blocks += result.stored
            figures.present_blocks += result.present
            if result.denied:
                figures.why = result.why
                break

    def _piece_blocks(self) -> int:
        return max(1, _PIECE_BYTES // self._shape.block_bytes)
