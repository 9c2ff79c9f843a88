"""The worker half: copies blocks between pages and the store, on its own threads.

Every load ends, with its pages filled, or reported as lost. The scheduler keeps the pages of a save until the
step of the save is reported as ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore import ExceptionBarrier, Layout, Namespace, Put, PutResult, Reservation
from kvstore_vllm.budget import seconds_left
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.messages import Hint, Load, Part, Save, Step
from kvstore_vllm.metrics import (
    CANCELLED,
    DAMAGED,
    DROPPED,
    LATE,
    NOT_STORED,
    REFUSED,
    UNANSWERED,
    UNAVAILABLE,
    Outcome,
    Recorder,
    reason_of,
)
from kvstore_vllm.options import OWN, Scope
from kvstore_vllm.pages import SKIPPED, Pages
from kvstore_vllm.tenants import Tenants, namespace

_LOADERS = 4
"""Concurrent loads. A load from NVMe mostly waits."""
_WAITERS = 16
"""Concurrent loads that wait for blocks of another engine. Further ones load what is stored."""
_WAIT_SHARE = 0.8
"""The part of the remaining time of a load in which it waits for the next block; the rest is to load it."""
_SAVES = 1024
"""Queued saves; more are dropped."""
_SAVE_BLOCKS = 64
"""Blocks that are reserved at once: the most that a reset discards."""
IDLE_S = 0.002
"""The time that an idle step waits for a transfer, in seconds."""


NULL_BLOCK = 0
"""The page that vLLM uses as a placeholder. It belongs to no request."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A load, save or hint of step `number`, ordered at `began` (perf_counter). `copying`: a copy runs.

    `within_s`: the longest time of a load, in seconds. `running`: a thread has taken the load.
    """

    request_id: str
    epoch: str
    number: int
    began: float
    scope: Scope = OWN
    within_s: float = 0.0
    revoked: bool = False
    running: bool = False
    copying: bool = False


@dataclass(slots=True, eq=False)
class _Saving:
    """A save, and what became of its blocks before number `at`. The next one is behind `parent`.

    `given_up`: its pages could not be copied. `ended`: it stores no more.
    """

    transfer: _Transfer
    save: Save
    parent: bytes | None
    outcome: Outcome = field(default_factory=Outcome)
    at: int = 0
    given_up: bool = False
    ended: bool = False


@dataclass(slots=True)
class GroupMemory:
    """The pages of a group of layers, and the layout of its stored blocks."""

    pages: Pages
    layout: Layout
    namespace: Any = None

    @property
    def per_key(self) -> int:
        """Pages of a stored block."""
        return self.layout.block_bytes // self.pages.block_bytes


class WorkerHalf:
    """Called by the worker around its forward pass. Only synchronous loads block it.

    `in_parts`: a request can be resumed behind a part of its load, so lost pages are reported one by one.
    `saves`: False if another worker has the same KV and saves it.
    """

    def __init__(
        self,
        daemons: Daemons,
        guard: ExceptionBarrier,
        groups: Sequence[GroupMemory],
        num_blocks: int,
        asynchronous: bool = True,
        in_parts: bool = True,
        saves: bool = True,
    ) -> None:
        self._daemons = daemons
        self._tenants = Tenants(daemons, daemons.deadline_s)
        self._guard = guard
        self._groups = list(groups)
        self._full = next((group for group in groups if not group.layout.independent), groups[0])
        self._asynchronous = asynchronous
        self._in_parts = in_parts
        self._saves = saves
        self._num_blocks = num_blocks
        self._epoch = ""
        self._number = 0
        self._loaders = _threads(_LOADERS, "kvstore-load")
        self._waiters = _threads(_WAITERS, "kvstore-wait")
        self._waits = 0
        self._saver = _threads(1, "kvstore-save")  # one thread: parents before children
        self._changed = threading.Condition()
        self._saving: set[_Transfer] = set()
        self._loading: set[_Transfer] = set()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._recorder = Recorder()
        self._idle = False

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of stored blocks by group."""
        return [group.layout for group in self._groups]

    # -- hooks, in the order of a step

    def begin(self, step: Step) -> None:
        """Cancels transfers from before a reset. Waits for at most one copy of each."""
        with self._changed:
            self._number = step.number
            if step.epoch != self._epoch:
                self._epoch = step.epoch
                for group in self._groups:
                    group.namespace = None
                self._revoke(self._saving | self._loading)

    def stop(self) -> None:
        """Cancels all transfers. None of them touches pages after the return."""
        with self._changed:
            self._revoke(self._saving | self._loading)

    def load(self, step: Step) -> None:
        """Starts the loads of the step; runs them if they are synchronous."""
        self._idle = step.idle
        now = time.monotonic()
        with self._changed:
            # Loads share the devices, and the engine would compute what they replace one after the other.
            within_s = sum(each.within_s for each in self._loading)
        for load in step.loads:
            within_s += load.within_s
            ends = now + min(self._daemons.deadline_s, within_s)
            loading = _Transfer(
                load.request_id, step.epoch, step.number, time.perf_counter(), load.scope, load.within_s
            )
            waits = self._asynchronous and self._may_wait(load)
            with self._changed:
                self._loading.add(loading)
            if not self._asynchronous:
                self._load(loading, load, ends)
                continue
            pool = self._waiters if waits else self._loaders
            try:
                pool.submit(self._load, loading, replace(load, waits=waits), ends)
            except RuntimeError:  # no thread can be started, but the load is queued for the others
                with self._changed:
                    if loading.running:
                        continue
                    self._waits -= waits
                    self._loading.discard(loading)
                raise

    def fail_unstarted(self, step: Step) -> None:
        """Ends the loads of the step that `load` has not started: their pages must be computed."""
        with self._changed:
            started = {each.request_id for each in self._loading} | self._loaded
            for load in step.loads:
                if load.request_id in started:
                    continue
                if self._in_parts:
                    self._bad_blocks.update(*(part.block_ids for part in load.parts))
                else:
                    self._failed.add(load.request_id)
                if self._asynchronous:
                    self._loaded.add(load.request_id)
            self._changed.notify_all()

    def save(self, step: Step) -> None:
        """Starts the saves and hints of the step."""
        ends = time.monotonic() + self._daemons.deadline_s
        savings = list[_Saving]()
        for save in step.saves if self._saves else ():
            saving = _Transfer(save.request_id, step.epoch, step.number, time.perf_counter(), save.scope)
            with self._changed:
                dropped = len(self._saving) >= _SAVES
                if not dropped:
                    self._saving.add(saving)
            if dropped:
                self._record_save(save, Outcome(why=DROPPED))
                continue
            savings.append(_Saving(saving, save, save.parent))
        # Blocks that belong to a chain need its blocks in the store, or on their way.
        batches = dict[tuple[bool, Scope], list[_Saving]]()
        for each in savings:
            batches.setdefault((each.save.chain is not None, each.save.scope), []).append(each)
        for _, batch in sorted(batches.items(), key=lambda item: item[0][0]):
            self._saver.submit(self._save, batch, ends)
        for hint in step.hints if self._saves else ():
            hinting = _Transfer(hint.request_id, step.epoch, step.number, time.perf_counter(), hint.scope)
            with self._changed:
                dropped = len(self._saving) >= _SAVES
                if not dropped:
                    self._saving.add(hinting)
            if dropped:
                self._recorder.add(1, "request_problems", "dropped_hints")
                continue
            # Behind the saves of its request.
            self._saver.submit(self._hint, hinting, hint)

    def ended(self) -> tuple[set[str], set[str]]:
        """Returns the requests with finished loads, and those of them that must start again; each once."""
        with self._changed:
            if self._idle:
                self._changed.wait_for(lambda: not self._waiting() or bool(self._loaded), IDLE_S)
            loaded, self._loaded = self._loaded, set()
            failed, self._failed = self._failed, set()
            return loaded, failed

    def bad_blocks(self) -> set[int]:
        """Returns the pages that failed to load, each once."""
        with self._changed:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def moved(self) -> int:
        """Returns the latest step up to which all transfers have ended."""
        with self._changed:
            return min((each.number - 1 for each in self._saving | self._loading), default=self._number)

    def counts(self) -> dict[str, Any]:
        """Returns the `data` of Figures since the last call."""
        return self._recorder.take()

    def close(self) -> None:
        """Waits for running transfers; their deadlines bound the time."""
        self._loaders.shutdown()
        self._waiters.shutdown()
        self._saver.shutdown()
        self._tenants.close()

    # -- within

    def _may_wait(self, load: Load) -> bool:
        """Returns whether a load has a thread to wait in: others are not to wait behind it."""
        with self._changed:
            if not load.waits or self._waits >= _WAITERS:
                return False
            self._waits += 1
            return True

    def _waiting(self) -> bool:
        return bool(self._loading or self._saving)

    def _revoke(self, transfers: set[_Transfer]) -> None:
        """Cancels transfers and waits for their running copies. The caller holds the lock."""
        for each in transfers:
            each.revoked = True
        self._changed.wait_for(lambda: not any(each.copying for each in transfers))

    @contextmanager
    def _copying(self, transfer: _Transfer) -> Iterator[bool]:
        """Yields whether the transfer may touch its pages during the `with` block."""
        with self._changed:
            transfer.copying = not transfer.revoked
        try:
            yield transfer.copying
        finally:
            with self._changed:
                transfer.copying = False
                self._changed.notify_all()

    def _open(self, transfer: _Transfer, group: GroupMemory, block_ids: Sequence[int]) -> Any:
        """Returns the namespace of a group for a transfer; None if the transfer is cancelled.

        Raises RuntimeError for invalid pages.
        """
        if block_ids and (min(block_ids) <= NULL_BLOCK or max(block_ids) >= self._num_blocks):
            raise RuntimeError(f"null block, or no engine block, among those of {transfer.request_id}")
        with self._changed:
            if transfer.revoked or transfer.epoch != self._epoch:
                return None
            if transfer.scope != OWN:
                return self._tenants.namespace(transfer.scope, self._epoch, group.layout)
            if group.namespace is None:
                group.namespace = namespace(self._daemons, OWN, self._epoch, group.layout)
            return group.namespace

    def _load(self, loading: _Transfer, load: Load, ends: float) -> None:
        with self._changed:
            if loading not in self._loading:
                return  # it has been reported as failed
            loading.running = True
        lost = [part.block_ids for part in load.parts]
        try:
            for n, part in enumerate(load.parts):
                good = self._load_part(loading, part, ends, load.waits)
                lost[n] = part.block_ids[good:]
                if lost[n]:
                    break  # what follows is of no use
        finally:
            with self._guard("figures"):
                self._recorder.time("load_seconds", time.perf_counter() - loading.began)
            with self._changed:
                self._waits -= load.waits
                if self._in_parts:
                    self._bad_blocks.update(*lost)
                elif any(lost):
                    self._failed.add(load.request_id)
                self._loading.discard(loading)
                if self._asynchronous:
                    self._loaded.add(load.request_id)
                self._changed.notify_all()

    def _load_part(self, loading: _Transfer, part: Part, ends: float, waits: bool) -> int:
        """Fills the leading pages of a part; returns how many."""
        outcome, wanted = Outcome(), len(part.block_ids)
        try:
            with self._guard("load"), _explained(outcome):
                self._fill_pages(loading, part, ends, outcome, waits)
        finally:
            block_bytes = self._groups[part.group].layout.block_bytes
            self._recorder.loaded(loading.request_id, part.group, wanted, block_bytes, outcome)
        return outcome.good

    def _fill_pages(
        self, loading: _Transfer, part: Part, ends: float, outcome: Outcome, waits: bool = False
    ) -> None:
        """Loads the leading pages of a part. `waits`: for blocks not stored yet. Raises UNANSWERED."""
        group = self._groups[part.group]
        per_key, pages = group.per_key, group.pages
        wanted = [SKIPPED] * part.skip + part.block_ids
        wanted += [SKIPPED] * (len(part.keys) * per_key - len(wanted))
        namespace = self._open(loading, group, part.block_ids)
        if namespace is None:
            outcome.why = CANCELLED
            return
        done = 0
        while True:
            first, left_s = done, seconds_left(ends)
            wait_s = _WAIT_SHARE * left_s if waits else 0.0
            with namespace.acquire(
                part.keys[first:], left_s - wait_s, device=pages.device, wait_s=wait_s, prompt=0
            ) as lease:
                outcome.why = LATE if lease.stored > len(lease) else NOT_STORED
                while done - first < len(lease):
                    seconds_left(ends)
                    last = min(done + pages.at_once, first + len(lease))
                    ids = [wanted[i * per_key : (i + 1) * per_key] for i in range(done, last)]
                    with self._copying(loading) as allowed:
                        good = pages.load(lease, done - first, ids) if allowed else 0
                    outcome.read.update(lease.tiers[done - first : done - first + good])
                    done += good
                    outcome.good = min(max(0, done * per_key - part.skip), len(part.block_ids))
                    if good < len(ids):
                        outcome.why = CANCELLED if not allowed else UNAVAILABLE if lease.ended else DAMAGED
                        return
            # An empty lease ends the wait, and so does the last block.
            if not waits or done in (first, len(part.keys)):
                return

    def _save(self, savings: list[_Saving], ends: float) -> None:
        """Stores the leading blocks of saves of one scope."""
        try:
            with self._guard("save"):
                left = savings
                while left:
                    self._save_some(left, ends)
                    left = [saving for saving in left if not saving.ended]
        finally:
            for saving in savings:
                with self._guard("figures"):
                    self._recorder.time("save_seconds", time.perf_counter() - saving.transfer.began)
                    self._record_save(saving.save, saving.outcome)
            with self._changed:
                self._saving.difference_update(saving.transfer for saving in savings)
                self._changed.notify_all()

    def _record_save(self, save: Save, outcome: Outcome) -> None:
        block_bytes = self._groups[save.group].layout.block_bytes
        self._recorder.saved(save.request_id, save.group, len(save.keys), block_bytes, outcome)

    def _save_some(self, savings: Sequence[_Saving], ends: float) -> None:
        """Stores the next `_SAVE_BLOCKS` blocks of saves. Those that store no more have ended then."""
        puts, room = list[tuple[_Saving, Put]](), _SAVE_BLOCKS
        for saving in savings:
            if room:
                saving.ended = True  # unless its blocks get stored
                with self._guard("save"), _explained(saving.outcome):
                    put = self._put_of(saving, room)
                    if put is not None:
                        puts.append((saving, put))
                        room -= len(put.keys)
        if not puts:
            return
        outcome = Outcome()
        with self._guard("save"), _explained(outcome):
            daemon = self._tenants.daemons(puts[0][0].save.scope).of(self._full.layout)
            results = daemon.put([put for _, put in puts], seconds_left(ends))
            for (saving, put), result in zip(puts, results, strict=True):
                self._put_ended(saving, put, result)
            return
        for saving, _ in puts:
            saving.outcome.why = outcome.why

    def _put_of(self, saving: _Saving, most: int) -> Put | None:
        """Returns the put of the next blocks of a save; None if it is cancelled. Raises UNANSWERED."""
        save, start = saving.save, saving.at
        group = self._groups[save.group]
        namespace = self._open(saving.transfer, group, save.block_ids)
        chains = self._open(saving.transfer, self._full, ())
        if namespace is None or chains is None:
            saving.outcome.why = CANCELLED
            return None
        keys, tokens, size = save.keys[start : start + most], save.tokens, group.layout.block_tokens
        if tokens is not None:
            tokens = tokens[start * size : (start + len(keys)) * size]
        chain = None if save.chain is None else (chains, save.chain)

        def fill(reservation: Reservation) -> bool:
            saving.given_up = True
            with self._guard("save"), _explained(saving.outcome):
                saving.given_up = not self._fill(saving, group, start, reservation)
            return not saving.given_up

        return Put(namespace, keys, fill, saving.parent, group.pages.device, tokens, chain)

    def _fill(self, saving: _Saving, group: GroupMemory, start: int, reservation: Reservation) -> bool:
        """Copies pages into the slots of blocks from `start` on. Returns False if the save is cancelled."""
        pages, per_key, block_ids = group.pages, group.per_key, saving.save.block_ids
        firsts = [(start + at) * per_key for at in reservation.wanted]
        ids = [block_ids[first : first + per_key] for first in firsts]
        for slot in range(0, len(ids), pages.at_once):
            with self._copying(saving.transfer) as allowed:
                if not allowed:
                    saving.outcome.why = CANCELLED
                    return False
                pages.save(reservation, slot, ids[slot : slot + pages.at_once])
        return True

    def _put_ended(self, saving: _Saving, put: Put, result: PutResult) -> None:
        """Takes what became of a put. Behind a block that is not stored, its children would be denied too."""
        saving.outcome.good += result.stored + result.present
        saving.outcome.present += result.present
        if result.denied:
            if not saving.given_up:
                saving.outcome.why = REFUSED
            return
        saving.at += len(put.keys)
        saving.parent = None if self._groups[saving.save.group].layout.independent else put.keys[-1]
        saving.ended = saving.at == len(saving.save.keys)

    def _hint(self, hinting: _Transfer, hint: Hint) -> None:
        pinned = 0
        try:
            with self._guard("hint"), suppress(*UNANSWERED):
                namespace = self._open(hinting, self._groups[hint.group], ())
                pinned = _tell(namespace, hint) if namespace is not None else 0
        finally:
            with self._guard("figures"):
                self._recorder.add(pinned, "pinned_blocks")
            with self._changed:
                self._saving.discard(hinting)
                self._changed.notify_all()


@contextmanager
def _explained(outcome: Outcome) -> Iterator[None]:
    """Ends the `with` block where the daemon does not answer, with the reason in `outcome`."""
    try:
        yield
    except UNANSWERED as error:
        outcome.why = reason_of(error)


def _tell(namespace: Namespace, hint: Hint) -> int:
    """Tells the store a hint; returns how many blocks are pinned."""
    advice, pinned = hint.advice, 0
    if advice.unpin:
        namespace.unpin(hint.keys)
    if advice.pin_s:
        pinned = namespace.pin(hint.keys, advice.pin_s)
    if advice.hints:
        namespace.hint(
            hint.keys,
            next_use_s=advice.next_use_s,
            closed=advice.closed,
            priority=advice.priority or 0,
        )
    return pinned


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool with started threads, so that no later submit fails to start one."""
    pool, all_there = ThreadPoolExecutor(count, name), threading.Barrier(count)
    for _ in range(count):
        pool.submit(all_there.wait)
    return pool
