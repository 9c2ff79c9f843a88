"""Modes of an engine, for layers that keep KV in different ways: a hit changes no token and no logprob."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.models import make_adapter
from tests.engines.vllm.shapes import SHAPES
from tests.engines.vllm.test_page import cached_tokens, complete, server

ASKED = prompt(1500, 497)
# Blocks of recurrent layers are large.
LONG = prompt(1500, 1300)
WINDOWS = "interleaved windows"
MODES: dict[str, dict[str, Any]] = {
    "two shards": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "FP8 KV": {"kv_cache_dtype": "fp8"},
    "pieces": {"max_num_batched_tokens": 96, "max_num_seqs": 2},
    "large pieces": {"max_num_batched_tokens": 600, "max_num_seqs": 2},
    "LoRA": {"enable_lora": True, "max_lora_rank": 8},
    "sync": {},
}


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[Engine]:
    """A process whose engine the tests replace: starting a process takes longer than an engine."""
    with Engine(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def own() -> Iterator[LocalDaemon]:
    with LocalDaemon({"dram": {"limit": "256MiB", "huge_pages": False}}) as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        ("window smaller than the prompt", "two shards"),
        (WINDOWS, "two shards"),
        ("linear attention", "two shards"),
        ("grouped queries", "FP8 KV"),
        (WINDOWS, "FP8 KV"),
        ("sinks", "FP8 KV"),
        ("linear attention", "FP8 KV"),
        ("window smaller than the prompt", "pieces"),
        ("sinks", "pieces"),
        ("long rope", "pieces"),
        ("linear attention", "large pieces"),
        (WINDOWS, "LoRA"),
        ("experts", "sync"),
        ("long rope", "sync"),
    ],
)
def test_a_hit_equals_one_in_vllms_own_cache(
    process: Engine, own: LocalDaemon, tmp_path: Path, shape: str, mode: str
) -> None:
    """The reference is an engine without the store whose own cache holds the same prefix.

    With FP8 KV and with recurrent layers, vLLM computes other bits behind a prefix than without one.
    """
    made = SHAPES[shape]
    options = {"model": str(made.save(tmp_path)), **made.engine, **MODES[mode]}
    load = "sync" if mode == "sync" else "async"
    lora = ["red", 1, str(make_adapter(tmp_path / "red", 1, "q"))] if mode == "LoRA" else None
    asked = [LONG if shape == "linear attention" else ASKED]
    process.restart(**options)
    first = said(process.generate(asked, lora=lora))
    [found] = cached(again := process.generate(asked, lora=lora))
    assert found > 0
    for tokens, expected in ((0, first), (found, said(again))):
        process.restart(**options, **connector(own, load=load, weights_revision=tmp_path.name))
        answer = process.generate(asked, lora=lora)
        assert (cached(answer), said(answer)) == ([tokens], expected)
        assert process("failures") == {}


def test_replicas_of_one_server_share_blocks(process: Engine, own: LocalDaemon, tmp_path: Path) -> None:
    """Data parallelism: what one replica computed, the other loads."""
    folder = SHAPES[WINDOWS].save(tmp_path)
    process.restart(model=str(folder))
    [(tokens, _)] = said(process.generate([ASKED]))
    flag = json.dumps(connector(own, weights_revision=tmp_path.name)["kv_transfer_config"])
    with server(folder, flag, ("--skip-tokenizer-init", "--data-parallel-size", "2")) as url:
        for replica, found in ((0, 0), (1, full_blocks(497))):
            to = {"X-data-parallel-rank": str(replica)}
            answer = complete(url, folder, ASKED, headers=to, max_tokens=8)
            assert (answer["choices"][0]["token_ids"], cached_tokens(answer)) == (tokens, found)
