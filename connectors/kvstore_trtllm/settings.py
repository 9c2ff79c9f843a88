"""Refuses engines and models that are not served, with a ConfigError that names the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorrt_llm

from kvstore.errors import ConfigError

RELEASE = "1.4.0rc4"
"""The release of TensorRT-LLM whose interface the connector is written for."""
_SERIES = "1.4.0"

SERVED_ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)  # fmt: skip
"""The served models, by the name of their class: those with full attention in all layers, in one pool."""

_SERVED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "backend": ("pytorch",),
    "pipeline_parallel_size": (1,),
    "context_parallel_size": (1,),
    "enable_attention_dp": (False,),
    "max_beam_width": (1,),
    "speculative_config": (None,),
    "enable_lora": (False,),
    "lora_config": (None,),
    "cache_transceiver_config": (None,),
    "sparse_attention_config": (None,),
    "kv_cache_compression_config": (None,),
    "model_kwargs": (None,),
    "force_dynamic_quantization": (False,),
    "checkpoint_format": (None, "HF"),
    "orchestrator_type": (None,),
    "ray_worker_extension_cls": (None,),
    "sleep_config": (None,),
    "dwdp_config": (None,),
    "mm_encoder_only": (False,),
    "encode_only": (False,),
    "attn_backend": ("TRTLLM",),
    "kv_cache_config.enable_block_reuse": (True,),
    "kv_cache_config.use_kv_cache_manager_v2": (False,),
    "kv_cache_config.host_cache_size": (0,),
    "kv_cache_config.disk_cache_size": (None, 0),
    "kv_cache_config.max_attention_window": (None,),
    "kv_cache_config.dtype": ("auto", "bfloat16", "float16"),
}
"""The served values of options that can make a load or a store wrong."""

_HINTS = {
    "kv_cache_config.use_kv_cache_manager_v2": "set it to false: the connector is written for version 1",
    "kv_cache_config.host_cache_size": "set it to 0: blocks in TensorRT-LLM's host cache have no page",
    "kv_cache_config.enable_block_reuse": "set it to true: without it TensorRT-LLM asks no connector",
}
_WITHOUT = "leave out kv_connector_config"


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model's keys and values. `heads`: KV heads of all ranks, of `dim` values each."""

    folder: Path
    architecture: str
    layers: int
    heads: int
    dim: int


def check_engine(llm_args: Any) -> Model:
    """Returns the model of an engine. Raises ConfigError if the model, or an option, is not served."""
    version = tensorrt_llm.__version__
    if not version.startswith(_SERIES):
        raise ConfigError(
            f"TensorRT-LLM {version} has another interface",
            f"the connector is written for {RELEASE}; {_WITHOUT}",
        )
    for what, hint in _refusals(llm_args):
        raise ConfigError(what, hint)
    return _model(llm_args)


def _refusals(llm_args: Any) -> Iterator[tuple[str, str]]:
    """Yields which options of the engine are not served."""
    for name, served in _SERVED_OPTIONS.items():
        value = _option(llm_args, name)
        # True == 1, and neither stands for the other.
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in served):
            yield f"{name} is {value}", _HINTS.get(name, f"no test covers it: leave it out, or {_WITHOUT}")
    load_format = _option(llm_args, "load_format")
    if str(getattr(load_format, "name", load_format)).lower() != "auto":
        yield f"load_format is {load_format}", "auto is served: nothing tells which weights others read"
    policy = _option(llm_args, "scheduler_config.capacity_scheduler_policy")
    if getattr(policy, "name", policy) != "GUARANTEED_NO_EVICT":
        yield f"capacity_scheduler_policy is {policy}", "GUARANTEED_NO_EVICT is served"


def _option(llm_args: Any, name: str) -> Any:
    """Returns the value of an option of TensorRT-LLM. Raises ConfigError if it has no such option."""
    value = llm_args
    for part in name.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"this TensorRT-LLM has no option {name}", f"use TensorRT-LLM {RELEASE}")
        value = getattr(value, part)
    return value


def _model(llm_args: Any) -> Model:
    folder = Path(llm_args.model)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model {str(folder)!r} has no readable config.json: {error}",
            "the model is the path of a local folder: download it first",
        ) from error
    architecture = next(iter(config.get("architectures") or ["unknown"]))
    if architecture not in SERVED_ARCHITECTURES:
        raise ConfigError(
            f"no test covers the model {architecture}",
            f"served are {', '.join(SERVED_ARCHITECTURES)}: {_WITHOUT}",
        )
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise ConfigError(f"the model {architecture} has sliding windows", _WITHOUT)
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(f"the model {architecture} has layers without full attention", _WITHOUT)
    if "quantization_config" in config or (folder / "hf_quant_config.json").exists():
        raise ConfigError(f"the model {architecture} has quantized weights", f"no test covers it: {_WITHOUT}")
    heads = config["num_attention_heads"]
    return Model(
        folder,
        architecture,
        config["num_hidden_layers"],
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or config["hidden_size"] // heads,
    )
