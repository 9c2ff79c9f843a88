"""A `Placement` without a daemon: copies between its tiers complete at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.harness import GIB
from kvstore.core import actions as ac
from kvstore.core import events as ev
from kvstore.core.blocks.key_batch import Keys
from kvstore.core.placement import Placement
from kvstore.core.queues.device_queue import TierSpec
from kvstore.types import Geometry, Tier

BLOCK_BYTES = 256 << 10
NAMESPACE, CLIENT = 1, 1
_FOREVER = 1e9

Steps = dict[str, list[float]]
"""CPU time of every step in ms, by event name."""


class Node:
    """DRAM and NVMe tiers of at least these numbers of 256 KiB blocks, with all extents ready.

    If `steps` is set to a dictionary, it records the CPU time of every event.
    """

    def __init__(self, dram_blocks: int, nvme_blocks: int, max_blocks: int, policy: str = "lru") -> None:
        specs = [_spec(Tier.DRAM, dram_blocks), _spec(Tier.NVME, nvme_blocks)]
        self.placement = Placement(specs, max_blocks=max_blocks, seed=1, policy=policy)
        self.steps: Steps | None = None
        self._now = 0.0
        self._request = 0
        for tier, spec in enumerate(specs):
            for extent in range(spec.limit_bytes // spec.extent_bytes):
                self._send(ev.ExtentReady(tier, extent, BLOCK_BYTES))
            self._send(ev.ExtentsEnd(tier))
        self._send(ev.OpenNamespace(0, NAMESPACE, BLOCK_BYTES))

    @property
    def slots(self) -> list[int]:
        """Number of slots of each tier."""
        return [sum(c.total for c in t.slots.classes.values()) for t in self.placement.residency.tiers]

    def acquire(self, keys: Keys) -> tuple[int, int]:
        """Returns a lease and the number of leased leading blocks."""
        grant = self._ask(ev.Acquire(0, CLIENT, NAMESPACE, keys, _FOREVER))
        return grant.lease, len(grant.where)

    def release(self, lease: int) -> None:
        """Ends a lease."""
        self._send(ev.Release(CLIENT, lease))

    def put(self, keys: Keys, parent: bytes) -> int:
        """Reserves and commits in batches like a client. Returns the number of stored blocks."""
        stored = 0
        for start in range(0, keys.n, self.placement.limits.reserve_keys):
            part = keys.take(start, start + self.placement.limits.reserve_keys)
            room = self._ask(ev.Reserve(0, CLIENT, NAMESPACE, part, parent, _FOREVER))
            n = len(room.where)
            if n:
                sums, written = np.zeros(n, np.uint64), np.ones(n, np.bool_)
                stored += int(self._ask(ev.Commit(0, CLIENT, room.lease, sums, written)).value)
            parent = part[part.n - 1]
        return stored

    def lookup(self, keys: Keys) -> int:
        """Returns the length of the stored prefix."""
        return int(self._ask(ev.Lookup(0, NAMESPACE, keys)).value)

    def prefetch(self, keys: Keys) -> int:
        """Prefetches. Returns the number of blocks in DRAM."""
        return int(self._ask(ev.Prefetch(0, NAMESPACE, keys)).value)

    def invalidate(self, keys: Keys) -> int:
        """Invalidates. Returns the number of removed blocks."""
        return int(self._ask(ev.Invalidate(0, NAMESPACE, keys)).value)

    def tick(self) -> None:
        """Advances the time."""
        self._send(ev.Tick())

    def restore(self, chains: Sequence[Keys], first_slot: int) -> None:
        """Restores chains from NVMe records, from a slot on."""
        keys = np.concatenate([chain.array for chain in chains])
        n, width = keys.shape
        parents = np.zeros_like(keys)
        parents[1:] = keys[:-1]
        starts = np.cumsum([0, *(chain.n for chain in chains[:-1])])
        parents[starts] = 0
        parent_bytes = np.full(n, width, np.uint8)
        parent_bytes[starts] = 0
        slots = np.arange(first_slot, first_slot + n)
        each = GIB // BLOCK_BYTES
        self._send(
            ev.Restore(
                1,
                np.full(n, NAMESPACE, np.uint32),
                _wide(keys),
                np.full(n, width, np.uint8),
                _wide(parents),
                parent_bytes,
                (slots // each).astype(np.uint32),
                (slots % each).astype(np.uint32),
                np.ones(n, np.uint64),
                np.zeros(n, np.uint64),
                np.full(n, np.inf),
            )
        )

    def _ask(self, event: Any) -> Any:
        """Returns the answer to a request, after all copies."""
        self._request += 1
        event.request = self._request
        answer = self._send(event)
        assert answer is not None, f"no answer to {type(event).__name__}"
        assert not isinstance(answer, ac.Deny), f"{answer.why}"
        return answer

    def _send(self, event: Any) -> Any:
        todo = deque([event])
        answer = None
        while todo:
            for action in self._step(todo.popleft()):
                if isinstance(action, ac.Copy):
                    todo.append(ev.CopyDone(action.transfer, np.zeros(len(action.identity), np.uint8)))
                elif getattr(action, "request", 0):
                    answer = action
            wake = self.placement.next_wakeup()
            if not todo and wake is not None and wake <= self._now:
                todo.append(ev.Tick())
        return answer

    def _step(self, event: Any) -> list[ac.Action]:
        self._now += 1e-6
        if self.steps is None:
            return self.placement.handle(event, self._now)
        start = time.thread_time_ns()
        actions = self.placement.handle(event, self._now)
        took_ms = (time.thread_time_ns() - start) / 1e6
        self.steps.setdefault(type(event).__name__, []).append(took_ms)
        return actions


def _spec(tier: Tier, blocks: int) -> TierSpec:
    table = tier == Tier.DRAM
    extents = -(-blocks // Geometry(GIB, BLOCK_BYTES, table).slots)
    return TierSpec(tier, extents * GIB, GIB, table)


def _wide(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = np.zeros((len(keys), 64), np.uint8)
    wide[:, : keys.shape[1]] = keys
    return wide
