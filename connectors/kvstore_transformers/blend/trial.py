"""Refuses models whose chunks cannot be blended: by what they are, then by a short run with the real weights.

The run proves that keys can be moved, that values do not depend on positions, and that tokens can be
recomputed between others.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, LinearAttentionCacheLayerMixin

from kvstore.errors import MisuseError
from kvstore_transformers.blend.recompute import compute, lossy_cache
from kvstore_transformers.blend.rotation import Rotation
from kvstore_transformers.blocks import BlockShape, Columns
from kvstore_transformers.caches import StateWindowLayer, WindowLayer, new_cache
from kvstore_transformers.trial import is_close

_ATTENTIONS = ("eager", "sdpa")
"""Implementations of attention that take a mask of their own for each token."""

_TOKENS = 24
_FAR = 1000
"""The trial's shift, unless the context is shorter. A wrong rotation shows after some tokens."""

_FIRST_KEYS = 0.03
"""The largest relative difference of keys in layer 0 by rounding to 16 bits. Further layers add to it."""


def check_blendable(model: Any) -> None:
    """Refuses models with another kind of attention than full attention over rotated keys."""
    name, config = type(model).__name__, model.config
    attention = config._attn_implementation
    if attention not in _ATTENTIONS:
        raise MisuseError(
            f"the attention implementation of {name} is {attention}",
            f"recomputed tokens need a mask of their own: {' or '.join(_ATTENTIONS)}",
        )
    if getattr(config, "kv_lora_rank", None):
        raise MisuseError(f"{name} has latent attention", "its keys are not all rotated: use PrefixCache")
    for i, layer in enumerate(new_cache(config).layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin | StateWindowLayer):
            raise MisuseError(f"{name} has states", "a state sums up all tokens before it: use PrefixCache")
        if isinstance(layer, WindowLayer):
            raise MisuseError(f"{name} has sliding windows", "not covered by tests: use PrefixCache")
        if isinstance(layer, DummyLayer):
            raise MisuseError(f"layers of {name} share keys", "not covered by tests: use PrefixCache")
        if type(layer) is not DynamicLayer:
            raise MisuseError(
                f"layer {i} of the cache is a {type(layer).__name__}", "chunks are blended in full attention"
            )
    for weight, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise MisuseError(f"weight {weight} is not in memory", "offloaded models can't be blended")


@torch.no_grad()
def try_blend(model: Any, shape: BlockShape, rotation: Rotation) -> None:
    """Raises MisuseError if moved keys or recomputed tokens differ from those that the model computes."""
    device = model.device
    context = getattr(model.config, "max_position_embeddings", None) or _TOKENS + _FAR
    shift = max(1, min(_FAR, context - _TOKENS))
    ids = torch.arange(1, _TOKENS + 1, device=device) * 7 % model.config.vocab_size
    near = torch.arange(_TOKENS, device=device)
    first = _run(model, ids, near)
    _check_moved(model, rotation, first, _run(model, ids, near + shift), near, shift)
    _check_recomputed(model, shape, first, ids, near)


def _check_moved(
    model: Any, rotation: Rotation, first: DynamicCache, far: DynamicCache, near: Any, shift: int
) -> None:
    name, full = type(model).__name__, "served are models whose layers all have the same rotary embedding"
    for i, (ours, theirs) in enumerate(zip(first.layers, far.layers, strict=True)):
        moved, coarse = rotation.move(ours.keys, near, near + shift), {} if i else {"coarse": _FIRST_KEYS}
        if not is_close(moved, theirs.keys, **coarse):
            raise MisuseError(f"keys of layer {i} of {name} do not turn with their position", full)
        if not is_close(ours.values, theirs.values):
            raise MisuseError(f"values of layer {i} of {name} depend on positions", full)


def _check_recomputed(model: Any, shape: BlockShape, first: DynamicCache, ids: Any, near: Any) -> None:
    """Every third token and the last ones are zeros at first."""
    columns = Columns(shape, 1, _TOKENS)
    columns.take([0], 0, first)
    past = lossy_cache(columns, model.config)
    again = near[(near % 3 == 1) | (near >= _TOKENS - 4)]
    for layer in past.layers:
        layer.keys[:, :, again], layer.values[:, :, again] = 0, 0
    compute(model, past, ids, again)
    for i, (ours, theirs) in enumerate(zip(past.layers, first.layers, strict=True)):
        if not (is_close(ours.keys, theirs.keys) and is_close(ours.values, theirs.values)):
            raise MisuseError(
                f"layer {i} of {type(model).__name__} gives other keys or values to tokens between others",
                "served are models that keep to position_ids and to a mask of four dimensions",
            )


def _run(model: Any, ids: Any, positions: Any) -> DynamicCache:
    past = new_cache(model.config)
    model(input_ids=ids[None], position_ids=positions[None], past_key_values=past, use_cache=True)
    return past
