"""Builds the namespace of a model: weights, configuration, shape and kernels, so that no two models mix."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import transformers
from blake3 import blake3

from kvstore import Layout
from kvstore.errors import MisuseError
from kvstore_transformers.blocks import BlockShape

_SAYS_NOTHING = {"_name_or_path", "transformers_version"}
"""Configuration fields that differ between copies of the same model."""

_SWITCHES: dict[str, Callable[[], Any]] = {
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.backends.fp32_precision": lambda: torch.backends.fp32_precision,
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "torch.backends.mkldnn.fp32_precision": lambda: torch.backends.mkldnn.fp32_precision,
    "torch.backends.mkldnn.matmul.fp32_precision": lambda: torch.backends.mkldnn.matmul.fp32_precision,
    "torch.backends.cuda.matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.backends.cudnn.fp32_precision": lambda: torch.backends.cudnn.fp32_precision,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.cudnn_sdp_enabled,
}
"""Torch settings that select kernels or their precision."""


def layouts_of(model: Any, shape: BlockShape, revision: str | None) -> tuple[Layout, Layout | None]:
    """Returns the layouts of a model's blocks and of its states, None if it has none.

    `revision` names the weights; None: a digest of the weights.
    """
    weights = weights_digest(model) if revision is None else revision
    said = [settings_of(model), _kinds(model), _rotations(model), _tensors(_not_weights(model))]
    settings = blake3(json.dumps(said).encode()).hexdigest(16)
    # Kernels differ in the last bits, which can change an answer.
    runs_on = f"{model.config._attn_implementation} on {model.device.type}"
    blocks = Layout(
        model=model.config._name_or_path or type(model).__name__,
        revision=f"{weights} config {config_digest(model.config)}",
        dtype=str(shape.dtype).removeprefix("torch."),
        block_tokens=shape.block_tokens,
        block_bytes=shape.block_bytes,
        kv_layout=f"layer, kv, head, token, dim; {runs_on}; settings {settings}",
    )
    states = shape.states
    if not states.parts:
        return blocks, None
    dtypes = ", ".join(sorted({str(part.dtype).removeprefix("torch.") for part in states.parts}))
    kv_layout = f"{states.pieces} pieces of a state; {runs_on}; settings {settings}"
    return blocks, replace(
        blocks, dtype=dtypes, block_bytes=states.block_bytes, kv_layout=kv_layout, kind="independent"
    )


def settings_of(model: Any) -> dict[str, str]:
    """Returns, by name, every setting other than weights that can change keys and values.

    These are configuration, processor, versions, torch settings and adapters. Cheap enough for every call of
    a PrefixCache.
    """
    kind = model.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else "off"
    settings = {
        "class": type(model).__qualname__,
        "configuration": config_digest(model.config),
        "attention implementation": model.config._attn_implementation,
        "experts implementation": getattr(model.config, "_experts_implementation", None),
        "dtype": model.dtype,
        "device": kind,
        "processor": _processor(model.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "autocast": autocast,
        "adapters": _adapters(model),
    }
    return {name: str(value) for name, value in settings.items()} | {
        name: _read(switch) for name, switch in _SWITCHES.items()
    }


def weights_digest(model: Any) -> str:
    """Returns blake3 of the name, dtype, shape and bytes of every parameter and buffer.

    Raises MisuseError if a weight is not in memory.
    """
    return f"blake3:{_tensors(itertools.chain(model.named_parameters(), model.named_buffers()))}"


def config_digest(config: Any) -> str:
    """Returns blake3 of a configuration, independent of its path."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _SAYS_NOTHING}
    return blake3(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _tensors(named: Iterable[tuple[str, Any]]) -> str:
    digest = blake3(max_threads=blake3.AUTO)
    for name, tensor in named:
        if tensor.is_meta:
            raise MisuseError(f"weight {name} is not in memory", "name the weights yourself with revision=")
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy())
    hexadecimal: str = digest.hexdigest()
    return hexadecimal


def _kinds(model: Any) -> list[str]:
    """Returns name, dtype and shape of each weight; a revision does not imply them (quantized copies)."""
    return [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in model.named_parameters()]


def _not_weights(model: Any) -> Iterable[tuple[str, Any]]:
    """Yields, by name, the tensors that a revision does not name: buffers and the weights of adapters."""
    yield from ((name, tensor) for name, tensor in model.named_buffers() if not tensor.is_meta)
    for path, module in _tuned(model):
        for name, tensor in module.named_parameters():
            if "base_layer" not in name.split("."):
                yield f"{path}.{name}", tensor


def _rotations(model: Any) -> list[str]:
    """Returns the other properties of modules with rotary frequencies."""
    return [
        f"{path} {getattr(module, 'rope_type', '')} {getattr(module, 'attention_scaling', '')}"
        for path, module in model.named_modules()
        if hasattr(module, "inv_freq")
    ]


def _tuned(model: Any) -> list[tuple[str, Any]]:
    """Returns the modules that PEFT has replaced."""
    return [
        (path, module) for path, module in model.named_modules() if hasattr(module, "adapter_layer_names")
    ]


def _adapters(model: Any) -> str:
    """Returns a digest of active and merged adapters and their scaling; empty without adapters."""
    parts = [
        f"{path} {module.active_adapters} {module.disable_adapters} {module.merged_adapters}"
        f" {getattr(module, 'scaling', '')}"
        for path, module in _tuned(model)
    ]
    return blake3("\n".join(parts).encode()).hexdigest(16) if parts else ""


def _processor(device: Any) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} {major}.{minor} CUDA {torch.version.cuda}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _read(switch: Callable[[], Any]) -> str:
    try:
        return str(switch())
    except (AttributeError, RuntimeError):
        # The setting is absent from this version of torch, or was set through both interfaces.
        return "unknown"
