"""The classes satisfy TensorRT-LLM's abstract classes: names and parameters, as a table.

Source of the table: `KvCacheConnectorScheduler`, `KvCacheConnectorWorker`, `SchedulerOutput`, `RequestData`
of `tensorrt_llm/_torch/pyexecutor/connectors/kv_cache_connector.py` in NVIDIA/TensorRT-LLM, commit
035ab91cad04b7b77a479a9526edecfbc742c661. The documentation of the release 1.4.0rc4 describes the same calls.
The real package is not installed here: it needs a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from tensorrt_llm._torch.pyexecutor.connectors import kv_cache_connector as fake

import kvstore_trtllm
from kvstore_trtllm import KVStoreScheduler, KVStoreWorker, settings
from kvstore_trtllm.messages import Load, Save, Step
from tests.engines.trtllm.executor import Request

ABSTRACT = {
    "scheduler": {
        "build_connector_meta": ["scheduler_output"],
        "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
        "request_finished": ["request", "cache_block_ids"],
        "update_state_after_alloc": ["request", "block_ids"],
    },
    "worker": {
        "register_kv_caches": ["kv_cache_tensor"],
        "start_load_kv": ["stream"],
        "wait_for_layer_load": ["layer_idx", "stream"],
        "save_kv_layer": ["layer_idx", "stream"],
        "wait_for_save": ["stream"],
        "get_finished": ["finished_gen_req_ids", "started_loading_req_ids"],
    },
}
WITH_DEFAULT = {
    "scheduler": {"wait_for_initialization": []},
    "worker": {
        "bind_connector_meta": ["metadata"],
        "get_connector_meta": [],
        "register_forward_pass_callable": [],
    },
}
OURS = {"scheduler": KVStoreScheduler, "worker": KVStoreWorker}
FAKES = {"scheduler": fake.KvCacheConnectorScheduler, "worker": fake.KvCacheConnectorWorker}
REQUEST_DATA = [
    "request_id", "new_tokens", "new_block_ids", "computed_position", "num_scheduled_tokens", "block_hashes",
    "priorities", "cache_salt", "new_block_ids_by_layer_group",
]  # fmt: skip
SCHEDULER_OUTPUT = ["new_requests", "cached_requests", "attention_dp_rank"]


def parameters(cls: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(cls, name)).parameters)[1:]


@pytest.mark.parametrize("half", OURS)
def test_every_abstract_method_has_the_names_of_the_interface(half: str) -> None:
    ours = OURS[half]
    assert issubclass(ours, FAKES[half])
    assert not inspect.isabstract(ours)
    assert FAKES[half].__abstractmethods__ == ABSTRACT[half].keys()
    for name, expected in ABSTRACT[half].items():
        assert name in vars(ours)
        assert parameters(ours, name) == parameters(FAKES[half], name) == expected
    for name, expected in WITH_DEFAULT[half].items():
        assert parameters(ours, name) == parameters(FAKES[half], name) == expected
    assert parameters(ours, "__init__") == ["llm_args"]


def test_the_fake_has_the_fields_that_the_connector_is_given() -> None:
    assert [each.name for each in dataclasses.fields(fake.RequestData)] == REQUEST_DATA
    assert [each.name for each in dataclasses.fields(fake.SchedulerOutput)] == SCHEDULER_OUTPUT


def test_the_executor_finds_the_classes_by_their_names() -> None:
    module = importlib.import_module("kvstore_trtllm")
    assert [getattr(module, name) for name in ("KVStoreScheduler", "KVStoreWorker")] == list(OURS.values())
    assert set(kvstore_trtllm.__all__) == {"KVStoreScheduler", "KVStoreWorker"}


def test_what_the_ranks_are_told_can_be_pickled() -> None:
    step = Step(3, "revision", [Load(1, 2)], [Save([b"k"], None, [4], [5, 6])])
    assert pickle.loads(pickle.dumps(step)) == step


def test_the_release_is_named_once() -> None:
    assert settings.RELEASE == "1.4.0rc4"
    page = (Path(__file__).parents[3] / "docs/tensorrt-llm.md").read_text(encoding="utf-8")
    assert f"TensorRT-LLM {settings.RELEASE}" in page
    assert settings.RELEASE in (__doc__ or "")


def test_a_request_has_every_property_that_the_connector_reads() -> None:
    """The fake must not lack what would be read, and found missing, as a failure of the hook."""
    source = inspect.getsource(kvstore_trtllm.scheduler)
    request: Any = Request([1])
    for name in ("request_id", "return_context_logits", "get_tokens"):
        assert f"request.{name}" in source
        assert hasattr(request, name)
    scheduler = kvstore_trtllm.scheduler
    assert all(hasattr(request, name) for name in (*scheduler._SALTS, *scheduler._NOT_IN_TOKENS))
