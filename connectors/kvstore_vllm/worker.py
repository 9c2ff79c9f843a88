"""The worker half: copies blocks between pages and the store, on its own threads.

Every load ends, with its pages filled or reported. Every held request is released after its last save.
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
"""Concurrent loads. A load from NVMe mostly waits."""
_SAVES = 1024
"""Queued saves; more are dropped."""
_SAVE_BLOCKS = 64
"""Blocks per reservation: the most that a preemption discards."""
_IDLE_S = 0.002
"""The time that an idle step waits for a transfer, in seconds."""


NULL_BLOCK = 0
"""The page that vLLM uses as a placeholder. It belongs to no request."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A load or save of the pages `block_ids` from step `number`. `copying`: a copy is running."""

    request_id: str
    epoch: str
    number: int
    block_ids: frozenset[int]
    revoked: bool = False
    copying: bool = False


class WorkerHalf:
    """Called by the worker around its forward pass. Only synchronous loads block it."""

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
        self._saver = _threads(1, "kvstore-save")  # one thread: parents before children
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
        """Cancels transfers of pages that the step may write, and transfers from before a reset.

        Waits for at most one copy of each.
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
        """Cancels all transfers. None of them touches pages after the return."""
        with self._changed:
            self._revoke(self._saving | self._loading)

    def load(self, step: Step) -> None:
        """Starts the loads of the step; runs them if they are synchronous."""
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
        """Starts the saves of the step."""
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
        """Returns the released requests and the requests with finished loads, each once."""
        with self._changed:
            if self._idle:
                self._changed.wait_for(lambda: not self._waiting() or bool(self._loaded), _IDLE_S)
            saving = {each.request_id for each in self._saving}
            released = {request_id for request_id in self._held if request_id not in saving}
            self._held -= released
            loaded, self._loaded = self._loaded, set()
            return released, loaded

    def bad_blocks(self) -> set[int]:
        """Returns the pages that failed to load, each once."""
        with self._changed:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def moved(self) -> int:
        """Returns the latest step up to which all transfers have ended."""
        with self._changed:
            return min((each.number - 1 for each in self._saving | self._loading), default=self._number)

    def counts(self) -> Counter[str]:
        """Returns counts of blocks by outcome since the last call."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
            return counts

    def close(self) -> None:
        """Waits for running transfers; their deadlines bound the time."""
        self._loaders.shutdown()
        self._saver.shutdown()

    # -- within

    def _waiting(self) -> bool:
        return bool(self._loading or self._saving or self._held)

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

    def _open(self, transfer: _Transfer) -> Any:
        """Returns the namespace of a transfer; None if it is cancelled.

        Raises RuntimeError for invalid pages.
        """
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
        """Returns the number of leading pages that were loaded."""
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
        """Returns the number of leading blocks that are stored."""
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
                break  # its children would be denied too
            parent = keys[-1]
        return stored


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool with started threads, so that no later submit fails to start one."""
    pool, all_there = ThreadPoolExecutor(count, name), threading.Barrier(count)
    for _ in range(count):
        pool.submit(all_there.wait)
    return pool
