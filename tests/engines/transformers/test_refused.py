"""Models and calls that can't be served: each refusal names the thing, and has a hint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    QuantizedCache,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from kvstore import Client
from kvstore.errors import MisuseError
from kvstore_transformers import PrefixCache
from tests.engines.transformers.models import BLOCK, batch, generated, llama, same_bits, tokens

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def cache(daemon: Any) -> Any:
    with Client(daemon.url) as client:
        yield PrefixCache(llama(), client, BLOCK, salt=b"refused")


def refuses(match: str, what: Any) -> None:
    with pytest.raises(MisuseError, match=match) as refusal:
        what()
    assert refusal.value.hint


def mixed() -> Any:
    kinds = ["full_attention", "sliding_attention"]
    return Qwen2ForCausalLM(
        Qwen2Config(**TINY, use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types=kinds)
    )


def encoder_decoder() -> Any:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


def chunked() -> Any:
    sizes = {"intermediate_size_mlp": 96, "num_local_experts": 1, "head_dim": 32}
    return Llama4ForCausalLM(Llama4TextConfig(**TINY, **sizes, attention_chunk_size=8))


def rope(kind: str) -> Any:
    more = {"dynamic": {"factor": 2.0}, "longrope": {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}}
    fields = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **more[kind]}
    return llama(rope_parameters={"rope_type": kind, **fields}, max_position_embeddings=64)


def quantized() -> Any:
    model = llama()
    model.is_quantized = True
    return model


def half_loaded() -> Any:
    model = llama()
    model.lm_head.to("meta")
    return model


MODELS = {
    "Llama4ForCausalLM attends in chunks": chunked,
    "MambaForCausalLM takes no past_key_values": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    ),
    "T5ForConditionalGeneration is an encoder-decoder": encoder_decoder,
    "LlamaForCausalLM has dynamic position embeddings": lambda: rope("dynamic"),
    "LlamaForCausalLM has longrope position embeddings": lambda: rope("longrope"),
    "the weights of LlamaForCausalLM are quantized": quantized,
    "weight lm_head.weight is not in memory": half_loaded,
}


@pytest.mark.parametrize("match", MODELS)
def test_models(match: str) -> None:
    model = MODELS[match]().eval()
    refuses(match.strip(), lambda: PrefixCache(model, Client("unix:///nowhere")))


def test_a_model_without_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicCache, "update", lambda self, keys, values, *_, **__: (keys, values))
    refuses("LlamaForCausalLM did not put", lambda: PrefixCache(llama(), Client("unix:///nowhere")))


def test_other_decoders_are_served(daemon: Any) -> None:
    models = [
        Qwen2ForCausalLM(Qwen2Config(**TINY)),
        GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=2)),
        MistralForCausalLM(MistralConfig(**TINY, sliding_window=None)),
    ]
    with Client(daemon.url) as client:
        for model in models:
            served = PrefixCache(model.eval(), client, BLOCK)
            for restored in (0, 80):
                assert same_bits(generated(served, tokens(104)), generated(model, tokens(104)))
                assert served.last.restored_tokens == restored


OPTIONS = {
    "inputs_embeds": torch.zeros(1, 4, 128),
    "position_ids": torch.arange(4)[None],
    "token_type_ids": torch.zeros(1, 4, dtype=torch.long),
    "pixel_values": torch.zeros(1, 3, 8, 8),
    "encoder_outputs": (torch.zeros(1, 4, 128),),
    "past_key_values": DynamicCache(),
    "adapter_names": ["one"],
    "assistant_model": llama(),
    "negative_prompt_ids": torch.ones(1, 4, dtype=torch.long),
    "num_return_sequences": 2,
    "use_cache": False,
    "cache_implementation": "static",
    "output_attentions": True,
    "output_hidden_states": True,
    "token_healing": True,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(cache: PrefixCache, name: str) -> None:
    inputs = batch(tokens(4))
    refuses(f"^{name} is", lambda: cache.generate(**inputs, do_sample=True, **{name: OPTIONS[name]}))


MODES = {
    "beam_search": {"num_beams": 2},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "contrastive_search": {"penalty_alpha": 0.6, "top_k": 4},
    "assisted_generation": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_generation_modes(cache: PrefixCache, mode: str) -> None:
    refuses(f"mode is {mode}", lambda: cache.generate(**batch(tokens(4)), **MODES[mode]))


@pytest.mark.parametrize("implementation", ["static", "quantized", "dynamic"])
def test_settings_of_the_model_count_too(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    monkeypatch.setattr(cache._model.generation_config, "cache_implementation", implementation)
    refuses(f"cache_implementation is '{implementation}'", lambda: cache.generate(**batch(tokens(4))))


def test_masks(cache: PrefixCache) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    for mask in ([[1, 1, 1, 0]], [[0, 1, 0, 1]], [[0.0, 0.5, 1.0, 1.0]]):
        refuses(
            "attention_mask is not zeros followed by ones",
            lambda mask=mask: cache.generate(ids, torch.tensor(mask)),
        )
    refuses("attention_mask is .1, 3.", lambda: cache.generate(ids, torch.ones(1, 3)))
    refuses("a row without tokens", lambda: cache.generate(ids, torch.zeros(1, 4)))
    refuses("attention_mask is missing", lambda: cache.generate(ids, pad_token_id=5))
    refuses("input_ids is not a batch", lambda: cache.generate(ids[0]))
    refuses("input_ids is not a batch", lambda: cache.generate([[5, 6]]))


def test_a_pad_token_that_is_also_the_eos_needs_no_mask(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 2, "pad_token_id": 5, "eos_token_id": [4, 5]}
    real, masks = cache._model.generate, []
    expected = real(ids, **options)

    def generate(*args: Any, **more: Any) -> Any:
        masks.append(more["attention_mask"])
        return real(*args, **more)

    monkeypatch.setattr(cache._model, "generate", generate)
    assert torch.equal(cache.generate(ids, **options), expected)
    assert torch.equal(masks[0], torch.ones_like(ids))


def test_a_model_that_changed(cache: PrefixCache) -> None:
    model = cache._model
    model.train()
    refuses("training mode", lambda: cache.generate(**batch(tokens(4))))
    model.eval()
    model.to(torch.bfloat16)
    refuses("went from", lambda: cache.restore(**batch(tokens(4))))
    model.to(torch.float32)


def test_custom_caches(cache: PrefixCache) -> None:
    # Caches of transformers drop the tokens outside the window.
    for dropping, layer in (
        (DynamicCache(config=mixed().config), "DynamicSlidingWindowLayer"),
        (StaticCache(config=mixed().config, max_cache_len=8), "StaticSlidingWindowLayer"),
        (QuantizedCache("fp8", cache._model.config), "Fp8QuantizedLayer"),
    ):
        refuses(f"is a {layer}", lambda past=dropping: cache.store(past, torch.tensor([[5, 6, 7, 8]])))


def test_sizes() -> None:
    client = Client("unix:///nowhere")
    refuses("block_tokens is 0", lambda: PrefixCache(llama(), client, block_tokens=0))
    refuses("layout.block_bytes", lambda: PrefixCache(llama(), client, block_tokens=1 << 20))


def test_nothing_is_stored_by_a_refused_call(cache: PrefixCache) -> None:
    before = cache.last
    refuses("use_cache", lambda: cache.generate(**batch(tokens(4)), use_cache=False))
    assert cache.last is before
