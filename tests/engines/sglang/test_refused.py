"""Options and engines that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import ConfigError
from tests.engines.sglang.package import settings
from tests.engines.sglang.package import weights as names_of

GIVEN = {"interface_v1": 1, "backend_name": "kvstore", "module_path": "m", "class_name": "c"}


def read(**options: Any) -> Any:
    return settings.BackendSettings.of({**GIVEN, **options})


def test_options_are_read() -> None:
    assert read() == settings.BackendSettings()
    given = {"url": "unix:///s", "token": "kvs_t", "deadline_s": 2, "weights_revision": "r", "model": "m"}
    assert read(**given) == settings.BackendSettings("unix:///s", "kvs_t", 2, "r", "m")
    assert "kvs_t" not in repr(read(**given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": 1.0}, "unknown key 'deadline' .did you mean deadline_s"),
        ({"nothing": 1}, "unknown key 'nothing' .there are url, token, deadline_s, weights_revision, model"),
        ({"url": 7}, "url is 7 .a str"),
        ({"token": 12345}, "token is of type int .a str"),
        ({"deadline_s": "1"}, "deadline_s is '1' .a float"),
        ({"deadline_s": True}, "deadline_s is True .a float"),
        ({"deadline_s": 0}, "deadline_s is 0 .seconds, more than 0"),
        ({"deadline_s": 10}, "deadline_s is 10 .seconds, less than 10"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
        ({"interface_v1": 0}, "interface_v1 is not set"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**options)


MODEL = {
    "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]),
    "is_hybrid_swa": False,
    "sliding_window_size": None,
    "is_multimodal": False,
    "is_generation": True,
    "dtype": "torch.bfloat16",
    "quantization": None,
}
CONFIG = {"attn_cp_size": 1, "dcp_size": 1}
OPTIONS = {
    "get_device": {"device": "cuda"},
    "get_disagg": {"disaggregation_mode": "null"},
    "get_lora": {"enable_lora": None},
    "get_memory": {"hicache_host_memory_mode": "cache"},
    "get_model": {"kv_cache_dtype": "auto", "model_impl": "auto"},
    "get_parallel": {"enable_dp_attention": False},
    "get_spec": {"speculative_algorithm": None},
}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Checks an engine with these properties instead of served ones."""

    def run(
        model: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **options: dict[str, Any]
    ) -> None:
        monkeypatch.setattr(
            settings, "process_model_config", lambda: SimpleNamespace(**MODEL | (model or {}))
        )
        for name, values in OPTIONS.items():
            bag = SimpleNamespace(**values | options.get(name, {}))
            monkeypatch.setattr(settings, name, lambda bag=bag: bag)
        saver = options.get("features", {"enable_memory_saver": False})
        features = SimpleNamespace(features=SimpleNamespace(**saver))
        monkeypatch.setattr(settings, "get_exec", lambda: features)
        settings.check_engine(SimpleNamespace(**CONFIG | (config or {})))

    return run


def test_a_served_engine_passes(check: Callable[..., None]) -> None:
    check()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"model": {"is_hybrid_swa": True}}, "the model LlamaForCausalLM has sliding windows"),
        ({"model": {"sliding_window_size": 4096}}, "the model LlamaForCausalLM has sliding windows"),
        ({"model": {"is_multimodal": True}}, "takes more than text"),
        ({"model": {"is_generation": False}}, "does not generate text"),
        ({"model": {"quantization": "fp8"}}, "the weights are quantized .fp8"),
        ({"model": {"dtype": "torch.float8_e4m3fn"}}, "--dtype is torch.float8_e4m3fn"),
        (
            {"model": {"hf_config": SimpleNamespace(architectures=["MambaForCausalLM"])}},
            "no test covers the model MambaForCausalLM .served are DeepseekV2ForCausalLM, ",
        ),
        ({"config": {"attn_cp_size": 2}}, "--attn-cp-size is 2"),
        ({"config": {"dcp_size": 2}}, "--dcp-size is 2"),
        ({"get_parallel": {"enable_dp_attention": True}}, "--enable-dp-attention is True"),
        ({"get_device": {"device": "xpu"}}, "--device is xpu"),
        ({"get_model": {"kv_cache_dtype": "fp8_e4m3"}}, "--kv-cache-dtype is fp8_e4m3"),
        ({"get_model": {"model_impl": "transformers"}}, "--model-impl is transformers"),
        ({"get_spec": {"speculative_algorithm": "EAGLE"}}, "--speculative-algorithm is EAGLE"),
        ({"get_lora": {"enable_lora": True}}, "--enable-lora is True"),
        ({"get_disagg": {"disaggregation_mode": "prefill"}}, "--disaggregation-mode is prefill"),
        ({"get_memory": {"hicache_host_memory_mode": "buffer_only"}}, "memory-mode is buffer_only"),
        ({"features": {"enable_memory_saver": True}}, "--enable-memory-saver is True"),
    ],
)
def test_other_engines_are_refused(check: Callable[..., None], engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(**engine)


def named(monkeypatch: pytest.MonkeyPatch, path: str, load_format: str = "auto", commit: str = "") -> Any:
    """What names the weights of a model, without the option."""
    options = SimpleNamespace(model_path=path, load_format=load_format)
    config = SimpleNamespace(hf_config=SimpleNamespace(_commit_hash=commit))
    monkeypatch.setattr(names_of, "get_model", lambda: options)
    monkeypatch.setattr(names_of, "process_model_config", lambda: config)
    return names_of.naming_of(names_of.weights_of(""))


def test_weights_are_named_by_their_commit_in_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(monkeypatch, "some/model", commit="abc").revision() == "commit:abc"


def test_weights_without_a_name_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="nothing tells which weights 'some/model' has"):
        named(monkeypatch, "some/model")
    for load_format in ("dummy", "gguf", "remote"):
        with pytest.raises(ConfigError, match=f"with --load-format {load_format} nothing tells"):
            named(monkeypatch, str(tmp_path), load_format)
    with pytest.raises(ConfigError):
        named(monkeypatch, str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match=r"config.json in .* was changed after the engine started"):
        named(monkeypatch, str(tmp_path))
