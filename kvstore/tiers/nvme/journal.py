"""Writes the records of blocks on NVMe. A record never precedes its bytes.

One thread writes. It takes all waiting changes, syncs the data, commits the records in one transaction, and
then reports: single puts when idle, groups under load, because it rests between groups. Records are only read
at start-up. Not covered here: data (`slabs.py`) and the form of records (`records.py`, `store.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvstore.errors import TierError
from kvstore.tiers.nvme.generations import History
from kvstore.tiers.nvme.records import ID, Blocks, Places, RecordBatch, deletions, merged
from kvstore.tiers.nvme.store import (
    GENERATIONS,
    TABLES,
    Changes,
    Items,
    Loaded,
    Namespace,
    RecordStore,
    epoch_item,
    pack_extent,
)

__all__ = ["Blocks", "Journal", "Loaded", "Namespace", "RecordBatch"]

_log = logging.getLogger(__name__)

GROUP_RECORDS = 8192
WAITING_RECORDS = 1 << 17
_REST_S = 0.010
"""The least time between the starts of two groups. Syncs and commits cost as much for one put as for many."""
_MOST_WAITING = 64  # changes, which end a rest

Sync: TypeAlias = Callable[[], None]
Done: TypeAlias = Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class _Put:
    records: RecordBatch
    sync: Sync
    done: Done
    refused: TierError | None = None

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True, slots=True)
class _Change:
    table: str
    items: Items

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class _Deletion:
    places: Places

    def __len__(self) -> int:
        return len(self.places)


_Operation: TypeAlias = _Put | _Change | _Deletion


class Journal:
    """The records of one folder, locked against other daemons. Any thread may call.

    `extent_bytes` is the size that the folder was made with. `history` has the generations on record at
    opening; `problems` are those found then.
    """

    def __init__(self, folder: Path, store: RecordStore, wake: Callable[[], None] | None = None) -> None:
        """Starts the writer thread. With `wake`, which is called for new work, the caller runs `step`."""
        self.extent_bytes = store.extent_bytes
        self.history = store.history
        self.problems = store.problems
        self._folder = folder
        self._store = store
        self._ready = threading.Condition()
        self._queue: deque[_Operation] = deque()
        self._waiting_records = 0
        self._closing = False
        self._rests_until = 0.0
        self._resting = False
        self._owed: Changes = _empty()
        self._wake = wake or self._wake_writer
        self._writer = threading.Thread(target=self._write, name="kvstore-journal", daemon=True)
        if wake is None:
            self._writer.start()

    @classmethod
    def open(cls, folder: Path, extent_bytes: int, map_bytes: int = 8 << 30) -> Journal:
        """Locks the folder, made if absent, and opens its records. Errors: see `RecordStore`."""
        return cls(folder, RecordStore(folder, extent_bytes, map_bytes))

    def put_generations(self, history: History) -> None:
        """Records the history of generations, after all earlier changes, no later than any later put."""
        self._change("meta", {GENERATIONS: history.pack()})

    def load(self) -> Loaded:
        """Returns all durable records. Blocks writes for about 0.5 s a million records."""
        return self._store.load()

    def renew(self, loaded: Loaded) -> None:
        """Replaces all records by those loaded. No change may wait. See `RecordStore.renew`."""
        self._store.renew(loaded)

    def put(self, records: RecordBatch, sync: Sync, done: Done) -> None:
        """Records blocks whose bytes `sync` makes durable. A record of the same slot is replaced.

        The writer's thread calls `sync`, once for all puts of a group with an equal one, commits all records,
        and calls `done(None)`. If the sync, the commit or the packing fails, or `WAITING_RECORDS` wait
        already, `done` gets the error and no record of the batch is written. The batch must not change until
        then. TierError after `close`.
        """
        with self._ready:
            put = _Put(records, sync, done)
            if len(records) and self._waiting_records + len(records) > WAITING_RECORDS:
                refused = TierError(
                    f"{self._waiting_records} records wait for {self._folder}", "a slow disk?"
                )
                put = _Put(_NOTHING, _no_sync, done, refused)
            self._waiting_records += len(put.records)
            self._enqueue(put)

    def delete(self, places: Places) -> None:
        """Deletes the records of slots, if any, before any later put. The slots can be reused then.

        Never refused, because no more slots can wait than there are records. The next commit repeats the
        deletions of a failed one.
        """
        with self._ready:
            self._enqueue(_Deletion(places))

    def put_namespace(self, ns_id: int, namespace: Namespace) -> None:
        """Records the namespace of an id, no later than any later put.

        Its epoch, too: one record for all ids of the fingerprint, which `delete_namespace` keeps.
        """
        self._change("namespaces", {ID.pack(ns_id): namespace.pack()})
        self._change("meta", epoch_item(namespace))

    def delete_namespace(self, ns_id: int) -> None:
        """Deletes the namespace of an id, but not its blocks."""
        self._change("namespaces", {ID.pack(ns_id): None})

    def put_extent(self, extent: int, slot_bytes: int, tenant: str) -> None:
        """Records the slot size and the tenant of an extent, no later than any later put."""
        self._change("extents", {ID.pack(extent): pack_extent(slot_bytes, tenant)})

    def delete_extent(self, extent: int) -> None:
        """Deletes an extent's record, but not those of its blocks."""
        self._change("extents", {ID.pack(extent): None})

    def when_durable(self, done: Done) -> None:
        """Calls `done` on the writer's thread when all earlier changes are durable, or with the error."""
        self.put(_NOTHING, _no_sync, done)

    def drain(self) -> None:
        """Returns when all earlier changes are durable. Raises TierError if one is not."""
        ended = threading.Event()
        errors: list[Exception | None] = []

        def done(error: Exception | None) -> None:
            errors.append(error)
            ended.set()

        self.when_durable(done)
        ended.wait()
        if errors[0] is not None:
            raise errors[0]

    def close(self) -> None:
        """Writes all waiting changes and closes the records. A second call does nothing."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        if self._writer.is_alive():
            self._writer.join()
        while self.step():
            pass
        if self._owed:
            _log.error(
                "%s: deletions were not written, those blocks come back at the next start", self._folder
            )
        self._store.close()

    def _change(self, table: str, items: Items) -> None:
        with self._ready:
            self._enqueue(_Change(table, items))

    def _enqueue(self, operation: _Operation) -> None:
        if self._closing:
            raise TierError(f"the journal of {self._folder} is closed")
        self._queue.append(operation)
        self._wake()

    def _write(self) -> None:
        while self._wait():
            self.step()

    def _wait(self) -> bool:
        """Waits for work and for the end of a rest. Returns False once closed and drained."""
        with self._ready:
            self._ready.wait_for(lambda: self._queue or self._closing)
            rest_s = self._rests_until - time.monotonic()
            if rest_s > 0:
                self._resting = True
                self._ready.wait_for(lambda: len(self._queue) >= _MOST_WAITING or self._closing, rest_s)
                self._resting = False
            self._rests_until = time.monotonic() + _REST_S
            return bool(self._queue)

    def _wake_writer(self) -> None:
        if not self._resting or len(self._queue) >= _MOST_WAITING:
            self._ready.notify()

    def step(self) -> bool:
        """Writes one group of waiting changes and reports it. Returns False if nothing waited."""
        group = self._take()
        for done, error in self._write_group(group) if group else ():
            try:
                done(error)
            except Exception:
                _log.exception("a completion callback failed")
        return bool(group)

    def _take(self) -> list[_Operation]:
        """Takes waiting changes, oldest first, about `GROUP_RECORDS` at most."""
        group: list[_Operation] = []
        size = 0
        with self._ready:
            while self._queue and size < GROUP_RECORDS:
                operation = self._queue.popleft()
                group.append(operation)
                size += len(operation)
                if isinstance(operation, _Put):
                    self._waiting_records -= len(operation)
        return group

    def _write_group(self, group: list[_Operation]) -> list[tuple[Done, Exception | None]]:
        """Makes a group durable in one transaction. Returns the outcome of each put, in order."""
        owed = self._owed
        changes = Changes({table: dict(items) for table, items in owed.tables.items()}, list(owed.slots))
        outcomes: dict[Sync, Exception | None] = {}
        answers: list[tuple[Done, Exception | None]] = []
        for operation in group:
            if isinstance(operation, _Change):
                for each in (changes, owed):
                    each.tables[operation.table].update(operation.items)
                continue
            if isinstance(operation, _Deletion):
                gone = deletions(operation.places)
                changes.slots.append(gone)
                owed.slots.append(gone)
                continue
            error: Exception | None = operation.refused
            try:
                records = operation.records.pack()
                if operation.sync not in outcomes:
                    outcomes[operation.sync] = _outcome(operation.sync)
                error = error or outcomes[operation.sync]
                if error is None:
                    changes.slots.append(records)
            except Exception as failure:
                error = failure
            answers.append((operation.done, error))
        try:
            self._store.commit(changes)
        except Exception as failure:
            hint = "is there room on the disk? dmesg tells whether the device fails"
            lost = TierError(f"cannot write records in {self._folder}: {failure}", hint)
            owed.slots = [merged(owed.slots)]
            return [(done, error or lost) for done, error in answers]
        self._owed = _empty()
        return answers


def _outcome(sync: Sync) -> Exception | None:
    try:
        sync()
    except Exception as error:
        return error
    return None


def _no_sync() -> None:
    pass


def _empty() -> Changes:
    return Changes({table: {} for table in TABLES})


_NOTHING = RecordBatch((), (), (), (), (), (), (), (), ())
