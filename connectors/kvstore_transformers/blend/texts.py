"""Token ids of texts, as callers give them. Each refusal is a MisuseError with a hint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore.errors import MisuseError

Text = Any
"""Token ids of one text: a list, or a tensor (tokens,) or (1, tokens)."""


def chunks_of(chunks: Sequence[Text], config: Any) -> list[list[int]]:
    """Returns the token ids of each chunk. Refuses a chunk that is empty or longer than the context."""
    if isinstance(chunks, str | bytes) or not isinstance(chunks, Sequence) or not len(chunks):
        raise MisuseError("chunks is not a list of at least one text", "pass the token ids of each document")
    texts = [tokens_of(f"chunk {i}", chunk, config) for i, chunk in enumerate(chunks)]
    for i, text in enumerate(texts):
        check_fits(f"chunk {i}", len(text), config)
    return texts


def tokens_of(name: str, text: Text, config: Any, empty: bool = False) -> list[int]:
    """Returns the token ids of a text. Refuses what is not one text, or not of the model's vocabulary."""
    try:
        ids = torch.as_tensor(text)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MisuseError(f"{name} is not token ids: {error}", "pass integers, not text") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim == 1 and not len(ids):
        if empty:
            return []
        raise MisuseError(f"{name} is empty", "pass at least one token")
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise MisuseError(f"{name} is not the token ids of one text", "pass a list of integers, no batch")
    if bool((ids < 0).any()) or bool((ids >= config.vocab_size).any()):
        raise MisuseError(
            f"{name} has token ids outside 0 to {config.vocab_size - 1}", "use the tokenizer of the model"
        )
    return [int(token) for token in ids.tolist()]


def check_fits(what: str, tokens: int, config: Any) -> None:
    """Refuses more tokens than the context of the model."""
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and tokens > context:
        raise MisuseError(
            f"{what} has {tokens} tokens",
            f"the context of the model is {context} tokens: pass fewer or shorter chunks",
        )


def check_share(recompute: Any) -> None:
    """Refuses what is not a share of the tokens."""
    if isinstance(recompute, bool) or not isinstance(recompute, int | float) or not 0 <= recompute <= 1:
        raise MisuseError(f"recompute is {recompute!r}", "a share of the tokens from 0 to 1, such as 0.15")
