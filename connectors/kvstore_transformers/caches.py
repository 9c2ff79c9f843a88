"""The caches that a model fills: a DynamicCache whose layers keep the keys and values of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


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


def new_cache(config: Any) -> DynamicCache:
    """Returns an empty cache for a model."""
    past = DynamicCache(config=config)
    for i, layer in enumerate(past.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            past.layers[i] = WindowLayer(layer.sliding_window)
    return past
