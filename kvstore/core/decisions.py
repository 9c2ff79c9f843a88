"""What was decided about blocks lately: given up, refused, not written down. A ring, so that it stays small.

A record names its block by a secret hash of the key, as wide as the index's: nothing is asked of it but what
became of a key, and that is rare. Looking one up reads the whole ring.

Not covered: why a policy ordered blocks as it did; what was expected of them is kept, as far as it is known.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks import Blocks, Rows
from kvstore.core.index import Index
from kvstore.core.keys import Keys
from kvstore.core.reuse import Reuse

CAPACITY = 1 << 16
"""Records that are kept: 25 bytes each, 1.6 MiB in all once all are used."""

EVERY_TIER = 0xFF
NO_CLASS = 0xFF
NOBODY = -1

_MOST_SHOWN = 256
_MOST_SHOWN_OF_ONE = 8


class What(IntEnum):
    """What was decided, and why."""

    EVICTED = 1
    """The copy made way; another tier keeps one."""
    DEMOTED = 2
    """The copy made way once it was written down."""
    DROPPED = 3
    """The last copy of a leaf made way."""
    REFUSED = 4
    """Admission kept it out of the tier, or it was worth less than what is there."""
    DENIED = 5
    """There was no room for it."""
    UNWRITTEN = 6
    """The device took no more: it was not written down."""
    INVALIDATED = 7
    """A client said so."""
    EXPIRED = 8
    """Its time was over."""
    QUARANTINED = 9
    """The copy was bad, and its slot is used no more."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One record. `tier` None: all of them. `score` (uses/s expected), `kind` (its class) None: unknown."""

    what: What
    tier: int | None
    at: float
    score: float | None
    kind: int | None


_RECORD = np.dtype(
    [("at", "<f8"), ("score", "<f4"), ("namespace", "<u2"), ("tier", "u1"), ("what", "u1"), ("kind", "u1")]
)


class Decisions:
    """The latest `capacity` decisions about blocks of one index.

    `blocks_by_what`: how many blocks each was about since the start, by what and tier (or `EVERY_TIER`).
    """

    def __init__(self, blocks: Blocks, index: Index, reuse: Reuse, capacity: int = CAPACITY) -> None:
        self._blocks = blocks
        self._index = index
        self._reuse = reuse
        self._who = np.zeros(capacity, np.uint64)
        self._records = np.zeros(capacity, _RECORD)
        self._written = 0
        self.blocks_by_what: Counter[tuple[What, int]] = Counter()

    def __len__(self) -> int:
        return min(self._written, len(self._who))

    def record(self, what: What, tier: int, rows: Rows, now: float, tenant: int = NOBODY) -> None:
        """This was decided about rows, which still have their keys, in a tier (or `EVERY_TIER`).

        With their `tenant`, what was expected of them then is kept too.
        """
        if len(rows):
            kinds, score = self._reuse.kinds(rows), np.full(len(rows), np.nan, np.float32)
            if tenant != NOBODY:
                score = self._reuse.density(tenant, kinds, self._reuse.last_used(rows), now)
            marks, namespaces = self._index.fingerprints(rows), self._blocks.namespace[rows]
            self._append(what, tier, namespaces, marks, now, score, self._reuse.classes(rows))

    def record_keys(
        self, what: What, tier: int, namespace: int, keys: Keys, which: npt.NDArray[np.bool_], now: float
    ) -> None:
        """The same for marked keys of a request, which may have no rows."""
        if which.any():
            marks = self._index.fingerprints_of(keys)[which]
            self._append(what, tier, namespace, marks, now, math.nan, NO_CLASS)

    def _append(
        self,
        what: What,
        tier: int,
        namespaces: int | npt.NDArray[np.uint16],
        marks: npt.NDArray[np.uint64],
        now: float,
        score: float | npt.NDArray[np.float32],
        kind: int | npt.NDArray[np.int64],
    ) -> None:
        self.blocks_by_what[what, tier] += len(marks)
        capacity = len(self._who)
        records = np.empty(len(marks), _RECORD)
        records["at"], records["score"], records["namespace"] = now, score, namespaces
        records["tier"], records["what"], records["kind"] = tier, what, kind
        marks, records = marks[-capacity:], records[-capacity:]
        start = self._written % capacity
        head = min(len(marks), capacity - start)
        for column, values in ((self._who, marks), (self._records, records)):
            column[start : start + head] = values[:head]
            column[: len(values) - head] = values[head:]
        self._written += len(marks)

    def of(self, mark: int) -> dict[int, list[Decision]]:
        """The latest decisions about keys of this fingerprint, newest first, by namespace."""
        at = np.flatnonzero(self._who[: len(self)] == np.uint64(mark))
        # Where the ring goes on is where its oldest record is.
        age = (self._written - 1 - at) % len(self._who)
        found: dict[int, list[Decision]] = {}
        for record in self._records[at[np.argsort(age)][:_MOST_SHOWN]]:
            decided = found.setdefault(int(record["namespace"]), [])
            if len(decided) < _MOST_SHOWN_OF_ONE:
                decided.append(_plain(record))
        return found

    def ram_bytes(self) -> int:
        """Bytes of the records so far."""
        return len(self) * (self._who.itemsize + _RECORD.itemsize)


def _plain(record: Any) -> Decision:
    tier, score, kind = int(record["tier"]), float(record["score"]), int(record["kind"])
    return Decision(
        What(int(record["what"])),
        None if tier == EVERY_TIER else tier,
        float(record["at"]),
        None if math.isnan(score) else score,
        None if kind == NO_CLASS else kind,
    )
