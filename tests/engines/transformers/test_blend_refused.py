"""Models and calls that can't be blended: each refusal names the thing, and has a hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore import Client
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_transformers import ChunkCache, PrefixCache
from kvstore_transformers.blend.rotation import Rotation
from tests.engines.transformers.models import BLOCK, batch, llama, tokens
from tests.engines.transformers.shapes import FALCON, GPT2, LONG, MLA, NEO, OPT, SERVED, STATES, of, rope

SHARED = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 512}


@pytest.fixture(scope="module")
def cache(daemon: LocalDaemon) -> Any:
    with Client(daemon.url) as client:
        yield ChunkCache(llama(max_position_embeddings=200), client, BLOCK, salt=b"refused")


def refuses(match: str, what: Any) -> None:
    with pytest.raises(MisuseError, match=match) as refusal:
        what()
    assert refusal.value.hint


def away() -> Client:
    return Client("unix:///nowhere")


def flex() -> Any:
    model = llama()
    model.set_attn_implementation("flex_attention")
    return model


def half_loaded() -> Any:
    model = llama()
    model.lm_head.to("meta")
    return model


def warmer() -> Any:
    """Its queries are scaled by their absolute positions, which a short run does not show."""
    model = llama()
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.1
    return model


def one_layer_without(model: Any) -> Any:
    """As the layers without positions of SmolLM 3: its keys are not rotated."""
    attention = model.model.layers[2].self_attn
    real = attention.forward

    def forward(*args: Any, position_embeddings: Any, **more: Any) -> Any:
        cos, sin = position_embeddings
        return real(*args, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **more)

    attention.forward = forward
    return model


def with_absolute_positions(model: Any) -> Any:
    """Adds a little of its position to each token."""
    real = model.model.forward

    def forward(input_ids: Any, position_ids: Any = None, **more: Any) -> Any:
        at = torch.zeros_like(input_ids) if position_ids is None else position_ids
        embeds = model.model.embed_tokens(input_ids) + at[..., None] / 1e3
        return real(position_ids=position_ids, **{**more, "inputs_embeds": embeds})

    model.model.forward = forward
    return model


def deaf_to_masks(model: Any) -> Any:
    """Makes its own mask, of the columns of its cache."""
    real = model.model.forward

    def forward(*args: Any, attention_mask: Any = None, **more: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim == 4:
            attention_mask = torch.ones_like(attention_mask, dtype=torch.bool)
        return real(*args, attention_mask=attention_mask, **more)

    model.model.forward = forward
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "MLA of V2": (of("DeepseekV2ForCausalLM", **MLA), "DeepseekV2ForCausalLM has latent attention"),
    "MLA of V3": (of("DeepseekV3ForCausalLM", **{**MLA, "q_lora_rank": 32}), "has latent attention"),
    "windows": (of("MistralForCausalLM", sliding_window=32), "MistralForCausalLM has sliding windows"),
    "windows of Gemma 3": (of("Gemma3ForCausalLM", sliding_window=32), "has sliding windows"),
    "windows of Gemma 2": (SERVED["interleaved windows of Gemma 2"], "has sliding windows"),
    "windows of Gemma 3n": (SERVED["shared keys of Gemma 3n"], "has sliding windows"),
    "windows of Gemma 4": (SERVED["shared keys and windows of Gemma 4"], "has sliding windows"),
    "shared keys": (
        of("Gemma3nForCausalLM", **SHARED, layer_types=["full_attention"] * 4),
        "layers of Gemma3nForCausalLM share keys",
    ),
    "sinks": (SERVED["sinks"], "GptOssForCausalLM has sliding windows"),
    "states of Qwen3-Next": (STATES["gated delta rule of Qwen3-Next"], "Qwen3NextForCausalLM has states"),
    "states": (STATES["Mamba-2 of Bamba"], "BambaForCausalLM has states"),
    "convolutions": (STATES["short convolutions of LFM2"], "Lfm2ForCausalLM has states"),
    "learned positions of GPT-2": (of("GPT2LMHeadModel", GPT2), "GPT2LMHeadModel has 0 rotary embeddings"),
    "learned positions of OPT": (of("OPTForCausalLM", **OPT), "OPTForCausalLM has 0 rotary embeddings"),
    "learned positions of GPT-Neo": (of("GPTNeoForCausalLM", NEO), "has 0 rotary embeddings"),
    "long rope": (of("LlamaForCausalLM", **rope("longrope", **LONG)), "has longrope position embeddings"),
    "dynamic rope": (of("LlamaForCausalLM", **rope("dynamic")), "has dynamic position embeddings"),
    "rotation of neighbours": (of("CohereForCausalLM"), "keys of layer 0 of CohereForCausalLM do not turn"),
    "a layer without positions of SmolLM 3": (
        of("SmolLM3ForCausalLM", no_rope_layers=[1, 1, 0, 1]),
        "keys of layer 2 of SmolLM3ForCausalLM do not turn",
    ),
    "a layer without positions": (
        lambda: one_layer_without(of("LlamaForCausalLM")()),
        "keys of layer 2 of LlamaForCausalLM do not turn",
    ),
    "absolute positions": (
        lambda: with_absolute_positions(of("LlamaForCausalLM")()),
        "keys of layer 0 of LlamaForCausalLM do not turn",
    ),
    "its own mask": (
        lambda: deaf_to_masks(of("LlamaForCausalLM")()),
        "layer 1 of LlamaForCausalLM gives other keys or values to tokens between others",
    ),
    "scaled queries": (warmer, "has a parameter llama_4_scaling_beta"),
    "flex attention": (flex, "the attention implementation of LlamaForCausalLM is flex_attention"),
    "weights elsewhere": (half_loaded, "weight lm_head.weight is not in memory"),
    "an encoder-decoder": (
        of("T5ForConditionalGeneration", {"vocab_size": 64, "d_model": 16, "num_layers": 1}),
        "is an encoder-decoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, match = MODELS[name]
    model = make().eval()
    refuses(match, lambda: ChunkCache(model, away(), BLOCK, revision="1"))


def test_alibi_has_no_keys_to_turn() -> None:
    model = of("FalconForCausalLM", FALCON, alibi=True)()
    with pytest.raises(MisuseError, match="FalconForCausalLM") as refusal:
        ChunkCache(model, away(), BLOCK)
    assert refusal.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda keys, shift, real: keys,
        lambda keys, shift, real: real(keys, shift * 2),
        lambda keys, shift, real: real(keys, -shift),
        lambda keys, shift, real: torch.cat((real(keys, shift)[..., :8], keys[..., 8:]), -1),
    ],
    ids=["none", "too far", "backwards", "some dimensions"],
)
def test_a_wrong_rotation_is_detected(monkeypatch: pytest.MonkeyPatch, dtype: Any, wrong: Any) -> None:
    model = of("LlamaForCausalLM")().to(dtype)
    ChunkCache(model, away(), BLOCK)
    real = Rotation.move

    def move(self: Rotation, keys: Any, sources: Any, targets: Any) -> Any:
        shift = targets - sources
        return wrong(keys, shift, lambda some, by: real(self, some, sources, sources + by))

    monkeypatch.setattr(Rotation, "move", move)
    refuses("keys of layer 0 of LlamaForCausalLM do not turn", lambda: ChunkCache(model, away(), BLOCK))


SHARES = [-0.01, 1.01, float("nan"), float("inf"), "0.15", None, True]


@pytest.mark.parametrize("share", SHARES)
def test_shares(cache: ChunkCache, share: Any) -> None:
    refuses("recompute is", lambda: cache.blend([[5]], [6], recompute=share))


TEXTS: dict[str, tuple[Any, str]] = {
    "none": ([], "chunks is not a list of at least one text"),
    "text": ("words", "chunks is not a list of at least one text"),
    "a tensor": (torch.ones(2, 3, dtype=torch.long), "chunks is not a list of at least one text"),
    "an empty one": ([[5], []], "chunk 1 is empty"),
    "an empty tensor": ([torch.zeros(1, 0, dtype=torch.long)], "chunk 0 is empty"),
    "words": ([["a", "b"]], "chunk 0 is not token ids"),
    "a flat list": ([5, 6, 7], "chunk 0 is not the token ids of one text"),
    "fractions": ([[0.5, 1.5]], "chunk 0 is not the token ids of one text"),
    "a batch": ([torch.ones(2, 3, dtype=torch.long)], "chunk 0 is not the token ids of one text"),
    "ids outside the vocabulary": ([[5, 512]], "chunk 0 has token ids outside 0 to 511"),
    "negative ids": ([[-1]], "chunk 0 has token ids outside 0 to 511"),
    "a long one": ([tokens(201)], "chunk 0 has 201 tokens"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_chunks(cache: ChunkCache, name: str) -> None:
    chunks, match = TEXTS[name]
    refuses(match, lambda: cache.store(chunks))
    refuses(match, lambda: cache.blend(chunks, [6]))


def test_the_other_texts(cache: ChunkCache) -> None:
    refuses("question is empty", lambda: cache.blend([[5]], []))
    refuses("question has token ids outside", lambda: cache.blend([[5]], [999]))
    refuses("prefix has token ids outside", lambda: cache.blend([[5]], [6], [999]))
    refuses("the prompt has 201 tokens", lambda: cache.blend([tokens(100), tokens(90)], tokens(10), [5]))
    cache.blend([tokens(100), tokens(90)], tokens(10))


def test_a_model_that_changed() -> None:
    model = llama()
    cache = ChunkCache(model, away(), BLOCK)
    model.train()
    refuses("training mode", lambda: cache.blend([[5]], [6]))
    model.eval()
    model.to(torch.bfloat16)
    refuses("went from", lambda: cache.store([[5]]))


def test_a_prefix_cache_takes_no_blended_cache(daemon: LocalDaemon) -> None:
    """Otherwise lossy keys and values would be stored as exact ones."""
    model = llama()
    with Client(daemon.url) as client:
        past = ChunkCache(model, client, BLOCK, salt=b"lossy").blend([tokens(40)], [6]).past_key_values
        exact = PrefixCache(model, client, BLOCK, salt=b"lossy")
        refuses("layer 0 of the cache is a LossyLayer", lambda: exact.store(past, torch.tensor([tokens(40)])))
        inputs = batch(tokens(48))
        refuses("past_key_values is a", lambda: exact.generate(**inputs, past_key_values=past))
        assert exact.restore(**inputs).get_seq_length() == 0


def test_sizes() -> None:
    refuses("block_tokens is 0", lambda: ChunkCache(llama(), away(), block_tokens=0))
    refuses("layout.block_bytes", lambda: ChunkCache(llama(), away(), block_tokens=1 << 20))
