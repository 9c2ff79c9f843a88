"""Trace recorder: records requests as hashed keys, so that a trace shows repetition and no content.

A client sends several messages per prompt: a lookup of every k-th key and then of all, a lookup and then an
acquire, or several parts of a long prompt. Messages within one second that belong together are one request.
Each recording hashes with a secret of its own. Of a long prompt only the requested parts are known: clients
stop at the first block that is not stored.

Only requests for chains are recorded: those for independent blocks, such as windows and states, belong to the
prompt of a chain, and their keys are no prefix.

Not covered: hits, and stored blocks.
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
_ENTRY_BYTES = 512  # approximate memory of an entry without its hashes
_MAX_COMPARED = 64  # lookups with the same first key that an acquire is compared with
_READ_BYTES, _READ_REQUESTS = 256 << 10, 256  # larger answers would delay other requests
_HASH_BYTES = 8


@dataclass(slots=True, eq=False)
class _Request:
    """A recorded request.

    `is_lookup`: its latest message was a lookup, so its acquire may follow. `full`: that message had the
    maximum number of keys, so more parts may follow. `acquired_bytes`: length of the acquired hashes.
    """

    namespace: bytes
    at: float
    block_tokens: int
    hashes: bytes
    is_lookup: bool
    full: bool
    acquired_bytes: int


class TraceRecorder:
    """Has at most one recording, of one connection. Drops and counts requests when its memory is full."""

    def __init__(self, now: Callable[[], float], limit: Callable[[], int]) -> None:
        """`now` returns the event loop's time in s, `limit` the maximum number of keys in a message."""
        self._now = now
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self.owner, self._began, self._ends = 0, 0.0, 0.0
        self._max_bytes = self._bytes = self._dropped = 0
        self._secret = b""
        self._requests: deque[_Request] = deque()
        self._latest: dict[tuple[int, bytes], _Request] = {}
        self._asked: dict[tuple[int, int], _Request] = {}
        self._by_first: dict[tuple[bytes, bytes], list[_Request]] = {}

    @property
    def running(self) -> bool:
        """Whether requests are recorded now."""
        return self.owner != 0 and self._now() < self._ends

    def start(self, connection: int, seconds: float, max_bytes: int) -> None:
        """Starts a recording of `seconds` that keeps at most `max_bytes`. Raises MisuseError."""
        if self.owner:
            raise MisuseError("a recording is under way", "one at a time: wait until it ends")
        if not 0 < seconds <= MOST_SECONDS:
            raise MisuseError(f"a recording of {seconds:g} s", "more than 0 s, at most a day")
        if not LEAST_BYTES <= max_bytes <= MOST_BYTES:
            raise MisuseError(f"a recording of {max_bytes} bytes", f"{LEAST_BYTES} to {MOST_BYTES}")
        self._reset()
        self._secret = secrets.token_bytes(32)
        self.owner, self._max_bytes, self._began = connection, max_bytes, self._now()
        self._ends = self._began + seconds

    def leave(self, connection: int) -> None:
        """Ends the recording of a closed connection."""
        if connection == self.owner:
            self._reset()
        self._latest = {at: request for at, request in self._latest.items() if at[0] != connection}
        self._asked = {at: request for at, request in self._asked.items() if at[0] != connection}

    # -- requests

    def looked_up(
        self, connection: int, number: int, namespace: NamespaceEntry, key_bytes: int, keys: bytes
    ) -> None:
        """Records a lookup of keys, which is request `number` of the connection."""
        if not self._records(namespace, keys):
            return
        hashes, full = self._hashes(namespace, key_bytes, keys), len(keys) // key_bytes >= self._limit()
        last = self._last(connection, namespace)
        if last is not None and last.is_lookup and _samples(last.hashes, hashes):
            self._replace(connection, last, hashes, full)
        elif last is not None and last.is_lookup and last.full:
            self._replace(connection, last, last.hashes + hashes, full)
        else:
            self._add(connection, namespace, hashes, True, full)
        self._await(connection, number, namespace)

    def acquired(
        self, connection: int, number: int, namespace: NamespaceEntry, key_bytes: int, keys: bytes
    ) -> None:
        """Records an acquire of keys, which is request `number` of the connection."""
        if not self._records(namespace, keys):
            return
        self._acquired(connection, namespace, key_bytes, keys)
        self._await(connection, number, namespace)

    def _acquired(self, connection: int, namespace: NamespaceEntry, key_bytes: int, keys: bytes) -> None:
        hashes, full = self._hashes(namespace, key_bytes, keys), len(keys) // key_bytes >= self._limit()
        last = self._last(connection, namespace)
        if last is not None and not last.is_lookup and last.full:
            # This is the next part of the prompt that the connection is acquiring.
            rest = last.hashes[last.acquired_bytes :]
            if rest.startswith(hashes):
                last.acquired_bytes, last.full = last.acquired_bytes + len(hashes), full
                return
            if not rest:
                self._replace(connection, last, last.hashes + hashes, full)
                return
        for request in self._by_first.get((namespace.fingerprint, hashes[:_HASH_BYTES]), [])[-_MAX_COMPARED:]:
            # Another connection may have sent the lookup: engines look up and acquire in different processes.
            recent = self._now() - request.at <= _TOGETHER_S
            if request.is_lookup and recent and request.hashes.startswith(hashes):
                request.is_lookup, request.full, request.acquired_bytes = False, full, len(hashes)
                self._latest[connection, namespace.fingerprint] = request
                return
        self._add(connection, namespace, hashes, False, full)

    def answered(self, connection: int, number: int, blocks: int) -> None:
        """Notes how many blocks an answer had. After fewer than the maximum, no further part follows."""
        request = self._asked.pop((connection, number), None)
        if request is not None and blocks < self._limit():
            request.full = False

    def _records(self, namespace: NamespaceEntry, keys: bytes) -> bool:
        independent = namespace.layout is not None and namespace.layout.independent
        return bool(keys) and self.running and not independent

    def _await(self, connection: int, number: int, namespace: NamespaceEntry) -> None:
        """Notes that a message of the connection's latest request in a namespace will be answered."""
        latest = self._latest.get((connection, namespace.fingerprint))
        if latest is not None:
            self._asked[connection, number] = latest

    def _last(self, connection: int, namespace: NamespaceEntry) -> _Request | None:
        """Returns the connection's latest request for this namespace, if it was made in the last second."""
        last = self._latest.get((connection, namespace.fingerprint))
        if last is None or self._now() - last.at > _TOGETHER_S:
            return None
        return last

    def _hashes(self, namespace: NamespaceEntry, key_bytes: int, keys: bytes) -> bytes:
        start, out = blake2b(namespace.fingerprint, digest_size=_HASH_BYTES, key=self._secret), []
        for at in range(0, len(keys), key_bytes):
            one = start.copy()
            one.update(keys[at : at + key_bytes])
            out.append(one.digest())
        return b"".join(out)

    def _add(
        self, connection: int, namespace: NamespaceEntry, hashes: bytes, is_lookup: bool, full: bool
    ) -> None:
        tokens = namespace.layout.block_tokens if namespace.layout is not None else 0
        acquired_bytes = 0 if is_lookup else len(hashes)
        request = _Request(
            namespace.fingerprint, self._now(), tokens, hashes, is_lookup, full, acquired_bytes
        )
        if self._index(connection, request):
            self._requests.append(request)

    def _replace(self, connection: int, request: _Request, hashes: bytes, full: bool) -> None:
        """Gives a request longer hashes. Drops the request if they do not fit."""
        self._unindex(request)
        request.hashes, request.full = hashes, full
        request.acquired_bytes = 0 if request.is_lookup else len(hashes)
        if not self._index(connection, request):
            self._requests.remove(request)

    def _index(self, connection: int, request: _Request) -> bool:
        """Counts a request's memory and makes it the latest of its namespace on the connection.

        Returns whether it fits.
        """
        size = _ENTRY_BYTES + len(request.hashes)
        if self._bytes + size > self._max_bytes:
            self._latest.pop((connection, request.namespace), None)
            self._dropped += 1
            return False
        self._bytes += size
        self._by_first.setdefault(_first(request), []).append(request)
        self._latest[connection, request.namespace] = request
        return True

    def _unindex(self, request: _Request) -> None:
        self._bytes -= _ENTRY_BYTES + len(request.hashes)
        same = self._by_first[_first(request)]
        same.remove(request)
        if not same:
            del self._by_first[_first(request)]

    # -- reading

    def read(self) -> tuple[bytes, int, bool]:
        """Removes finished requests. Returns these, the number of dropped ones, and whether it has ended."""
        now, out, size = self._now(), list[bytes](), 0
        over = now >= self._ends
        while self._requests and size < _READ_BYTES and len(out) < 2 * _READ_REQUESTS:
            if not over and now - self._requests[0].at <= _TOGETHER_S:
                break
            request = self._requests.popleft()
            self._unindex(request)
            keys = len(request.hashes) // _HASH_BYTES
            head = REQUEST_RECORD.pack(request.at - self._began, request.block_tokens, keys)
            out += [head, request.hashes]
            size += len(head) + len(request.hashes)
        dropped, ended = self._dropped, over and not self._requests
        if ended:
            self._reset()
        return b"".join(out), dropped, ended


def _first(request: _Request) -> tuple[bytes, bytes]:
    return request.namespace, request.hashes[:_HASH_BYTES]


def _samples(some: bytes, every: bytes) -> bool:
    """Returns whether `some` is every k-th hash of `every`, starting with the k-th, for a k above 1."""
    sample, whole = np.frombuffer(some, "<u8"), np.frombuffer(every, "<u8")
    at = np.flatnonzero(whole == sample[0])
    if not len(at) or not at[0]:
        return False
    kept = whole[at[0] :: at[0] + 1]
    return len(kept) <= len(sample) and bool((kept == sample[: len(kept)]).all())
