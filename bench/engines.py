"""Runs vLLM engines of random models. Their connectors can be removed and put back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.harness import GIB, Bench
from bench.served import serve
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.environments import interpreter
from tests.engines.vllm.engine import VOCABULARY, Engine, connector

MAX_TOKENS = 2304
_OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": MAX_TOKENS,
    "max_num_batched_tokens": MAX_TOKENS,
    "kv_cache_memory_bytes": GIB,
    "async_scheduling": False,  # as in vLLM's CPU build; tests turn it on
}


@contextmanager
def engine(
    bench: Bench, model: dict[str, Any], dram_bytes: int, threads: int = 2, **options: Any
) -> Iterator[Engine]:
    """Returns an engine with the connector. `options`: those of the connector."""
    with serve(dram_bytes) as (_, daemon), engine_of(bench, daemon, model, threads, **options) as made:
        yield made


@contextmanager
def engine_of(
    bench: Bench, daemon: LocalDaemon, model: dict[str, Any], threads: int = 2, **options: Any
) -> Iterator[Engine]:
    """Returns such an engine, with the connector to this daemon."""
    bench.doing("environment")
    python = interpreter("vllm")
    with bench.scratch() as folder:
        save(folder, model)
        bench.doing("starting vLLM")
        flag = connector(daemon, lookup_deadline_s=None, **options)
        with Engine(
            folder, python, threads, hasty=True, dtype=model["torch_dtype"], **_OPTIONS, **flag
        ) as made:
            yield made


@contextmanager
def roles(bench: Bench, model: dict[str, Any], dram_bytes: int) -> Iterator[tuple[Engine, Engine]]:
    """Returns a prefill and a decode engine with one daemon, see `engine`; one thread each."""
    bench.doing("environment")
    python = interpreter("vllm")
    with bench.scratch() as folder, serve(dram_bytes) as (_, daemon), ExitStack() as stack:
        save(folder, model)
        bench.doing("starting vLLM")
        made = []
        for role in ("kv_producer", "kv_consumer"):
            [transfer] = connector(daemon, lookup_deadline_s=None).values()
            options = {**_OPTIONS, "kv_transfer_config": {**transfer, "kv_role": role}}
            made.append(stack.enter_context(Engine(folder, python, 1, hasty=True, **options)))
        prefill, decode = made
        yield prefill, decode


def llama(hidden: int, layers: int, kv_heads: int) -> dict[str, Any]:
    """Returns the configuration of a dense model with heads of 64."""
    return _model("LlamaForCausalLM", "llama", hidden, layers, num_key_value_heads=kv_heads)


def windows(hidden: int, layers: int, kv_heads: int) -> dict[str, Any]:
    """Returns that of a model with windows of 256 tokens in five layers of six, as in Gemma 3."""
    return _model(
        "Gemma3ForCausalLM", "gemma3_text", hidden, layers, num_key_value_heads=kv_heads, head_dim=64,
        query_pre_attn_scalar=64, sliding_window=256,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
    )  # fmt: skip


def latent(hidden: int, layers: int) -> dict[str, Any]:
    """Returns that of a model with the latent attention of DeepSeek-V2. AMX kernels need bfloat16."""
    return _model(
        "DeepseekV2ForCausalLM", "deepseek_v2", hidden, layers, num_key_value_heads=hidden // 64,
        torch_dtype="bfloat16",
        kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=64, first_k_dense_replace=layers,
    )  # fmt: skip


def recurrent(hidden: int, layers: int, kv_heads: int) -> dict[str, Any]:
    """Returns that of a model with linear attention in three layers of four, as in Qwen3-Next.

    vLLM wants experts in one layer at least.
    """
    return _model(
        "Qwen3NextForCausalLM", "qwen3_next", hidden, layers, num_key_value_heads=kv_heads, head_dim=64,
        torch_dtype="bfloat16", num_experts=4, num_experts_per_tok=2, mlp_only_layers=list(range(layers - 1)),
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=hidden // 128,
        linear_num_value_heads=hidden // 128, linear_conv_kernel_dim=4,
        moe_intermediate_size=64, shared_expert_intermediate_size=64,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
    )  # fmt: skip


def _model(architecture: str, kind: str, hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    """Returns a configuration as transformers reads it. vLLM makes random weights."""
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **more,
    }


def save(folder: Path, model: dict[str, Any]) -> None:
    """Writes the configuration of a model, which is all that engines need of it."""
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
