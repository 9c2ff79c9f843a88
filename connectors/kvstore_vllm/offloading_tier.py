"""A tier below the CPU tier of vLLM's own OffloadingConnector, which vLLM loads by module path.

"secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore_vllm.offloading_tier"}]

vLLM copies pages between the accelerator and rows of its CPU tier; this tier copies rows to the daemon
(stores) and back (loads, which vLLM calls promotions). A row has the pages of all layers and workers at one
position. Every failure is a miss: a load that failed is reported as such, and vLLM computes its tokens.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore import Client, ExceptionBarrier, Layout, Namespace
from kvstore.errors import ConfigError, MisuseError
from kvstore_vllm import identity
from kvstore_vllm.settings import TierSettings, check_tiered_engine
from kvstore_vllm.weights import Weights, weights_of

logger = logging.getLogger("vllm.kvstore")

_LOADERS = 4
"""Concurrent loads. A load from NVMe mostly waits."""
_BATCH = 64
"""The most rows of one lease or reservation."""
_PATIENCE = 3
"""How long a request may wait for the answer to a lookup, in deadlines."""


class KVStoreTier(SecondaryTierManager):
    """Stores rows of vLLM's CPU tier in a kvstore daemon, and loads them again. Options: `TierSettings`.

    vLLM calls it in the process of its scheduler, between steps. No call waits for the daemon but
    `drain_jobs` and `shutdown`, and none raises.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.of(options)
        config, kv_cache_config = _engine()
        check_tiered_engine(config, kv_cache_config)
        # In the foreground: the scheduler of vLLM's tiers asks for rows from the first request on.
        revision = weights_of(config, settings.weights_revision).revision()
        self._layouts = layouts_of(config, kv_cache_config, offloading_spec, self.block_size_bytes, revision)
        self._deadline_s = settings.deadline_s
        self._guard = ExceptionBarrier(logger)
        self._client = Client(settings.url or None, deadline_s=settings.deadline_s)
        self._epoch = ""
        self._lookups = _Lookups(tier_type, self._stored)
        self._savers = ThreadPoolExecutor(1, "kvstore-save")
        self._loaders = ThreadPoolExecutor(_LOADERS, "kvstore-load")
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._ended: list[_Ended] = []

    # -- called by vLLM between steps

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Notes the epoch of a request. Its rows are stored as soon as they are computed."""
        with self._guard("on_new_request"):
            req_context.set_state(_Request(self._epoch))
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Returns whether a row is stored; RETRY until a thread has asked the daemon."""
        with self._guard("lookup"):
            request = self._request(req_context)
            if request is not None and (found := self._lookups.lookup(key, req_context)) is not None:
                return LookupResult.HIT if found else LookupResult.MISS
            if request is not None and request.may_wait(_PATIENCE * self._deadline_s):
                return LookupResult.RETRY
        return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Stores rows in the background."""
        self._submit(self._savers, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Loads rows in the background."""
        self._submit(self._loaders, self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended since the last call. Rows that failed to load are misses now."""
        with self._changed:
            ended, self._ended = self._ended, []
        for each in ended:
            with self._guard("get_finished_jobs"):
                if each.job.is_promotion:
                    self._lookups.mark_miss(set(each.job.keys).difference(each.good))
        return [each.result(self.block_size_bytes) for each in ended]

    def on_schedule_end(self, context: Any) -> None:
        """Asks the daemon for the keys of the step: one question for each request."""
        with self._guard("on_schedule_end"):
            self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """Forgets the lookups of a request."""
        with self._guard("on_request_finished"):
            self._lookups.cleanup(req_context.req_id)

    def drain_jobs(self) -> None:
        """Waits until all jobs have ended. Earlier rows are misses for this engine from now on.

        vLLM calls this only to reset its cache, for example after an update of the weights in place.
        """
        with self._guard("drain_jobs"), self._changed:
            self._changed.wait_for(lambda: not self._running)
        self._epoch = uuid.uuid4().hex

    def shutdown(self) -> None:
        """Ends all jobs, then the connections."""
        with self._guard("shutdown"):
            for threads in (self._savers, self._loaders):
                threads.shutdown(cancel_futures=True)
            self._lookups.shutdown()
            self._client.close()

    # -- within

    def _request(self, req_context: Any) -> _Request | None:
        """Returns what is known of a request; None if it began before the last reset of the cache."""
        request: _Request | None = req_context.get_state(_Request)
        return request if request is not None and request.epoch == self._epoch else None

    def _submit(self, threads: ThreadPoolExecutor, do: Callable[[_Ended, float], None], job: Any) -> None:
        """Runs a job in a thread. It fails if it has not ended in time, or began before a reset."""
        ended, ends = _Ended(job), time.monotonic() + self._deadline_s
        with self._changed:
            self._running.add(job.job_id)
        with self._guard("submit"):
            if self._request(job.req_context) is not None:
                threads.submit(self._run, do, ended, ends)
                return
        self._end(ended)

    def _run(self, do: Callable[[_Ended, float], None], ended: _Ended, ends: float) -> None:
        try:
            with self._guard("load" if ended.job.is_promotion else "store"):
                do(ended, ends)
        finally:
            self._end(ended)

    def _end(self, ended: _Ended) -> None:
        ended.seconds = time.monotonic() - ended.began_s
        with self._changed:
            self._running.discard(ended.job.job_id)
            self._ended.append(ended)
            self._changed.notify_all()

    def _stored(self, keys: list[Any]) -> list[bool]:
        """Asks the daemon which rows are stored, in one round trip."""
        found = [False] * len(keys)
        with self._guard("lookup"):
            by_group = _by_group(range(len(keys)), keys.__getitem__)
            questions = [
                (self._namespace(group), [get_offload_block_hash(keys[i]) for i in indices])
                for group, indices in by_group.items()
            ]
            masks = self._client.contains(questions, self._deadline_s)
            for indices, mask in zip(by_group.values(), masks, strict=True):
                for i, stored in zip(indices, mask.tolist(), strict=True):
                    found[i] = stored
        return found

    def _namespace(self, group: int) -> Namespace:
        return self._client.namespace(identity.in_epoch(self._layouts[group], self._epoch))

    def _store(self, ended: _Ended, ends: float) -> None:
        for namespace, rows in self._batches(ended.job):
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return
            with namespace.reserve([key for _, key, _ in rows], deadline_s=left_s) as reservation:
                for slot, at in enumerate(reservation.wanted):
                    reservation.gather(slot, [self._row(rows[at][2])])
                result = reservation.commit()
            if not result.denied:
                ended.good += [whole for whole, _, _ in rows]

    def _load(self, ended: _Ended, ends: float) -> None:
        lost: set[int] = set()
        for namespace, rows in self._batches(ended.job):
            left_s = ends - time.monotonic()
            group = get_offload_group_idx(rows[0][0])
            if left_s <= 0 or group in lost:
                continue  # what follows a lost row is mostly of no use
            with namespace.acquire([key for _, key, _ in rows], left_s, prompt=0) as lease:
                good = lease.scatter_all([[self._row(chunk)] for _, _, chunk in rows[: len(lease)]])
            ended.good += [whole for whole, _, _ in rows[:good]]
            if good < len(rows):
                lost.add(group)

    def _batches(self, job: TransferJob) -> Iterable[tuple[Namespace, list[tuple[Any, bytes, int]]]]:
        """Yields the rows of a job, a group at a time: vLLM's key, its block hash and the row's number."""
        rows = [
            (key, get_offload_block_hash(key), chunk)
            for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True)
        ]
        for group, mine in _by_group(rows, lambda row: row[0]).items():
            for at in range(0, len(mine), _BATCH):
                yield self._namespace(group), mine[at : at + _BATCH]

    def _row(self, chunk: int) -> memoryview:
        row: memoryview = self._primary_kv_view[chunk : chunk + 1]
        return row


@dataclass(slots=True)
class _Request:
    """A request since its first sight. `asked_s`: when it was first told to wait for a lookup; 0.0: never."""

    epoch: str
    asked_s: float = 0.0

    def may_wait(self, seconds: float) -> bool:
        """Returns whether it may wait longer. vLLM asks as long as it is told to."""
        self.asked_s = self.asked_s or time.monotonic()
        return time.monotonic() < self.asked_s + seconds


@dataclass(slots=True)
class _Ended:
    """A job and what became of it. `good`: the keys of stored or loaded rows."""

    job: TransferJob
    began_s: float = field(default_factory=time.monotonic)
    good: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    def result(self, row_bytes: int) -> JobResult:
        """Returns the result for vLLM."""
        whole = len(self.good) == len(self.job.keys)
        partly = self.job.is_promotion and self.good and not whole
        return JobResult(
            self.job.job_id,
            whole,
            successful_keys=tuple(self.good) if partly else None,
            transfer_time=self.seconds,
            transfer_bytes=len(self.good) * row_bytes,
        )


class _Lookups(AsyncLookupManager):
    """vLLM's thread for lookups: one question for the keys of a request in a step."""

    def __init__(self, tier_type: str, stored: Callable[[list[Any]], list[bool]]) -> None:
        self._stored = stored
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """See the base class."""
        return self._stored(keys)


def _by_group(items: Iterable[Any], key_of: Callable[[Any], Any]) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = {}
    for item in items:
        groups.setdefault(get_offload_group_idx(key_of(item)), []).append(item)
    return groups


def _engine() -> tuple[Any, Any]:
    """Returns the configurations of the engine and of its KV cache.

    vLLM hands neither to a tier, but without them nothing names the bytes of a row. Both are arguments of the
    constructor that creates the tiers. Raises ConfigError if something else creates this one.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is OffloadingConnectorScheduler.__init__.__code__:
            return frame.f_locals["vllm_config"], frame.f_locals["kv_cache_config"]
        frame = frame.f_back
    raise ConfigError("the tier is not created by OffloadingConnector's scheduler half", "use vLLM 0.32")


_KERNEL_PACKAGES = {"aiter", "flash-attn", "flash-attn-3", "flash-mla", "flashinfer-python", "triton"}


def layouts_of(
    config: Any, kv_cache_config: Any, spec: Any, row_bytes: int, revision: str
) -> dict[int, Layout]:
    """Returns the layout of the rows of each group. Raises ConfigError for too large rows.

    Layers may be in other processes. So what selects their kernels is part of it, beside their names.
    """
    offloading, model, by_content = spec.config, config.model_config, Weights.is_by_content(revision)
    layers = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    kernels, scales = identity.backends(config, layers)
    packages = [(name, _version(name)) for name in sorted(_KERNEL_PACKAGES)]
    facts = (
        identity.configured(config, by_content),
        identity.environment(),
        repr([(each.layer_names, each.kv_cache_spec) for each in kv_cache_config.kv_cache_groups]),
        repr((offloading.groups, offloading.cache, offloading.worker_kv_bytes_per_block)),
        (offloading.kv_cache_layout, offloading.canonical_layout, offloading.replicated_layout),
        (packages, scales),
    )
    digest = blake3(repr(facts).encode()).hexdigest(16)
    parallel, chunk = offloading.parallel, offloading.cache.blocks_per_chunk
    made = {}
    for group in offloading.groups:
        kind = type(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec).__name__
        number = f"group {group.group_id} of {len(kv_cache_config.kv_cache_groups)}, {kind}"
        try:
            made[group.group_id] = Layout(
                model=identity.model_name(model, by_content),
                block_bytes=row_bytes,
                revision=revision,
                dtype=f"{model.dtype}, cache {config.cache_config.cache_dtype}",
                block_tokens=group.tokens_per_block * chunk,
                shard=f"all of tp {parallel.tp_size}, pp {parallel.pp_size}",
                kv_layout=f"vllm {vllm.__version__} CPU tier; {number}; {', '.join(kernels)}; "
                f"{_machine()}; {digest}",
                kind="independent",
            )
        except MisuseError as error:
            raise ConfigError(
                f"a row of vLLM's CPU tier has {row_bytes} bytes: {error.message}",
                "use a smaller block_size in kv_connector_extra_config",
            ) from error
    return made


def _machine() -> str:
    """Returns the instruction set of the kernels, without a context on the accelerator."""
    if current_platform.is_cpu():
        amx = torch.cpu._is_amx_tile_supported()
        return f"{torch.backends.cpu.get_cpu_capability()}{' with AMX' if amx else ''}"
    capability = current_platform.get_device_capability()
    return f"{current_platform.get_device_name()}, capability {capability}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
