"""Static caches that the caller passes: filled and stored as the default cache is, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import QuantizedCache, StaticCache

from kvstore.errors import MisuseError
from kvstore_transformers import PrefixCache
from kvstore_transformers.blocks import Columns
from tests.engines.transformers.models import KINDS, batch, generated, llama, same_bits, tokens
from tests.engines.transformers.shapes import SERVED, STATES

Make = Callable[..., PrefixCache]
PROMPT = tokens(104)
SERVED_STATIC = ["full attention", "MQA", "MLA of V3", "MoE", "learned positions of OPT", "yarn"]


def static(model: Any, tokens: int = 128) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=tokens)


@pytest.mark.parametrize(("dtype", "attention", "kv_heads"), KINDS)
def test_a_static_cache_is_filled_and_stored(cached: Make, dtype: Any, attention: str, kv_heads: int) -> None:
    model = llama(dtype, attention, kv_heads)
    cache, past = cached(model), static(model)
    alone = generated(model, PROMPT, past_key_values=static(model))
    assert same_bits(generated(cache, PROMPT, past_key_values=past), alone)
    assert (cache.last.restored_tokens, cache.last.stored_blocks) == (0, 6)
    # The same memory is used again, as compiled models want it.
    past.reset()
    where = past.layers[0].keys.data_ptr()
    ours = generated(cache, PROMPT, past_key_values=past)
    assert torch.equal(ours.sequences, alone.sequences)
    assert past.layers[0].keys.data_ptr() == where
    assert cache.last.restored_tokens == 80
    # What one kind of cache has stored, the other finds.
    assert same_bits(generated(cache, PROMPT), generated(model, PROMPT))
    assert cache.last.restored_tokens == 80


@pytest.mark.parametrize("name", SERVED_STATIC)
def test_static_caches_of_models(cached: Make, name: str) -> None:
    model = SERVED[name]()
    cache = cached(model)
    prompts = PROMPT, tokens(84, seed=3)
    for restored in (0, 80 + 60):
        ours = generated(cache, *prompts, past_key_values=static(model))
        alone = generated(model, *prompts, past_key_values=static(model))
        assert torch.equal(ours.sequences, alone.sequences)
        for one, other in zip(ours.logits, alone.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert cache.last.restored_tokens == restored


def test_zeros_in_place_of_stored_bytes_change_the_output(
    cached: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SERVED["full attention"]()
    cache = cached(model)
    [alone, *_] = generated(cache, PROMPT, past_key_values=static(model)).logits
    real = cache._ns.get

    def get(keys: Any, out: Any, **options: Any) -> int:
        found = real(keys, out, **options)
        out[:] = 0
        return found

    monkeypatch.setattr(cache._ns, "get", get)
    [first, *_] = generated(cache, PROMPT, past_key_values=static(model)).logits
    assert cache.last.restored_tokens == 80
    assert (first - alone).abs().max() > 2e-3 * alone.abs().max()


def test_a_failed_restore_leaves_a_static_cache_empty(cached: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    cache = cached(model)
    generated(cache, PROMPT)
    real = Columns.to_cache

    def fill_then_fail(self: Columns, past: Any) -> None:
        real(self, past)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Columns, "to_cache", fill_then_fail)
    alone = generated(model, PROMPT, past_key_values=static(model))
    assert same_bits(generated(cache, PROMPT, past_key_values=static(model)), alone)
    assert (cache.last.restored_tokens, cache.failures) == (0, {"restore": 1})


def test_store_takes_a_static_cache(cached: Make) -> None:
    model = llama()
    cache = cached(model)
    past = static(model)
    generated(model, PROMPT, past_key_values=past)
    cache.store(past, torch.tensor([PROMPT]))
    assert cache.last.stored_blocks == 6
    assert same_bits(generated(cache, PROMPT), generated(model, PROMPT))
    assert cache.last.restored_tokens == 80


def test_refused(cached: Make) -> None:
    model, two = llama(), static(llama())
    cache = cached(model)
    generated(model, PROMPT, PROMPT, past_key_values=two)
    two.reset()
    used = static(model)
    generated(model, PROMPT, past_key_values=used)
    windows, states = (
        cached(make())
        for make in (SERVED["interleaved windows of Gemma 2"], STATES["short convolutions of LFM2"])
    )
    offloaded = static(model)
    offloaded.offloading = True
    for served, past, why in (
        (cache, QuantizedCache("fp8", model.config), "past_key_values is a QuantizedCache"),
        (cache, static(model, 64), "has room for 64 tokens, input_ids has 104"),
        (cache, two, "has 2 rows, input_ids 1"),
        (cache, used, "past_key_values holds tokens"),
        (cache, offloaded, "past_key_values is offloaded"),
        (windows, static(windows._model), "is a StaticSlidingWindowLayer"),
        (states, static(states._model), "layer 0 of past_key_values is a LinearAttentionLayer"),
    ):
        with pytest.raises(MisuseError, match=why) as refusal:
            served.generate(**batch(PROMPT), past_key_values=past)
        assert refusal.value.hint
