"""Results of copies and probes: reported exactly once, also after an exception."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import arena
from kvstore.core.actions import BlockIds
from kvstore.core.events import FAILED

_log = logging.getLogger(__name__)

T = TypeVar("T")

Results: TypeAlias = npt.NDArray[np.uint8]
"""One outcome a block, as in CopyDone."""

Done: TypeAlias = Callable[[Results], None]


def verify(identity: BlockIds, i: int, slot: memoryview, fingerprint: bytes, length: int) -> bool:
    """Returns whether a slot holds the bytes of block i."""
    seed = arena.seed(fingerprint, identity.key(i), length)
    return arena.checksum(slot[:length], seed) == int(identity.checksum[i])


def begin_for_sure(n: int, begin: Callable[[Done], None], done: Done) -> None:
    """Calls `begin`, which calls its argument at its end. `done` gets n times FAILED if `begin` raises."""
    left = [True]

    def once(results: Results) -> None:
        try:
            left.pop()  # succeeds on one thread
        except IndexError:
            _log.error("%d blocks ended twice", n)
        else:
            done(results)

    try:
        begin(once)
    except Exception:
        _log.exception("%d blocks could not be moved or verified", n)
        once(np.full(n, FAILED, np.uint8))


def finish_for_sure(n: int, find: Callable[[T], Results], done: Done) -> Callable[[T], None]:
    """Returns a callback that passes the results of `find` to `done`, or FAILED for n blocks if it raises."""

    def finished(ended: T) -> None:
        results = np.full(n, FAILED, np.uint8)
        try:
            results = find(ended)
        except Exception:
            _log.exception("the results of %d blocks could not be determined", n)
        done(results)

    return finished
