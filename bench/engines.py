"""Runs vLLM engines of a random model. Their connectors can be removed and put back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.harness import GIB, Bench
from bench.served import serve
from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.environments import interpreter
from tests.engines.vllm.engine import VOCABULARY, Engine, connector

MAX_TOKENS = 2304
_OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": MAX_TOKENS,
    "max_num_batched_tokens": MAX_TOKENS,
    "kv_cache_memory_bytes": GIB,
}


@contextmanager
def engine(
    bench: Bench, hidden: int, layers: int, kv_heads: int, dram_bytes: int, threads: int = 2
) -> Iterator[Engine]:
    """Returns an engine with the connector, of a random Llama with this number of layers and heads of 64."""
    with (
        serve(dram_bytes) as (_, daemon),
        engine_of(bench, daemon, hidden, layers, kv_heads, threads) as made,
    ):
        yield made


@contextmanager
def engine_of(
    bench: Bench, daemon: LocalDaemon, hidden: int, layers: int, kv_heads: int, threads: int = 2
) -> Iterator[Engine]:
    """Returns such an engine, with the connector to this daemon."""
    bench.doing("environment")
    python = interpreter("vllm")
    with bench.scratch() as folder:
        _describe(folder, hidden, layers, kv_heads)
        bench.doing("starting vLLM")
        with Engine(folder, python, threads, **_OPTIONS, **connector(daemon)) as made:
            yield made


@contextmanager
def roles(
    bench: Bench, hidden: int, layers: int, kv_heads: int, dram_bytes: int
) -> Iterator[tuple[Engine, Engine]]:
    """Returns a prefill and a decode engine with one daemon, see `engine`; one thread each."""
    bench.doing("environment")
    python = interpreter("vllm")
    with bench.scratch() as folder, serve(dram_bytes) as (_, daemon), ExitStack() as stack:
        _describe(folder, hidden, layers, kv_heads)
        bench.doing("starting vLLM")
        made = []
        for role in ("kv_producer", "kv_consumer"):
            [transfer] = connector(daemon).values()
            options = {**_OPTIONS, "kv_transfer_config": {**transfer, "kv_role": role}}
            made.append(stack.enter_context(Engine(folder, python, 1, **options)))
        prefill, decode = made
        yield prefill, decode


def _describe(folder: Path, hidden: int, layers: int, kv_heads: int) -> None:
    """Writes the configuration of the model. vLLM makes random weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
