"""vllm-start: the start of an engine that digests its weights, compared with one without the connector.

No digest is remembered. Each engine has a process of its own. The clock starts when it has imported vLLM, and
stops when the engine takes requests. `named` is the time at which the store is used, in seconds. The files
are read from the disk, or from the page cache, where the load is shorter and the share of the digest larger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.engines import llama
from bench.harness import MIB, Bench, Result, Target, expect
from bench.served import serve
from bench.weights import cache_in, drop_from_page_cache, wait_until_old
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.weights.files import model_files
from tests.engines.environments import interpreter
from tests.engines.vllm.engine import Engine, connector

CASES = ("from-disk", "in-memory")
_OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 256 * MIB, "async_scheduling": False}


def run(bench: Bench) -> Iterator[Result]:
    """Yields two rows. The weights have 1.4 GiB."""
    model = bench.pick(llama(hidden=2048, layers=6, kv_heads=32), llama(hidden=256, layers=2, kv_heads=4))
    with bench.scratch() as folder, serve(64 * MIB) as (_, daemon), cache_in(folder / ".cache"):
        bench.doing("environment")
        interpreter("vllm")
        _save(bench, folder, model)
        files = list(model_files(folder).values())
        # Younger files are not remembered, and so the digest would leave no trace.
        wait_until_old(bench, files)
        for row in CASES:
            named_s: list[float] = []

            def prepare(cold: bool = row == "from-disk") -> None:
                if cold:
                    drop_from_page_cache(files)

            samples = (
                partial(_named, folder, daemon, prepare, named_s),
                partial(_plain, folder, prepare),
            )
            rounds = bench.interleave(f"vllm-start/{row}", samples, 0.5)
            yield rounds.result(f"vllm-start/{row}", "s", Target("<=", 1.1), named=median(named_s))


def _plain(folder: Path, prepare: Any, _: int) -> float:
    prepare()
    with Engine(folder, interpreter("vllm"), 2, **_OPTIONS) as made:
        return made.start_s


def _named(folder: Path, daemon: LocalDaemon, prepare: Any, named_s: list[float], _: int) -> float:
    remembered = folder / ".cache/kvstore/weights/digests"
    remembered.unlink(missing_ok=True)
    prepare()
    with Engine(folder, interpreter("vllm"), 2, **_OPTIONS, **connector(daemon)) as made:
        named_s.append(made.named_s)
        expect(remembered.exists(), True, "a digest was made")
        expect(made("layout")["revision"].startswith("blake3:"), True, "it names the weights")
        return made.start_s


def _save(bench: Bench, folder: Path, model: dict[str, Any]) -> None:
    """Writes a model whose weights repeat some random numbers, in the format of safetensors."""
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    numbers = np.random.default_rng(1).standard_normal(MIB, np.float32) * np.float32(0.02)
    shapes, header, at = _shapes(model), dict[str, Any](), 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for number, shape in enumerate(shapes.values()):
            bench.doing("writing", number / len(shapes))
            file.write(np.resize(numbers, shape))


def _shapes(model: dict[str, Any]) -> dict[str, list[int]]:
    """Returns the weights of a Llama by name."""
    hidden, inner, words = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    of_keys = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    layer = {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [of_keys, hidden],
        "self_attn.v_proj": [of_keys, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }
    shapes = {"model.embed_tokens": [words, hidden], "model.norm": [hidden], "lm_head": [words, hidden]}
    for number in range(model["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}
