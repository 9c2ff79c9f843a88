"""The scheduler half: decides which blocks to load and save, and keeps the pages of saves.

It sees requests and page numbers, never bytes. A block is saved after the output of the step that computed it
was accepted, so KV computed from a block that failed to load is never stored. No step waits for a save: a
reference keeps each page until its save has ended, whatever becomes of the request.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore import ExceptionBarrier, Layout, trace_parent
from kvstore_vllm.adapters import Adapters
from kvstore_vllm.budget import patience_s
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.groups import Found, Group
from kvstore_vllm.handoff import Handoffs
from kvstore_vllm.lookup import Lookup, ScopeLookups
from kvstore_vllm.messages import Hint, Load, Part, Progress, Save, Step
from kvstore_vllm.metrics import NAMING, NOT_STORED, REFUSED, UNANSWERED, UNNAMED, Recorder, reason_of
from kvstore_vllm.options import DEFAULT, OWN, WITHOUT, OptionReader, Options, Scope
from kvstore_vllm.prefill_rate import PrefillRate
from kvstore_vllm.references import PageReferences
from kvstore_vllm.tails import Tails, Tracked
from kvstore_vllm.tenants import RefusedError
from kvstore_vllm.worker import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvstore")

_AWAKE_S = 10.0
"""How long an idle engine is kept awake for reports of transfers after their deadline, in seconds."""
_ANSWER_TOKENS = 128
"""Tokens of a running answer that are saved together: many small saves would slow the engine down."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a look-up found of a request, and the tokens that the engine had by itself.

    `asked_tokens`: those that could be found. `unasked`: the reason if the store was not asked. `waits`:
    another engine has promised `found`, of which not everything is stored yet.
    """

    found: Found
    computed_tokens: int
    salt: bytes
    asked_tokens: int = 0
    unasked: str = ""
    waits: bool = False
    options: Options = DEFAULT


class SchedulerHalf:
    """Called by the scheduler between steps. `alignment`: prefixes end at multiples of it, in tokens.

    `whole_inputs`: images have bidirectional attention, so a prompt with images must be computed as a whole.
    `step_tokens`: the most tokens of a step. `lookup_deadline_s`: bounds a lookup.
    `drops`: vLLM drops the last block of a hit.
    """

    def __init__(
        self,
        daemons: Daemons,
        guard: ExceptionBarrier,
        groups: Sequence[Group],
        alignment: int,
        asynchronous: bool,
        loads: bool,
        saves: bool,
        lookup_deadline_s: float,
        whole_inputs: bool = False,
        step_tokens: int = 8192,
        drops: bool = False,
    ) -> None:
        self._daemons = daemons
        self._guard = guard
        self._groups = list(groups)
        self._hash_tokens = groups[0].block_tokens // groups[0].hashes_per_key
        self._alignment = alignment
        self._asynchronous = asynchronous
        self._may_load = loads
        self._may_save = saves
        self._whole_inputs = whole_inputs
        self._rate = PrefillRate(step_tokens)

        def lookup(daemons: Daemons, scope: Scope = OWN) -> Lookup:
            return Lookup(daemons, groups, self._rate, lookup_deadline_s, drops, scope)

        self._lookup = lookup(daemons)
        self._scopes = ScopeLookups(daemons, lookup, lookup_deadline_s)
        self._tracked: dict[str, Tracked] = {}
        self._matched: dict[str, Match] = {}
        self._tried: dict[str, int] = {}
        self._adapters = Adapters()
        self._recorder = Recorder()
        self._options = OptionReader(self._recorder)
        self._handoffs = Handoffs(groups, alignment, self._recorder, waits=loads and asynchronous)
        self._next = Step()
        self._number = 0
        self._moved = 0
        self._awake_until = 0.0
        self._unmet = NAMING
        self._manager: Any = None
        self._references: PageReferences
        self._tails: Tails

    # -- before a request has pages

    def meet(self, layouts: list[list[Layout]]) -> None:
        """Takes the block layouts of each worker, by group. Until then every lookup is a miss, by name."""
        self._lookup.meet(layouts, self._next.epoch)
        self._scopes.meet(layouts)

    def turn_off(self, unnamed: bool) -> None:
        """Nothing will be served. `unnamed`: the weights cannot be named, so every lookup is a miss."""
        self._unmet = UNNAMED if unnamed else ""

    def bind(self, manager: Any) -> None:
        """Takes vLLM's manager of pages, before the first request."""
        self._manager = manager
        self._references = PageReferences(manager.block_pool)
        self._tails = Tails(self._groups, self._alignment, self._references)
        self._lookup.bind(manager.coordinator)
        self._scopes.bind(manager.coordinator)

    def matched(self, request: Request, computed_tokens: int) -> int:
        """Returns how many tokens after the first `computed_tokens` to load.

        At least one token is computed.
        """
        salt = self._salt(request)
        # Polls, and admissions after a preemption, are for the same prompt.
        known = self._matched.get(request.request_id)
        options = known.options if known else self._options.read(request)
        asked, unasked, promised = 0, self._unasked(request, salt, options), None
        # vLLM requires some requests to be computed from their first token.
        if salt is None or request.skip_reading_prefix_cache or not options.loads or self._off():
            found = Found(0, [set() for _ in self._groups])
        else:
            started = time.perf_counter()
            found, options = self._find(request, options, salt, not known, computed_tokens)
            if not unasked:
                self._recorder.time("lookup_seconds", time.perf_counter() - started)
                last = (request.num_tokens - 1) // self._alignment * self._alignment
                asked = max(0, last - computed_tokens)
            promised = self._handoffs.expect(request, found) if options.loads and self._lookup else None
            # vLLM ends a step there, so that the states at this position are there to be saved.
            if promised is None and found.junction > request.shared_prefix_boundary:
                request.shared_prefix_boundary = found.junction // self._alignment * self._alignment
        found, waits = promised or found, promised is not None
        self._matched[request.request_id] = Match(
            found, computed_tokens, salt or b"", asked, unasked, waits, options
        )
        # One try per admission: a request that repeats a failed load would never start.
        if not self._may_load or self._tried.get(request.request_id) == request.num_preemptions:
            return 0
        return max(0, found.tokens - computed_tokens)

    def admit(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Records the pages of a request; `external_tokens` tokens after the computed ones are loaded."""
        if request.num_computed_tokens:
            return  # the second call, after an asynchronous load
        self._record(request, external_tokens)
        if external_tokens:
            self._note_try(request)
        self._track(request, blocks.get_block_ids(), external_tokens)

    def admit_failed(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Ends the load that vLLM waits for after `admit` has failed: its pages must be computed."""
        if external_tokens and not request.num_computed_tokens:
            self._tried[request.request_id] = request.num_preemptions
            parts = [Part(n, [], _pages(ids)) for n, ids in enumerate(blocks.get_block_ids())]
            self._next.loads.append(Load(request.request_id, parts))

    def _record(self, request: Request, hit_tokens: int) -> None:
        """Records the first admission of a request: later ones are for the same prompt."""
        request_id = request.request_id
        match = self._matched.get(request_id)
        if match is None or request_id in self._tracked or request.num_preemptions:
            return
        if match.unasked:
            self._recorder.unasked(request_id, match.unasked)
            return
        why = match.found.why or NOT_STORED
        asked = max(match.asked_tokens, hit_tokens)
        unworthy = match.found.unworthy_tokens
        self._recorder.admitted(request_id, asked, hit_tokens, match.computed_tokens, why, unworthy)

    def _track(self, request: Request, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        request_id = request.request_id
        self._forget(request_id)
        match = self._matched.get(request_id) or Match(
            Found(0, [set() for _ in self._groups]), 0, b"", options=self._options.read(request)
        )
        first, stop = match.computed_tokens, match.computed_tokens + external_tokens
        parts = []
        if external_tokens:
            keys = [group.keys(request.block_hashes, match.salt) for group in self._groups]
            parts = [
                _part(group, keys[group.number], block_ids[group.number], first, stop)
                for group in self._groups
            ]
        options = match.options
        saves = options.stores and not self._rewinds(request)
        ends = self._tails.ends(request, match.found) if self._saves() and saves else []
        self._tracked[request_id] = Tracked(
            request,
            block_ids,
            [_leading(stored) for stored in match.found.stored],
            match.found.stored,
            frozenset(ends),
            ends,
            [block_id for part in parts for block_id in part.block_ids],
            match.salt,
            options,
            saves=saves,
        )
        if external_tokens:
            # What another engine has promised may come late, and this one is not to compute it.
            compute_s = None if match.waits else self._rate.seconds(first, stop)
            within_s = patience_s(compute_s, self._daemons.deadline_s)
            wanted = [part for part in parts if part.block_ids]
            self._next.loads.append(Load(request_id, wanted, match.waits, options.scope, within_s))

    # -- every step

    def step(self, output: SchedulerOutput) -> Step:
        """Returns the transfers of the step that was just scheduled."""
        orders, self._next = self._next, Step(self._next.epoch)
        orders.idle = not output.num_scheduled_tokens
        with self._guard("prefill rate"):
            orders.serial = self._begin_step(output, bool(orders.loads))
        with self._guard("save"):
            for request_id in output.preempted_req_ids or ():
                tracked = self._tracked.get(request_id)
                # A request admitted again in this step has had no step since.
                if tracked is not None and tracked.hit_tokens is not None:
                    self._forget(request_id)
            state = output.kv_connector_block_state
            for request_id, tokens in output.num_scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                if tracked is None:
                    continue
                if tracked.hit_tokens is None:
                    tracked.hit_tokens = tracked.request.num_computed_tokens
                confirmed = self._confirmed_tokens(tracked)
                end = tracked.request.num_computed_tokens + tokens
                if not self._saves() or not tracked.saves:
                    continue
                if self._completes(tracked, confirmed) or self._tails.wanted(tracked, end):
                    block_ids = state.resolve_block_ids(request_id)
                    self._save(orders, tracked, confirmed, block_ids)
                    self._tails.hold(tracked, end, block_ids)
                for offer in state.boundary_state_offloads.get(request_id, ()):
                    self._tails.hold_state(tracked, *offer)
        if orders.loads or orders.saves or orders.hints:
            self._number += 1
            self._awake_until = time.monotonic() + self._daemons.deadline_s + _AWAKE_S
        orders.number = self._number
        with self._guard("save"):
            self._references.number(self._number)
        return orders

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Ends a request. Its last blocks are saved in the next step.

        Returns the parameters for a decode engine; None if no other engine decodes.
        """
        tracked, answer = self._tracked.get(request.request_id), None
        if tracked is not None and (confirmed := self._confirmed_tokens(tracked)):
            self._save(self._next, tracked, confirmed, block_ids, ended=True)
            answer = self._handoffs.answer(request, confirmed if tracked.saves else 0)
        if tracked is not None and tracked.options.advice:
            self._advise(tracked)
        self.release(request.request_id)
        return answer

    def release(self, request_id: str) -> None:
        """Knows a request no longer, and holds no page for it but those that are being saved."""
        self._matched.pop(request_id, None)
        self._tried.pop(request_id, None)
        self._handoffs.forget(request_id)
        self._forget(request_id)

    def hear(self, output: KVConnectorOutput) -> None:
        """Takes the reports of the workers. Pages that failed to load are computed by their request."""
        now, progress = time.monotonic(), output.kv_connector_worker_meta
        if output.invalid_block_ids:
            self._lose(output.invalid_block_ids)
        if isinstance(progress, Progress):
            self._moved = progress.number
            self._references.ended(self._moved)
            self._rate.end(progress.serial, now)

    def saving(self) -> bool:
        """Returns whether pages are kept for saves that have begun."""
        return bool(self._references)

    def moving(self) -> bool:
        """Returns whether transfers of a step may still be running, or wait for the next step."""
        running = self._moved < self._number and time.monotonic() < self._awake_until
        return running or bool(self._next.saves or self._next.hints)

    def counts(self) -> dict[str, Any]:
        """Returns the `data` of Figures since the last call."""
        return self._recorder.take()

    def forget(self) -> None:
        """Makes all earlier stored blocks misses, because the weights may have changed."""
        self._next.epoch = uuid.uuid4().hex
        self._next.saves.clear()
        self._next.hints.clear()
        self._lookup.open(self._next.epoch)
        self._scopes.open(self._next.epoch)
        for tracked in self._tracked.values():
            self._tails.stop(tracked)  # its pages are from before the reset

    def close(self) -> None:
        """Ends the connections of tenants."""
        self._scopes.close()

    # -- within

    def _begin_step(self, output: SchedulerOutput, loads: bool) -> int:
        """Measures the step that was just scheduled. Returns its serial number."""
        prompts, others = [], 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            first = tracked.request.num_computed_tokens if tracked else 0
            if tracked and first < tracked.request.num_prompt_tokens:
                prompts.append((first, tokens))
            else:
                others += tokens
        # Synchronous loads delay the step that they belong to.
        return self._rate.begin(prompts, others, time.monotonic(), self._asynchronous or not loads)

    def _note_try(self, request: Request) -> None:
        """Notes a load. After one that waited for a promise, what is stored may still be loaded."""
        match = self._matched.get(request.request_id)
        if match is not None and match.waits:
            self._handoffs.awaited(request.request_id)
        else:
            self._tried[request.request_id] = request.num_preemptions

    def _find(
        self, request: Request, options: Options, salt: bytes, first: bool, computed_tokens: int
    ) -> tuple[Found, Options]:
        """Returns what is found of a prompt, and the request's options: none if its token is refused."""
        none = [set[int]() for _ in self._groups]
        if not self._lookup:
            return Found(0, none, why=self._unmet), options
        try:
            with trace_parent(getattr(request, "trace_headers", None)):
                if options.scope == OWN:
                    return self._lookup.find(request, salt, first, computed_tokens), options
                return self._scopes.find(options.scope, request, salt, first, computed_tokens), options
        except RefusedError as error:
            self._recorder.problem("refused_tokens", f"a request is served without the store: {error}")
            return Found(0, none, why=REFUSED), WITHOUT
        except UNANSWERED as error:
            if (why := reason_of(error)) == REFUSED:
                self._recorder.warn(why, f"nothing is cached, the daemon refuses this client: {error}")
            return Found(0, none, why=why), options

    def _salt(self, request: Request) -> bytes | None:
        """Returns the suffix of a request's keys; None if its blocks may be neither loaded nor stored."""
        if self._whole_inputs and request.mm_features:
            return None
        return self._adapters.salt(request.lora_request) if request.lora_request else b""

    def _unasked(self, request: Request, salt: bytes | None, options: Options) -> str:
        """Returns why nothing is loaded for a request, whatever is stored; an empty string if it may be."""
        if self._off():
            return "nothing is served"
        if not self._may_load:
            return "this engine only stores"
        if not options.loads:
            return "its options are wrong, or its token is refused"
        if salt is None:
            return "its adapter or its images are not served"
        return "vLLM computes its whole prompt" if request.skip_reading_prefix_cache else ""

    def _off(self) -> bool:
        """Returns whether the store is not asked, because nothing is served."""
        return not self._lookup and not self._unmet

    def _rewinds(self, request: Request) -> bool:
        """Returns whether vLLM may drop tokens of a request that its states already hold.

        It drops the last token of each answer to a part of a prompt, and states have no way back.
        """
        return bool(request.resumable) and any(group.state for group in self._groups)

    def _saves(self) -> bool:
        return self._may_save and bool(self._lookup)

    def _confirmed_tokens(self, tracked: Tracked) -> int:
        """Returns the number of leading tokens with accepted output; 0 before the request's first step."""
        request = tracked.request
        confirmed: int = request.num_computed_tokens - request.num_in_flight_tokens
        if not self._saves() or tracked.hit_tokens is None or confirmed <= tracked.hit_tokens:
            return 0
        return confirmed

    def _completes(self, tracked: Tracked, confirmed: int) -> bool:
        """Returns whether the first `confirmed` tokens complete something that is to be saved now.

        What is left of an answer is saved at its end.
        """
        if self._tails.complete(tracked, confirmed):
            return True
        for group in (group for group in self._groups if group.full):
            size, stored = group.block_tokens, tracked.stored[group.number]
            of_prompt = stored < tracked.request.num_prompt_tokens // size
            least = 1 if of_prompt else max(1, _ANSWER_TOKENS // size)
            if confirmed >= (stored + least) * size:
                return True
        return False

    def _forget(self, request_id: str) -> None:
        """Tracks a request no longer."""
        if tracked := self._tracked.pop(request_id, None):
            self._tails.drop(tracked)

    def _lose(self, invalid: set[int]) -> None:
        """Notes pages that failed to load, in an engine that resumes behind a part of a load."""
        for tracked in self._tracked.values():
            [block_ids] = tracked.block_ids
            bad = [i for i, block_id in enumerate(block_ids) if block_id in invalid]
            if bad and not invalid.isdisjoint(tracked.loading):
                tracked.stored[0] = min(tracked.stored[0], bad[0] // self._groups[0].pages_per_key)
                # No other request may use the page before it is computed again.
                if not self._asynchronous:
                    self._manager.evict_blocks(set(block_ids[bad[0] :]))

    def _save(
        self,
        orders: Step,
        tracked: Tracked,
        confirmed: int,
        block_ids: Sequence[Sequence[int]],
        ended: bool = False,
    ) -> None:
        """Adds saves for what the first `confirmed` tokens complete. `ended`: the answer has ended."""
        if not confirmed or not tracked.saves:
            return
        request = tracked.request
        if self._salt(request) != tracked.salt:
            self._tails.stop(tracked)  # the adapter's files have changed, so its weights are unknown
            return
        confirmed = min(confirmed, len(request.block_hashes) * self._hash_tokens)
        keys = [group.keys(request.block_hashes, tracked.salt) for group in self._groups]
        for group in self._groups:
            stop = confirmed // group.block_tokens
            if group.full and stop > tracked.stored[group.number]:
                self._save_run(orders, tracked, group, keys[group.number], stop, block_ids[group.number])
        full = next((group for group in self._groups if group.full), None)
        for tail in self._tails.take(tracked, confirmed, ended):
            number = tail.group.number
            chain = keys[full.number][tail.end // full.block_tokens - 1] if full else None
            some = keys[number][tail.first : tail.end // tail.group.block_tokens]
            ids = [block.block_id for block in tail.blocks]
            orders.saves.append(
                Save(request.request_id, number, some, None, ids, scope=tracked.options.scope, chain=chain)
            )

    def _save_run(
        self,
        orders: Step,
        tracked: Tracked,
        group: Group,
        keys: list[bytes],
        stop: int,
        block_ids: Sequence[int],
    ) -> None:
        """Adds a save of the unsaved blocks of full attention among the first `stop`."""
        start, request = tracked.stored[group.number], tracked.request
        ids = list(block_ids[start * group.pages_per_key : stop * group.pages_per_key])
        self._references.save(self._references.hold(ids))
        tracked.stored[group.number] = stop
        parent = keys[start - 1] if start else None
        tokens = self._tokens(request, group, start, stop)
        orders.saves.append(
            Save(
                request.request_id,
                group.number,
                keys[start:stop],
                parent,
                ids,
                tokens,
                tracked.options.scope,
            )
        )

    def _advise(self, tracked: Tracked) -> None:
        """Adds hints about what is stored of a request. They follow its last saves."""
        request, scope = tracked.request, tracked.options.scope
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        for advice in tracked.options.advice:
            most = min(computed, len(request.block_hashes) * self._hash_tokens, advice.end or computed)
            for group in self._groups:
                keys = group.keys(request.block_hashes, tracked.salt)
                for first, stop in self._tails.needed(tracked, group, most):
                    some = keys[first:stop]
                    self._next.hints.append(Hint(request.request_id, group.number, some, advice, scope))

    def _tokens(self, request: Request, group: Group, start: int, stop: int) -> list[int] | None:
        """Returns token ids of stored blocks, for routers; None if tokens do not identify a block."""
        if (
            group.number
            or request.lora_request
            or request.mm_features
            or request.cache_salt
            or request.prompt_embeds is not None
        ):
            return None
        return list(request.all_token_ids[start * group.block_tokens : stop * group.block_tokens])


def _leading(indices: set[int]) -> int:
    """Returns how many leading blocks are among `indices`."""
    return next((i for i in range(len(indices)) if i not in indices), len(indices))


def _pages(block_ids: Sequence[int]) -> list[int]:
    """Returns the pages of a block table, without null blocks."""
    return [block_id for block_id in block_ids if block_id != NULL_BLOCK]


def _part(group: Group, keys: list[bytes], block_ids: Sequence[int], first: int, stop: int) -> Part:
    """Returns what to load of a group for the tokens from `first` to `stop`.

    vLLM has null blocks before the window of the token at `stop`, and pages behind them.
    """
    begin, end = first // group.page_tokens, -(-stop // group.page_tokens)
    while begin < end and block_ids[begin] == NULL_BLOCK:
        begin += 1
    per_key = group.pages_per_key
    start = begin // per_key
    return Part(
        group.number,
        keys[start : -(-end // per_key)],
        list(block_ids[begin:end]),
        begin - start * per_key,
    )
