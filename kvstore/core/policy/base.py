"""The protocol of eviction policies, and the context that each gets. A policy has one pool of a tier."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.policy.queue import Segments
from kvstore.core.reuse.ghosts import Ghosts
from kvstore.core.reuse.reuse import Reuse


@dataclass(slots=True)
class PolicyContext:
    """Constructor argument of a policy. Pools of a tier share `segments` and `ghosts()`, all share `blocks`.

    The ghost table is allocated by the first call of `ghosts`. Each pool has another `seed`. `recompute_s` is
    the time to recompute one block, by namespace (s; 0: unknown). `reuse` has the histories of all blocks.
    """

    segments: Segments
    blocks: Blocks
    ghosts: Callable[[], Ghosts]
    seed: int
    tenant: int
    recompute_s: npt.NDArray[np.float32]
    reuse: Reuse


class Policy(Protocol):
    """The order in which blocks of one pool are evicted. Rows are in chain order, parents before children.

    `now` is in seconds and never decreases. `follows_children`: the policy wants `refresh`. `weighs`: see
    `coldest`.
    """

    follows_children: bool
    weighs: bool

    def insert(self, rows: Rows, now: float) -> None:
        """Adds blocks that the tier now holds."""

    def touch(self, rows: Rows, now: float) -> None:
        """Records a use of blocks. Rows that were never inserted are ignored."""

    def remove(self, rows: Rows) -> None:
        """Removes blocks that have left the tier or are about to. Unknown rows are ignored."""

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        """Returns up to n rows to evict next, the first to go first. The order stays as it is.

        A policy that `weighs` knows what blocks earn: it returns none that earns `below` uses/s or more.
        """

    def defer(self, rows: Rows, parents: bool = False) -> None:
        """Postpones rows that cannot go now: blocks in use, or `parents` that must wait for a child.

        The rows are in the order of `coldest`, which should not return them again soon. Unknown rows are
        ignored.
        """

    def refresh(self, rows: Rows) -> None:
        """Moves chains that got new blocks behind these blocks in the order. This does not count as a use.

        Unknown rows are ignored. Only called if `follows_children`: it costs a walk up the chain.
        """

    def cool(self, rows: Rows) -> None:
        """Moves rows that will not be used again soon to the front. Unknown rows are ignored."""

    def __len__(self) -> int:
        """Returns the number of rows in the order."""

    def ram_bytes(self) -> int:
        """Returns the bytes of state, without what the pools of a tier share."""
