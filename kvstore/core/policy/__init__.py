"""Eviction policies: in which order the blocks of one pool of a tier are evicted.

A policy sees row numbers only. It decides the order; `transfers.eviction` decides whether a block may go
(leases, pins, children, copies). Every operation takes a batch of distinct rows and costs amortised O(1) a
row. A new policy is one file here and one line in `POLICIES`, or a class anywhere, named as `module:Class`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from kvstore.core.policy.arc import ARC
from kvstore.core.policy.base import Policy, PolicyContext
from kvstore.core.policy.gdsf import GDSF
from kvstore.core.policy.hazard import Hazard
from kvstore.core.policy.lfuda import LFUDA
from kvstore.core.policy.lru import LRU
from kvstore.core.policy.s3fifo import S3FIFO
from kvstore.core.policy.sieve import SIEVE
from kvstore.errors import MisuseError

__all__ = ["POLICIES", "Factory", "Policy", "PolicyContext", "find", "make"]

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
