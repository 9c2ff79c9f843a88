"""The contract of `StorageTier`: a suite that every kind of tier passes.

A suite of one kind subclasses `TierContract` and gives it a `Rig`: the tier, a way to put blocks into it, and
a way to make it run out of room.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest

from kvstore import arena
from kvstore.core.actions import BlockIds, Probe, Where
from kvstore.core.events import CORRUPT, OK
from kvstore.errors import TierError
from kvstore.tiers.base import Owner, StorageTier
from kvstore.types import ALIGN

EXTENTS = 3
SLOT = 2 * ALIGN
LENGTH = SLOT - 100
NAMES, LENGTHS = {1: bytes(range(16)), 2: bytes(range(1, 17))}, {1: LENGTH, 2: LENGTH}
ONE, TWO = Owner("one", b"1" * 16), Owner("two", b"2" * 16)
WAIT_S = 20.0


class Rig:
    """One tier that is not started, with room for `EXTENTS` extents."""

    tier: StorageTier

    def put(self, identity: BlockIds, where: Where, payloads: Sequence[bytes]) -> None:
        """Stores blocks in slots and waits."""
        raise NotImplementedError

    def full(self) -> AbstractContextManager[Any]:
        """Makes the tier unable to make extents meanwhile."""
        raise NotImplementedError


class Report:
    """A callback, and the calls that it got: arguments and thread."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()
        self._calls: SimpleQueue[Any] = SimpleQueue()

    def __call__(self, argument: Any) -> None:
        self.threads.add(threading.current_thread())
        self._calls.put(argument)

    def next(self) -> Any:
        return self._calls.get(timeout=WAIT_S)

    def all(self) -> list[Any]:
        calls = []
        while True:
            try:
                calls.append(self._calls.get_nowait())
            except Empty:
                return calls


def payload(i: int) -> bytes:
    return (b"block %d of a contract; " % i * LENGTH)[:LENGTH]


def identity(blocks: Sequence[int]) -> BlockIds:
    n = len(blocks)
    words = np.zeros((n, 8), np.uint64)
    words[:, 0] = np.array(blocks) + 1
    seeds = [arena.seed(NAMES[1], words[i].tobytes()[:8], LENGTH) for i in range(n)]
    sums = [arena.checksum(payload(block), seed) for block, seed in zip(blocks, seeds, strict=True)]
    sizes = np.full(n, 8, np.uint8)
    return BlockIds(np.full(n, 1, np.uint16), words, sizes, np.array(sums, np.uint64))


def places(*where: tuple[int, int]) -> Where:
    return Where(np.array([extent << 32 | index for extent, index in where], np.uint64))


class TierContract:
    """Subclasses define a fixture `rig`."""

    def started(self, rig: Rig) -> list[int]:
        ready, ended = Report(), Report()
        rig.tier.start(ready, ended)
        assert ended.next() is None
        return sorted(ready.all())

    def put(self, rig: Rig, extent: int, blocks: Sequence[int]) -> None:
        where = places(*((extent, i) for i in range(len(blocks))))
        rig.put(identity(blocks), where, [payload(block) for block in blocks])

    def probe(self, rig: Rig, extent: int, blocks: Sequence[int]) -> list[int]:
        done = Report()
        where = places(*((extent, i) for i in range(len(blocks))))
        rig.tier.probe(Probe(1, 1, SLOT, identity(blocks), where), NAMES, LENGTHS, done)
        results = done.next()
        assert results.dtype == np.uint8
        assert not done.all(), "results come once"
        return results.tolist()

    def renewed(self, rig: Rig, extent: int) -> int:
        ready, failed = Report(), Report()
        rig.tier.renew(extent, ready, failed)
        number = ready.next()
        assert isinstance(number, int)
        assert not failed.all()
        return number

    def test_start_makes_all_extents_on_threads_of_the_tier(self, rig: Rig) -> None:
        ready, ended = Report(), Report()
        rig.tier.start(ready, ended)
        assert ended.next() is None
        assert len(set(ready.all())) == EXTENTS
        assert not ended.all(), "the end is reported once"
        assert threading.current_thread() not in ready.threads | ended.threads

    def test_grow_makes_other_extents(self, rig: Rig) -> None:
        known = self.started(rig)
        ready, ended = Report(), Report()
        rig.tier.grow(2, ready, ended)
        assert ended.next() is None
        more = ready.all()
        assert len(more) == 2
        assert not set(more) & set(known)
        rig.tier.format(more[1], SLOT, ONE)
        self.put(rig, more[1], [0])
        assert self.probe(rig, more[1], [0]) == [OK]

    def test_an_extent_that_cannot_be_made_is_an_error_and_others_stay(self, rig: Rig) -> None:
        extents = self.started(rig)
        rig.tier.format(extents[0], SLOT, ONE)
        self.put(rig, extents[0], [0])
        ready, ended = Report(), Report()
        with rig.full():
            rig.tier.grow(2, ready, ended)
            assert isinstance(ended.next(), TierError)
        assert not ready.all()
        assert self.probe(rig, extents[0], [0]) == [OK]
        rig.tier.grow(1, ready, ended)
        assert ended.next() is None, "the next attempt succeeds"

    def test_a_probe_has_one_result_a_block_in_order(self, rig: Rig) -> None:
        extent = self.started(rig)[0]
        rig.tier.format(extent, SLOT, ONE)
        self.put(rig, extent, [0, 1, 2])
        assert self.probe(rig, extent, [0, 1, 2]) == [OK, OK, OK]
        results = self.probe(rig, extent, [0, 9, 2])
        assert (results[0], results[2]) == (OK, OK)
        assert results[1] != OK, "another block's bytes"

    def test_bytes_of_one_namespace_are_not_another_namespaces(self, rig: Rig) -> None:
        extent = self.started(rig)[0]
        rig.tier.format(extent, SLOT, ONE)
        self.put(rig, extent, [0])
        one, done = identity([0]), Report()
        two = BlockIds(np.full(1, 2, np.uint16), one.words, one.key_bytes, one.checksum)
        rig.tier.probe(Probe(1, 1, SLOT, two, places((extent, 0))), NAMES, LENGTHS, done)
        assert done.next().tolist() == [CORRUPT]

    def test_a_dropped_slot_can_be_used_again(self, rig: Rig) -> None:
        extent = self.started(rig)[0]
        rig.tier.format(extent, SLOT, ONE)
        self.put(rig, extent, [0, 1])
        rig.tier.drop(identity([0]), places((extent, 0)))
        assert self.probe(rig, extent, [5, 1])[1] == OK, "other slots stay"
        self.put(rig, extent, [7])
        assert self.probe(rig, extent, [7, 1]) == [OK, OK]

    def test_a_renewed_extent_has_nothing_of_its_last_owner(self, rig: Rig) -> None:
        extents = self.started(rig)
        rig.tier.format(extents[0], SLOT, ONE)
        rig.tier.format(extents[1], SLOT, ONE)
        self.put(rig, extents[0], [0, 1])
        self.put(rig, extents[1], [2])
        rig.tier.drop(identity([0, 1]), places((extents[0], 0), (extents[0], 1)))
        number = self.renewed(rig, extents[0])
        assert number not in extents[1:]
        rig.tier.format(number, SLOT, TWO)
        assert OK not in self.probe(rig, number, [0, 1])
        self.put(rig, number, [3])
        assert self.probe(rig, number, [3]) == [OK]
        assert self.probe(rig, extents[1], [2]) == [OK], "other extents stay"

    def test_a_renewal_that_fails_is_reported(self, rig: Rig) -> None:
        extents = self.started(rig)
        ready, failed = Report(), Report()
        with rig.full():
            rig.tier.renew(extents[0], ready, failed)
            assert isinstance(failed.next(), TierError)
        assert not ready.all()

    def test_a_removed_extent_makes_room_for_another(self, rig: Rig) -> None:
        extents = self.started(rig)
        rig.tier.format(extents[0], SLOT, ONE)
        done, ready, ended = Report(), Report(), Report()
        rig.tier.remove(extents[0], done)
        assert done.next() is None
        assert threading.current_thread() not in done.threads
        rig.tier.remove(extents[1], done)
        assert done.next() is None, "an extent that was never cut"
        rig.tier.grow(2, ready, ended)
        assert ended.next() is None
        assert len(set(ready.all()) | {extents[2]}) == EXTENTS

    def test_close_ends_running_work_and_may_be_called_twice(self, rig: Rig) -> None:
        extents = self.started(rig)
        ready, failed = Report(), Report()
        rig.tier.format(extents[0], SLOT, ONE)
        self.put(rig, extents[0], [0])
        rig.tier.close()
        rig.tier.close()
        rig.tier.grow(1, ready, failed)
        assert not ready.all() + failed.all(), "no callback after close"


def refusing(patch: pytest.MonkeyPatch, owner: Any, name: str, error: Callable[[], Exception]) -> None:
    """Replaces a function by one that fails."""

    def refuse(*_: object) -> None:
        raise error()

    patch.setattr(owner, name, refuse)
