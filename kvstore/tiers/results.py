"""Results of blocks that a tier moves or looks at: told once, whatever happens on the way."""

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
    """Whether a slot holds the bytes of block i."""
    seed = arena.seed(fingerprint, identity.key(i), length)
    return arena.checksum(slot[:length], seed) == int(identity.checksum[i])


def begin_for_sure(n: int, begin: Callable[[Done], None], done: Done) -> None:
    """Begins something for n blocks that calls `done` once at its end, with FAILED for all if it raises."""
    left = [True]

    def once(results: Results) -> None:
        try:
            left.pop()  # by one thread alone
        except IndexError:
            _log.error("%d blocks ended twice", n)
        else:
            done(results)

    try:
        begin(once)
    except Exception:
        _log.exception("%d blocks could not be moved, or looked at", n)
        once(np.full(n, FAILED, np.uint8))


def finish_for_sure(n: int, find: Callable[[T], Results], done: Done) -> Callable[[T], None]:
    """A callback that gives `done` what `find` finds for n blocks, or FAILED for all if that raises."""

    def finished(ended: T) -> None:
        results = np.full(n, FAILED, np.uint8)
        try:
            results = find(ended)
        except Exception:
            _log.exception("%d blocks were moved, and what became of them could not be told", n)
        done(results)

    return finished
