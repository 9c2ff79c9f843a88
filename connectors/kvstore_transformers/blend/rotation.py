"""Moves keys to other positions: the shift of a rotary embedding (RoPE), which is exact up to rounding."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.errors import MisuseError

_CONSTANT = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings with the same frequencies at every length."""

_KNOWN = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
}
"""Parameters that change frequencies and a constant factor of queries and keys, and nothing else."""


class Rotation:
    """The rotary embedding of a model: one set of frequencies for all layers.

    Raises MisuseError for models without one, and for kinds whose frequencies are not constant. Whether each
    layer uses it, and in halves, is tried by `trial`.
    """

    def __init__(self, model: Any) -> None:
        name = type(model).__name__
        found = [module for module in model.modules() if isinstance(_frequencies(module), torch.Tensor)]
        if len(found) != 1:
            raise MisuseError(
                f"{name} has {len(found)} rotary embeddings",
                "keys can be moved to other positions by one set of frequencies for all layers only",
            )
        self._module = found[0]
        kind = getattr(self._module, "rope_type", "default")
        if kind not in _CONSTANT:
            raise MisuseError(
                f"{name} has {kind} position embeddings",
                f"frequencies must be the same at every length: {', '.join(sorted(_CONSTANT))}",
            )
        for parameter in sorted(set(getattr(model.config, "rope_parameters", None) or {}) - _KNOWN):
            raise MisuseError(
                f"the rotary embedding of {name} has a parameter {parameter}",
                "it may depend on absolute positions; no test covers it",
            )

    def move(self, keys: Any, sources: Any, targets: Any) -> Any:
        """Returns keys (rows, heads, tokens, dim) of tokens at `sources` as they are at `targets`.

        Both are positions (tokens,). The constant factor of YaRN is in the keys already.
        """
        frequencies = _frequencies(self._module).to(keys.device, torch.float32)
        sources, targets = (at.to(keys.device, torch.float32)[:, None] for at in (sources, targets))
        # The model rounds its angles to float32: their difference undoes and repeats this rounding.
        turn = (targets * frequencies).double() - (sources * frequencies).double()
        wide, half = torch.promote_types(keys.dtype, torch.float32), frequencies.numel()
        cos, sin = turn.cos().to(wide), turn.sin().to(wide)
        first, second = keys[..., :half].to(wide), keys[..., half : 2 * half].to(wide)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(keys.dtype)
        return torch.cat((turned, keys[..., 2 * half :]), -1)


def _frequencies(module: Any) -> Any:
    return getattr(module, "inv_freq", None)
