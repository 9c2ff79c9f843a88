"""Tiny random models of many shapes: what decides how vLLM lays out and keeps their KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engines.vllm.engine import VOCABULARY
from tests.programs import skip_for_cpu

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}


@dataclass(frozen=True)
class Shape:
    """A model: transformers' names of its configuration and model class, and what differs from SIZES."""

    family: str
    config: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    model: str = ""

    def save(self, folder: Path) -> Path:
        """Random weights in `folder`, the same ones each time."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.family}Config")(**self.sizes | self.config)
        make: Callable[[Any], Any] = getattr(transformers, self.model or f"{self.family}ForCausalLM")
        made = make(config).to(torch.float32)
        with torch.no_grad():
            for name, weights in made.named_parameters():
                if "sinks" in name:
                    weights.normal_()
        made.save_pretrained(folder)
        return folder


def mistral(window: int | None) -> Shape:
    return Shape("Mistral", {"sliding_window": window})


LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

REFERENCE = {"attention_backend": "CPU_MLA"}
"""vLLM's kernels for latent attention on any CPU. They compute no prompt behind a prefix."""
AMX = {"attention_backend": "AMX_MLA", "dtype": "bfloat16"}
"""Those for CPUs with AMX, which do."""


def need_amx() -> None:
    """Skips the running test on CPUs without AMX."""
    if not torch.cpu._is_amx_tile_supported():
        skip_for_cpu("it has no AMX, so vLLM computes no latent attention behind a prefix")


def need_fp8_kv() -> None:
    """Skips the running test on CPUs for which vLLM has no kernels that read FP8 KV."""
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        skip_for_cpu("it has no AVX-512, so vLLM reads no FP8 KV")


def gemma4(layers: list[str], **more: Any) -> Shape:
    """Heads of full attention are larger, and blocks have the same bytes: a window's has more tokens."""
    config = {
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "sliding_window": 64,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    return Shape("Gemma4Text", config | more, {"block_size": 32}, model="Gemma4ForCausalLM")


def phi(window: int | None) -> Shape:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
    }
    more = {"original_max_position_embeddings": 256, "rope_parameters": rope, "sliding_window": window}
    return Shape("Phi3", more, sizes=NO_HEAD_DIM)


WINDOW, FULL = "sliding_attention", "full_attention"
SHAPES = {
    "llama": Shape("Llama", {"num_key_value_heads": 4}),
    "grouped queries": Shape("Qwen3", {}),
    "experts": Shape(
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    # vLLM runs it by transformers' own code.
    "partial rope": Shape("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": 4}, sizes=NO_HEAD_DIM),
    "window smaller than the prompt": mistral(64),
    "window larger than the prompt": mistral(1024),
    "interleaved windows": Shape(
        "Gemma3Text",
        {
            "sliding_window": 64,
            "layer_types": [WINDOW, FULL] * 2,
            "query_pre_attn_scalar": 32,
        },
        model="Gemma3ForCausalLM",
    ),
    "sinks": Shape(
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": [WINDOW, FULL] * 2,
        },
        {"dtype": "bfloat16"},
    ),
    "shared KV": Shape(
        "Gemma3nText",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "layer_types": [WINDOW, WINDOW, FULL] * 2,
            "sliding_window": 64,
            "intermediate_size": [256] * 6,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "tie_word_embeddings": True,
        },
        model="Gemma3nForCausalLM",
    ),
    "two block sizes": gemma4([WINDOW, FULL] * 2),
    "two block sizes and shared KV": gemma4([WINDOW, WINDOW, FULL] * 2, num_kv_shared_layers=3),
    "latent": Shape("DeepseekV2", LATENT | {"q_lora_rank": None}, REFERENCE, sizes=NO_HEAD_DIM),
    "latent queries": Shape(
        "DeepseekV3",
        LATENT | {"q_lora_rank": 64, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc"},
        REFERENCE,
        sizes=NO_HEAD_DIM,
    ),
    "linear attention": Shape(
        "Qwen3Next",
        {
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", FULL] * 2,
        },
        {"dtype": "bfloat16"},
    ),
    "predicts two tokens": Shape(
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
    "long rope": phi(None),
    "long rope with a window": phi(64),
    "chunks": Shape(
        "Llama4Text",
        {
            "attention_chunk_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 256,
            "layer_types": ["chunked_attention", FULL] * 2,
            "no_rope_layers": [1, 0, 1, 0],
        },
        model="Llama4ForCausalLM",
    ),
    "short convolutions": Shape(
        "Lfm2",
        {
            "layer_types": ["conv", FULL] * 2,
            "block_dim": 128,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_ff_dim": 256,
        },
        {"dtype": "bfloat16"},
        sizes=NO_HEAD_DIM,
    ),
    "short convolutions and experts": Shape(
        "Lfm2Moe",
        {
            "layer_types": ["conv", FULL] * 2,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        {"dtype": "bfloat16"},
        sizes=NO_HEAD_DIM,
    ),
    "Mamba-2": Shape(
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
        },
        {"dtype": "bfloat16"},
        sizes=NO_HEAD_DIM,
    ),
    "encoder and decoder": Shape(
        "Whisper",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "max_target_positions": 448,
        },
        {"max_model_len": 448},
        sizes={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1},
        model="WhisperForConditionalGeneration",
    ),
    "bidirectional": Shape(
        "Bert", {}, {"runner": "pooling", "max_model_len": 512}, sizes=NO_HEAD_DIM, model="BertModel"
    ),
}
