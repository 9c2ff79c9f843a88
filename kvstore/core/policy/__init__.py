"""Eviction policies: which blocks of one pool of a tier should go first.

A policy sees row numbers only. It owns the order; placement owns the verdict (leases, leaf first, copies).
Every operation is a batch of distinct rows and costs amortised O(1) a row.
A new policy is one file here and one line in `POLICIES`, or a class anywhere, named as `module:Class`.
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
    """The order in which blocks leave a tier. Rows are in chain order, parents before children.

    `now` is in seconds and never goes back.
    """

    follows_children: bool
    weighs: bool

    def insert(self, rows: Rows, now: float) -> None:
        """Blocks that this tier now holds."""

    def touch(self, rows: Rows, now: float) -> None:
        """Blocks that were used. Rows that were never inserted are ignored."""

    def remove(self, rows: Rows) -> None:
        """Blocks that have left the tier, or are about to. Unknown rows are ignored."""

    def coldest(self, n: int, now: float, below: float = math.inf) -> Rows:
        """Up to n rows to evict next, the first to go first. Changes nothing but internal bookkeeping.

        A policy that `weighs` knows what blocks earn: it offers none that earns `below` a second or more.
        """

    def defer(self, rows: Rows, parents: bool = False) -> None:
        """These cannot go now: in use, or `parents` that must wait for a child. Do not offer them again soon.

        They come in the order of `coldest`. Unknown rows are ignored.
        """

    def refresh(self, rows: Rows) -> None:
        """Chains that got new blocks: they are to stay as long as those, but this is no use of them.

        Unknown rows are ignored. Only called if `follows_children`: it costs a walk up the chain.
        """

    def cool(self, rows: Rows) -> None:
        """These will not be used again soon: offer them first. Unknown rows are ignored."""

    def __len__(self) -> int:
        """How many rows are known."""

    def ram_bytes(self) -> int:
        """Bytes of state, what is shared by the tier not counted."""


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
"""By name."""


def find(name: str) -> Factory:
    """What makes policies of that name, or of that `module:Class`. Raises MisuseError if there is none."""
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise MisuseError(f"no eviction policy {name!r}", f"one of {', '.join(POLICIES)}, or module:Class")
    try:
        found: Factory = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported
        raise MisuseError(
            f"no eviction policy {name!r}: {type(error).__name__}: {error}",
            f"a class that can be imported, or one of {', '.join(POLICIES)}",
        ) from error
    if not callable(found):
        raise MisuseError(f"eviction policy {name!r} is not a class", "something that takes a Shelf")
    return found


def make(name: str, shelf: PolicyContext) -> Policy:
    """A fresh policy for one pool. Raises MisuseError, see find."""
    return find(name)(shelf)
