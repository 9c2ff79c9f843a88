"""A kind of tier that kvstore does not have: memory behind a CXL switch, here byte arrays.

Shows what a new kind needs: this file, its movers, and its registration in a daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from kvstore import arena
from kvstore.core.actions import BlockIds, Copy, Probe, Where
from kvstore.core.events import CORRUPT, OK
from kvstore.errors import TierError
from kvstore.tiers.base import DEFAULT_OWNER, Ended, Owner, Ready
from kvstore.tiers.job_thread import ExtentJobs
from kvstore.tiers.results import Done, Results, finish_for_sure, verify

KIND = "cxl"


class CxlTier:
    """A `StorageTier` of byte arrays."""

    kind = KIND
    persistent = True

    def __init__(self, limit_bytes: int, extent_bytes: int, most_extents: int = 100) -> None:
        """No more than `most_extents` can be made, whatever the limit is."""
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        self.most_extents = most_extents
        self.owners: dict[int, Owner] = {}
        self._memory: dict[int, memoryview] = {}
        self._slot_bytes: dict[int, int] = {}
        self._next = 0
        self._jobs = ExtentJobs("cxl")

    def start(self, ready: Ready, ended: Ended) -> None:
        self.grow(self.limit_bytes // self.extent_bytes, ready, ended)

    def grow(self, count: int, ready: Ready, ended: Ended) -> None:
        self._jobs.make(count, self._new, ready, ended)

    def _new(self) -> int:
        if len(self._memory) == self.most_extents:
            raise TierError("no memory behind the switch")
        number, self._next = self._next, self._next + 1
        self._memory[number] = memoryview(bytearray(self.extent_bytes))
        return number

    def format(self, extent: int, slot_bytes: int, owner: Owner = DEFAULT_OWNER) -> None:
        self._slot_bytes[extent] = slot_bytes
        self.owners[extent] = owner

    def renew(self, extent: int, ready: Ready, failed: Callable[[TierError], None]) -> None:
        self._jobs.renew(partial(self._free, extent), self._new, ready, failed)

    def remove(self, extent: int, done: Ended) -> None:
        self._jobs.remove(partial(self._free, extent), done)

    def _free(self, extent: int) -> None:
        for known in (self._memory, self._slot_bytes, self.owners):
            known.pop(extent, None)

    def drop(self, identity: BlockIds, where: Where) -> None:
        for slot in self.slots(where):
            slot[:] = bytes(len(slot))

    def slots(self, where: Where) -> list[memoryview]:
        places = zip(where.extent.tolist(), where.index.tolist(), strict=True)
        return [self._memory[e][i * self._slot_bytes[e] :][: self._slot_bytes[e]] for e, i in places]

    def move(
        self,
        identity: BlockIds,
        sources: list[memoryview] | None,
        targets: list[memoryview],
        names: dict[int, bytes],
        lengths: dict[int, int],
        done: Done,
    ) -> None:
        """Copies and verifies on the tier's thread; without `sources`, only verifies."""

        def find(_: None) -> Results:
            good = []
            for i, (number, target) in enumerate(zip(identity.namespace.tolist(), targets, strict=True)):
                if sources is not None:
                    arena.copy(target[: lengths[number]], sources[i][: lengths[number]])
                good.append(verify(identity, i, target, names[number], lengths[number]))
            return np.where(good, OK, CORRUPT).astype(np.uint8)

        self._jobs.submit(finish_for_sure(len(targets), find, done), None)

    def probe(
        self, probe: Probe, fingerprints: dict[int, bytes], lengths: dict[int, int], done: Done
    ) -> None:
        self.move(probe.identity, None, self.slots(probe.where), fingerprints, lengths, done)

    def close(self) -> None:
        self._jobs.close()


def between(source: object, target: object, job: object) -> None:
    """The mover from and to DRAM."""
    cxl = source if isinstance(source, CxlTier) else target
    copy: Copy = job.copy  # type: ignore[attr-defined]
    sources, targets = source.slots(copy.source_where), target.slots(copy.target_where)  # type: ignore[attr-defined]
    assert isinstance(cxl, CxlTier)
    cxl.move(copy.identity, sources, targets, job.fingerprints, job.lengths, job.done)  # type: ignore[attr-defined]
