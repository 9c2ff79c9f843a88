"""The worker half, on each rank: it copies staged blocks into pages, and pages to host memory.

Loads are enqueued on the stream before the forward pass, saves behind it, whole pages at a time. The hooks of
layers do nothing, so CUDA graphs, which do not call them, change nothing. A thread stores what is copied out.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorWorker

from kvstore import Client, ExceptionBarrier, Namespace
from kvstore.errors import ConfigError
from kvstore_trtllm.identity import Identity
from kvstore_trtllm.messages import Save, Step
from kvstore_trtllm.options import MIB, ConnectorOptions
from kvstore_trtllm.pages import Mark, Pages, Shape
from kvstore_trtllm.ranks import Ranks, meet
from kvstore_trtllm.rest import Rest
from kvstore_trtllm.settings import check_engine
from kvstore_trtllm.weights import logger

_STORE_DEADLINES = 10
"""The time for a store, in deadlines of a load."""


class KVStoreWorker(KvCacheConnectorWorker):
    """The worker half. The constructor and the registration of the pool raise ConfigError.

    It needs no daemon. `failures` counts internal failures by hook, `dropped_blocks` blocks that were not
    stored because host memory was full, or the daemon hung.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        options = ConnectorOptions.of(llm_args)
        self._model = check_engine(llm_args)
        self._args = llm_args
        self._staging_bytes = options.staging_mib * MIB
        self._identity = Identity.of(llm_args, self._model, options)
        # The engine does not wait for stores.
        deadline_s = options.deadline_s * _STORE_DEADLINES
        self._client = Client(options.url or None, options.token or None, deadline_s)
        self._rest = Rest()
        self._guard = ExceptionBarrier(logger)
        self.failures = self._guard.failures
        self.dropped_blocks = 0
        self._pages: Pages | None = None
        self._ranks: Ranks | None = None
        self._staged = torch.empty(0)
        self._outgoing = torch.empty(0)
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._step: Step | None = None
        self._loading: list[tuple[int, Mark]] = []
        self._number = 0
        self._namespace: tuple[str, Namespace] | None = None
        # One thread: parents before children.
        self._saver = ThreadPoolExecutor(1, "kvstore-save")

    # -- set-up, while the engine starts

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Takes the pool. Returns when all ranks have theirs. Raises ConfigError if one is not served."""
        meet(self._args, lambda: self._take(kv_cache_tensor), self._staging_bytes, self._prepare)

    def _take(self, pool: Any) -> Shape:
        if self._pages is not None:
            raise ConfigError(
                f"the KV pool is registered a second time, with the shape {tuple(pool.shape)}",
                "an engine has one connector for itself",
            )
        tokens = int(self._args.kv_cache_config.tokens_per_block)
        self._pages = Pages(pool, self._model, tokens, self._args.tensor_parallel_size)
        return self._pages.shape

    def _prepare(self, ranks: Ranks) -> None:
        assert self._pages is not None
        rows = ranks.staging.place.rows
        self._staged = ranks.staging.tensor(ranks.rank, self._pages.is_cuda)
        self._outgoing = self._pages.host_memory(rows)
        self._free = list(range(rows))
        self._ranks = ranks

    # -- hooks, in the order of a step

    def start_load_kv(self, stream: Any) -> None:
        """Enqueues the loads of the step. An error in it stops the engine: its blocks are promised."""
        step = self.get_connector_meta()
        # TensorRT-LLM leaves the last step in place if it makes no new one.
        self._step = step if isinstance(step, Step) and step.number > self._number else None
        if self._step is None:
            return
        self._number = self._step.number
        if self._step.loads:
            assert self._pages is not None
            rows = [self._staged[load.row] for load in self._step.loads]
            mark = self._pages.load(rows, [load.block_id for load in self._step.loads], stream)
            self._loading.append((self._number, mark))
        with self._guard("start_load_kv"):
            self._note_loaded()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: the stream loads all layers before its forward pass."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: `wait_for_save` copies whole pages."""

    def wait_for_save(self, stream: Any) -> None:
        """Enqueues copies of the pages that the step has completed. Waits for nothing."""
        step, self._step = self._step, None
        if step is not None and step.revision:
            for save in step.saves:
                with self._guard("wait_for_save"):
                    self._copy_out(save, step.revision, stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns the requests as saved: later writes to their pages come behind the copies."""
        with self._guard("get_finished"):
            self._note_loaded()
        return list(finished_gen_req_ids), []

    def close(self) -> None:
        """Waits for running stores, and closes the connections. TensorRT-LLM does not call it."""
        self._saver.shutdown()
        self._client.close()
        if self._ranks is not None:
            self._ranks.staging.close()

    # -- within

    def _note_loaded(self) -> None:
        """Tells the scheduler half which staged blocks it may replace."""
        while self._loading and self._loading[0][1].passed():
            number, _ = self._loading.pop(0)
            assert self._ranks is not None
            self._ranks.staging.ended(self._ranks.rank, number)

    def _copy_out(self, save: Save, revision: str, stream: Any) -> None:
        """Enqueues the copies of a save, of as many leading blocks as there is memory for."""
        assert self._pages is not None
        with self._lock:
            rows, self._free = self._free[: len(save.keys)], self._free[len(save.keys) :]
        self.dropped_blocks += len(save.keys) - len(rows)
        if not rows:
            return
        try:
            mark = self._pages.save([self._outgoing[i] for i in rows], save.block_ids[: len(rows)], stream)
            self._saver.submit(self._store, save, rows, mark, revision)
        except BaseException:
            self._give_back(rows)
            raise

    def _store(self, save: Save, rows: list[int], mark: Mark, revision: str) -> None:
        """Stores leading blocks of a save, from rows of host memory. Runs in the thread for stores."""
        try:
            with self._guard("store"):
                mark.wait()
                if self._rest.is_on():
                    self.dropped_blocks += len(rows)
                    return
                began_s = time.monotonic()
                blocks = [self._outgoing[i].numpy() for i in rows]
                tokens = save.tokens
                if tokens is not None:
                    tokens = tokens[: len(tokens) * len(rows) // len(save.keys)]
                result = self._open(revision).put(save.keys[: len(rows)], blocks, save.parent, tokens=tokens)
                self._rest.note(began_s, self._client.deadline_s)
                if result.denied:
                    logger.debug("%d of %d blocks are not stored: %s", result.denied, len(rows), result.why)
        finally:
            self._give_back(rows)

    def _give_back(self, rows: list[int]) -> None:
        with self._lock:
            self._free += rows

    def _open(self, revision: str) -> Namespace:
        assert self._ranks is not None
        if self._namespace is None or self._namespace[0] != revision:
            rank, shapes = self._ranks.rank, self._ranks.shapes
            layout = self._identity.layout(shapes[rank], rank, len(shapes), revision)
            self._namespace = revision, self._client.namespace(layout)
        return self._namespace[1]
