"""Reads the extra config of the backend, and refuses engines that are not served, with a ConfigError."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.runtime_context import (
    get_device,
    get_disagg,
    get_exec,
    get_lora,
    get_memory,
    get_model,
    get_parallel,
    get_spec,
    process_model_config,
)

from kvstore import parse_options
from kvstore.errors import ConfigError

FLAG = "--hicache-storage-backend-extra-config"
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
"""Keys that SGLang reads and leaves in the extra config."""

MOST_DEADLINE_S = 10.0
"""SGLang waits this long for its storage threads when it resets its cache."""

SERVED_ARCHITECTURES = (
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "GemmaForCausalLM", "GraniteForCausalLM", "LagunaForCausalLM", "LlamaForCausalLM", "MellumForCausalLM",
    "MistralForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)  # fmt: skip
"""The served models, by the name of their class: those that a test covers."""
SERVED_WITH_WINDOWS = (
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "LagunaForCausalLM", "MellumForCausalLM", "MistralForCausalLM",
    "Phi3ForCausalLM",
)  # fmt: skip
SERVED_DEVICES = ("cpu", "cuda")
SERVED_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The options of the backend.

    `url`: the daemon, or several, separated by commas, which share the engine's shards; empty: KVSTORE_SOCKET
    or the default path. `token`: of the engine's tenant; empty: KVSTORE_TOKEN. `deadline_s`: bounds every
    call. `weights_revision`: names the weights instead of their files or commit. `model`: names the model
    instead of its path or class.
    """

    url: str = ""
    token: str = field(default="", repr=False)
    deadline_s: float = 1.0
    weights_revision: str = ""
    model: str = ""

    @classmethod
    def of(cls, extra: dict[str, Any]) -> BackendSettings:
        """Parses the extra config. Raises ConfigError."""
        given = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
        settings = parse_options(cls, given, FLAG)
        if settings.deadline_s >= MOST_DEADLINE_S:
            raise ConfigError(
                f"{FLAG}: deadline_s is {settings.deadline_s}",
                f"seconds, less than {MOST_DEADLINE_S:g}",
            )
        if not extra.get("interface_v1"):
            raise ConfigError(f"{FLAG}: interface_v1 is not set", 'add "interface_v1": 1')
        return settings


def check_engine(config: Any) -> None:
    """Raises ConfigError for an engine that is not served. `config`: its HiCacheStorageConfig."""
    for refusal in refusals(config):
        raise refusal


def refusals(config: Any) -> Iterator[ConfigError]:
    """Yields every reason why the engine of this process is not served. `config`: see `check_engine`."""
    for what, hint in (*_refusals_of_model(), *_refusals_of_options(config)):
        yield ConfigError(what, hint)


def _refusals_of_model() -> Iterator[tuple[str, str]]:
    """Yields why a model is not served."""
    model = process_model_config()
    without = "leave out --hicache-storage-backend"
    [architecture] = model.hf_config.architectures[:1] or ["unknown"]
    has_windows = model.is_hybrid_swa or model.sliding_window_size
    if has_windows and architecture not in SERVED_WITH_WINDOWS:
        yield f"the model {architecture} has sliding windows", f"no test covers it: {without}"
    if model.is_multimodal:
        yield f"the model {architecture} takes more than text", f"no test covers it: {without}"
    if architecture not in SERVED_ARCHITECTURES:
        served = ", ".join(SERVED_ARCHITECTURES)
        yield f"no test covers the model {architecture}", f"served are {served}: {without}"
    if not model.is_generation:
        yield f"the model {architecture} does not generate text", without
    if model.quantization is not None:
        yield f"the weights are quantized ({model.quantization})", f"no test covers it: {without}"
    if str(model.dtype) not in SERVED_DTYPES:
        yield f"--dtype is {model.dtype}", f"served are {', '.join(SERVED_DTYPES)}"


def _refusals_of_options(config: Any) -> Iterator[tuple[str, str]]:
    """Yields which options of the engine are not served."""
    hint = "no test covers it: leave it out, or leave out --hicache-storage-backend"
    served = {
        "--enable-dp-attention": (bool(get_parallel().enable_dp_attention), (False,)),
        "--attn-cp-size": (config.attn_cp_size, (1,)),
        "--dcp-size": (config.dcp_size, (1,)),
        "--device": (str(get_device().device).partition(":")[0], SERVED_DEVICES),
        "--kv-cache-dtype": (get_model().kv_cache_dtype, ("auto",)),
        "--model-impl": (str(get_model().model_impl), ("auto", "sglang")),
        "--speculative-algorithm": (get_spec().speculative_algorithm, (None,)),
        "--enable-lora": (bool(get_lora().enable_lora), (False,)),
        "--disaggregation-mode": (get_disagg().disaggregation_mode, ("null",)),
        "--hicache-host-memory-mode": (get_memory().hicache_host_memory_mode, ("cache",)),
        "--enable-memory-saver": (bool(get_exec().features.enable_memory_saver), (False,)),
    }
    for name, (value, values) in served.items():
        if value not in values:
            yield f"{name} is {value}", hint
