"""States of layers that do not keep every token: linear attention, state space models, short convolutions.

A state belongs to one position: it sums up all tokens before it. The states of all layers of a row at one
position are one stored state, in pieces of at most `PIECE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, StoppingCriteria
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvstore import ExceptionBarrier, Key
from kvstore.errors import MisuseError

PIECE_BYTES = 32 << 20
"""The most bytes of one block of a state."""

State = npt.NDArray[np.uint8]
"""A stored state of one row: bytes (pieces, block_bytes)."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state: where its layer keeps it, its shape without rows, and its bytes in a state."""

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: Any
    device: Any
    start: int
    stop: int


class StateShape:
    """The shape of a model's states: `parts` in order, `pieces` blocks of `block_bytes` each.

    `past` is a cache that the model has filled. Raises MisuseError if a layer's state is not in the cache.
    """

    def __init__(self, past: DynamicCache) -> None:
        self.parts: list[StatePart] = []
        stop = 0
        for i, layer in enumerate(past.layers):
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                continue
            tensors = [
                (kind, index, tensor)
                for kind in ("conv_states", "recurrent_states")
                for index, tensor in getattr(layer, kind).items()
                if tensor is not None
            ]
            if not tensors:
                raise MisuseError(
                    f"layer {i} keeps its state outside the cache", "the state cannot be stored or restored"
                )
            for kind, index, tensor in tensors:
                start, stop = stop, stop + tensor[0].nbytes
                shape = tuple(tensor.shape[1:])
                self.parts.append(StatePart(i, kind, index, shape, tensor.dtype, tensor.device, start, stop))
        self.pieces = -(-stop // PIECE_BYTES)
        self.block_bytes = -(-stop // self.pieces) if self.pieces else 0

    def keys(self, key: Key) -> list[Key]:
        """Returns the keys of the pieces of the state behind the block `key`."""
        return [key + piece.to_bytes(2, "little") for piece in range(self.pieces)]

    def tensors(self, past: DynamicCache) -> list[Any]:
        """Returns the present states of all rows, a tensor for each part."""
        return [getattr(past.layers[part.layer], part.kind)[part.index] for part in self.parts]

    def read(self, past: DynamicCache, row: int) -> State:
        """Returns the present state of a row."""
        out = torch.zeros(self.pieces * self.block_bytes, dtype=torch.uint8)
        for part, tensor in zip(self.parts, self.tensors(past), strict=True):
            out[part.start : part.stop].copy_(tensor[row].contiguous().reshape(-1).view(torch.uint8))
        return np.asarray(out).reshape(self.pieces, self.block_bytes)

    def write(self, past: DynamicCache, rows: Sequence[State | None]) -> None:
        """Gives the rows of a new cache their states. None is the state before the first token."""
        for part in self.parts:
            tensor = torch.zeros((len(rows), *part.shape), dtype=part.dtype)
            for row, state in enumerate(rows):
                if state is not None:
                    # The copy is aligned to any dtype.
                    raw = torch.from_numpy(state.reshape(-1)[part.start : part.stop].copy())
                    tensor[row] = raw.view(part.dtype).reshape(part.shape)
            layer = past.layers[part.layer]
            if part.kind == "conv_states":
                layer.update_conv_state(tensor.to(part.device), part.index)
            else:
                layer.update_recurrent_state(tensor.to(part.device), part.index)
            layer.has_previous_state[part.index] = True


class Snapshots:
    """The states of the rows of one batch, copied while the model passes block boundaries.

    `of_rows` has, for each row, states by the number of tokens before them.
    """

    def __init__(self, shape: StateShape, rows: int) -> None:
        self.past: DynamicCache | None = None
        self.of_rows: list[dict[int, State]] = [{} for _ in range(rows)]
        self._shape = shape
        self._latest = [0] * rows

    def take(self, past: DynamicCache, past_row: int, row: int, tokens: int) -> None:
        """Copies the state of `past_row` as the one of `row` behind its first `tokens`."""
        self.of_rows[row][tokens] = self._shape.read(past, past_row)

    def take_latest(self, past: DynamicCache, row: int, tokens: int) -> None:
        """Does so in place of the latest such copy, which a later state makes useless."""
        self.of_rows[row].pop(self._latest[row], None)
        self._latest[row] = tokens
        self.take(past, row, row, tokens)


class AnswerStates(StoppingCriteria):
    """Sees each generated token, stops nothing, and copies the states of rows that fill a block.

    `ends` maps sequences to the column after the last token of each row.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        pads: list[int],
        block_tokens: int,
        ends: Callable[[Any], list[int]],
        barrier: ExceptionBarrier,
    ) -> None:
        self._snapshots, self._pads, self._block_tokens = snapshots, pads, block_tokens
        self._ends, self._barrier = ends, barrier

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Returns False for each row. The last column has not been an input yet."""
        with self._barrier("store"):
            self._copy(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def _copy(self, sequences: Any) -> None:
        columns, past = sequences.shape[1] - 1, self._snapshots.past
        filled = [row for row, pad in enumerate(self._pads) if (columns - pad) % self._block_tokens == 0]
        if past is not None and filled:
            ends = self._ends(sequences)
            for row in filled:
                if self._pads[row] < columns <= ends[row]:
                    self._snapshots.take_latest(past, row, columns - self._pads[row])
