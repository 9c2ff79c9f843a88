"""Belady's bound with bypass: the most hits that any eviction policy can reach. Exact for prefix hits.

The optimal cache keeps the blocks with the earliest next use. A block is used again no later than its
children, so the cached part of a prompt is always a prefix. The bound therefore counts blocks for each later
request and needs no block numbers. The cost of a request is proportional to its runs of blocks with the same
next use.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.lab.workload import Workload

_NEVER = np.iinfo(np.int32).max


class Bound:
    """Belady's bound for one workload, for any capacity."""

    def __init__(self, workload: Workload) -> None:
        self._runs = _runs(workload)
        self._requests = workload.requests

    def hits(self, capacity: int) -> int:
        """Returns the most blocks that a cache of `capacity` blocks can serve."""
        kept = [0] * self._requests
        farthest: list[int] = []
        total = hits = 0
        for request, uses in enumerate(self._runs):
            hits += kept[request]
            total -= kept[request]
            for later, blocks in uses:
                if not kept[later]:
                    heapq.heappush(farthest, -later)
                kept[later] += blocks
                total += blocks
            while total > capacity:
                last = -farthest[0]
                leaving = min(kept[last], total - capacity)
                kept[last] -= leaving
                total -= leaving
                if not kept[last]:
                    heapq.heappop(farthest)
        return hits


def _runs(workload: Workload) -> list[list[tuple[int, int]]]:
    """Returns, for each request, pairs of (later request, blocks that are next used there)."""
    later = next_uses(workload)
    starts = workload.starts.tolist()
    out = []
    for start, end in pairwise(starts):
        requests, counts = np.unique(later[start:end], return_counts=True)
        out.append([(r, n) for r, n in zip(requests.tolist(), counts.tolist(), strict=True) if r != _NEVER])
    return out


def next_uses(workload: Workload) -> npt.NDArray[np.int32]:
    """Returns, for each access, the next request for the same block; the largest int32 if there is none."""
    later = np.empty(workload.accesses, np.int32)
    seen = np.full(workload.unique_blocks, _NEVER, np.int32)
    starts = workload.starts.tolist()
    for request in range(workload.requests - 1, -1, -1):
        part = slice(starts[request], starts[request + 1])
        blocks = workload.blocks[part]
        later[part] = seen[blocks]
        seen[blocks] = request
    return later
