"""Engines that no test here can start, or not soon: their configuration is a fake with what is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore_vllm.identity import weights_revision
from kvstore_vllm.settings import Settings, check_engine


def engine(**changes: dict[str, Any]) -> SimpleNamespace:
    """The parts of a VllmConfig that are served, with changes by part."""
    parts: dict[str, dict[str, Any]] = {
        "cache_config": {"prefix_caching_hash_algo": "sha256", "calculate_kv_scales": False},
        "parallel_config": {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1},
        "kv_transfer_config": {"is_kv_consumer": True, "kv_load_failure_policy": "recompute"},
        "scheduler_config": {"long_prefill_token_threshold": 0},
    }
    made = {name: SimpleNamespace(**part | changes.get(name, {})) for name, part in parts.items()}
    return SimpleNamespace(**made, speculative_config=changes.get("speculative_config"))


def draft(method: str) -> Any:
    return SimpleNamespace(method=method, use_ngram=lambda: method == "ngram")


ONE_GROUP = SimpleNamespace(kv_cache_groups=[object()])


@pytest.mark.parametrize("config", [engine(), engine(speculative_config=draft("ngram"))])
def test_what_is_served_passes(config: Any) -> None:
    check_engine(config, ONE_GROUP, Settings())


@pytest.mark.parametrize(
    ("config", "groups", "why"),
    [
        (engine(), 2, "the model's KV cache has 2 groups of layers .*one kind of attention"),
        (
            engine(parallel_config={"decode_context_parallel_size": 2}),
            1,
            "decode_context_parallel_size is 2 .*context parallelism",
        ),
        (
            engine(parallel_config={"prefill_context_parallel_size": 4}),
            1,
            "prefill_context_parallel_size is 4 .*context parallelism",
        ),
        (engine(cache_config={"calculate_kv_scales": True}), 1, "calculate_kv_scales is on.*checkpoint"),
        (engine(speculative_config=draft("eagle")), 1, "speculative decoding by 'eagle' keeps .*n-gram"),
    ],
)
def test_what_cannot_be_named_or_restored_is_refused(config: Any, groups: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_engine(config, SimpleNamespace(kv_cache_groups=[object()] * groups), Settings())


def hub_model(commit: str | None, load_format: str = "auto") -> SimpleNamespace:
    """A model by its name on a hub, as vLLM describes it once its configuration is loaded."""
    model = SimpleNamespace(model="someone/some-model", hf_config=SimpleNamespace(_commit_hash=commit))
    return SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format=load_format))


def test_weights_from_a_hub_are_named_by_their_commit() -> None:
    assert weights_revision(hub_model("0123abcd"), "") == "commit:0123abcd"
    assert weights_revision(hub_model("0123abcd"), "given") == "given"
    assert weights_revision(hub_model(None, "dummy"), "") == "dummy"
    with pytest.raises(ConfigError, match=r"which weights 'someone/some-model' has .*set weights_revision"):
        weights_revision(hub_model(None), "")
