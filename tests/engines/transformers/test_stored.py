"""What is stored, for whom, and what becomes of bytes that changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import StoppingCriteria

from kvstore import Client, chain_keys
from kvstore_transformers import PrefixCache
from tests.engines.transformers.models import BLOCK, EOS, generated, llama, same_bits, tokens, two_rows

Make = Callable[..., PrefixCache]


class StopsFirstRow(StoppingCriteria):  # type: ignore[misc]
    """Row 0 is done at a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[0] = input_ids.shape[1] >= self._length
        return done


def stored(cache: PrefixCache, row: list[int], salt: bytes) -> int:
    """How many blocks of a row are stored."""
    return cache._ns.lookup(chain_keys(row, BLOCK, salt))


def test_no_tokens_after_the_end_of_a_row_are_stored(cached: Make, salt: bytes) -> None:
    cache = cached(llama())
    ended, whole = two_rows(cache, ends_at=52)
    assert ended[52] == EOS
    assert ended[53:] == [0] * 47
    # 53 tokens with the EOS, and 99 that were inputs.
    assert stored(cache, ended, salt) == 3
    assert stored(cache, whole, salt) == 6
    assert cache.last.stored_blocks == 9


@pytest.mark.parametrize("pad", [0, EOS, None])
def test_an_eos_that_fills_a_block_is_stored_with_it(cached: Make, salt: bytes, pad: int | None) -> None:
    cache = cached(llama())
    ended, _ = two_rows(cache, ends_at=63, eos_token_id=[EOS, 9], pad_token_id=pad)
    assert ended[63:] == [EOS] + [EOS if pad is None else pad] * 36
    assert stored(cache, ended, salt) == 4


def test_padding_after_another_stop_is_not_stored(cached: Make, salt: bytes) -> None:
    cache = cached(llama())
    ended, _ = two_rows(cache, ends_at=1000, stopping_criteria=[StopsFirstRow(52)])
    assert ended[52:] == [0] * 48
    assert stored(cache, ended, salt) == 3


def test_other_models_and_settings_share_nothing(cached: Make) -> None:
    prompt = tokens(104)
    generated(cached(llama()), prompt)
    others = {
        "weights": cached(llama(seed=1)),
        "dtype": cached(llama(torch.bfloat16)),
        "dtype of the same size": cached(llama(torch.float16), revision="1"),
        "block_tokens": cached(llama(), block_tokens=32),
        "salt": cached(llama(), salt=b"other"),
        "revision": cached(llama(), revision="2"),
        "rope": cached(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        "epsilon": cached(llama(rms_norm_eps=1e-3)),
        "attention": cached(llama(attention="sdpa")),
    }
    generated(cached(llama(torch.bfloat16), revision="1"), prompt)
    for what, cache in others.items():
        generated(cache, prompt)
        assert cache.last.restored_tokens == 0, what
        assert cache.last.stored_blocks > 0, what
    same = cached(llama())
    generated(same, prompt)
    assert same.last.restored_tokens == 80


def test_one_changed_weight_is_another_model(cached: Make) -> None:
    model = llama()
    generated(cached(model), tokens(104))
    with torch.no_grad():
        model.model.norm.weight[5] += 1e-3
    cache = cached(model)
    generated(cache, tokens(104))
    assert cache.last.restored_tokens == 0


def test_a_named_revision_stands_for_the_weights(cached: Make) -> None:
    generated(cached(llama(), revision="mine"), tokens(104))
    cache = cached(llama(seed=1), revision="mine")
    generated(cache, tokens(104))
    assert cache.last.restored_tokens == 80


@pytest.mark.parametrize("altered", [0, 3])
def test_altered_bytes_are_never_restored(cached: Make, client: Client, salt: bytes, altered: int) -> None:
    """The blocks of one salt are put under another by hand, so that their mapping can be kept and written."""
    model, prompt = llama(), tokens(104)
    cache = cached(model)
    alone = generated(model, prompt)
    generated(cache, prompt)
    ns = cache._ns
    blocks = np.empty((6, ns.layout.block_bytes), np.uint8)
    assert ns.get(chain_keys(prompt, BLOCK, salt), blocks) == 6

    victim = cached(model, salt=salt + b"x")
    with ns.reserve(chain_keys(prompt, BLOCK, salt + b"x")) as room:
        views = room.blocks
        for view, block in zip(views, blocks, strict=True):
            view[:] = block.tobytes()
        room.commit()
        views[altered][1234] ^= 1
    assert same_bits(generated(victim, prompt), alone)
    assert victim.last.restored_tokens == altered * BLOCK
