"""The half beside the model: moves blocks between the engine's pages and the store, in threads of its own.

Each promise to the scheduler is kept whatever happens: a load that was ordered ends, well or with its engine
blocks reported, and a request that is held is let go once no save of it is left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvstore import Client, Guard, Layout, Room
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


@dataclass(slots=True, eq=False)
class _Saving:
    request_id: str
    revoked: bool = False


class WorkerHalf:
    """Called by the worker around its forward pass; only synchronous loads keep it waiting."""

    def __init__(
        self, client: Client, guard: Guard, pages: Pages, layout: Layout, asynchronous: bool
    ) -> None:
        self.layout = layout
        self._client = client
        self._guard = guard
        self._pages = pages
        self._per_key = layout.block_bytes // pages.block_bytes
        self._asynchronous = asynchronous
        self._namespaces: dict[str, Any] = {}
        self._loaders = _threads(_LOADERS, "kvstore-load")
        self._saver = _threads(1, "kvstore-save")  # one: parents before their children
        self._changed = threading.Condition()
        self._saving: set[_Saving] = set()
        self._reading: _Saving | None = None
        self._held: set[str] = set()
        self._loading = 0
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._idle = False

    # -- hooks, in the order of a step

    def revoke(self, request_ids: Iterable[str]) -> None:
        """Keeps saves from reading these requests' engine blocks. Waits for one block's copy at most."""
        ids = set(request_ids)
        if not ids:
            return
        with self._changed:
            for saving in self._saving:
                saving.revoked |= saving.request_id in ids
            self._changed.wait_for(lambda: self._reading is None or not self._reading.revoked)

    def load(self, step: Step, idle: bool) -> None:
        """Starts the step's loads, or makes them. `idle`: the step computes nothing."""
        self._idle = idle
        ends = time.monotonic() + self._client.deadline_s
        for load in step.loads:
            if self._asynchronous:
                with self._changed:
                    self._loading += 1
                self._loaders.submit(self._load, step.epoch, load, ends)
            else:
                self._load(step.epoch, load, ends)

    def save(self, step: Step) -> None:
        """Starts the step's saves."""
        ends = time.monotonic() + self._client.deadline_s
        self._held.update(step.held)
        for save in step.saves:
            with self._changed:
                if len(self._saving) >= _SAVES:
                    self._counts["dropped"] += len(save.keys)
                    continue
                saving = _Saving(save.request_id)
                self._saving.add(saving)
            self._saver.submit(self._save, step.epoch, saving, save, ends)

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
        return self._loading > 0 or bool(self._held)

    def _namespace(self, epoch: str) -> Any:
        known = self._namespaces.get(epoch)
        if known is None:
            known = self._namespaces[epoch] = self._client.namespace(in_epoch(self.layout, epoch))
        return known

    def _load(self, epoch: str, load: Load, ends: float) -> None:
        good = 0
        try:
            with self._guard("load"):
                good = self._fill_pages(epoch, load, ends)
        finally:
            with self._changed:
                self._bad_blocks.update(load.block_ids[good:])
                self._counts["loaded"] += good
                self._counts["lost"] += len(load.block_ids) - good
                if self._asynchronous:
                    self._loading -= 1
                    self._loaded.add(load.request_id)
                self._changed.notify_all()

    def _fill_pages(self, epoch: str, load: Load, ends: float) -> int:
        """How many leading engine blocks of the load have their bytes."""
        wanted: list[int | None] = [None] * load.skip
        wanted += load.block_ids
        wanted += [None] * (len(load.keys) * self._per_key - len(wanted))
        left_s = ends - time.monotonic()
        if left_s <= 0:
            return 0
        done = 0
        per_key, at_once, device = self._per_key, self._pages.at_once, self._pages.device
        with self._namespace(epoch).acquire(load.keys, left_s, device=device) as lease:
            while done < len(lease) and time.monotonic() <= ends:
                last = min(done + at_once, len(lease))
                ids = [wanted[i * per_key : (i + 1) * per_key] for i in range(done, last)]
                good = self._pages.load(lease, done, ids)
                done += good
                if good < len(ids):
                    break
        return min(max(0, done * self._per_key - load.skip), len(load.block_ids))

    def _save(self, epoch: str, saving: _Saving, save: Save, ends: float) -> None:
        stored = 0
        try:
            with self._guard("save"):
                stored = self._fill_store(epoch, saving, save, ends)
        finally:
            with self._changed:
                self._counts["saved"] += stored
                self._counts["not saved"] += len(save.keys) - stored
                self._saving.discard(saving)
                self._changed.notify_all()

    def _fill_store(self, epoch: str, saving: _Saving, save: Save, ends: float) -> int:
        """How many leading blocks of the save are stored now, or were before."""
        parent, stored = save.parent, 0
        for start in range(0, len(save.keys), _SAVE_BLOCKS):
            keys = save.keys[start : start + _SAVE_BLOCKS]
            left_s = ends - time.monotonic()
            if left_s <= 0:
                break
            tokens, size = save.tokens, self.layout.block_tokens
            if tokens is not None:
                tokens = tokens[start * size : (start + len(keys)) * size]
            namespace, device = self._namespace(epoch), self._pages.device
            with namespace.reserve(keys, parent, left_s, device, tokens) as room:
                for slot, at in enumerate(room.wanted):
                    first = (start + at) * self._per_key
                    if not self._read(saving, room, slot, save.block_ids[first : first + self._per_key]):
                        return stored
                result = room.commit()
            stored += result.stored + result.present
            if result.denied:
                break  # their children would be refused too
            parent = keys[-1]
        return stored

    def _read(self, saving: _Saving, room: Room, slot: int, block_ids: list[int]) -> bool:
        """Fills a slot, unless the engine blocks may be overwritten by now."""
        with self._changed:
            if saving.revoked:
                return False
            self._reading = saving
        try:
            self._pages.save(room, slot, block_ids)
        finally:
            with self._changed:
                self._reading = None
                self._changed.notify_all()
        return True


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads run already, so that no later call can fail for want of one."""
    pool, all_there = ThreadPoolExecutor(count, name), threading.Barrier(count)
    for _ in range(count):
        pool.submit(all_there.wait)
    return pool
