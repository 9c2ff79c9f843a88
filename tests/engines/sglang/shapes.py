"""Model shapes that are served."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.sglang.models import make_model


@dataclass(frozen=True)
class Shape:
    """A family, as transformers names its classes, with changes of its configuration."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        return make_model(folder, self.family, **self.config)


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
WINDOW = {"sliding_window": 48}
GEMMA = {**WINDOW, "query_pre_attn_scalar": 32, "hidden_act": "gelu_pytorch_tanh"}
IN_TWO_POOLS = {
    **WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
"""Windows whose layers have a host pool of their own, in SGLang. Elsewhere they have all tokens, too."""
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    # SGLang has no other rope for it on a CPU.
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
SHAPES = {
    "llama, grouped queries": Shape("Llama"),
    "llama, a key for each query": Shape("Llama", {"num_key_value_heads": 4}),
    "llama, one key": Shape("Llama", {"num_key_value_heads": 1}),
    "llama, scaled rope": Shape(
        "Llama",
        {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        }},
    ),
    "mistral": Shape("Mistral", {"sliding_window": None}),
    "qwen2": Shape("Qwen2"),
    "qwen3": Shape("Qwen3"),
    "qwen3 moe": Shape("Qwen3Moe", EXPERTS),
    "gemma": Shape("Gemma"),
    "granite": Shape("Granite"),
    "olmo2": Shape("Olmo2"),
    "phi3": Shape("Phi3", {"pad_token_id": 0, "sliding_window": None}),
    "mistral, windows": Shape("Mistral", WINDOW),
    "phi3, windows": Shape("Phi3", {**WINDOW, "pad_token_id": 0}),
    "gemma2, windows": Shape("Gemma2", GEMMA),
    "gemma3, windows": Shape("Gemma3", GEMMA),
    "mellum, windows": Shape("Mellum", IN_TWO_POOLS),
    "laguna, windows": Shape("Laguna", IN_TWO_POOLS),
    "deepseek v2": Shape(
        "DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax"}
    ),
    "deepseek v3": Shape(
        "DeepseekV3", {**LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    ),
}  # fmt: skip
