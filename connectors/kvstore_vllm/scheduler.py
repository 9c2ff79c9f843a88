"""The scheduler half: decides which blocks to load and save, and which pages to hold.

It sees requests and page numbers, never bytes. A block is saved after the output of the step that computed it
was accepted, so KV computed from a block that failed to load is never stored. No step waits for a save: pages
of running requests do not change, pages of finished requests are held until their saves have ended, and saves
of preempted requests are revoked before the next step.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore import Client, ExceptionBarrier, Layout
from kvstore_vllm.adapters import Adapters
from kvstore_vllm.identity import in_epoch
from kvstore_vllm.messages import Load, Progress, Save, Step

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_NEVER = 1 << 62
LOOKUP_DEADLINE_S = 0.05
"""The deadline of a lookup, in seconds: the scheduler, and so every request, waits for it."""


@dataclass(slots=True)
class Tracked:
    """A request with pages, since its last admission.

    `block_ids`: its pages at admission. `hit_tokens`: tokens computed before its first step; None: no step
    yet. `stored`: leading blocks that are stored or being saved; _NEVER: no more saves. `loading`: the pages
    of its load. `salt`: the suffix of its keys.
    """

    request: Request
    block_ids: list[int]
    stored: int
    loading: list[int]
    salt: bytes = b""
    hit_tokens: int | None = None
    saving: bool = False


class SchedulerHalf:
    """Called by the scheduler between steps. A stored block has `blocks_per_key` pages.

    `whole_inputs`: images have bidirectional attention, so a prompt with images must be computed as a whole.
    """

    def __init__(
        self,
        client: Client,
        guard: ExceptionBarrier,
        block_tokens: int,
        blocks_per_key: int,
        asynchronous: bool,
        loads: bool,
        saves: bool,
        whole_inputs: bool = False,
    ) -> None:
        self._client = client
        self._guard = guard
        self._block_tokens = block_tokens
        self._per_key = blocks_per_key
        self._asynchronous = asynchronous
        self._may_load = loads
        self._may_save = saves
        self._whole_inputs = whole_inputs
        self._layouts: list[Layout] = []
        self._namespaces: list[Any] = []
        self._tracked: dict[str, Tracked] = {}
        self._matched: dict[str, tuple[int, int, bytes]] = {}
        self._tried: dict[str, int] = {}
        self._adapters = Adapters()
        self._next = Step()
        self._number = 0
        self._moved = 0
        self.kv_cache_manager: Any = None

    # -- before a request has pages

    def meet(self, layouts: list[Layout]) -> None:
        """Takes the block layout of each worker. Until then every lookup is a miss."""
        self._layouts = layouts
        self._open()

    def matched(self, request: Request, computed_tokens: int) -> int:
        """Returns how many tokens after the first `computed_tokens` to load.

        At least one token is computed.
        """
        salt = self._salt(request)
        # vLLM requires some requests to be computed from their first token.
        asked = salt is not None and not request.skip_reading_prefix_cache
        keys = self._keys(request, salt or b"") if asked else []
        # Polls, and admissions after a preemption, are for the same prompt.
        stored = self._look_up(keys, 0 if request.request_id in self._matched else len(keys))
        self._matched[request.request_id] = (stored, computed_tokens, salt or b"")
        # One try per admission: a request that repeats a failed load would never start.
        if not self._may_load or self._tried.get(request.request_id) == request.num_preemptions:
            return 0
        usable: int = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        return max(0, min(stored * self._per_key * self._block_tokens, usable) - computed_tokens)

    def admit(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Records the pages of a request; `external_tokens` tokens after the computed ones are loaded."""
        if request.num_computed_tokens:
            return  # the second call, after an asynchronous load
        [block_ids] = blocks.get_block_ids()
        if external_tokens:
            self._tried[request.request_id] = request.num_preemptions
        try:
            self._track(request, block_ids, external_tokens)
        except Exception:
            # vLLM waits for a promised load: this one ends with nothing loaded.
            if external_tokens:
                self._next.loads.append(Load(request.request_id, [], block_ids, 0))
            raise

    def _track(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        request_id = request.request_id
        stored, computed_tokens, salt = self._matched.get(request_id, (0, 0, b""))
        first = computed_tokens // self._block_tokens
        loading = block_ids[first : first + external_tokens // self._block_tokens]
        self._tracked[request_id] = Tracked(request, block_ids, stored, loading, salt)
        if loading:
            start, stop = first // self._per_key, -(-(first + len(loading)) // self._per_key)
            keys = self._keys(request, salt)[start:stop]
            self._next.loads.append(Load(request_id, keys, loading, first - start * self._per_key))

    # -- every step

    def step(self, output: SchedulerOutput) -> Step:
        """Returns the transfers of the step that was just scheduled."""
        orders, self._next = self._next, Step(self._next.epoch)
        orders.revoked += output.preempted_req_ids or ()
        orders.idle = not output.num_scheduled_tokens
        orders.given = [block_id for load in orders.loads for block_id in load.block_ids]
        orders.given += self._given(output)
        with self._guard("save"):
            for request_id in orders.revoked:
                tracked = self._tracked.get(request_id)
                # A request admitted again in this step has had no step since.
                if tracked is not None and tracked.hit_tokens is not None:
                    del self._tracked[request_id]
            for request_id in output.num_scheduled_tokens:
                tracked = self._tracked.get(request_id)
                if tracked is None:
                    continue
                if tracked.hit_tokens is None:
                    tracked.hit_tokens = tracked.request.num_computed_tokens
                elif (stop := self._confirmed_blocks(tracked)) > tracked.stored:
                    [block_ids] = output.kv_connector_block_state.resolve_block_ids(request_id)
                    self._save(orders, tracked, stop, block_ids)
        if orders.loads or orders.saves:
            self._number += 1
        orders.number = self._number
        return orders

    def finish(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Ends a request. Returns whether its pages are held until the workers release it."""
        request_id = request.request_id
        self._matched.pop(request_id, None)
        self._tried.pop(request_id, None)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or tracked.hit_tokens is None:
            return False
        if (stop := self._confirmed_blocks(tracked)) > tracked.stored:
            self._save(self._next, tracked, stop, block_ids)
        if tracked.saving:
            self._next.held.append(request_id)
        return tracked.saving

    def release(self, request_id: str) -> None:
        """Frees the pages of a request. Its saves are revoked."""
        self._next.revoked.append(request_id)

    def hear(self, output: KVConnectorOutput) -> None:
        """Takes the reports of the workers. Pages that failed to load are computed by their request."""
        if isinstance(output.kv_connector_worker_meta, Progress):
            self._moved = output.kv_connector_worker_meta.number
        invalid = output.invalid_block_ids
        if not invalid:
            return
        for tracked in self._tracked.values():
            bad = [i for i, block_id in enumerate(tracked.block_ids) if block_id in invalid]
            if bad and not invalid.isdisjoint(tracked.loading):
                if tracked.stored != _NEVER:
                    tracked.stored = min(tracked.stored, bad[0] // self._per_key)
                # No other request may use the page before it is computed again.
                if not self._asynchronous and self.kv_cache_manager is not None:
                    self.kv_cache_manager.evict_blocks(set(tracked.block_ids[bad[0] :]))

    def moving(self) -> bool:
        """Returns whether transfers of a step may still be running."""
        return self._moved < self._number

    def forget(self) -> None:
        """Makes all earlier stored blocks misses, because the weights may have changed."""
        self._next.epoch = uuid.uuid4().hex
        self._next.saves.clear()
        self._open()
        for tracked in self._tracked.values():
            tracked.stored = _NEVER  # its pages are from before the reset

    # -- within

    def _open(self) -> None:
        self._namespaces = [
            self._client.namespace(in_epoch(layout, self._next.epoch)) for layout in self._layouts
        ]

    def _look_up(self, keys: list[bytes], prompt: int) -> int:
        """Returns how many leading blocks every worker can load. `prompt`: see `Namespace.lookup`."""
        if not self._namespaces:
            return 0
        count = len(keys)
        for namespace in self._namespaces:
            # Every shard counts the prompt, so that the hit ratio is that of one shard.
            if count or prompt:
                count = namespace.lookup(keys[:count], LOOKUP_DEADLINE_S, prompt=prompt)
        return count

    def _given(self, output: SchedulerOutput) -> list[int]:
        """Returns the pages that requests got for this step, without pages that are already computed."""
        given: list[int] = []
        for new in output.scheduled_new_reqs:
            given += new.block_ids[0][new.num_computed_tokens // self._block_tokens :]
        cached = output.scheduled_cached_reqs
        for request_id, groups, computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if groups:
                resumed = request_id in cached.resumed_req_ids
                given += groups[0][computed_tokens // self._block_tokens if resumed else 0 :]
        return given

    def _salt(self, request: Request) -> bytes | None:
        """Returns the suffix of a request's keys; None if its blocks may be neither loaded nor stored."""
        if self._whole_inputs and request.mm_features:
            return None
        return self._adapters.salt(request.lora_request) if request.lora_request else b""

    def _keys(self, request: Request, salt: bytes = b"") -> list[bytes]:
        """Returns keys of full blocks: vLLM's hashes, which cover salt, images and adapter name."""
        return [key + salt for key in request.block_hashes[self._per_key - 1 :: self._per_key]]

    def _saves(self) -> bool:
        return self._may_save and bool(self._layouts)

    def _confirmed_blocks(self, tracked: Tracked) -> int:
        """Returns the number of leading blocks with accepted output; 0 before the request's first step."""
        request = tracked.request
        confirmed: int = request.num_computed_tokens - request.num_in_flight_tokens
        if not self._saves() or tracked.hit_tokens is None or confirmed <= tracked.hit_tokens:
            return 0
        return min(
            confirmed // (self._block_tokens * self._per_key), len(request.block_hashes) // self._per_key
        )

    def _save(self, orders: Step, tracked: Tracked, stop: int, block_ids: Sequence[int]) -> None:
        """Adds a save for the unsaved blocks among the first `stop`."""
        request, start = tracked.request, tracked.stored
        if self._salt(request) != tracked.salt:
            tracked.stored = _NEVER  # the adapter's files have changed, so its weights are unknown
            return
        keys = self._keys(request, tracked.salt)[:stop]
        tracked.stored, tracked.saving = stop, True
        orders.saves.append(
            Save(
                request.request_id,
                keys[start:],
                keys[start - 1] if start else None,
                list(block_ids[start * self._per_key : stop * self._per_key]),
                self._tokens(request, start, stop),
            )
        )

    def _tokens(self, request: Request, start: int, stop: int) -> list[int] | None:
        """Returns token ids of stored blocks, for routers; None if tokens do not identify a block."""
        if (
            request.lora_request
            or request.mm_features
            or request.cache_salt
            or request.prompt_embeds is not None
        ):
            return None
        size = self._block_tokens * self._per_key
        return list(request.all_token_ids[start * size : stop * size])
