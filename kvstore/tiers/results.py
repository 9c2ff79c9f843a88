"""Results of copies and probes: reported exactly once, also after an exception."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import arena, native
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


def verify_all(
    identity: BlockIds,
    which: Sequence[int],
    slots: Sequence[memoryview],
    fingerprints: Mapping[int, bytes],
    lengths: Mapping[int, int],
    sources: Sequence[memoryview] | None = None,
) -> npt.NDArray[np.bool_]:
    """Returns which of these blocks have their bytes in their slots, after a copy from `sources` if given.

    `slots`, `sources`: by block. `fingerprints`, `lengths`: by namespace. Takes one call without the GIL.
    """
    numbers = identity.namespace.tolist()
    sizes = [lengths[numbers[i]] for i in which]
    seeds = [
        arena.seed(fingerprints[numbers[i]], identity.key(i), size)
        for i, size in zip(which, sizes, strict=True)
    ]
    table = native.whole(sizes, np.array(seeds, np.uint64))
    targets = [slots[i] for i in which]
    if sources is None:
        native.sums(targets, table)
    else:
        native.copy_out(targets, [sources[i] for i in which], table)
    sums: npt.NDArray[np.uint64] = table["sum"]
    expected: npt.NDArray[np.uint64] = identity.checksum[list(which)]
    good: npt.NDArray[np.bool_] = sums == expected
    return good


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
