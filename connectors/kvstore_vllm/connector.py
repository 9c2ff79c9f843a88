"""The class that vLLM loads: one half in the scheduler, one beside each worker, and no hook that raises.

What cannot be served is refused when the engine starts, with a ConfigError. After that a failure of any hook
is counted, logged once a minute at most, and is a miss.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvstore import Client, ExceptionBarrier, Layout
from kvstore.errors import ConfigError
from kvstore_vllm import identity
from kvstore_vllm.messages import Figures, Handshake, Progress, Step
from kvstore_vllm.pages import pages_of
from kvstore_vllm.scheduler import SchedulerHalf
from kvstore_vllm.settings import ConnectorSettings, check_engine, check_model, why_off
from kvstore_vllm.worker import NULL_BLOCK, WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvstore")


class KVStoreConnector(KVConnectorBase_V1):
    """Loads prefixes from a kvstore daemon and stores what was computed. See `settings.Settings`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config, settings)
        self._off = why_off(vllm_config, settings)
        self._asynchronous = settings.load == "async"
        self._may_sleep = vllm_config.model_config.enable_sleep_mode
        self._guard = ExceptionBarrier(logger)
        self._failures_told = 0
        self._client = Client(settings.url or None, deadline_s=settings.deadline_s)
        self._block_tokens = vllm_config.cache_config.block_size
        self._per_key = settings.blocks_per_key(self._block_tokens)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._revision = ""
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                self._client,
                self._guard,
                self._block_tokens,
                self._per_key,
                self._asynchronous,
                loads=self._kv_transfer_config.is_kv_consumer,
                saves=self._kv_transfer_config.is_kv_producer,
                whole_inputs=vllm_config.model_config.is_mm_prefix_lm,
            )
            if reason := settings.without_prefix_caching:
                logger.warning("serves although prefix caching may be off: %s", reason)
        else:
            self._revision = identity.weights_revision(vllm_config, settings.weights_revision)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """None: any layout is served. ConfigError for models that are not, before vLLM lays out their KV."""
        check_model(vllm_config.model_config)
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that was not saved is a miss some day, no reason to compute a request twice."""
        return False

    # -- in the scheduler's process

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers tell what their blocks look like, once, before the first request."""
        with self._guard("handshake"):
            told = [each for _, each in sorted(metadata.items()) if isinstance(each, Handshake)]
            if off := next((each.off for each in told if each.off), self._off):
                logger.warning("nothing is loaded or stored: %s (see without_prefix_caching)", off)
            else:
                self._half().meet([each.layout for each in told])

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """See the base class. ConfigError if vLLM has another null block than workers know."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if (null := kv_cache_manager.block_pool.null_block.block_id) != NULL_BLOCK:
            raise ConfigError(f"vLLM's null block is {null}, not {NULL_BLOCK}", "use vLLM 0.32")
        self._half().kv_cache_manager = kv_cache_manager

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the computed ones, and whether other requests run meanwhile."""
        with self._guard("get_num_new_matched_tokens"):
            tokens = self._half().matched(request, num_computed_tokens)
            return tokens, self._asynchronous and tokens > 0
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has its engine blocks."""
        with self._guard("update_state_after_alloc"):
            self._half().admit(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The orders for the workers' next step."""
        return self._half().step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers report of a step."""
        with self._guard("update_connector_output"):
            self._half().hear(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the engine blocks of a request that has ended stay until its saves are over."""
        with self._guard("request_finished"):
            return self._half().finish(request, block_ids), None
        self._half().release(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Makes all that was stored a miss for this engine, as an update of its weights in place must."""
        with self._guard("reset_cache"):
            self._half().forget()
            # vLLM may unmap its memory before the next step, which would tell workers elsewhere.
            beside = get_kv_transfer_group() if has_kv_transfer_group() else None
            if isinstance(beside, KVStoreConnector) and beside._worker:
                beside._worker.stop()
            return True
        return False

    def has_pending_push_work(self) -> bool:
        """Keeps an engine that may unmap its memory from falling asleep while blocks are moved."""
        return self._may_sleep and self._half().moving()

    # -- beside the model

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV memory is there. ConfigError if its blocks are not runs of bytes."""
        pages = pages_of(kv_caches, self._kv_cache_config.num_blocks)
        config = self._vllm_config
        tp, pp = get_tp_group(), get_pp_group()
        layout = Layout(
            model=config.model_config.model,
            block_bytes=pages.block_bytes * self._per_key,
            revision=self._revision,
            dtype=f"{config.model_config.dtype}, cache {config.cache_config.cache_dtype}",
            block_tokens=self._block_tokens * self._per_key,
            shard=f"tp {tp.rank_in_group}/{tp.world_size}, pp {pp.rank_in_group}/{pp.world_size}",
            kv_layout=identity.kv_layout(
                config, self._kv_cache_config.kv_cache_groups[0].kv_cache_spec, kv_caches
            ),
        )
        # Layers may have turned it off while they were made, and tell this process alone.
        self._off = why_off(config, self._settings)
        self._worker = WorkerHalf(
            self._client, self._guard, pages, layout, self._asynchronous, self._kv_cache_config.num_blocks
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this worker's blocks look like."""
        return Handshake(self._worker.layout, self._off) if self._worker else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before anything of the step is written."""
        with self._guard("handle_preemptions"):
            if self._worker and isinstance(kv_connector_metadata, Step):
                self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Starts the step's loads; returns when they are over if they are synchronous."""
        with self._guard("start_load_kv"):
            if self._worker:
                self._worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: synchronous loads are over before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing yet: blocks are saved whole, after the step's output was accepted."""

    def wait_for_save(self) -> None:
        """Starts the saves of what earlier steps computed, and waits for none."""
        with self._guard("wait_for_save"):
            if self._worker:
                self._worker.save(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose saves are over, requests whose loads are over)."""
        with self._guard("get_finished"):
            if self._worker:
                return self._worker.ended()
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Engine blocks that have to be computed after all."""
        return self._worker.bad_blocks() if self._worker else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """How far transfers are, where the scheduler waits for them."""
        return Progress(self._worker.moved()) if self._worker and self._may_sleep else None

    # -- in both

    def get_kv_connector_stats(self) -> Figures | None:
        """Counts since the last call."""
        with self._guard("get_kv_connector_stats"):
            counts = self._worker.counts() if self._worker else Counter[str]()
            failures = self._guard.failures.total()
            if failures > self._failures_told:
                counts["hook failures"] = failures - self._failures_told
                self._failures_told = failures
            return Figures(dict(+counts)) if counts else None
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Figures:
        """Counts as another process sent them."""
        return Figures(data or {})

    def shutdown(self) -> None:
        """Ends transfers, then connections."""
        with self._guard("shutdown"):
            if self._worker:
                self._worker.close()
            self._client.close()

    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler's hook was called in a worker"
        return self._scheduler

    def _orders(self) -> Step:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Step)
        return orders
