"""The caches that a model fills: a DynamicCache whose attention layers keep all keys and values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer with a window that keeps the keys and values of all tokens, so that each block has them.

    The model sees the window alone. A layer of transformers keeps all tokens too, until `generate` crops it.
    """

    keys: Any
    values: Any

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Adds tokens. Returns the keys and values that they may see: their own, and a window before them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        self.cumulative_length = self.keys.shape[-2]
        seen = self.sliding_window - 1 + key_states.shape[-2]
        return self.keys[:, :, -seen:], self.values[:, :, -seen:]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes -`tokens_to_remove` tokens, and no others."""
        DynamicLayer.crop(self, tokens_to_remove)
        self.cumulative_length = self.keys.shape[-2] if self.is_initialized else 0


class StateWindowLayer(LinearAttentionAndSlidingWindowAttentionLayer):
    """A WindowLayer with a state beside it."""

    keys: Any
    values: Any
    update = WindowLayer.update

    def crop(self, tokens_to_remove: int) -> None:
        """Removes -`tokens_to_remove` tokens. The state must have recorded its past."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        WindowLayer.crop(self, tokens_to_remove)


def new_cache(config: Any) -> DynamicCache:
    """Returns an empty cache for a model."""
    past = DynamicCache(config=config)
    for i, layer in enumerate(past.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            past.layers[i] = WindowLayer(layer.sliding_window)
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            past.layers[i] = StateWindowLayer(layer.sliding_window, layer.number_of_states)
    return past


def attention_layers(past: Any) -> list[Any]:
    """Returns the layers that keep keys and values of tokens."""
    return [layer for layer in past.layers if isinstance(layer, CacheLayerMixin)]


def position_arguments(model: Any, start: int, stop: int) -> dict[str, Any]:
    """Returns the positions of tokens [start, stop), as `generate` does: some models do not ask the cache."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.arange(start, stop, device=model.device)[None]}


def last_logits_only(model: Any) -> dict[str, Any]:
    """Returns the argument for a run of which only the cache is of use, if the model takes it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
