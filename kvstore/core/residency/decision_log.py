"""A ring of the latest decisions about blocks: evicted, refused, not written to a lower tier, and so on.

To look up a key, the keys of the whole ring are compared, because this is rare. Newer records are read page
by page.

Not covered: why a policy ordered blocks as it did. A record has the expected reuse, if it is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvstore.core.blocks.block_table import Blocks, Rows
from kvstore.core.blocks.key_batch import Keys, Words
from kvstore.core.reuse.classes import CLASS_MASK
from kvstore.core.reuse.reuse import Reuse
from kvstore.types import MAX_KEY_BYTES

CAPACITY = 1 << 16
"""Records in the ring: 82 bytes each, 5.1 MiB in all."""

EVERY_TIER = 0xFF
NO_CLASS = 0xFF
NOBODY = -1

_MOST_SHOWN = 256
_MOST_SHOWN_OF_ONE = 8
_READ_AT_ONCE = 1 << 12
"""Records read for one page. More would delay other requests."""
_NUMBERS = 1 << 16


class DecisionKind(IntEnum):
    """The kinds of decisions about blocks. `meaning` is the documentation of each."""

    meaning: str

    def __new__(cls, value: int, meaning: str = "") -> DecisionKind:
        """Makes a member of its number and its meaning."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    EVICTED = 1, "A copy of the block was evicted from the tier. Another tier has a copy."
    DEMOTED = 2, "The block was evicted from the tier after it was written to a lower tier."
    DROPPED = 3, "The last copy of the block was evicted."
    REFUSED = (
        4,
        "Not stored: admission rejected the block, or it was worth less than the stored blocks.",
    )
    DENIED = 5, "Not stored: there was no room for the block."
    UNWRITTEN = 6, "The block was not written to a lower tier: its device accepted no more writes."
    INVALIDATED = 7, "A client invalidated the block."
    EXPIRED = 8, "The TTL of the block ended."
    QUARANTINED = 9, "The copy was corrupt. Its slot is not used again."
    LOST = 10, "The copy was lost with its device."


@dataclass(frozen=True, slots=True)
class Decision:
    """One record. `tier` None: all tiers. `score` (expected uses/s) and `kind` (its class) None: unknown."""

    what: DecisionKind
    tier: int | None
    at: float
    score: float | None
    kind: int | None


@dataclass(frozen=True, slots=True)
class Noted:
    """One record with its block. `place`: the number of earlier records."""

    place: int
    namespace: int
    key: bytes
    decision: Decision


_RECORD = np.dtype(
    [
        *(("at", "<f8"), ("score", "<f4"), ("namespace", "<u2")),
        *(("tier", "u1"), ("what", "u1"), ("kind", "u1"), ("key_bytes", "u1")),
    ]
)


class Decisions:
    """The latest `capacity` decisions about blocks.

    `blocks_by_what` counts blocks since the start, by kind of decision and tier (or `EVERY_TIER`). `written`
    counts all records.
    """

    def __init__(self, blocks: Blocks, reuse: Reuse, capacity: int = CAPACITY) -> None:
        self._blocks = blocks
        self._reuse = reuse
        self._records = np.zeros(capacity, _RECORD)
        self._keys = np.zeros((capacity, MAX_KEY_BYTES // 8), np.uint64)
        self.written = 0
        self.blocks_by_what: Counter[tuple[DecisionKind, int]] = Counter()

    def __len__(self) -> int:
        return min(self.written, len(self._records))

    def record(self, what: DecisionKind, tier: int, rows: Rows, now: float, tenant: int = NOBODY) -> None:
        """Records a decision about rows, which still have their keys, in a tier (or `EVERY_TIER`).

        With their `tenant`, the records keep the expected reuse of the blocks.
        """
        if len(rows):
            kinds, score = self._reuse.history.kinds(rows), np.full(len(rows), np.nan, np.float32)
            if tenant != NOBODY:
                score = self._reuse.density(tenant, kinds, self._reuse.history.last_used(rows), now)
            about = self._blocks.some_words(rows), self._blocks.key_bytes[rows]
            self._append(what, tier, self._blocks.namespace[rows], about, now, score, kinds & CLASS_MASK)

    def record_keys(
        self,
        what: DecisionKind,
        tier: int,
        namespace: int,
        keys: Keys,
        which: npt.NDArray[np.bool_],
        now: float,
    ) -> None:
        """Records a decision about the keys that `which` marks. They may have no rows."""
        if which.any():
            about = keys.words[which], keys.size
            self._append(what, tier, namespace, about, now, math.nan, NO_CLASS)

    def _append(
        self,
        what: DecisionKind,
        tier: int,
        namespaces: int | npt.NDArray[np.uint16],
        about: tuple[Words, int | npt.NDArray[np.uint8]],
        now: float,
        score: float | npt.NDArray[np.float32],
        kind: int | npt.NDArray[np.int64],
    ) -> None:
        words, key_bytes = about
        self.blocks_by_what[what, tier] += len(words)
        capacity = len(self._records)
        records = np.empty(len(words), _RECORD)
        records["at"], records["score"], records["namespace"] = now, score, namespaces
        records["tier"], records["what"], records["kind"] = tier, what, kind
        records["key_bytes"] = key_bytes
        start = self.written % capacity
        n = min(len(words), capacity)
        head = min(n, capacity - start)
        for column, all_values in (self._records, records), (self._keys[:, : words.shape[1]], words):
            values = all_values[-n:]
            column[start : start + head] = values[:head]
            column[: n - head] = values[head:]
        self.written += len(words)

    def disown(self, namespace: int) -> None:
        """Removes the namespace from earlier records, before its number is reused."""
        numbers = self._records["namespace"][: len(self)]
        numbers[numbers == namespace] = 0

    def of(self, words: npt.NDArray[np.uint64], key_bytes: int) -> dict[int, list[Decision]]:
        """Returns the latest decisions about a key, newest first, by namespace."""
        last = len(words) - 1
        at = np.flatnonzero(self._keys[: len(self), last] == words[last])
        at = at[(self._keys[at, :last] == words[:last]).all(axis=1)]
        at = at[self._records["key_bytes"][at] == key_bytes]
        # The oldest record is the next to be overwritten.
        age = (self.written - 1 - at) % len(self._records)
        found: dict[int, list[Decision]] = {}
        for when, score, namespace, *rest in self._records[at[np.argsort(age)][:_MOST_SHOWN]].tolist():
            decided = found.setdefault(namespace, [])
            if len(decided) < _MOST_SHOWN_OF_ONE:
                decided.append(_plain(when, score, *rest[:3]))
        return found

    def after(
        self, place: int, limit: int, what: Iterable[int] = (), namespaces: Iterable[int] | None = None
    ) -> tuple[list[Noted], int]:
        """Returns up to `limit` records after the first `place` ones, and the place to continue from.

        `what` selects kinds (empty: all), `namespaces` namespaces (None: all).
        """
        start = max(place, self.written - len(self))
        first = start % len(self._records)
        # At most up to the end of the array, so that no copy is needed.
        records = self._records[first : first + max(0, min(_READ_AT_ONCE, self.written - start))]
        wanted = np.ones(len(records), np.bool_)
        for field, values in (("what", what or None), ("namespace", namespaces)):
            if values is not None:
                among = np.zeros(_NUMBERS, np.bool_)
                among[list(values)] = True
                wanted &= among[records[field]]
        which = np.flatnonzero(wanted)
        seen = len(records) if len(which) <= limit else int(which[limit - 1]) + 1
        which = which[:limit]
        words, raws = self._keys[first + which], records[which].tolist()
        noted = [
            Noted(start + i, namespace, key.tobytes()[:key_bytes], _plain(at, score, *rest))
            for i, key, (at, score, namespace, *rest, key_bytes) in zip(
                which.tolist(), words, raws, strict=True
            )
        ]
        return noted, start + seen

    def ram_bytes(self) -> int:
        """Returns the bytes of the records so far."""
        return len(self) * (_RECORD.itemsize + MAX_KEY_BYTES)


def _plain(at: float, score: float, tier: int, what: int, kind: int) -> Decision:
    return Decision(
        DecisionKind(what),
        None if tier == EVERY_TIER else tier,
        at,
        None if math.isnan(score) else score,
        None if kind == NO_CLASS else kind,
    )
