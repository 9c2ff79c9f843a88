from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore import Namespace
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines import stores
from tests.engines.trtllm.executor import FakeExecutor

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_size": 32, "sliding_window": None,
}  # fmt: skip

_number = itertools.count()

Make = Callable[..., FakeExecutor]


daemon, own_daemon = stores.daemon, stores.own_daemon


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_model(folder: Path, weights: bytes = b"weights", **changes: Any) -> Path:
    """A folder with a model's configuration, and something as its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def llm_args(model: Path, **changes: Any) -> Any:
    """A fake of TorchLlmArgs: the options that the connector reads, with the defaults of the release.

    `changes`: other values. Two underscores lead into a section, as in `kv_cache_config__dtype`.
    """
    args = SimpleNamespace(
        model=str(model), backend="pytorch", tensor_parallel_size=1, pipeline_parallel_size=1,
        context_parallel_size=1, enable_attention_dp=False, max_beam_width=1, speculative_config=None,
        enable_lora=False, lora_config=None, cache_transceiver_config=None, sparse_attention_config=None,
        kv_cache_compression_config=None, model_kwargs=None, force_dynamic_quantization=False,
        checkpoint_format="HF", orchestrator_type=None, ray_worker_extension_cls=None, sleep_config=None,
        dwdp_config=None, mm_encoder_only=False, encode_only=False, attn_backend="TRTLLM",
        load_format=SimpleNamespace(name="AUTO"), dtype="auto", max_seq_len=None, trust_remote_code=False,
        moe_config=None, nvfp4_gemm_config=None, moe_cluster_parallel_size=-1, moe_tensor_parallel_size=-1,
        moe_expert_parallel_size=-1, torch_compile_config=None, allreduce_strategy="AUTO",
        enable_autotuner=True, enable_min_latency=False, env_overrides=None,
        kv_connector_config=SimpleNamespace(server_url=None),
        scheduler_config=SimpleNamespace(capacity_scheduler_policy=SimpleNamespace(name="GUARANTEED_NO_EVICT")),
        kv_cache_config=SimpleNamespace(
            enable_block_reuse=True, use_kv_cache_manager_v2=False, host_cache_size=0, disk_cache_size=None,
            max_attention_window=None, dtype="auto", tokens_per_block=4,
        ),
    )  # fmt: skip
    for name, value in changes.items():
        *sections, last = name.split("__")
        section = args
        for each in sections:
            section = getattr(section, each)
        assert hasattr(section, last), name
        setattr(section, last, value)
    return args


@pytest.fixture
def options(daemon: LocalDaemon, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets options of connectors that are made later. Their blocks are this test's alone."""
    own = f"test {next(_number)} of {os.getpid()}"

    def give(**given: Any) -> None:
        whole = {
            "url": daemon.url, "weights_revision": own, "model": "tests", "deadline_s": 10, "staging_mib": 4,
        }  # fmt: skip
        text = json.dumps({name: value for name, value in {**whole, **given}.items() if value is not None})
        monkeypatch.setenv("TRTLLM_KVSTORE", text)

    give()
    return give


@pytest.fixture
def engine(options: Callable[..., None], model: Path) -> Iterator[Make]:
    """Makes engines of one rank, each with a pool and an own cache of its own: as after a restart."""
    made: list[FakeExecutor] = []

    def make(folder: Path = model, changes: dict[str, Any] | None = None, **how: Any) -> FakeExecutor:
        made.append(FakeExecutor(llm_args(folder, **(changes or {})), **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(first: int, tokens: int) -> list[int]:
    return list(range(first, first + tokens))


def alter(namespace: Namespace, keys: list[bytes], number: int) -> None:
    """Alters one byte of a stored block, by the mapping of a reservation."""
    payloads = np.empty((len(keys), namespace.layout.block_bytes), np.uint8)
    assert namespace.get(keys, payloads) == len(keys)
    namespace.invalidate(keys)
    with namespace.reserve(keys) as room:
        views = room.blocks
        for view, payload in zip(views, payloads, strict=True):
            view[:] = payload.data
        room.commit()
    views[number][100] ^= 1


def answers(requests: list[Any]) -> list[list[int]]:
    return [request.answer for request in requests]
