"""Engines that no test here can start, or not soon: their configuration is a fake with what is looked at."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.load import LoadConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kernels
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from kvstore.errors import ConfigError
from kvstore.weights import naming
from kvstore_vllm.settings import ConnectorSettings, check_engine, check_tiered_engine, why_off
from kvstore_vllm.weights import weights_of


def engine(**changes: dict[str, Any]) -> SimpleNamespace:
    """The parts of a VllmConfig that are served, with changes by part."""
    parts: dict[str, dict[str, Any]] = {
        "cache_config": {
            "prefix_caching_hash_algo": "sha256",
            "calculate_kv_scales": False,
            "cache_dtype": "auto",
        },
        "parallel_config": {
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
        },
        "kv_transfer_config": {"is_kv_consumer": True, "kv_load_failure_policy": "recompute"},
        "scheduler_config": {"long_prefill_token_threshold": 0, "async_scheduling": True},
        "model_config": {
            "model": "some-model",
            "is_hybrid": False,
            "is_encoder_decoder": False,
            "runner_type": "generate",
            "dtype": torch.bfloat16,
        },
    }
    made = {name: SimpleNamespace(**part | changes.get(name, {})) for name, part in parts.items()}
    others = {name: changes.get(name) for name in ("speculative_config", "weight_transfer_config")}
    return SimpleNamespace(**made, **others)


def draft(method: str, several: bool = False, **more: Any) -> Any:
    return SimpleNamespace(
        **{
            "method": method,
            "uses_draft_kv_cache": lambda: method not in ("ngram", "medusa"),
            "use_multi_module_mtp": lambda: several,
            "use_gemma4_mtp": lambda: False,
            "parallel_drafting": False,
            "use_heterogeneous_vocab": False,
            "draft_parallel_config": SimpleNamespace(tensor_parallel_size=1),
        }
        | more
    )


def groups(*specs: Any, alignment: int | None = None, **more: Any) -> SimpleNamespace:
    made = [SimpleNamespace(kv_cache_spec=spec, **more) for spec in specs]
    return SimpleNamespace(kv_cache_groups=made, cache_hit_alignment_tokens=alignment)


SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=64)


def state(**more: Any) -> MambaSpec:
    served: dict[str, Any] = {
        "block_size": 16,
        "shapes": ((4, 8),),
        "dtypes": (torch.float32,),
        "mamba_cache_mode": "align",
        "mamba_type": Kernels.GDN_ATTN,
    }
    return MambaSpec(**served | more)


CHUNKS = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)


@pytest.mark.parametrize(
    "config",
    [
        engine(),
        *(engine(cache_config={"cache_dtype": each}) for each in ("bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")),
        *(engine(speculative_config=draft(each)) for each in ("ngram", "eagle", "eagle3", "draft_model")),
    ],
)
def test_served_engines_pass(config: Any) -> None:
    check_engine(config, groups(FULL), ConnectorSettings())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            engine(parallel_config={"decode_context_parallel_size": 2}),
            "decode_context_parallel_size is 2 .*context parallelism",
        ),
        (
            engine(parallel_config={"prefill_context_parallel_size": 4}),
            "prefill_context_parallel_size is 4 .*context parallelism",
        ),
        *(
            (
                engine(cache_config={"cache_dtype": each}),
                f"--kv-cache-dtype is {each}, and the model's dtype is bfloat16.*auto, fp8",
            )
            for each in ("float16", "int8_per_token_head", "fp8_ds_mla", "nvfp4", "of a later vLLM")
        ),
        (engine(cache_config={"calculate_kv_scales": True}), "calculate_kv_scales is on.*checkpoint"),
        (engine(speculative_config=draft("dflash")), "decoding by 'dflash' is not served .*ngram.*eagle"),
        (engine(speculative_config=draft("medusa")), "decoding by 'medusa' is not served"),
        (engine(speculative_config=draft("mtp", True)), "'mtp' has several layers.*num_speculative_tokens"),
        (engine(speculative_config=draft("eagle", parallel_drafting=True)), "has parallel_drafting True"),
        (engine(speculative_config=draft("mtp", use_gemma4_mtp=lambda: True)), "'mtp' reads the KV of the"),
        (engine(speculative_config=draft("mtp", kv_cache_dtype="fp8")), "'mtp' has kv_cache_dtype 'fp8'"),
        (
            engine(speculative_config=draft("draft_model", use_heterogeneous_vocab=True)),
            "has use_heterogeneous_vocab True",
        ),
        (
            engine(parallel_config={"tensor_parallel_size": 2}, speculative_config=draft("eagle3")),
            "the draft has another tensor parallelism.*draft_tensor_parallel_size to 2",
        ),
        (engine(weight_transfer_config={}), "weight_transfer_config is set: the weights change"),
        (engine(model_config={"is_encoder_decoder": True}), "'some-model' has an encoder.*decoder alone"),
        (engine(model_config={"runner_type": "pooling"}), "'some-model' has a pooler.*that write text"),
    ],
)
def test_engines_without_identity_or_exact_restore_are_refused(config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_engine(config, groups(FULL), ConnectorSettings())


def test_prefixes_that_end_within_blocks_are_refused() -> None:
    large = SlidingWindowSpec(**SIZES | {"block_size": 32}, sliding_window=64)
    check_engine(engine(), groups(FULL, large, alignment=32), ConnectorSettings())
    for kinds in (groups(FULL, large, alignment=16), groups(FULL, state(), alignment=8)):
        with pytest.raises(ConfigError, match=r"multiples of .* tokens, within blocks of .*unit"):
            check_engine(engine(), kinds, ConnectorSettings())


class OwnSpec(FullAttentionSpec):
    """What a plugin may bring."""


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([], "has no KV cache .*leave out the connector"),
        ([MLAAttentionSpec(**SIZES, cache_dtype_str="fp8_ds_mla")], "cache_dtype_str 'fp8_ds_mla'.*'auto'"),
        (
            [MLAAttentionSpec(**SIZES, cache_dtype_str="auto", cache_role=SparseCacheRole.INDEXER)],
            "cache_role <SparseCacheRole.INDEXER.*only",
        ),
        ([FULL, state(mamba_cache_mode="none")], "mamba_cache_mode 'none'.*only 'align'"),
        ([FULL, state(num_speculative_blocks=1)], "num_speculative_blocks 1.*only 0"),
        (
            [FULL, state(num_prefill_checkpoint_blocks=1)],
            "checkpoint_blocks 1.*only 0.*no Mamba-2",
        ),
        *(
            (
                [FULL, state(mamba_type=kind)],
                f"recurrent layers of kind {kind.name}.*GDN_ATTN and SHORT_CONV are",
            )
            for kind in (Kernels.MAMBA1, Kernels.MAMBA2, Kernels.LINEAR)
        ),
        ([FULL, OwnSpec(**SIZES)], "of kind OwnSpec.*FullAttentionSpec, Chunked.* are served: leave out"),
        (
            [FULL, SlidingWindowSpec(**SIZES, sliding_window=64, extra_retained_tokens=2)],
            "extra_retained_tokens 2.*only 0",
        ),
        ([FullAttentionSpec(**SIZES, non_causal=True)], "non_causal True.*only False"),
        ([FullAttentionSpec(**SIZES, tokens_per_state=4)], "tokens_per_state 4.*only 1"),
    ],
)
def test_only_exactly_restored_kinds_of_kv_cache_are_served(specs: list[Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_engine(engine(), groups(*specs), ConnectorSettings())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"enable_kv_transfer": False}, "enable_kv_transfer False.*only True"),
        ({"host_resident": True}, "host_resident True.*only False"),
    ],
)
def test_groups_with_unknown_properties_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_engine(engine(), groups(FULL, **more), ConnectorSettings())


@pytest.mark.parametrize(
    "specs",
    [[FULL, WINDOW], [WINDOW], [FULL, CHUNKS], [FULL, state()], [FULL, state(mamba_type=Kernels.SHORT_CONV)]],
)
def test_windows_are_loaded_asynchronously_in_blocks_of_the_engine(specs: list[Any]) -> None:
    check_engine(engine(), groups(*specs), ConnectorSettings())
    with pytest.raises(ConfigError, match=r"block_tokens is 64, and .* groups? of layers"):
        check_engine(engine(), groups(*specs), ConnectorSettings(block_tokens=64))
    config = engine(scheduler_config={"async_scheduling": False})
    with pytest.raises(ConfigError, match=r"load is 'sync', and .*cannot be told.*use async loads"):
        check_engine(config, groups(*specs), ConnectorSettings(load="sync"))


LATENT = MLAAttentionSpec(**SIZES, cache_dtype_str="auto")


@pytest.mark.parametrize("other", [CHUNKS, state(), LATENT])
def test_drafts_are_served_with_attention_that_a_test_covers(other: Any) -> None:
    for method in ("eagle", "mtp"):
        config = engine(speculative_config=draft(method))
        check_engine(config, groups(FULL, WINDOW), ConnectorSettings())
        for specs in ([other], [FULL, other]):
            if method == "mtp" and specs == [LATENT]:
                # DeepSeek-V3, with the layer that it is published with.
                check_engine(config, groups(LATENT), ConnectorSettings())
                continue
            with pytest.raises(ConfigError, match=rf"'{method}', and .* of kind {type(other).__name__}"):
                check_engine(config, groups(*specs), ConnectorSettings())


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        (engine(), "async scheduling"),
        (engine(scheduler_config={"async_scheduling": False}, parallel_config={"pipeline_parallel_size": 2}),
         "2 pipeline stages"),
    ],
)  # fmt: skip
def test_synchronous_loads_are_refused_with_overlapping_steps(config: Any, beside: str) -> None:
    with pytest.raises(ConfigError, match=f"load is 'sync' with {beside}.*use async loads"):
        check_engine(config, groups(FULL), ConnectorSettings(load="sync"))
    check_engine(config, groups(FULL), ConnectorSettings())


def test_an_engine_without_prefix_caching_is_served_only_for_a_reason() -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False))
    assert "prefix caching is off" in why_off(config, ConnectorSettings())
    assert why_off(config, ConnectorSettings(without_prefix_caching="memory is short")) == ""
    config.cache_config.enable_prefix_caching = True
    assert why_off(config, ConnectorSettings()) == ""


def hub_model(commit: str | None, load_format: str = "auto") -> SimpleNamespace:
    """A model by its name on a hub, as vLLM describes it once its configuration is loaded."""
    model = SimpleNamespace(
        model="someone/some-model", model_weights="", hf_config=SimpleNamespace(_commit_hash=commit)
    )
    return SimpleNamespace(model_config=model, load_config=LoadConfig(load_format=load_format))


def local_model(path: Path) -> SimpleNamespace:
    """A model in local files, as vLLM describes it."""
    config = hub_model(None)
    config.model_config.model = str(path)
    return config


def revision(config: SimpleNamespace, given: str = "") -> str:
    """The name of an engine's weights."""
    return weights_of(config, given).revision()


@pytest.fixture
def model_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that this engine can have read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    start_after(folder, monkeypatch)
    return folder


def start_after(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process one that started after the last change."""
    changed_ns = max(file.stat().st_ctime_ns for file in folder.iterdir())
    monkeypatch.setattr(naming, "process_started_ns", lambda: changed_ns + 1)


def test_weights_in_local_files_are_named_by_their_content(
    model_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = revision(local_model(model_files))
    assert re.fullmatch("blake3:[0-9a-f]{64}", named)
    assert revision(local_model(model_files), "given") == "given"
    copy = tmp_path / "copy"
    shutil.copytree(model_files, copy)
    start_after(copy, monkeypatch)
    assert revision(local_model(copy)) == named
    (copy / "model.safetensors").write_bytes(b"Weights")
    start_after(copy, monkeypatch)
    assert revision(local_model(copy)) not in ("", named)
    # A GGUF model is one file.
    assert revision(local_model(copy / "model.safetensors")).startswith("blake3:")


def test_files_that_changed_after_the_start_are_refused(
    model_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model_files / "model.safetensors").write_bytes(b"others!")
    changed_ns = (model_files / "model.safetensors").stat().st_ctime_ns
    monkeypatch.setattr(naming, "process_started_ns", lambda: changed_ns)
    why = r"model.safetensors in .* was changed after the engine started.*restart.*set weights_revision"
    for _ in range(2):  # also if the digest is remembered
        with pytest.raises(ConfigError, match=why):
            revision(local_model(model_files))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=why):
        revision(local_model(model_files))


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no files of a model.*set weights_revision"):
        revision(local_model(tmp_path))


def test_the_start_of_a_process_is_known() -> None:
    code = "from kvstore import process_started_ns; print(process_started_ns())"
    before_ns = time.time_ns()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    after_ns = time.time_ns()
    out, _ = process.communicate(timeout=120)
    tick_ns = 20 * 10**6
    assert before_ns < int(out.split()[-1]) <= after_ns + tick_ns


def test_weights_from_a_hub_are_named_by_their_commit() -> None:
    assert revision(hub_model("0123abcd")) == "commit:0123abcd"
    assert revision(hub_model("0123abcd"), "given") == "given"
    assert revision(hub_model(None, "dummy")) == "dummy"
    with pytest.raises(ConfigError, match=r"which weights 'someone/some-model' has .*set weights_revision"):
        revision(hub_model(None))


@pytest.mark.parametrize(
    ("model", "load", "why"),
    [
        (
            {"model_weights": "s3://bucket/model"},
            {},
            r"which weights are in .s3://bucket/model.*weights_revision",
        ),
        ({}, {"load_format": "tensorizer"}, "load_format 'tensorizer' nothing tells which weights"),
        ({}, {"load_format": "ipc_cache"}, "load_format 'ipc_cache' nothing tells"),
        ({}, {"load_format": "of a plugin"}, "load_format 'of a plugin' nothing tells"),
    ],
)
def test_weights_from_elsewhere_than_the_models_files_need_a_name(
    model_files: Path, model: dict[str, str], load: dict[str, str], why: str
) -> None:
    """Two models in an object store may have the same configuration, and so the same local files."""
    for config in (local_model(model_files), hub_model("0123abcd")):
        vars(config.model_config).update(model)
        vars(config.load_config).update(load)
        with pytest.raises(ConfigError, match=why):
            revision(config)
        assert revision(config, "given") == "given"


def test_which_files_are_read_is_part_of_the_name(model_files: Path) -> None:
    """A folder may have other weights in another format."""
    names = set()
    for more in (
        {},
        {"load_format": "pt"},
        {"ignore_patterns": ["model-b*"]},
        {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "a-{rank}"}},
        {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "b-{rank}"}},
    ):
        config = local_model(model_files)
        config.load_config = LoadConfig(**more)
        names.add(revision(config))
    assert len(names) == 5
    config.load_config = LoadConfig(model_loader_extra_config={"enable_multithread_load": True})
    assert revision(config) == revision(local_model(model_files)) in names


def tiered(**changes: Any) -> SimpleNamespace:
    """The parts of an engine with vLLM's CPU tier that are served, with changes by part."""
    parts = {
        "cache_config": {"enable_prefix_caching": True},
        "parallel_config": {"nnodes": 1},
        "model_config": {"is_mm_prefix_lm": False},
        "scheduler_config": {"async_scheduling": False},
    }
    merged = {name: part | changes.pop(name, {}) for name, part in parts.items()}
    made = engine(**merged, **changes)
    made.lora_config = changes.get("lora_config")
    return made


def test_engines_with_a_cpu_tier_pass() -> None:
    check_tiered_engine(tiered(), groups(FULL, WINDOW, CHUNKS, state()))
    check_tiered_engine(tiered(scheduler_config={"async_scheduling": True}), groups(FULL, WINDOW, CHUNKS))
    check_tiered_engine(tiered(), groups(LATENT))
    # A tier reports failed loads as misses itself.
    failing = {"is_kv_consumer": True, "kv_load_failure_policy": "fail"}
    check_tiered_engine(tiered(kv_transfer_config=failing), groups(FULL))


@pytest.mark.parametrize(
    ("config", "kinds", "why"),
    [
        (tiered(cache_config={"enable_prefix_caching": False}), groups(FULL), "prefix caching is off"),
        (tiered(lora_config=object()), groups(FULL), "LoRA is on: .* its files may change"),
        (tiered(model_config={"is_mm_prefix_lm": True}), groups(FULL), "images have bidirectional attention"),
        (tiered(parallel_config={"nnodes": 2}), groups(FULL), "has 2 nodes"),
        (tiered(speculative_config=draft("eagle")), groups(FULL), "'eagle' keeps KV of a draft"),
        (tiered(parallel_config={"decode_context_parallel_size": 2}), groups(FULL), "decode_context.* is 2"),
        (tiered(cache_config={"calculate_kv_scales": True}), groups(FULL), "calculate_kv_scales is on"),
        (tiered(cache_config={"cache_dtype": "nvfp4"}), groups(FULL), "--kv-cache-dtype is nvfp4"),
        (tiered(model_config={"runner_type": "pooling"}), groups(FULL), "has a pooler"),
        (tiered(), groups(), "has no KV cache"),
        (
            tiered(scheduler_config={"async_scheduling": True}),
            groups(FULL, state()),
            "states that hold dropped",
        ),
    ],
)
def test_engines_with_a_cpu_tier_are_refused_by_name(config: Any, kinds: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_tiered_engine(config, kinds)
