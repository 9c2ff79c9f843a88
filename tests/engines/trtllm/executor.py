"""A fake of TensorRT-LLM's executor, on a CPU: it calls a connector's hooks in the order of the real one.

Written from the loops of `py_executor.py` and from `KvCacheConnectorManager`; `test_interface.py` names the
release. No code is copied. The model is a fake, too: keys and values of a position depend on all tokens until
it, and the next token on the bytes of all pages of the request. A wrong byte in a page shows in the answer.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import RequestData, SchedulerOutput
from tensorrt_llm._utils import mpi_allgather, mpi_broadcast, mpi_rank

from kvstore_trtllm import KVStoreScheduler, KVStoreWorker

VOCABULARY = 30000
_ids = itertools.count(1)


@dataclass(eq=False)
class Request:
    """What the connector may read of an LlmRequest, and the state of its run."""

    prompt: list[int]
    max_tokens: int = 4
    cache_salt_id: int | None = None
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: Any = None
    multimodal_positions: Any = None
    multimodal_embedding: Any = None
    prompt_embedding_table: Any = None
    mrope_rotary_cos_sin: Any = None
    mrope_position_deltas: Any = None
    position_ids: Any = None
    return_context_logits: bool = False
    request_id: int = field(default_factory=lambda: next(_ids))
    position: int = 0
    reused: int = 0
    matched: int = 0
    block_ids: list[int] | None = None
    answer: list[int] = field(default_factory=list)
    failed: str = ""

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.prompt + self.answer

    @property
    def is_context(self) -> bool:
        return self.position < len(self.prompt)


@dataclass
class _Told:
    """What the connector has been told of a request: only what is new is told."""

    blocks: int = 0
    tokens: int = 0


class FakeExecutor:
    """One rank of an engine: `scheduler` is there on rank 0 alone. Every rank is given the same requests.

    `chunk`: tokens of a prompt in one step. `overlap`: a sampled token is known one step later. `kept`: pages
    of ended requests are found again by their tokens. `store`: False for a reference that asks no connector.
    `subtracts`: the first position of a request leaves out the promised tokens, as in the release.
    """

    def __init__(
        self,
        llm_args: Any,
        pages: int = 64,
        chunk: int = 1 << 20,
        overlap: bool = False,
        kept: bool = True,
        seed: int = 0,
        store: bool = True,
        subtracts: bool = True,
        device: str = "cpu",
        pool: torch.Tensor | None = None,
    ) -> None:
        self.tokens = llm_args.kv_cache_config.tokens_per_block
        self.rank, self.overlap, self.kept, self.chunk = mpi_rank(), overlap, kept, chunk
        self.seed, self.store, self.subtracts = seed, store, subtracts
        config = json.loads((Path(llm_args.model) / "config.json").read_text())
        self.layers = config["num_hidden_layers"]
        row = config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
        row //= llm_args.tensor_parallel_size
        self.worker = KVStoreWorker(llm_args)
        self.scheduler = KVStoreScheduler(llm_args) if self.rank == 0 else None
        self.pool = (
            torch.zeros(pages, self.layers, 2, self.tokens * row, dtype=torch.bfloat16, device=device)
            if pool is None
            else pool
        )
        self.worker.register_kv_caches(self.pool)
        if self.scheduler is not None:
            self.scheduler.wait_for_initialization()
        self._free = list(range(pages))
        self._reusable: dict[tuple[Any, ...], int] = {}
        self._told: dict[int, _Told] = {}
        self._loads: dict[int, int] = {}
        self._active: list[Request] = []
        self._saving: dict[int, Request] = {}
        self._late: list[tuple[Request, int]] = []
        self.steps: list[Any] = []
        self.between: Callable[[], None] = lambda: None
        """Called behind the questions of a step, before anything is loaded."""

    # -- what a test does

    def run(self, *prompts: list[int], **options: Any) -> list[Request]:
        """Runs requests with these prompts to their ends, all at once."""
        requests = [Request(prompt, **options) for prompt in prompts]
        self.add(*requests)
        while self._active:
            self.step()
        return requests

    def add(self, *requests: Request) -> None:
        self._active += requests

    def cancel(self, request: Request) -> None:
        """Ends a request early, as for a client that has hung up."""
        self._active.remove(request)
        self._late = [each for each in self._late if each[0] is not request]
        if request.block_ids is not None:
            self._terminate(request)

    def pause(self, request: Request) -> None:
        """Takes the pages of a request away, so that it starts again: what the connector was told stays."""
        told = self._told[request.request_id]
        self._active.remove(request)
        self._late = [each for each in self._late if each[0] is not request]
        self._terminate(request)
        self._told[request.request_id] = told
        request.prompt, request.max_tokens = request.get_tokens(0), request.max_tokens - len(request.answer)
        request.answer, request.position, request.block_ids = [], 0, None
        self._active.append(request)

    def forget_pages(self) -> None:
        """Empties the engine's own cache."""
        self._free += self._reusable.values()
        self._reusable.clear()

    def page(self, block_id: int) -> bytes:
        return self.pool[block_id].view(torch.uint8).cpu().numpy().tobytes()

    # -- an iteration of the loop

    def step(self, fails: str = "") -> None:
        """One iteration. `fails`: the forward pass fails with this message."""
        batch = list(self._active)
        self._prepare(batch)
        metadata = None
        if self.scheduler is not None:
            metadata = self.scheduler.build_connector_meta(self._output(batch))
        metadata = pickle.loads(pickle.dumps(mpi_broadcast(metadata)))
        self.steps.append(metadata)
        self.worker.bind_connector_meta(metadata)
        stream: Any = SimpleNamespace(name="the stream of the forward pass")
        if self.pool.is_cuda:
            stream = torch.cuda.current_stream()
        self.worker.start_load_kv(stream)
        if fails:
            for request in batch:
                request.failed = fails
                self._active.remove(request)
                self._terminate(request)
        else:
            sampled = self._forward(batch, stream)
            late, self._late = self._late, sampled
            for request, token in late if self.overlap else sampled:
                self._take(request, token)
            self._late = sampled if self.overlap else []
        self._finish_saves()

    def _prepare(self, batch: list[Request]) -> None:
        """Gives pages to requests: KVCacheManager.prepare_resources."""
        starting = [request for request in batch if request.block_ids is None]
        for request in starting:
            reused = self._reuse(request)
            request.reused = len(reused) * self.tokens
            request.matched = self._ask(request, request.reused)
            assert request.reused + request.matched < len(request.prompt), "one token must be computed"
            request.position = request.reused + request.matched
            needed = -(-len(request.prompt) // self.tokens) - len(reused)
            request.block_ids = reused  # in use from now on
            for _ in range(needed):
                request.block_ids.append(self._page())
        self.between()
        for request in starting:
            if self.scheduler is not None:
                self.scheduler.update_state_after_alloc(request, list(request.block_ids or ()))
        for request in batch:
            assert request.block_ids is not None
            while not request.is_context and len(request.block_ids) * self.tokens <= request.position:
                request.block_ids.append(self._page())

    def _page(self) -> int:
        """Returns a free page. Evicts the oldest one that nobody uses if there is none."""
        if not self._free:
            used = {i for each in (*self._active, *self._saving.values()) for i in each.block_ids or ()}
            key = next(key for key, block_id in self._reusable.items() if block_id not in used)
            self._free.append(self._reusable.pop(key))
        return self._free.pop(0)

    def _ask(self, request: Request, computed: int) -> int:
        answer = 0, False
        if self.scheduler is not None and self.store:
            answer = self.scheduler.get_num_new_matched_tokens(request, computed)
        matched, is_async = mpi_broadcast(answer)
        assert not is_async
        self._loads[request.request_id] = matched
        return int(matched)

    def _output(self, batch: list[Request]) -> SchedulerOutput:
        """What is told of a batch: KvCacheConnectorSchedulerOutputManager."""
        output = SchedulerOutput()
        for request in batch:
            is_new = request.request_id not in self._told
            told = self._told.setdefault(request.request_id, _Told())
            tokens, blocks = request.get_tokens(0), request.block_ids or []
            if request.is_context:
                position, scheduled = request.position, self._scheduled(request)
            else:
                position, scheduled = len(tokens) - 1, 1
            if self.subtracts:
                position -= self._loads.get(request.request_id, 0)
            data = RequestData(
                request.request_id,
                tokens[told.tokens :],
                blocks[told.blocks :],
                position,
                scheduled,
                cache_salt=request.cache_salt,
            )
            told.tokens, told.blocks = len(tokens), len(blocks)
            (output.new_requests if is_new else output.cached_requests).append(data)
        self._loads = {}
        return output

    def _scheduled(self, request: Request) -> int:
        return min(len(request.prompt) - request.position, self.chunk)

    def _forward(self, batch: list[Request], stream: Any) -> list[tuple[Request, int]]:
        """Computes the keys and values of the step, layer by layer, and the next tokens."""
        rows = self.pool.view(torch.int16)
        work = []
        for request in batch:
            tokens = request.get_tokens(0) + [token for each, token in self._late if each is request]
            end = request.position + self._scheduled(request) if request.is_context else request.position + 1
            work.append((request, tokens, range(request.position, end)))
        for layer in range(self.layers):
            self.worker.wait_for_layer_load(layer, stream)
            for request, tokens, positions in work:
                for position in positions:
                    page, at = divmod(position, self.tokens)
                    values = self._values(tokens[: position + 1], layer)
                    whole = rows[(request.block_ids or [])[page], layer]
                    whole.view(2, -1, self.tokens, values.shape[-1])[:, :, at] = values
            self.worker.save_kv_layer(layer, stream)
        self.worker.wait_for_save(stream)
        sampled = []
        for request, _, positions in work:
            request.position = positions.stop
            if not request.is_context:
                sampled.append((request, self._next(request)))
        return sampled

    def _values(self, tokens: list[int], layer: int) -> torch.Tensor:
        """Keys and values of one position of one layer, shape (2, heads, dim)."""
        heads_dim = self.pool.shape[3] // self.tokens
        seen = np.asarray([self.seed, self.rank, layer, *tokens], "<u4").tobytes()
        raw = np.frombuffer(blake3(seen).digest(length=4 * heads_dim), np.int16)
        return torch.from_numpy(raw.copy()).view(2, 1, heads_dim).to(self.pool.device)

    def _next(self, request: Request) -> int:
        """The next token: it depends on every byte of the request's pages, on all ranks."""
        whole, rest = divmod(request.position, self.tokens)
        block_ids = request.block_ids or []
        digest = blake3(b"".join(self.page(block_id) for block_id in block_ids[:whole]))
        if rest:
            last = self.pool[block_ids[whole]].view(torch.int16)
            part = last.view(self.layers, 2, -1, self.tokens, self.pool.shape[3] // self.tokens)
            digest.update(part[:, :, :, :rest].cpu().contiguous().numpy().tobytes())
        every = blake3(b"".join(mpi_allgather(digest.digest()))).digest()
        return int.from_bytes(every[:4], "little") % VOCABULARY

    def _take(self, request: Request, token: int) -> None:
        if request in self._active:
            request.answer.append(token)
            if len(request.answer) >= request.max_tokens:
                self._active.remove(request)
                self._terminate(request)

    # -- the ends of requests

    def _terminate(self, request: Request) -> None:
        saving = None
        if self.scheduler is not None:
            saving = self.scheduler.request_finished(request, list(request.block_ids or ()))
        if mpi_broadcast(saving):
            self._saving[request.request_id] = request
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Frees the pages of a request, or keeps whole ones for requests with the same tokens."""
        block_ids = request.block_ids or []
        tokens = request.get_tokens(0)
        for i, block_id in enumerate(block_ids):
            end = (i + 1) * self.tokens
            key = (request.cache_salt_id, *tokens[:end])
            known = self._reusable.get(key) if not request.failed else None
            if known == block_id:
                continue
            if self.kept and known is None and end <= request.position and not request.failed:
                self._reusable[key] = block_id
            else:
                self._free.append(block_id)
        self._told.pop(request.request_id, None)

    def _reuse(self, request: Request) -> list[int]:
        found = []
        for end in range(self.tokens, len(request.prompt), self.tokens):
            block_id = self._reusable.get((request.cache_salt_id, *request.prompt[:end]))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _finish_saves(self) -> None:
        saved, loaded = self.worker.get_finished(list(self._saving), [])
        assert loaded == []
        for request_id in set.intersection(*map(set, mpi_allgather(saved))):
            self._release(self._saving.pop(request_id))

    def settle(self) -> None:
        """Waits until everything that was copied out is stored, or refused."""
        self.worker._saver.submit(lambda: None).result(timeout=30)

    def close(self) -> None:
        """Ends the threads, and closes the connections."""
        self.worker.close()
        if self.scheduler is not None:
            self.scheduler.close()
