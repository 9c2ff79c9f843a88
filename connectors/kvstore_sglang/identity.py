"""Builds the namespace of an engine's KV from every property that can change its bytes.

Doubtful properties are included: a needless difference is a miss, a missing one would be wrong KV.
"""

from __future__ import annotations

import json
from typing import Any

import sglang
import torch
from blake3 import blake3
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.runtime_context import (
    attention_backends,
    get_device,
    get_exec,
    get_model,
    get_parallel,
    process_model_config,
)

from kvstore import Layout
from kvstore_sglang.pages import HostPages

_SAYS_NOTHING = {"_name_or_path", "_commit_hash", "transformers_version"}
"""Fields of a model's configuration that differ between copies of it."""
_LEFT_OUT = {"grammar_backend", "sampling_backend"}
"""Kernels that see no keys or values."""
_OF_MODEL = ("modelopt_quant", "quantization", "quantization_param_path", "quantize_and_serve", "model_impl")


def layout_of(config: Any, pages: HostPages, name: str, revision: str, pool: PoolName) -> Layout:
    """Returns the layout of the blocks of one of an engine's pools.

    `config`: SGLang's HiCacheStorageConfig. `name`: of the model. `revision`: of its weights.
    """
    prefill, decode = attention_backends()
    kernels = prefill if prefill == decode else f"{prefill}, {decode}"
    # All tensor-parallel ranks have the same latents, which SGLang stores once.
    rank = "any" if config.is_mla_model else config.tp_rank
    return Layout(
        model=name,
        block_bytes=pages.page_bytes,
        revision=revision,
        dtype=pages.dtype,
        block_tokens=pages.page_tokens,
        shard=f"tp {rank}/{config.tp_size}, pp {config.pp_rank}/{config.pp_size}",
        # Layers and heads are those of the shard.
        kv_layout=f"sglang {sglang.__version__}; {pool}, {pages.layout}, {pages.form}; "
        f"{kernels}; {_processor()}; {_digest()}",
        # A page of a window is of use without the pages before the window.
        kind="chain" if pool == PoolName.KV else "independent",
    )


def shard_number(config: Any) -> int:
    """Returns the number of a shard among all shards of an engine. Ranks with the same latents are one."""
    return int(config.pp_rank * config.tp_size + (0 if config.is_mla_model else config.tp_rank))


def model_name(by_content: bool) -> str:
    """Returns the name of the model in its namespace: of a folder named by content, not its path."""
    if by_content:
        return str(process_model_config().hf_config.architectures[0])
    return str(get_model().model_path)


def _digest() -> str:
    """Returns a digest of the configuration of model and engine, as far as it may change KV."""
    model = process_model_config()
    described = {k: v for k, v in model.hf_config.to_dict().items() if k not in _SAYS_NOTHING}
    execution = get_exec()
    facts = {
        "model": described,
        "dtype": str(model.dtype),
        "context": model.context_len,
        "kv dtype": get_model().kv_cache_dtype,
        "options": {name: getattr(get_model(), name) for name in _OF_MODEL},
        "kernels": {k: v for k, v in execution.kernel._fields.items() if k not in _LEFT_OUT},
        "deterministic": execution.deterministic._fields,
        "tf32": execution.features.enable_tf32_matmul,
        "compile": execution.graph.enable_torch_compile,
        "experts": [execution.moe.moe_runner_backend, execution.moe.moe_a2a_backend, get_parallel().ep_size],
        "torch": [torch.__version__, torch.get_float32_matmul_precision()],
    }
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(16)


def _processor() -> str:
    if str(get_device().device).startswith("cuda"):
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return f"CPU {torch.backends.cpu.get_cpu_capability()}"
