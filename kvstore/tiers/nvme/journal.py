"""Puts what is on NVMe on record, so that a record never precedes its bytes.

One thread writes. It takes all that waits, makes the data durable, commits the records in one transaction,
and only then reports: one put at a time when idle, groups under load. Look-ups never come here; what is
recorded is read once, at start. Not here: the data (`slabs.py`), the records (`records.py`, `store.py`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvstore.errors import MisuseError, TierError
from kvstore.tiers.nvme.records import ID, Blocks, RecordBatch
from kvstore.tiers.nvme.store import (
    GENERATION,
    NUMBER,
    TABLES,
    Changes,
    Loaded,
    Namespace,
    RecordStore,
    pack_extent,
)

__all__ = ["Blocks", "Journal", "Loaded", "Namespace", "RecordBatch"]

_log = logging.getLogger(__name__)

GROUP_RECORDS = 8192
WAITING_RECORDS = 1 << 17

Sync: TypeAlias = Callable[[], None]
Done: TypeAlias = Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class _Put:
    records: RecordBatch
    sync: Sync
    done: Done
    refused: TierError | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    table: str
    items: dict[bytes, bytes | None]


class Journal:
    """The records of one folder, which no other daemon can open meanwhile. Any thread may call.

    `extent_bytes` is what the folder was made with, whatever `open` was asked for.
    """

    def __init__(self, folder: Path, store: RecordStore, wake: Callable[[], None] | None = None) -> None:
        """Starts the writer; with `wake`, which is called when there is work, somebody else calls `step`."""
        self.extent_bytes = store.extent_bytes
        self._folder = folder
        self._store = store
        self._ready = threading.Condition()
        self._queue: deque[_Put | _Change] = deque()
        self._waiting_records = 0
        self._closing = False
        self._owed: Changes = _empty()
        self._wake = wake or self._ready.notify
        self._writer = threading.Thread(target=self._write, name="kvstore-journal", daemon=True)
        if wake is None:
            self._writer.start()

    @classmethod
    def open(cls, folder: Path, extent_bytes: int, map_bytes: int = 8 << 30) -> Journal:
        """Locks the folder, made if absent, and opens its records. See `RecordStore` for the errors."""
        return cls(folder, RecordStore(folder, extent_bytes, map_bytes))

    @property
    def problems(self) -> list[str]:
        """What was wrong with the folder when it was opened."""
        return self._store.problems

    @property
    def generation(self) -> int:
        """The one that was on record when the folder was opened."""
        return self._store.generation

    def put_generation(self, generation: int) -> None:
        """Records another, no later than any later put."""
        self._change("meta", {GENERATION: NUMBER.pack(generation)})

    def load(self) -> Loaded:
        """Everything that is durable: about a second a million records, in which nothing is written."""
        return self._store.load()

    def put(self, records: RecordBatch, sync: Sync, done: Done) -> None:
        """Records blocks whose bytes `sync` makes durable. A record of the same key is replaced.

        On the writer's thread: `sync` is called, once for all puts of a group that pass an equal one; then
        all records are committed; then `done(None)`. If the sync, the commit or the packing failed, or more
        than `WAITING_RECORDS` wait already, `done` gets the error and none of these records is written.
        The batch must not change until then. TierError after `close`.
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

    def delete(self, ns_id: int, keys: Sequence[bytes]) -> None:
        """Forgets blocks, known or not. Written before any later put, so that their slots can be given again.

        Never refused: no more keys can wait than there are records. What a failed commit left is made up for
        by the next.
        """
        prefix = ID.pack(ns_id)
        self.forget([prefix + key for key in keys])

    def forget(self, raw: Sequence[bytes]) -> None:
        """`delete` by the keys that the records have in their table."""
        self._change("blocks", dict.fromkeys(raw))

    def put_namespace(self, ns_id: int, namespace: Namespace) -> None:
        """Records what an id stands for, no later than any later put."""
        self._change("namespaces", {ID.pack(ns_id): namespace.pack()})

    def delete_namespace(self, ns_id: int) -> None:
        """Forgets what an id stands for, but not its blocks."""
        self._change("namespaces", {ID.pack(ns_id): None})

    def put_extent(self, extent: int, slot_bytes: int, tenant: str) -> None:
        """Records an extent, its slot size and whose it is, no later than any later put."""
        self._change("extents", {ID.pack(extent): pack_extent(slot_bytes, tenant)})

    def delete_extent(self, extent: int) -> None:
        """Forgets an extent, but not its blocks."""
        self._change("extents", {ID.pack(extent): None})

    def when_durable(self, done: Done) -> None:
        """Calls `done` on the writer's thread when all given so far is durable, or with the error."""
        self.put(_NOTHING, _no_sync, done)

    def drain(self) -> None:
        """Returns when all that was given so far was written or refused. TierError if a change could not."""
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
        """Writes all that waits, closes the records and unlocks the folder. Closing twice does nothing."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        if self._writer.is_alive():
            self._writer.join()
        while self.step():
            pass
        if any(self._owed.values()):
            _log.error(
                "%s: deletions were not written, those blocks come back at the next start", self._folder
            )
        self._store.close()

    def _change(self, table: str, items: dict[bytes, bytes | None]) -> None:
        with self._ready:
            self._enqueue(_Change(table, items))

    def _enqueue(self, operation: _Put | _Change) -> None:
        if self._closing:
            raise TierError(f"the journal of {self._folder} is closed")
        self._queue.append(operation)
        self._wake()

    def _write(self) -> None:
        while self._wait():
            self.step()

    def _wait(self) -> bool:
        """Waits for work; False once closed and drained."""
        with self._ready:
            self._ready.wait_for(lambda: self._queue or self._closing)
            return bool(self._queue)

    def step(self) -> bool:
        """Writes one group of what waits and reports it; False if nothing waited."""
        group = self._take()
        for done, error in self._write_group(group) if group else ():
            try:
                done(error)
            except Exception:
                _log.exception("a completion callback failed")
        return bool(group)

    def _take(self) -> list[_Put | _Change]:
        """What waits, oldest first and of bounded size."""
        group: list[_Put | _Change] = []
        size = 0
        with self._ready:
            while self._queue and size < GROUP_RECORDS:
                operation = self._queue.popleft()
                group.append(operation)
                if isinstance(operation, _Put):
                    self._waiting_records -= len(operation.records)
                    size += len(operation.records)
                else:
                    size += len(operation.items)
        return group

    def _write_group(self, group: list[_Put | _Change]) -> list[tuple[Done, Exception | None]]:
        """Makes a group durable as one transaction: what each put is to be told, in their order."""
        changes = {table: dict(items) for table, items in self._owed.items()}
        owed = self._owed
        outcomes: dict[Sync, Exception | None] = {}
        answers: list[tuple[Done, Exception | None]] = []
        for operation in group:
            if isinstance(operation, _Change):
                changes[operation.table].update(operation.items)
                owed[operation.table].update(operation.items)
                continue
            error: Exception | None = operation.refused
            try:
                pairs = operation.records.pack()
                if operation.sync not in outcomes:
                    outcomes[operation.sync] = _outcome(operation.sync)
                error = error or outcomes[operation.sync]
                if error is None:
                    changes["blocks"].update(pairs)
            except MisuseError as misuse:
                error = misuse
            answers.append((operation.done, error))
        try:
            self._store.commit(changes)
        except Exception as failure:
            lost = TierError(
                f"cannot write records in {self._folder}: {failure}", "is there room on the disk?"
            )
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
    return {table: {} for table in TABLES}


_NOTHING = RecordBatch((), (), (), (), (), (), (), (), ())
