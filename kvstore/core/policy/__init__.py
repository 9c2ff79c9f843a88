"""Eviction policies: in which order the blocks of one pool of a tier are evicted.

A policy sees row numbers only. It decides the order; `transfers.eviction` decides whether a block may go
(leases, pins, children, copies). Every operation takes a batch of distinct rows and costs amortised O(1) a
row. A new policy is one file here and one line in `POLICIES`, or a class anywhere, named as `module:Class`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Protocol

from kvstore.core.blocks.block_table import Rows
from kvstore.core.policy.arc import ARC
from kvstore.core.policy.gdsf import GDSF
from kvstore.core.policy.hazard import Hazard
from kvstore.core.policy.lfuda import LFUDA
from kvstore.core.policy.lru import LRU
from kvstore.core.policy.pool_view import PolicyContext
from kvstore.core.policy.s3fifo import S3FIFO
from kvstore.core.policy.sieve import SIEVE
from kvstore.errors import MisuseError


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


Factory = Callable[[PolicyContext], Policy]

POLICIES: dict[str, Factory] = {
    "lru": LRU,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "lfuda": LFUDA,
    "gdsf": GDSF,
    "sieve": SIEVE,
    "hazard": Hazard,
}
"""The built-in policies by name."""


def find(name: str) -> Factory:
    """Returns the policy class of a name or `module:Class`. Raises MisuseError if there is none."""
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise MisuseError(f"no eviction policy {name!r}", f"one of {', '.join(POLICIES)}, or module:Class")
    try:
        found: Factory = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # an import may run any code
        raise MisuseError(
            f"no eviction policy {name!r}: {type(error).__name__}: {error}",
            f"a class that can be imported, or one of {', '.join(POLICIES)}",
        ) from error
    if not callable(found):
        raise MisuseError(
            f"eviction policy {name!r} is not a class", "a class whose constructor takes a PolicyContext"
        )
    return found


def make(name: str, context: PolicyContext) -> Policy:
    """Returns a new policy for one pool. Raises MisuseError, see `find`."""
    return find(name)(context)
