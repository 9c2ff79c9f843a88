"""Builds the namespace of an engine's KV from every property that can change its bytes.

Doubtful properties are included: a needless difference is a miss, a missing one would be wrong KV.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import entry_points, version
from typing import Any

import torch
import vllm
from blake3 import blake3
from vllm import envs
from vllm.config.utils import get_hash_factors, hash_factors, normalize_value

from kvstore import Layout
from kvstore.errors import ConfigError


def drafted(config: Any, by_content: bool) -> list[object] | None:
    """Returns what determines the KV of a draft model beside its weights; None: it keeps no KV.

    `by_content`: its path says nothing, see `weights.draft_of`.
    """
    speculative = config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    draft = copy.copy(speculative.draft_model_config)
    if by_content or draft.model == config.model_config.model:
        draft.model = ""
    quantization = speculative.quantization or draft.quantization
    facts = [draft.compute_hash(), str(draft.dtype), draft.max_model_len, quantization]
    return [speculative.method, speculative.num_speculative_tokens, *facts]


def model_name(model: Any, by_content: bool) -> str:
    """Returns the name of a model in its namespace: of a folder named by content, not its path."""
    return str(model.architecture) if by_content else str(model.model)


def shard_name(rank: int, ranks: int, stage: int, stages: int) -> str:
    """Returns the name of a tensor-parallel rank of a pipeline stage; ranks with the same KV are one."""
    return f"tp {rank}/{ranks}, pp {stage}/{stages}"


def shard_number(name: str) -> int:
    """Returns the number of a shard among all shards of an engine, from `shard_name`."""
    rank, ranks, stage, _ = map(int, re.findall(r"\d+", name))
    return stage * ranks + rank


def in_epoch(layout: Layout, epoch: str) -> Layout:
    """Returns the layout of blocks since the reset named `epoch`; empty: there was no reset."""
    return replace(layout, revision=f"{layout.revision}+{epoch}") if epoch else layout


def with_ttl(layout: Layout, ttl_s: float) -> Layout:
    """Returns the layout of blocks with this lifetime. A namespace has one lifetime; 0: as configured."""
    return replace(layout, kv_layout=f"{layout.kv_layout}, ttl {ttl_s:g} s") if ttl_s else layout


def kv_layout(
    config: Any,
    specs: list[Any],
    group: int,
    kv_caches: dict[str, torch.Tensor],
    by_content: bool = False,
    draft: list[object] | None = None,
) -> str:
    """Returns a digest of the other properties that determine the bytes of a group of layers.

    These are the engine's configuration (`configured`), kind and options of all its groups, engine version,
    attention backend, shape, strides and scales of each layer and, on a CPU, the instruction set, because
    CPU kernels pack keys and values by it. `by_content`: the path of the model says nothing. `draft`: see
    `drafted`.
    """
    kernels, scales = backends(config, kv_caches)
    shapes = [(name, str(t.dtype), t.shape[1:], t.stride()[1:]) for name, t in sorted(kv_caches.items())]
    groups = repr(specs[0]) if len(specs) == 1 else (repr(specs), group)
    facts = (configured(config, by_content), environment(), groups, shapes, scales)
    digest = blake3(repr((*facts, draft) if draft else facts).encode()).hexdigest(16)
    if next(iter(kv_caches.values())).device.type == "cuda":
        machine = f"compute capability {torch.cuda.get_device_capability()}"
    else:
        machine = torch.backends.cpu.get_cpu_capability()
    kind = type(specs[group]).__name__
    return f"vllm {vllm.__version__}; {kind}; {', '.join(kernels)}; {machine}; {digest}"


def backends(config: Any, layers: Iterable[str]) -> tuple[list[str], list[object]]:
    """Returns the attention backends of the layers that this process has, and the scales of each."""
    known = config.compilation_config.static_forward_context
    kernels, scales = set(), list[object]()
    for name in sorted(layers):
        layer = known.get(name)
        backend = getattr(layer, "attn_backend", None)
        kernels.add(f"{backend.get_name() if backend else 'unknown'} {getattr(layer, 'isa', '')}".strip())
        scales.append([getattr(layer, f"_{which}_scale_float", None) for which in "qkv"])
    return sorted(kernels), scales


_LEFT_OUT = {
    # Batch sizes change only rounding, as every step does.
    "compilation_config": {
        "cudagraph_capture_sizes", "max_cudagraph_capture_size", "compile_ranges_endpoints", "compile_sizes",
        "decoder_replay_cudagraph_capture_sizes",
        # Paths of compiled code, and counters of the compilation.
        "debug_dump_path", "cache_dir", "local_cache_dir", "traced_files", "compilation_time",
        "encoder_compilation_time", "enabled_custom_ops", "disabled_custom_ops", "static_forward_context",
        "static_all_moe_layers",
        # These have digests of their own.
        "pass_config", "dynamic_shapes_config",
    },
    # Caching and transport of inputs.
    "multimodal_config": {
        "limit_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb", "skip_mm_profiling", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb",
    },
}  # fmt: skip


def configured(config: Any, without_path: bool = False) -> list[object]:
    """Returns digests of every part of the configuration that may change KV.

    Equally configured engines get the same digests in each of their processes. Options that vLLM's own
    digests leave out (memory, ports, ranks, paths), limits of the scheduler, n-gram drafting and offloading
    are left out: they change when and where a token is computed, not its KV. `without_path`: leaves out the
    model's path. Raises ConfigError for an option without a digest.
    """
    model = config.model_config
    if without_path:
        config, model = copy.copy(config), copy.copy(model)
        config.model_config, model.model = model, ""
    try:
        facts = [
            (name, part.compute_hash() if (part := getattr(config, name, None)) else None)
            for name in (
                "model_config", "cache_config", "parallel_config", "attention_config", "kernel_config",
                "lora_config", "engram_config",
            )
        ]  # fmt: skip
        for name, part in (
            ("compilation_config", config.compilation_config),
            ("multimodal_config", model.multimodal_config),
        ):
            facts.append((name, hash_factors(get_hash_factors(part, _LEFT_OUT[name])) if part else None))
        compiled = config.compilation_config
        facts.append(("pass_config", compiled.pass_config.compute_hash()))
        facts.append(("dynamic_shapes_config", compiled.dynamic_shapes_config.compute_hash()))
        more = config.additional_config
        facts.append(
            ("additional_config", normalize_value(more) if isinstance(more, dict) else more.compute_hash())
        )
    except TypeError as error:
        raise ConfigError(
            f"vLLM cannot digest its configuration, so the KV of this engine has no identity: {error}",
            "leave out the option that it names",
        ) from error
    quantization = f"{model.quantization} {type(config.quant_config).__qualname__}"
    algorithm = config.cache_config.prefix_caching_hash_algo
    return [*facts, str(model.dtype), model.max_model_len, quantization, algorithm]


_PLACES = {
    # Environment variables that differ between equally configured engines: addresses, ranks, cores.
    "MOONCAKE_PREFERRED_SEGMENT", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_CPU_OMP_THREADS_BIND", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_EC_SIDE_CHANNEL_HOST",
    "VLLM_EC_SIDE_CHANNEL_PORT", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_GPU_NIC_PCIE_MAPPING",
    "VLLM_LOOPBACK_IP", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_NIC_SELECTION_VARS",
    "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_P2P_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_PORT",
    "VLLM_PROCESS_NAME_PREFIX", "VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_DP_PLACEMENT_NODE_IPS",
    "VLLM_SYSTEM_START_DATE", "VLLM_USAGE_SOURCE",
}  # fmt: skip
_KERNELS = ("ONEDNN_", "DNNL_", "MKL_", "CUBLAS_", "NVIDIA_TF32_", "TORCH_ALLOW_TF32_", "TRITON_F32_")
"""Prefixes of library variables that select kernels or precision and that vLLM does not list."""


_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")


def environment() -> list[tuple[str, object]]:
    """Returns what selects code beside the configuration: environment variables, versions and plugins.

    The variables are vLLM's, except `_PLACES`, and libraries' that select kernels.
    """
    known = [(name, value) for name, value in envs.compile_factors().items() if name not in _PLACES]
    others = [
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_KERNELS) and not name.endswith(("_NUM_THREADS", "_VERBOSE"))
    ]
    plugins = [
        f"{each.name} {each.value} {each.dist.version if each.dist else ''}"
        for group in _PLUGINS
        for each in entry_points(group=group)
    ]
    code = [
        ("torch", torch.__version__),
        # vLLM reads configurations by it, and runs its code of some models.
        ("transformers", version("transformers")),
        ("float32", torch.get_float32_matmul_precision()),
        ("plugins", sorted(plugins)),
    ]
    return sorted(known) + sorted(others) + code
