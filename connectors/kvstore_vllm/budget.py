"""What a load may take: the time in which the engine would compute what it replaces."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore import Estimate, Layout
from kvstore_vllm.groups import Group

_SHARE = 0.9
"""The part of the computing time that a load may take by estimate. The rest is a margin for errors."""
_LEAST_S = 1e-9
"""A speed of 0 would be unknown to the daemon."""
_PATIENCE = 2.0
"""A load that takes this multiple of the computing time is given up."""
_PATIENCE_LEAST_S = 0.1
"""The least time of a load."""


def estimates(
    compute_s: float | None,
    groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout]],
    computed_tokens: int,
    tokens: int,
    load_s: float,
) -> list[list[Estimate | None]]:
    """Returns what a lookup of each worker's groups says of loading tokens `computed_tokens` to `tokens`.

    `compute_s`: the time to compute them; None: unknown, so nothing is estimated. `layouts`: of each worker,
    by group. `load_s`: the longest time of a load. The blocks of all groups and workers load together, so
    they share the computing time by their bytes.
    """
    nbytes = sum(
        _blocks(group, computed_tokens, tokens) * shard[group.number].block_bytes
        for shard in layouts
        for group in groups
    )
    if compute_s is None or not nbytes:
        return [[None for _ in shard] for shard in layouts]
    byte_s = _SHARE * compute_s / nbytes

    def estimate(layout: Layout) -> Estimate:
        have = computed_tokens // layout.block_tokens
        return Estimate(max(_LEAST_S, byte_s * layout.block_bytes), load_s, have)

    return [[estimate(layout) for layout in shard] for shard in layouts]


def patience_s(compute_s: float | None, deadline_s: float) -> float:
    """Returns how long to wait for a load of what takes `compute_s` to compute (None: unknown).

    It bounds what is lost if the estimate of the load was wrong, for example of a device that is tried again.
    """
    if compute_s is None:
        return deadline_s
    return min(deadline_s, max(_PATIENCE_LEAST_S, _PATIENCE * compute_s))


def seconds_left(ends: float) -> float:
    """Returns the seconds until `ends` (monotonic clock). Raises TimeoutError if there are none."""
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline of the transfer has passed")
    return left


def _blocks(group: Group, computed_tokens: int, tokens: int) -> int:
    """Returns how many blocks of a group a load of these tokens takes."""
    first = max(computed_tokens // group.block_tokens, group.first_needed(tokens))
    return max(0, tokens // group.block_tokens - first)
