"""Shapes of models, tiny and random: what each keeps in its cache, and whether it can be served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large weights: then attention decides what is said, not the last token alone.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 24}
BLOOM = {"vocab_size": 512, "hidden_size": 64, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}
MPT = {
    "vocab_size": 512,
    "d_model": 64,
    "n_layers": 3,
    "n_heads": 4,
    "max_seq_len": 512,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}
FALCON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
NEO = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 32,
    "initializer_range": 0.2,
}
UPPER_WINDOWS = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
CHUNKS = {"attention_chunk_size": 32, "intermediate_size_mlp": 96}
T5 = {"vocab_size": 64, "d_model": 16, "num_layers": 1}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_d_head": 32}
MAMBA_1 = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "sliding_window_size": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "unpadded_vocab_size": 512,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
ZAYA = {
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "router_hidden_size": 32,
}
MIXED = ["linear_attention", "hybrid"] * 2
NEMOTRON = {
    "layer_types": ["linear_attention", "mlp", "full_attention", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Rotary embeddings stretched beyond 64 positions."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}}


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def of(name: str, base: dict[str, Any] = SMALL, **fields: Any) -> Callable[[], Any]:
    """How to make a model of a class of transformers, always with the same weights."""

    def make() -> Any:
        kind = getattr(t, name)
        torch.manual_seed(0)
        return kind(kind.config_class(**{**base, **fields})).eval()

    return make


def gpt_oss() -> Any:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    return t.GptOssForCausalLM(t.GptOssConfig(**SMALL, **MOE, sliding_window=32, layer_types=kinds)).eval()


def gemma3_with_images() -> Any:
    text = {**SMALL, "sliding_window": 512}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = t.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return t.Gemma3ForConditionalGeneration(config).eval()


SERVED: dict[str, Callable[[], Any]] = {
    "full attention": of("LlamaForCausalLM"),
    "GQA": of("LlamaForCausalLM", num_key_value_heads=2),
    "MQA": of("LlamaForCausalLM", num_key_value_heads=1),
    "biases": of("Qwen2ForCausalLM"),
    "normed queries and keys": of("Qwen3ForCausalLM"),
    "MoE": of("MixtralForCausalLM", **MOE, sliding_window=None),
    "MoE of Qwen3": of("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "MLA of V2": of("DeepseekV2ForCausalLM", **MLA),
    "MLA of V3": of("DeepseekV3ForCausalLM", **{**MLA, "q_lora_rank": 32}),
    "window switched off": of("MistralForCausalLM", sliding_window=None),
    "linear rope": of("LlamaForCausalLM", **rope("linear")),
    "yarn": of("LlamaForCausalLM", **rope("yarn", original_max_position_embeddings=64)),
    "llama3 rope": of("LlamaForCausalLM", **rope("llama3", **LLAMA3)),
    "partial rope": of("GPTNeoXForCausalLM"),
    "multi-query, parallel": of("FalconForCausalLM", FALCON),
    "ALiBi of Falcon": of("FalconForCausalLM", FALCON, alibi=True),
    "learned positions of GPT-2": of("GPT2LMHeadModel", GPT2),
    "learned positions of OPT": of("OPTForCausalLM", **OPT),
    "local attention over a full cache": of("GPTNeoForCausalLM", NEO),
    "soft caps": of("GemmaForCausalLM"),
    "window smaller than a block": of("MistralForCausalLM", sliding_window=9),
    "window smaller than the prompt": of("MistralForCausalLM", sliding_window=32),
    "window larger than the prompt": of("MistralForCausalLM", sliding_window=512),
    "window of Phi-3": of("Phi3ForCausalLM", sliding_window=32),
    "window of StarCoder2": of("Starcoder2ForCausalLM", sliding_window=32),
    "interleaved windows of Gemma 2": of("Gemma2ForCausalLM", sliding_window=32),
    "interleaved windows of Gemma 3": of("Gemma3ForCausalLM", sliding_window=32),
    "interleaved windows with a GQA of Qwen2": of(
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=32,
        max_window_layers=2,
        num_key_value_heads=2,
    ),
    "sinks": gpt_oss,
    "shared keys and windows of Gemma 4": of(
        "Gemma4ForCausalLM",
        sliding_window=32,
        global_head_dim=32,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=512,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "shared keys of Gemma 3n": of(
        "Gemma3nForCausalLM", num_kv_shared_layers=2, vocab_size_per_layer_input=512, sliding_window=32
    ),
}

STATES: dict[str, Callable[[], Any]] = {
    "gated delta rule of Qwen3-Next": of("Qwen3NextForCausalLM", **LINEAR, **EXPERTS),
    "gated delta rule of Qwen3.5": of("Qwen3_5ForCausalLM", **LINEAR),
    "gated delta rule of Qwen3.5-MoE": of("Qwen3_5MoeForCausalLM", **LINEAR, **EXPERTS),
    "gated delta rule of OLMo": of("OlmoHybridForCausalLM", **LINEAR),
    "Kimi's delta rule with MLA": of(
        "KimiLinearForCausalLM",
        **{**MLA, "num_experts": 4, "linear_num_heads": 4, "linear_head_dim": 16},
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "lightning attention with MLA": of(
        "BailingHybridForCausalLM",
        **{**MLA, "q_lora_rank": 32},
        layer_group_size=2,
        num_experts=4,
    ),
    "short convolutions of LFM2": of("Lfm2ForCausalLM", **CONVOLUTIONS, block_ff_dim=96),
    "short convolutions of LFM2-MoE": of("Lfm2MoeForCausalLM", **CONVOLUTIONS, **EXPERTS, num_dense_layers=1),
    "convolutions and windows of LFM3": of("Lfm3ForCausalLM", num_hidden_layers=5, sliding_window=32),
    "Mamba-2 of Bamba": of("BambaForCausalLM", **MAMBA, attn_layer_indices=[1, 3]),
    "Mamba-2 of Granite": of(
        "GraniteMoeHybridForCausalLM",
        **MAMBA,
        **MOE,
        shared_intermediate_size=96,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "Mamba-2 and layers without a cache": of(
        "NemotronHForCausalLM",
        {name: value for name, value in SMALL.items() if name != "num_hidden_layers"},
        **NEMOTRON,
    ),
    "Mamba-2 and attention in one layer": of(
        "FalconH1ForCausalLM", **{**MAMBA, "mamba_d_head": 16}, mamba_d_ssm=64
    ),
    "Mamba-2 and shared attention of Zamba2": of(
        "Zamba2ForCausalLM", mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=1, layers_block_type=MIXED
    ),
    "convolutions and attention in one layer": of("ZayaForCausalLM", **ZAYA),
    "convolutions, attention and windows of Zaya": of(
        "ZayaForCausalLM", **ZAYA, sliding_window=32, layer_types=["hybrid", "hybrid_sliding"] * 2
    ),
    "four convolutions and a window in one layer": of("InklingForCausalLM", **INKLING, n_shared_experts=1),
    "four convolutions of Inkling 2": of("Inkling2ForCausalLM", **INKLING),
}
"""Models with states."""

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "chunks": (
        of("Llama4ForCausalLM", attention_chunk_size=32, intermediate_size_mlp=96, **MOE),
        "in chunks",
    ),
    "compressed keys": (of("DeepseekV4ForCausalLM"), "layer 0 of the cache is a DeepseekV4HCACache"),
    "sparse attention of V3.2": (
        of("DeepseekV32ForCausalLM", **{**MLA, "q_lora_rank": 32}, **INDEXER),
        "layer 0 of the cache is a DynamicIndexedLayer",
    ),
    "sparse attention of GLM": (
        of("GlmMoeDsaForCausalLM", **{**MLA, "q_lora_rank": 32}, **INDEXER),
        "layer 0 of the cache is a DynamicIndexedLayer",
    ),
    "dynamic rope": (of("LlamaForCausalLM", **rope("dynamic")), "dynamic position"),
    "longrope": (of("Phi3ForCausalLM", **rope("longrope", **LONG)), "longrope position"),
    "Mamba-1 of Jamba": (
        of("JambaForCausalLM", **MAMBA_1, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
        "does not continue from its states",
    ),
    "Mamba-1 of Zamba": (
        of(
            "ZambaForCausalLM",
            **MAMBA_1,
            layer_types=MIXED,
            attention_head_dim=32,
            attention_hidden_size=128,
            n_mamba_heads=2,
        ),
        "does not continue from its states",
    ),
    "Mamba": (of("MambaForCausalLM", state_size=4), "takes no past_key_values"),
    "Mamba-2 alone": (
        of("Mamba2ForCausalLM", state_size=8, num_heads=4, head_dim=32, n_groups=1),
        "takes no past_key_values",
    ),
    "states without attention": (
        of("GraniteMoeHybridForCausalLM", **MAMBA, **MOE, layer_types=["linear_attention"] * 4),
        "has no attention",
    ),
    "states outside the cache": (
        of("RecurrentGemmaForCausalLM"),
        "layer 0 keeps its state outside the cache",
    ),
    "a cache class of its own": (
        of("MiniMaxForCausalLM", num_local_experts=4),
        "has a cache class of its own",
    ),
    "RWKV": (of("RwkvForCausalLM"), "takes no past_key_values"),
    "ALiBi of Bloom": (of("BloomForCausalLM", BLOOM), "takes no position_ids"),
    "ALiBi of MPT": (of("MptForCausalLM", MPT), "takes no position_ids"),
    "T5": (of("T5ForConditionalGeneration", T5), "encoder-decoder"),
    "BART": (of("BartForConditionalGeneration", {"vocab_size": 64, "d_model": 16}), "encoder-decoder"),
    "bidirectional attention": (of("GemmaForCausalLM", use_bidirectional_attention=True), "bidirectional"),
    "an encoder with a language head": (
        of("BertLMHeadModel", is_decoder=False),
        "depend on the tokens that follow",
    ),
    "images with bidirectional attention": (gemma3_with_images, "takes more than text"),
}
