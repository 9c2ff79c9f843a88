"""Finds out before the start of an engine what the connector does with its model, by its own functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvstore import Layout
from kvstore.errors import ConfigError, KVStoreError, MisuseError
from kvstore.model_check import PromptReport, prompt_lengths
from kvstore_vllm.dry_engine import DryEngine, Stage, derive
from kvstore_vllm.groups import Group, groups_of, stored_blocks
from kvstore_vllm.identity import configured
from kvstore_vllm.pages import check_covered, pages_of
from kvstore_vllm.settings import ConnectorSettings, drops_last_block, refusals, refusals_of_model, why_off

CONNECTOR = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "kvstore_vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""The value of --kv-transfer-config for engines that are given none."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group of layers.

    `window_tokens`: the tokens of its sliding window or attention chunk; 0: it has none. `shard_bytes`: the
    bytes of a stored block by pipeline stage, of one tensor-parallel rank. `block_bytes`: those of all
    shards. `token_bytes`: those of one token in a block; 0 for states.
    """

    kind: str
    layers: int
    window_tokens: int
    block_tokens: int
    shard_bytes: list[int]
    block_bytes: int
    token_bytes: int


@dataclass(slots=True)
class Report:
    """What the connector does with a model.

    `shards`: the number of tensor-parallel workers with KV of their own. `engine_blocks`: the blocks that
    vLLM has per GiB of a worker's KV memory. `refusals`: reasons with hints.
    """

    model: str
    architecture: str
    dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    dram_bytes: int
    nvme_bytes: int
    connector: dict[str, Any]
    shards: int = 0
    alignment_tokens: int = 0
    engine_blocks: int = 0
    groups: list[GroupReport] = field(default_factory=list)
    prompts: list[PromptReport] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)

    @property
    def served(self) -> bool:
        """Whether an engine with this configuration loads and stores blocks."""
        return not self.refusals

    def refuse(self, error: KVStoreError) -> None:
        """Adds a reason, once."""
        if (reason := (error.message, error.hint)) not in self.refusals:
            self.refusals.append(reason)


def configuration(model: str, arguments: list[str]) -> VllmConfig:
    """Returns vLLM's configuration of an engine with these arguments and the connector.

    Raises MisuseError for what vLLM refuses. Ends the process with 2 for arguments that vLLM does not know.
    """
    if not current_platform.device_type:
        raise MisuseError(
            "vLLM finds no device on this machine that this build of it supports",
            "run the check on the engine's machine: block sizes depend on its device",
        )
    _check_folder(model)
    parser = FlexibleArgumentParser(prog="python -m kvstore_vllm check MODEL", add_help=False)
    parsed = AsyncEngineArgs.add_cli_args(parser).parse_args(arguments)
    parsed.model = model
    try:
        engine = AsyncEngineArgs.from_cli_args(parsed)
    except Exception as error:
        raise _not_there(model) if not Path(model).exists() else _refused_by_vllm(error) from error
    engine.load_format = "dummy"
    # The memory does not matter, nor how many of the engine's devices are on this machine.
    engine.num_gpu_blocks_override = None
    engine.distributed_executor_backend = engine.distributed_executor_backend or "mp"
    engine.kv_transfer_config = engine.kv_transfer_config or KVTransferConfig(**CONNECTOR)
    if (name := engine.kv_transfer_config.kv_connector) != CONNECTOR["kv_connector"]:
        raise MisuseError(
            f"--kv-transfer-config has the connector {name}",
            f"leave it out, or give {CONNECTOR['kv_connector']} of {CONNECTOR['kv_connector_module_path']}",
        )
    try:
        return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        raise _refused_by_vllm(error) from error


def _check_folder(model: str) -> None:
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).exists() for name in ("config.json", "params.json")):
        raise MisuseError(f"the folder {model} has no config.json", "give the folder of a model")


def _not_there(model: str) -> MisuseError:
    return MisuseError(
        f"there is no model {model!r}: no such folder, and not in the hub's cache on this machine",
        "give a folder with a config.json; HF_HUB_OFFLINE=0 lets vLLM ask the hub",
    )


def _refused_by_vllm(error: Exception) -> MisuseError:
    return MisuseError(
        f"vLLM refuses this model or its arguments: {type(error).__name__}: {error}",
        "an engine would not start either: change what the message names",
    )


def check(config: VllmConfig, dram_bytes: int, nvme_bytes: int) -> Report:
    """Returns what the connector does with an engine of this configuration, which this changes.

    Raises MisuseError if vLLM cannot build the model.
    """
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    report = Report(
        model=config.model_config.model,
        architecture=config.model_config.architecture,
        dtype=f"{config.model_config.dtype}".removeprefix("torch."),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        dram_bytes=dram_bytes,
        nvme_bytes=nvme_bytes,
        connector={name: getattr(transfer, name) for name in (*CONNECTOR, "kv_connector_extra_config")},
    )
    for refusal in refusals_of_model(config.model_config):
        report.refuse(refusal)
    if report.refusals:
        return report  # vLLM does not lay out the KV of these
    try:
        engine = derive(config)
    except Exception as error:
        raise _refused_by_vllm(error) from error
    _examine(report, engine)
    return report


def _examine(report: Report, engine: DryEngine) -> None:
    """Fills in what depends on the groups of layers."""
    config, kv_cache_config = engine.config, engine.kv_cache_config
    settings = ConnectorSettings()
    try:
        settings = ConnectorSettings.of(config.kv_transfer_config.kv_connector_extra_config)
        configured(config)
    except ConfigError as error:
        report.refuse(error)
    for each in (kv_cache_config, *(stage.kv_cache_config for stage in engine.stages)):
        for refusal in refusals(config, each, settings):
            report.refuse(refusal)
    if off := why_off(config, settings):
        hint = "start vLLM with --enable-prefix-caching, or say why not in without_prefix_caching"
        report.refuse(ConfigError(f"nothing is loaded or stored: {off}", hint))
    if not kv_cache_config.kv_cache_groups:
        return
    pages_per_key = 1
    try:
        pages_per_key = settings.blocks_per_key(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    except ConfigError as error:
        report.refuse(error)
    groups = groups_of(kv_cache_config, pages_per_key, drops_last_block(config))
    # Workers with the same KV store it once.
    report.shards = report.tensor_parallel // kv_cache_config.kv_tp_replicas
    shards = [_shard_bytes(report, stage, groups) for stage in engine.stages]
    report.alignment_tokens = kv_cache_config.cache_hit_alignment_tokens or groups[0].page_tokens
    report.engine_blocks = (1 << 30) // max(stage.page_bytes for stage in engine.stages)
    layers = [[len(g.layer_names) for g in s.kv_cache_config.kv_cache_groups] for s in engine.stages]
    for group, spec in zip(groups, (g.kv_cache_spec for g in kv_cache_config.kv_cache_groups), strict=True):
        of_stages = [shard[group.number] for shard in shards]
        block_bytes = sum(of_stages) * report.shards
        report.groups.append(
            GroupReport(
                _kind(group, spec),
                sum(stage[group.number] for stage in layers),
                getattr(spec, "sliding_window", None) or group.chunk_tokens,
                group.block_tokens,
                of_stages,
                block_bytes,
                0 if group.state else block_bytes // group.block_tokens,
            )
        )
    if report.served:
        lengths = prompt_lengths(config.model_config.max_model_len)
        report.prompts = [_prompt(report, groups, shards, tokens) for tokens in lengths]


def _shard_bytes(report: Report, stage: Stage, groups: list[Group]) -> list[int]:
    """Returns the bytes of a worker's stored blocks by group, as the connector measures them; 0: refused."""
    sizes = []
    named = [tuple(each.layer_names) for each in stage.kv_cache_config.kv_cache_groups]
    try:
        check_covered(stage.caches, named)
    except ConfigError as error:
        report.refuse(error)
    for group, layers in zip(groups, named, strict=True):
        try:
            pages = pages_of({name: stage.caches[name] for name in layers}, stage.pages)
            layout = Layout(report.model, pages.block_bytes * group.pages_per_key)
            sizes.append(layout.block_bytes)
        except KVStoreError as error:
            report.refuse(error)
            sizes.append(0)
    return sizes


def _kind(group: Group, spec: Any) -> str:
    if group.state:
        return "recurrent state"
    if group.window_blocks:
        return "sliding window"
    if group.chunk_tokens:
        return "attention chunk"
    kinds = {FullAttentionSpec: "full attention", MLAAttentionSpec: "latent attention"}
    return kinds.get(type(spec), type(spec).__name__)


def _prompt(report: Report, groups: list[Group], shards: list[list[int]], tokens: int) -> PromptReport:
    blocks: Counter[int] = Counter()
    counts = stored_blocks(groups, tokens, report.alignment_tokens)
    for shard in shards:
        for block_bytes, count in zip(shard, counts, strict=True):
            blocks[block_bytes] += count * report.shards
    return PromptReport.of(tokens, counts, blocks, report.dram_bytes, report.nvme_bytes)
