"""Computes the keys and values of some tokens of a prompt, between those that are there.

As CacheBlend (arXiv 2405.16444) does: the first layers are computed for all tokens, and the tokens whose
stored keys and values deviate most from what they compute are recomputed in all layers.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstore_transformers.blocks import Columns
from kvstore_transformers.caches import last_logits_only, position_arguments

_PIECE_TOKENS = 1024
"""The most tokens of one run: its mask has this many rows of the whole prompt."""

_CHECKED_LAYER = 1
"""The first layer whose keys and values depend on other tokens. Those of layer 0 are exact once moved."""

Pair = tuple[Any, Any]
"""Keys and values of one layer, (1, heads, tokens, dim) each."""


class LossyLayer(DynamicLayer):
    """A layer with the keys and values of blended chunks. No exact reader takes it (`checks.check_layers`).

    `place`: columns of the next tokens, in place of what is there, and the column behind the last of them.
    None: behind all tokens, as in any other cache.
    """

    keys: Any
    values: Any
    place: tuple[Any, int] | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Pair:
        """Adds or replaces tokens. Returns the keys and values that they may see."""
        if self.place is None:
            added: Pair = super().update(key_states, value_states, *args, **kwargs)
            return added
        columns, stop = self.place
        columns = columns.to(self.keys.device)
        self.keys[:, :, columns], self.values[:, :, columns] = key_states, value_states
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class _Taken(Exception):
    """The run has come to the layer whose keys and values are wanted."""


class _TakingLayer(DynamicLayer):
    """Takes the keys and values of its layer, and ends the run."""

    taken: Pair

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Pair:
        self.taken = key_states, value_states
        raise _Taken


def lossy_cache(columns: Columns, config: Any) -> DynamicCache:
    """Returns a cache of LossyLayers with these columns."""
    past = DynamicCache(config=config)
    past.layers = [LossyLayer() for _ in past.layers]
    return columns.to_cache(past)


def compute(model: Any, past: DynamicCache, ids: Any, columns: Any) -> None:
    """Runs the model over the tokens of ascending `columns`, and replaces their keys and values in `past`.

    Each token sees the columns up to its own. `ids`: those of all columns, (tokens,).
    """
    for part in columns.split(_PIECE_TOKENS) if len(columns) else ():
        stop = int(part[-1]) + 1
        for layer in past.layers:
            layer.place = part, stop
        try:
            model(
                input_ids=ids[part][None],
                attention_mask=_mask(model, part, stop),
                position_ids=part[None],
                past_key_values=past,
                use_cache=True,
                **last_logits_only(model),
            )
        finally:
            for layer in past.layers:
                layer.place = None


def _mask(model: Any, columns: Any, stop: int) -> Any:
    """Returns a mask (1, 1, len(columns), stop) in the form of the model's attention."""
    seen = torch.arange(stop, device=columns.device)[None] <= columns[:, None]
    if model.config._attn_implementation != "sdpa":
        least = torch.finfo(model.dtype).min
        seen = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device).masked_fill(~seen, least)
    return seen[None, None]


def compute_first_layers(model: Any, past: DynamicCache, ids: Any, start: int, stop: int) -> list[Pair]:
    """Returns what a prefill computes in the first two layers for columns [start, stop).

    The columns before `start` must be exact. The run ends at the keys and values of the second layer.
    """
    probe = DynamicCache(config=model.config)
    last = _TakingLayer()
    probe.layers[_CHECKED_LAYER] = last
    if start:
        first = past.layers[0]
        probe.layers[0].update(first.keys[:, :, :start], first.values[:, :, :start])
    taken = []
    for at in range(start, stop, _PIECE_TOKENS):
        end = min(stop, at + _PIECE_TOKENS)
        positions = position_arguments(model, at, end)
        with suppress(_Taken):
            model(input_ids=ids[None, at:end], past_key_values=probe, use_cache=True, **positions)
        taken.append(last.taken)
    exact, (keys, values) = probe.layers[0], (torch.cat(parts, 2) for parts in zip(*taken, strict=True))
    return [(exact.keys[:, :, start:], exact.values[:, :, start:]), (keys, values)]


def replace_deviating(model: Any, past: DynamicCache, ids: Any, start: int, loaded: Any, share: float) -> Any:
    """Returns which tokens to recompute, bool (columns,): a share of the loaded ones, the most deviating.

    Puts the exact keys and values of the first two layers in place of the loaded ones. `loaded`: bool
    (columns,); columns before `start` are exact.
    """
    chosen = torch.zeros_like(loaded)
    if not share or not loaded.any() or len(past.layers) <= _CHECKED_LAYER:
        return chosen
    stop = int(loaded.nonzero()[-1]) + 1
    exact = compute_first_layers(model, past, ids, start, stop)
    layer = past.layers[_CHECKED_LAYER]
    stored = layer.keys[:, :, start:stop], layer.values[:, :, start:stop]
    away = deviation(exact[_CHECKED_LAYER], stored).to(loaded.device)
    away = away.masked_fill(~loaded[start:stop], -1.0)
    count = math.ceil(share * int(loaded.sum()) - 1e-9)
    chosen[start + away.topk(count).indices] = True
    for layer, (keys, values) in zip(past.layers, exact, strict=False):
        layer.keys[:, :, start:stop], layer.values[:, :, start:stop] = keys, values
    return chosen


def deviation(exact: Pair, stored: Pair) -> Any:
    """Returns each token's squared distance from the exact keys and values, as a share of the mean square."""
    away = []
    for new, old in zip(exact, stored, strict=True):
        square = (new.float() - old.float()).square().sum((0, 1, 3))
        away.append(square / new.float().square().sum((0, 1, 3)).mean().clamp(min=1e-30))
    return away[0] + away[1]
