"""Writes blocks to slab files, then their records to the journal. A block counts once its record is durable.

A crash leaves each slot without a record or with a record that the slot's bytes prove: a record is written
after its bytes are on the device, and a slot is reused after its old record is durably deleted.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.core.actions import BlockIds, Copy, Where
from kvstore.core.events import FAILED, OK
from kvstore.errors import TierError
from kvstore.tiers.base import IOEngine, Memory
from kvstore.tiers.nvme.journal import Journal
from kvstore.tiers.nvme.records import RecordBatch, mapped
from kvstore.tiers.nvme.slabs import Slabs
from kvstore.tiers.nvme.slots import SlotMap, submit_blocks
from kvstore.tiers.results import Done

_log = logging.getLogger(__name__)


class BlockWriter:
    """Writes and drops of one folder. `latest` is the largest time on record, in s since 1970."""

    def __init__(
        self, slots: SlotMap, slabs: Slabs, journal: Journal, engine: IOEngine, clock: Callable[[], float]
    ) -> None:
        """`clock` returns s since 1970."""
        self.latest = 0.0
        self._slots = slots
        self._slabs = slabs
        self._journal = journal
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._sync_extents: set[int] = set()
        self._sync = self._sync_slabs
        self._writing: dict[int, bool] = {}
        self._undurable_drops: dict[int, int] = {}
        self._drops = itertools.count(1)

    def write(
        self,
        copy: Copy,
        slots: Sequence[Memory],
        lengths: dict[int, int],
        done: Done,
        stored_at: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Writes slots, all of DRAM or all of one GPU, and records them. Results as in CopyDone.

        A block that is dropped meanwhile is FAILED. `stored_at` is when each block was stored (s since 1970);
        0, or None for all, means now.
        """
        since = np.zeros(len(slots)) if stored_at is None else stored_at
        written = partial(self._written, copy, lengths, done, since)
        ios = self._slots.ios(copy.identity, copy.target_where, slots, True, lengths)
        with self._lock:
            self._writing.update(dict.fromkeys(copy.target_where.place.tolist(), True))
            undurable = not self._undurable_drops.keys().isdisjoint(copy.target_where.extent.tolist())

        def start(error: Exception | None) -> None:
            try:
                if error is None:
                    submit_blocks(self._engine, ios, written)
                else:
                    written([OSError(str(error))] * len(slots))
            except Exception as failure:
                if not isinstance(failure, TierError):  # a TierError means: closed meanwhile
                    _log.error("a write to NVMe could not be started", exc_info=failure)
                with self._lock:
                    for place in copy.target_where.place.tolist():
                        self._writing.pop(place, None)
                done(np.full(len(slots), FAILED, np.uint8))

        if undurable:
            # Old records may still name these slots, and must never name other bytes.
            self._journal.when_durable(start)
        else:
            start(None)

    def drop(self, identity: BlockIds, where: Where) -> None:
        """Deletes the records of blocks. Writes under way into these slots get no records."""
        number = next(self._drops)
        extents = np.unique(where.extent).tolist()
        with self._lock:
            for place in where.place.tolist():
                if place in self._writing:
                    self._writing[place] = False
            self._undurable_drops.update(dict.fromkeys(extents, number))
            self._journal.delete(where.place)
            self._journal.when_durable(partial(self._dropped, extents, number))

    def _dropped(self, extents: list[int], number: int, error: Exception | None) -> None:
        if error is None:
            with self._lock:
                for extent in extents:
                    if self._undurable_drops.get(extent) == number:
                        del self._undurable_drops[extent]

    def delete_extent(self, extent: int, then: Callable[[Exception | None], None]) -> None:
        """Deletes the record of an unused extent, then calls `then` on the journal's thread."""

        def deleted(error: Exception | None) -> None:
            # Slabs are synced on the journal's thread too, so no sync of this slab is under way.
            with self._lock:
                self._sync_extents.discard(extent)
                self._undurable_drops.pop(extent, None)
            then(error)

        self._journal.delete_extent(extent)
        self._journal.when_durable(deleted)

    def _written(
        self,
        copy: Copy,
        lengths: dict[int, int],
        done: Done,
        since: npt.NDArray[np.float64],
        errors: list[OSError | None],
    ) -> None:
        """Records the blocks that were written and not dropped meanwhile."""
        for error in {str(e) for e in errors if e is not None}:
            _log.error("a write in %s failed: %s", self._slabs.folder, error)
        places = copy.target_where.place.tolist()
        results = np.full(len(errors), FAILED, np.uint8)

        def recorded(error: Exception | None) -> None:
            if error is None:
                results[good] = OK
            else:
                _log.error("%s", error)
            done(results)

        # An earlier drop takes its blocks out of these records. A later drop deletes the records.
        with self._lock:
            wanted = [self._writing.pop(place) for place in places]
            good = [i for i, error in enumerate(errors) if error is None and wanted[i]]
            self._sync_extents.update(copy.target_where.extent[good].tolist())
            try:
                self._journal.put(self._records(copy, good, lengths, since), self._sync, recorded)
            except Exception as error:
                recorded(error)

    def _records(
        self, copy: Copy, good: list[int], lengths: dict[int, int], since: npt.NDArray[np.float64]
    ) -> RecordBatch:
        ids, where = copy.identity.only(np.array(good, np.int64)), Where(copy.target_where.place[good])
        lengths_of = {n: lengths[n] for n in np.unique(ids.namespace).tolist()}
        # Parents get later times than their children, so that latest first means parents first. The time
        # never decreases, even if the clock is set back.
        self.latest = now = max(self._clock(), self.latest + 1e-6 * (len(good) + 1))
        return RecordBatch(
            ids.namespace,
            ids.keys(),
            [copy.parents[i] for i in good],
            where.extent,
            where.index,
            copy.version[good],
            mapped(ids.namespace, lengths_of),
            ids.checksum,
            np.where(since[good] > 0, since[good], now - 1e-6 * np.array(good)),
        )

    def _sync_slabs(self) -> None:
        """Syncs every slab written since the last sync."""
        with self._lock:
            extents, self._sync_extents = self._sync_extents, set()
        try:
            self._slabs.sync(extents)
        except TierError:
            with self._lock:
                self._sync_extents |= extents
            raise
