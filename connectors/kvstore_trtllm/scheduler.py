"""The scheduler half, in the process of rank 0: it finds prompts in the store, and orders loads and saves.

TensorRT-LLM asks once for each request how many tokens can be loaded. The answer is a promise, because no
hook reports a failed load. So `get_num_new_matched_tokens` reads the blocks of all ranks into host memory and
verifies them before it answers. Missing, late and damaged blocks are not promised. If a promise cannot be
kept all the same, an error stops the engine: it would compute with pages that nobody has filled.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorScheduler

from kvstore import Client, ExceptionBarrier, Key, Namespace, chain_keys
from kvstore_trtllm.identity import Identity
from kvstore_trtllm.messages import Load, Save, Step
from kvstore_trtllm.options import ConnectorOptions
from kvstore_trtllm.ranks import Ranks, met
from kvstore_trtllm.rest import Rest
from kvstore_trtllm.settings import check_engine
from kvstore_trtllm.staging import Rows
from kvstore_trtllm.weights import logger, naming_of

_MOST_REQUESTS = 8192
"""Requests that are remembered. TensorRT-LLM may end one without telling."""

_NOT_IN_TOKENS = (
    "lora_task_id", "multimodal_hashes", "multimodal_positions", "multimodal_embedding",
    "prompt_embedding_table", "mrope_rotary_cos_sin", "mrope_position_deltas", "position_ids",
)  # fmt: skip
"""Properties that change KV and are not in keys. Requests that have one are not served."""
_SALTS = ("cache_salt", "cache_salt_id")
"""Where a request has its salt: as text, or as TensorRT-LLM's number for it."""


class BrokenPromiseError(RuntimeError):
    """The engine counts on blocks that cannot be given to it. It must stop."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request. Blocks before number `saved` are stored, or ordered to be.

    `staged`: rows of promised blocks, from block number `first` on, whose load is not ordered yet. `loaded`:
    their tokens, in the step that loads them. `computed`: tokens that TensorRT-LLM had when it asked.
    `tokens`: those that it has told, None before.
    """

    salt: bytes
    computed: int
    saved: int = 0
    first: int = 0
    staged: range = range(0)
    loaded: int = 0
    block_ids: list[int] = field(default_factory=list)
    tokens: list[int] | None = None


class KVStoreScheduler(KvCacheConnectorScheduler):
    """The scheduler half. The constructor raises ConfigError for engines that are not served.

    It needs no daemon. `failures` counts internal failures by hook.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        options = ConnectorOptions.of(llm_args)
        model = check_engine(llm_args)
        self._args = llm_args
        self._identity = Identity.of(llm_args, model, options)
        self._naming = naming_of(model.folder, options.weights_revision)
        self._tokens = int(llm_args.kv_cache_config.tokens_per_block)
        self._client = Client(
            options.url or None,
            options.token or None,
            options.deadline_s,
            recompute_tokens_per_s=options.recompute_tokens_per_s or None,
        )
        self._guard = ExceptionBarrier(logger)
        self.failures = self._guard.failures
        self._ranks: Ranks | None = None
        self._namespaces: list[Namespace] = []
        self._rows = Rows(0)
        self._ordered: deque[tuple[int, range]] = deque()
        self._requests: OrderedDict[int, _Request] = OrderedDict()
        self._number = 0
        # The engine stands still while the daemon is asked.
        self._rest = Rest()

    # -- called by TensorRT-LLM

    def wait_for_initialization(self) -> None:
        """Waits for the name of the weights, for half a second at most."""
        with self._guard("wait_for_initialization"):
            self._naming.wait_at_start()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens behind those on the device are held for the request: whole blocks.

        They are loaded in the step that begins with the request, so never "asynchronously".
        """
        with self._guard("get_num_new_matched_tokens"):
            return self._match(request, num_computed_tokens), False
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Notes the pages of the prompt."""
        with self._guard("update_state_after_alloc"):
            if (known := self._requests.get(request.request_id)) is not None:
                known.block_ids = list(block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """Returns what the workers load before the step and save after it.

        Raises BrokenPromiseError if promised blocks have no pages.
        """
        self._number += 1
        step = Step(self._number, self._naming.known())
        for request_id, request in self._requests.items():
            if request.staged:
                step.loads.extend(self._loads(request_id, request))
        new, cached = scheduler_output.new_requests, scheduler_output.cached_requests
        for data, is_new in [*((each, True) for each in new), *((each, False) for each in cached)]:
            with self._guard("build_connector_meta"):
                step.saves.extend(self._saves(data, is_new))
                continue
            # What the step has added to the request is lost, and without it nothing later is right.
            self._requests.pop(data.request_id, None)
        return step

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Returns False: the copies of the request's pages are in the stream before all later writes."""
        with self._guard("request_finished"):
            self._forget(request.request_id)
        return False

    def close(self) -> None:
        """Closes the connections. TensorRT-LLM does not call it."""
        self._client.close()

    # -- within

    def _match(self, request: Any, computed: int) -> int:
        self._forget(request.request_id)  # asked again, its earlier promise is void
        began_s = time.monotonic()
        if self._rest.is_on() or not self._is_open():
            return 0
        if any(getattr(request, name, None) is not None for name in _NOT_IN_TOKENS):
            return 0
        made = _Request(_salt_of(request), computed)
        tokens = request.get_tokens(0)
        keys = chain_keys(tokens, self._tokens, made.salt)
        ends_s = began_s + self._client.deadline_s
        questions = [(each, keys, 0 if i else len(keys), None) for i, each in enumerate(self._namespaces)]
        found, _ = self._client.lookup(questions, (), self._client.deadline_s)
        made.saved = min(each.blocks for each in found)
        # The engine computes at least one token.
        last = min(*(each.worth_loading for each in found), made.saved, (len(tokens) - 1) // self._tokens)
        made.first, beyond = divmod(computed, self._tokens)
        if last > made.first and not beyond and not request.return_context_logits:
            made.staged = self._hold(keys[made.first : last], ends_s)
        self._rest.note(began_s, self._client.deadline_s)
        self._requests[request.request_id] = made
        while len(self._requests) > _MOST_REQUESTS:
            self._forget(next(iter(self._requests)))
        return len(made.staged) * self._tokens

    def _is_open(self) -> bool:
        """Returns whether the store can be used: all ranks have met, and the weights have a name."""
        if self._namespaces:
            return True
        self._ranks = self._ranks or met(self._args)
        revision = self._naming.known()
        if self._ranks is None or not revision:
            return False
        shapes = self._ranks.shapes
        self._rows = Rows(self._ranks.staging.place.rows)
        self._namespaces = [
            self._client.namespace(self._identity.layout(shape, rank, len(shapes), revision))
            for rank, shape in enumerate(shapes)
        ]
        return True

    def _hold(self, keys: Sequence[Key], ends_s: float) -> range:
        """Reads leading blocks of all ranks, verified, into rows of the staging memory; returns the rows."""
        assert self._ranks is not None
        staging = self._ranks.staging
        while self._ordered and self._ordered[0][0] <= staging.done:
            self._rows.give_back(self._ordered.popleft()[1])
        rows = self._rows.take(len(keys))
        good = 0
        try:
            held = len(rows)
            for rank, namespace in enumerate(self._namespaces):
                if held:
                    out = staging.part(rank)[rows.start : rows.start + held]
                    left_s = max(0.001, ends_s - time.monotonic())  # a deadline of 0 would be misuse
                    held = namespace.get(keys[:held], out, deadline_s=left_s, prompt=0)
            good = held
        finally:
            self._rows.give_back(rows[good:])
        return rows[:good]

    def _loads(self, request_id: int, request: _Request) -> Iterator[Load]:
        """Yields the loads of the promised blocks of a request."""
        staged, request.staged = request.staged, range(0)
        block_ids = request.block_ids[request.first : request.first + len(staged)]
        if len(block_ids) < len(staged):
            raise BrokenPromiseError(
                f"request {request_id} was promised blocks {request.first} to {request.first + len(staged)}, "
                f"and TensorRT-LLM has given it {len(request.block_ids)} pages"
            )
        self._ordered.append((self._number, staged))
        request.loaded = len(staged) * self._tokens
        yield from (Load(row, block_id) for row, block_id in zip(staged, block_ids, strict=True))

    def _saves(self, data: Any, is_new: bool) -> Iterator[Save]:
        """Yields the save of blocks that the step completes, and that are not stored. `data`: RequestData."""
        request = self._requests.get(data.request_id)
        if request is None:
            return
        if is_new:
            request.block_ids, request.tokens = list(data.new_block_ids), list(data.new_tokens)
        elif request.tokens is None:
            return  # TensorRT-LLM tells what has changed since an earlier life of the request
        else:
            request.block_ids += data.new_block_ids
            request.tokens += data.new_tokens
        if data.cache_salt is not None and not request.salt:
            return
        end = data.computed_position + data.num_scheduled_tokens
        # TensorRT-LLM leaves promised tokens out of the position in their first step.
        if data.computed_position == request.computed:
            end += request.loaded
        request.loaded = 0
        whole = min(min(end, len(request.tokens)) // self._tokens, len(request.block_ids))
        if whole <= request.saved:
            return
        first, request.saved = request.saved, whole
        tokens = request.tokens[: whole * self._tokens]
        keys = chain_keys(tokens, self._tokens, request.salt)
        yield Save(
            keys[first:],
            keys[first - 1] if first else None,
            request.block_ids[first:whole],
            # Under a salt, tokens do not identify blocks.
            None if request.salt else tokens[first * self._tokens :],
        )

    def _forget(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._rows.give_back(request.staged)


def _salt_of(request: Any) -> bytes:
    """Returns the salt of a request, empty if it has none. Raises AttributeError if nothing can tell."""
    names = [name for name in _SALTS if hasattr(request, name)]
    if not names:
        raise AttributeError(f"a request has none of {', '.join(_SALTS)}")
    salts = [getattr(request, name) for name in names]
    return b"" if all(salt is None for salt in salts) else repr(salts).encode()
