"""The connector class: one half runs in the scheduler, one beside each worker. No hook raises.

Engines that cannot be served are refused at start with a ConfigError. Later failures of a hook are counted,
logged at most once a minute, and are misses.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvstore import ExceptionBarrier, Layout, WeightsNaming
from kvstore.errors import ConfigError
from kvstore_vllm import identity
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.groups import Group, groups_of, in_parts
from kvstore_vllm.messages import Handshake, Progress, Step
from kvstore_vllm.metrics import Figures, PromMetrics
from kvstore_vllm.pages import check_covered, pages_of
from kvstore_vllm.scheduler import SchedulerHalf
from kvstore_vllm.settings import ConnectorSettings, check_engine, check_model, drops_last_block, why_off
from kvstore_vllm.weights import draft_of, weights_of
from kvstore_vllm.worker import IDLE_S, NULL_BLOCK, GroupMemory, WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvstore")


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads prefixes from a kvstore daemon and stores computed blocks. Options: `ConnectorSettings`.

    The class has 30 methods, because vLLM makes one class of both halves and calls each of its hooks.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config, settings)
        self._off = why_off(vllm_config, settings)
        self._asynchronous = settings.load == "async"
        self._guard = ExceptionBarrier(logger)
        self._failures_told: Counter[str] = Counter()
        self._moved = 0
        self._serial = 0
        self._met = False
        self._awaits_names = False
        self._unnamed = False
        # Strict: the halves count why the daemon has not answered.
        self._daemons = Daemons.at(settings.url, settings.deadline_s)
        page_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        drops = drops_last_block(vllm_config)
        self._groups = groups_of(kv_cache_config, settings.blocks_per_key(page_tokens), drops)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._memory: list[GroupMemory] = []
        self._naming: WeightsNaming | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                self._daemons,
                self._guard,
                self._groups,
                kv_cache_config.cache_hit_alignment_tokens or page_tokens,
                self._asynchronous,
                loads=self._kv_transfer_config.is_kv_consumer,
                saves=self._kv_transfer_config.is_kv_producer,
                whole_inputs=vllm_config.model_config.is_mm_prefix_lm,
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                lookup_deadline_s=settings.lookup_deadline_s,
                drops=drops,
            )
            if reason := settings.without_prefix_caching:
                logger.warning("serves although prefix caching may be off: %s", reason)
        else:
            self._weights = weights_of(vllm_config, settings.weights_revision)
            self._draft = draft_of(vllm_config, settings.weights_revision)
            self._naming = WeightsNaming([each for each in (self._weights, self._draft) if each])

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns None: any layout is served.

        Raises ConfigError for unserved models before KV is laid out.
        """
        check_model(vllm_config.model_config)
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: an unsaved block is a later miss and no reason to recompute a request."""
        return False

    # -- in the scheduler's process

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Takes the block layouts of the workers, once, before the first request.

        A MultiConnector gives each of its connectors the handshake of the first that has one.
        """
        with self._guard("handshake"):
            if told := [each for _, each in sorted(metadata.items()) if isinstance(each, Handshake)]:
                self._meet(told)

    def _meet(self, told: list[Handshake]) -> None:
        """Takes what the workers tell, of all of them at once: one may name its weights later than others."""
        off = next((each.off for each in told if each.off), self._off)
        self._met = bool(off) or all(each.layouts for each in told)
        self._awaits_names = not self._met
        if off:
            unnamed = any(each.unnamed for each in told)
            hint = "" if unnamed else " (see without_prefix_caching)"
            logger.warning("nothing is loaded or stored: %s%s", off, hint)
            self._half().turn_off(unnamed)
        elif self._met:
            # Workers with the same KV have the same layouts.
            self._half().meet([list(each) for each in dict.fromkeys(tuple(w.layouts) for w in told)])

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """See the base class. Raises ConfigError if vLLM's null block is not the workers' one."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if (null := kv_cache_manager.block_pool.null_block.block_id) != NULL_BLOCK:
            raise ConfigError(f"vLLM's null block is {null}, not {NULL_BLOCK}", "use vLLM 0.32")
        self._half().bind(kv_cache_manager)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns how many tokens to load after the computed ones, and whether the load is asynchronous."""
        with self._guard("get_num_new_matched_tokens"):
            tokens = self._half().matched(request, num_computed_tokens)
            return tokens, self._asynchronous and tokens > 0
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Records the pages that vLLM has allocated for the request."""
        with self._guard("update_state_after_alloc"):
            self._half().admit(request, blocks, num_external_tokens)
            return
        with self._guard("update_state_after_alloc"):
            self._half().admit_failed(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the transfers of the workers' next step. What fails of them is guarded within."""
        orders = self._half().step(scheduler_output)
        orders.met = self._met
        return orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes the reports of the workers about a step."""
        with self._guard("update_connector_output"):
            progress = connector_output.kv_connector_worker_meta
            if isinstance(progress, Progress) and progress.told and not self._met:
                self._meet([each for _, each in sorted(progress.told.items())])
            self._half().hear(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns that the pages of a request are not held, and the parameters for a decode engine.

        References keep the pages that are being saved.
        """
        with self._guard("request_finished"):
            return False, self._half().finish(request, block_ids)
        with self._guard("request_finished"):
            self._half().release(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Makes all stored blocks misses for this engine, for example after an update of weights in place."""
        with self._guard("reset_cache"):
            self._half().forget()
            # vLLM may unmap its memory before the next step reaches the workers.
            beside = get_kv_transfer_group() if has_kv_transfer_group() else None
            for each in (beside, *getattr(beside, "sub_connectors", ())):
                if isinstance(each, KVStoreConnector) and each._worker:
                    each._worker.stop()
            return True
        return False

    def has_pending_push_work(self) -> bool:
        """Returns whether the engine stays awake: until pages are free, and until its weights have a name."""
        with self._guard("has_pending_push_work"):
            return self._half().moving() or self._awaits_names
        return False

    def has_pending_block_frees(self) -> bool:
        """Returns whether the end of running saves frees pages, so that no request is preempted for them."""
        with self._guard("has_pending_block_frees"):
            return self._half().saving()
        return False

    # -- beside the model

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the KV memory of the engine. Raises ConfigError if a page is not one run of bytes."""
        check_covered(kv_caches, [group.layers for group in self._groups])
        memory = []
        for group in self._groups:
            caches = {name: kv_caches[name] for name in group.layers}
            pages = pages_of(caches, self._kv_cache_config.num_blocks)
            block_bytes = pages.block_bytes * group.pages_per_key
            memory.append(GroupMemory(pages, self._layout(group, caches, block_bytes)))
        self._memory, self._worker = memory, None
        # Layers may turn prefix caching off in this process only.
        self._off = why_off(self._vllm_config, self._settings)
        self._begin_service()

    def _begin_service(self) -> None:
        """Makes the worker half once the weights are named: until then no block can be loaded or stored.

        If they cannot be named, nothing is served.
        """
        if self._worker or self._unnamed or not self._memory:
            return
        if self._naming is None or not self._naming.wait(0):
            return
        try:
            self._worker = self._serving(self._naming.revision())
        except Exception as error:
            self._off, self._unnamed = str(error) or repr(error), True

    def _serving(self, revision: str) -> WorkerHalf:
        return WorkerHalf(
            self._daemons,
            self._guard,
            [replace(each, layout=replace(each.layout, revision=revision)) for each in self._memory],
            self._kv_cache_config.num_blocks,
            self._asynchronous,
            in_parts=in_parts(self._groups),
            saves=get_tp_group().rank_in_group % self._kv_cache_config.kv_tp_replicas == 0,
        )

    def _layout(self, group: Group, caches: dict[str, torch.Tensor], block_bytes: int) -> Layout:
        """Returns the layout of a group's blocks without the name of the weights."""
        config = self._vllm_config
        tp, pp = get_tp_group(), get_pp_group()
        same = self._kv_cache_config.kv_tp_replicas
        return Layout(
            model=identity.model_name(config.model_config, self._weights.by_content),
            block_bytes=block_bytes,
            dtype=f"{config.model_config.dtype}, cache {config.cache_config.cache_dtype}",
            block_tokens=group.block_tokens,
            shard=identity.shard_name(
                tp.rank_in_group // same, tp.world_size // same, pp.rank_in_group, pp.world_size
            ),
            kv_layout=identity.kv_layout(
                config,
                [each.kv_cache_spec for each in self._kv_cache_config.kv_cache_groups],
                group.number,
                caches,
                self._weights.by_content,
                identity.drafted(config, self._draft is not None and self._draft.by_content),
            ),
            kind="chain" if group.full else "independent",
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns the block layouts of this worker, or that there are none yet.

        vLLM calls it at the end of its start, which waits a little for the name of the weights.
        """
        if self._naming is not None:
            self._naming.wait_at_start()
        return self._told()

    def _told(self) -> Handshake | None:
        self._begin_service()
        layouts = self._worker.layouts if self._worker else []
        return Handshake(layouts, self._off, self._unnamed) if self._memory else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begins a step, with or without preemptions: cancels transfers from before a reset."""
        with self._guard("handle_preemptions"):
            if isinstance(kv_connector_metadata, Step):
                self._met = kv_connector_metadata.met
                self._begin_service()
                if self._worker:
                    self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Starts the loads of the step. Synchronous loads have ended on return."""
        with self._guard("start_load_kv"):
            orders = self._orders()
            self._serial = orders.serial
            if self._worker:
                self._worker.load(orders)
            return
        # vLLM waits for each load that it was promised.
        with self._guard("start_load_kv"):
            if self._worker:
                self._worker.fail_unstarted(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: synchronous loads end before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are saved whole after the output of the step is accepted."""

    def wait_for_save(self) -> None:
        """Starts the saves of earlier steps without waiting."""
        with self._guard("wait_for_save"):
            if self._worker:
                self._worker.save(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the requests with finished loads, and those of them that must start again."""
        with self._guard("get_transfer_results"):
            if self._worker:
                # Before the figures, which vLLM asks for next: after the last step nobody takes later ones.
                self._moved = self._worker.moved()
                loaded, failed = self._worker.ended()
                return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)
            if self._naming and self._orders().idle:
                self._naming.wait(IDLE_S)
        return KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the pages that failed to load and must be computed.

        Without a guard: if their list is lost, the engine must not go on with them.
        """
        return self._worker.bad_blocks() if self._worker else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns the progress of transfers, and the block layouts of this worker until they are known."""
        if not self._memory:
            return None
        progress = Progress(self._moved, self._serial)
        with self._guard("handshake"):
            if not self._met and (told := self._told()):
                progress.told[self._vllm_config.parallel_config.rank] = told
        return progress

    # -- in both

    def get_kv_connector_stats(self) -> Figures | None:
        """Returns the figures since the last call."""
        with self._guard("get_kv_connector_stats"):
            half = self._worker or self._scheduler
            data = half.counts() if half else {}
            failures = self._guard.failures - self._failures_told
            self._failures_told += failures
            data |= {f"hook_failures:{hook}": count for hook, count in failures.items()}
            return Figures(data) if data else None
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Figures:
        """Returns figures that another process sent."""
        return Figures(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Registers the connector's metrics in the process that serves `/metrics`."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends transfers, then connections."""
        with self._guard("shutdown"):
            if self._worker:
                self._worker.close()
            if self._scheduler:
                self._scheduler.close()
            self._daemons.close()

    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler's hook was called in a worker"
        return self._scheduler

    def _orders(self) -> Step:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Step)
        return orders


# A MultiConnector finds the class of counts from another process by its name alone.
KVConnectorFactory.register_connector("KVStoreConnector", "kvstore_vllm", "KVStoreConnector")
