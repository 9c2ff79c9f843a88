"""Which options of an engine name another KV, and which do not: no engine is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvstore_vllm.identity import configured, kv_layout
from tests.engines.vllm.shapes import SHAPES

PLAIN: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "block_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}


def gelu(config: Any) -> Any:
    """An override that is a function."""
    config.update({"hidden_act": "gelu"})
    return config


def shown(options: dict[str, Any]) -> str:
    """The name of a case, the same in every process."""
    return str({name: getattr(value, "__name__", value) for name, value in options.items()})


def named(model: Path, **options: Any) -> str:
    """What an engine's options say of its KV."""
    return repr(configured(EngineArgs(model=str(model), **PLAIN | options).create_engine_config()))


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 512},
        {"dtype": "bfloat16"},
        {"block_size": 64},
        {"kv_cache_dtype": "fp8"},
        {"hf_overrides": {"rope_parameters": ROPE}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": gelu},
        {"model_impl": "transformers"},
        {"dtype": "bfloat16", "quantization": "fp8"},
        {"dtype": "bfloat16", "quantization": "experts_int8"},
        {"attention_config": {"flash_attn_version": 2}},
        {"attention_config": {"disable_flashinfer_q_quantization": True}},
        {"kernel_config": {"moe_backend": "triton"}},
        {"compilation_config": {"custom_ops": ["+rms_norm"]}},
        {"compilation_config": {"pass_config": {"fuse_norm_quant": True}}},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"enable_lora": True},
        {"additional_config": {"of": "a plugin"}},
        {"kv_cache_dtype_skip_layers": ["0"], "kv_cache_dtype": "fp8"},
    ],
    ids=shown,
)
def test_an_option_that_may_change_kv_changes_the_namespace(model: Path, options: dict[str, Any]) -> None:
    dtype = {"dtype": options["dtype"]} if len(options) > 1 and "dtype" in options else {}
    assert named(model, **options) != named(model, **dtype)


def test_expert_parallelism_changes_the_namespace(tmp_path: Path) -> None:
    model = SHAPES["experts"].save(tmp_path)
    shards = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert named(model, **shards, enable_expert_parallel=True) != named(model, **shards)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_memory_bytes": 1 << 26},
        {"gpu_memory_utilization": 0.5},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 2048},
        {"seed": 7},
        {"served_model_name": "another"},
        {"disable_log_stats": True},
        {"load_format": "safetensors"},
    ],
    ids=str,
)
def test_an_option_about_place_or_time_keeps_the_namespace(model: Path, options: dict[str, Any]) -> None:
    assert named(model, **options) == named(model)


def test_kind_options_and_scales_of_a_kv_cache_change_the_namespace(model: Path) -> None:
    config = EngineArgs(model=str(model), **PLAIN).create_engine_config()
    caches = {"layer": torch.zeros(4, 2, 16, 64)}
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}

    def layout(spec: Any, scale: float = 1.0) -> str:
        layer = SimpleNamespace(_q_scale_float=1.0, _k_scale_float=scale, _v_scale_float=1.0)
        config.compilation_config.static_forward_context["layer"] = layer
        return kv_layout(config, [spec], 0, caches)

    plain = layout(FullAttentionSpec(**sizes))
    assert plain == layout(FullAttentionSpec(**sizes))
    assert "FullAttentionSpec" in plain
    others = [
        layout(FullAttentionSpec(**sizes, sliding_window=64)),
        layout(FullAttentionSpec(**sizes, attention_chunk_size=64)),
        layout(SlidingWindowSpec(**sizes, sliding_window=64)),
        layout(FullAttentionSpec(**sizes), scale=0.5),
    ]
    assert len({plain, *others}) == 5


def environment_of(**variables: str) -> str:
    """`identity.environment` in a process of its own."""
    code = "import json; from kvstore_vllm.identity import environment; print(json.dumps(environment()))"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    return json.dumps(json.loads(ran.stdout.splitlines()[-1]))


def test_variables_that_select_kernels_change_the_namespace() -> None:
    plain = environment_of()
    places = {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "7000",
        "VLLM_DP_RANK": "0",
        "VLLM_PORT": "7001",
        "HOSTNAME": "b",
    }
    assert environment_of(**places, VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="3") == plain
    for name, value in (
        ("VLLM_BATCH_INVARIANT", "1"),
        ("VLLM_MLA_DISABLE", "1"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "medium"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
    ):
        assert environment_of(**{name: value}) != plain, name


def test_a_plugin_of_vllm_changes_the_namespace(tmp_path: Path) -> None:
    """It may replace models and kernels, and so may another version of it."""
    seen = {environment_of()}
    for version in ("1.0", "1.1"):
        info = tmp_path / version / "some_plugin.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: some-plugin\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsome = os:getpid\n")
        path = os.pathsep.join([str(info.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        seen.add(environment_of(PYTHONPATH=path))
    assert len(seen) == 3
