"""Derives the KV groups of an engine without weights, devices or other processes.

The layers of a model decide which KV they keep, so the model is built, on torch's `meta` device: its tensors
have shapes and no memory. vLLM's own engine core then derives groups, block sizes and pages from them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, get_shared_kv_cache_layers
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes
from vllm.v1.worker.worker_base import WorkerBase

_KV_BYTES = 1 << 50
"""The memory for KV that each worker reports: more than the longest prompt needs. The groups are the same."""
_PAGES = 2
"""Pages of the caches that are allocated: the fewest that have a stride."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One worker of a pipeline stage; those of the other tensor-parallel ranks are alike.

    `caches`: the memory of each layer, with `pages` pages. `page_bytes`: the memory of one engine block.
    """

    kv_cache_config: KVCacheConfig
    caches: dict[str, torch.Tensor]
    pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class DryEngine:
    """What an engine of this configuration decides at its start. `config`: as vLLM has updated it."""

    config: VllmConfig
    kv_cache_config: KVCacheConfig
    stages: list[Stage]


def derive(config: VllmConfig) -> DryEngine:
    """Returns what an engine of this configuration would decide. Changes `config` as an engine does.

    No other engine may be in this process. Takes as long as vLLM needs to make the modules of the model.
    Raises what vLLM raises.
    """
    configs = [copy.deepcopy(config) for _ in range(config.parallel_config.pipeline_parallel_size - 1)]
    configs.insert(0, config)
    executor = _DryExecutor(configs, [_build(each, number) for number, each in enumerate(configs)])
    core = SimpleNamespace(model_executor=executor, collective_rpc=lambda *_, **__: None)
    merged = EngineCore._initialize_kv_caches(core, config)
    stages = [_stage(*each) for each in zip(configs, executor.kv_cache_configs, strict=True)]
    return DryEngine(config, merged, stages)


class _DryExecutor:
    """Answers the engine core for the workers of all stages."""

    def __init__(self, configs: list[VllmConfig], specs: list[dict[str, Any]]) -> None:
        self._configs = configs
        self._specs = specs
        self.kv_cache_configs: list[KVCacheConfig] = []

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return self._specs

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        workers = [SimpleNamespace(vllm_config=each) for each in self._configs]
        return [WorkerBase.get_supported_kv_cache_layouts(worker) for worker in workers]

    def set_kv_cache_layout(self, name: str) -> None:
        for each in self._configs:
            each.cache_config.kv_cache_layout = name

    def determine_available_memory(self) -> list[int]:
        return [_KV_BYTES] * len(self._configs)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self.kv_cache_configs = kv_cache_configs

    def compile_or_warm_up_model(self) -> None:
        """Does nothing."""


def _build(config: VllmConfig, stage: int) -> dict[str, Any]:
    """Builds the layers of a pipeline stage on rank 0 of tensor parallelism, and returns their KV by layer.

    `config` then holds the layers.
    """
    with set_current_vllm_config(config), _in_group(config.parallel_config, stage):
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
        return dict(get_kv_cache_spec(config))


@contextmanager
def _in_group(parallel: Any, stage: int) -> Iterator[None]:
    """Makes this process a worker of a pipeline stage, in groups whose other members do not exist."""
    world = parallel.world_size_across_dp
    rank = stage * parallel.prefill_context_parallel_size * parallel.tensor_parallel_size
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        everybody = _LonelyGroup([list(range(world))], 0, "fake", group_name="world")
        with (
            mock.patch.object(parallel_state, "GroupCoordinator", _LonelyGroup),
            mock.patch.object(parallel_state, "_WORLD", everybody),
            mock.patch.object(parallel_state, "_NODE_COUNT", 1),
        ):
            parallel_state.initialize_model_parallel(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
                "fake",
            )
            try:
                yield
            finally:
                parallel_state.destroy_model_parallel()
    finally:
        torch.distributed.destroy_process_group()


class _LonelyGroup(parallel_state.GroupCoordinator):
    """A group that knows its size and the rank of this process, and moves no bytes."""

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: Any,
        *_: Any,
        **more: Any,
    ) -> None:
        self.unique_name = parallel_state._get_unique_name(more.get("group_name") or "anonymous")
        parallel_state._register_group(self)
        self.rank = torch.distributed.get_rank()
        self.local_rank = self.device_index = local_rank
        self.group_ranks = group_ranks
        [self.ranks] = [ranks for ranks in group_ranks if self.rank in ranks]
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(self.rank)
        self.torch_distributed_backend = torch_distributed_backend
        self.device_group = torch.distributed.new_group(self.ranks, backend=torch_distributed_backend)
        self.cpu_group = self.device_group
        self.device = torch.device("meta")
        self.device_communicator = self.mq_broadcaster = None
        self.use_device_communicator = self.use_custom_op_call = self.use_cpu_custom_send_recv = False

    def destroy(self) -> None:
        """See the base class. The default process group ends with all others."""


def _stage(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Stage:
    """Returns a stage with caches in host memory, of as many pages as their strides need."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return Stage(kv_cache_config, {}, _PAGES, 0)
    page_bytes = kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks
    small = get_kv_cache_config_from_groups(config, groups, _PAGES * page_bytes)
    caches = allocate_kv_cache(
        small,
        torch.device("cpu"),
        config.cache_config.get_resolved_kv_cache_layout(),
        prepare_kernel_block_sizes(small, _attention_groups(config, groups)),
    )
    for layer, target in get_shared_kv_cache_layers(config).items():
        caches[layer] = caches[target]
    return Stage(kv_cache_config, caches, small.num_blocks, page_bytes)


def _attention_groups(config: VllmConfig, groups: list[Any]) -> list[list[AttentionGroup]]:
    """Returns the attention backends of all layers, by group."""
    layers, made = config.compilation_config.static_forward_context, []
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        made.append(
            [
                AttentionGroup(layers[name].get_attn_backend(), [name], each.get(name, spec), number)
                for name in group.layer_names
            ]
        )
    return made
