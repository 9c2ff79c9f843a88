"""The most that any policy can serve: Belady's rule with bypass, exact for prefix hits.

Of all that was used so far, those blocks are kept whose next use comes soonest. A block's next use never
comes after its children's, so what is kept of a prompt is always its start, and only numbers count: how many
blocks are kept for which later request. A request costs a few steps for each run of blocks with the same next
use.
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
        """Blocks that a cache of so many blocks serves at best."""
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
    """For each request, (a later request, how many of its blocks are used there next)."""
    later = next_uses(workload)
    starts = workload.starts.tolist()
    out = []
    for start, end in pairwise(starts):
        requests, counts = np.unique(later[start:end], return_counts=True)
        out.append([(r, n) for r, n in zip(requests.tolist(), counts.tolist(), strict=True) if r != _NEVER])
    return out


def next_uses(workload: Workload) -> npt.NDArray[np.int32]:
    """For each access, the number of the next request for the same block, or the largest number if none."""
    later = np.empty(workload.accesses, np.int32)
    seen = np.full(workload.unique_blocks, _NEVER, np.int32)
    starts = workload.starts.tolist()
    for request in range(workload.requests - 1, -1, -1):
        part = slice(starts[request], starts[request + 1])
        blocks = workload.blocks[part]
        later[part] = seen[blocks]
        seen[blocks] = request
    return later
