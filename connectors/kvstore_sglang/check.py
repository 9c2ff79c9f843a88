"""Finds out what the connector does with a model before its engine starts, by SGLang's own functions."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.runtime_context import process_model_config, publish
from sglang.srt.server_args import prepare_server_args

from kvstore.errors import ConfigError, MisuseError
from kvstore.model_check import (
    PromptReport,
    prompt_lengths,
    prompts_table,
    refusals_text,
    size_text,
    table,
)
from kvstore_sglang.pages import check_layout, check_size
from kvstore_sglang.settings import BackendSettings, refusals

SETTINGS = {
    "--page-size": "64",
    "--hicache-mem-layout": "page_first_direct",
    "--hicache-io-backend": "direct",
    "--hicache-storage-backend": "dynamic",
    "--hicache-storage-backend-extra-config": json.dumps(
        {
            "backend_name": "kvstore",
            "module_path": "kvstore_sglang",
            "class_name": "HiCacheKVStore",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
        }
    ),
}
"""Arguments of engines that are given none."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The layers of one host pool.

    `window_tokens`: of its sliding windows; 0: it has none. `shard_bytes`: the bytes of a page by pipeline
    stage, of one tensor-parallel rank. `page_bytes`: those of all shards. `token_bytes`: of one token.
    """

    kind: str
    layers: int
    window_tokens: int
    shard_bytes: list[int]
    page_bytes: int
    token_bytes: int


@dataclass(slots=True)
class Report:
    """What the connector does with a model.

    `shards`: the tensor-parallel ranks with KV of their own. `refusals`: reasons with hints.
    """

    model: str
    architecture: str
    dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    page_tokens: int
    dram_bytes: int
    nvme_bytes: int
    shards: int
    settings: dict[str, str]
    pools: list[PoolReport] = field(default_factory=list)
    prompts: list[PromptReport] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)

    @property
    def served(self) -> bool:
        """Whether an engine with this configuration loads and stores blocks."""
        return not self.refusals

    def refuse(self, error: ConfigError) -> None:
        """Adds a reason, once."""
        if (reason := (error.message, error.hint)) not in self.refusals:
            self.refusals.append(reason)


def configure(model: str, arguments: list[str]) -> Any:
    """Makes this process one of an engine with these arguments and the connector; returns its ServerArgs.

    Raises MisuseError for what SGLang refuses. Ends the process with 2 for arguments that it does not know.
    """
    if Path(model).is_dir() and not (Path(model) / "config.json").exists():
        raise MisuseError(f"the folder {model} has no config.json", "give the folder of a model")
    words = ["--model-path", model, "--enable-hierarchical-cache", *arguments]
    given = {word.partition("=")[0] for word in arguments}
    for name, value in SETTINGS.items():
        words += [] if name in given else [name, value]
    if "--device" not in given and not torch.cuda.is_available():
        # Sizes do not depend on the device.
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        words += ["--device", "cpu"]
    try:
        made = prepare_server_args(words)
        publish(made, role="scheduler")
        process_model_config()
    except Exception as error:
        raise MisuseError(
            f"SGLang refuses this model or its arguments: {type(error).__name__}: {error}",
            "an engine would not start either: change what the message names; "
            "HF_HUB_OFFLINE=0 lets SGLang ask the hub",
        ) from error
    if (name := made.hicache_storage_backend) != SETTINGS["--hicache-storage-backend"]:
        raise MisuseError(f"--hicache-storage-backend is {name}", "leave it out, or give dynamic")
    return made


def check(server: Any, dram_bytes: int, nvme_bytes: int) -> Report:
    """Returns what the connector does with the engine that `configure` has made of this process."""
    model = process_model_config()
    latent = model.attention_arch == AttentionArch.MLA
    report = Report(
        model=server.model_path,
        architecture=model.hf_config.architectures[0],
        dtype=f"{model.dtype}".removeprefix("torch."),
        tensor_parallel=server.tp_size,
        pipeline_parallel=server.pp_size,
        page_tokens=server.page_size,
        dram_bytes=dram_bytes,
        nvme_bytes=nvme_bytes,
        # Ranks with the same latents store them once.
        shards=1 if latent else server.tp_size,
        settings={name: str(getattr(server, name[2:].replace("-", "_"))) for name in SETTINGS},
    )
    for refusal in refusals(SimpleNamespace(attn_cp_size=server.attn_cp_size, dcp_size=server.dcp_size)):
        report.refuse(refusal)
    if not report.refusals:
        _examine(report, server, model, latent)
    return report


def _examine(report: Report, server: Any, model: Any, latent: bool) -> None:
    """Fills in what depends on pools and pages."""
    every = list(range(model.num_hidden_layers))
    if latent:
        row = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        row = 2 * model.get_num_kv_heads(server.tp_size) * model.head_dim
    # Layers with windows have a pool of their own, or all tokens in the one pool.
    kind = "latent attention" if latent else "full attention"
    report.pools = [_pool(report, kind, model.full_attention_layer_ids or every, row, 0)]
    if model.swa_attention_layer_ids:
        layers, window = model.swa_attention_layer_ids, model.sliding_window_size
        report.pools.append(_pool(report, "sliding windows", layers, row, window))
    try:
        # SGLang takes its own keys out.
        extra, *_ = HybridCacheController.parse_storage_backend_extra_config(
            server.hicache_storage_backend_extra_config
        )
        BackendSettings.of(extra)
        check_layout(server.hicache_mem_layout)
        for size in (each for pool in report.pools for each in pool.shard_bytes):
            check_size(size)
    except ConfigError as error:
        report.refuse(error)
        return
    report.prompts = [_prompt(report, tokens) for tokens in prompt_lengths(model.context_len)]


def _pool(report: Report, kind: str, layers: list[int], row: int, window_tokens: int) -> PoolReport:
    """Returns the report of a pool. `row`: numbers of one token in one layer of a shard."""
    token = row * getattr(torch, report.dtype).itemsize
    counts = []
    for stage in range(report.pipeline_parallel):
        start, end = get_pp_indices(process_model_config().num_hidden_layers, stage, report.pipeline_parallel)
        counts.append(sum(start <= layer < end for layer in layers))
    sizes = [count * token * report.page_tokens for count in counts]
    page = sum(sizes) * report.shards
    return PoolReport(kind, len(layers), window_tokens, sizes, page, page // report.page_tokens)


def _prompt(report: Report, tokens: int) -> PromptReport:
    """Returns what is stored of a prompt. Of windows, it is at most that: see docs/sglang.md."""
    pages, sizes = tokens // report.page_tokens, Counter[int]()
    for size in (each for pool in report.pools for each in pool.shard_bytes):
        sizes[size] += pages * report.shards
    return PromptReport.of(tokens, [pages] * len(report.pools), sizes, report.dram_bytes, report.nvme_bytes)


def as_json(report: Report) -> str:
    """Returns the report as one JSON object. Sizes are in bytes."""
    values = asdict(report)
    values["refusals"] = [{"reason": reason, "hint": hint} for reason, hint in report.refusals]
    return json.dumps({"served": report.served, **values})


def as_text(report: Report) -> str:
    """Returns the report for people."""
    parts = [
        table(
            [
                ["model", f"{report.model} ({report.architecture}, {report.dtype})"],
                ["shards", f"{report.tensor_parallel} tensor-parallel x {report.pipeline_parallel} pipeline"],
                ["result", "served" if report.served else "refused"],
            ],
            "ll",
        )
    ]
    if report.pools:
        parts.append(_pools(report))
    if report.prompts:
        parts.append(prompts_table(report.prompts, report.dram_bytes, report.nvme_bytes))
    settings = "\n".join(
        f"  {name} {value}" if " " not in value else f"  {name} '{value}'"
        for name, value in report.settings.items()
    )
    told = f"settings\n  --enable-hierarchical-cache\n{settings}"
    return "\n\n".join([*parts, told if report.served else refusals_text(report.refusals)])


def _pools(report: Report) -> str:
    head = ["pool", "layers", "window", "page tokens", "page", "page a shard", "pages a GiB", "a token"]
    rows = []
    for pool in report.pools:
        sizes = sorted(set(pool.shard_bytes))
        rows.append(
            [
                pool.kind,
                f"{pool.layers:,}",
                f"{pool.window_tokens:,}" if pool.window_tokens else "-",
                f"{report.page_tokens:,}",
                size_text(pool.page_bytes),
                " to ".join(size_text(size) for size in dict.fromkeys((sizes[0], sizes[-1]))),
                f"{(1 << 30) // pool.page_bytes:,}",
                size_text(pool.token_bytes),
            ]
        )
    return table([head, *rows], "lrrrrrrr")
