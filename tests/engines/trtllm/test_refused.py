"""Engines, models, pools and options that are not served end the start with an error that names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.errors import ConfigError
from kvstore_trtllm import KVStoreScheduler, KVStoreWorker
from kvstore_trtllm.staging import MOST_RANKS, Rows, Staging
from tests.engines.trtllm.conftest import Make, llm_args, write_model

ENGINES = {
    "backend": "_autodeploy",
    "pipeline_parallel_size": 2,
    "context_parallel_size": 2,
    "enable_attention_dp": True,
    "max_beam_width": 4,
    "speculative_config": "MTP",
    "enable_lora": True,
    "lora_config": "adapters",
    "cache_transceiver_config": "NIXL",
    "sparse_attention_config": "rocket",
    "kv_cache_compression_config": "eviction",
    "model_kwargs": {"num_hidden_layers": 1},
    "force_dynamic_quantization": True,
    "checkpoint_format": "mistral",
    "orchestrator_type": "ray",
    "ray_worker_extension_cls": "Extension",
    "sleep_config": "on",
    "dwdp_config": "on",
    "mm_encoder_only": True,
    "encode_only": True,
    "attn_backend": "FLASHINFER",
    "kv_cache_config__enable_block_reuse": False,
    "kv_cache_config__use_kv_cache_manager_v2": "auto",
    "kv_cache_config__host_cache_size": None,
    "kv_cache_config__disk_cache_size": 1,
    "kv_cache_config__max_attention_window": [1024],
    "kv_cache_config__dtype": "fp8",
}


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize("half", [KVStoreScheduler, KVStoreWorker])
@pytest.mark.parametrize("name", ENGINES)
def test_options_of_the_engine(model: Path, name: str, half: type) -> None:
    with pytest.raises(ConfigError) as raised:
        half(llm_args(model, **{name: ENGINES[name]}))
    assert str(raised.value).startswith(f"{name.replace('__', '.')} is {ENGINES[name]} (")


@pytest.mark.usefixtures("options")
def test_other_values_of_enumerations(model: Path) -> None:
    for name in ("DUMMY", "dummy", 1):
        value = SimpleNamespace(name=name) if name == "DUMMY" else name
        with pytest.raises(ConfigError, match="load_format is "):
            KVStoreWorker(llm_args(model, load_format=value))
    policy = SimpleNamespace(name="MAX_UTILIZATION")
    with pytest.raises(ConfigError, match=r"capacity_scheduler_policy is .*MAX_UTILIZATION"):
        KVStoreWorker(llm_args(model, scheduler_config__capacity_scheduler_policy=policy))


@pytest.mark.usefixtures("options")
def test_an_engine_that_lacks_an_option(model: Path) -> None:
    args = llm_args(model)
    del args.kv_cache_config.use_kv_cache_manager_v2
    with pytest.raises(ConfigError, match=r"has no option kv_cache_config.use_kv_cache_manager_v2"):
        KVStoreScheduler(args)


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc29", "1.5.0"])
def test_other_releases(model: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("tensorrt_llm.__version__", version)
    with pytest.raises(ConfigError, match=rf"TensorRT-LLM {version} has another interface"):
        KVStoreScheduler(llm_args(model))


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "no test covers the model DeepseekV3ForCausalLM"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "no test covers the model Qwen2VL"),
        ({"architectures": []}, "no test covers the model unknown"),
        ({"sliding_window": 4096}, "has sliding windows"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "has sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has layers without full attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has quantized weights"),
    ],
)
def test_models(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVStoreScheduler(llm_args(write_model(tmp_path / "other", **config)))


def test_models_that_are_served(engine: Make, tmp_path: Path) -> None:
    windows = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 131072, "use_sliding_window": False}
    full = {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 2}
    for name, config in (("windows", windows), ("full", full), ("heads", {"head_dim": 8})):
        engine(write_model(tmp_path / name, **config)).run([1, 2, 3])


@pytest.mark.usefixtures("options")
def test_weights_that_a_tool_of_nvidia_has_quantized(model: Path) -> None:
    (model / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has quantized weights"):
        KVStoreScheduler(llm_args(model))


@pytest.mark.usefixtures("options")
def test_a_model_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'meta-llama/Llama' has no readable config.json: .*local folder"):
        KVStoreScheduler(llm_args(Path("meta-llama/Llama")))
    folder = write_model(tmp_path / "broken")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"has no readable config.json: Expecting"):
        KVStoreScheduler(llm_args(folder))


# -- pools


def pool(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (pool(8, 2, 1, 64), r"the KV pool has the shape \(8, 2, 1, 64\), not \(blocks, 2, 2, 64\)"),
        (pool(8, 1, 2, 64), r"the shape \(8, 1, 2, 64\)"),
        (pool(8, 2, 2, 128), r"the shape \(8, 2, 2, 128\)"),
        (pool(8, 2, 128), r"the shape \(8, 2, 128\)"),
        (pool(0, 2, 2, 64), r"the shape \(0, 2, 2, 64\)"),
        (pool(8, 2, 2, 64, dtype=torch.float8_e4m3fn), "the KV pool has the type float8_e4m3fn"),
        (pool(8, 2, 2, 64, dtype=torch.int8), "the KV pool has the type int8"),
        (pool(8, 2, 2, 64, dtype=torch.float32), "the KV pool has the type float32"),
        (pool(2, 8, 2, 64).transpose(0, 1), "the KV pool is not one run of bytes"),
        ([1, 2], "the KV pool has the type list"),
    ],
    ids=[
        "latent attention", "layers", "heads", "axes", "empty", "fp8", "int8", "float32", "strides",
        "no tensor",
    ],
)  # fmt: skip
def test_pools(engine: Make, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(pool=given)


def test_half_precision_is_served(engine: Make) -> None:
    engine(pool=pool(64, 2, 2, 64, dtype=torch.float16)).run([1, 2, 3])


@pytest.mark.parametrize("shape", [(64, 2, 2, 64), (32, 2, 2, 64)])
def test_a_pool_that_is_registered_again(engine: Make, shape: tuple[int, ...]) -> None:
    executor = engine()
    with pytest.raises(ConfigError, match=r"registered a second time, with the shape \("):
        executor.worker.register_kv_caches(pool(*shape))
    executor.run([1, 2, 3])


def test_a_page_that_no_block_can_hold(engine: Make, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "huge", hidden_size=4 << 21, num_key_value_heads=4)
    with pytest.raises(ConfigError, match=r"a page is too large for a block: .*tokens_per_block"):
        engine(folder, pages=1)


def test_memory_for_not_even_one_block(engine: Make, options: Callable[..., None], tmp_path: Path) -> None:
    options(staging_mib=1)
    folder = write_model(tmp_path / "large", hidden_size=4 << 15)
    with pytest.raises(ConfigError, match=r"a block of all ranks has 2097152 bytes, .*raise staging_mib"):
        engine(folder, pages=1)


def test_more_ranks_than_the_memory_has_room_for() -> None:
    with pytest.raises(ConfigError, match=rf"has {MOST_RANKS + 1} ranks \(served are up to {MOST_RANKS}\)"):
        Staging.make([1] * (MOST_RANKS + 1), 1 << 20)


def test_rows_are_given_together() -> None:
    rows = Rows(8)
    assert rows.take(3) == range(3)
    assert rows.take(3) == range(3, 6)
    rows.give_back(range(1, 2))
    assert rows.take(2) == range(6, 8)
    assert rows.take(5) == range(1, 2), "what lies together"
    assert rows.take(1) == range(0)
    rows.give_back(range(8))
    assert (rows.take(9), rows.free) == (range(8), 0)


# -- the connector's own options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"deadline": 1}', "TRTLLM_KVSTORE: unknown key 'deadline' (did you mean deadline_s?)"),
        ('{"deadline_s": "1"}', "deadline_s is '1'"),
        ('{"deadline_s": 0}', "deadline_s is 0"),
        ('{"staging_mib": 0}', "staging_mib is 0"),
        ('{"staging_mib": 1.5}', "staging_mib is 1.5"),
        ('{"staging_mib": 1048577}', "staging_mib is 1048577"),
        ('{"recompute_tokens_per_s": -1}', "recompute_tokens_per_s is -1"),
        ('{"token": 5}', "token is of type int"),
        ('{"model": true}', "model is True"),
        ("[]", "TRTLLM_KVSTORE is a list (a JSON object)"),
        ("deadline_s=1", "TRTLLM_KVSTORE is not JSON"),
    ],
)
@pytest.mark.parametrize("half", [KVStoreScheduler, KVStoreWorker])
def test_wrong_options(
    model: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str, half: type
) -> None:
    monkeypatch.setenv("TRTLLM_KVSTORE", given)
    with pytest.raises(ConfigError) as raised:
        half(llm_args(model))
    assert message in str(raised.value)


def test_a_wrong_token_is_not_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_KVSTORE", '{"token": "secret"')
    with pytest.raises(ConfigError) as raised:
        KVStoreScheduler(llm_args(model))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "server_url", "path"),
    [
        ({}, "unix:///a", "/a"),
        ({"url": "unix:///b"}, "unix:///a", "/b"),
        ({"url": "unix:///b"}, None, "/b"),
        ({}, None, "/from-kvstore-socket"),
    ],
)
def test_where_the_daemon_is(
    model: Path, monkeypatch: pytest.MonkeyPatch, variable: dict[str, Any], server_url: str | None, path: str
) -> None:
    monkeypatch.setenv("KVSTORE_SOCKET", "/from-kvstore-socket")
    monkeypatch.setenv("TRTLLM_KVSTORE", json.dumps({"weights_revision": "r", **variable}))
    for half in (KVStoreScheduler, KVStoreWorker):
        made = half(llm_args(model, kv_connector_config=SimpleNamespace(server_url=server_url)))
        assert made._client.path == path
        made.close()
