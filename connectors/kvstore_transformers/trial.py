"""A short run that proves that later tokens depend only on the cached prefix.

It detects properties that configurations do not show: attention to later tokens, and state outside the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from kvstore.errors import MisuseError
from kvstore_transformers.caches import new_cache

_TOKENS = 24
_PREFIX = 12

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""The largest relative difference of keys or values due to rounding. Other dtypes: `_COARSE`."""

_COARSE = 0.3
"""Wide enough for a token that a router sends to different experts."""


@torch.no_grad()
def try_prefix(model: Any) -> None:
    """Raises MisuseError if keys and values of a prefix depend on later tokens.

    Also raises it if a run that continues from the cached prefix differs from a run over all tokens.
    """
    size = model.config.vocab_size
    tokens = torch.arange(1, _TOKENS + 1, device=model.device)[None] * 7 % size
    prefix = _run(model, tokens[:, :_PREFIX], new_cache(model.config))
    whole = _run(model, tokens, new_cache(model.config))
    _compare(model, prefix, [tensor[:, :, :_PREFIX] for tensor in whole], "depend on the tokens that follow")
    past = new_cache(model.config)
    for layer, (keys, values) in enumerate(zip(prefix[::2], prefix[1::2], strict=True)):
        past.update(keys, values, layer)
    rest = [tensor[:, :, _PREFIX:] for tensor in _run(model, tokens[:, _PREFIX:], past)]
    _compare(model, rest, [tensor[:, :, _PREFIX:] for tensor in whole], "depend on more than its cache")


def _run(model: Any, tokens: Any, past: DynamicCache) -> list[Any]:
    """Returns the keys and values of all layers after the run."""
    model(input_ids=tokens, past_key_values=past, use_cache=True)
    return [tensor.clone() for layer in past.layers for tensor in (layer.keys, layer.values)]


def _compare(model: Any, ours: list[Any], theirs: list[Any], failing: str) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape:
            break
        away = (one.double() - other.double()).norm()
        # NaN does not match.
        if not bool(away <= _TOLERANCE.get(one.dtype, _COARSE) * other.double().norm() + 1e-9):
            break
    else:
        return
    raise MisuseError(
        f"keys and values of {type(model).__name__} {failing}",
        "only decoders with causal attention can be served",
    )
