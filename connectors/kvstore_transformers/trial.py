"""A short run that proves that later tokens depend only on the cached prefix.

It detects properties that configurations do not show: attention to later tokens, and state outside the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from kvstore.errors import MisuseError
from kvstore_transformers.caches import attention_layers, new_cache, position_arguments
from kvstore_transformers.states import StateShape

_TOKENS = 24
_PREFIX = 12

_CAUSAL = "only decoders with causal attention can be served"

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""The largest relative difference of keys or values due to rounding. Other dtypes: `_COARSE`."""

_COARSE = 0.3
"""Wide enough for a token that a router sends to different experts."""


@torch.no_grad()
def try_prefix(model: Any, shape: StateShape) -> None:
    """Raises MisuseError if keys and values of a prefix depend on later tokens.

    Also raises it if a run that continues from the cached prefix differs from a run over all tokens, in keys,
    values or the states at its end.
    """
    name, size = type(model).__name__, model.config.vocab_size
    tokens = torch.arange(1, _TOKENS + 1, device=model.device)[None] * 7 % size
    first, whole, past = (new_cache(model.config) for _ in range(3))
    prefix, expected = _run(model, tokens[:, :_PREFIX], first), _run(model, tokens, whole)
    if not _same(prefix, [tensor[:, :, :_PREFIX] for tensor in expected]):
        raise MisuseError(f"keys and values of {name} depend on the tokens that follow", _CAUSAL)
    for layer, keys, values in zip(attention_layers(past), prefix[::2], prefix[1::2], strict=True):
        layer.update(keys, values)
    shape.write(past, [shape.read(first, 0)])
    rest = _run(model, tokens[:, _PREFIX:], past, _PREFIX)
    ours = [tensor[:, :, _PREFIX:] for tensor in rest] + shape.tensors(past)
    theirs = [tensor[:, :, _PREFIX:] for tensor in expected] + shape.tensors(whole)
    if not _same(ours, theirs):
        if shape.parts:
            raise MisuseError(
                f"{name} does not continue from its states",
                "this version of transformers runs several tokens at once from the first token only",
            )
        raise MisuseError(f"keys and values of {name} depend on more than its cache", _CAUSAL)


def _run(model: Any, tokens: Any, past: DynamicCache, start: int = 0) -> list[Any]:
    """Returns the keys and values of all layers after the run over tokens from position `start` on."""
    positions = position_arguments(model, start, start + tokens.shape[1])
    model(input_ids=tokens, past_key_values=past, use_cache=True, **positions)
    return [tensor.clone() for layer in attention_layers(past) for tensor in (layer.keys, layer.values)]


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    """Returns whether tensors differ by rounding only."""
    return all(is_close(one, other) for one, other in zip(ours, theirs, strict=True))


def is_close(one: Any, other: Any, coarse: float = _COARSE) -> bool:
    """Returns whether two tensors differ by rounding only: relatively, by `coarse` with 16 bits."""
    if one.shape != other.shape:
        return False
    away = (one.double() - other.double()).norm()
    # NaN does not match.
    return bool(away <= _TOLERANCE.get(one.dtype, coarse) * other.double().norm() + 1e-9)
