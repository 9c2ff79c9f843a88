"""The half in the scheduler's process: which blocks to load, which to save, whose engine blocks to keep.

It sees requests and block numbers, never bytes. A block is saved only after the step that computed it has
come back and was not thrown away, so KV that was computed from a block that failed to load is never stored.
No save is awaited: engine blocks of running requests do not change, those of finished ones are held until
their saves are over, and those of preempted ones are taken out of the workers' hands before the next step.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvstore import Client, Guard, Layout
from kvstore_vllm.identity import files_revision, in_epoch
from kvstore_vllm.messages import Load, Save, Step

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_NEVER = 1 << 62
LOOKUP_DEADLINE_S = 0.05
"""The scheduler, and so every request, waits for look-ups: a daemon that takes longer has no answer."""


@dataclass(slots=True)
class Tracked:
    """A request that has engine blocks, since it was last admitted.

    `block_ids`: those that it had then. `hit_tokens`: computed before its first step (None: no step yet).
    `stored`: leading blocks that are stored, or that were handed to the workers (_NEVER: none may be any
    more). `loading`: the engine blocks of its load.
    """

    request: Request
    block_ids: list[int]
    stored: int
    loading: list[int]
    hit_tokens: int | None = None
    saving: bool = False


class SchedulerHalf:
    """Called by the scheduler between steps. `blocks_per_key` engine blocks make a stored block."""

    def __init__(
        self,
        client: Client,
        guard: Guard,
        block_tokens: int,
        blocks_per_key: int,
        asynchronous: bool,
        loads: bool,
        saves: bool,
    ) -> None:
        self._client = client
        self._guard = guard
        self._block_tokens = block_tokens
        self._per_key = blocks_per_key
        self._asynchronous = asynchronous
        self._may_load = loads
        self._may_save = saves
        self._layouts: list[Layout] = []
        self._namespaces: list[Any] = []
        self._tracked: dict[str, Tracked] = {}
        self._matched: dict[str, tuple[int, int]] = {}
        self._tried: dict[str, int] = {}
        self._adapters: dict[tuple[str, str], bytes] = {}
        self._next = Step()
        self.kv_cache_manager: Any = None

    # -- before a request has engine blocks

    def meet(self, layouts: list[Layout]) -> None:
        """Takes in what each worker's blocks look like; before that everything is a miss."""
        self._layouts = layouts
        self._open()

    def matched(self, request: Request, computed_tokens: int) -> int:
        """How many tokens behind the first `computed_tokens` can be loaded; one at least is left."""
        stored = self._look_up(self._keys(request))
        self._matched[request.request_id] = (stored, computed_tokens)
        # One try an admission: whoever loads again what failed would never start.
        if not self._may_load or self._tried.get(request.request_id) == request.num_preemptions:
            return 0
        usable: int = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        return max(0, min(stored * self._per_key * self._block_tokens, usable) - computed_tokens)

    def admit(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The request got engine blocks; `external_tokens` behind the computed ones are to be loaded."""
        if request.num_computed_tokens:
            return  # the second call, after an asynchronous load
        [block_ids] = blocks.get_block_ids()
        if external_tokens:
            self._tried[request.request_id] = request.num_preemptions
        try:
            self._track(request, block_ids, external_tokens)
        except Exception:
            # vLLM waits for a load that it was promised: this one ends with nothing loaded.
            if external_tokens:
                self._next.loads.append(Load(request.request_id, [], block_ids, 0))
            raise

    def _track(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        request_id = request.request_id
        stored, computed_tokens = self._matched.get(request_id, (0, 0))
        first = computed_tokens // self._block_tokens
        loading = block_ids[first : first + external_tokens // self._block_tokens]
        self._tracked[request_id] = Tracked(request, block_ids, stored, loading)
        if loading:
            start, stop = first // self._per_key, -(-(first + len(loading)) // self._per_key)
            keys = self._keys(request)[start:stop]
            self._next.loads.append(Load(request_id, keys, loading, first - start * self._per_key))

    # -- every step

    def step(self, output: SchedulerOutput) -> Step:
        """The orders of the step that was just scheduled."""
        orders, self._next = self._next, Step(self._next.epoch)
        orders.revoked += output.preempted_req_ids or ()
        with self._guard("save"):
            for request_id in orders.revoked:
                tracked = self._tracked.get(request_id)
                # One that was admitted again in this very step has had no step since.
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
                    orders.saves.append(self._save(tracked, stop, block_ids))
        return orders

    def finish(self, request: Request, block_ids: Sequence[int]) -> bool:
        """A request has ended; whether its engine blocks are held until the workers say its id."""
        request_id = request.request_id
        self._matched.pop(request_id, None)
        self._tried.pop(request_id, None)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or tracked.hit_tokens is None:
            return False
        if (stop := self._confirmed_blocks(tracked)) > tracked.stored:
            self._next.saves.append(self._save(tracked, stop, block_ids))
        if tracked.saving:
            self._next.held.append(request_id)
        return tracked.saving

    def release(self, request_id: str) -> None:
        """The engine blocks of a request are free from now on, whatever became of its saves."""
        self._next.revoked.append(request_id)

    def hear(self, output: KVConnectorOutput) -> None:
        """What the workers report: engine blocks that could not be loaded are computed by their request."""
        invalid = output.invalid_block_ids
        if not invalid:
            return
        for tracked in self._tracked.values():
            bad = [i for i, block_id in enumerate(tracked.block_ids) if block_id in invalid]
            if bad and not invalid.isdisjoint(tracked.loading):
                if tracked.stored != _NEVER:
                    tracked.stored = min(tracked.stored, bad[0] // self._per_key)
                # Until it is computed again nobody else may take it for computed.
                if not self._asynchronous and self.kv_cache_manager is not None:
                    self.kv_cache_manager.evict_blocks(set(tracked.block_ids[bad[0] :]))

    def forget(self) -> None:
        """From here on nothing that was stored before is found: the weights may be others now."""
        self._next.epoch = uuid.uuid4().hex
        self._next.saves.clear()
        self._open()
        for tracked in self._tracked.values():
            tracked.stored = _NEVER  # what they have computed or load is of before

    # -- within

    def _open(self) -> None:
        self._namespaces = [
            self._client.namespace(in_epoch(layout, self._next.epoch)) for layout in self._layouts
        ]

    def _look_up(self, keys: list[bytes]) -> int:
        """How many leading blocks every worker can load."""
        if not self._namespaces:
            return 0
        count = len(keys)
        for namespace in self._namespaces:
            count = namespace.lookup(keys[:count], LOOKUP_DEADLINE_S) if count else 0
        return count

    def _keys(self, request: Request) -> list[bytes]:
        """Keys of a request's full blocks: vLLM's own hashes, which cover salt, images, an adapter's name."""
        keys = request.block_hashes[self._per_key - 1 :: self._per_key]
        if request.lora_request is None:
            return list(keys)
        adapter = self._adapter(request.lora_request)
        return [key + adapter for key in keys]

    def _adapter(self, lora: Any) -> bytes:
        """16 bytes for an adapter as it was when it was first used: its name alone may name others later."""
        known = self._adapters.get((lora.lora_name, lora.lora_path))
        if known is None:
            path = Path(lora.lora_path)
            revision = files_revision(path) if path.exists() else lora.lora_path
            known = self._adapters[lora.lora_name, lora.lora_path] = blake3(revision.encode()).digest(16)
        return known

    def _confirmed_blocks(self, tracked: Tracked) -> int:
        """Leading blocks whose computation has come back; 0 until the request's first own step has."""
        request = tracked.request
        confirmed: int = request.num_computed_tokens - request.num_in_flight_tokens
        if not self._may_save or tracked.hit_tokens is None or confirmed <= tracked.hit_tokens:
            return 0
        return min(
            confirmed // (self._block_tokens * self._per_key), len(request.block_hashes) // self._per_key
        )

    def _save(self, tracked: Tracked, stop: int, block_ids: Sequence[int]) -> Save:
        """The order to save what is not stored of the first `stop` blocks."""
        start = tracked.stored
        keys = self._keys(tracked.request)[:stop]
        tracked.stored, tracked.saving = stop, True
        return Save(
            tracked.request.request_id,
            keys[start:],
            keys[start - 1] if start else None,
            list(block_ids[start * self._per_key : stop * self._per_key]),
            self._tokens(tracked.request, start, stop),
        )

    def _tokens(self, request: Request, start: int, stop: int) -> list[int] | None:
        """Token ids of stored blocks, for routers; None where these alone do not say what a block is."""
        if (
            request.lora_request
            or request.mm_features
            or request.cache_salt
            or request.prompt_embeds is not None
        ):
            return None
        size = self._block_tokens * self._per_key
        return list(request.all_token_ids[start * size : stop * size])
