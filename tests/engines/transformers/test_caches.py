"""The layers that keep the tokens outside a window."""

from __future__ import annotations

import torch
from transformers import MistralConfig

from kvstore_transformers.caches import WindowLayer, new_cache
from tests.engines.transformers.shapes import SMALL

WINDOW = 8


def tokens(first: int, count: int) -> torch.Tensor:
    """Keys (1, 1, count, 1), each its own number."""
    return torch.arange(first, first + count, dtype=torch.float32).reshape(1, 1, count, 1)


def numbers(seen: torch.Tensor) -> list[int]:
    return [int(each) for each in seen.flatten()]


def test_the_model_sees_a_window_and_all_tokens_are_kept() -> None:
    [layer, *_] = new_cache(MistralConfig(**SMALL, sliding_window=WINDOW)).layers
    assert type(layer) is WindowLayer
    for first, count, seen_from in ((0, 5, 0), (5, 10, 0), (15, 1, 8), (16, 4, 9)):
        # The masks that transformers makes have this many columns.
        length, _ = layer.get_mask_sizes(count)
        keys, values = layer.update(tokens(first, count), -tokens(first, count))
        assert numbers(keys) == list(range(seen_from, first + count))
        assert numbers(-values) == numbers(keys)
        assert length == keys.shape[-2]
    assert numbers(layer.keys) == list(range(20))
    assert layer.get_seq_length() == 20


def test_generate_crops_the_tokens_that_it_undoes_and_no_others() -> None:
    [layer, *_] = new_cache(MistralConfig(**SMALL, sliding_window=WINDOW)).layers
    layer.crop(0)
    layer.update(tokens(0, 20), tokens(0, 20))
    layer.crop(0)
    assert numbers(layer.keys) == list(range(20))
    layer.crop(-3)
    assert numbers(layer.values) == list(range(17))
    assert layer.get_seq_length() == 17
