"""Records what is asked for, as hashes under a secret of the recording: which prompts come back, not which.

A prompt is asked for in several messages: a look-up of every k-th key, then of all; a look-up, then an
acquire; parts, where it is longer than a call may be. What belongs together within a second is one request.
Of a longer prompt only the parts that were asked for are known: clients stop at the first that is not stored.

Not covered: what was found, and what was stored.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvstore.daemon.tenancy.namespaces import NamespaceEntry
from kvstore.errors import MisuseError
from kvstore.wire.messages import REQUEST_RECORD

MOST_SECONDS = 86400.0
LEAST_BYTES, MOST_BYTES = 1 << 16, 1 << 30

_TOGETHER_S = 1.0
_ENTRY_BYTES = 512  # what an entry takes besides its hashes, about
_ALIKE = 64  # look-ups with the same start that an acquire is compared with
_READ_BYTES, _READ_REQUESTS = 256 << 10, 256  # more at a time would hold up what others ask for
_HASH_BYTES = 8


@dataclass(slots=True, eq=False)
class _Asked:
    """One request: hashes of its keys, `seen` of them by its latest message, which was `full` or not.

    `looked`: that was a look-up, whose acquire may still come.
    """

    namespace: bytes
    at: float
    block_tokens: int
    hashes: bytes
    looked: bool
    full: bool
    seen: int


class TraceRecorder:
    """At most one recording, of one connection. Full means that requests are dropped, and counted."""

    def __init__(self, now: Callable[[], float], limit: Callable[[], int]) -> None:
        """`limit`: how many keys a call may have."""
        self._now = now
        self._limit = limit
        self.owner = 0
        self._forget()

    def _forget(self) -> None:
        self.owner, self._began, self._ends = 0, 0.0, 0.0
        self._max_bytes = self._bytes = self._dropped = 0
        self._secret = b""
        self._asked: deque[_Asked] = deque()
        self._latest: dict[int, _Asked] = {}
        self._by_first: dict[tuple[bytes, bytes], list[_Asked]] = {}

    @property
    def running(self) -> bool:
        """Whether requests are recorded now."""
        return self.owner != 0 and self._now() < self._ends

    def start(self, connection: int, seconds: float, max_bytes: int) -> None:
        """Records for so long, keeping at most so many bytes. Raises MisuseError if it can't be."""
        if self.owner:
            raise MisuseError("a recording is under way", "one at a time: wait until it ends")
        if not 0 < seconds <= MOST_SECONDS:
            raise MisuseError(f"a recording of {seconds:g} s", "more than 0 s, at most a day")
        if not LEAST_BYTES <= max_bytes <= MOST_BYTES:
            raise MisuseError(f"a recording of {max_bytes} bytes", f"{LEAST_BYTES} to {MOST_BYTES}")
        self._forget()
        self._secret = secrets.token_bytes(32)
        self.owner, self._max_bytes, self._began = connection, max_bytes, self._now()
        self._ends = self._began + seconds

    def leave(self, connection: int) -> None:
        """A connection has ended, and with it its recording."""
        if connection == self.owner:
            self._forget()
        self._latest.pop(connection, None)

    # -- requests

    def looked_up(self, connection: int, space: NamespaceEntry, key_bytes: int, keys: bytes) -> None:
        """A connection has looked keys up."""
        if not keys or not self.running:
            return
        hashes, now = self._hashes(space, key_bytes, keys), self._now()
        full = len(keys) // key_bytes >= self._limit()
        last = self._last(connection, space, now)
        if last is not None and last.looked and _samples(last.hashes, hashes):
            self._lengthen(connection, last, hashes, full)
        elif last is not None and last.looked and last.full:
            self._lengthen(connection, last, last.hashes + hashes, full)
        else:
            self._add(connection, _Asked(space.fingerprint, now, _tokens(space), hashes, True, full, 0))

    def acquired(self, connection: int, space: NamespaceEntry, key_bytes: int, keys: bytes) -> None:
        """A connection has acquired keys."""
        if not keys or not self.running:
            return
        hashes, now = self._hashes(space, key_bytes, keys), self._now()
        full = len(keys) // key_bytes >= self._limit()
        last = self._last(connection, space, now)
        if last is not None and not last.looked and last.full:
            # The next part of what this connection is acquiring.
            rest = last.hashes[last.seen :]
            if rest.startswith(hashes):
                last.seen, last.full = last.seen + len(hashes), full
                return
            if not rest:
                self._lengthen(connection, last, last.hashes + hashes, full)
                return
        for asked in self._by_first.get((space.fingerprint, hashes[:_HASH_BYTES]), [])[-_ALIKE:]:
            # Whoever looks up need not be who acquires: engines do the two in different processes.
            if asked.looked and now - asked.at <= _TOGETHER_S and asked.hashes.startswith(hashes):
                asked.looked, asked.full, asked.seen = False, full, len(hashes)
                self._latest[connection] = asked
                return
        asked = _Asked(space.fingerprint, now, _tokens(space), hashes, False, full, len(hashes))
        self._add(connection, asked)

    def answered(self, connection: int, blocks: int) -> None:
        """A connection was told so many blocks: with less than a call may have, no further part follows."""
        last = self._latest.get(connection) if self.running else None
        if last is not None and blocks < self._limit():
            last.full = False

    def _last(self, connection: int, space: NamespaceEntry, now: float) -> _Asked | None:
        """What a connection asked for in this namespace just before."""
        last = self._latest.get(connection)
        if last is None or last.namespace != space.fingerprint or now - last.at > _TOGETHER_S:
            return None
        return last

    def _hashes(self, space: NamespaceEntry, key_bytes: int, keys: bytes) -> bytes:
        start, out = blake2b(space.fingerprint, digest_size=_HASH_BYTES, key=self._secret), []
        for at in range(0, len(keys), key_bytes):
            one = start.copy()
            one.update(keys[at : at + key_bytes])
            out.append(one.digest())
        return b"".join(out)

    def _add(self, connection: int, asked: _Asked) -> None:
        if self._bytes + _ENTRY_BYTES + len(asked.hashes) > self._max_bytes:
            self._latest.pop(connection, None)
            self._dropped += 1
            return
        self._asked.append(asked)
        self._put(asked)
        self._latest[connection] = asked

    def _lengthen(self, connection: int, asked: _Asked, hashes: bytes, full: bool) -> None:
        """What was asked for turns out to be longer; it is dropped if there is no room for that."""
        self._remove(asked)
        if self._bytes + _ENTRY_BYTES + len(hashes) > self._max_bytes:
            self._asked.remove(asked)
            self._latest.pop(connection, None)
            self._dropped += 1
            return
        asked.hashes, asked.full = hashes, full
        asked.seen = 0 if asked.looked else len(hashes)
        self._put(asked)
        self._latest[connection] = asked

    def _put(self, asked: _Asked) -> None:
        self._bytes += _ENTRY_BYTES + len(asked.hashes)
        self._by_first.setdefault(_first(asked), []).append(asked)

    def _remove(self, asked: _Asked) -> None:
        self._bytes -= _ENTRY_BYTES + len(asked.hashes)
        same = self._by_first[_first(asked)]
        same.remove(asked)
        if not same:
            del self._by_first[_first(asked)]

    # -- out

    def read(self) -> tuple[bytes, int, bool]:
        """(requests to which nothing more can come, how many were dropped, whether that was all)."""
        now, out, size = self._now(), list[bytes](), 0
        over = now >= self._ends
        while self._asked and size < _READ_BYTES and len(out) < 2 * _READ_REQUESTS:
            if not over and now - self._asked[0].at <= _TOGETHER_S:
                break
            asked = self._asked.popleft()
            self._remove(asked)
            head = REQUEST_RECORD.pack(
                asked.at - self._began, asked.block_tokens, len(asked.hashes) // _HASH_BYTES
            )
            out += [head, asked.hashes]
            size += len(head) + len(asked.hashes)
        dropped, ended = self._dropped, over and not self._asked
        if ended:
            self._forget()
        return b"".join(out), dropped, ended


def _tokens(space: NamespaceEntry) -> int:
    return space.layout.block_tokens if space.layout is not None else 0


def _first(asked: _Asked) -> tuple[bytes, bytes]:
    return asked.namespace, asked.hashes[:_HASH_BYTES]


def _samples(some: bytes, every: bytes) -> bool:
    """Whether `some` are every k-th of the others, k above 1, from the k-th on."""
    sample, whole = np.frombuffer(some, "<u8"), np.frombuffer(every, "<u8")
    at = np.flatnonzero(whole == sample[0])
    if not len(at) or not at[0]:
        return False
    kept = whole[at[0] :: at[0] + 1]
    return len(kept) <= len(sample) and bool((kept == sample[: len(kept)]).all())
