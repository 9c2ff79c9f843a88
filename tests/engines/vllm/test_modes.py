"""Modes of an engine, for layers that keep KV in different ways: a hit changes no token and no logprob."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client, Layout
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.models import make_adapter, quantize
from tests.engines.vllm.shapes import AMX, SHAPES, need_amx, need_fp8_kv
from tests.engines.vllm.stored import answers_from_the_store, settled, store_again
from tests.engines.vllm.test_page import cached_tokens, complete, server

ASKED = prompt(1500, 497)
# Blocks of recurrent layers are large.
LONG = prompt(1500, 1300)
WINDOWS = "interleaved windows"
SHARDS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PIECES = {"max_num_batched_tokens": 96, "max_num_seqs": 2}
MODES: dict[str, dict[str, Any]] = {
    "two shards": SHARDS,
    "FP8 KV": {"kv_cache_dtype": "fp8"},
    "FP8 E5M2": {"kv_cache_dtype": "fp8_e5m2"},
    "FP8 KV but for windows": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["sliding_window"]},
    "pieces": PIECES,
    "large pieces": {"max_num_batched_tokens": 600, "max_num_seqs": 2},
    "LoRA": {"enable_lora": True, "max_lora_rank": 8},
    # `connector` turns async scheduling off for it.
    "sync": {},
    "embeddings": {"enable_prompt_embeds": True},
    # Layers that share KV compute the last token of a prompt only.
    "fast prefill": {"kv_sharing_fast_prefill": True},
    "AMX": AMX,
    "AMX in pieces": AMX | PIECES,
    "AMX, two shards": AMX | SHARDS,
    "8-bit weights": {"dtype": "bfloat16"},
    "scaled FP8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
SCALES = {"8-bit weights": 0.0, "scaled FP8 KV": 0.25}


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[Engine]:
    """A process whose engine the tests replace: starting a process takes longer than an engine."""
    with Engine(model) as engine:
        yield engine


FULL = ["llama", "grouped queries", "experts", "long rope"]
WINDOWED = ["window smaller than the prompt", "long rope with a window", WINDOWS, "sinks", "chunks"]
CELLS = [
    *((shape, "two shards") for shape in ("window smaller than the prompt", WINDOWS, "linear attention")),
    *((shape, mode) for mode in ("FP8 KV", "pieces") for shape in FULL + WINDOWED),
    # vLLM's CPU build has no kernels for adapters of models with experts.
    *((shape, "LoRA") for shape in ("llama", "grouped queries", "long rope", *WINDOWED[:3])),
    ("linear attention", "FP8 KV"),
    ("llama", "FP8 E5M2"),
    (WINDOWS, "FP8 KV but for windows"),
    ("linear attention", "large pieces"),
    *(("two block sizes", mode) for mode in ("two shards", "FP8 KV", "pieces")),
    ("two block sizes and shared KV", "fast prefill"),
    *((shape, "embeddings") for shape in ("llama", WINDOWS)),
    *((shape, mode) for shape in ("latent", "latent queries") for mode in ("AMX", "AMX in pieces")),
    ("latent", "AMX, two shards"),
    ("llama", "8-bit weights"),
    ("llama", "scaled FP8 KV"),
    *((shape, "sync") for shape in FULL),
]


@pytest.mark.parametrize(("shape", "mode"), CELLS)
def test_a_hit_equals_one_in_vllms_own_cache(
    process: Engine, own: LocalDaemon, tmp_path: Path, shape: str, mode: str
) -> None:
    """The reference is an engine without the store whose own cache holds the same prefix.

    With FP8 KV, recurrent layers and latent attention, vLLM computes other bits behind a prefix.
    """
    if mode.startswith("AMX"):
        need_amx()
    if MODES[mode].get("kv_cache_dtype", "").startswith("fp8"):
        need_fp8_kv()
    made = SHAPES[shape]
    folder = made.save(tmp_path)
    if mode in SCALES:
        quantize(folder, SCALES[mode])
    options = {"model": str(folder), **made.engine, **MODES[mode]}
    load = "sync" if mode == "sync" else "async"
    lora = ["red", 1, str(make_adapter(tmp_path / "red", 1, "o"))] if mode == "LoRA" else None
    how = {"lora": lora, "embed": mode == "embeddings"}
    asked = LONG if shape == "linear attention" else ASKED
    process.restart(**options)
    first = said(process.generate([asked], **how))
    [found] = cached(again := process.generate([asked], **how))
    assert found > 0
    process.restart(**options, **connector(own, load=load, weights_revision=tmp_path.name))
    assert process("overlaps") == (load == "async")
    cold = process.fresh([asked], **how)
    assert (cached(cold), said(cold)) == ([0], first)
    answer = process.hit(asked, found, **how)
    assert (cached(answer), said(answer)) == ([found], said(again))
    assert answers_from_the_store(process, own, asked, **how)


@pytest.mark.parametrize("shape", WINDOWED)
def test_synchronous_loads_of_windows_are_refused(
    process: Engine, own: LocalDaemon, tmp_path: Path, shape: str
) -> None:
    made = SHAPES[shape]
    options = {"model": str(made.save(tmp_path)), **made.engine}
    with pytest.raises(RuntimeError, match=r"ConfigError.*load is 'sync', and the model's KV cache has"):
        process.restart(**options, **connector(own, load="sync", weights_revision=tmp_path.name))


@pytest.fixture
def alone() -> Iterator[LocalDaemon]:
    """A daemon of one test: it lists a page of namespaces at once, and the others' are more."""
    with LocalDaemon({"dram": {"limit": "256MiB", "huge_pages": False}}) as daemon:
        yield daemon


@pytest.mark.parametrize("shape", ["llama", WINDOWS])
def test_replicas_of_one_server_share_blocks(
    process: Engine, alone: LocalDaemon, tmp_path: Path, shape: str
) -> None:
    """Data parallelism: what one replica computed, the other loads; zeros in its place change the answer."""
    folder, zeroed = SHAPES[shape].save(tmp_path), prompt(1501, 497)
    process.restart(model=str(folder))
    expected = []
    for asked in (ASKED, zeroed):
        [(tokens, steps)] = said(process.generate([asked]))
        expected.append((tokens, [dict(step)[token] for token, step in zip(tokens, steps, strict=True)]))
    flag = connector(alone, weights_revision=tmp_path.name)
    process.restart(model=str(folder), **flag)
    keys = [
        [bytes.fromhex(key) for key in process("keys", prompt=zeroed, group=group)]
        for group in range(process("groups"))
    ]

    def asks(asked: list[int], replica: int) -> tuple[Any, int]:
        to = {"X-data-parallel-rank": str(replica)}
        more = {"max_tokens": 8, "logprobs": 1, "return_tokens_as_token_ids": True}
        answer = complete(url, folder, asked, headers=to, **more)
        [choice] = answer["choices"]
        return (choice["token_ids"], choice["logprobs"]["token_logprobs"]), cached_tokens(answer)

    options = ("--skip-tokenizer-init", "--data-parallel-size", "2")
    with server(folder, json.dumps(flag["kv_transfer_config"]), options) as url:
        for asked, answer in zip((ASKED, zeroed), expected, strict=True):
            assert asks(asked, 0) == (answer, 0)
        settled(alone)
        assert asks(ASKED, 1) == (expected[0], full_blocks(497))
        # The namespaces are those of an engine of two replicas.
        with Client(alone.url, deadline_s=10.0) as client:
            listed = client.control("namespaces")
            assert listed["namespaces"]
            assert not listed["more"]
            for each in listed["namespaces"]:
                space = client.namespace(Layout(**each["layout"]))
                for some in keys:
                    stored = space.contains(some)
                    store_again(space, [key for key, there in zip(some, stored, strict=True) if there], True)
        other, found = asks(zeroed, 1)
        assert found == full_blocks(497)
        assert other != expected[1]
