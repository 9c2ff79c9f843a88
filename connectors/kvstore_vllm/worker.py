"""The half beside the model: moves blocks between the engine's pages and the store, in threads of its own.

Each promise to the scheduler is kept whatever happens: a load that was ordered ends, well or with its engine
blocks reported, and a request that is held is let go once no save of it is left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvstore import Client, ExceptionBarrier, Layout
from kvstore_vllm.identity import in_epoch
from kvstore_vllm.messages import Load, Save, Step
from kvstore_vllm.pages import Pages

_LOADERS = 4
"""Loads at a time: most of a load that comes from NVMe is waiting."""
_SAVES = 1024
"""Saves that may wait; more are dropped."""
_SAVE_BLOCKS = 64
"""Blocks reserved at a time: so many are given up at most when their request is preempted."""
_IDLE_S = 0.002
"""How long a step without work waits for a transfer, instead of spinning."""


NULL_BLOCK = 0
"""The engine block that vLLM puts where a request needs none: nobody's, and everybody's."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A load or a save of `block_ids`, which was ordered in step `number` and is `copying` now."""

    request_id: str
    epoch: str
    number: int
    block_ids: frozenset[int]
    revoked: bool = False
    copying: bool = False


class WorkerHalf:
    """Called by the worker around its forward pass; only synchronous loads keep it waiting."""

    def __init__(
        self,
        client: Client,
        guard: ExceptionBarrier,
        pages: Pages,
        layout: Layout,
        asynchronous: bool,
        num_blocks: int,
    ) -> None:
        self.layout = layout
        self._client = client
        self._guard = guard
        self._pages = pages
        self._per_key = layout.block_bytes // pages.block_bytes
        self._asynchronous = asynchronous
        self._num_blocks = num_blocks
        self._epoch = ""
        self._namespace: Any = None
        self._number = 0
        self._loaders = _threads(_LOADERS, "kvstore-load")
        self._saver = _threads(1, "kvstore-save")  # one: parents before their children
        self._changed = threading.Condition()
        self._saving: set[_Transfer] = set()
        self._loading: set[_Transfer] = set()
        self._held: set[str] = set()
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._idle = False

    # -- hooks, in the order of a step

    def begin(self, step: Step) -> None:
        """Keeps transfers from engine blocks that the step may write, and ends those of before a reset.

        Waits for one copy of each at most.
        """
        ids, given = set(step.revoked), set(step.given)
        with self._changed:
            self._number = step.number
            if step.epoch != self._epoch:
                self._epoch, self._namespace = step.epoch, None
                self._revoke(self._saving | self._loading)
            self._revoke({each for each in self._saving if each.request_id in ids})
            stray = {
                each
                for each in self._saving | self._loading
                if not each.revoked and not each.block_ids.isdisjoint(given)
            }
            self._revoke(stray)
        if stray:
            names = sorted(each.request_id for each in stray)
            raise RuntimeError(f"engine blocks were given to others while they were moved for {names}")

    def stop(self) -> None:
        """Ends all transfers: engine memory is touched by none of them when this returns."""
        with self._changed:
            self._revoke(self._saving | self._loading)

    def load(self, step: Step) -> None:
        """Starts the step's loads, or makes them."""
        self._idle = step.idle
        ends = time.monotonic() + self._client.deadline_s
        for load in step.loads:
            loading = _Transfer(load.request_id, step.epoch, step.number, frozenset(load.block_ids))
            with self._changed:
                self._loading.add(loading)
            if self._asynchronous:
                self._loaders.submit(self._load, loading, load, ends)
            else:
                self._load(loading, load, ends)

    def save(self, step: Step) -> None:
        """Starts the step's saves."""
        ends = time.monotonic() + self._client.deadline_s
        self._held.update(step.held)
        for save in step.saves:
            saving = _Transfer(save.request_id, step.epoch, step.number, frozenset(save.block_ids))
            with self._changed:
                if len(self._saving) >= _SAVES:
                    self._counts["dropped"] += len(save.keys)
                    continue
                self._saving.add(saving)
            self._saver.submit(self._save, saving, save, ends)

    def ended(self) -> tuple[set[str], set[str]]:
        """(requests whose engine blocks may go, requests whose loads are over), each told once."""
        with self._changed:
            if self._idle:
                self._changed.wait_for(lambda: not self._waiting() or bool(self._loaded), _IDLE_S)
            saving = {each.request_id for each in self._saving}
            released = {request_id for request_id in self._held if request_id not in saving}
            self._held -= released
            loaded, self._loaded = self._loaded, set()
            return released, loaded

    def bad_blocks(self) -> set[int]:
        """Engine blocks that a load has left without their bytes, each told once."""
        with self._changed:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def moved(self) -> int:
        """All transfers of the steps up to this number are over."""
        with self._changed:
            return min((each.number - 1 for each in self._saving | self._loading), default=self._number)

    def counts(self) -> Counter[str]:
        """Blocks by what became of them, since the last call."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
            return counts

    def close(self) -> None:
        """Waits for what is under way, which its deadline ends."""
        self._loaders.shutdown()
        self._saver.shutdown()

    # -- within

    def _waiting(self) -> bool:
        return bool(self._loading or self._saving or self._held)

    def _revoke(self, transfers: set[_Transfer]) -> None:
        """Nothing is copied for these any more when this returns. Called with the lock."""
        for each in transfers:
            each.revoked = True
        self._changed.wait_for(lambda: not any(each.copying for each in transfers))

    @contextmanager
    def _copying(self, transfer: _Transfer) -> Iterator[bool]:
        """Whether the engine blocks of a transfer may be read and written, until the end of the block."""
        with self._changed:
            transfer.copying = not transfer.revoked
        try:
            yield transfer.copying
        finally:
            with self._changed:
                transfer.copying = False
                self._changed.notify_all()

    def _open(self, transfer: _Transfer) -> Any:
        """The namespace of a transfer; None if it was revoked. RuntimeError for blocks that are nobody's."""
        blocks = transfer.block_ids
        if blocks and (min(blocks) <= NULL_BLOCK or max(blocks) >= self._num_blocks):
            raise RuntimeError(f"null block, or no engine block, among those of {transfer.request_id}")
        with self._changed:
            if transfer.revoked or transfer.epoch != self._epoch:
                return None
            if self._namespace is None:
                self._namespace = self._client.namespace(in_epoch(self.layout, self._epoch))
            return self._namespace

    def _load(self, loading: _Transfer, load: Load, ends: float) -> None:
        good = 0
        try:
            with self._guard("load"):
                good = self._fill_pages(loading, load, ends)
        finally:
            with self._changed:
                self._bad_blocks.update(load.block_ids[good:])
                self._counts["loaded"] += good
                self._counts["lost"] += len(load.block_ids) - good
                self._loading.discard(loading)
                if self._asynchronous:
                    self._loaded.add(load.request_id)
                self._changed.notify_all()

    def _fill_pages(self, loading: _Transfer, load: Load, ends: float) -> int:
        """How many leading engine blocks of the load have their bytes."""
        wanted: list[int | None] = [None] * load.skip
        wanted += load.block_ids
        wanted += [None] * (len(load.keys) * self._per_key - len(wanted))
        left_s = ends - time.monotonic()
        namespace = self._open(loading)
        if left_s <= 0 or namespace is None:
            return 0
        done = 0
        per_key, at_once, device = self._per_key, self._pages.at_once, self._pages.device
        with namespace.acquire(load.keys, left_s, device=device, prompt=0) as lease:
            while done < len(lease) and time.monotonic() <= ends:
                last = min(done + at_once, len(lease))
                ids = [wanted[i * per_key : (i + 1) * per_key] for i in range(done, last)]
                with self._copying(loading) as allowed:
                    good = self._pages.load(lease, done, ids) if allowed else 0
                done += good
                if good < len(ids):
                    break
        return min(max(0, done * self._per_key - load.skip), len(load.block_ids))

    def _save(self, saving: _Transfer, save: Save, ends: float) -> None:
        stored = 0
        try:
            with self._guard("save"):
                stored = self._fill_store(saving, save, ends)
        finally:
            with self._changed:
                self._counts["saved"] += stored
                self._counts["not saved"] += len(save.keys) - stored
                self._saving.discard(saving)
                self._changed.notify_all()

    def _fill_store(self, saving: _Transfer, save: Save, ends: float) -> int:
        """How many leading blocks of the save are stored now, or were before."""
        parent, stored = save.parent, 0
        namespace = self._open(saving)
        if namespace is None:
            return 0
        for start in range(0, len(save.keys), _SAVE_BLOCKS):
            keys = save.keys[start : start + _SAVE_BLOCKS]
            left_s = ends - time.monotonic()
            if left_s <= 0:
                break
            tokens, size = save.tokens, self.layout.block_tokens
            if tokens is not None:
                tokens = tokens[start * size : (start + len(keys)) * size]
            with namespace.reserve(keys, parent, left_s, self._pages.device, tokens) as reservation:
                for slot, at in enumerate(reservation.wanted):
                    first = (start + at) * self._per_key
                    with self._copying(saving) as allowed:
                        if not allowed:
                            return stored
                        self._pages.save(reservation, slot, save.block_ids[first : first + self._per_key])
                result = reservation.commit()
            stored += result.stored + result.present
            if result.denied:
                break  # their children would be refused too
            parent = keys[-1]
        return stored


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads run already, so that no later call can fail for want of one."""
    pool, all_there = ThreadPoolExecutor(count, name), threading.Barrier(count)
    for _ in range(count):
        pool.submit(all_there.wait)
    return pool
